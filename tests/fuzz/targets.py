"""The doors through which bytes of others come in, and what must hold behind each.

A target takes any bytes. It returns, as they were accepted, or it raises an error of
`p2pckpt.errors` or TopologyError, which says what was wrong. Any other exception is a defect of
the product, and so is taking more than MOST_S or MOST_BYTES of memory for it (`check`).

Contract: a target reaches the code that a user's or a peer's bytes reach, files included; it has
some valid inputs to begin with. Both drivers (hypothesis, atheris) call `check`.
"""

import asyncio
import contextlib
import hashlib
import os
import resource
import signal
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.retire import decide_retire, decide_trim
from p2pckpt.backends.agent_link import AgentLink
from p2pckpt.backends.trainers import SocketLimits, SocketTrainers
from p2pckpt.backends.ucx_flow import Frame
from p2pckpt.board import PAGE_BYTES, Board
from p2pckpt.cli.agent import read_config
from p2pckpt.coding import table, tree
from p2pckpt.coding.checksum import crc32c
from p2pckpt.errors import CheckpointError, FormatError
from p2pckpt.jobstate import JobState
from p2pckpt.ports import Change, Entry, Stored
from p2pckpt.restore.locate import Facts, candidates, decide_restore
from p2pckpt.restore.verify import bad_chunks, open_manifest, snapshot_table
from p2pckpt.save.commit import Demand, decide_commit, read_groups
from p2pckpt.save.offload import checked_part, incomplete, objects_of, read_checkpoint
from simulations.study import scenario, traces
from tests.fuzz import seeds
from tests.fuzz.specimens import ATTEMPT, enveloped
from topology.cluster import TopologyError
from topology.discover import read_cluster
from topology.hostlist import expand, fold

MOST_S = 5.0
"""Of computing, for 64 KB at most: some thousand times what it should take."""
MOST_BYTES = 1 << 30
ERRORS = (CheckpointError, TopologyError)
PAGE_OF_STATM = os.sysconf("SC_PAGE_SIZE")


class DefectError(Exception):
    """A target did what it must never do."""


@dataclass(frozen=True)
class Target:
    """``feed``: takes bytes, or with an ``ending`` a file. ``seeds``: valid inputs."""

    feed: object
    seeds: tuple
    ending: str = ""
    arguments: tuple = field(default=())

    def __call__(self, data):
        if not self.ending:
            return self.feed(data)
        path = Path(PLACE.name) / f"input{self.ending}"
        path.write_bytes(data)
        return self.feed(path, *self.arguments)


PLACE = tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm")


def check(name, data):
    """Feed a target; True if the bytes were accepted. Raises DefectError."""
    try:
        with _little_memory(), _little_time():
            TARGETS[name](data)
        accepted = True
    except ERRORS as e:
        if not str(e).strip():
            raise DefectError(f"{name}: {type(e).__name__} without a word") from e
        accepted = False
    except Exception as e:
        raise DefectError(f"{name}: {type(e).__name__}: {str(e)[:200]}") from e
    return accepted


@contextlib.contextmanager
def _little_time():
    """Whoever computes for more than MOST_S is stopped. (Of the CPU: others may be busy, too.)"""

    def stop(*_):
        raise TimeoutError(f"more than {MOST_S:g} s of computing")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextlib.contextmanager
def _little_memory():
    """What asks for more than MOST_BYTES gets a MemoryError, which is no error of ours."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * PAGE_OF_STATM + MOST_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


# -- between agents, and between agent and trainer -------------------------------------------------


def mover_frame(data):
    """256 bytes from another mover; once as they are, once with the checksum that fits."""
    for raw in (data, data[:-4] + crc32c(data[:-4]).to_bytes(4, "little")):
        with contextlib.suppress(FormatError):
            frame = Frame.unpack(raw)
            assert Frame.unpack(frame.pack()) == frame


def envelope(data):
    """Whatever comes as a message, as it comes."""
    record = w.unpack_any(data)
    assert w.pack(record) == data or w.unpack_any(w.pack(record)) == record


def message(data):
    """The body of a message, under a right first line."""
    head, _, body = data.partition(b"\n")
    kind = head.split(b" ")[1].decode("ascii", "replace") if head.count(b" ") else "Ping"
    record = w.unpack_any(enveloped(kind if kind in w.KINDS else "Ping", body))
    assert w.unpack_any(w.pack(record)) == record


class Nobody:
    """Answers everything."""

    async def on_call(self, trainer, request):
        return w.Accepted()

    async def on_gone(self, trainer):
        pass


def trainer_socket(data):
    """A connection to the agent's socket, with all that a trainer sends before it hangs up."""

    async def talk():
        server = SocketTrainers("unused", _no_file, limits=SocketLimits(frame_s=1.0))
        server._handler = Nobody()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            sending = asyncio.ensure_future(_send(theirs, data))
            await server._converse(ours)
            ours.close()
            await asyncio.gather(sending, return_exceptions=True)
        for process in list(server._processes.values()):
            server._forget(process)
        assert server._connections == 0

    asyncio.run(talk())


async def _send(sock, data):
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, data)
    sock.shutdown(socket.SHUT_WR)
    while await loop.sock_recv(sock, 65536):
        pass


def _no_file(file, writable):
    raise CheckpointError(f"no file {file}")


def agent_reply(data):
    """What an agent answers a trainer."""
    link = AgentLink(("unused",))
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            theirs.send(data)
        theirs.shutdown(socket.SHUT_WR)
        link._sock = ours
        try:
            link.call(w.ListSteps(), 1.0)
        finally:
            link.close()


