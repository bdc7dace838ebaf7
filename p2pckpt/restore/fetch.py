"""Bytes of one rank from whoever holds them: a shard from one source, what is bad from the next.

For each data shard the holder of the shard comes first, then any node with the rank's own slot
(the same range of it). Chunks that come wrong are asked of the next source, so copies with bad
chunks make a good one as long as no chunk is bad in all of them. What no source can give is left as
an erasure for decode, and what decode cannot give comes from the object store, if the step is
there: that range of the rank's object, right into its place.

Contract: returns which data shards lie verified in place; writes nothing outside the target file;
counts the bytes by kind of source. Raises nothing for a failing source, it is one more erasure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from msgspec import structs

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.config import Config
from p2pckpt.errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    LedgerForgot,
    LedgerUnavailable,
    ObjectStoreUnavailable,
    Refused,
)
from p2pckpt.ports import Doors, Region
from p2pckpt.restore.locate import Sources
from p2pckpt.restore.verify import bad_chunks, open_manifest
from p2pckpt.traffic import Traffic

OBJECT_STORE = "s3"
"""The object store's name among the sources of bytes."""

STORED_PART_BYTES = 16 * 1024 * 1024
STORED_PARTS_AT_ONCE = 4
"""Ranges asked of the object store at once for a rank: enough to fill a link."""


MOST_SPANS = 64
"""Runs of chunks asked of one source one by one."""


@dataclass(frozen=True)
class Source:
    """A file that has a shard's bytes: on which node, and from which offset."""

    node: str
    kind: r.FileKind
    part: int
    offset: int


@dataclass
class Fetching:
    """One rank's restore: what is wanted, who has it, what came from where."""

    rank: int
    share: r.SealedShare
    attempt: r.Attempt
    sources: Sources
    members: Mapping[str, r.Member]
    doors: Doors
    config: Config
    traffic: Traffic = Traffic.RESTORE
    bytes_from: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    wrong: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    stored: Callable[[], Awaitable[r.ShareObjects | None]] | None = None
    """Where the share lies in the object store; asked only if RAM does not suffice."""
    widen: Callable[[], Awaitable[Sources]] | None = None
    """Everybody who has any of it; asked only if those of `sources` do not suffice."""
    in_place: bool = False
    """The rank's file has the bytes already, and some are bad: only those are fetched."""
    away: bool = False
    """The object store, or the ledger that says what is there, did not answer: nothing that failed
    here is final."""

    def now(self) -> float:
        """The loop's clock."""
        return asyncio.get_running_loop().time()

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add what the block takes to the seconds of a stage."""
        begun = self.now()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + self.now() - begun

    def failed(self, node: str, error: Exception) -> None:
        """A source did not give what it should; wrong bytes are told from absent ones."""
        self.wrong |= isinstance(error, IntegrityError | FormatError)
        self.away |= isinstance(error, ObjectStoreUnavailable | LedgerUnavailable | LedgerForgot)
        gone = isinstance(error, KeyError)  # `members` has no such node
        why = "is no member any more" if gone else f"{type(error).__name__}: {error}"
        self.refused.append(f"{node}: {why}")
        facts = {"node": node, "rank": self.rank, "why": why}
        self.doors.notes("source_failed", facts)


def source_of(bytes_from: Mapping[str, int]) -> str:
    """Where fetched bytes came from, in a word."""
    if set(bytes_from) == {OBJECT_STORE}:
        return "s3"
    return "mixed" if OBJECT_STORE in bytes_from else "peers"


async def fetch_manifest(job: Fetching) -> r.Manifest:
    """The share's manifest from any node that holds a part of it, checked against its digest.

    Raises IntegrityError if no source has a right one, naming what each answered.
    """
    nodes = [n for ns in (*job.sources.slots.values(), *job.sources.shards.values()) for n in ns]
    query = w.GetManifest(
        attempt=job.attempt, owner=job.share.node, manifest_digest=job.share.manifest_digest
    )
    for node in dict.fromkeys(nodes):
        try:
            packed = await _packed_manifest(job, job.members[node], query)
            manifest = open_manifest(packed, job.share.manifest_digest)
            if manifest.attempt != job.attempt:
                raise IntegrityError(f"manifest is of attempt {manifest.attempt.key}")
            return manifest
        except (CheckpointError, KeyError) as e:
            job.failed(node, e)
    if (share := await stored_share(job)) is not None:
        try:
            assert job.doors.objects is not None
            packed = await job.doors.objects.get(share.manifest)
            return open_manifest(packed, job.share.manifest_digest)
        except CheckpointError as e:
            job.failed(OBJECT_STORE, e)
    raise IntegrityError(
        f"manifest {job.share.manifest_digest[:12]} of {job.share.node}: no right copy; "
        + "; ".join(job.refused[-4:])
    )


async def _packed_manifest(job: Fetching, member: r.Member, query: w.GetManifest) -> bytes:
    """A node's copy of a manifest, piece by piece. Raises Refused or PeerUnreachable."""
    packed, total = b"", 1
    while len(packed) < total:
        query = structs.replace(query, offset=len(packed))
        timeout_s = job.config.peer_timeout_s
        reply = await job.doors.peers.call(member.peers_address, query, timeout_s)
        if not isinstance(reply, w.ManifestReply) or not reply.packed:
            raise Refused(getattr(reply, "reason", f"{type(reply).__name__} without bytes"))
        packed, total = packed + reply.packed, reply.total
    return packed


