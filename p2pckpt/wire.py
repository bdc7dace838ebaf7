"""Records and messages to bytes and back, without any I/O.

One envelope is used everywhere: for values in the ledger, for documents beside RAM files, for
control frames between agents and between trainer and agent. It is a line of text and a JSON body:

    p2pckpt/1 outcome 231 e3069283\\n{"attempt":{...},"verdict":"commit",...}

that is magic and version, kind, body length in bytes, CRC32C of kind and body in hexadecimal. So
`etcdctl get` and `cat` show something that a person can read, and a flipped bit is noticed.

Contract: `unpack(pack(x), type(x)) == x`; anything else that comes in (another magic or version,
a wrong length or digest, unknown or missing fields, a kind that was not asked for) raises
FormatError and says what was needed and what was found. Bodies are decoded by msgspec against the
type's own annotations; nothing is ever unpickled or evaluated.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from p2pckpt import records as r
from p2pckpt.coding.checksum import crc32c
from p2pckpt.errors import FormatError, UsageError
from p2pckpt.traffic import Traffic

VERSION = 1
READS = (1,)
"""Versions that `unpack` understands: the current one and, from version 2 on, the one before."""

MAGIC = b"p2pckpt/"
MAX_RECORD_BYTES = 64 * 1024
"""Bound of a ledger value: etcd keeps everything in memory and in every snapshot of its own."""
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Bound of any envelope: a manifest of a terabyte share stays below it."""
_HEAD_BYTES = 96

T = TypeVar("T")


# -- messages between agents ----------------------------------------------------------------------


class Ping(r.Record, frozen=True):
    """Is this agent, with this store, there?"""

    store_id: str = ""


class Pong(r.Record, frozen=True):
    """It is."""

    store_id: str
    session: str


class Grant(r.Record, frozen=True):
    """Leave to write exactly `length` bytes to whoever chose `nonce`, at a transport address."""

    address: str
    nonce: str
    length: int


class PutOffer(r.Record, frozen=True):
    """An owner asks a holder to keep shard `index` of its share: `lengths` per rank, in order."""

    attempt: r.Attempt
    owner: str
    index: int
    lengths: tuple[int, ...]
    manifest_bytes: int
    manifest_digest: str
    traffic: Traffic = Traffic.SAVE


class PutGrant(r.Record, frozen=True):
    """The holder's answer: where each rank's piece of the shard and the manifest go.

    A piece of length 0 has a grant that is not used.
    """

    shard: tuple[Grant, ...]
    manifest: Grant


class PutSeal(r.Record, frozen=True):
    """All bytes were sent; asks for the receipt."""

    attempt: r.Attempt
    owner: str
    index: int


class Receipt(r.Record, frozen=True):
    """The shard lies WHOLE in this store and every chunk matched the manifest."""

    store_id: str
    manifest_digest: str


class RefusedReply(r.Record, frozen=True):
    """No, and why. `room_need` > 0: for lack of room."""

    reason: str
    room_need: int = 0
    room_have: int = 0


class HeldQuery(r.Record, frozen=True):
    """What do you hold of this job (of this attempt, if given)?"""

    job: str
    attempt: r.Attempt | None = None


class HeldFile(r.Record, frozen=True):
    """One WHOLE file; see FileRecord."""

    attempt: r.Attempt
    kind: r.FileKind
    owner: str
    part: int
    manifest_digest: str


class HeldReply(r.Record, frozen=True):
    """Everything WHOLE that was asked for; `bytes_held` counts also what is not WHOLE."""

    store_id: str
    files: tuple[HeldFile, ...]
    bytes_held: int


class GetManifest(r.Record, frozen=True):
    """Send me the manifest with this digest."""

    attempt: r.Attempt
    owner: str
    manifest_digest: str
    offset: int = 0


class ManifestReply(r.Record, frozen=True):
    """A piece of the packed manifest of `total` bytes; the asker checks its digest."""

    total: int
    packed: bytes


class GetRange(r.Record, frozen=True):
    """Write `length` bytes from `offset` of a WHOLE file to the grant."""

    attempt: r.Attempt
    kind: r.FileKind
    owner: str
    part: int
    offset: int
    grant: Grant
    traffic: Traffic = Traffic.RESTORE


class Sent(r.Record, frozen=True):
    """The bytes left."""


class CopiesQuery(r.Record, frozen=True):
    """What do you remember of this job's ledger?"""

    job: str


class CopiesReply(r.Record, frozen=True):
    """The ledger as last seen, and copies of the commits of which bytes are held."""

    seen: r.LedgerSeen | None
    copies: tuple[r.CommitCopy, ...]


