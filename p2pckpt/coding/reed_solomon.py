"""Systematic Reed-Solomon erasure code over GF(2^8): any k of k+m shards give back all of them.

Intuition: the k data shards stay as they are; parity byte p is a linear combination of the k data
bytes at the same offset, with fixed coefficients. Bytes at other offsets never mix, so any byte
range of the shards can be encoded or decoded alone: pass slices instead of whole shards.

The field is bytes modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11D). Coefficients are Cauchy: parity row r
(r = k .. k+m-1), data column c has 1 / (r xor c). Every square submatrix of a Cauchy matrix is
invertible, so every loss of at most m shards is repaired (Bloemer et al., "An XOR-Based Erasure-
Resilient Coding Scheme", ICSI TR-95-048, 1995); rows of powers of two do not have this property
from 5 parities on. For k = 1 all coefficients are 1: each shard is a byte-equal copy.
:func:`generator_matrix` is part of the stored format and never changes.

The kernels are ISA-L's (``erasure_code.h``: ec_init_tables, ec_encode_data, gf_invert_matrix) by
ctypes, which releases the GIL, on the caller's memory without copies: mmap, memoryview, ndarray.
The library is loaded at first use and compared with a numpy reference before it may touch data.

Contract: arguments are checked before the first byte is written; then the result is exact or an
error is raised. Thread-safe as long as no two calls write to the same bytes. Data that is wrong
going in is wrong coming out: checksums are the caller's business (:mod:`p2pckpt.coding.checksum`).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2pckpt.errors import CodingError, MissingDependency, UsageError

Buffer = bytes | bytearray | memoryview | mmap | NDArray[Any]
Matrix = NDArray[np.uint8]

MAX_SHARDS = 255
_POLYNOMIAL = 0x11D
_PIECE_BYTES = 1 << 30  # ISA-L takes the length as a C int


@dataclass(frozen=True)
class Code:
    """The code rs(k, m): shards 0..k-1 are data, k..k+m-1 parity; all have one length in bytes.

    Meant for k + m <= 32 and m <= 8 or so (encoding costs k * m kernel steps a byte); every
    k >= 1, m >= 0, k + m <= 255 works. Cheap to make: tables are cached by (k, m). Raises
    :class:`UsageError` for other k or m.
    """

    k: int
    m: int

    def __post_init__(self) -> None:
        if self.k < 1 or self.m < 0 or self.k + self.m > MAX_SHARDS:
            raise UsageError(f"{self}: needs k >= 1, m >= 0 and k + m <= {MAX_SHARDS}")

    def __str__(self) -> str:
        return f"rs({self.k}, {self.m})"

    def encode(self, data: Sequence[Buffer], parity: Sequence[Buffer]) -> None:
        """Write the m ``parity`` buffers from the k ``data`` buffers, all of one length.

        Length 0 and m = 0 are legal. Several data buffers may be one and the same memory (a shared
        block of zeros for a tail that is not stored); a parity buffer may overlap nothing. Raises
        :class:`UsageError` for a wrong number of buffers, unequal lengths, overlap, a read-only
        or non-contiguous buffer.
        """
        if len(data) != self.k or len(parity) != self.m:
            raise UsageError(
                f"{self}: encode needs {self.k} data and {self.m} parity buffers, "
                f"found {len(data)} and {len(parity)}"
            )
        inputs = _views(dict(enumerate(data)), writable=False)
        outputs = _views(dict(enumerate(parity, start=self.k)), writable=True)
        address, length = _layout(inputs, outputs)
        if outputs and length:
            sources, targets = [address[i] for i in inputs], [address[i] for i in outputs]
            _combine(_kernels(), _encode_tables(self.k, self.m), sources, targets, length)

    def decode(self, present: Mapping[int, Buffer], missing: Mapping[int, Buffer]) -> None:
        """Write each ``missing`` buffer (data or parity) from any k of the ``present`` ones.

        Keys are shard numbers 0..k+m-1. All buffers hold the same byte range of their shards. Of
        more than k present shards the k lowest numbers are read. Only the missing shards that are
        asked for are computed. Raises :class:`CodingError` when fewer than k are present,
        :class:`UsageError` for a wrong number, a shard in both mappings, unequal lengths,
        overlap, a read-only or non-contiguous buffer.
        """
        for index in (*present, *missing):
            if not 0 <= index < self.k + self.m:
                raise UsageError(f"{self}: shard numbers are 0..{self.k + self.m - 1}, got {index}")
        if both := sorted(present.keys() & missing.keys()):
            raise UsageError(f"{self}: shards {both} are given as present and as missing")
        if len(present) < self.k:
            raise CodingError(
                f"{self}: decode needs {self.k} shards, have {len(present)}: {sorted(present)}"
            )
        inputs = _views(present, writable=False)
        outputs = _views(missing, writable=True)
        address, length = _layout(inputs, outputs)
        if outputs and length:
            survivors = tuple(sorted(inputs)[: self.k])
            tables = _decode_tables(self.k, self.m, survivors, tuple(outputs))
            sources, targets = [address[i] for i in survivors], [address[i] for i in outputs]
            _combine(_kernels(), tables, sources, targets, length)


def codec_library() -> str:
    """Name or path of the ISA-L library in use; loads and proves it if that has not happened.

    Raises :class:`MissingDependency` when there is none, :class:`CodingError` when it computes
    something else than the reference.
    """
    return str(_kernels()._name)


# -- the field and the code matrix, in numpy: the definition that the kernels are held to ---------


def _field() -> tuple[Matrix, Matrix]:
    """The 256 x 256 product table and the 256 inverses (entry 0 unused), from powers of x."""
    exp = np.zeros(510, dtype=np.uint8)
    log = np.zeros(256, dtype=np.intp)
    value = 1
    for power in range(255):
        exp[power] = exp[power + 255] = value
        log[value] = power
        value = value << 1 ^ (_POLYNOMIAL if value & 0x80 else 0)
    product = exp[log[:, None] + log[None, :]]
    product[0, :] = product[:, 0] = 0
    return product, exp[255 - log]


_PRODUCT, _INVERSE = _field()


def _multiply(left: Matrix, right: Matrix) -> Matrix:
    """Matrix product over the field: (a, b) times (b, c) gives (a, c)."""
    terms = _PRODUCT[left[:, :, None], right[None, :, :]]
    product: Matrix = np.bitwise_xor.reduce(terms, axis=1)
    return product


def generator_matrix(k: int, m: int) -> Matrix:
    """The (k+m, k) uint8 matrix whose product with the data bytes gives all shards' bytes."""
    if k == 1:
        return np.ones((1 + m, 1), dtype=np.uint8)
    rows, columns = np.arange(k, k + m)[:, None], np.arange(k)[None, :]
    return np.concatenate([np.eye(k, dtype=np.uint8), _INVERSE[rows ^ columns]])