async def fetch_data(job: Fetching, manifest: r.Manifest, target: Region) -> set[int]:
    """Bring all data shards of the rank into ``target``; the indices that are there, verified."""
    entry = manifest.of_rank(job.rank)

    async def one(index: int) -> bool:
        length = entry.stored_bytes(index, manifest.layout.k)
        start = min(index * entry.shard_bytes, entry.length)
        into = Region(target.file, target.offset + start, length)
        slots = [
            Source(node, r.FileKind.SLOT, job.rank, start)
            for node in job.sources.slots.get(job.rank, ())
        ]
        return await _fetch(job, manifest, index, into, [*_holders(job, manifest, index), *slots])

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(i)) for i in range(manifest.layout.k)]
    return {i for i, task in enumerate(tasks) if task.result()}


async def fetch_parity(
    job: Fetching, manifest: r.Manifest, wanted: int, scratch: Region
) -> dict[int, Region]:
    """``wanted`` verified parity shards into ``scratch``; fewer if there are no more."""
    size = manifest.of_rank(job.rank).shard_bytes
    got: dict[int, Region] = {}
    for index in range(manifest.layout.k, manifest.layout.shards):
        if len(got) == wanted:
            break
        into = Region(scratch.file, scratch.offset + len(got) * size, size)
        if await _fetch(job, manifest, index, into, _holders(job, manifest, index)):
            got[index] = into
    return got


async def stored_share(job: Fetching) -> r.ShareObjects | None:
    """Where the share lies in the object store; None if it does not, or cannot be asked."""
    if job.stored is None or job.doors.objects is None:
        return None
    try:
        return await job.stored()
    except CheckpointError as e:
        job.failed(OBJECT_STORE, e)
        return None


async def fetch_stored(
    job: Fetching, manifest: r.Manifest, target: Region, missing: list[int]
) -> list[int]:
    """Data shards from the object store into their places; those that are still missing."""
    share, entry = await stored_share(job), manifest.of_rank(job.rank)
    named = {o.rank: o.name for o in share.ranks} if share else {}
    if job.rank not in named:
        return missing
    left = []
    for index in missing:
        start = min(index * entry.shard_bytes, entry.length)
        length = entry.stored_bytes(index, manifest.layout.k)
        into = Region(target.file, target.offset + start, length)
        if not await _get_shard(job, manifest, (named[job.rank], start), index, into):
            left.append(index)
    return left


