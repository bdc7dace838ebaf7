"""The nouns: every record that agents write, keep beside bytes, or tell each other about.

A checkpoint's life is a handful of small immutable records in the ledger; the bytes live in RAM
files on the nodes. Stages speak to each other in these types only. FORMATS.md says where each
record lies and what its fields mean; PROTOCOL.md says who may write it and when.

Contract: records are frozen, know their own validity (`__post_init__`) and hold no payload: what
goes to the ledger has nothing per tensor and stays below 64 KB. Times are for people; no decision
rests on another machine's clock.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from typing import Any

import msgspec

from p2pckpt.errors import UsageError

GROUP_NODES = 64
"""Nodes of one group: one group record, one roster piece. 64 entries stay far below 64 KB."""

MAX_SHARDS = 20
"""k + m of a layout: the holders of 64 nodes fit one ledger record of 64 KB."""

MAX_KEEP_LAST = 64
"""Retiring compares this many newer commits in one transaction; etcd allows 128 compares."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parent of all records: immutable, strict about unknown fields."""


# -- identity -------------------------------------------------------------------------------------


class Job(Record, frozen=True):
    """What one training run is called across restarts: its owner's uid and a name."""

    owner_uid: int
    name: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", self.name):
            raise UsageError(
                f"job name {self.name!r}: needs 1 to 100 letters, digits, '_' or '-', "
                "beginning with a letter or digit"
            )

    @property
    def key(self) -> str:
        """The job's name in ledger keys and file names."""
        return f"{self.owner_uid}.{self.name}"


class Layout(Record, frozen=True):
    """How a snapshot is coded: k data shards and m parity shards, each on a node of its own."""

    k: int
    m: int

    def __post_init__(self) -> None:
        if self.k < 1 or self.m < 0 or self.k + self.m > MAX_SHARDS:
            raise UsageError(
                f"layout k={self.k}, m={self.m}: needs k >= 1, m >= 0, k + m <= {MAX_SHARDS}"
            )

    @property
    def shards(self) -> int:
        """k + m."""
        return self.k + self.m

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``rs:k,m``, ``rs(k,m)``, ``copies:r`` or ``copies(r)``.

        ``copies:r`` is r byte-equal copies on other nodes, that is ``rs:1,r-1``.
        Raises UsageError naming the text and the allowed forms.
        """
        t = text.strip().replace(" ", "")
        t = re.sub(r"^(rs|copies)\(([\d,]*)\)$", r"\1:\2", t)
        if found := re.fullmatch(r"rs:(\d{1,3}),(\d{1,3})", t):
            return cls(k=int(found[1]), m=int(found[2]))
        if found := re.fullmatch(r"copies:(\d{1,3})", t):
            copies = int(found[1])
            if copies < 1:
                raise UsageError(f"layout {text!r}: copies:r needs r >= 1")
            return cls(k=1, m=copies - 1)
        raise UsageError(f"layout {text!r}: allowed are rs:k,m (as rs:4,2) and copies:r")

    def __str__(self) -> str:
        return f"copies:{self.shards}" if self.k == 1 else f"rs:{self.k},{self.m}"


class Attempt(Record, frozen=True):
    """One try to save a step: all ranks of a generation count ordinals alike."""

    ledger_id: str
    job: str
    generation: int
    ordinal: int
    step: int

    def __post_init__(self) -> None:
        if self.generation < 0 or self.ordinal < 0 or self.step < 0:
            raise UsageError(
                f"attempt {self.generation}.{self.ordinal} of step {self.step}: "
                "generation, ordinal and step must not be negative"
            )

    @property
    def key(self) -> str:
        """Sorts as (generation, ordinal, step) do."""
        return _attempt_key(self.generation, self.ordinal, self.step)

    @property
    def floor_key(self) -> str:
        """What is compared with the job's floor: attempts below it are settled for good."""
        return f"{self.generation:010d}.{self.ordinal:010d}"


@lru_cache(maxsize=1024)  # decisions ask for the keys of the same few attempts again and again
def _attempt_key(generation: int, ordinal: int, step: int) -> str:
    return f"{generation:010d}.{ordinal:010d}.{step:020d}"


class Member(Record, frozen=True):
    """A living agent as it announces itself under its lease."""

    node: str
    host: str
    store_id: str
    session: str
    peers_address: str
    transport_address: str
    domains: dict[str, str] = {}
    release: str = ""
    draining: bool = False
    """It is to go: no shard is placed on it any more, and what it holds counts as gone already."""


