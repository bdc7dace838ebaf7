"""The story of the fake world: one ledger, one network, nodes with RAM, and what happens to them.

Intuition. `FakeCluster` is everything outside of the agents. Start an agent on a node by giving it
`FakeNode.doors()`; make trouble with the methods here and the faults of `etcd`, `net` and
`FakeNode.store`. All of it runs on the running event loop, whose time is the only clock.

Contract. All chance comes from one generator made of the seed, nothing iterates over a set or sorts
by address: under a virtual clock the same seed and the same agents give the same event log, byte
for byte, which `EventLog.digest` compares. `crash` ends one start of an agent: its doors are dead
and do nothing more, its lease runs out, its memory stays or is lost; its tasks are the caller's to
cancel. `pause` makes it stand still at its doors; payload to and from it stops.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from p2pckpt.backends.inproc.etcd import FakeEtcd
from p2pckpt.backends.inproc.guard import (
    Guarded,
    GuardedLedger,
    GuardedPeers,
    GuardedTrainers,
    GuardedTransport,
    Life,
)
from p2pckpt.backends.inproc.ledger import LedgerDoor, MembershipDoor
from p2pckpt.backends.inproc.net import MIB, FakeNet, true_time
from p2pckpt.backends.inproc.objects import FakeBucket, ObjectsDoor
from p2pckpt.backends.inproc.peers import PeersDoor
from p2pckpt.backends.inproc.ram import FakeArena, Store
from p2pckpt.backends.inproc.trainers import FakeTrainer, TrainersDoor, TrainerSocket
from p2pckpt.backends.inproc.transport import TransportDoor
from p2pckpt.backends.inproc.workers import Cores, InlineWorkers, SeededIds
from p2pckpt.errors import UsageError
from p2pckpt.ports import Doors, TrainerId

Event = tuple[float, str, str, dict[str, Any]]
"""(loop time, who, what, facts)."""


class EventLog:
    """Everything that happened: ledger writes, messages, transfers, records, faults, notes."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.listeners: list[Callable[[str, str, dict[str, Any]], None]] = []
        """Told of each event (who, what, facts) when it is added: checkers."""
        self._encoder = msgspec.json.Encoder(order="deterministic")
        self._sha256 = hashlib.sha256()

    def add(self, who: str, what: str, facts: dict[str, Any]) -> None:
        """Note an event at the present true time; facts are plain values or records."""
        event = (true_time(), who, what, dict(facts))
        self._sha256.update(self._encoder.encode(event) + b"\n")
        self.events.append(event)
        for listener in self.listeners:
            listener(who, what, facts)

    def text(self) -> str:
        """One line of JSON an event."""
        return "".join(self._encoder.encode(event).decode() + "\n" for event in self.events)

    def digest(self) -> str:
        """SHA-256 of `text`, as it was when each event was added."""
        return self._sha256.hexdigest()


