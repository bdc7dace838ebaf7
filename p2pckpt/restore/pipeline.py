"""The way back of one rank, as a story: fetch, verify, decode, verify.

    SealedShare --manifest--> data shards in place --parity, decode--> the snapshot, verified

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
from p2pckpt.restore.fetch import Fetching, fetch_data, fetch_manifest, fetch_parity
from p2pckpt.restore.verify import bad_chunks


@dataclass(frozen=True)
class Fetched:
    """A rank's snapshot in place: its manifest, and bytes by node they came from."""

    manifest: r.Manifest
    target: Region
    bytes_from: dict[str, int]
    decoded: tuple[int, ...]


Stage = Callable[[int], Awaitable[Region]]


async def restore_rank(job: Fetching, room: Stage, scratch: Stage) -> Fetched:
    """Fetch one rank. ``room(bytes)`` makes its file, ``scratch(bytes)`` a staging region."""
    try:
        manifest = await fetch_manifest(job)
    except IntegrityError as e:
        raise _failure(job, str(e)) from e
    entry, layout = manifest.of_rank(job.rank), manifest.layout
    target = await room(entry.length)
    there = await fetch_data(job, manifest, target)
    missing = [i for i in range(layout.k) if i not in there]
    if missing:
        staging = await scratch(len(missing) * entry.shard_bytes)
        parity = await fetch_parity(job, manifest, len(missing), staging)
        if len(parity) < len(missing):
            have = len(there) + len(parity)
            raise _failure(job, f"has {have} of {layout.k} needed shards")
        views = {index: job.doors.arena.view(region) for index, region in parity.items()}
        image = job.doors.arena.view(target)
        await job.doors.workers.run(
            lambda: decode_rank(entry, layout, image, views, missing),
            layout.k * entry.shard_bytes,
        )
        for index in missing:
            start = min(index * entry.shard_bytes, entry.length)
            piece = image[start : start + entry.stored_bytes(index, layout.k)]
            if bad := bad_chunks(manifest, job.rank, index, piece):
                raise RestoreFailed(f"rank {job.rank}: decoded shard {index}: chunks {bad[:5]}")
    return Fetched(manifest, target, dict(job.bytes_from), tuple(missing))


def _failure(job: Fetching, what: str) -> RestoreFailed:
    """The error for a rank that cannot be had: worth a retry unless some source was wrong."""
    message = f"rank {job.rank}: {what}; {'; '.join(job.refused[-6:])}"
    return RestoreFailed(message) if job.wrong else SourcesAway(message)