class VerifyQuery(r.Record, frozen=True):
    """Read the WHOLE file of these `length` bytes again: are they what the manifest says?"""

    attempt: r.Attempt
    kind: r.FileKind
    owner: str
    part: int
    manifest_digest: str
    length: int


class BadPiece(r.Record, frozen=True):
    """Chunks of one shard's piece of one rank that differ from the manifest: how many, and which
    (the first of them only, so that a reply stays small)."""

    rank: int
    shard: int
    count: int
    chunks: tuple[int, ...]


class VerifyReply(r.Record, frozen=True):
    """All of the file was read; what was wrong."""

    bad: tuple[BadPiece, ...]


class FreeCleaned(r.Record, frozen=True):
    """Read the ledger, free what was cleaned of this job, and say (HeldReply) what is left."""

    job: str


class LookAgain(r.Record, frozen=True):
    """A file of the newest step was found wrong or gone: look at once what there is to repair.

    With ``nodes``: nothing is lost, but these hold parts of it that no record names.
    """

    attempt: r.Attempt
    nodes: tuple[str, ...] = ()


class LookAtOwn(r.Record, frozen=True):
    """Look whether what the ledger has of a job in your name is so: joins, living ranks, readers.

    Who asks is held up by it. The answer, Accepted, comes when what is not so is gone.
    """

    job: str


class DrainCall(r.Record, frozen=True):
    """Begin to drain a node (``draining`` True), end that (False), or say how far it is (None).

    Of an agent's own node, or passed on to the agent that is named. Needs no join.
    """

    node: str
    draining: bool | None = None


class DrainReply(r.Record, frozen=True):
    """How far it is. ``done``: the node may go. ``stuck``: what is left finds no place now.

    ``left``: shards that only this node has; ``waiting``: saves in flight that it holds a part of;
    ``lacking``: in sentences. ``jobs``: JSON, what each job's newest step survives without it.
    """

    node: str
    draining: bool
    done: bool
    stuck: bool
    moved: int
    moved_bytes: int
    left: int
    waiting: int
    lacking: tuple[str, ...]
    jobs: str


class HandIn(r.Record, frozen=True):
    """A node's piece for its group's record: a sealed share or a report. See agent/gather."""

    job: str
    ledger_id: str
    node: str
    generation: int
    share: r.SealedShare | None = None
    attempt: r.Attempt | None = None
    report: r.NodeReport | None = None
    ballot: int = 0


class Accepted(r.Record, frozen=True):
    """Taken note of."""


# -- messages between trainer and agent -----------------------------------------------------------


class TrainerJoin(r.Record, frozen=True):
    """A rank of a launch presents itself."""

    job: str
    rank: int
    world_size: int
    run_token: str
    layout: r.Layout
    keep_last: int
    takeover: bool = False
    timeout_s: float = 300.0


class TrainerRejoin(r.Record, frozen=True):
    """A rank that lost its agent presents itself to the next one.

    ``nonce``: of its generation; a job that was cleaned counts anew. "": not known.
    """

    job: str
    rank: int
    generation: int
    nonce: str = ""


class Joined(r.Record, frozen=True):
    """The generation that all ranks of the launch now belong to.

    ``board``: the page of `board.py`, whose descriptor comes along; "": there is no room for one.
    """

    generation: int
    node: str
    board: str = ""
    nonce: str = ""


class PrepareSlots(r.Record, frozen=True):
    """Saves of `capacity` bytes are to come: make room in the background."""

    capacity: int


class OpenSlot(r.Record, frozen=True):
    """Room for a snapshot of `capacity` bytes, please; waits at most the skip bound."""

    ordinal: int
    step: int
    capacity: int


class Slot(r.Record, frozen=True):
    """Write there; the file descriptor comes along where processes differ.

    ``slots``: all slot files of the job here; a mapping of any other is of no use any more.
    """

    file: str
    capacity: int
    slots: tuple[str, ...] = ()


class Skipped(r.Record, frozen=True):
    """This attempt is not taken, on any rank; the reason."""

    reason: str


class SlotDone(r.Record, frozen=True):
    """The snapshot lies whole in the slot and the trainer no longer writes."""

    ordinal: int
    step: int
    length: int
    meta: str = "{}"


class SlotFailed(r.Record, frozen=True):
    """The trainer could not write its snapshot; the attempt is to end."""

    ordinal: int
    step: int
    reason: str


class SaveStatus(r.Record, frozen=True):
    """How did the attempt end? Waits at most `wait_s`."""

    ordinal: int
    step: int
    wait_s: float


class SaveState(r.Record, frozen=True):
    """`outcome` is None while it is open."""

    outcome: r.Outcome | None


