"""Agents, an etcd and ranks on one machine, for one round: started, killed, measured, cleaned up.

Nodes are the demo's: a process group each, with its own host id, RAM directory and socket. Ranks
are forked from a server that has torch loaded, so that a new launch costs milliseconds and the
other processes are left in peace.

Contract: after `close` no process of ours runs and no RAM of ours is held. Children die with this
process as well. Every wait has a bound.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from p2pckpt.demo.cluster import Machine
from tests.bench.rank import WAIT_S, serve

READY_S = 60.0
GONE_S = 10.0
LOOK_S, SAMPLE_S = 0.02, 0.02

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.bench.rank"])


class BenchError(Exception):
    """A round went wrong: there is no figure then."""


@dataclass(eq=False)
class Seat:
    """A rank's process and our end of its pipe."""

    process: ForkServerProcess
    pipe: Any
    rank: int

    def answer(self, timeout_s: float = WAIT_S) -> Any:
        """What the rank says next. Raises BenchError."""
        try:
            if self.pipe.poll(timeout_s):
                kind, result = self.pipe.recv()
                if kind == "failed":
                    raise BenchError(result)
                return result
        except (EOFError, ConnectionResetError):
            pass
        raise BenchError(f"rank {self.rank}: no answer, exit code {self.process.exitcode}")


class Cluster:
    """One etcd and its nodes; a context manager."""

    def __init__(self, nodes: int, budget_bytes: int, ram: Path) -> None:
        self._run = Path(tempfile.mkdtemp(prefix="p2pckpt-bench-"))
        self.ram = Path(tempfile.mkdtemp(prefix=f"p2pckpt-bench-{os.getpid()}-", dir=ram))
        self._machine = Machine(self._run, racks=nodes, memory=self.ram)
        self.seats: list[Seat] = []
        self._launches = 0
        try:
            self._machine.start_services(budget_bytes=budget_bytes)
            for _ in range(nodes):
                self._machine.start_node()
            self._await_settled()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- nodes ------------------------------------------------------------------------------------

    def await_notes(self, event: str, count: int) -> None:
        """Until every node has told of something so often. Raises BenchError."""
        for node in self._machine.nodes:
            self._until(
                lambda node=node: len(node.notes(event)) >= count,
                f"{node.name} to tell of {event} {count} times",
            )

    def told(self, index: int, event: str) -> list[dict[str, Any]]:
        """What a node told of one kind; waits until there is something. Raises BenchError."""
        node = self._machine.nodes[index]
        self._until(lambda: node.notes(event), f"{node.name} to tell of {event}")
        return node.notes(event)

    def lose(self, index: int) -> None:
        """Kill a node with its mover, remove its RAM; a new one takes its place.

        Returns when the others know that it is gone and that the new one is there.
        """
        nodes = self._machine.nodes
        self._machine.destroy([nodes[index]])
        self._machine.take_dead()
        nodes.insert(index, nodes.pop(nodes.index(self._machine.start_node())))
        self._await_settled()

    def _await_settled(self) -> None:
        self._until(self._machine.settled, "all nodes to be ready and to know each other")

    def _until(self, done: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + READY_S
        while not done():
            for node in self._machine.nodes:
                if not node.alive:
                    raise BenchError(f"{node.name} ended: {node.log.read_text()[-2000:]}")
            if time.monotonic() > end:
                raise BenchError(f"waited {READY_S:g} s for {what}")
            time.sleep(LOOK_S)

    # -- ranks ------------------------------------------------------------------------------------

    def launch(self, ranks: int, scale: float, layout: str, seed: int | None) -> None:
        """Start ranks, one on each of the first nodes, and let them join; old ones are killed."""
        self.kill_ranks()
        self._launches += 1
        for rank in range(ranks):
            ours, theirs = _FORKS.Pipe()
            arguments = (theirs, rank, scale, seed, self._run / f"rank{rank}.log")
            process = _FORKS.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.seats.append(Seat(process, ours, rank))
        for seat in self.seats:
            seat.answer()
        token, nodes = f"launch-{self._launches}", self._machine.nodes[:ranks]
        self.ask("join", *([str(n.socket), ranks, token, layout] for n in nodes))

    def ask(self, method: str, *arguments: Sequence[Any]) -> list[Any]:
        """Let all ranks do the same at once; ``arguments`` of each, or none. Raises BenchError."""
        given = arguments or [()] * len(self.seats)
        for seat, own in zip(self.seats, given, strict=True):
            seat.pipe.send((method, own))
        return [seat.answer() for seat in self.seats]

    def kill_ranks(self) -> None:
        """SIGKILL all ranks."""
        for seat in self.seats:
            seat.process.kill()
        for seat in self.seats:
            seat.process.join(GONE_S)
            seat.pipe.close()
        self.seats = []

    # -- memory -----------------------------------------------------------------------------------

    def memory_bytes(self) -> int:
        """Anonymous memory (PSS) of ranks, agents and movers, and the files in RAM."""
        pids = [seat.process.pid for seat in self.seats]
        for node in self._machine.nodes:
            pids += _group(node.agent.pid)
        return sum(map(_anonymous, pids)) + sum(map(_allocated, self.ram.rglob("*")))

    @contextlib.contextmanager
    def peak(self, found: list[int]):
        """Add to ``found`` the most memory that was in use inside the block."""
        stop = threading.Event()

        def look() -> None:
            while not stop.is_set():
                found.append(self.memory_bytes())
                stop.wait(SAMPLE_S)

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join()
            found[:] = [max(found)]

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End everything that was started here and remove its files."""
        try:
            self.kill_ranks()
        finally:
            self._machine.close()
            shutil.rmtree(self.ram, ignore_errors=True)
            shutil.rmtree(self._run, ignore_errors=True)


def _group(group: int) -> list[int]:
    """Processes of a process group."""
    out = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
                out.append(int(stat.parent.name))
    return out


def _anonymous(pid: int | None) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) * 1024
    return 0


def _allocated(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.lstat().st_blocks * 512
    return 0
