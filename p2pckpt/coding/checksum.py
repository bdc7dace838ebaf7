"""CRC32C of buffers and of their chunks: what tells a good shard from an erasure.

Intuition: a long buffer is cut into chunks of equal size, the last may be short, and each chunk
has its own CRC. A wrong chunk is then found, named and fetched again without touching the others.

CRC32C is the Castagnoli CRC of RFC 3720 (iSCSI), appendix B.4: reflected polynomial 0x82F63B78,
register starts at and is finally XORed with 0xFFFFFFFF. A chunk's CRC covers the bytes that are
really stored; a tail of implicit zeros can be covered as well without making them, because
appending n zero bytes multiplies the register by x^(8n) modulo the polynomial. :data:`ALGORITHM`
names all this and is stored beside the values; tables are little-endian on every machine.

The kernel is the ``crc32c`` package (the CPU's CRC instruction where there is one), which releases
the GIL for 32 KiB and more; it is compared with known answers before it may judge data. A CRC
finds accidents, not attackers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from mmap import mmap
from typing import Any

import crc32c as _package
import numpy as np
from numpy.typing import NDArray

from p2pckpt.errors import CodingError, UsageError

Buffer = bytes | bytearray | memoryview | mmap | NDArray[Any]

ALGORITHM = "crc32c/1"

_POLYNOMIAL = 0x82F63B78
_MASK = 0xFFFFFFFF
_KNOWN_ANSWERS = (  # "123456789", then RFC 3720 B.4
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
)


def crc32c(buf: Buffer, value: int = 0) -> int:
    """CRC32C of a contiguous buffer; ``value`` is the CRC of the bytes before it.

    Raises :class:`UsageError` for something that is no contiguous buffer, :class:`CodingError`
    when the package fails its known answers.
    """
    _prove()
    if type(buf) is bytes:  # most are: records of some hundred bytes
        return _package.crc32c(buf, value)
    return _package.crc32c(_view("buffer", buf).data, value)


def extend_with_zeros(value: int, zero_bytes: int) -> int:
    """The CRC of a message after ``zero_bytes`` zeros are appended; ``value`` is its CRC before.

    Takes O(log zero_bytes) steps and no memory. Raises :class:`UsageError` for a negative count.
    """
    if zero_bytes < 0:
        raise UsageError(f"zero_bytes: needs 0 or more, found {zero_bytes}")
    return _times(value ^ _MASK, _x_to_bytes(zero_bytes)) ^ _MASK


def chunk_table(
    buf: Buffer, chunk_bytes: int, logical_bytes: int | None = None
) -> NDArray[np.uint32]:
    """One CRC for each chunk of ``chunk_bytes``; the last chunk may be short.

    ``logical_bytes`` (default: the buffer's length) is the length that the table covers; bytes
    beyond the buffer's end count as zeros. Returns ceil(logical_bytes / chunk_bytes) values of
    dtype ``<u4``. Raises :class:`UsageError` for a chunk size below 1 or a logical length below
    the buffer's.
    """
    _prove()
    view = _view("buffer", buf)
    logical = view.size if logical_bytes is None else logical_bytes
    if logical < view.size:
        raise UsageError(f"logical_bytes: needs the buffer's {view.size} or more, found {logical}")
    table = np.zeros(_chunk_count(logical, chunk_bytes), dtype="<u4")
    for chunk in range(len(table)):
        start = chunk * chunk_bytes
        piece = view[start : start + chunk_bytes]
        zero_bytes = min(chunk_bytes, logical - start) - piece.size
        crc = _package.crc32c(piece.data)
        table[chunk] = extend_with_zeros(crc, zero_bytes) if zero_bytes else crc
    return table


def verify_chunks(
    buf: Buffer,
    chunk_bytes: int,
    table: Sequence[int] | NDArray[np.uint32],
    logical_bytes: int | None = None,
    first_chunk: int = 0,
) -> list[int]:
    """Numbers of the chunks whose CRC is not the one in ``table``; empty when all are right.

    ``table`` holds exactly the chunks of this buffer, so slice it for a part of a shard;
    ``first_chunk`` is the number of its first chunk, added to the numbers returned. Raises
    :class:`UsageError` when the table has another number of entries, and as
    :func:`chunk_table` does.
    """
    found = chunk_table(buf, chunk_bytes, logical_bytes)
    expected = _table("table", table, len(found))
    return [first_chunk + int(bad) for bad in np.flatnonzero(found != expected)]


def copy_and_check(
    dst: Buffer,
    src: Buffer,
    chunk_bytes: int,
    table: Sequence[int] | NDArray[np.uint32],
    first_chunk: int = 0,
) -> list[int]:
    """Copy ``src`` to ``dst`` chunk by chunk, each only if its CRC is right; numbers of the bad.

    Check and copy run on one chunk after the other while it is in cache. A bad chunk leaves its
    bytes of ``dst`` as they were. ``src`` must not change meanwhile. ``table`` and ``first_chunk``
    are those of :func:`verify_chunks`. Raises :class:`UsageError` before the first byte is
    written for unequal lengths, a read-only ``dst`` or a table with another number of entries.
    """
    _prove()
    source, target = _view("src", src), _view("dst", dst)
    if source.size != target.size:
        raise UsageError(f"dst: needs the {source.size} bytes of src, found {target.size}")
    if not target.flags.writeable:
        raise UsageError("dst: needs a writable buffer, found a read-only one")
    expected = _table("table", table, _chunk_count(source.size, chunk_bytes)).tolist()
    bad = []
    for chunk, crc in enumerate(expected):
        part = slice(chunk * chunk_bytes, (chunk + 1) * chunk_bytes)
        piece = source[part]
        if _package.crc32c(piece.data) == crc:
            np.copyto(target[part], piece)  # releases the GIL; a memoryview assignment would not
        else:
            bad.append(first_chunk + chunk)
    return bad


# -- arguments ------------------------------------------------------------------------------------


def _view(name: str, buf: Buffer) -> NDArray[np.uint8]:
    try:
        return np.frombuffer(buf, dtype=np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(
            f"{name}: needs a C-contiguous buffer, found {type(buf).__name__} ({error})"
        ) from None


def _chunk_count(total_bytes: int, chunk_bytes: int) -> int:
    if chunk_bytes < 1:
        raise UsageError(f"chunk_bytes: needs 1 or more, found {chunk_bytes}")
    return -(-total_bytes // chunk_bytes)


def _table(name: str, table: Sequence[int] | NDArray[np.uint32], chunks: int) -> NDArray[np.uint32]:
    if len(table) != chunks:
        raise UsageError(f"{name}: needs {chunks} values, one a chunk, found {len(table)}")
    return np.asarray(table, dtype="<u4")


# -- arithmetic modulo the polynomial, in its reflected form: bit 31 is x^0, bit 0 is x^31 --------


def _times(a: int, b: int) -> int:
    """Product of two polynomials over GF(2), modulo the CRC's."""
    product = 0
    for power in range(31, -1, -1):
        if a >> power & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@functools.lru_cache(maxsize=256)
def _x_to_bytes(count: int) -> int:
    """x^(8 count) by repeated squaring."""
    result, square = 1 << 31, 1 << 23
    while count:
        if count & 1:
            result = _times(result, square)
        square = _times(square, square)
        count >>= 1
    return result


@functools.cache
def _prove() -> None:
    """Known answers, and for the package's code for long inputs a run of zeros by arithmetic."""
    long = 100_003
    answers = (*_KNOWN_ANSWERS, (bytes(long), extend_with_zeros(0, long)))
    for message, expected in answers:
        if (found := _package.crc32c(message)) != expected:
            raise CodingError(
                f"crc32c package: {len(message)} bytes starting {message[:4].hex()} need "
                f"{expected:08x}, found {found:08x}"
            )
