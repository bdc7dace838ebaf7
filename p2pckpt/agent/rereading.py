"""Files read again, piece by piece, against their manifest: of this node's RAM, or an object.

A slot or shard file is made of pieces, each one shard of one rank, and each piece has its own chunk
table in the manifest. A rank's object in the object store is laid out as its slot is, so it has the
same pieces. What is wrong is told piece by piece, as a restore would pass over it.

Contract: changes nothing. Reading and checking run on the workers. An object is read in parts that
are held one at a time, outside the RAM budget (`PART_BYTES`); an object that is not there is
ObjectAbsent, one that is cut off is IntegrityError, a store that does not answer is
ObjectStoreUnavailable, never "wrong".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.bucket import offloaded_share
from p2pckpt.agent.context import Home, JobContext
from p2pckpt.agent.holdings import Held
from p2pckpt.coding.checksum import verify_chunks
from p2pckpt.errors import ObjectAbsent, ObjectStoreUnavailable
from p2pckpt.restore.verify import bad_chunks, open_manifest
from p2pckpt.traffic import Traffic

BAD_NAMED = 256
"""Wrong chunks that a reply names, of each piece."""

PART_BYTES = 16 * 1024 * 1024
"""Of an object, at once."""


def pieces_of(
    manifest: r.Manifest, kind: r.FileKind, part: int
) -> Iterator[tuple[int, int, int, int]]:
    """(rank, shard, offset, length) of all shards' pieces in one slot or shard file."""
    if kind is r.FileKind.SHARD:
        for e in manifest.ranks:
            length = e.stored_bytes(part, manifest.layout.k)
            yield e.rank, part, manifest.shard_offset(e.rank, part), length
        return
    entry = manifest.of_rank(part)
    for shard in range(manifest.layout.k):
        length = entry.stored_bytes(shard, manifest.layout.k)
        yield part, shard, min(shard * entry.shard_bytes, entry.length), length


@dataclass(frozen=True)
class Part:
    """Whole chunks of one piece, the first of which has number ``chunk``: what is read at once.

    ``offset`` is in the file, ``length`` in bytes.
    """

    rank: int
    shard: int
    chunk: int
    offset: int
    length: int


def parts_of(manifest: r.Manifest, kind: r.FileKind, part: int) -> Iterator[Part]:
    """All of a slot or shard file, in parts of at most `PART_BYTES`."""
    chunk_bytes = manifest.chunk_bytes
    size = max(chunk_bytes, PART_BYTES // chunk_bytes * chunk_bytes)
    for rank, shard, offset, length in pieces_of(manifest, kind, part):
        for at in range(0, length, size):
            yield Part(rank, shard, at // chunk_bytes, offset + at, min(size, length - at))


def table_of(manifest: r.Manifest, part: Part) -> Any:
    """CRC32C of the part's chunks (uint32)."""
    table = np.frombuffer(manifest.of_rank(part.rank).tables[part.shard], "<u4")
    return table[part.chunk : part.chunk + -(-part.length // manifest.chunk_bytes)]


async def bad_in_part(home: Home, held: Held, manifest: r.Manifest, part: Part) -> list[int]:
    """Wrong chunks of one part of a file of this node; all of them if it is beyond its end."""
    table, size = table_of(manifest, part), manifest.chunk_bytes
    if part.offset + part.length > held.length:
        return list(range(part.chunk, part.chunk + len(table)))
    view = home.holdings.view(held, part.offset, part.length)
    work = partial(verify_chunks, view, size, table, first_chunk=part.chunk)
    return await home.doors.workers.run(work, part.length, Traffic.SCRUB)


async def bad_in_file(home: Home, held: Held, manifest: r.Manifest) -> tuple[w.BadPiece, ...]:
    """What is wrong in a file of this node; a piece beyond its end is wrong as a whole."""
    bad = []
    for rank, shard, offset, length in pieces_of(manifest, held.kind, held.part):
        chunks = list(range(-(-length // manifest.chunk_bytes)))
        if offset + length <= held.length:
            view = home.holdings.view(held, offset, length)
            work = partial(bad_chunks, manifest, rank, shard, view)
            chunks = await home.doors.workers.run(work, length, Traffic.SCRUB)
        bad += _named(rank, shard, chunks)
    return tuple(bad)


async def bad_in_object(ctx: JobContext, query: w.VerifyQuery) -> tuple[w.BadPiece, ...]:
    """What is wrong in the object of rank ``query.part``, whose share's manifest is read anew too.

    Raises ObjectAbsent, ObjectStoreUnavailable, IntegrityError, FormatError.
    """
    share = await offloaded_share(ctx, query.attempt, query.owner)
    names = {o.rank: o.name for o in share.ranks} if share else {}
    if share is None or query.part not in names:
        raise ObjectAbsent(f"step {query.attempt.step} has no object of rank {query.part}")
    objects = ctx.home.doors.objects
    if objects is None:
        raise ObjectStoreUnavailable(f"{ctx.home.node} has no object store configured (s3_url)")
    manifest = open_manifest(await objects.get(share.manifest), query.manifest_digest)
    wrong: dict[tuple[int, int], list[int]] = {}
    for part in parts_of(manifest, r.FileKind.SLOT, query.part):
        view = memoryview(bytearray(part.length))
        await objects.get_into(names[part.rank], part.offset, view)
        table, size = table_of(manifest, part), manifest.chunk_bytes
        work = partial(verify_chunks, view, size, table, first_chunk=part.chunk)
        found = await ctx.home.doors.workers.run(work, len(view), Traffic.SCRUB)
        wrong.setdefault((part.rank, part.shard), []).extend(found)
    return tuple(piece for at, chunks in wrong.items() for piece in _named(*at, chunks))


def _named(rank: int, shard: int, chunks: list[int]) -> list[w.BadPiece]:
    return [w.BadPiece(rank, shard, len(chunks), tuple(chunks[:BAD_NAMED]))] if chunks else []
