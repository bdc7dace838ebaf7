"""The way out of one node's share, as a story: encode, place, send, seal.

    slots --encode--> EncodedShare --place, send--> receipts --> SealedShare

The slots are whole when this begins (the trainers said done, or died after it), so the trainers
are not needed any more: process-safe. When it ends, enough peers hold the shards: after the group
records and the outcome (agent/) the step is node-safe.

Contract: raises a CheckpointError if the share cannot be sealed, and then the caller writes ABORT;
returns a share whose every named holder sent its receipt. Staging files are the caller's to free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from p2pckpt import records as r
from p2pckpt.coding.checksum import ALGORITHM
from p2pckpt.config import Config
from p2pckpt.ports import Doors, Region
from p2pckpt.save.commit import spare_of
from p2pckpt.save.encode import encode_rank, shard_bytes
from p2pckpt.save.send import Crew, EncodedShare, send_share
from p2pckpt.traffic import Traffic
from p2pckpt.wire import pack


@dataclass(frozen=True)
class OwnSlot:
    """A rank's whole snapshot in this node's RAM; ``meta`` is the user's JSON."""

    rank: int
    region: Region
    meta: str


@dataclass(frozen=True)
class Origin:
    """Whose share it is, of which attempt, in which layout."""

    attempt: r.Attempt
    node: str
    store_id: str
    layout: r.Layout


async def save_share(
    slots: Sequence[OwnSlot],
    origin: Origin,
    crew: Callable[[], Awaitable[Crew]],
    stage: Callable[[int], Awaitable[Region]],
    doors: Doors,
    config: Config,
) -> tuple[r.SealedShare, r.Manifest]:
    """Encode, send and seal. ``stage(bytes)`` gives a staging region; ``crew()`` is asked when the
    checksums are taken, as it may have to wait for the ledger. Raises CheckpointError."""
    share = await encode(sorted(slots, key=lambda s: s.rank), origin, stage, doors, config)
    about = {"job": origin.attempt.job, "attempt": origin.attempt.key}
    doors.notes("encoded", {**about, "bytes": share.snapshot_bytes})
    sent = await send_share(share, await crew(), doors, config)
    facts = {"placed": sent.placement.reason, "holders": list(sent.holders)}
    doors.notes("sent", {**about, **facts})
    sent.check(origin.node, origin.layout, spare_of(origin.layout, config.min_spare))
    return seal(share, origin, sent.holders), share.manifest


async def encode(
    slots: Sequence[OwnSlot],
    origin: Origin,
    stage: Callable[[int], Awaitable[Region]],
    doors: Doors,
    config: Config,
) -> EncodedShare:
    """Parity of every rank into staging, the manifest after it."""
    layout, chunk = origin.layout, config.chunk_bytes
    sizes = [shard_bytes(slot.region.length, layout, chunk) for slot in slots]
    parity = await stage(layout.m * sum(sizes))
    entries: list[r.RankSnapshot] = []
    shards: list[list[Region]] = [[] for _ in range(layout.shards)]
    at = parity.offset
    for slot, size in zip(slots, sizes, strict=True):
        pieces = [Region(parity.file, at + j * size, size) for j in range(layout.m)]
        at += layout.m * size
        views = [doors.arena.view(piece) for piece in pieces]
        image = doors.arena.view(slot.region)
        work = partial(encode_rank, slot.rank, image, views, layout, chunk)
        entry = await doors.workers.run(work, len(image) + layout.m * size, Traffic.SAVE)
        entries.append(structs.replace(entry, meta=slot.meta))
        for index in range(layout.k):
            length = entry.stored_bytes(index, layout.k)
            start = slot.region.offset + min(index * size, slot.region.length)
            shards[index].append(Region(slot.region.file, start, length))
        for j, piece in enumerate(pieces):
            shards[layout.k + j].append(piece)
    manifest = r.Manifest(
        attempt=origin.attempt,
        owner=origin.node,
        store_id=origin.store_id,
        layout=layout,
        chunk_bytes=chunk,
        checksum=ALGORITHM,
        ranks=tuple(entries),
    )
    packed = pack(manifest)
    room = await stage(len(packed))
    doors.arena.view(room)[:] = packed
    digest = hashlib.sha256(packed).hexdigest()
    return EncodedShare(manifest, digest, tuple(tuple(s) for s in shards), room)


def seal(share: EncodedShare, origin: Origin, holders: tuple[str, ...]) -> r.SealedShare:
    """The share as it goes into the group record."""
    return r.SealedShare(
        node=origin.node,
        store_id=origin.store_id,
        ranks=tuple(entry.rank for entry in share.manifest.ranks),
        manifest_digest=share.digest,
        snapshot_bytes=share.snapshot_bytes,
        holders=holders,
    )
