"""The way back of one rank, as a story: fetch, verify, decode, verify.

    SealedShare --manifest--> data shards in place --parity, decode--> the snapshot, verified
                                                   --else the object store--^

The decision was made before (locate) and the ballot is closed after (agent/); here bytes move. The
target is a file of this node, so that what was fetched is the rank's own slot from then on.

Contract: returns the manifest when every chunk of the target matches it. Raises SourcesAway if
sources were lacking, RestoreFailed if bytes that were read were wrong; both name the sources and
what each did.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from p2pckpt import records as r
from p2pckpt.errors import IntegrityError, RestoreFailed, SourcesAway
from p2pckpt.ports import Region
from p2pckpt.restore.decode import decode_rank
from p2pckpt.restore.fetch import (
    Fetching,
    fetch_data,
    fetch_manifest,
    fetch_parity,
    fetch_stored,
)
from p2pckpt.restore.verify import bad_chunks


@dataclass(frozen=True)
class Fetched:
    """A rank's snapshot in place: its manifest, and bytes by node they came from."""

    manifest: r.Manifest
    target: Region
    bytes_from: dict[str, int]
    decoded: tuple[int, ...]
    seconds: dict[str, float]


Stage = Callable[[int], Awaitable[Region]]


async def restore_rank(job: Fetching, room: Stage, scratch: Stage) -> Fetched:
    """Fetch one rank. ``room(bytes)`` makes its file, ``scratch(bytes)`` a staging region; both may
    be called again, if other sources must be tried."""
    try:
        return await _restore_rank(job, room, scratch)
    except RestoreFailed:
        if job.widen is None:
            raise
        widen, job.widen = job.widen, None
        job.sources = await widen()
        return await _restore_rank(job, room, scratch)


async def _restore_rank(job: Fetching, room: Stage, scratch: Stage) -> Fetched:
    try:
        with job.timed("manifest"):
            manifest = await fetch_manifest(job)
    except IntegrityError as e:
        raise failure(job, str(e)) from e
    with job.timed("room"):
        target = await room(manifest.of_rank(job.rank).length)
    begun = job.now() - sum(job.seconds.values())
    there = await fetch_data(job, manifest, target)
    missing = [i for i in range(manifest.layout.k) if i not in there]
    if missing:
        await _complete(job, manifest, target, missing, scratch)
    seconds = {**job.seconds, "fetch": job.now() - begun - sum(job.seconds.values())}
    return Fetched(manifest, target, dict(job.bytes_from), tuple(missing), seconds)


async def _complete(
    job: Fetching, manifest: r.Manifest, target: Region, missing: list[int], scratch: Stage
) -> None:
    """The missing data shards: decoded if RAM has enough, else from the object store."""
    try:
        await _rebuild(job, manifest, target, missing, scratch)
    except RestoreFailed:
        if left := await fetch_stored(job, manifest, target, missing):
            raise failure(job, f"data shards {left} are nowhere to be had") from None
        missing.clear()


async def _rebuild(
    job: Fetching, manifest: r.Manifest, target: Region, missing: list[int], scratch: Stage
) -> None:
    """Decode the missing data shards in place, from as much parity as they need."""
    entry, layout = manifest.of_rank(job.rank), manifest.layout
    known = sum(1 for index in job.sources.shards if index >= layout.k)
    if known < len(missing):
        raise failure(job, f"has {layout.k - len(missing) + known} of {layout.k} needed shards")
    staging = await scratch(len(missing) * entry.shard_bytes)
    parity = await fetch_parity(job, manifest, len(missing), staging)
    if len(parity) < len(missing):
        have = layout.k - len(missing) + len(parity)
        raise failure(job, f"has {have} of {layout.k} needed shards")
    views = {index: job.doors.arena.view(region) for index, region in parity.items()}
    image = job.doors.arena.view(target)

    def decode_and_verify() -> list[str]:
        decode_rank(entry, layout, image, views, missing)
        wrong = []
        for index in missing:
            start = min(index * entry.shard_bytes, entry.length)
            piece = image[start : start + entry.stored_bytes(index, layout.k)]
            if bad := bad_chunks(manifest, job.rank, index, piece):
                wrong.append(f"decoded shard {index}: chunks {bad[:5]}")
        return wrong

    with job.timed("decode"):
        size = layout.k * entry.shard_bytes
        if wrong := await job.doors.workers.run(decode_and_verify, size, job.traffic):
            raise RestoreFailed(f"rank {job.rank}: {'; '.join(wrong)}")


def failure(job: Fetching, what: str) -> RestoreFailed:
    """The error for a rank that cannot be had: worth a retry unless some source was wrong."""
    message = f"rank {job.rank}: {what}; {'; '.join(job.refused[-6:])}"
    return RestoreFailed(message) if job.wrong and not job.away else SourcesAway(message)
