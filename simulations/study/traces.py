"""Failure traces: files of three forms into events, and what the events look like.

Intuition: the best failure model is what happened. A trace says when nodes went and when they came
back; its statistics (how often, in bursts or alone, with which hazard, for how long) say which
model of ``hazards.py`` fits, and its losses can drive the simulator in place of any model.

Contract: `load` reads a step curve (rows ``seconds,count``; each change is two rows at one time,
before and after), samples (header ``index,Time,GPUs``), or incidents (the header of the LANL
failure data of the USENIX CFDR). A bad cell is a FormatError that names file, line and column.
Times are seconds since the start of the trace. Fits are by maximum likelihood.

Consequence: curves and samples know counts, not names. Which node returned is then a convention:
whoever went first comes back first, and the times to return rest on it. Between two samples a node
may go and come unseen, so a sampled trace counts too few losses.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from p2pckpt.errors import FormatError

BURST_WINDOW_S = 120.0
"""Ford et al. (OSDI'10, section 4.1): failures this close to the next one are one burst."""

LATEST = 1e12
"""Of a time, in any unit: thirty thousand years of seconds."""
MOST_LOST = 1_000_000
"""Nodes lost in one trace: each is one event in memory."""
UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0}
SAMPLES = (("index", "Time", "GPUs"), ("", "Time", "GPUs"))
LANL_BEGAN, LANL_FIXED = "Prob Started (mm/dd/yy hh:mm)", "Prob Fixed (mm/dd/yy hh:mm)"


class Event(NamedTuple):
    """At one time: how many nodes were lost and how many (re)turned; their names, if known."""

    at_s: float
    lost: int
    returned: int
    names: tuple[str, ...] = ()


class Incident(NamedTuple):
    """One outage of a named node; ``fixed`` is None where no end after ``began`` is recorded."""

    system: str
    node: str
    began: datetime
    fixed: datetime | None


@dataclass(frozen=True)
class Trace:
    """What a file says: ``most`` nodes at once, ``duration_s``, and the events by time.

    ``repairs_s``: the times to return that are known, or follow from first gone, first back.
    """

    name: str
    form: str
    most: int
    duration_s: float
    events: tuple[Event, ...]
    repairs_s: tuple[float, ...]

    def losses(self) -> list[tuple[float, int]]:
        """(seconds, nodes lost at once) of each loss, as `hazards.replay` takes it."""
        return [(event.at_s, event.lost) for event in self.events if event.lost]


# -- statistics ------------------------------------------------------------------------------------


class Weibull(NamedTuple):
    """A fit: shape with its 95 % interval, scale in the unit of the gaps, from how many gaps."""

    shape: float
    low: float
    high: float
    scale: float
    gaps: int


class Lognormal(NamedTuple):
    """Mean and standard deviation of the logarithm of minutes, from how many returns."""

    mu: float
    sigma: float
    returns: int

    @property
    def median_min(self) -> float:
        """Minutes within which half of them were back."""
        return math.exp(self.mu)


class Bursts(NamedTuple):
    """``share`` of node losses that are in a burst of two or more; ``largest``: nodes in one."""

    share: float
    largest: int


@dataclass(frozen=True)
class Statistics:
    """What `describe` found. ``losses``: times at which nodes were lost, however many."""

    losses: int
    nodes_lost: int
    nodes_returned: int
    mtbf_s: float | None
    node_rate_per_1000_days: float | None
    shape: Weibull | None
    bursts: Bursts
    repair: Lognormal | None


def fit_weibull(gaps: ArrayLike) -> Weibull | None:
    """Maximum likelihood for positive gaps; zeros are left out. None for less than 3 or all alike.

    The shape is the root of sum(x^k ln x)/sum(x^k) - 1/k = mean(ln x), which grows in k; its
    interval is exp(+-1.96 sqrt(0.6079/n)) around it (asymptotic; Bain and Engelhardt 1991, ch. 4).
    """
    x = np.asarray(gaps, np.float64)
    x = x[x > 0]
    if len(x) < 3 or x.min() == x.max():
        return None
    logs = np.log(x / x.max())  # scaled, so that no power overflows
    low, high = 1e-3, 1e3
    while high / low > 1 + 1e-12:
        k = math.sqrt(low * high)
        weights = np.exp(k * logs)
        over = float((weights * logs).sum() / weights.sum()) - 1 / k > float(logs.mean())
        low, high = (low, k) if over else (k, high)
    spread = math.exp(1.96 * math.sqrt(6.0) / math.pi / math.sqrt(len(x)))
    scale = float(x.max()) * float(np.exp(low * logs).mean()) ** (1 / low)
    return Weibull(low, low / spread, low * spread, scale, len(x))


