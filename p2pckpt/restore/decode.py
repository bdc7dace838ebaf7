"""Missing data shards from any k others, only those that are missing, into place.

Contract: pure; runs on a worker. Data shards are read where they lie in the snapshot's file; the
short last ones are padded with their implicit zeros in passing. What is decoded must still be
verified against the manifest: a wrong source that passed its CRC does not exist for us.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from p2pckpt.coding.reed_solomon import Code
from p2pckpt.records import Layout, RankSnapshot

COLUMN_BYTES = 1024 * 1024


def decode_rank(
    entry: RankSnapshot,
    layout: Layout,
    snapshot: memoryview,
    parity: Mapping[int, memoryview],
    missing: list[int],
) -> None:
    """Fill the ``missing`` data shards of ``snapshot`` (exactly its length) from the others.

    ``parity`` maps shard index (k..k+m-1) to that whole shard. Raises CodingError if fewer than k
    shards are at hand.
    """
    k, size = layout.k, entry.shard_bytes
    code, image = Code(k, layout.m), np.frombuffer(snapshot, np.uint8)
    rows = {index: np.frombuffer(view, np.uint8) for index, view in parity.items()}
    for start in range(0, size, COLUMN_BYTES):
        stop = min(start + COLUMN_BYTES, size)
        present: dict[int, NDArray[np.uint8]] = {}
        for index in range(k):
            if index not in missing:
                present[index] = _column(image, index * size, start, stop, entry.length)
        for index, row in rows.items():
            present[index] = row[start:stop]
        wanted = {index: np.empty(stop - start, np.uint8) for index in missing}
        code.decode(present, wanted)
        for index, column in wanted.items():
            at = index * size + start
            stored = max(0, min(at + len(column), entry.length) - at)
            image[at : at + stored] = column[:stored]


def _column(
    image: NDArray[np.uint8], at: int, start: int, stop: int, length: int
) -> NDArray[np.uint8]:
    """One column of a data shard, with its implicit zeros."""
    low, high = min(at + start, length), min(at + stop, length)
    if high - low == stop - start:
        return image[low:high]
    whole = np.zeros(stop - start, np.uint8)
    whole[: high - low] = image[low:high]
    return whole