# -- records and documents -------------------------------------------------------------------------


def job_records(data):
    """The ledger's records of a job: understood, or told to be unreadable; then judged."""
    keys = r.JobKeys(ATTEMPT.job)
    state = JobState(keys)
    for number, part in enumerate(data.split(seeds.LINE), 1):
        key, _, body = part.partition(b"\n")
        name, kind = (*key.decode("utf-8", "replace").split(" "), "")[:2]
        value = enveloped(kind, body) if kind in w.KINDS else body
        state.apply(Change(keys.state + name, value, number, number))
    state.revision = 99
    state.latest()
    state.doubtful()
    state.settled(ATTEMPT)
    for keep_last in (1, 2):
        decide_retire(state, keep_last)
    decide_trim(state)
    list(candidates(state, None))
    decide_restore(Facts(state, {}, [], {}, False), None, 1)


def group_records(data):
    """The group records by which a commit is judged."""
    values = [enveloped("GroupRecord", part) for part in data.split(seeds.LINE)]
    entries = [Entry(f"group/{i}", value, 1, 1) for i, value in enumerate(values)]
    groups = read_groups(entries, ATTEMPT)
    for stores in ({}, {"s1": "n1", "a": "n2"}):
        decide_commit(groups, stores, Demand(r.Layout(2, 1), 1, len(groups), 1))


def manifest(data):
    """What describes a share's bytes."""
    packed = enveloped("Manifest", data)
    found = open_manifest(packed, hashlib.sha256(packed).hexdigest())
    for entry in found.ranks[:4]:
        snapshot_table(found, entry.rank)
        for shard in range(found.layout.shards):
            if (size := entry.stored_bytes(shard, found.layout.k)) <= 1 << 20:
                bad_chunks(found, entry.rank, shard, memoryview(bytearray(size)))
        if entry.length <= 1 << 20:
            checked_part(found, entry.rank, memoryview(bytearray(entry.length)))(0, entry.length)


def checkpoint(data):
    """`checkpoint.json` of a bucket."""
    found = read_checkpoint(data, hashlib.sha256(data).hexdigest())
    incomplete(found, [Stored(name, length) for name, length in objects_of(found).items()])


def board(data):
    """The page that an agent and a rank share: bytes as they are, and records of any body."""
    cells = [enveloped(("Schedule", "Progress")[i // 2], c) for i, c in enumerate(_four(data))]
    for page in (data, b"".join(c[:1024].ljust(1024, b"\0") for c in cells)):
        found = Board(memoryview(bytearray(page[:PAGE_BYTES].ljust(PAGE_BYTES, b"\0"))))
        found.schedule.read()
        found.progress.read()


def _four(data):
    return (data.split(seeds.LINE) + [b""] * 4)[:4]


def snapshot(data):
    """A rank's snapshot file: its table, and the tree behind it."""
    found = table.parse(memoryview(data))
    tree.decode(data[found.tree_offset :])


def state_tree(data):
    """What is no tensor of a state."""
    root = tree.decode(data)
    tree.saves_data(root)
    tree.items(root)
    with contextlib.suppress(FormatError):
        tree.value(root)


# -- files that people write -----------------------------------------------------------------------


def config(path):
    """An agent's settings."""
    read_config(str(path), {})


def cluster(path, form=""):
    """A topology, in a form that is named or told from the file."""
    pattern = r"p(?P<pod>\d+)r(?P<rack>\d+)"
    found = read_cluster(path, form, pattern if form in ("", "hosts") else "")
    list(found.levels)


def host_list(data):
    """A host list, and back."""
    names = expand(data.decode("utf-8", "replace"))
    if len(names) < 1000:
        fold(names)


def trace(path):
    """A failure trace."""
    traces.describe(traces.load(path))


def study(path):
    """A scenario of the study."""
    scenario.load(str(path))


TARGETS = {
    "mover frame": Target(mover_frame, seeds.mover_frames()),
    "envelope": Target(envelope, seeds.envelopes()),
    "message": Target(message, seeds.envelopes()),
    "trainer socket": Target(trainer_socket, seeds.requests()),
    "agent reply": Target(agent_reply, seeds.replies()),
    "job records": Target(job_records, (seeds.STATE,)),
    "group records": Target(group_records, seeds.groups()),
    "manifest": Target(manifest, (seeds.MANIFEST,)),
    "checkpoint.json": Target(checkpoint, (seeds.CHECKPOINT,)),
    "board": Target(board, (seeds.BOARD,)),
    "snapshot": Target(snapshot, seeds.snapshots()),
    "state tree": Target(state_tree, seeds.trees()),
    "config": Target(config, (seeds.CONFIG,), ".toml"),
    "topology": Target(cluster, (seeds.CLUSTER,), ".toml"),
    "topology.conf": Target(cluster, (seeds.SLURM, seeds.BLOCKS), ".conf", ("slurm",)),
    "topology.yaml": Target(cluster, (seeds.SLURM_YAML,), ".yaml"),
    "kubernetes": Target(cluster, (seeds.NODES,), ".json"),
    "hosts": Target(cluster, (seeds.HOSTS,), ".txt", ("hosts",)),
    "host list": Target(host_list, (b"n[001-128,140],m1", b"r[1-2]n[1-4]", b"a,b")),
    "trace": Target(trace, (seeds.STEPS, seeds.SAMPLES, seeds.LANL), ".csv"),
    "scenario": Target(study, seeds.SCENARIOS, ".toml"),
}
