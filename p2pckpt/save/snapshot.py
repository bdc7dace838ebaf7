"""Save, stage 1: copy one rank's state into a buffer that outlives the trainer.

``plan(state)`` walks the state once, at this instant: it turns plain values into the typed tree,
lists every tensor and array by its live handle, and finds which of them are one and the same or
overlap in memory. ``write(plan, buffer)`` then copies each byte once, straight into the caller's
buffer, as one safetensors file. Nothing large is allocated, no pickle is made, and when it
returns the buffer shares nothing with the caller's memory.

A plan holds handles, so it is good for one save. What may be kept is its *table* (names, dtypes,
shapes, offsets, header text): give the last plan as ``previous`` and the table is reused if, and
only if, the structure found by the new walk is the same. Hence moved or replaced storages can
never leak an old value into a new save.

What cannot be stored exactly is refused, all of it in one error, each with its path: silence
would come out as a wrong training run days later.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from ..coding import memory, tree
from ..coding import table as tables
from ..errors import NoRoom, UnsupportedState, UsageError

Buffer: TypeAlias = Any  # anything that memoryview takes: bytearray, mmap, memoryview, array
Path: TypeAlias = tuple[Any, ...]

BLOB_BYTES = 64 * 1024  # bytes and str from this size on are tensors: MessagePack ends at 4 GiB
_SHOWN = 10
_CAPACITY_UNIT_BYTES = 2 * 1024 * 1024
_SCALARS = {float, bool, type(None)}
_ATOMS = {*_SCALARS, int, str, bytes, complex}
_AS_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_FIELDS: dict[Any, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_KINDS: dict[Any, str] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "Size",
}


@dataclass(slots=True)
class _Leaf:
    """One stored tensor, by its live handle."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    source: torch.Tensor | np.ndarray[Any, Any]
    extent: memory.Extent
    part: tree.Part | None = None

    @property
    def key(self) -> Any:
        where = self.extent.device, self.extent.strides
        return self.path, self.dtype, self.shape, where, self.part


@dataclass(frozen=True, slots=True)
class FqnPart:
    """A tensor's row in the manifest: which rectangle of which global tensor this rank holds."""

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(slots=True)
class Plan:
    """One save of one state: what :func:`write` will copy. Used up by it.

    ``table`` depends on structure only; ``snapshot_bytes`` is the exact length of the file for
    the state that was planned; ``capacity_bytes`` is what to reserve so that later saves fit too.
    """

    table: tables.Table
    parts: tuple[FqnPart, ...]
    snapshot_bytes: int
    capacity_bytes: int
    _key: Any = field(repr=False)
    _sources: list[torch.Tensor | np.ndarray[Any, Any]] | None = field(repr=False)
    _tree: bytes = field(repr=False)

    def matches(self, state: Any) -> bool:
        """Say whether ``state`` has this plan's structure: paths, dtypes, shapes, strides,
        devices and which tensors are tied or overlap. UnsupportedState as in :func:`plan`."""
        return bool(_Walk(state).key() == self._key)

    def release(self) -> None:
        """Let go of the state's tensors, written or not; the table still lends itself."""
        self._sources = None


