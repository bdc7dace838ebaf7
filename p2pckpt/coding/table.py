"""The tensor table: the JSON header of a snapshot, which is one safetensors file.

The header says where each tensor lies. It depends on the structure of the state only, so a table
is built once and kept while the structure stays. The order in the file is by item size descending
(each tensor is aligned and there are no holes), the data start is a multiple of 4096, and the last
tensor, :data:`TREE`, holds all that is no tensor. Its length may change from save to save: room
for the longest possible last entry is reserved, so the data start does not move.

Dtypes that older safetensors readers lack are stored as U8 with one more dimension, the item
size; the metadata keep the true name, and also how tensors lay in memory where they overlapped.
A header is read as hostile input: every offset, length, dtype and name is checked, or
:class:`FormatError` is raised.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from ..errors import FormatError, UsageError

VERSION = 1
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors readers
TREE = "__p2pckpt_tree__"
RESERVED = ("__metadata__", TREE)

View: TypeAlias = tuple[int, int, tuple[int, ...]]  # see Table.views

_PAGE_BYTES = 4096
_LAST_ENTRY_BYTES = 160  # the tree's header entry with three 19-digit numbers
_META = "p2pckpt"

# -- dtypes -------------------------------------------------------------------------------------

# Name in torch -> name in the file, for those that every safetensors reader since 0.4 knows.
_FILE_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_TRUE_DTYPES = {file: true for true, file in _FILE_DTYPES.items()}
_NUMPY_TEXT = re.compile(r"[<>|][biufcmMSUV]\d{1,9}(\[[0-9A-Za-z]{1,20}\])?")


def _torch_sizes() -> dict[str, int]:
    sizes = {"complex32": 4, "complex64": 8, "complex128": 16, "bits16": 2}
    for name, file in _FILE_DTYPES.items():
        digits = re.sub(r"\D", "", file.split("_")[0])
        sizes[name] = int(digits) // 8 if digits else 1
    one_byte = "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 bits8 bits1x8"
    one_byte += " bits2x4 bits4x2 " + " ".join(f"int{n} uint{n}" for n in range(1, 8))
    return sizes | dict.fromkeys(one_byte.split(), 1)


TORCH_BYTES = _torch_sizes()


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a table or scalar dtype name; FormatError if there is none."""
    short = name.removeprefix("numpy:")
    try:
        if name in TORCH_BYTES:
            dtype = np.dtype(name)
            if dtype.itemsize == TORCH_BYTES[name]:
                return dtype
        if name.startswith("numpy:") and _NUMPY_TEXT.fullmatch(short):
            dtype = np.dtype(short)
            if dtype.str == short and not dtype.hasobject:
                return dtype
    except (TypeError, ValueError) as error:
        raise FormatError(f"dtype {name!r}: {error}") from error
    raise FormatError(f"dtype {name!r} is unknown to numpy")


def numpy_name(dtype: np.dtype[Any]) -> str | None:
    """Return the table's name for a numpy dtype, None if it cannot be stored."""
    if dtype.isnative and dtype.kind in "biufc" and dtype.name in TORCH_BYTES:
        return dtype.name
    plain = not dtype.hasobject and dtype.fields is None and dtype.subdtype is None
    return f"numpy:{dtype.str}" if plain and _NUMPY_TEXT.fullmatch(dtype.str) else None


def item_bytes(dtype: str) -> int:
    """Return a dtype's item size in bytes; FormatError if the name is unknown."""
    size = TORCH_BYTES.get(dtype)
    return numpy_dtype(dtype).itemsize if size is None else size


def _alignment(size: int) -> int:
    return min(size & -size, 16) or 1  # the greatest power of two in it


# -- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored tensor: ``offset`` and ``nbytes`` in the file; ``shape`` in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Table:
    """The header's content.

    ``entries`` are in the order that tree nodes refer to. ``views`` tells of entries that
    overlapped in memory: group, bytes from the group's start, strides in bytes.
    """

    data_start: int
    entries: tuple[Entry, ...]
    tree_offset: int
    views: Mapping[int, View]
    tree_nbytes: int = 0
    prefix: bytes = field(default=b"", repr=False)

    def header(self, tree_nbytes: int) -> bytes:
        """Return the file's first ``data_start`` bytes for a tree of this length.

        Only of a table that was built: UsageError for one that was read from a file.
        """
        if not self.prefix:
            raise UsageError("a table that was read has no header text; build one")
        begin = self.tree_offset - self.data_start
        last = {"dtype": "U8", "shape": [tree_nbytes], "data_offsets": [begin, begin + tree_nbytes]}
        body = self.prefix + f',"{TREE}":{json.dumps(last, separators=(",", ":"))}}}'.encode()
        return (struct.pack("<Q", self.data_start - 8) + body).ljust(self.data_start)


