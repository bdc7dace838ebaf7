"""Fetched bytes against the manifest, and the manifest against the group record.

The chain of proof: the ledger names a manifest's SHA-256; the manifest has a CRC32C for every chunk
of every shard. Chunks never straddle shards, so a snapshot's chunk table is the data shards' tables
one after the other: the same numbers serve a shard, a range of it, a decoded piece and the trainer.

Contract: returns what is wrong, or raises IntegrityError naming it. The functions are pure and run
on a worker; `ChunkCheck` runs in the trainer, while it loads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from p2pckpt import records as r
from p2pckpt.coding.checksum import verify_chunks
from p2pckpt.errors import IntegrityError
from p2pckpt.wire import RestoreFile, unpack


def open_manifest(packed: bytes, digest: str) -> r.Manifest:
    """The manifest with this SHA-256. Raises IntegrityError or FormatError."""
    if (found := hashlib.sha256(packed).hexdigest()) != digest:
        raise IntegrityError(f"manifest digest {found[:12]}, needs {digest[:12]}")
    return unpack(packed, r.Manifest)


def bad_chunks(manifest: r.Manifest, rank: int, shard: int, piece: memoryview) -> list[int]:
    """Chunks of a whole stored shard of one rank that differ from the table."""
    table = np.frombuffer(manifest.of_rank(rank).tables[shard], "<u4")
    return verify_chunks(piece, manifest.chunk_bytes, table)


def snapshot_table(manifest: r.Manifest, rank: int) -> bytes:
    """CRC32C per chunk of a rank's snapshot, packed as little-endian uint32."""
    return b"".join(manifest.of_rank(rank).tables[: manifest.layout.k])


class ChunkCheck:
    """CRC32C of every chunk that a range touches, once, right before a trainer reads the range.

    ``mend(ballot, offset, length)`` has a range fetched anew. ``seconds``: spent here, by `clock`.
    """

    def __init__(
        self,
        reply: RestoreFile,
        image: memoryview,
        mend: Callable[[int, int, int], None],
        clock: Callable[[], float],
    ) -> None:
        self._reply, self._image, self._mend, self._clock = reply, image, mend, clock
        self._table = np.frombuffer(reply.table, "<u4")
        self._seen = np.zeros(len(self._table), bool)
        self.seconds = 0.0

    def __call__(self, offset: int, length: int) -> None:
        """Raises IntegrityError if a chunk is wrong and could not be mended."""
        begun, size = self._clock(), self._reply.chunk_bytes
        first, last = offset // size, -(-(offset + length) // size)
        while first < last:
            stop = first
            while stop < last and not self._seen[stop]:
                stop += 1
            if stop > first:
                self._check(first, stop)
            first = max(stop, first + 1)
        self.seconds += self._clock() - begun

    def _check(self, first: int, last: int) -> None:
        size = self._reply.chunk_bytes
        piece = self._image[first * size : last * size]
        table = self._table[first:last]
        if bad := verify_chunks(piece, size, table):
            start = (first + bad[0]) * size
            stop = min((first + bad[-1] + 1) * size, self._reply.length)
            self._mend(self._reply.ballot, start, stop - start)
            if bad := verify_chunks(piece, size, table):
                raise IntegrityError(
                    f"step {self._reply.step}: chunks {[first + b for b in bad[:5]]} are wrong"
                )
        self._seen[first:last] = True
