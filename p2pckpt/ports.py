"""The doors: what the agent's core needs from the world, as small Protocols.

The core (save/, restore/, agent/) is asyncio code that never opens a socket, starts a thread, reads
a clock or draws a random number itself. It goes through these ports. Production wires the real
backends (etcd, gRPC, UCX, tmpfs); the simulator wires `backends/inproc`, under virtual time. One
contract suite per port (tests/contract) runs against every backend, so that the fake is verified.

Rules for all of them. Every call is bounded in time: backends carry the deadlines of `config` and
raise the retryable errors of `errors`. Cancelling a call is always safe. Foreign exceptions never
come out. `asyncio.get_running_loop().time()` is the only clock; it is virtual in the simulator.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from p2pckpt.records import FileRecord, Member, Record
from p2pckpt.telemetry import Telemetry
from p2pckpt.traffic import Rates, Traffic

T = TypeVar("T")


# -- ledger ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One key of the ledger. Revisions are the ledger's own, rising with every write."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int


@dataclass(frozen=True)
class Compare:
    """A condition of a transaction. Make one with the functions below.

    ``end`` "" compares one key; else every key of the range [key, end); with no key in it, as one
    that is absent.
    ``target`` is "value", "create" or "mod"; ``op`` is "=", "<" or ">"; an absent key has create
    and mod revision 0, and never fulfils a comparison of its value.
    """

    key: str
    target: str
    op: str
    operand: bytes | int
    end: str = ""


def absent(key: str) -> Compare:
    """The key does not exist."""
    return Compare(key, "create", "=", 0)


def present(key: str) -> Compare:
    """The key exists."""
    return Compare(key, "create", ">", 0)


def value_is(key: str, value: bytes) -> Compare:
    """The key exists with this value."""
    return Compare(key, "value", "=", value)


def value_below(key: str, value: bytes) -> Compare:
    """The key exists and its value sorts before this one."""
    return Compare(key, "value", "<", value)


def unchanged(entry: Entry) -> Compare:
    """The key was not written since `entry` was read."""
    return Compare(entry.key, "mod", "=", entry.mod_revision)


def none_in(start: str, end: str) -> Compare:
    """No key exists in [start, end)."""
    return Compare(start, "create", "=", 0, end)


def none_newer(prefix: str, revision: int) -> Compare:
    """No key below the prefix was written after `revision`."""
    return Compare(prefix, "mod", "<", revision + 1, prefix_end(prefix))


def prefix_end(prefix: str) -> str:
    """The first key after all keys that begin with `prefix` (which must end in ASCII)."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


@dataclass(frozen=True)
class Put:
    """Write a key; with `session` it vanishes when that session's lease does."""

    key: str
    value: bytes
    session: Session | None = None


@dataclass(frozen=True)
class Txn:
    """All compares hold -> all puts and deletes happen, at one revision; else nothing does.

    At most 128 compares and 128 operations; values at most 64 KB. ``deletes`` are single keys.
    """

    compares: tuple[Compare, ...] = ()
    puts: tuple[Put, ...] = ()
    deletes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Listing:
    """A linearizable read of a prefix: its entries in key order, and the revision of the read."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True)
class Change:
    """A key was put (`value`) or deleted (`value` is None), at `revision`."""

    key: str
    value: bytes | None
    revision: int
    create_revision: int = 0


class Ledger(Protocol):
    """Linearizable keys and transactions (etcd).

    Raises LedgerUnavailable (nothing happened) or AmbiguousAnswer (a transaction may have
    happened; the caller reads back). Values over the bound or too many operations: UsageError.
    """

    async def get(self, key: str) -> Entry | None:
        """Linearizable read of one key."""
        ...

    async def list(self, prefix: str) -> Listing:
        """Linearizable read of all keys that begin with `prefix`."""
        ...

    async def transact(self, txn: Txn) -> int | None:
        """The new revision, or None if a compare did not hold."""
        ...

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Sequence[Change]]:
        """Changes below `prefix` from `from_revision` on, in order, none lost, none twice.

        Resumes over broken connections, with an empty batch for each: the ledger may have been set
        back meanwhile. Ends with Compacted if the changes are gone: list again, then watch on.
        """
        ...


# -- membership -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Session:
    """One lease: its id and the create revision of the member key it carries."""

    lease: int
    revision: int


@dataclass(frozen=True)
class Living:
    """Which agents hold a lease: linearizable, at `revision`. Sessions by node name."""

    members: dict[str, Member]
    session_revisions: dict[str, int]
    revision: int

    @property
    def stores(self) -> dict[str, str]:
        """Node name by store_id."""
        return {m.store_id: name for name, m in self.members.items()}


class Membership(Protocol):
    """Who is here, by lease."""

    async def open(self, member: Member, ttl_s: float) -> Session:
        """Announce a member under a new lease; replaces an older key of the same node name only
        if that one has the same store_id or its lease is gone, else raises UsageError."""
        ...

    async def keep(self, session: Session) -> bool:
        """Renew once. False: the lease is gone for good (TTL 0); open a new session."""
        ...

    async def close(self, session: Session) -> None:
        """Give the lease back; its keys vanish at once."""
        ...

    async def living(self) -> Living:
        """A linearizable read of all members."""
        ...


# -- peers: control between agents ----------------------------------------------------------------

PeerHandler = Callable[[str, Record], Awaitable[Record]]
"""(address or name of the caller, request) -> reply."""


class Peers(Protocol):
    """Small requests between agents. No payload, nothing over 4 MiB."""

    @property
    def address(self) -> str:
        """Where other agents reach this one."""
        ...

    async def serve(self, handler: PeerHandler) -> None:
        """Answer requests from now on. An error of `errors` in a handler reaches the caller."""
        ...

    async def call(self, address: str, request: Record, timeout_s: float) -> Record:
        """Ask. Raises PeerUnreachable (it may have been carried out), or what the peer raised."""
        ...

    async def close(self) -> None:
        """Stop serving."""
        ...


# -- arena: the node's RAM ------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    """`length` bytes from `offset` of a file in the arena."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Kept:
    """A file of the arena as it was found at start: name, capacity and its WHOLE record."""

    file: str
    capacity: int
    record: FileRecord


