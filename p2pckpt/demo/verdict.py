"""What a campaign of faults found out: what was fired, what it cost, and whether anything differs.

Contract: a Verdict is ok only if faults were fired, every part of it is known and right, nothing
was left behind, and nothing is in `why`. Times are in seconds. What could not be fired is told with
its reason, and is no failure: a slow machine fires fewer.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from p2pckpt.demo.journal import Event, Journal, wrong_digests
from p2pckpt.demo.report import seconds, verdict


@dataclass
class Fired:
    """A fault that struck, ``at_s`` after the first step, when the newest step was ``step``."""

    number: int
    kind: str
    at_s: float
    step: int
    words: str
    survived: bool | None = None


@dataclass
class Recovery:
    """A launch that ended early and the next one that trained. ``after``: numbers of the faults,
    none if ranks ended by themselves. ``launches``: how many starts it took."""

    after: list[int]
    restored_step: int | None
    steps_lost: int
    back_s: float
    launches: int
    sources: dict[str, int]


@dataclass
class Verdict:
    """All that was found out. ``why``: what does not hold. ``refused``: errors of ranks that a
    later launch got over. ``planned`` and ``fired``: faults of each kind."""

    seed: int
    minutes: float
    nodes: int
    racks: int
    layout: str
    ranks: int
    planned: dict[str, int]
    faults: list[Fired] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    launches: int = 0
    recoveries: list[Recovery] = field(default_factory=list)
    steps: int = 0
    committed: int = 0
    saves: dict[str, int] = field(default_factory=dict)
    blocking_median_s: float | None = None
    blocking_max_s: float | None = None
    restores: dict[str, int] = field(default_factory=dict)
    states_compared: int = 0
    state_digests_equal: bool | None = None
    losses_compared: int = 0
    losses_bit_identical: bool | None = None
    full_again_s: float | None = None
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_behind: list[str] | None = None
    why: list[str] = field(default_factory=list)
    seconds: float = 0.0
    run_directory: str | None = None

    @property
    def fired(self) -> dict[str, int]:
        """Faults that struck, of each kind."""
        return dict(Counter(fault.kind for fault in self.faults))

    @property
    def ok(self) -> bool:
        """Does everything hold?"""
        same = self.losses_bit_identical is True and self.state_digests_equal is not False
        survived = bool(self.faults) and all(fault.survived for fault in self.faults)
        return survived and same and self.left_behind == [] and not self.why

    def tell(self, journal: Journal) -> None:
        """Fill in what the ranks wrote down."""
        journal.read()
        self.steps, self.committed = journal.newest(), len(journal.committed())
        for fault in self.faults:
            fault.survived = self.steps > fault.step
        self.saves = dict(Counter(e["status"] for e in journal.of("outcome")))
        blocking = [e["blocking_s"] for e in journal.of("saved")]
        if blocking:
            self.blocking_median_s = statistics.median(blocking)
            self.blocking_max_s = max(blocking)
        restored = journal.of("restored")
        self.restores = sources(restored, journal.of("save"))
        self.states_compared = len(restored)
        if restored:
            wrong = wrong_digests(journal)
            self.state_digests_equal = not wrong
            self.why += wrong[:4]

    def document(self) -> dict[str, Any]:
        """For machines."""
        back = [recovery.back_s for recovery in self.recoveries]
        lost = [recovery.steps_lost for recovery in self.recoveries]
        return {
            **asdict(self),
            "faults_planned": sum(self.planned.values()),
            "faults_fired": len(self.faults),
            "faults_survived": sum(fault.survived is True for fault in self.faults),
            "fired": self.fired,
            "recovery_median_s": statistics.median(back) if back else None,
            "recovery_max_s": max(back, default=None),
            "steps_lost": sum(lost),
            "steps_lost_max": max(lost, default=0),
        }

    def print(self, console: Console) -> None:
        """For people."""
        table = Table(title="Faults", title_justify="left")
        for name in ("kind", "planned", "fired", "survived"):
            table.add_column(name)
        for kind, planned in self.planned.items():
            mine = [fault for fault in self.faults if fault.kind == kind]
            survived = sum(fault.survived is True for fault in mine)
            table.add_row(kind, *map(str, (planned, len(mine), survived)))
        console.print(table)
        d = self.document()
        lines = [
            f"{self.nodes} nodes in {self.racks} racks, layout {self.layout}, {self.ranks} ranks, "
            f"seed {self.seed}, {self.steps} steps, {self.launches} launches, "
            f"{self.seconds:.0f} s",
            f"faults fired: {d['faults_fired']} of {d['faults_planned']} planned",
            f"back to training after {seconds(d['recovery_median_s'])} (median), "
            f"{seconds(d['recovery_max_s'])} (longest); steps lost: {d['steps_lost']} in all, "
            f"{d['steps_lost_max']} at most",
            f"restores by source: {told(self.restores)}; saves: {told(self.saves)}; "
            f"a save held training up for {seconds(self.blocking_median_s)} (median), "
            f"{seconds(self.blocking_max_s)} (longest)",
            f"redundancy was full again {seconds(self.full_again_s)} after the last fault",
            f"restored states equal to the saved ones, by SHA-256: "
            f"{verdict(self.state_digests_equal)} ({self.states_compared} compared)",
            f"losses bit-identical to training without faults: "
            f"{verdict(self.losses_bit_identical)} ({self.losses_compared} compared)",
            f"left behind: {'unknown' if self.left_behind is None else self.left_behind or 'no'}",
        ]
        reasons = Counter((o["kind"], o["why"]) for o in self.left_out)
        lines += [f"left out: {n} x {kind}: {why}" for (kind, why), n in reasons.items()]
        lines += [f"a rank was refused, and a later launch was not: {r}" for r in self.refused]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"FAILED: {why}" for why in self.why]
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def sources(restored: list[Event], saves: list[Event]) -> dict[str, int]:
    """How many ranks restored from where; "repaired": from a node to which the repair had brought
    what another had saved."""
    made = {(e["rank"], e["step"]): e["node"] for e in saves}
    out = Counter[str]()
    for e in restored:
        moved = e["source"] == "local" and made.get((e["rank"], e["step"])) != e["node"]
        out["repaired" if moved else e["source"]] += 1
    return dict(out)


def told(counts: dict[str, int]) -> str:
    """For people: how many of what."""
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "none"
