"""One shard of a kept step made anew, in the place where it lay.

The newest step is repair's: it asks where a shard should lie now. An older one goes soon, and its
other shards are nobody's to move; so a node whose shard of it turned out to be wrong brings the
snapshots of the share from the others, one at a time, and takes or codes its own piece of each.

Contract: the file comes out WHOLE, every chunk as its manifest says, with the manifest beside it;
if anything fails, no file is left behind. The room for one snapshot and its parity is taken
meanwhile.
"""

from __future__ import annotations

from p2pckpt import records as r
from p2pckpt.agent.bringing import bring, fetching, give_back
from p2pckpt.agent.context import Home, JobContext
from p2pckpt.agent.holdings import Held, Want, document_name
from p2pckpt.errors import IntegrityError
from p2pckpt.restore.verify import bad_chunks
from p2pckpt.save.encode import encode_rank
from p2pckpt.traffic import Traffic
from p2pckpt.wire import pack


async def rebuild_shard(
    ctx: JobContext, attempt: r.Attempt, share: r.SealedShare, part: int
) -> None:
    """Shard ``part`` of a share, here. Raises RestoreFailed if the others have too little, NoRoom,
    IntegrityError, LedgerUnavailable."""
    home, shard = ctx.home, None
    try:
        for rank in share.ranks:
            job = await fetching(ctx, attempt, share, rank)
            image, fetched = await bring(home, job, r.FileKind.STAGE)
            try:
                size = fetched.manifest.shard_file_bytes(part)
                if shard is None:
                    want = Want(r.FileKind.SHARD, attempt, share.node, part, max(1, size))
                    shard = await home.holdings.take(want, object())
                await _fill(home, fetched.manifest, rank, image, shard)
            finally:
                home.holdings.release(image)
        assert shard is not None  # a share has a rank
        name = document_name(share.manifest_digest)
        home.doors.arena.put_document(name, pack(fetched.manifest))
        home.holdings.seal(shard, size, share.manifest_digest)
    except BaseException:
        if shard is not None:
            give_back(home, shard)
        raise


async def _fill(home: Home, manifest: r.Manifest, rank: int, image: Held, shard: Held) -> None:
    """One rank's piece of the shard, from its snapshot."""
    entry, k, m = manifest.of_rank(rank), manifest.layout.k, manifest.layout.m
    size, part, holdings = entry.shard_bytes, shard.part, home.holdings
    length = entry.stored_bytes(part, k)
    piece = holdings.view(shard, manifest.shard_offset(rank, part), length)
    snapshot = holdings.view(image, 0, entry.length)
    want = Want(r.FileKind.STAGE, manifest.attempt, home.node, rank, max(1, m * size))
    scratch = await holdings.take(want) if part >= k else None
    parity = [holdings.view(scratch, i * size, size) for i in range(m)] if scratch else []

    def work() -> list[int]:
        if parity:
            encode_rank(rank, snapshot, parity, manifest.layout, manifest.chunk_bytes)
        piece[:] = parity[part - k] if parity else snapshot[part * size : part * size + length]
        return bad_chunks(manifest, rank, part, piece)

    try:
        wrong = await home.doors.workers.run(work, entry.length, Traffic.REPAIR)
    finally:
        if scratch is not None:
            holdings.release(scratch)
    if wrong:
        raise IntegrityError(f"shard {part} of {manifest.owner}, made anew, differs: {wrong[:5]}")
