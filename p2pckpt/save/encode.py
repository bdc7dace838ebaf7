"""Snapshot -> shards: parity into staging, and the CRC32C of every chunk, in one pass.

A snapshot of L bytes is cut into k data shards of ceil(L / k) bytes, rounded up to a chunk; they
are ranges of the slot itself and are never copied. The tail is implicit zeros: it is coded as such
and not stored. Parity goes into staging. The pass runs column by column, COLUMN_BYTES of each
shard at a time, so that a column is coded and checked while it is in cache.

Contract: the slot must not change meanwhile. What comes out is the rank's entry of the manifest:
its tables cover exactly the bytes that travel, so that a holder, a reader and a trainer check the
same numbers. Pure: runs on a worker thread.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from p2pckpt.coding.checksum import chunk_table
from p2pckpt.coding.reed_solomon import Code
from p2pckpt.errors import UsageError
from p2pckpt.records import Layout, RankSnapshot

COLUMN_BYTES = 1024 * 1024
_MAX_HEADER_BYTES = 16 * 1024 * 1024


def shard_bytes(length: int, layout: Layout, chunk_bytes: int) -> int:
    """Length of one shard of a snapshot: ceil(length / k), rounded up to a chunk."""
    share = -(-length // layout.k)
    return -(-share // chunk_bytes) * chunk_bytes


def encode_rank(
    rank: int, slot: memoryview, parity: list[memoryview], layout: Layout, chunk_bytes: int
) -> RankSnapshot:
    """Fill the m ``parity`` buffers and describe the shards of the snapshot in ``slot``.

    ``slot`` is exactly the snapshot; each parity buffer has `shard_bytes` bytes. Raises UsageError
    for other lengths.
    """
    size = shard_bytes(len(slot), layout, chunk_bytes)
    if len(parity) != layout.m or any(len(p) != size for p in parity):
        raise UsageError(
            f"encode rank {rank}: needs {layout.m} parity buffers of {size} bytes, "
            f"has {[len(p) for p in parity]}"
        )
    data = np.frombuffer(slot, np.uint8)
    outputs = [np.frombuffer(p, np.uint8) for p in parity]
    code = Code(layout.k, layout.m)
    step = max(chunk_bytes, COLUMN_BYTES // chunk_bytes * chunk_bytes)
    tables: list[list[NDArray[np.uint32]]] = [[] for _ in range(layout.shards)]
    for start in range(0, size, step):
        stop = min(start + step, size)
        stored = [data[i * size + start : min(i * size + stop, len(data))] for i in range(layout.k)]
        stored = [s if i * size + start < len(data) else data[:0] for i, s in enumerate(stored)]
        columns = [out[start:stop] for out in outputs]
        code.encode([_padded(s, stop - start) for s in stored], columns)
        for table, column in zip(tables, (*stored, *columns), strict=True):
            table.append(chunk_table(column, chunk_bytes))
    return RankSnapshot(
        rank=rank,
        length=len(slot),
        shard_bytes=size,
        tables=tuple(np.concatenate(t or [np.zeros(0, "<u4")]).tobytes() for t in tables),
        header=header_of(slot),
    )


def header_of(slot: memoryview) -> bytes:
    """The safetensors header of a snapshot, as opaque bytes; b"" if there is none."""
    if len(slot) < 8:
        return b""
    length = int.from_bytes(slot[:8], "little")
    if length > min(len(slot) - 8, _MAX_HEADER_BYTES) or bytes(slot[8:9]) != b"{":
        return b""
    return bytes(slot[8 : 8 + length]).rstrip(b" ")


def _padded(column: NDArray[np.uint8], length: int) -> NDArray[np.uint8]:
    """The column with its implicit zeros; itself where nothing is missing."""
    if len(column) == length:
        return column
    whole = np.zeros(length, np.uint8)
    whole[: len(column)] = column
    return whole
