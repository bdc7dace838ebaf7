"""What the demo tells: a live timeline for who watches, a summary at the end, one JSON document.

The timeline goes to stderr: a bar of training steps, a line for whatever happens, with seconds
since the start. The summary answers what a reader asks first: what was killed, from where its bytes
came back, what it cost, and whether anything differs from training without failures.

Contract: a Summary is ok only if every part of it is known and right; what is not known is None and
is not taken for right. Times are in seconds, 0 where a stage did not take place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

STAGES = {
    "detect": "from the kill until the launcher saw a dead rank",
    "launch": "new processes, until Python, torch and rendezvous are up: nothing of p2pckpt",
    "join": "until all ranks have joined, which waits for the lease of a dead agent",
    "decide": "which step, by the ledger and by what every living agent holds",
    "fetch": "a killed rank's manifest and bytes from who has them, and room for them",
    "decode": "what is missing of them, computed from parity",
    "verify": "every chunk against its checksum",
    "load": "into the model and the optimizer",
}
"""In order; "decide" to "load" are the longest of any killed rank."""
TIERS = ("local", "peers", "s3")
"""Where bytes come from, nearest first."""


@dataclass
class Kill:
    """One blow and the way back. ``bytes_from``: of the killed ranks' bytes, by node.

    ``source``: the farthest tier that the killed ranks' bytes had to come from: "local" if the
    nodes that made the snapshots still had them, else "peers"; "s3" if peers had too little.
    ``sources``: of each killed rank; "mixed" if peers gave a part and the object store the rest.
    ``repaired``: ranks whose bytes the repair had brought to their new node from peers' shards
    before they restarted. Stages: see STAGES. ``restore_s``: "decide" to "load" together.
    ``back_s``: from the kill to the end of the first step after it.
    """

    what: str
    nodes: list[str]
    ranks: list[int]
    source: str | None = None
    sources: dict[int, str] = field(default_factory=dict)
    bytes_from: dict[str, int] = field(default_factory=dict)
    restored_step: int | None = None
    steps_lost: int | None = None
    repaired: list[int] = field(default_factory=list)
    detect_s: float | None = None
    launch_s: float | None = None
    join_s: float | None = None
    decide_s: float | None = None
    fetch_s: float | None = None
    decode_s: float | None = None
    verify_s: float | None = None
    load_s: float | None = None
    restore_s: float | None = None
    back_s: float | None = None
    replaced_by: list[str] = field(default_factory=list)

    def tell(self, restored: list[dict[str, Any]], saves: list[dict[str, Any]]) -> None:
        """Where the killed ranks' bytes came from, and what took how long.

        ``restored``, ``saves``: what the ranks wrote down. A rank that found its bytes on a node
        which had not made them owes them to the repair, so to peers.
        """
        mine = [e for e in restored if e["rank"] in self.ranks] or restored
        made = {(e["rank"], e["step"]): e["node"] for e in saves}
        for e in mine:
            moved = e["source"] == "local" and made.get((e["rank"], e["step"])) != e["node"]
            self.sources[e["rank"]] = "peers" if moved else e["source"]
            if moved:
                self.repaired.append(e["rank"])
            for node, size in (e["bytes_from"] or {e["node"]: e["snapshot_bytes"]}).items():
                self.bytes_from[node] = self.bytes_from.get(node, 0) + size
        tiers = {"s3" if source == "mixed" else source for source in self.sources.values()}
        self.source = max(tiers, key=TIERS.index)
        self.restored_step = restored[0]["step"]

        def longest(*names: str) -> float:
            return max(sum(float(e["seconds"].get(name, 0.0)) for name in names) for e in mine)

        self.decide_s, self.fetch_s = longest("decide"), longest("manifest", "room", "fetch")
        self.decode_s, self.verify_s = longest("decode"), longest("verify", "check")
        self.load_s = longest("load")
        self.restore_s = max(sum(e["seconds"].values()) for e in mine)

    @property
    def whom(self) -> str:
        """For people: what was killed."""
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        return f"{self.what}: {', '.join(self.nodes)} ({ranks if self.ranks else 'no rank'})"

    @property
    def stages(self) -> str:
        """For people: the seconds of every stage."""
        parts = [(name, getattr(self, f"{name}_s")) for name in STAGES]
        return "  ".join(f"{name} {seconds(value)}" for name, value in parts)

    @property
    def split(self) -> str:
        """For people: how much of the way back is p2pckpt's."""
        return (
            f"of {seconds(self.back_s)}, starting Python and torch took {seconds(self.launch_s)}, "
            f"the restore {seconds(self.restore_s)}"
        )