def fit_lognormal(durations_s: ArrayLike) -> Lognormal | None:
    """Maximum likelihood for positive durations, in log-minutes. None for less than 3."""
    x = np.asarray(durations_s, np.float64)
    x = x[x > 0]
    if len(x) < 3:
        return None
    logs = np.log(x / 60.0)
    return Lognormal(float(logs.mean()), float(logs.std()), len(x))


def find_bursts(losses: Sequence[tuple[float, str]], window_s: float = BURST_WINDOW_S) -> Bursts:
    """Ford's rule: a burst is a longest run of losses, each within ``window_s`` of the next.

    ``losses`` are (time, node) by time; a burst is as large as it has distinct nodes.
    """
    runs: list[list[str]] = []
    before = -math.inf
    for at_s, node in losses:
        if at_s - before > window_s:
            runs.append([])
        runs[-1].append(node)
        before = at_s
    together = sum(len(run) for run in runs if len(set(run)) > 1)
    largest = max((len(set(run)) for run in runs), default=0)
    return Bursts(together / len(losses) if losses else 0.0, largest)


def describe(trace: Trace) -> Statistics:
    """Statistics of a trace; None for what too few events do not tell."""
    losses = trace.losses()
    times = [at_s for at_s, _ in losses]
    lost = sum(count for _, count in losses)
    node_days = trace.most * trace.duration_s / 86400.0
    named = [
        (event.at_s, event.names[i] if event.names else f"{event.at_s} {i}")
        for event in trace.events
        for i in range(event.lost)
    ]
    bursts = find_bursts(named)  # where names are not known, a node may be lost twice in one
    return Statistics(
        losses=len(losses),
        nodes_lost=lost,
        nodes_returned=sum(event.returned for event in trace.events),
        mtbf_s=trace.duration_s / len(losses) if losses else None,
        node_rate_per_1000_days=1000.0 * lost / node_days if node_days else None,
        shape=fit_weibull(np.diff(times)) if times else None,
        bursts=bursts._replace(largest=min(bursts.largest, trace.most)),
        repair=fit_lognormal(trace.repairs_s),
    )


# -- loading ---------------------------------------------------------------------------------------


def load(path: Path, time_unit: str = "s", gpus_per_node: int = 1) -> Trace:
    """The trace in a file of any of the three forms.

    ``time_unit`` ("s", "min", "h") is that of a step curve; ``gpus_per_node`` divides the counts of
    samples. Raises FormatError for what is in none of the forms.
    """
    rows = _Rows(path)
    first = rows.cells(0) if rows.lines else ()
    if first in SAMPLES:
        return _counted(path.name, "samples", list(_samples(rows, gpus_per_node)))
    if LANL_BEGAN in first:
        return trace_of(path.name, load_incidents(path))
    if len(first) == 2 and _is_number(first[0]):
        return _counted(path.name, "step curve", list(_steps(rows, UNITS_S[time_unit])))
    raise FormatError(
        f"{path.name}, line 1, column 1: needs a row `seconds,count`, the header "
        f"`index,Time,GPUs`, or that of the LANL data; found {','.join(first)[:60]!r}"
    )


def load_incidents(path: Path) -> list[Incident]:
    """Outages of LANL's failure data (CFDR), by time. Raises FormatError."""
    rows = _Rows(path)
    header = rows.cells(0) if rows.lines else ()
    columns = ("System", "nodenumz", LANL_BEGAN, LANL_FIXED)
    for name in columns:
        if name not in header:
            raise FormatError(f"{path.name}, line 1: needs the column {name!r}")
    where = [header.index(name) for name in columns]
    found = []
    for line in range(1, len(rows.lines)):
        cells = rows.cells(line, width=len(header))
        began = rows.date(line, where[2], cells)
        fixed = rows.date(line, where[3], cells) if cells[where[3]] else None
        over = fixed if fixed is not None and fixed > began else None
        found.append(Incident(cells[where[0]], cells[where[1]], began, over))
    return sorted(found, key=lambda one: one.began)


def trace_of(name: str, incidents: Sequence[Incident]) -> Trace:
    """Incidents by time as a trace: a node is lost when one began, and back when it was fixed."""
    changes: dict[float, tuple[list[str], list[str]]] = {}
    repairs = []
    for one in incidents:
        node = f"{one.system}/{one.node}"
        at_s = (one.began - incidents[0].began).total_seconds()
        changes.setdefault(at_s, ([], []))[0].append(node)
        if one.fixed is not None:
            repairs.append((one.fixed - one.began).total_seconds())
            changes.setdefault(at_s + repairs[-1], ([], []))[1].append(node)
    events = tuple(
        Event(at_s, len(gone), len(back), (*gone, *back))
        for at_s, (gone, back) in sorted(changes.items())
    )
    nodes = {(one.system, one.node) for one in incidents}
    duration_s = events[-1].at_s if events else 0.0
    return Trace(name, "incidents", len(nodes), duration_s, events, tuple(repairs))