def plan(state: Any, previous: Plan | None = None) -> Plan:
    """Walk ``state`` and return the plan of saving it; ``previous`` lends its table if it fits.

    Raises UnsupportedState naming path and class of everything that cannot be stored.
    """
    walk = _Walk(state)
    key = walk.key()
    if previous is not None and previous._key == key:
        table, parts = previous.table, previous.parts
    else:
        names = _names([leaf.path for leaf in walk.leaves])
        specs = [(n, leaf.dtype, leaf.shape) for n, leaf in zip(names, walk.leaves, strict=True)]
        table = tables.build(specs, walk.views)
        if table.data_start > tables.MAX_HEADER_BYTES:
            raise UnsupportedState(
                f"{len(specs)} tensors need a header of {table.data_start} bytes, safetensors "
                f"reads at most {tables.MAX_HEADER_BYTES}; use fewer tensors or shorter keys"
            )
        parts = tuple(_fqn_part(n, leaf) for n, leaf in zip(names, walk.leaves, strict=True))
    size = table.tree_offset + len(walk.tree)
    units = -(-(size + walk.forecast_bytes) * 105 // (100 * _CAPACITY_UNIT_BYTES))
    capacity = units * _CAPACITY_UNIT_BYTES
    sources = [leaf.source for leaf in walk.leaves]
    return Plan(table, parts, size, capacity, key, sources, walk.tree)


def write(plan: Plan, buffer: Buffer) -> int:
    """Copy the planned state into ``buffer`` and return the file's length in bytes.

    ``buffer`` is writable and at least ``snapshot_bytes`` long; bytes behind the file are left
    alone. Raises NoRoom if it is shorter, UsageError if it is read-only or the plan is used up.
    """
    view = memoryview(buffer).cast("B")
    sources = plan._sources
    if sources is None:
        raise UsageError("this plan was written already; call plan(state, previous=...) anew")
    if view.readonly:
        raise UsageError("the buffer for a snapshot must be writable, this one is read-only")
    if len(view) < plan.snapshot_bytes:
        raise NoRoom(f"snapshot: need {plan.snapshot_bytes} bytes, have {len(view)}")
    plan._sources = None
    header = plan.table.header(len(plan._tree))
    view[: len(header)] = header
    devices = {s.device for s in sources if isinstance(s, torch.Tensor) and s.device.type != "cpu"}
    _synchronize(devices)  # other streams may still be computing these tensors
    try:
        with torch.no_grad():
            whole = {torch.uint8: torch.frombuffer(view, dtype=torch.uint8)}
            for entry, source in zip(plan.table.entries, sources, strict=True):
                if not entry.nbytes:
                    continue
                if isinstance(source, torch.Tensor):
                    _copy_out(source, whole, entry.offset)
                else:
                    array = np.frombuffer(view, source.dtype, source.size, entry.offset)
                    np.copyto(array.reshape(source.shape), source)
    finally:
        _synchronize(devices)
    view[plan.table.tree_offset : plan.snapshot_bytes] = plan._tree
    return plan.snapshot_bytes


def _copy_out(tensor: torch.Tensor, whole: dict[torch.dtype, torch.Tensor], offset: int) -> None:
    # Equal-sized integers move every bit pattern, of dtypes without a copy kernel too; a
    # conjugated or negated view holds other bits than it means, so that one is copied by value.
    by_value = tensor.is_conj() or tensor.is_neg()
    dtype = tensor.dtype if by_value else _AS_INT[tensor.element_size()]
    if dtype not in whole:
        data = whole[torch.uint8]
        whole[dtype] = data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)
    shape, strides = tensor.shape, tensor.stride()
    if not tensor.is_contiguous():
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    target = whole[dtype].as_strided(shape, strides, offset // dtype.itemsize)
    target.copy_(tensor if by_value else tensor.view(dtype), non_blocking=True)


def _synchronize(devices: set[torch.device]) -> None:
    for device in devices:
        torch.accelerator.synchronize(device)


# -- the walk -----------------------------------------------------------------------------------


class _Walk:
    """One pass over a state: the tree's bytes, the leaves, and what must be refused."""

    def __init__(self, state: Any) -> None:
        self.leaves: list[_Leaf] = []
        self.forecast_bytes = 0
        self._problems: list[str] = []
        self._open: set[int] = set()  # ids of the containers that are being walked
        self._known: dict[Any, int] = {}  # identity of a tensor -> its leaf
        self._held: list[Any] = []  # keeps what state_dict() made: ids stay unique
        self._ties: list[int] = []
        root = self._node(state, ())
        if self._problems:
            more = len(self._problems) - _SHOWN
            lines = self._problems[:_SHOWN] + ([f"... and {more} more"] if more > 0 else [])
            raise UnsupportedState("\n".join(lines))
        self.tree = tree.encode(root)
        alive = {i: leaf.extent for i, leaf in enumerate(self.leaves) if leaf.extent.address}
        self.views = memory.views(alive)

    def key(self) -> Any:
        """Return the structure: equal keys have equal tables."""
        return [leaf.key for leaf in self.leaves], self._ties, self.views

    def _refuse(self, path: Path, what: str, hint: str) -> tree.Node:
        self._problems.append(f"{tree.show(path)}: {what} cannot be stored; {hint}")
        return None

    def _node(self, x: Any, path: Path) -> tree.Node:
        kind = type(x)
        if kind in _FIELDS or kind in _KINDS:
            return self._nested(x, path, self._mapping if kind in _FIELDS else self._sequence)
        if isinstance(x, torch.Tensor):
            return self._tensor(x, path)
        if kind is bytes and len(x) >= BLOB_BYTES:
            return tree.Blob(self._blob(x, path), False)
        if kind is str and len(x) >= BLOB_BYTES:
            return tree.Blob(self._blob(x.encode("utf-8", "surrogatepass"), path), True)
        if kind in _ATOMS:
            return self._plain(x, path)
        if kind is np.ndarray or isinstance(x, np.generic):
            return self._array(np.asarray(x), path, scalar=kind is not np.ndarray)
        if isinstance(x, torch.Generator):
            return tree.Generator(str(x.device), x.get_state().numpy().tobytes())
        if not isinstance(x, type) and callable(getattr(x, "state_dict", None)):
            return tree.Object(self._nested(x, path, self._object))
        return self._plain(x, path)

    def _plain(self, x: Any, path: Path) -> tree.Node:
        try:
            return tree.plain(x)
        except TypeError as error:
            hint = "keep plain values, or give it a state_dict()"
            return self._refuse(path, f"object of class {error}", hint)

    def _nested(self, x: Any, path: Path, walk: Callable[[Any, Path], tree.Node]) -> tree.Node:
        if id(x) in self._open:
            return self._refuse(path, "a container that holds itself", "break the cycle")
        if len(self._open) >= tree.MAX_DEPTH - 2:
            return self._refuse(path, "nesting deeper than 198", "flatten it")
        self._open.add(id(x))
        node = walk(x, path)
        self._open.discard(id(x))
        return node

    def _mapping(self, x: Any, path: Path) -> tree.Node:
        what: Any = _FIELDS[type(x)]
        keys = [self._plain(key, (*path, key)) for key in x]
        values = [self._node(value, (*path, key)) for key, value in x.items()]
        attribute = getattr(x, "_metadata", None) if type(x) is OrderedDict else None
        return tree.Dict(what, keys, values, self._node(attribute, path))

    def _sequence(self, x: Any, path: Path) -> tree.Node:
        what: Any = _KINDS[type(x)]
        kinds = set(map(type, x)) if len(x) > 1 else set()
        if kinds == {int} and what in ("list", "tuple"):
            return tree.pack(what, x)
        if kinds and kinds <= _SCALARS:
            return tree.Seq(what, list(x))
        if what in ("set", "frozenset"):
            return tree.Seq(what, [self._plain(item, path) for item in x])
        return tree.Seq(what, [self._node(item, (*path, i)) for i, item in enumerate(x)])

    def _object(self, x: Any, path: Path) -> tree.Node:
        try:
            state = x.state_dict()
        except Exception as error:
            what = f"object of class {type(x).__module__}.{type(x).__qualname__}"
            return self._refuse(path, what, f"its state_dict() raised {error!r}")
        if isinstance(x, torch.optim.Optimizer):
            fresh = (p for g in x.param_groups for p in g["params"] if p not in x.state)
            self.forecast_bytes += sum(
                2 * memory.local_tensor(p).nbytes for p in fresh if p.requires_grad
            )
        return self._node(state, path)

    def _tensor(self, x: torch.Tensor, path: Path) -> tree.Node:
        local, part = memory.local_tensor(x), None
        self._held += [x, local]
        if memory.is_dtensor(x):
            fields = memory.rectangle(x)
            if fields is None:
                return self._refuse(path, "DTensor that is no rectangle", "redistribute it")
            part = tree.Part(**fields)
        if problem := memory.unusual(local):
            return self._refuse(path, problem, "convert it to a plain dense tensor")
        dtype = str(local.dtype).removeprefix("torch.")
        if dtype not in tables.TORCH_BYTES:
            return self._refuse(path, f"tensor of dtype {local.dtype}", "convert it")
        local = local.detach()
        extent = memory.extent_of(local)
        bits = (local.dtype, local.is_conj(), local.is_neg())
        same: Any = (extent, bits) if extent.address else id(x)
        leaf = _Leaf(path, dtype, tuple(local.shape), local, extent, part)
        parameter = isinstance(x, torch.nn.Parameter)
        return tree.Tensor(self._entry(leaf, same), parameter, x.requires_grad, part)

    def _array(self, x: np.ndarray[Any, Any], path: Path, scalar: bool) -> tree.Node:
        name = tables.numpy_name(x.dtype)
        if name is None:
            return self._refuse(
                path,
                f"numpy {'scalar' if scalar else 'array'} of dtype {x.dtype}",
                "use a plain dtype",
            )
        self._held.append(x)
        extent = memory.extent_of(x)
        same = ("numpy", extent, name) if extent.address else id(x)
        return tree.Array(self._entry(_Leaf(path, name, x.shape, x, extent), same), scalar)

    def _blob(self, x: bytes, path: Path) -> int:
        source = np.frombuffer(x, np.uint8)
        extent = memory.Extent("", 0, source.shape, (1,), 1)  # immutable: relations do not matter
        self._held.append(x)
        return self._entry(_Leaf(path, "uint8", source.shape, source, extent), ("blob", id(x)))

    def _entry(self, leaf: _Leaf, same: Any) -> int:
        entry = self._known.setdefault(same, len(self.leaves))
        if entry == len(self.leaves):
            self.leaves.append(leaf)
        self._ties.append(entry)
        return entry


# -- names --------------------------------------------------------------------------------------


def _escape(key: Any) -> str:
    name = key if type(key) is str else repr(key)
    if name.isprintable() and "%" not in name:
        return name
    return "".join(c if c.isprintable() and c != "%" else f"%{ord(c):x};" for c in name)


def _names(paths: list[Path]) -> list[str]:
    """Return a distinct readable name for each path: its keys joined by dots.

    Paths that read alike (``{"a.b": ..., "a": {"b": ...}}``) are told apart by ``%~2``, ``%~3``:
    an escaped key never holds ``%~``.
    """
    seen = Counter(tables.RESERVED)
    names = []
    for path in paths:
        name = ".".join(map(_escape, path))
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}%~{seen[name]}")
    return names


def _fqn_part(name: str, leaf: _Leaf) -> FqnPart:
    part = leaf.part
    if part is None:
        return FqnPart(name, leaf.dtype, leaf.shape, (0,) * len(leaf.shape), leaf.shape)
    rows = tuple(part.shape), tuple(part.offset), tuple(part.lengths)
    return FqnPart(name, leaf.dtype, *rows)
