"""The paper checks: published values against closed forms and simulation, a row each.

Intuition: a simulator is believed for what it gets right where the answer is known. Each row of
``published.json`` is one published value: where it stands, what it is, from which numbers it
follows, by which form, and how near one must come. What does not reproduce is a row as well, with
the factor by which it is missed.

Contract: `load` reads the rows and refuses what is unknown, missing or unused. `find` computes and
plays one row; `judge` is pure. A row passes when the computed value is within its tolerance, and
the played one within four standard errors of the computed (or the row's own gate). Each row has a
random stream of its own, by seed and id: rows can be run alone, and in any order.

Consequence: whoever plants a wrong constant, in a row or in a formula, turns its row red. Rows that
need data that is not shipped are counted apart, and fail nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from p2pckpt.errors import ConfigError
from simulations.papers import loss_checks, time_checks
from simulations.papers.finding import Finding, Form, Given
from simulations.study.traces import Incident

PUBLISHED = Path(__file__).with_name("published.json")
FORMS: dict[str, Form] = {**time_checks.FORMS, **loss_checks.FORMS}
SIGMAS = 4.0

Mark = Literal["P", "A", "S", "F", "C", "G"]
MARKS: dict[Mark, str] = {
    "P": "primary text or raw data",
    "A": "abstract or official page",
    "S": "second-hand note",
    "F": "read off a figure",
    "C": "computed from seen numbers",
    "G": "guess",
}


class Accept(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How near to the published value: absolutely or relatively; at least, at most it.

    ``off_by``: known not to reproduce; the computed value is that many times the published one,
    within ``rel``. ``over``: both must at least be above that.
    """

    abs: float | None = None
    rel: float | None = None
    at_least: bool = False
    at_most: bool = False
    off_by: float | None = None
    over: float | None = None

    def __str__(self) -> str:
        parts = []
        if self.off_by is not None:
            parts.append(f"known to be {self.off_by:.4g} times")
        if self.abs is not None:
            parts.append(f"±{self.abs:g}" if self.abs else "exact")
        if self.rel is not None:
            parts.append(f"±{100 * self.rel:g} %")
        if self.over is not None:
            parts.append(f"both over {self.over:g}")
        parts += ["at least"] * self.at_least + ["at most"] * self.at_most
        return ", ".join(parts)


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One row of the data file. ``gate``: relative distance allowed to the played value."""

    id: str
    what: str
    value: float
    unit: str
    source: str
    mark: Mark
    form: str
    given: dict[str, Any]
    accept: Accept
    gate: float | None = None


class Outcome(StrEnum):
    """How a row ended."""

    PASSED = "passed"
    DOCUMENTED = "not reproduced, as documented"
    FAILED = "failed"
    NEEDS_DATA = "needs data"


@dataclass(frozen=True)
class Row:
    """One check with its result; what is None does not exist for this row."""

    id: str
    what: str
    unit: str
    published: float
    computed: float | None
    simulated: float | None
    standard_error: float | None
    expected: float | None
    tolerance: str
    gate: str | None
    outcome: Outcome
    note: str
    source: str
    mark: Mark

    @property
    def passed(self) -> bool | None:
        """Whether nothing is wrong with it; None where nothing could be checked."""
        return None if self.outcome is Outcome.NEEDS_DATA else self.outcome is not Outcome.FAILED


def load(path: Path = PUBLISHED) -> list[Published]:
    """The rows of a data file. Raises ConfigError naming what is wrong, and in which row."""
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[Published])
    except msgspec.DecodeError as e:
        raise ConfigError(f"{path.name}: {e}") from None
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise ConfigError(f"{path.name}: {row.id} stands there twice")
        seen.add(row.id)
        if row.form not in FORMS:
            raise ConfigError(f"{path.name}: {row.id}: form {row.form!r} is unknown")
        if row.accept.abs is None and row.accept.rel is None:
            raise ConfigError(f"{path.name}: {row.id}: accept needs abs or rel")
    return rows


def find(row: Published, seed: int | None, lanl: Sequence[Incident] | None = None) -> Finding:
    """Compute a row and, unless ``seed`` is None, play it. Raises ConfigError for its numbers."""
    rng = None
    if seed is not None:
        rng = np.random.default_rng([seed, zlib.crc32(row.id.encode())])
    given = Given(row.id, row.given, lanl)
    finding = FORMS[row.form](given, rng)
    if unused := given.unused():
        raise ConfigError(f"{row.id}: the form {row.form!r} has no use for {sorted(unused)}")
    return finding


def judge(row: Published, finding: Finding) -> Row:
    """The row's result from what was found. Pure."""
    computed, played = finding.computed, finding.played
    expected = computed if finding.expected is None else finding.expected
    faults = []
    if computed is not None and not accepts(row.accept, row.value, computed):
        faults.append("the computed value is out of tolerance")
    if played is not None and expected is not None:
        allowed = SIGMAS * played.se if row.gate is None else row.gate * abs(expected)
        if not abs(played.mean - expected) <= allowed + 1e-12 * abs(expected):
            faults.append("the simulated value is out of its gate")
    documented = row.accept.off_by is not None
    outcome = Outcome.DOCUMENTED if documented else Outcome.PASSED
    if computed is None:
        outcome = Outcome.NEEDS_DATA
    elif faults:
        outcome = Outcome.FAILED
    return Row(
        id=row.id, what=row.what, unit=row.unit, published=row.value, computed=computed,
        simulated=played.mean if played else None, standard_error=played.se if played else None,
        expected=expected if played else None, tolerance=str(row.accept),
        gate=None if not played else f"±{100 * row.gate:g} %" if row.gate else f"{SIGMAS:g} sigma",
        outcome=outcome, note="; ".join([*faults, *filter(None, [finding.note])]),
        source=row.source, mark=row.mark,
    )  # fmt: skip


def accepts(accept: Accept, published: float, computed: float) -> bool:
    """Whether a computed value is near enough to the published one."""
    if not math.isfinite(computed):
        return False
    aim = published * (1.0 if accept.off_by is None else accept.off_by)
    distance = abs(computed - aim)
    return (
        (accept.abs is None or distance <= accept.abs)
        and (accept.rel is None or distance <= accept.rel * abs(aim))
        and (not accept.at_least or computed >= published)
        and (not accept.at_most or computed <= published)
        and (accept.over is None or min(computed, published) >= accept.over)
    )


def check(
    rows: Iterable[Published],
    seed: int,
    lanl: Sequence[Incident] | None = None,
    progress: Callable[[Published], None] = lambda _: None,
) -> list[Row]:
    """All rows, one after the other; ``progress`` hears of each that begins."""
    results = []
    for row in rows:
        progress(row)
        results.append(judge(row, find(row, seed, lanl)))
    return results


def summary(rows: Sequence[Row]) -> Mapping[str, int]:
    """How many rows ended how; every outcome has an entry."""
    return {
        outcome.name.lower(): sum(row.outcome is outcome for row in rows) for outcome in Outcome
    }
