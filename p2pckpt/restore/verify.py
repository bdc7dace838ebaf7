"""Fetched bytes against the manifest, and the manifest against the group record.

The chain of proof: the ledger names a manifest's SHA-256; the manifest has a CRC32C for every chunk
of every shard. Chunks never straddle shards, so a snapshot's chunk table is the data shards' tables
one after the other: the same numbers serve a shard, a range of it, a decoded piece and the trainer.

Contract: pure; returns what is wrong, or raises IntegrityError naming it. Runs on a worker.
"""

from __future__ import annotations

import hashlib

import numpy as np

from p2pckpt import records as r
from p2pckpt.coding.checksum import verify_chunks
from p2pckpt.errors import IntegrityError
from p2pckpt.wire import unpack


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