# -- generation -----------------------------------------------------------------------------------


class Join(Record, frozen=True):
    """One node's ranks of a launch that is forming; lives under the agent's lease."""

    node: str
    store_id: str
    session: str
    join_id: str
    world_size: int
    ranks: tuple[int, ...]
    layout: Layout
    keep_last: int
    takeover: bool = False


class RosterNode(Record, frozen=True):
    """One node of a generation, as it was when it joined."""

    node: str
    store_id: str
    session: str
    join_id: str
    ranks: tuple[int, ...]


class RosterPiece(Record, frozen=True):
    """At most 64 roster nodes, in order of their lowest rank; immutable, named by digest."""

    nodes: tuple[RosterNode, ...]


class Generation(Record, frozen=True):
    """One start of a job's training processes; the ledger's revision of it fences writers."""

    number: int
    nonce: str
    run_token: str
    world_size: int
    roster_digest: str
    pieces: int
    layout: Layout
    keep_last: int


class LivingTrainers(Record, frozen=True):
    """Which ranks of a generation live on a node, by its agent's word, under its lease."""

    node: str
    ranks: tuple[int, ...]


# -- bytes ----------------------------------------------------------------------------------------


class FileState(StrEnum):
    """FILLING: somebody may be writing. WHOLE: all writers joined and the digests matched."""

    FILLING = "filling"
    WHOLE = "whole"


class FileKind(StrEnum):
    """SLOT: a rank's own snapshot. SHARD: one shard of every rank of an owner's share, in rank
    order. STAGE: parity and manifests on their way; never WHOLE, so never adopted."""

    SLOT = "slot"
    SHARD = "shard"
    STAGE = "stage"


class FileRecord(Record, frozen=True):
    """The small record beside every RAM file; adoption believes exactly the valid WHOLE ones.

    ``part`` is the rank for a slot and the shard index for a shard.
    """

    state: FileState
    kind: FileKind
    attempt: Attempt
    owner: str
    part: int
    length: int
    manifest_digest: str = ""


class RankSnapshot(Record, frozen=True):
    """One rank's snapshot inside a manifest.

    ``tables[i]`` holds shard i's CRC32C per chunk, packed as little-endian uint32. Data shards
    cover the bytes that exist (the tail is implicit zeros); parity shards are `shard_bytes` long.
    ``header`` is the safetensors header: names, dtypes, shapes and offsets of all tensors.
    """

    rank: int
    length: int
    shard_bytes: int
    tables: tuple[bytes, ...]
    header: bytes = b""
    meta: str = "{}"

    def stored_bytes(self, shard: int, k: int) -> int:
        """Length of one stored shard: a data shard ends where the snapshot does."""
        if shard >= k:
            return self.shard_bytes
        return max(0, min(self.shard_bytes, self.length - shard * self.shard_bytes))