def _invert(lib: ctypes.CDLL, matrix: Matrix) -> Matrix:
    """Inverse of a square matrix; a singular one raises :class:`CodingError`."""
    work = np.array(matrix, dtype=np.uint8, order="C")  # gf_invert_matrix destroys its input
    inverse = np.zeros_like(work)
    if lib.gf_invert_matrix(work.ctypes.data, inverse.ctypes.data, len(work)) != 0:
        raise CodingError(f"the {len(work)} x {len(work)} decode matrix is singular")
    return inverse


# -- coefficient tables, cached; bytes because they are immutable and shared by threads -----------


def _expand(lib: ctypes.CDLL, rows: Matrix) -> bytes:
    """ISA-L's 32-byte table for each of the (outputs, k) coefficients."""
    rows = np.ascontiguousarray(rows)
    tables = np.zeros(32 * rows.size, dtype=np.uint8)
    lib.ec_init_tables(rows.shape[1], rows.shape[0], rows.ctypes.data, tables.ctypes.data)
    return tables.tobytes()


@functools.lru_cache(maxsize=64)
def _encode_tables(k: int, m: int) -> bytes:
    return _expand(_kernels(), generator_matrix(k, m)[k:])


@functools.lru_cache(maxsize=256)
def _decode_tables(k: int, m: int, survivors: tuple[int, ...], wanted: tuple[int, ...]) -> bytes:
    """Tables that take the k survivors to the wanted shards: generator rows times inverse."""
    matrix = generator_matrix(k, m)
    inverse = _invert(_kernels(), matrix[list(survivors)])
    return _expand(_kernels(), _multiply(matrix[list(wanted)], inverse))


# -- the caller's memory --------------------------------------------------------------------------


