"""N nodes on one machine: real agents, real ranks, an etcd; started, looked at, killed, replaced.

A node is a process group: the agent leads it, its mover child and the ranks placed there belong to
it, so one SIGKILL takes all of them at once, as power loss would; its RAM directory goes too. Every
node has a name, host id, socket and port that no node had before. What fails is found by looking:
a rank's pidfd for the launcher, the agent's exit for whoever replaces nodes.

Contract: nothing here survives `close`: processes are known by handle and group, and the group is
signalled only while its leader is not reaped, so its number cannot be another's. Children die with
the thread that started them, so use one thread. Every wait has a bound.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import p2pckpt
from p2pckpt import wire as w
from p2pckpt.backends.agent_link import AgentLink
from p2pckpt.backends.etcd_server import EtcdOptions, EtcdServers
from p2pckpt.backends.lifeline import tied
from p2pckpt.backends.seaweed import Seaweed
from p2pckpt.errors import AgentUnreachable, CheckpointError

GONE_S = 10.0
"""For a killed process to be reaped."""
STOP_S = 5.0
"""Ranks get SIGTERM and, after this, SIGKILL, as torchrun does."""
STATUS_S = 15.0
"""One status document: the agent asks every peer, each at most two seconds."""

LEASE_S, KEEPALIVE_S, GRACE_S, DECIDE_WAIT_S = 3.0, 0.7, 1.0, 5.0
"""Short deadlines: the whole demo is one machine, and nobody comes back from the dead."""

BUDGET_BYTES = 512 << 20
"""RAM of a node: two versions of all that the demo lets it hold, many times over."""
THROW_AWAY = EtcdOptions(durable=False)


@dataclass(eq=False)
class Node:
    """One node of the cluster. ``store_id``: of its RAM, known once it is ready."""

    name: str
    rack: str
    socket: Path
    directory: Path
    log: Path
    agent: subprocess.Popen[bytes]
    ready_at: float | None = None
    store_id: str = ""

    @property
    def alive(self) -> bool:
        """Does the agent run?"""
        return self.agent.poll() is None

    def notes(self, event: str) -> list[dict[str, Any]]:
        """What the agent said of one kind, oldest first."""
        out = []
        for line in self.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                note = json.loads(line)
                if isinstance(note, dict) and note.get("event") == event:
                    out.append(note)
        return out

    def status(self) -> dict[str, Any]:
        """The document that `p2pckpt status --json` shows. Raises AgentUnreachable."""
        with AgentLink([str(self.socket)]) as link:
            reply = link.call(w.StatusQuery(), STATUS_S)
        assert isinstance(reply, w.StatusReply)
        document: dict[str, Any] = json.loads(reply.document)
        return document


@dataclass
class Launch:
    """One start of all ranks. ``ranks`` in order; pidfds become readable when one ends."""

    number: int
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    began_at: float = 0.0
    _pidfds: list[int] = field(default_factory=list)

    def add(self, rank: subprocess.Popen[bytes], log: Path) -> None:
        """One more rank that runs."""
        self.ranks.append(rank)
        self.logs.append(log)
        self._pidfds.append(os.pidfd_open(rank.pid))

    def wait(self, timeout_s: float) -> bool:
        """Wait until a rank failed or all ended well; False after the time-out."""
        end = time.monotonic() + timeout_s
        while True:
            codes = [rank.poll() for rank in self.ranks]
            if any(codes) or None not in codes:
                return True
            running = [fd for fd, code in zip(self._pidfds, codes, strict=True) if code is None]
            left_s = end - time.monotonic()
            if left_s <= 0 or not select.select(running, [], [], left_s)[0]:
                return False

    @property
    def succeeded(self) -> bool:
        """Did all ranks end well?"""
        return all(rank.poll() == 0 for rank in self.ranks)

    def last_words(self) -> str:
        """The last lines that a rank which failed wrote."""
        for number, (rank, log) in enumerate(zip(self.ranks, self.logs, strict=True)):
            if rank.poll():
                lines = log.read_text(errors="replace").split("\n")
                return f"rank {number}: {' | '.join(filter(None, lines[-4:]))[-500:]}"
        return "no rank failed"

    def stop(self) -> None:
        """End and reap all ranks."""
        for rank in self.ranks:
            if rank.poll() is None:
                rank.terminate()
        end = time.monotonic() + STOP_S
        for rank in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, end - time.monotonic()))
            if rank.poll() is None:
                rank.kill()
                rank.wait(GONE_S)
        while self._pidfds:
            os.close(self._pidfds.pop())


class Machine:
    """All processes and directories of one demo; a context manager.

    ``run`` is the caller's, for logs and sockets. ``ram``: a directory of ours in `memory`, where
    every node has its own. All processes of nodes have DEMO_RUN=`run` in their environment.
    """

    def __init__(self, run: Path, racks: int, memory: Path = Path("/dev/shm")) -> None:
        self.run = run
        self.ram = Path(tempfile.mkdtemp(prefix=f"p2pckpt-demo-{os.getpid()}-", dir=memory))
        self.racks = racks
        self.nodes: list[Node] = []
        self.seats: list[Node] = []
        """The node of each group of ranks; a dead one's place is taken by `seat`."""
        self.launches: list[Launch] = []
        self.etcd: EtcdServers | None = None
        self.store: Seaweed | None = None
        self._named = 0

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- nodes ------------------------------------------------------------------------------------

    def start_services(
        self,
        object_store: bool = False,
        budget_bytes: int = BUDGET_BYTES,
        options: EtcdOptions = THROW_AWAY,
        members: int = 1,
    ) -> None:
        """The embedded etcd and, if asked for, an object store; what agents need to know."""
        self.etcd = self._start_etcd(members, options)
        settings: dict[str, Any] = {
            "endpoints": ",".join(self.etcd.endpoints),
            "trial": True,
            "ram_budget_bytes": budget_bytes,
            "lease_s": LEASE_S,
            "keepalive_s": KEEPALIVE_S,
            "lost_grace_s": GRACE_S,
            "decide_wait_s": DECIDE_WAIT_S,
        }
        if object_store:
            self.store = Seaweed.start(self.run / "s3")
            settings |= {
                "s3_url": f"s3://{self.store.bucket}/demo",
                "s3_endpoint": self.store.endpoint,
                "offload_every": 1,
            }
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in settings.items()]
        (self.run / "agent.toml").write_text("".join(lines))

    def start_node(self, rack: str = "") -> Node:
        """A new node under a new name, in `rack` or the next rack in turn. Does not wait."""
        number, self._named = self._named, self._named + 1
        name, rack = f"n{number}", rack or f"r{number % self.racks}"
        place = (self.run / f"{name}.sock", self.ram / name, self.run / f"{name}.log")
        node = Node(name, rack, *place, self._start_agent(name, rack))
        self.nodes.append(node)
        return node

    def revive(self, node: Node) -> None:
        """A new agent, in place of one that has ended, on what the node has in memory.

        It leads a process group of its own; ranks that outlived the old agent stay in theirs.
        """
        former = len(list(self.run.glob(f"{node.name}.*.log")))
        node.log.rename(self.run / f"{node.name}.{former}.log")
        node.agent, node.ready_at = self._start_agent(node.name, node.rack), None

    def _start_agent(self, name: str, rack: str) -> subprocess.Popen[bytes]:
        more = {"DEMO_RUN": str(self.run)} | (self.store.environment if self.store else {})
        return _spawn(self._agent_command(name, rack), self.run / f"{name}.log", more, 0)

    def _agent_command(self, name: str, rack: str) -> list[str]:
        """How an agent is started; `command[0]` is a path."""
        command = [sys.executable, "-m", "p2pckpt.cli.main", "agent"]
        command += ["--config", str(self.run / "agent.toml"), "--node", name]
        command += ["--host-id", f"host-{name}", "--domains", f"rack={rack}"]
        command += ["--directory", str(self.ram / name), "--socket", str(self.run / f"{name}.sock")]
        return command

    def _start_etcd(self, members: int, options: EtcdOptions) -> EtcdServers:
        return EtcdServers.start(self.run / "etcd", members, options)

    def look(self) -> list[Node]:
        """Take note of agents that became ready; those that did so now."""
        fresh = []
        for node in self.nodes:
            if node.ready_at is None and node.alive and node.notes("ready"):
                with contextlib.suppress(AgentUnreachable):
                    node.store_id = node.status()["store_id"]
                    node.ready_at = time.monotonic()
                    fresh.append(node)
        return fresh

    def settled(self) -> bool:
        """Are all agents ready, and does each know exactly these as members?"""
        self.look()
        names = sorted(node.name for node in self.nodes)
        with contextlib.suppress(AgentUnreachable):
            return all(n.ready_at and n.status()["members"] == names for n in self.nodes)
        return False

    def take_dead(self) -> list[Node]:
        """Nodes whose agent has ended; they are forgotten here, whatever is left of them ended."""
        dead = [node for node in self.nodes if not node.alive]
        for node in dead:
            self.nodes.remove(node)
            shutil.rmtree(node.directory, ignore_errors=True)
        return dead

    def destroy(self, nodes: Sequence[Node]) -> None:
        """Kill whole nodes at once: agent, mover, ranks; and remove their RAM."""
        groups = [node.agent.pid for node in nodes if node.agent.returncode is None]
        for group in groups:  # an agent that is not reaped keeps its group's number ours
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        for node in nodes:
            shutil.rmtree(node.directory, ignore_errors=True)
        for node in nodes:
            node.agent.wait(GONE_S)

    def status(self) -> dict[str, Any] | None:
        """The status document of a living node, with ranks if may be; None if nobody answers."""
        for node in (*self.seats, *self.nodes):
            if node.ready_at is not None and node.alive:
                with contextlib.suppress(CheckpointError):
                    return node.status()
        return None

    # -- ranks ------------------------------------------------------------------------------------

    def seat(self, groups: int) -> bool:
        """Give each group of ranks a ready node of its own, the old one if it lives."""
        free = [n for n in self.nodes if n.ready_at is not None and n.alive]
        free = [n for n in free if n not in self.seats[:groups]]
        for group in range(groups):
            if group < len(self.seats) and self.seats[group].alive:
                continue
            if not free:
                return False
            self.seats[group : group + 1] = [free.pop(0)]
        return True

    def launch(self, arguments: Sequence[str], ranks_per_node: int, store: bool = True) -> Launch:
        """Start all ranks on their nodes, or, without `store`, beside them."""
        launch = Launch(len(self.launches), began_at=time.monotonic())
        self.launches.append(launch)
        meeting = self.run / f"rendezvous-{launch.number}"
        world = len(self.seats) * ranks_per_node
        for rank in range(world):
            node = self.seats[rank // ranks_per_node]
            place = self.run / ("main" if store else "reference")
            place.mkdir(exist_ok=True)
            log = place / f"rank{rank}.log"
            command = [sys.executable, "-m", "p2pckpt.demo.train", *arguments]
            command += ["--launch", str(launch.number), "--rendezvous", str(meeting)]
            command += ["--journal", str(place / f"rank{rank}.jsonl")]
            environment = {"RANK": str(rank), "WORLD_SIZE": str(world), "DEMO_RUN": str(self.run)}
            if store:
                environment["P2PCKPT_AGENT"] = str(node.socket)
            group = node.agent.pid if store else 0
            launch.add(_spawn(command, log, environment, group), log)
        return launch

    # -- the end ----------------------------------------------------------------------------------

    def close_nodes(self) -> None:
        """End ranks and agents, and remove their RAM."""
        for launch in self.launches:
            launch.stop()
        nodes, self.nodes = self.nodes, []
        self.destroy(nodes)
        shutil.rmtree(self.ram, ignore_errors=True)

    def close(self) -> None:
        """End everything that was started here."""
        try:
            self.close_nodes()
        finally:
            for service in (self.store, self.etcd):
                if service is not None:
                    service.close()


def _spawn(
    command: Sequence[str], log: Path, more: Mapping[str, str], group: int
) -> subprocess.Popen[bytes]:
    """Run `command` in a process group (0: a new one), without settings of ours."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("P2PCKPT_")}
    root = str(Path(p2pckpt.__file__).parents[1])
    paths = [root, *filter(None, [environment.get("PYTHONPATH", "")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}
    with log.open("ab") as out:
        return subprocess.Popen(
            tied(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            process_group=group,
        )