class RestoreCall(r.Record, frozen=True):
    """What is there to restore? Every rank of the generation asks; `ordinal` counts its calls."""

    ordinal: int
    step: int | None = None
    timeout_s: float = 600.0


class RestoreFile(r.Record, frozen=True):
    """One rank's snapshot lies in `file`; `table` has its CRC32C per chunk."""

    ballot: int
    step: int
    file: str
    length: int
    chunk_bytes: int
    table: bytes
    source: str
    meta: str = "{}"
    bytes_from: dict[str, int] = {}
    seconds: dict[str, float] = {}


class RestoreNothing(r.Record, frozen=True):
    """It is proven that there is nothing."""

    ballot: int
    reason: str


class MendChunk(r.Record, frozen=True):
    """These bytes of the restore file are wrong; fetch them from elsewhere."""

    ballot: int
    offset: int
    length: int


class RestoreAgain(r.Record, frozen=True):
    """The ballot ended without success; ask again, with the same ordinal."""

    reason: str


class RestoreDone(r.Record, frozen=True):
    """Loaded (failed == "") or not; answered when the ballot is closed for all ranks."""

    ballot: int
    failed: str = ""
    retryable: bool = False


class RestoreClosed(r.Record, frozen=True):
    """How it ended for all ranks."""

    closed: r.Closed


class ListSteps(r.Record, frozen=True):
    """Which steps are committed?"""


class Steps(r.Record, frozen=True):
    """Of the current lineage, ascending; in flight ones apart."""

    committed: tuple[int, ...]
    in_flight: tuple[int, ...]


class RebuildCall(r.Record, frozen=True):
    """Rebuild a job's ledger records from agents' copies. Needs no join."""

    job: str
    dry_run: bool = False


class RebuildReply(r.Record, frozen=True):
    """What was (would be) rebuilt, from whom; `problem` "" if it was done or may be."""

    problem: str
    asked: tuple[str, ...]
    answered: tuple[str, ...]
    ledger_id: str
    generation: int
    steps: tuple[int, ...]


class ScheduleCall(r.Record, frozen=True):
    """Agree on an extra step, or on a last one (`last`), for a job or all with ranks here ("").

    Needs no join. Waits at most `wait_s`; with 0 it is only begun.
    """

    job: str
    last: bool
    reason: str
    wait_s: float


class ScheduleReply(r.Record, frozen=True):
    """What stands now, by job; or why nothing was agreed, by job."""

    schedules: dict[str, r.Schedule] = {}
    problems: dict[str, str] = {}


class StatusQuery(r.Record, frozen=True):
    """How does this node stand? Needs no join."""


class StatusReply(r.Record, frozen=True):
    """A JSON document; its fields are in README, "status"."""

    document: str


class JobsQuery(r.Record, frozen=True):
    """Which jobs are known, to the ledger or by their bytes here? Needs no join."""


class JobsReply(r.Record, frozen=True):
    """A JSON document: job -> facts."""

    document: str


class StepQuery(r.Record, frozen=True):
    """All of a committed step (None: the latest), kept from retirement until the asker's process
    ends. ``job``: name or uid.name; "" if there is one only. RefusedReply: there is none."""

    job: str
    step: int | None = None


class StepReply(r.Record, frozen=True):
    """The step's records, who lives, and who holds what of it now. ``redundancy``: JSON as in
    status."""

    job: str
    commit: r.Commit
    groups: tuple[r.GroupRecord, ...]
    held: dict[str, HeldReply]
    silent: tuple[str, ...]
    redundancy: str
    members: tuple[r.Member, ...] = ()


class VerifyCall(r.Record, frozen=True):
    """Have a node verify one file. Needs no join."""

    node: str
    query: VerifyQuery


class ExportCall(r.Record, frozen=True):
    """Bring one rank's snapshot here, as a RestoreFile, until ExportDone. Needs no join."""

    attempt: r.Attempt
    rank: int


class ExportDone(r.Record, frozen=True):
    """The file was read."""

    file: str


class CleanCall(r.Record, frozen=True):
    """Free all bytes of a finished job and remove its records. Needs no join."""

    job: str
    dry_run: bool


class CleanReply(r.Record, frozen=True):
    """What goes (or went) of a job. ``problem``: why it may not go; "" if it may.

    ``held``: bytes by node at the beginning. ``left``: nodes that still held some at the end.
    ``away``: nodes of the last generation without a living agent; they clean up on return.
    ``objects``: names of checkpoints in the object store, which stay.
    """

    job: str
    problem: str
    ledger_ids: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    records: int = 0
    held: dict[str, int] = {}
    left: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()


class Failed(r.Record, frozen=True):
    """The call failed; `error` names a class of p2pckpt.errors."""

    error: str
    message: str