class Arena(Protocol):
    """The node's RAM budget as files that outlive the agent; and small documents beside them.

    Names are [a-z0-9._-]. Capacity is really reserved and pre-faulted: NoRoom(need, have) now,
    never SIGBUS later.
    """

    @property
    def store_id(self) -> str:
        """Random, made with the directory; dies with the bytes."""
        ...

    @property
    def budget_bytes(self) -> int:
        """What all files together may take."""
        ...

    @property
    def used_bytes(self) -> int:
        """Capacity of all files."""
        ...

    async def reserve(self, file: str, capacity: int) -> None:
        """Make a file. Raises NoRoom naming need and have."""
        ...

    def view(self, region: Region) -> memoryview:
        """Writable view of the bytes; valid until the file is removed."""
        ...

    def put_record(self, file: str, record: FileRecord) -> None:
        """Replace the file's record atomically."""
        ...

    def put_document(self, name: str, packed: bytes) -> None:
        """Write a small document atomically (a manifest, a copy of a ledger record)."""
        ...

    def document(self, name: str) -> bytes | None:
        """Read one back, None if absent."""
        ...

    def documents(self) -> Set[str]:
        """Names of all documents, as they are from moment to moment."""
        ...

    def adopt(self) -> tuple[Kept, ...]:
        """At start: files with a valid WHOLE record; all other files are removed."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file with its record, or a document; absent is fine."""
        ...


# -- transport: payload ---------------------------------------------------------------------------


class Expected(Protocol):
    """Bytes that were granted and are on their way into a region of ours."""

    @property
    def nonce(self) -> str:
        """What the sender must show."""
        ...

    async def received(self, timeout_s: float) -> None:
        """Wait until exactly the region's length arrived. Raises PeerUnreachable, IntegrityError
        (another length) or, if it was cancelled, Refused."""
        ...

    async def cancel(self) -> None:
        """Withdraw the grant. When this returns nobody writes into the region any more."""
        ...


class Transport(Protocol):
    """Moves payload between regions of arenas, only by the receiver's grant.

    ``traffic`` says what for, on either side; each side keeps to its own `limit`.
    """

    @property
    def address(self) -> str:
        """Where senders find us."""
        ...

    async def expect(
        self, region: Region, traffic: Traffic = Traffic.RESTORE, timeout_s: float = math.inf
    ) -> Expected:
        """Grant a write of the whole region to whoever shows the nonce. ``timeout_s`` is what the
        sender has for it: to choose rates by; the grant stays open until it is cancelled."""
        ...

    async def send(
        self,
        address: str,
        nonce: str,
        region: Region,
        timeout_s: float,
        traffic: Traffic = Traffic.RESTORE,
    ) -> None:
        """Write a region of ours to a grant of a peer's. Returning says the bytes left, not that
        they arrived: only the receiver knows. Raises PeerUnreachable or Refused."""
        ...

    def limit(self, rates: Rates) -> None:
        """From now on each kind moves at most so many bytes a second in each direction."""
        ...

    async def close(self) -> None:
        """End all transfers."""
        ...


# -- objects --------------------------------------------------------------------------------------


