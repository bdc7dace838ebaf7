"""The rounds: save, lose a process, lose a node, restore; each step between copies of its bytes.

    agents, ranks -> first save -> saves -> memory -> kill ranks, restore -> kill a node, restore

Copies are made by all ranks at once, before and after each step, and the slower rank counts for the
step. What comes back is compared with what was saved, byte by byte: a wrong restore has no figure.
Every round has agents and files of its own, because a first save and a loss happen only once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.cluster import BenchError, Cluster
from tests.bench.figures import Figure
from tests.bench.rank import Rank

RANKS = 2
COPIES = 3
_CLEAR = "clearing fresh pages"
_NODE_SAFE = "copy, CRC at the owner, raw loopback socket, CRC at the holder; all on these cores"


def figures() -> dict[str, Figure]:
    """All figures of the rounds, still empty."""
    rows = [
        Figure("block", "save() returns", "one copy"),
        Figure("block_first", "the first save() returns", f"one copy and {_CLEAR}"),
        Figure("process_safe", "a SIGKILL of the ranks loses nothing", "one copy"),
        Figure("node_safe_copies1", "committed, copies:1", _NODE_SAFE),
        Figure("node_safe_rs42", "committed, rs:4,2", f"{_NODE_SAFE}; 1.5 times the bytes, coded"),
        Figure("restore_process", "restored after process loss", "a copy that checks its chunks"),
        Figure(
            "restore_node",
            "restored after the loss of a node",
            "raw socket one way, a copy that checks its chunks",
        ),
        Figure("ready_node", "before that: its agent made room, from its start on", _CLEAR),
        Figure(
            "memory_peak",
            "most extra memory during a save",
            "two versions of the own copy and the peer's",
            "state",
        ),
        Figure(
            "memory_held",
            "extra memory between saves",
            "one version of the own copy and the peer's",
            "state",
        ),
    ]
    return {row.name: row for row in rows}


@dataclass
class Machine:
    """Seconds that the machine needs for the parts, relative to a copy of the same bytes."""

    fresh: float
    check: float
    checked_copy: float
    both_ways: float
    one_way: float

    @property
    def clear(self) -> float:
        """Of the first writing of pages, what is not the copy."""
        return max(0.0, self.fresh - 1)


class Round:
    """One cluster with its ranks, and the steps they were saved with."""

    def __init__(self, cluster: Cluster, scale: float, layout: str) -> None:
        self.cluster = cluster
        self.scale = scale
        self.layout = layout
        self._step = 0
        self._digests: list[str] = []

    def launch(self, seed: int | None) -> None:
        """New ranks; without a seed, with a state of ones."""
        self.cluster.launch(RANKS, self.scale, self.layout, seed)
        self.cluster.ask(Rank.copy.__name__)

    def between_copies(self, act: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds of one copy around what is done, and its result."""
        times = [self.cluster.ask(Rank.copy.__name__) for _ in range(COPIES)]
        result = act()
        times += [self.cluster.ask(Rank.copy.__name__) for _ in range(COPIES - 1)]
        return statistics.mean(map(statistics.median, zip(*times, strict=True))), result

    def save(self, change: bool = False) -> tuple[float, float, float]:
        """(blocking, process-safe, node-safe) of the next step, in copies."""
        self._step += 1
        self.cluster.await_notes("freed", self._step - 2)  # as between saves seconds apart
        self._digests = self.cluster.ask(Rank.digest.__name__)
        given = [(self._step, change)] * RANKS
        copy, found = self.between_copies(lambda: self.cluster.ask(Rank.save.__name__, *given))
        begun = min(f["begun"] for f in found)
        block = max(f["returned"] - f["begun"] for f in found)
        safe = max(f["returned"] for f in found) - begun
        return block / copy, safe / copy, (max(f["ended"] for f in found) - begun) / copy

    def restore(self, sources: list[str]) -> float:
        """Restore in all ranks, in copies. Raises BenchError unless it is exact and from there."""
        copy, found = self.between_copies(lambda: self.cluster.ask(Rank.restore.__name__))
        for rank, f in enumerate(found):
            if (f["step"], f["digest"]) != (self._step, self._digests[rank]):
                raise BenchError(
                    f"rank {rank}: step {f['step']} of {self._step} or its bytes differ"
                )
        if (given := [f["source"] for f in found]) != sources:
            raise BenchError(f"restored from {given}, the round needs {sources}")
        return (max(f["ended"] for f in found) - min(f["begun"] for f in found)) / copy

    def ready(self, index: int, machine: Machine) -> tuple[float, float]:
        """What a node's agent spent on making room before anybody asked, and its limit; in copies
        of the state."""
        copy, notes = self.between_copies(lambda: self.cluster.told(index, "made_ready"))
        share = sum(n["bytes"] for n in notes) * RANKS / sum(self.cluster.ask(Rank.bytes.__name__))
        return sum(n["seconds"] for n in notes) / copy, share * machine.clear

    def measure(self, method: Callable[..., float], *arguments: Any) -> float:
        """What the machine needs for a part, done by all ranks at once, in copies."""
        given = [arguments] * RANKS
        copy, found = self.between_copies(lambda: self.cluster.ask(method.__name__, *given))
        return max(found) / copy

    def exchange(self, ways: list[tuple[bool, bool]]) -> float:
        """Raw sockets: who sends and who receives as many bytes as its state has."""
        ports = self.cluster.ask(Rank.listen.__name__)
        given = [(port, *way) for port, way in zip(reversed(ports), ways, strict=True)]
        copy, found = self.between_copies(lambda: self.cluster.ask(Rank.exchange.__name__, *given))
        return max(found) / copy

    def machine(self) -> Machine:
        """The parts, all measured now."""
        return Machine(
            fresh=self.measure(Rank.fresh, str(self.cluster.ram)),
            check=self.measure(Rank.check),
            checked_copy=self.measure(Rank.check_and_copy),
            both_ways=self.exchange([(True, True), (True, True)]),
            one_way=self.exchange([(True, False), (False, True)]),
        )