class Leave(r.Record, frozen=True):
    """The trainer is done (close())."""


def file_of(reply: r.Record) -> tuple[str, bool] | None:
    """The RAM file whose descriptor goes with a reply to a trainer; may the trainer write it?"""
    match reply:
        case Slot():
            return reply.file, True
        case RestoreFile():
            return reply.file, False
        case Joined(board=board) if board:
            return board, True
    return None


# -- the envelope ---------------------------------------------------------------------------------

KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (*vars(r).values(), *list(globals().values()))
    if isinstance(kind, type) and issubclass(kind, r.Record) and kind is not r.Record
}
"""Every record and message by its kind, which is its class name."""

LASTING = {kind for kind in KINDS.values() if kind.__module__ == r.__name__}
"""What ledger and files keep; messages come once."""

REMEMBERED, REMEMBERED_BYTES = 4096, 1024
"""Envelopes that `unpack` remembers, and how long one may be: more than a job has members."""

LARGE, LARGE_BYTES = 64, 64 * 1024
"""The same of larger ones: the group records and roster pieces of some steps."""

_ENCODER = msgspec.json.Encoder(order="deterministic")
_DECODERS = {name: msgspec.json.Decoder(kind) for name, kind in KINDS.items()}


def pack(record: r.Record) -> bytes:
    """The envelope of a record. Equal records give equal bytes, so a digest of them is theirs."""
    kind = type(record).__name__
    if KINDS.get(kind) is not type(record):
        raise UsageError(f"pack: {kind} is not a record or message of this protocol")
    try:
        body = _ENCODER.encode(record)
        if b"null" in body:  # None, or what JSON makes of a number that is not finite
            _DECODERS[kind].decode(body)
    except (UnicodeEncodeError, msgspec.ValidationError) as e:
        raise UsageError(f"pack: {kind} holds what cannot come back: {e}") from None
    if len(body) > MAX_FRAME_BYTES:
        raise FormatError(f"{kind}: {len(body)} bytes, need at most {MAX_FRAME_BYTES}")
    crc = crc32c(body, crc32c(kind.encode()))
    return b"%s%d %s %d %08x\n%s" % (MAGIC, VERSION, kind.encode(), len(body), crc, body)


def unpack_any(data: bytes | memoryview) -> Any:
    """The record of an envelope, of whatever kind. Raises FormatError."""
    raw = bytes(data)
    head, newline, body = raw.partition(b"\n")
    if not newline or len(head) > _HEAD_BYTES or not head.startswith(MAGIC):
        raise FormatError(
            f"envelope: needs a first line 'p2pckpt/{VERSION} ...', has {head[:32]!r}"
        )
    parts = head[len(MAGIC) :].split(b" ")
    try:
        version, length, crc = int(parts[0]), int(parts[2]), int(parts[3], 16)
        kind = parts[1].decode("ascii")
    except (IndexError, ValueError):
        raise FormatError(f"envelope: malformed first line {head[:64]!r}") from None
    if version not in READS:
        raise FormatError(f"envelope {kind}: version {version}, this release reads {READS}")
    if kind not in KINDS:
        raise FormatError(f"envelope: unknown kind {kind!r}")
    if len(body) != length:
        raise FormatError(f"{kind}: needs {length} body bytes, has {len(body)}")
    if head != b"%s%d %s %d %08x" % (MAGIC, version, parts[1], length, crc):
        raise FormatError(f"{kind}: first line is not in its one form: {head[:64]!r}")
    if (found := crc32c(body, crc32c(parts[1]))) != crc:
        raise FormatError(f"{kind}: CRC32C needs {crc:08x}, has {found:08x}")
    try:
        return _DECODERS[kind].decode(body)
    except (msgspec.MsgspecError, UsageError, RecursionError) as e:
        raise FormatError(f"{kind}: {e}") from None


_unpack_again = lru_cache(maxsize=REMEMBERED)(unpack_any)
_unpack_large = lru_cache(maxsize=LARGE)(unpack_any)


def unpack(data: bytes | memoryview, kind: type[T]) -> T:
    """The record of an envelope, which must be of `kind`. Raises FormatError.

    Whoever lists a prefix again reads mostly what it has read before: envelopes of kinds that are
    kept somewhere are remembered, and equal bytes give the same record, which nobody changes.
    """
    if kind not in LASTING or len(data) > LARGE_BYTES:
        record = unpack_any(data)
    else:
        record = (_unpack_again if len(data) <= REMEMBERED_BYTES else _unpack_large)(bytes(data))
    if not isinstance(record, kind):
        raise FormatError(f"envelope: needs a {kind.__name__}, has a {type(record).__name__}")
    return record