def _counted(name: str, form: str, counts: list[tuple[float, int]]) -> Trace:
    """A trace from (seconds, nodes that are there from then on), by time."""
    events: list[Event] = []
    repairs: list[float] = []
    gone: deque[float] = deque()
    start_s = counts[0][0] if counts else 0.0
    if (
        lost := sum(max(0, before - now) for (_, before), (_, now) in pairwise(counts))
    ) > MOST_LOST:
        raise FormatError(f"{name}: {lost} nodes were lost, needs at most {MOST_LOST}")
    for (_, before), (at_s, now) in pairwise(counts):
        at_s -= start_s
        if now < before:
            gone.extend([at_s] * (before - now))
            events.append(Event(at_s, before - now, 0))
        elif now > before:
            back = [gone.popleft() for _ in range(min(len(gone), now - before))]
            repairs += [at_s - since for since in back]
            events.append(Event(at_s, 0, now - before))
    duration_s = counts[-1][0] - start_s if counts else 0.0
    most = max((count for _, count in counts), default=0)
    return Trace(name, form, most, duration_s, tuple(events), tuple(repairs))


def _steps(rows: _Rows, unit_s: float) -> Iterator[tuple[float, int]]:
    before_s, count = 0.0, 0
    for line in range(len(rows.lines)):
        cells = rows.cells(line, width=2)
        at_s = rows.number(line, 0, cells) * unit_s
        now = rows.count(line, 1, cells)
        if line and at_s < before_s:
            raise rows.wrong(line, 0, f"a time from {before_s / unit_s:g} on", cells[0])
        if line and at_s > before_s and now != count:
            raise rows.wrong(line, 1, f"the count before the change, {count}", cells[1])
        yield at_s, now
        before_s, count = at_s, now


def _samples(rows: _Rows, gpus_per_node: int) -> Iterator[tuple[float, int]]:
    before_s = -math.inf
    for line in range(1, len(rows.lines)):
        cells = rows.cells(line, width=3)
        rows.count(line, 0, cells)
        at_s = rows.number(line, 1, cells)
        if at_s <= before_s:
            raise rows.wrong(line, 1, f"a time after {before_s:g}", cells[1])
        gpus = rows.count(line, 2, cells)
        if gpus % gpus_per_node:
            raise rows.wrong(line, 2, f"a multiple of {gpus_per_node} GPUs a node", cells[2])
        yield at_s, gpus // gpus_per_node
        before_s = at_s


class _Rows:
    """Lines of a file, cell by cell, with complaints that say where."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError as e:
            raise FormatError(f"{path.name}: byte {e.start} is no UTF-8 text") from None
        reader = csv.reader(io.StringIO(text))
        try:
            numbered = [(reader.line_num, line) for line in reader if line]
        except csv.Error as e:
            raise FormatError(f"{path.name}, line {reader.line_num}: no CSV: {e}") from None
        self.lines = [line for _, line in numbered]
        self.numbers = [number for number, _ in numbered]

    def wrong(self, line: int, column: int, needs: str, found: str) -> FormatError:
        return FormatError(
            f"{self.name}, line {self.numbers[line]}, column {column + 1}: "
            f"needs {needs}, found {found[:60]!r}"
        )

    def cells(self, line: int, width: int | None = None) -> tuple[str, ...]:
        cells = tuple(cell.strip() for cell in self.lines[line])
        if width is not None and len(cells) != width:
            at = min(len(cells), width)
            raise self.wrong(line, at, f"{width} cells", f"{len(cells)} cells")
        return cells

    def number(self, line: int, column: int, cells: Sequence[str]) -> float:
        value = float(cells[column]) if _is_number(cells[column]) else math.nan
        if not 0 <= value < LATEST:
            needs = f"a number of seconds from 0 to {LATEST:g}"
            raise self.wrong(line, column, needs, cells[column])
        return value

    def count(self, line: int, column: int, cells: Sequence[str]) -> int:
        if not re.fullmatch("0*[0-9]{1,7}", cells[column], re.ASCII):
            raise self.wrong(
                line, column, "a whole number from 0 on (of 7 digits at most)", cells[column]
            )
        return int(cells[column])

    def date(self, line: int, column: int, cells: Sequence[str]) -> datetime:
        try:
            return datetime.strptime(cells[column], "%m/%d/%Y %H:%M")
        except ValueError:
            raise self.wrong(line, column, "a date mm/dd/yyyy hh:mm", cells[column]) from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