@dataclass(frozen=True)
class Place:
    """How large a round is and where its RAM files lie."""

    scale: float
    budget_bytes: int
    ram: Path


def copies_round(rows: dict[str, Figure], place: Place, seed: int) -> None:
    """Two nodes of one rank each, every copy on the other."""
    with Cluster(2, place.budget_bytes, place.ram) as cluster:
        job = Round(cluster, place.scale, "copies:1")
        job.launch(seed)
        size = sum(cluster.ask(Rank.bytes.__name__))
        machine = job.machine()
        before = cluster.memory_bytes()
        rows["block_first"].add(job.save()[0], machine.fresh)
        job.save()  # the second slot and shard are fresh as well
        block, process, node = job.save()
        rows["block"].add(block, 1.0)
        rows["process_safe"].add(process, 1.0)
        limit = 1 + 2 * machine.check + machine.both_ways
        rows["node_safe_copies1"].add(node, limit)
        peak: list[int] = []
        with cluster.peak(peak):
            job.save(change=True)  # what is restored below shows whether it was torn
        rows["memory_peak"].add((peak[0] - before) / size, 4.0)
        rows["memory_held"].add((cluster.memory_bytes() - before) / size, 2.0)
        job.launch(None)
        rows["restore_process"].add(job.restore(["local", "local"]), machine.checked_copy)
        cluster.kill_ranks()
        cluster.lose(1)
        job.launch(None)
        limit = machine.one_way + machine.checked_copy
        rows["restore_node"].add(job.restore(["local", "peers"]), limit)
        rows["ready_node"].add(*job.ready(1, machine))


def coded_round(rows: dict[str, Figure], place: Place, runs: int) -> None:
    """Seven nodes, two of them with a rank; every shard on another node."""
    with Cluster(7, place.budget_bytes, place.ram) as cluster:
        job = Round(cluster, place.scale, "rs:4,2")
        job.launch(1)
        for _ in range(2):  # slots and shards are fresh
            job.save()
        for _ in range(runs):
            node = job.save()[2]
            sent = 1.5 * job.exchange([(True, True), (True, True)])
            coded, check = job.measure(Rank.code, 4, 2), job.measure(Rank.check)
            rows["node_safe_rs42"].add(node, 1 + coded + sent + 1.5 * check)