async def _at_once(_size_bytes: int) -> None: ...


@dataclass(frozen=True)
class Upload:
    """An object to be: ``part(offset, length)`` gives its bytes and may raise; it is called on a
    worker, perhaps twice for a range, at offsets that are multiples of ``unit_bytes``."""

    name: str
    length: int
    unit_bytes: int
    part: Callable[[int, int], bytes]
    ready: Callable[[int], Awaitable[None]] = field(default=_at_once)
    """Awaited before so many bytes leave: what they are held back by."""


@dataclass(frozen=True)
class Stored:
    """An object that is there: its name and length."""

    name: str
    length: int


@dataclass(frozen=True)
class Pending:
    """A multipart upload that was begun and neither completed nor aborted."""

    name: str
    upload_id: str
    age_s: float


class ObjectStore(Protocol):
    """Immutable objects that outlive the cluster (S3). Names are relative to the store's prefix.

    Every call retries within its own deadline and then raises ObjectStoreUnavailable: what was
    asked may have happened. Nothing relies on the store for the truth, nor on its checking.
    """

    async def put(self, upload: Upload) -> None:
        """Put an object, whole or not at all; the same name again replaces it.

        Raises what `part` raises, IntegrityError if the store got other bytes, UsageError if the
        object is too long for the store.
        """
        ...

    async def put_absent(self, name: str, data: bytes) -> bool:
        """Put a small object unless there is one: False. Not every store does it atomically, so
        who must know reads back."""
        ...

    async def get(self, name: str) -> bytes:
        """A small object, whole. Raises ObjectAbsent."""
        ...

    async def get_into(self, name: str, offset: int, into: memoryview) -> None:
        """Exactly this range of an object into memory; when this returns or raises nobody writes
        there any more. Raises ObjectAbsent, or IntegrityError if the object is too short."""
        ...

    async def head(self, name: str) -> Stored | None:
        """Is it there?"""
        ...

    async def list(self, prefix: str) -> tuple[Stored, ...]:
        """All objects whose names begin with `prefix`, in order of their names."""
        ...

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; absent ones are fine."""
        ...

    async def pending(self, prefix: str) -> tuple[Pending, ...]:
        """Multipart uploads below `prefix` that are neither completed nor aborted."""
        ...

    async def abort(self, pending: Pending) -> None:
        """Abort one, until it has no parts left."""
        ...

    async def close(self) -> None:
        """End the connections."""
        ...


# -- trainers: the ranks on this node -------------------------------------------------------------


@dataclass(frozen=True)
class TrainerId:
    """A training process, told apart from a later one of the same pid by its start time."""

    pid: int
    started: float


class TrainerHandler(Protocol):
    """The agent's side of the trainers' socket."""

    async def on_call(self, trainer: TrainerId, request: Record) -> Record:
        """Answer one request. An error of `errors` reaches the trainer as Failed."""
        ...

    async def on_gone(self, trainer: TrainerId) -> None:
        """The process is dead (pidfd), so it writes nothing any more."""
        ...


class Trainers(Protocol):
    """Requests of training processes, and their deaths. Files named in a Slot or RestoreFile reply
    are handed over as descriptors by the backend."""

    async def serve(self, handler: TrainerHandler) -> None:
        """Answer from now on."""
        ...

    async def close(self) -> None:
        """Stop."""
        ...


# -- workers, ids ---------------------------------------------------------------------------------


class Workers(Protocol):
    """Heavy or blocking work off the event loop."""

    async def run(
        self, work: Callable[[], T], cost_bytes: int, traffic: Traffic = Traffic.RESTORE
    ) -> T:
        """Run `work` elsewhere. `cost_bytes` is what it touches: the simulator's time for it.
        What is not for a RESTORE may have fewer cores, and waits for one."""
        ...


class Ids(Protocol):
    """Chance, through a door."""

    def new(self) -> str:
        """A fresh identity: 32 hex digits."""
        ...

    def uniform(self, low: float, high: float) -> float:
        """A random delay."""
        ...


# -- all of them ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Doors:
    """The ports of one agent, wired by the daemon or the simulator."""

    ledger: Ledger
    membership: Membership
    peers: Peers
    transport: Transport
    arena: Arena
    trainers: Trainers
    workers: Workers
    ids: Ids
    notes: Callable[[str, dict[str, Any]], None] = field(default=lambda _what, _facts: None)
    """Told of every step the agent takes: telemetry in production, the event log in the world."""
    objects: ObjectStore | None = None
    """Where every Nth committed step goes; None: nowhere."""
    telemetry: Telemetry = field(default_factory=lambda: Telemetry(_loop_time))
    """Counters, gauges and stage times of this start of the agent."""


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
