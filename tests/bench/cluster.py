"""Agents, an etcd and ranks on one machine, for one round: started, killed, measured, cleaned up.

Every node has its own host id, RAM directory and socket. Ranks are forked from a server that has
torch loaded, so that a new launch costs milliseconds and the other processes are left in peace.

Contract: after `close` no process of ours runs and no RAM of ours is held. Children die with this
process as well. Every wait has a bound.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from p2pckpt import wire as w
from p2pckpt.backends.agent_link import AgentLink
from p2pckpt.backends.etcd_server import EtcdOptions, EtcdServers
from p2pckpt.errors import AgentUnreachable
from tests.bench.rank import WAIT_S, serve

ROOT = Path(__file__).parents[2]
READY_S = 60.0
GONE_S = 10.0
LEASE_S, KEEPALIVE_S, GRACE_S = 3.0, 0.7, 1.0
SAMPLE_S = 0.02

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.bench.rank"])
_DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9);"
    "os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[2], sys.argv[2:])"
)


class BenchError(Exception):
    """A round went wrong: there is no figure then."""


@dataclass(eq=False)
class Node:
    """An agent with its mover, in a process group of its own."""

    name: str
    agent: subprocess.Popen[bytes]
    socket: Path
    directory: Path
    log: Path


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
        self._budget_bytes = budget_bytes
        self._run = Path(tempfile.mkdtemp(prefix="p2pckpt-bench-"))
        self.ram = Path(tempfile.mkdtemp(prefix=f"p2pckpt-bench-{os.getpid()}-", dir=ram))
        self.nodes: list[Node] = []
        self.seats: list[Seat] = []
        self._launches = 0
        self._named = 0
        self._etcd: EtcdServers | None = None
        try:
            options = EtcdOptions(durable=False)
            self._etcd = EtcdServers.start(self._run / "etcd", 1, options)
            for _ in range(nodes):
                self._start()
            for node in self.nodes:
                self._await_ready(node)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- nodes ------------------------------------------------------------------------------------

    def _start(self) -> Node:
        assert self._etcd is not None
        name, self._named = f"n{self._named}", self._named + 1
        socket, log = self._run / f"{name}.sock", self._run / f"{name}.log"
        directory = self.ram / name
        options = {
            "node": name,
            "host-id": f"host-{name}",
            "directory": directory,
            "socket": socket,
            "endpoints": self._etcd.endpoints[0],
            "ram-budget-bytes": self._budget_bytes,
            "lease-s": LEASE_S,
            "keepalive-s": KEEPALIVE_S,
            "lost-grace-s": GRACE_S,
        }
        command = [sys.executable, "-m", "p2pckpt.cli.main", "agent", "--trial"]
        command += [part for k, v in options.items() for part in (f"--{k}", str(v))]
        keeper = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("P2PCKPT_")}
        with log.open("ab") as out:
            agent = subprocess.Popen(
                [*keeper, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env={**environment, "OMP_NUM_THREADS": "1"},
                process_group=0,
            )
        node = Node(name, agent, socket, directory, log)
        self.nodes.append(node)
        return node

    def _await_ready(self, node: Node) -> None:
        end = time.monotonic() + READY_S
        while not self.notes(node, "ready"):
            if node.agent.poll() is not None or time.monotonic() > end:
                raise BenchError(f"{node.name} is not ready: {node.log.read_text()[-2000:]}")
            time.sleep(0.02)

    def await_notes(self, event: str, count: int) -> None:
        """Until every node has told of something so often. Raises BenchError."""
        end = time.monotonic() + READY_S
        for node in self.nodes:
            while (found := len(self.notes(node, event))) < count:
                if time.monotonic() > end:
                    raise BenchError(f"{node.name}: {event} {found} times, needs {count}")
                time.sleep(0.02)

    def notes(self, node: Node, event: str) -> list[dict[str, Any]]:
        """What an agent told of one kind, oldest first."""
        out = []
        for line in node.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                note = json.loads(line)
                if isinstance(note, dict) and note.get("event") == event:
                    out.append(note)
        return out

    def lose(self, index: int) -> None:
        """Kill a node with its mover, remove its RAM; a new one takes its place.

        Returns when the others know that it is gone and that the new one is there.
        """
        lost = self.nodes.pop(index)
        self._destroy([lost])
        fresh = self._start()
        self.nodes.insert(index, self.nodes.pop())
        self._await_ready(fresh)
        names = sorted(node.name for node in self.nodes)
        end = time.monotonic() + READY_S
        while (members := self._members()) != names:
            if time.monotonic() > end:
                raise BenchError(f"members are {members}, need {names}")
            time.sleep(0.1)

    def _members(self) -> list[str]:
        """As the first node's agent knows them."""
        try:
            with AgentLink([str(self.nodes[0].socket)]) as link:
                reply = link.call(w.StatusQuery(), GONE_S)
        except AgentUnreachable:
            return []
        assert isinstance(reply, w.StatusReply)
        return json.loads(reply.document)["members"] or []

    def _destroy(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if node.agent.returncode is None:  # not reaped: the group's number is still its own
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(node.agent.pid, signal.SIGKILL)
        for node in nodes:
            node.agent.wait(GONE_S)
            shutil.rmtree(node.directory, ignore_errors=True)

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
        token = f"launch-{self._launches}"
        self.ask("join", *([str(n.socket), ranks, token, layout] for n in self.nodes[:ranks]))

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
        for node in self.nodes:
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
            self._destroy(self.nodes)
        finally:
            if self._etcd is not None:
                self._etcd.close()
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