async def _get_shard(
    job: Fetching, manifest: r.Manifest, place: tuple[str, int], shard: int, into: Region
) -> bool:
    """One range of an object, in parts; chunks that come wrong are asked for once more."""
    objects, view, (name, offset) = job.doors.objects, job.doors.arena.view(into), place
    assert objects is not None
    size = manifest.chunk_bytes
    step = max(size, STORED_PART_BYTES // size * size)
    parts = asyncio.Semaphore(STORED_PARTS_AT_ONCE)

    async def part(at: int, length: int) -> None:
        async with parts:
            await objects.get_into(name, offset + at, view[at : at + length])

    async def bad() -> list[int]:
        with job.timed("verify"):
            return await job.doors.workers.run(
                lambda: bad_chunks(manifest, job.rank, shard, view), into.length, job.traffic
            )

    try:
        ranges = range(0, into.length, step)
        got = (part(at, min(step, into.length - at)) for at in ranges)
        for error in await asyncio.gather(*got, return_exceptions=True):
            if error is not None:
                raise error
        if wrong := await bad():
            for chunk in wrong:
                await part(chunk * size, min(size, into.length - chunk * size))
            if wrong := await bad():
                raise IntegrityError(f"{name}: chunks {wrong[:5]} of shard {shard} are wrong")
    except CheckpointError as e:
        job.failed(OBJECT_STORE, e)
        return False
    job.bytes_from[OBJECT_STORE] = job.bytes_from.get(OBJECT_STORE, 0) + into.length
    return True


def _holders(job: Fetching, manifest: r.Manifest, index: int) -> list[Source]:
    """Who has a shard of the rank; for k = 1 all shards are the same bytes."""
    same = range(manifest.layout.shards) if manifest.layout.k == 1 and index == 0 else (index,)
    return [
        Source(node, r.FileKind.SHARD, i, manifest.shard_offset(job.rank, i))
        for i in same
        for node in job.sources.shards.get(i, ())
    ]


async def _fetch(
    job: Fetching, manifest: r.Manifest, shard: int, into: Region, sources: Sequence[Source]
) -> bool:
    """A shard into its place, from one source after the other; False, with the reasons kept, if
    chunks of it are still lacking then."""
    view, size = job.doors.arena.view(into), manifest.chunk_bytes

    async def look() -> list[int]:
        with job.timed("verify"):
            return await job.doors.workers.run(
                lambda: bad_chunks(manifest, job.rank, shard, view), into.length, job.traffic
            )

    kept = job.in_place and shard < manifest.layout.k
    lacking = await look() if kept else list(range(-(-into.length // size)))
    for source in sources:
        if not lacking:
            break
        try:
            for at, length in spans(lacking, size, into.length):
                await _receive(job, source, at, Region(into.file, into.offset + at, length))
            if bad := await look():
                what = f"{source.kind} {source.part}: chunks {bad[:5]} differ from the manifest"
                job.failed(source.node, IntegrityError(what))
        except (CheckpointError, KeyError) as e:
            job.failed(source.node, e)
            continue
        got = sum(min(size, into.length - c * size) for c in set(lacking) - set(bad))
        if got:
            job.bytes_from[source.node] = job.bytes_from.get(source.node, 0) + got
        lacking = bad
    return not lacking


def spans(chunks: Sequence[int], chunk_bytes: int, length: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the runs of ``chunks``, ascending, in ``length`` bytes; all of it in one
    if there are more than MOST_SPANS, as each is a request."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][1]:
            runs[-1][1] = chunk + 1
        else:
            runs.append([chunk, chunk + 1])
    if len(runs) > MOST_SPANS:
        return [(0, length)]
    ends = [(first * chunk_bytes, min(last * chunk_bytes, length)) for first, last in runs]
    return [(start, end - start) for start, end in ends]


async def _receive(job: Fetching, source: Source, at: int, into: Region) -> None:
    """A range of one file of one node, not verified. Raises CheckpointError, or KeyError if the
    node is no member any more."""
    timeout_s = job.config.patience_s(into.length, job.traffic.can_wait)
    member = job.members[source.node]
    expected = await job.doors.transport.expect(into, job.traffic, timeout_s)
    try:
        ask = w.GetRange(
            attempt=job.attempt,
            kind=source.kind,
            owner=job.share.node,
            part=source.part,
            offset=source.offset + at,
            grant=w.Grant(
                address=job.doors.transport.address, nonce=expected.nonce, length=into.length
            ),
            traffic=job.traffic,
        )
        reply = await job.doors.peers.call(member.peers_address, ask, timeout_s)
        if not isinstance(reply, w.Sent):
            raise Refused(getattr(reply, "reason", type(reply).__name__))
        await expected.received(timeout_s)
    finally:
        await expected.cancel()
