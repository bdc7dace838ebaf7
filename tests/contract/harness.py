"""The backends that the contract suites run against, each as a factory of a rig.

A suite is the specification of a port. A test in it is a coroutine `story(rig)` that uses nothing
but the port and what its rig class says here, so it can run against any backend. To add a backend,
add `Backend(make, play)` to the port's dictionary: `make` is an async context manager that yields
the rig, `play` runs a coroutine (`asyncio.run`, or virtual time).

Rules for stories: bounded waits only, capacities in multiples of 4096 bytes, no clock but the
loop's, delays of at most a few seconds (in real backends they are real), and no fault switches:
those are the fake's own and are tested in tests/unit/test_inproc_faults.py.
"""

import asyncio
import atexit
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from p2pckpt import errors, wire
from p2pckpt.backends.arena import TmpfsArena
from p2pckpt.backends.inproc.cluster import FakeCluster
from p2pckpt.backends.peers import GrpcPeers
from p2pckpt.backends.trainers import SocketTrainers
from p2pckpt.backends.ucx import UcxTransport
from p2pckpt.backends.workers import ThreadWorkers
from p2pckpt.ports import (
    Arena,
    Ledger,
    Membership,
    ObjectStore,
    Peers,
    Region,
    TrainerId,
    Trainers,
    Transport,
    Txn,
)
from p2pckpt.records import Attempt, FileKind, FileRecord, FileState, Member, Record
from simulations.world import clock

STORY_S = 60.0
"""No story takes longer, in the backend's own time."""


@dataclass(frozen=True)
class Backend:
    """How to make a rig, and how to run a coroutine for it."""

    make: Callable[[], AbstractAsyncContextManager[Any]]
    play: Callable[[Coroutine[Any, Any, None]], None]

    def run(self, story: Callable[[Any], Awaitable[None]]) -> None:
        """Play one story on a fresh rig."""

        async def main() -> None:
            async with asyncio.timeout(STORY_S), self.make() as rig:
                await story(rig)

        self.play(main())


# -- rigs: what the stories of a port are given ---------------------------------------------------


@dataclass(frozen=True)
class LedgerRig:
    """Two clients of one empty ledger, and the membership port of each."""

    ledger: Ledger
    other: Ledger
    membership: Membership
    other_membership: Membership


@dataclass(frozen=True)
class ArenaRig:
    """An empty arena, and what the next start of the agent on the same memory is given."""

    arena: Arena
    restart: Callable[[], Arena]
    spoil_record: Callable[[str], None]
    """Damage the record beside a file, as bit rot would."""


@dataclass(frozen=True)
class PeersRig:
    """Two agents that reach each other."""

    a: Peers
    b: Peers


@dataclass(frozen=True)
class TransportRig:
    """Two agents with an arena each; payload goes from `a` to `b`."""

    a: Transport
    b: Transport
    a_arena: Arena
    b_arena: Arena


@dataclass(frozen=True)
class ObjectsRig:
    """Two clients of one empty object store. An object of BIG_BYTES goes in several parts."""

    a: ObjectStore
    b: ObjectStore


BIG_BYTES = 12 * 1024 * 1024 + 4321


class Trainer:
    """What a story needs of a training process; backends subclass it."""

    id: TrainerId

    async def call(self, request: Record) -> Record:
        """Ask the agent; raises what it answered with Failed."""
        raise NotImplementedError

    async def write(self, file: str, data: bytes) -> None:
        """Write to the beginning of a file that was handed over."""
        raise NotImplementedError

    async def read(self, file: str, length: int) -> bytes:
        """Read from the beginning of a file that was handed over."""
        raise NotImplementedError

    async def kill(self) -> None:
        """Die at once, as by SIGKILL."""
        raise NotImplementedError


@dataclass(frozen=True)
class TrainersRig:
    """The agent's door, its arena, and a way to start training processes."""

    door: Trainers
    arena: Arena
    launch: Callable[[], Awaitable[Trainer]]


# -- records that stories use ---------------------------------------------------------------------


def member(node: str, store_id: str = "s1") -> Member:
    """A member record."""
    return Member(
        node=node,
        host=f"host-of-{node}",
        store_id=store_id,
        session="x",
        peers_address=f"{node}:1",
        transport_address=f"{node}:2",
        domains={"rack": "r1"},
    )