class Manifest(Record, frozen=True):
    """What one node's share of an attempt is made of; a copy lies beside every shard and slot."""

    attempt: Attempt
    owner: str
    store_id: str
    layout: Layout
    chunk_bytes: int
    checksum: str
    ranks: tuple[RankSnapshot, ...]
    base: str | None = None

    def __post_init__(self) -> None:
        chunk, layout = self.chunk_bytes, self.layout
        if chunk < 1 or [e.rank for e in self.ranks] != sorted({e.rank for e in self.ranks}):
            raise UsageError(
                f"manifest of {self.owner}: chunk_bytes {chunk}, needs 1 or more; "
                f"ranks {[e.rank for e in self.ranks]}, need rising order"
            )
        for e in self.ranks:
            share = (e.length + layout.k - 1) // layout.k
            size = (share + chunk - 1) // chunk * chunk
            have = [len(table) for table in e.tables]
            need = [4 * -(-e.stored_bytes(i, layout.k) // chunk) for i in range(layout.shards)]
            if e.length < 0 or e.shard_bytes != size or have != need:
                raise UsageError(
                    f"manifest of {self.owner}, rank {e.rank}: length {e.length}, shards of "
                    f"{e.shard_bytes} with tables of {have}; needs shards of {size} with {need}"
                )

    def of_rank(self, rank: int) -> RankSnapshot:
        """One rank's entry. Raises UsageError naming the ranks that there are."""
        for entry in self.ranks:
            if entry.rank == rank:
                return entry
        raise UsageError(
            f"manifest of {self.owner}: no rank {rank}, has {[e.rank for e in self.ranks]}"
        )

    def shard_offset(self, rank: int, shard: int) -> int:
        """Where a rank's piece begins in the file of one shard of this share."""
        before = (e for e in self.ranks if e.rank < rank)
        return sum(e.stored_bytes(shard, self.layout.k) for e in before)

    def shard_file_bytes(self, shard: int) -> int:
        """Length of the file of one shard of this share."""
        return sum(e.stored_bytes(shard, self.layout.k) for e in self.ranks)


# -- commit ---------------------------------------------------------------------------------------


class SealedShare(Record, frozen=True):
    """A node's share, immutable for its attempt: manifest digest, size, and who holds shard i.

    ``holders[i]`` is the store_id that sent the receipt for shard i, "" if nobody holds it.
    """

    node: str
    store_id: str
    ranks: tuple[int, ...]
    manifest_digest: str
    snapshot_bytes: int
    holders: tuple[str, ...]


class GroupRecord(Record, frozen=True):
    """The sealed shares of one group of at most 64 nodes; written once."""

    attempt: Attempt
    group: int
    shares: tuple[SealedShare, ...]


class Verdict(StrEnum):
    """How an attempt ended."""

    COMMIT = "commit"
    ABORT = "abort"


class Outcome(Record, frozen=True):
    """The one outcome of an attempt; created once, never changed."""

    attempt: Attempt
    verdict: Verdict
    by: str
    reason: str = ""
    lineage: str = ""
    degraded: tuple[str, ...] = ()


class Commit(Record, frozen=True):
    """A committed step of a lineage."""

    attempt: Attempt
    lineage: str
    layout: Layout
    world_size: int
    groups: int
    degraded: tuple[str, ...] = ()
    number: int = 0
    """Counts the job's commits, so that "every Nth" is the same for all agents."""
    offload_every: int = 0
    """N of it for this commit, as the schedule had it then; 0: the agents' setting."""


class Retired(Record, frozen=True):
    """Irrevocable: the attempt's bytes may go, and its name is never used again."""

    attempt: Attempt
    by: str
    reason: str


# -- object store ---------------------------------------------------------------------------------

CHECKPOINT_FORMAT = "p2pckpt-checkpoint/1"


class RankObject(Record, frozen=True):
    """One rank's snapshot as an object: a safetensors file of `length` bytes."""

    rank: int
    name: str
    length: int


class ShareObjects(Record, frozen=True):
    """One share in the object store: its ranks' objects and the packed manifest that proves them.

    Reported once an attempt and owner; the bytes were verified as they were read.
    """

    attempt: Attempt
    owner: str
    manifest: str
    manifest_digest: str
    manifest_bytes: int
    ranks: tuple[RankObject, ...]


class Checkpoint(Record, frozen=True):
    """`checkpoint.json`, written last: all that a restore needs which the bytes do not say."""

    format: str
    commit: Commit
    groups: tuple[GroupRecord, ...]
    shares: tuple[ShareObjects, ...]


class Offloaded(Record, frozen=True):
    """A committed step that lies whole in the object store; outlives its commit record.

    ``manifest`` is the name of its `checkpoint.json`, ``manifest_digest`` that one's SHA-256.
    """

    commit: Commit
    manifest: str
    manifest_digest: str
    snapshot_bytes: int
    by: str


class OffloadRetired(Record, frozen=True):
    """Irrevocable: the step's objects may go, by the names in its manifest."""

    offloaded: Offloaded
    by: str
    reason: str


class OffloadDropped(Record, frozen=True):
    """A due step will not be offloaded, and no longer waits for it in RAM."""

    attempt: Attempt
    by: str
    reason: str


# -- restore --------------------------------------------------------------------------------------


class Choice(StrEnum):
    """What a restore decision says."""

    RESTORE = "restore"
    NOTHING = "nothing"
    FRESH = "fresh"
    UNPROVEN = "unproven"


class Base(Record, frozen=True):
    """The committed step that a lineage grew from."""

    lineage: str
    step: int


class Decision(Record, frozen=True):
    """What a generation restores in one ballot, decided before any byte moves."""

    generation: int
    ballot: int
    choice: Choice
    by: str
    reason: str
    commit: Commit | None = None
    lineage: str = ""
    base: Base | None = None
    stored: bool = False
    """RAM alone could not prove the step: bytes are to come from the object store."""


class NodeReport(Record, frozen=True):
    """How the ranks of one node fared with a decision: ``failed`` pairs rank and reason."""

    node: str
    ranks: tuple[int, ...]
    failed: tuple[tuple[int, str], ...] = ()
    retryable: bool = True


class GroupReport(Record, frozen=True):
    """The reports of one group's nodes; written once a ballot."""

    generation: int
    ballot: int
    group: int
    reports: tuple[NodeReport, ...]


class Close(StrEnum):
    """How a ballot ended. OK ends restoring; BAD quarantines; BAD and RETRY allow the next."""

    OK = "ok"
    BAD = "bad"
    RETRY = "retry"


class Closed(Record, frozen=True):
    """The end of a ballot, the same for all ranks."""

    generation: int
    ballot: int
    close: Close
    by: str
    reason: str = ""
    choice: Choice = Choice.FRESH
    lineage: str = ""
    base: Base | None = None
    commit: Commit | None = None


# -- a ledger that forgot -----------------------------------------------------------------------


class LedgerSeen(Record, frozen=True):
    """The ledger of a job as an agent knows it; lies beside its bytes.

    Another ledger id, or an older state of this one (`JobState.went_back`), is a ledger that
    forgot: the agent freezes. ``back`` says so for good, until the job's records are rebuilt: the
    revision will catch up. ``replaces``: ids of ledgers that this one was rebuilt from; agents that
    were away may still be frozen by one of them when this one is gone, too.
    """

    job: str
    ledger_id: str
    revision: int
    generation: int
    back: str = ""
    replaces: tuple[str, ...] = ()


class CommitCopy(Record, frozen=True):
    """A commit of which an agent holds bytes, with all that restoring it needs from the ledger."""

    commit: Commit
    groups: tuple[GroupRecord, ...]
    closed: Closed | None = None


class Rebuilt(Record, frozen=True):
    """The records of a job were rebuilt from agents' copies: the ledger ids that this replaces.

    ``unfinished``: not all of them are written yet, so nobody goes on by them.
    """

    replaces: tuple[str, ...]
    by: str
    commits: int
    unfinished: bool = False


class Cleaned(Record, frozen=True):
    """Irrevocable: the job was cleaned, all bytes of this ledger id's attempts may go. It stays
    when the job's other records are gone, so that an agent that was away learns it too."""

    ledger_id: str
    by: str


# -- which steps are saved ------------------------------------------------------------------------


class Schedule(Record, frozen=True):
    """Which steps a generation saves, and which is its last; read by `save/due.py`.

    ``plan``: pairs (from step, every), ascending; before the first pair's step that pair holds too.
    ``extra``: steps that are saved beside the plan. ``last``: saved, and after it training is to
    end; None: not agreed. What was stays in it, so that a rank which heard late can tell what the
    others did. ``version`` 0 is what the hook was told, and stands in no ledger.
    ``offload_every``: every Nth of the commits to come goes to the object store; 0: as the agents
    are set.
    """

    generation: int
    version: int
    plan: tuple[tuple[int, int], ...]
    extra: tuple[int, ...] = ()
    last: int | None = None
    by: str = ""
    reason: str = ""
    offload_every: int = 0

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.plan]
        if not self.plan or starts != sorted(set(starts)) or min(e for _, e in self.plan) < 1:
            raise UsageError(
                f"schedule plan {self.plan}: needs pairs (from step, every) in ascending order, "
                "every 1 or more"
            )
        if self.offload_every < 0:
            raise UsageError(f"schedule: offload_every {self.offload_every}, needs 0 or more")


class Progress(Record, frozen=True):
    """How far a rank's loop is, as it tells its agent through shared memory.

    ``version``: count of such records. ``step``: the newest that was asked for; ``stride``: steps
    since the one before. ``every``, ``auto``: as the hook was told. Seconds are medians of the
    newest few, 0 while there is none: ``step_s`` from one ask to the next, without the save,
    ``block_s`` of a save, ``restore_s`` of the restore. ``saves``: begun in this generation.
    ``last_s``: the newest iteration, without the save.
    """

    generation: int
    version: int
    step: int
    stride: int
    every: int
    auto: bool
    step_s: float
    block_s: float
    restore_s: float
    saves: int
    last_s: float = 0.0


# -- ledger keys ----------------------------------------------------------------------------------

ROOT = "p2pckpt/"
MEMBERS = ROOT + "members/"


class JobKeys:
    """Names of a job's records in the ledger. What all agents follow lies below ``state``."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.root = f"{ROOT}jobs/{job}/"
        self.state = self.root + "state/"
        self.ledger_id = self.state + "ledger"
        self.rebuilt = self.state + "rebuilt"
        self.floor = self.state + "floor"
        self.generation = self.state + "generation"
        self.cleanings = self.state + "cleaned/"
        self.outcomes = self.state + "outcome/"
        self.retirements = self.state + "retired/"
        self.decisions = self.state + "decision/"
        self.closings = self.state + "closed/"
        self.commits = self.state + "commit/"
        self.schedules = self.state + "schedule/"
        self.offloads = self.state + "offloaded/"
        self.offload_retirements = self.state + "offload_retired/"
        self.offload_drops = self.state + "offload_dropped/"
        self.groups = self.root + "group/"
        self.shares = self.root + "offload/"

    def cleaned(self, ledger_id: str) -> str:
        """Of one ledger id."""
        return self.cleanings + ledger_id

    def schedule(self, generation: int) -> str:
        """Of one generation."""
        return f"{self.schedules}{generation:010d}"

    def outcome(self, attempt: Attempt) -> str:
        """Of one attempt."""
        return self.outcomes + attempt.key

    def retired(self, attempt: Attempt) -> str:
        """Of one attempt."""
        return self.retirements + attempt.key

    def groups_of(self, attempt: Attempt) -> str:
        """Prefix of an attempt's group records."""
        return f"{self.groups}{attempt.key}/"

    def group(self, attempt: Attempt, group: int) -> str:
        """Of one group of an attempt."""
        return f"{self.groups_of(attempt)}{group:04d}"

    def commit(self, lineage: str, step: int) -> str:
        """Steps are padded, so that they sort as numbers."""
        return f"{self.commits}{lineage}/{step:020d}"

    def offloaded(self, attempt: Attempt) -> str:
        """Of one attempt."""
        return self.offloads + attempt.key

    def offload_retired(self, attempt: Attempt) -> str:
        """Of one attempt."""
        return self.offload_retirements + attempt.key

    def offload_dropped(self, attempt: Attempt) -> str:
        """Of one attempt."""
        return self.offload_drops + attempt.key

    def shares_of(self, attempt: Attempt) -> str:
        """Prefix of the reports of an attempt's shares that lie in the object store."""
        return f"{self.shares}{attempt.key}/"

    def share(self, attempt: Attempt, owner: str) -> str:
        """Of one owner."""
        return self.shares_of(attempt) + owner

    def decision(self, generation: int, ballot: int) -> str:
        """Of one ballot."""
        return f"{self.decisions}{generation:010d}/{ballot:04d}"

    def closed(self, generation: int, ballot: int) -> str:
        """Of one ballot."""
        return f"{self.closings}{generation:010d}/{ballot:04d}"

    def reports_of(self, generation: int, ballot: int) -> str:
        """Prefix of a ballot's group reports."""
        return f"{self.root}report/{generation:010d}/{ballot:04d}/"

    def report(self, generation: int, ballot: int, group: int) -> str:
        """Of one group in one ballot."""
        return f"{self.reports_of(generation, ballot)}{group:04d}"

    def join(self, run_token: str, node: str) -> str:
        """Of one node in a launch that is forming."""
        return f"{self.root}join/{run_token}/{node}"

    def trainers(self, generation: int, node: str) -> str:
        """Of one node in a generation."""
        return f"{self.root}trainers/{generation:010d}/{node}"

    def roster_pieces(self, digest: str) -> str:
        """Prefix of a roster's pieces."""
        return f"{self.root}roster/{digest}/"

    def roster(self, digest: str, piece: int) -> str:
        """Immutable, named by content."""
        return f"{self.roster_pieces(digest)}{piece:04d}"

    def readers(self, attempt: Attempt) -> str:
        """Prefix of the registered readers of an attempt."""
        return f"{self.root}readers/{attempt.key}/"


def json_value(record: Any) -> Any:
    """A record as plain JSON types, for printing."""
    return msgspec.to_builtins(record)
