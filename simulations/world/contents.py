"""What every snapshot of the simulated world must be, and where its bytes lie right now.

A rank's bytes follow from rank, step and writer (the launch that trained that far), so a checker
knows them without asking anybody: a restore that mixes launches, lineages or ranks shows. Shards
are worked out from the format's definition, not by the product's pipeline.

Contract: pure functions; `Found` is a picture of the nodes' memory at the moment it is made, by
bytes that were compared, whatever any record says of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from random import Random

import numpy as np
from numpy.typing import NDArray

from p2pckpt import records as r

CHUNK_BYTES = 1024
REMEMBERED = 8192
"""Snapshots whose bytes are kept: several steps of 1,250 ranks."""


@lru_cache(maxsize=REMEMBERED)
def content(rank: int, step: int, writer: str = "") -> bytes:
    """The snapshot of a rank at a step: some kilobytes, of a length that fits no chunk."""
    rng = Random(f"content {rank} {step} {writer}")
    return rng.randbytes(9000 + 37 * rank + step % 13)


@lru_cache(maxsize=REMEMBERED)
def shards(rank: int, step: int, layout: r.Layout, writer: str = "") -> tuple[bytes, ...]:
    """What each stored shard of that snapshot must be, worked out from the format's definition."""
    image, k = content(rank, step, writer), layout.k
    size = -(-len(image) // k)
    size = -(-size // CHUNK_BYTES) * CHUNK_BYTES
    padded = np.frombuffer(image.ljust(k * size, b"\0"), np.uint8).reshape(k, size)
    data = [image[i * size : (i + 1) * size] for i in range(k)]
    return (*data, *(_parity(row, padded) for row in range(k, layout.shards)))


def unknown_losses(
    damaged: Mapping[tuple[str, str], r.FileRecord | None], attempt: r.Attempt
) -> Counter[str]:
    """By share: nodes with a file of it that was damaged in silence, which nobody can know of.
    ``damaged``: by node and name, what the file was."""
    hurt = ((node, of) for (node, _), of in damaged.items() if of and of.attempt == attempt)
    return Counter(owner for _, owner in {(node, of.owner) for node, of in hurt})


def _parity(row: int, data: NDArray[np.uint8]) -> bytes:
    """A parity shard, as FORMATS.md defines it: column c times 1 / (row xor c), all added; for
    k = 1 a copy."""
    if len(data) == 1:
        return data.tobytes()
    terms = [_times(_inverse(row ^ column))[shard] for column, shard in enumerate(data)]
    return bytes(np.bitwise_xor.reduce(terms))


@lru_cache(maxsize=256)
def _times(factor: int) -> NDArray[np.uint8]:
    """A factor times every byte, in GF(2^8) modulo 0x11D."""
    out = np.zeros(256, np.uint8)
    for byte in range(256):
        product, power = 0, byte
        for bit in range(8):
            product ^= power if factor >> bit & 1 else 0
            power = power << 1 ^ (0x11D if power & 0x80 else 0)
        out[byte] = product
    return out


@lru_cache(maxsize=256)
def _inverse(value: int) -> int:
    return int(np.flatnonzero(_times(value) == 1)[0])


@dataclass(frozen=True)
class Snapshots:
    """The bytes of one attempt: who wrote it, how it is coded, and its shares."""

    attempt: r.Attempt
    layout: r.Layout
    writer: str
    shares: tuple[r.SealedShare, ...]

    def is_right(self, record: r.FileRecord, image: bytearray | bytes) -> bool:
        """Has a WHOLE file of this attempt the bytes that it must have?"""
        step, length = self.attempt.step, min(record.length, len(image))
        if record.kind is r.FileKind.SLOT:
            wanted = content(record.part, step, self.writer)
            return length == len(wanted) and image.startswith(wanted)
        ranks = self._ranks.get(record.owner, ())
        pieces = (shards(rank, step, self.layout, self.writer)[record.part] for rank in ranks)
        wanted = b"".join(pieces)
        return bool(ranks) and length == len(wanted) and image.startswith(wanted)

    @cached_property
    def _ranks(self) -> dict[str, tuple[int, ...]]:
        return {share.node: share.ranks for share in self.shares}

    def share_of(self, record: r.FileRecord) -> r.SealedShare | None:
        """The share of which a file has a part."""
        if record.kind is r.FileKind.SLOT:
            return self._of_rank.get(record.part)
        return next((share for share in self.shares if share.node == record.owner), None)

    @cached_property
    def _of_rank(self) -> dict[int, r.SealedShare]:
        return {rank: share for share in self.shares for rank in share.ranks}


@dataclass
class Kept:
    """A commit that stands: its bytes, how many node losses it could take, who was hit since."""

    commit: r.Commit
    snapshots: Snapshots
    at_s: float
    survives: int = -1
    hit: dict[str, None] = field(default_factory=dict)
    gone: bool = False
    weakest: r.SealedShare | None = None
    """The share that could lose the least, when last looked at all."""
    members: frozenset[str] = frozenset()
    """Nodes that had a session when it was committed: it rests on theirs."""
    undone: bool = False
    """Given up by nodes that never heard of it, in a ledger that was set back to before it."""

    @property
    def at(self) -> tuple[str, int]:
        """Lineage and step."""
        return self.commit.lineage, self.commit.attempt.step


@dataclass
class Found:
    """Nodes that have the right bytes of one share: by rank for own copies, by index for shards."""

    share: r.SealedShare
    layout: r.Layout
    slots: dict[int, list[str]] = field(default_factory=dict)
    shards: dict[int, list[str]] = field(default_factory=dict)

    @property
    def owners(self) -> list[str]:
        """Nodes with the own copies of all ranks."""
        nodes = self.slots.get(self.share.ranks[0], [])
        return [n for n in nodes if all(n in self.slots.get(k, ()) for k in self.share.ranks)]

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks that cannot be had."""
        if len(self.shards) >= self.layout.k:
            return []
        return [rank for rank in self.share.ranks if not self.slots.get(rank)]

    @property
    def missing(self) -> list[int]:
        """Shards that no node has but one with the own copies, whose loss would take both."""
        owner = self.owners[:1]
        every = range(self.layout.shards)
        return [i for i in every if not [n for n in self.shards.get(i, ()) if [n] != owner]]

    @property
    def survives(self) -> int:
        """Node losses after which it can still be had, -1 if it cannot now."""
        owner = self.owners[:1]
        holders = {n for i in self.shards for n in self.shards[i] if [n] != owner}
        whole = min(self.layout.shards - len(self.missing), len(holders))
        if owner:
            return max(0, whole - self.layout.k + 1)
        return whole - self.layout.k if not self.lost_ranks else -1

    @property
    def full(self) -> bool:
        """Has it all that its layout promises?"""
        return bool(self.owners) and not self.missing


Files = Mapping[str, tuple[r.FileRecord, bytearray]]
"""A node's files by name: a valid record, and the bytes beside it."""

Part = tuple[r.Attempt, r.FileKind, int | str]
"""A rank's slots, or an owner's shards."""


class Shelf:
    """Every file of every node with the record beside it, also by what it has a part of."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, tuple[r.FileRecord, bytearray]]] = {}
        self._order: dict[str, int] = {}
        self._places: dict[Part, dict[tuple[str, str], None]] = {}
        self._wiped: list[tuple[float, str, Files]] = []

    def record(self, node: str, name: str) -> r.FileRecord | None:
        """What stands beside a file."""
        found = self.nodes.get(node, {}).get(name)
        return None if found is None else found[0]

    def put(self, node: str, name: str, record: r.FileRecord, image: bytearray) -> None:
        """A file that is there, or has another record now."""
        self.take(node, name)
        self._order.setdefault(node, len(self._order))
        self.nodes.setdefault(node, {})[name] = (record, image)
        self._places.setdefault(_part(record), {})[node, name] = None

    def take(self, node: str, name: str) -> None:
        """A file that is gone, or has no record that is valid."""
        found = self.nodes.get(node, {}).pop(name, None)
        if found is not None:
            places = self._places[_part(found[0])]
            del places[node, name]
            if not places:
                del self._places[_part(found[0])]

    def wipe(self, node: str, at_s: float) -> None:
        """All files of a node are gone."""
        self._wiped.append((at_s, node, dict(self.nodes.get(node, {}))))
        for name in list(self.nodes.get(node, ())):
            self.take(node, name)

    def had(self, since_s: float) -> Shelf:
        """All files that are there, and those of nodes that were wiped since then."""
        self._wiped = [wiped for wiped in self._wiped if wiped[0] >= since_s]
        out = Shelf()
        for node, files in (*self.nodes.items(), *(wiped[1:] for wiped in self._wiped)):
            for name, (record, image) in files.items():
                out.put(node, name, record, image)
        return out

    def of_share(
        self, attempt: r.Attempt, share: r.SealedShare
    ) -> list[tuple[str, r.FileRecord, bytearray]]:
        """The WHOLE files that have a part of a share, in the order in which the nodes came."""
        slots = [(attempt, r.FileKind.SLOT, rank) for rank in share.ranks]
        parts: list[Part] = [*slots, (attempt, r.FileKind.SHARD, share.node)]
        places = [place for part in parts for place in self._places.get(part, ())]
        places.sort(key=lambda place: self._order[place[0]])
        found = [(node, *self.nodes[node][name]) for node, name in places]
        return [f for f in found if f[1].state is r.FileState.WHOLE]


def _part(record: r.FileRecord) -> Part:
    slot = record.kind is r.FileKind.SLOT
    return record.attempt, record.kind, record.part if slot else record.owner


def whole_files(
    snapshots: Snapshots, owner: str, nodes: Mapping[str, Files]
) -> list[tuple[str, str, int]]:
    """Node, name and length of every WHOLE file that has a part of one share of an attempt."""
    ranks = next(s.ranks for s in snapshots.shares if s.node == owner)
    out = []
    for node, files in nodes.items():
        for name, (record, _) in files.items():
            whole = record.state is r.FileState.WHOLE and record.attempt == snapshots.attempt
            own = record.kind is r.FileKind.SLOT and record.part in ranks
            if whole and (own or record.owner == owner):
                out.append((node, name, record.length))
    return out


def find(snapshots: Snapshots, shelf: Shelf, without: Iterable[str] = ()) -> list[Found]:
    """Where the right bytes of an attempt are, share by share, leaving out some nodes."""
    return [find_share(snapshots, share, shelf, without) for share in snapshots.shares]


def find_share(
    snapshots: Snapshots, share: r.SealedShare, shelf: Shelf, without: Iterable[str] = ()
) -> Found:
    """Where the right bytes of one share are."""
    found, left_out = Found(share, snapshots.layout), set(without)
    for node, record, image in shelf.of_share(snapshots.attempt, share):
        if node not in left_out and snapshots.is_right(record, image):
            where = found.slots if record.kind is r.FileKind.SLOT else found.shards
            where.setdefault(record.part, []).append(node)
    return found


def in_store(
    offloaded: r.Offloaded, kept: Kept, ranks: Sequence[int], objects: Mapping[str, bytes]
) -> bool:
    """Has the object store the manifests that tell what the bytes of some ranks are: the step's,
    and those of their shares?"""
    shares = (s for s in kept.snapshots.shares if not set(ranks).isdisjoint(s.ranks))
    wanted = {offloaded.manifest_digest, *(s.manifest_digest for s in shares)}
    return wanted <= {hashlib.sha256(data).hexdigest() for data in objects.values()}


def lost_ranks(
    kept: Kept, found: Iterable[Found], stored: r.Offloaded | None, objects: Mapping[str, bytes]
) -> list[int]:
    """Ranks whose right bytes neither memory has (``found``) nor the object store."""
    lost = [rank for f in found for rank in f.lost_ranks]
    if lost and stored is not None and in_store(stored, kept, lost, objects):
        step, writer, whole = kept.commit.attempt.step, kept.snapshots.writer, {*objects.values()}
        lost = [rank for rank in lost if content(rank, step, writer) not in whole]
    return sorted(lost)


def gains(kept: Kept, record: r.FileRecord, shelf: Shelf) -> Found | None:
    """A committed step has a file more: what it can lose from now on, and its share.

    All shares are looked at only if neither this one nor the one that was weakest can lose less
    than the step could before, and if it could lose less than is possible at all.
    """
    share = kept.snapshots.share_of(record)
    if share is None:
        return None
    found = find_share(kept.snapshots, share, shelf)
    if not kept.hit and kept.survives > kept.snapshots.layout.m:
        return found  # there is no more
    seen = [found]
    if kept.weakest is not None:
        seen.append(find_share(kept.snapshots, kept.weakest, shelf))
    if all(one.survives >= kept.survives for one in seen):
        seen = find(kept.snapshots, shelf)
    weakest = min(seen, key=lambda one: one.survives)
    kept.weakest = weakest.share
    if weakest.survives >= kept.survives:
        kept.survives, kept.hit = weakest.survives, {}
    return found