class FakeCluster:
    """The ledger, the network and the nodes. ``bytes_per_s`` and ``piece_bytes`` are of a link."""

    def __init__(self, seed: int, *, bytes_per_s: float = 10e9, piece_bytes: int = 8 * MIB) -> None:
        self.rng = Random(seed)
        self.log = EventLog()
        self.etcd = FakeEtcd(self.rng, self.log.add)
        self.net = FakeNet(self.rng, self.log.add, bytes_per_s=bytes_per_s, piece_bytes=piece_bytes)
        self.bucket: FakeBucket | None = None
        self.nodes: dict[str, FakeNode] = {}
        self._last_pid = 4000

    def node(
        self, name: str, host: str = "", domains: dict[str, str] | None = None, *, budget_bytes: int
    ) -> FakeNode:
        """A new node; ``host`` "" is a machine of its own, of the node's name."""
        if name in self.nodes:
            raise UsageError(f"node {name!r} is there already")
        self.nodes[name] = node = FakeNode(self, name, budget_bytes)
        node.host = host or name
        node.domains = dict(domains or {})
        return node

    def add_bucket(self) -> FakeBucket:
        """Give every agent that starts from now on an object store, the same for all."""
        self.bucket = FakeBucket(self.log.add)
        return self.bucket

    def partition(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Nothing gets from a to b any more nor, unless one way, back."""
        self._check(a, b)
        self.net.block(a, b)
        if not one_way:
            self.net.block(b, a)

    def isolate(self, name: str) -> None:
        """Partition a node from all others; the ledger is another matter."""
        for other in self.nodes:
            if other != name:
                self.partition(name, other)

    def cut_from_ledger(self, name: str) -> None:
        """Nothing passes between a node and the ledger any more."""
        self._check(name)
        self.etcd.unavailable(name, math.inf)

    def heal(self) -> None:
        """End all partitions and cuts."""
        self.net.heal()
        self.etcd.heal()
        self.log.add("cluster", "heal", {})

    def digest(self) -> str:
        """Of the event log."""
        return self.log.digest()

    def _check(self, *names: str) -> None:
        for name in names:
            if name not in self.nodes:
                raise UsageError(f"no node {name!r}; there are {', '.join(self.nodes)}")

    def next_pid(self) -> int:
        """Process ids are never used twice."""
        self._last_pid += 1
        return self._last_pid


class FakeNode:
    """A machine: its RAM, its trainers, and one start of its agent after the other."""

    host: str
    domains: dict[str, str]

    def __init__(self, cluster: FakeCluster, name: str, budget_bytes: int) -> None:
        self.name = name
        self.budget_bytes = budget_bytes
        self._cluster = cluster
        self._ids = SeededIds(cluster.rng)
        self.store = Store(self._ids.new, self._log)
        self.trainers: list[FakeTrainer] = []
        self._socket = TrainerSocket(name, self._descriptor, self._log)
        self._life = Life(name)
        self._life.end()
        self._peers = PeersDoor(cluster.net, name)
        self._transport: TransportDoor | None = None
        self._cores = Cores()

    def doors(self) -> Doors:
        """The doors of a fresh start of the agent. Raises UsageError if one runs already."""
        if self._life.alive:
            raise UsageError(f"node {self.name}: an agent runs already; crash it first")
        cluster, life = self._cluster, Life(self.name)
        arena = FakeArena(self.store, self.budget_bytes)
        self._life = life
        self._peers = PeersDoor(cluster.net, self.name)
        self._transport = TransportDoor(cluster.net, self.name, arena.view)
        self._log("start", {"store_id": self.store.store_id})

        def notes(what: str, facts: dict[str, Any]) -> None:
            life.check()
            self._log(f"note.{what}", facts)

        doors: dict[str, Any] = {
            "ledger": GuardedLedger(LedgerDoor(cluster.etcd, self.name), life),
            "membership": Guarded(MembershipDoor(cluster.etcd, self.name), life),
            "peers": GuardedPeers(self._peers, life),
            "transport": GuardedTransport(self._transport, life),
            "arena": Guarded(arena, life),
            "trainers": GuardedTrainers(TrainersDoor(self._socket), life),
            "workers": Guarded(InlineWorkers(cluster.rng, self._cores), life),
        }
        if cluster.bucket is not None:
            doors["objects"] = Guarded(ObjectsDoor(cluster.bucket, self.name), life)
        return Doors(**doors, ids=self._ids, notes=notes)

    def trainer(self) -> FakeTrainer:
        """A new training process on this node."""
        trainer = TrainerId(self._cluster.next_pid(), asyncio.get_running_loop().time())
        self.trainers.append(FakeTrainer(self._socket, trainer))
        return self.trainers[-1]

    def crash(self, *, keep_memory: bool) -> None:
        """The agent dies; or, if the memory is not kept, the whole machine and what ran on it."""
        self._log("fault.crash", {"keep_memory": keep_memory})
        self._life.end()
        self._peers.detach()
        if self._transport is not None:
            self._transport.detach()
        self._socket.handler = None
        self._cluster.net.thaw(self.name)
        if not keep_memory:
            self.store.wipe()
            for trainer in self.trainers:
                trainer.kill(host_lost=True)

    def pause(self) -> None:
        """The agent stands still (SIGSTOP): it neither begins, answers nor ends anything."""
        self._log("fault.pause", {})
        self._life.pause()
        self._cluster.net.freeze(self.name)

    def resume(self) -> None:
        """The agent goes on; what it hears first is old."""
        self._log("resume", {})
        self._cluster.net.thaw(self.name)
        self._life.resume()

    def take_cores(self) -> None:
        """Somebody else computes here: what the agent has the workers do stands, until as many
        `give_cores`."""
        self._log("fault.cores", {})
        self._cores.take()

    def give_cores(self) -> None:
        """The workers go on."""
        self._log("cores", {})
        self._cores.give()

    def mover_dies(self) -> None:
        """The agent's process for payload dies, with all transfers, and is replaced."""
        if self._life.alive and self._transport is not None:
            self._transport.restart()

    def _descriptor(self, file: str) -> bytearray:
        return self.store.descriptor(file)

    def _log(self, what: str, facts: dict[str, Any]) -> None:
        self._cluster.log.add(self.name, what, facts)