def build(specs: Sequence[tuple[str, str, tuple[int, ...]]], views: Mapping[int, View]) -> Table:
    """Return the table of tensors (name, dtype, shape), laid out by item size descending."""
    sizes = [item_bytes(dtype) for _, dtype, _ in specs]
    nbytes = [size * math.prod(spec[2]) for size, spec in zip(sizes, specs, strict=True)]
    order = sorted(range(len(specs)), key=lambda i: (-_alignment(sizes[i]), -sizes[i], i))
    begins, end = [0] * len(specs), 0
    for i in order:
        begins[i], end = end, end + nbytes[i]
    entries: dict[str, Any] = {}
    true = {name: dtype for name, dtype, _ in specs if dtype not in _FILE_DTYPES}
    meta = {
        "version": VERSION,
        "dtypes": true,
        "views": [[i, *view] for i, view in sorted(views.items())],
    }
    entries["__metadata__"] = {"format": "pt", _META: json.dumps(meta, separators=(",", ":"))}
    for i, (name, dtype, shape) in enumerate(specs):
        entries[name] = {
            "dtype": _FILE_DTYPES.get(dtype, "U8"),
            "shape": shape if dtype in _FILE_DTYPES else [*shape, sizes[i]],
            "data_offsets": [begins[i], begins[i] + nbytes[i]],
        }
    prefix = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()[:-1]
    start = -(-(8 + len(prefix) + _LAST_ENTRY_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
    placed = tuple(
        Entry(name, dtype, shape, start + begins[i], nbytes[i])
        for i, (name, dtype, shape) in enumerate(specs)
    )
    return Table(start, placed, start + end, dict(views), prefix=prefix)


def header_bytes(data: memoryview) -> int:
    """Return the data start that a file's first 8 bytes state; FormatError if impossible."""
    if len(data) < 8:
        raise FormatError(f"snapshot of {len(data)} bytes is shorter than its header length")
    length: int = struct.unpack_from("<Q", data)[0]
    if length > MAX_HEADER_BYTES or 8 + length > len(data) or (8 + length) % _PAGE_BYTES:
        raise FormatError(f"header of {length} bytes does not fit a file of {len(data)} bytes")
    return 8 + length


def parse(data: memoryview) -> Table:
    """Return the table of the snapshot that ``data`` holds exactly; FormatError otherwise."""
    start = header_bytes(data)
    try:
        raw = json.loads(bytes(data[8:start]).decode(), object_pairs_hook=_unique)
        meta = raw.pop("__metadata__")
        own = json.loads(meta[_META], object_pairs_hook=_unique)
        if own["version"] != VERSION:
            raise FormatError(f"snapshot version {own['version']}, this release reads {VERSION}")
        true = own["dtypes"]
        last = raw.pop(TREE)
        entries = tuple(_entry(name, item, true, start) for name, item in raw.items())
        tree = _entry(TREE, last, {}, start)
        if tree.dtype != "uint8" or len(tree.shape) != 1 or true.keys() - raw.keys():
            raise FormatError("the tree entry or the dtype table of the header is malformed")
        views = {}
        for i, group, delta, strides in _listed(own["views"]):
            shape = entries[_natural(i)].shape
            views[i] = (_natural(group), _natural(delta), tuple(map(_integer, _listed(strides))))
            if len(strides) != len(shape):
                raise FormatError(f"view {i} has {len(strides)} strides, needed {len(shape)}")
    except FormatError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise FormatError(f"snapshot header is malformed: {error!r}"[:300]) from error
    placed = sorted((e.offset, e.offset + e.nbytes) for e in (*entries, tree))
    if placed[0][0] != start or placed[-1][1] != len(data):
        raise FormatError(f"tensors cover {placed[0][0]}..{placed[-1][1]} of {start}..{len(data)}")
    if any(a[1] != b[0] for a, b in pairwise(placed)) or tree.offset + tree.nbytes != len(data):
        raise FormatError("tensors overlap, leave holes, or the tree is not last")
    return Table(start, entries, tree.offset, views, tree_nbytes=tree.nbytes)


def _entry(name: str, item: Any, true: Mapping[str, Any], start: int) -> Entry:
    begin, end = map(_natural, _listed(item["data_offsets"]))
    shape = tuple(map(_natural, _listed(item["shape"])))
    if len(item) != 3 or len(shape) > 65:
        raise FormatError(f"header entry {name[:80]!r} is malformed")
    dtype = _TRUE_DTYPES[item["dtype"]]
    if name in true:
        wanted = true[name]
        size = item_bytes(wanted)
        if dtype != "uint8" or shape[-1:] != (size,) or wanted in _FILE_DTYPES:
            raise FormatError(f"{name[:80]!r} is no {wanted}: stored as {dtype} of shape {shape}")
        dtype, shape = wanted, shape[:-1]
    size = item_bytes(dtype)
    if end - begin != size * math.prod(shape) or (end > begin and begin % _alignment(size)):
        raise FormatError(f"{name[:80]!r}: {begin}..{end} does not hold {dtype} of shape {shape}")
    return Entry(name, dtype, shape, start + begin, end - begin)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise FormatError("a name occurs twice in the snapshot header")
    return result


def _listed(value: Any) -> list[Any]:
    if type(value) is not list:
        raise FormatError(f"{str(value)[:40]} is no list")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise FormatError(f"{str(value)[:40]} is no 64-bit integer")
    return value


def _natural(value: Any) -> int:
    if _integer(value) < 0:
        raise FormatError(f"{value} is negative")
    return int(value)