async def fill(arena: Arena, file: str, data: bytes) -> None:
    """Reserve whole pages for `data` and write it to their beginning."""
    await arena.reserve(file, max(4096, -(-len(data) // 4096) * 4096))
    arena.view(Region(file, 0, len(data)))[:] = data


def read(arena: Arena, file: str, length: int, offset: int = 0) -> bytes:
    """Bytes of a file."""
    return bytes(arena.view(Region(file, offset, length)))


def file_record(state: str = "whole", length: int = 4096, step: int = 7) -> FileRecord:
    """A record of a file."""
    attempt = Attempt(ledger_id="l", job="0.j", generation=1, ordinal=0, step=step)
    return FileRecord(
        state=FileState(state),
        kind=FileKind.SHARD,
        attempt=attempt,
        owner="n1",
        part=2,
        length=length,
        manifest_digest="d" * 64,
    )


# -- the in-process fake --------------------------------------------------------------------------


def play_virtual(main: Coroutine[Any, Any, None]) -> None:
    """Under virtual time."""
    clock.run(main, limit_s=2 * STORY_S)


def _two_nodes():
    cluster = FakeCluster(seed=1, bytes_per_s=1e9, piece_bytes=64 * 1024)
    nodes = [cluster.node(name, budget_bytes=1 << 24) for name in ("a", "b")]
    return [node.doors() for node in nodes]


@asynccontextmanager
async def inproc_ledger():
    """Two clients of a `FakeEtcd`."""
    a, b = _two_nodes()
    yield LedgerRig(a.ledger, b.ledger, a.membership, b.membership)


@asynccontextmanager
async def inproc_arena():
    """A `FakeArena` of 16 MiB."""
    node = FakeCluster(seed=1).node("a", budget_bytes=1 << 24)

    def restart() -> Arena:
        node.crash(keep_memory=True)
        return node.doors().arena

    def spoil_record(file: str) -> None:
        node.store.flip_record(file, offset=40, bit=3)

    yield ArenaRig(node.doors().arena, restart, spoil_record)


@asynccontextmanager
async def inproc_peers():
    """Two nodes of a `FakeNet`."""
    a, b = _two_nodes()
    yield PeersRig(a.peers, b.peers)


@asynccontextmanager
async def inproc_transport():
    """Two nodes of a `FakeNet`."""
    a, b = _two_nodes()
    yield TransportRig(a.transport, b.transport, a.arena, b.arena)


class InprocTrainer(Trainer):
    """A `FakeTrainer`."""

    def __init__(self, fake):
        self.id = fake.id
        self._fake = fake

    async def call(self, request):
        return await self._fake.call(request)

    async def write(self, file, data):
        self._fake.view(file, len(data))[:] = data

    async def read(self, file, length):
        return bytes(self._fake.view(file, length))

    async def kill(self):
        self._fake.kill()


@asynccontextmanager
async def inproc_trainers():
    """The trainers of a `FakeNode`."""
    node = FakeCluster(seed=1).node("a", budget_bytes=1 << 24)
    doors = node.doors()

    async def launch():
        return InprocTrainer(node.trainer())

    yield TrainersRig(doors.trainers, doors.arena, launch)


# -- one real node: RAM files and the trainers' socket ---------------------------------------------


@asynccontextmanager
async def tmpfs_arena():
    """A `TmpfsArena` of 16 MiB."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        arenas = [TmpfsArena(f"{place}/arena", 1 << 24)]

        def restart() -> Arena:
            arenas[-1].close()
            arenas.append(TmpfsArena(f"{place}/arena", 1 << 24))
            return arenas[-1]

        def spoil_record(file: str) -> None:
            path = arenas[-1].path(file).with_suffix(".rec")
            content = bytearray(path.read_bytes())
            content[40] ^= 8
            path.write_bytes(content)

        try:
            yield ArenaRig(arenas[0], restart, spoil_record)
        finally:
            arenas[-1].close()


TRAINER_PROCESS = """
import os, signal, sys
signal.alarm(60)
from p2pckpt import wire
from p2pckpt.backends.agent_link import AgentLink
from p2pckpt.errors import CheckpointError
from p2pckpt.backends.trainers import _started_s
link = AgentLink(sys.argv[1:])
print(_started_s(os.getpid()), flush=True)
for line in sys.stdin:
    do, data, file = line.rstrip("\\n").split(" ")
    try:
        if do == "call":
            answer = wire.pack(link.call(wire.unpack_any(bytes.fromhex(data)), 30))
        elif do == "write":
            answer = b""
            link.map(file)[:len(data) // 2] = bytes.fromhex(data)
        else:
            answer = bytes(link.map(file)[:int(data)])
    except CheckpointError as e:
        answer = wire.pack(wire.Failed(error=type(e).__name__, message=str(e)))
    print(answer.hex(), flush=True)
"""


class ProcessTrainer(Trainer):
    """A process that does with its `AgentLink` what it is told on its standard input."""

    @classmethod
    async def start(cls, path):
        self = cls()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", TRAINER_PROCESS, path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.id = TrainerId(self._process.pid, float(await self._process.stdout.readline()))
        return self

    async def _told(self, do, data, file=""):
        self._process.stdin.write(f"{do} {data} {file}\n".encode())
        if not (answer := await self._process.stdout.readline()):
            raise asyncio.CancelledError(f"trainer {self.id.pid} is dead")
        return bytes.fromhex(answer.decode())

    async def call(self, request):
        reply = wire.unpack_any(await self._told("call", wire.pack(request).hex()))
        if isinstance(reply, wire.Failed):
            raise getattr(errors, reply.error)(reply.message)
        return reply

    async def write(self, file, data):
        assert await self._told("write", data.hex(), file) == b""

    async def read(self, file, length):
        return await self._told("read", length, file)

    async def kill(self):
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def end(self):
        """When no call waits any more: close the pipes, too."""
        await self.kill()
        await self._process.communicate()


@asynccontextmanager
async def socket_trainers():
    """A `SocketTrainers`, and a real process for each trainer."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        arena = TmpfsArena(Path(place) / "arena", 1 << 24)
        door = SocketTrainers(f"{place}/agent.sock", arena.descriptor)
        started = []

        async def launch():
            started.append(await ProcessTrainer.start(f"{place}/agent.sock"))
            return started[-1]

        try:
            yield TrainersRig(door, arena, launch)
        finally:
            for trainer in started:
                await trainer.end()
            await door.close()
            arena.close()


# -- etcd -----------------------------------------------------------------------------------------


@functools.cache
def real_etcd():
    """One etcd server for all stories of this process; it ends with the process."""
    from p2pckpt.backends.etcd_server import EtcdOptions, EtcdServers

    place = tempfile.TemporaryDirectory(prefix="p2pckpt-contract-")
    servers = EtcdServers.start(Path(place.name), 1, EtcdOptions(durable=False))
    atexit.register(place.cleanup)
    atexit.register(servers.close)  # first: what is registered last
    return servers


@asynccontextmanager
async def etcd_ledger():
    """Two clients of a real etcd without keys."""
    from p2pckpt.backends.etcd import Etcd

    endpoints = real_etcd().endpoints
    async with Etcd(endpoints) as a, Etcd(endpoints) as b:
        for entry in (await a.ledger.list("")).entries:
            await a.ledger.transact(Txn(deletes=(entry.key,)))
        yield LedgerRig(a.ledger, b.ledger, a.membership, b.membership)


# -- gRPC and UCX ---------------------------------------------------------------------------------


@asynccontextmanager
async def grpc_peers():
    """Two `GrpcPeers` on loopback."""
    a, b = await GrpcPeers.start("127.0.0.1"), await GrpcPeers.start("127.0.0.1")
    try:
        yield PeersRig(a, b)
    finally:
        await a.close()
        await b.close()


@asynccontextmanager
async def ucx_transport():
    """Two `UcxTransport`s with a mover and a `TmpfsArena` of 16 MiB each."""
    if importlib.util.find_spec("ucxx") is None:  # not imported: it changes the environment
        pytest.skip("needs p2pckpt[ucx-cu12]")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        arenas = [TmpfsArena(f"{place}/{name}", 1 << 24) for name in ("a", "b")]
        starts = (UcxTransport.start(arena.descriptor, "127.0.0.1") for arena in arenas)
        a, b = await asyncio.gather(*starts)
        try:
            yield TransportRig(a, b, *arenas)
        finally:
            await a.close()
            await b.close()
            for arena in arenas:
                arena.close()


# -- object stores --------------------------------------------------------------------------------


@asynccontextmanager
async def inproc_objects():
    """Two doors of a `FakeBucket`."""
    cluster = FakeCluster(seed=1)
    cluster.add_bucket()
    a, b = (cluster.node(name, budget_bytes=1 << 20).doors().objects for name in ("a", "b"))
    yield ObjectsRig(a, b)


@functools.cache
def real_s3():
    """One SeaweedFS for all stories of this process; it ends with the process."""
    from p2pckpt.backends.seaweed import Seaweed

    place = tempfile.TemporaryDirectory(prefix="p2pckpt-contract-")
    server = Seaweed.start(Path(place.name))
    atexit.register(place.cleanup)
    atexit.register(server.close)  # first: what is registered last
    os.environ.update(server.environment)
    return server


@asynccontextmanager
async def s3_objects():
    """Two clients of a real S3 server, below a prefix of their own; parts of 5 MiB."""
    from p2pckpt.backends.s3 import Place, S3Objects

    server = real_s3()
    place = Place(
        server.bucket, f"runs/{os.urandom(8).hex()}", server.endpoint, part_bytes=5 * 1024 * 1024
    )
    workers = ThreadWorkers(4)
    a, b = S3Objects(place, workers), S3Objects(place, workers)
    try:
        yield ObjectsRig(a, b)
    finally:
        await a.close()
        await b.close()
        workers.close()


OBJECTS = {
    "inproc": Backend(inproc_objects, play_virtual),
    "s3": Backend(s3_objects, asyncio.run),
}
LEDGERS = {
    "inproc": Backend(inproc_ledger, play_virtual),
    "etcd": Backend(etcd_ledger, asyncio.run),
}
ARENAS = {
    "inproc": Backend(inproc_arena, play_virtual),
    "tmpfs": Backend(tmpfs_arena, asyncio.run),
}
PEERS = {
    "inproc": Backend(inproc_peers, play_virtual),
    "grpc": Backend(grpc_peers, asyncio.run),
}
TRANSPORTS = {
    "inproc": Backend(inproc_transport, play_virtual),
    "ucx": Backend(ucx_transport, asyncio.run),
}
TRAINERS = {
    "inproc": Backend(inproc_trainers, play_virtual),
    "socket": Backend(socket_trainers, asyncio.run),
}