@dataclass
class Summary:
    """All that the demo found out. ``why``: what did not hold, a sentence each."""

    nodes: int
    racks: int
    layout: str
    ranks: int
    seed: int
    steps: int = 0
    committed: int = 0
    blocking_median_s: float | None = None
    snapshot_bytes: int | None = None
    losses_compared: int = 0
    losses_bit_identical: bool | None = None
    states_compared: int = 0
    state_digests_equal: bool | None = None
    kills: list[Kill] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    seconds: float = 0.0
    run_directory: str | None = None

    @property
    def ok(self) -> bool:
        """Does everything hold?"""
        back = all(kill.source and kill.back_s is not None for kill in self.kills)
        same = self.losses_bit_identical is True and self.state_digests_equal is True
        return bool(self.kills) and back and same and not self.why

    def document(self) -> dict[str, Any]:
        """For machines; with what each stage is."""
        return {**asdict(self), "stages": STAGES}

    def print(self, console: Console) -> None:
        """For people: the table and the verdict."""
        table = Table(title="What was killed, and how it came back", title_justify="left")
        for name in ("killed", "bytes came from", "steps lost", "back to training after"):
            table.add_column(name, overflow="fold")
        for name in ("of it: starting Python and torch", "of it: the restore"):
            table.add_column(name, overflow="fold")
        for kill in self.kills:
            lost = "-" if kill.steps_lost is None else str(kill.steps_lost)
            times = map(seconds, (kill.back_s, kill.launch_s, kill.restore_s))
            table.add_row(kill.whom, origin(kill), lost, *times)
        console.print(table)
        size = self.snapshot_bytes
        lines = [
            f"{self.nodes} nodes in {self.racks} racks, layout {self.layout}, {self.ranks} ranks, "
            f"{self.steps} steps, {self.committed} committed checkpoints, {self.seconds:.0f} s",
            f"a save held training up for {seconds(self.blocking_median_s)} (median); "
            f"all ranks' state: {'unknown' if size is None else f'{size / 2**20:.1f} MiB'}",
            f"restored states equal to the saved ones, by SHA-256: "
            f"{verdict(self.state_digests_equal)} ({self.states_compared} compared)",
            f"losses bit-identical to training without failures: "
            f"{verdict(self.losses_bit_identical)} ({self.losses_compared} compared)",
        ]
        lines += [f"left out: {what}" for what in self.left_out]
        lines += [f"FAILED: {why}" for why in self.why]
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def seconds(value: float | None) -> str:
    """Seconds for people; "-" for what did not take place."""
    if not value:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 0.1 else f"{value:.2f} s"


def origin(kill: Kill) -> str:
    """For people: where the killed ranks' bytes came from."""
    if kill.source is None:
        return "nowhere"
    parts = [f"{node} {size / 2**20:.1f} MiB" for node, size in sorted(kill.bytes_from.items())]
    if len(set(kill.sources.values())) > 1:
        parts += [f"rank {rank}: {source}" for rank, source in sorted(kill.sources.items())]
    how = f" (repair had brought ranks {kill.repaired} there)" if kill.repaired else ""
    return f"{kill.source}: {', '.join(parts)}{how}"


def verdict(value: bool | None) -> str:
    """For people: yes, NO, or that nobody knows."""
    return "not compared" if value is None else "yes" if value else "NO"


class Timeline:
    """The live view on stderr; a context manager. ``now`` gives seconds."""

    def __init__(self, console: Console, now: Callable[[], float], steps: int) -> None:
        self._now, self._begun, self._steps = now, now(), steps
        self._legend = STAGES
        self._bar = Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(40),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("training", total=steps, note="")

    def __enter__(self) -> Timeline:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._now() - self._begun

    def say(self, text: str) -> None:
        """One line of the timeline."""
        line = f"{self.seconds:7.1f} s  {text}"
        self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def recovered(self, kill: Kill) -> None:
        """Training goes on after a kill: from where, what took how long, and once what that is."""
        self.say(
            f"back at step {kill.restored_step} after {seconds(kill.back_s)}, "
            f"steps lost: {kill.steps_lost}; bytes from {origin(kill)}"
        )
        self.say(f"    {kill.stages}")
        self.say(f"    {kill.split}")
        legend, self._legend = self._legend, {}
        for stage, what in legend.items():
            self.say(f"        {stage}: {what}")

    def step(self, step: int, note: str, what: str = "training") -> None:
        """Training is at `step`; `note` says what is waited for."""
        self._steps = max(self._steps, step)
        self._bar.update(self._task, completed=step, total=self._steps, note=note, description=what)