def _views(buffers: Mapping[int, Buffer], *, writable: bool) -> dict[int, Matrix]:
    """Each buffer as a 1-D uint8 view of the same memory, or :class:`UsageError`."""
    views = {}
    for index, buffer in buffers.items():
        try:
            view = np.frombuffer(buffer, dtype=np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise UsageError(
                f"shard {index}: needs a C-contiguous buffer, "
                f"found {type(buffer).__name__} ({error})"
            ) from None
        if writable and not view.flags.writeable:
            raise UsageError(f"shard {index}: needs a writable buffer, found a read-only one")
        views[index] = view
    return views


def _layout(
    inputs: Mapping[int, Matrix], outputs: Mapping[int, Matrix]
) -> tuple[dict[int, int], int]:
    """Address of every shard and the one length they have.

    Unequal lengths, or an output that shares bytes with another shard: :class:`UsageError`.
    """
    views = {**inputs, **outputs}
    lengths = {index: view.size for index, view in views.items()}
    if len(set(lengths.values())) > 1:
        raise UsageError(f"shards need one length, found bytes by shard number: {lengths}")
    length = max(lengths.values())
    address = {index: view.ctypes.data for index, view in views.items()}
    for out in outputs:
        for other, start in address.items():
            if other != out and abs(start - address[out]) < length:
                raise UsageError(f"shard {out}: output needs its own memory, overlaps {other}")
    return address, length


def _combine(
    lib: ctypes.CDLL, tables: bytes, sources: Sequence[int], targets: Sequence[int], length: int
) -> None:
    """Write at each target address the tables' linear combination of the bytes at the sources.

    The caller has checked that all are valid for ``length`` bytes, and keeps the memory alive.
    """
    for start in range(0, length, _PIECE_BYTES):
        lib.ec_encode_data(
            min(_PIECE_BYTES, length - start),
            len(sources),
            len(targets),
            tables,
            (ctypes.c_void_p * len(sources))(*(at + start for at in sources)),
            (ctypes.c_void_p * len(targets))(*(at + start for at in targets)),
        )


# -- the library ----------------------------------------------------------------------------------


def _candidates() -> Iterable[str]:
    """Where ISA-L may be: the system's library, then the one inside the pyeclib wheel."""
    yield "libisal.so.2"
    spec = importlib.util.find_spec("pyeclib")  # finds the package without running it
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent.parent / "pyeclib.libs"
        yield from map(str, sorted(folder.glob("libisal*.so*")))


@functools.cache
def _kernels() -> ctypes.CDLL:
    """The first ISA-L that loads, proven; see :func:`codec_library` for the errors."""
    failures = []
    for name in _candidates():
        try:
            lib = ctypes.CDLL(name)
            _declare(lib)
        except (OSError, AttributeError) as error:
            failures.append(f"{name}: {error}")
            continue
        _prove(lib)
        return lib
    raise MissingDependency(
        "Reed-Solomon coding needs the ISA-L library: install the pyeclib wheel (pip install "
        f"'pyeclib>=1.8') or the system package (apt install libisal2). Tried {failures}"
    )


def _declare(lib: ctypes.CDLL) -> None:
    """Argument types as in ISA-L's erasure_code.h; AttributeError if a function is absent."""
    pointers = ctypes.POINTER(ctypes.c_void_p)
    number, pointer = ctypes.c_int, ctypes.c_void_p
    lib.ec_init_tables.argtypes = [number, number, pointer, pointer]
    lib.ec_init_tables.restype = None
    lib.ec_encode_data.argtypes = [number, number, number, pointer, pointers, pointers]
    lib.ec_encode_data.restype = None
    lib.gf_invert_matrix.argtypes = [pointer, pointer, number]
    lib.gf_invert_matrix.restype = number


def _prove(lib: ctypes.CDLL) -> None:
    """Compare the kernels with the numpy reference on fixed vectors; CodingError on mismatch.

    333 bytes run the vector loop and its tail, 7 bytes the code for short inputs; 8 outputs need
    more than one of ISA-L's passes. An inverse is multiplied back, and a singular matrix must be
    refused.
    """
    matrix = generator_matrix(5, 8)
    for length in (333, 7):
        data = (np.arange(5 * length) * 73 % 251).astype(np.uint8).reshape(5, length)
        parity = np.zeros((8, length), dtype=np.uint8)
        sources, targets = [[row.ctypes.data for row in rows] for rows in (data, parity)]
        _combine(lib, _expand(lib, matrix[5:]), sources, targets, length)
        if not np.array_equal(parity, _multiply(matrix[5:], data)):
            raise CodingError(f"{lib._name}: parity of the known vector differs from reference")
    if not np.array_equal(_multiply(_invert(lib, matrix[5:10]), matrix[5:10]), np.eye(5)):
        raise CodingError(f"{lib._name}: inverse of the known matrix differs from reference")
    try:
        _invert(lib, np.ones((2, 2), dtype=np.uint8))
    except CodingError:
        return
    raise CodingError(f"{lib._name}: a singular matrix was inverted without an error")
