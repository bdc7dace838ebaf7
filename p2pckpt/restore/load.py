"""Restore, stage 5: bytes of a snapshot back into the caller's state.

``load(buffer, target)`` first reads the snapshot's table and tree, then *fits* the tree to the
target without touching it: each place is compared, and each byte range gets a destination. Only
if nothing is missing, unexpected or different are bytes copied, range by range, right into the
target's own tensors and arrays; last, containers are filled and objects get their
``load_state_dict()``. So a StateMismatch leaves the target as it was, and parameters keep their
identity, device, strides and ``requires_grad``.

Two places of the target may share memory only if they did so in the snapshot; otherwise one copy
would silently overwrite another. The buffer is untrusted: whatever it holds, the outcome is a
state, FormatError or StateMismatch. No class is named in it and no code runs from it.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from ..coding import memory, tree
from ..coding import table as tables
from ..errors import FormatError, StateMismatch

Check: TypeAlias = Callable[[int, int], None]
Path: TypeAlias = tuple[Any, ...]
Finish: TypeAlias = Callable[[], Any]  # gives the restored value, once all bytes are copied

_ABSENT: Any = object()  # the target has nothing here: build anew
_MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: dict[str, Any] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size,
}  # fmt: skip
_AS_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def read_header(buffer: Any) -> tables.Table:
    """Return the table of the snapshot that ``buffer`` holds exactly; FormatError otherwise."""
    return tables.parse(memoryview(buffer).cast("B"))


def materialise(buffer: Any, check: Check | None = None) -> Any:
    """Return the snapshot's state built anew on the CPU.

    Objects come back as what their ``state_dict()`` gave; a DTensor as its local tensor.
    """
    return load(buffer, None, check)


def load(buffer: Any, target: Any = None, check: Check | None = None) -> Any:
    """Restore the snapshot that ``buffer`` holds exactly into ``target`` and return the state.

    The result is ``target`` itself where it is mutable. ``None``, at the root or inside, is a
    place to build anew; so is an empty dict or list. ``check(offset, length)`` is called with
    each byte range of the file right before it is read (the header first) and may raise.

    Raises FormatError for malformed bytes and StateMismatch, naming every path that is missing,
    unexpected or different, before the target is changed. If ``check`` or an object's
    ``load_state_dict()`` raises later, the target is partly restored and must not be used.
    """
    view = memoryview(buffer).cast("B")
    verify = check or (lambda *_: None)
    verify(0, tables.header_bytes(view))
    table = tables.parse(view)
    verify(table.tree_offset, table.tree_nbytes)
    fit = _Fit(table, anew=target is None)
    finish = fit.node(tree.decode(view[table.tree_offset :]), _given(target), ())
    fit.conclude()
    with warnings.catch_warnings():  # torch warns of a read-only buffer; it is only read
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        data = torch.frombuffer(view, dtype=torch.uint8)
    with torch.no_grad():
        for job in sorted(fit.jobs, key=lambda job: (job.place is not None, job.entry.offset)):
            if job.entry.nbytes:
                verify(job.entry.offset, job.entry.nbytes)
            job.copy_in(view, data)
    return finish()


@dataclass(slots=True)
class _Job:
    """One byte range and where it goes; without a place it becomes ``value``, bytes or str."""

    entry: tables.Entry
    path: Path
    place: torch.Tensor | np.ndarray[Any, Any] | None
    text: bool = False
    value: Any = None

    def copy_in(self, view: memoryview, data: torch.Tensor) -> None:
        entry, place = self.entry, self.place
        if place is None:
            data_bytes = view[entry.offset : entry.offset + entry.nbytes]
            self.value = tree.text_or_bytes(data_bytes, self.text)
        elif entry.nbytes and isinstance(place, np.ndarray):
            array = np.frombuffer(view, place.dtype, place.size, entry.offset)
            np.copyto(place, array.reshape(place.shape))
        elif entry.nbytes and isinstance(place, torch.Tensor):
            by_value = place.is_conj() or place.is_neg()
            dtype = place.dtype if by_value else _AS_INT[place.element_size()]
            source = data[entry.offset : entry.offset + entry.nbytes].view(dtype).view(entry.shape)
            target = place if by_value else place.view(dtype)
            for axis, stride in enumerate(target.stride()):
                if stride == 0 and target.shape[axis] > 1:  # expanded alike: write one copy
                    target, source = target.narrow(axis, 0, 1), source.narrow(axis, 0, 1)
            target.copy_(source)


class _Fit:
    """The comparison of a tree with a target: byte jobs, and every problem found on the way."""

    def __init__(self, table: tables.Table, anew: bool) -> None:
        self.table = table
        self.jobs: list[_Job] = []
        self._misfit = tree.Misfit()
        self._made: dict[int, torch.Tensor] = {}  # entry -> its new tensor: tied ones share it
        self._wrapped: dict[Any, torch.Tensor] = {}
        self._meshes: dict[Any, Any] = {}  # the target's DTensors, to place new ones like them
        self._unmeshed: list[tuple[str, tree.Part]] = []
        self._used: set[int] = set()
        self._anew = anew  # the whole target is None

    def conclude(self) -> None:
        """Raise StateMismatch if the fit found any problem."""
        self._relations()
        for where, part in self._unmeshed:
            if not self._anew and _mesh_key(part) not in self._meshes:
                self._misfit.differing.append(f"{where}: saved DTensor, target has none like it")
        if message := self._misfit.message():
            raise StateMismatch(message)
        if unused := len(self.table.entries) - len(self._used):
            raise FormatError(f"{unused} tensors of the snapshot are named nowhere in its tree")

    def node(self, node: tree.Node, target: Any, path: Path, loose: bool = False) -> Finish:
        """Fit one node; ``loose`` inside an object's state, where only tensors must agree."""
        match node:
            case tree.Object():
                return self._object(node.state, target, path)
            case tree.Dict() if _loads(target):
                return self._object(node, target, path)
            case tree.Dict():
                return self._mapping(node, target, path, loose)
            case tree.Ints():
                return self._sequence(tree.unpack(node), target, path, loose)
            case tree.Seq():
                return self._sequence(node, target, path, loose)
            case tree.Tensor():
                return self._tensor(node, target, path, loose)
            case tree.Array():
                return self._array(node, target, path, loose)
            case tree.Generator():
                return self._generator(node, target, path, loose)
        if target is not _ABSENT and not loose and not tree.is_plain(target):
            self._differ(path, "a plain value", target)
        if isinstance(node, tree.Blob):
            entry = self._entry(node.entry)
            if entry.dtype != "uint8" or len(entry.shape) != 1:
                raise FormatError(f"entry {entry.name[:80]!r} is no byte string")
            job = _Job(entry, path, None, node.text)
            self.jobs.append(job)
            return lambda: job.value
        value = tree.value(node)
        return lambda: value

    # -- containers ---------------------------------------------------------------------------

    def _mapping(self, node: tree.Dict, target: Any, path: Path, loose: bool) -> Finish:
        keys = tree.distinct(node.keys, tree.show(path))
        if target is not _ABSENT and type(target) not in _MAPPINGS.values():
            target = self._differ(path, node.kind, target, loose)
        known: Any = target if target is not _ABSENT else {}
        if known and not loose:
            saved = set(keys)
            self._misfit.missing += [tree.show((*path, key)) for key in known if key not in saved]
            self._misfit.unexpected += [tree.show((*path, key)) for key in keys if key not in known]
        values = [
            self.node(value, _given(known.get(key)), (*path, key), loose)
            for key, value in zip(keys, node.values, strict=True)
        ]
        attribute = None if node.attribute is None else self.node(node.attribute, _ABSENT, path)
        in_place = target is not _ABSENT and not loose

        def finish() -> Any:
            filled = dict(zip(keys, [value() for value in values], strict=True))
            result = target if in_place else _MAPPINGS[node.kind]()
            result.clear()
            result.update(filled)
            if attribute is not None and type(result) is OrderedDict:
                result._metadata = attribute()  # type: ignore[attr-defined]
            return result

        return finish

    def _sequence(self, node: tree.Seq, target: Any, path: Path, loose: bool) -> Finish:
        kind = _SEQUENCES[node.kind]
        if target is not _ABSENT and type(target) is not kind:
            target = self._differ(path, node.kind, target, loose)
        if node.kind in ("set", "frozenset"):
            members = tree.distinct(node.items, tree.show(path))
            return lambda: _fill(target, kind(members), loose)
        if node.kind == "Size" and not all(type(n) is int and n >= 0 for n in node.items):
            raise FormatError(f"a size that is not made of lengths at {tree.show(path)}")
        known: Any = target if target is not _ABSENT else ()
        size = len(node.items)
        if known and not loose:
            lost = [i for i in range(size, len(known)) if _holds_data(known[i])]
            extra = [i for i in range(len(known), size) if tree.saves_data(node.items[i])]
            self._misfit.missing += [tree.show((*path, i)) for i in lost]
            self._misfit.unexpected += [tree.show((*path, i)) for i in extra]
        items = [
            self.node(item, _given(known[i]) if i < len(known) else _ABSENT, (*path, i), loose)
            for i, item in enumerate(node.items)
        ]
        return lambda: _fill(target, kind([item() for item in items]), loose)

    def _object(self, node: tree.Node, target: Any, path: Path) -> Finish:
        if target is _ABSENT or type(target) in _MAPPINGS.values():
            return self.node(node, target, path)
        if not _loads(target):
            self._differ(path, "an object with state_dict()", target)
            return lambda: target
        # keep_vars gives the parameters themselves: filled in place, and the module's own
        # copy of a tensor onto itself costs nothing.
        module = isinstance(target, torch.nn.Module)
        known = target.state_dict(keep_vars=True) if module else target.state_dict()
        if isinstance(target, torch.optim.Optimizer):
            self._misfit.optimizer(node, known, path)
        # An object gets new containers: those of its state_dict() may be its own.
        value = self.node(node, known, path, loose=not module)

        def finish() -> Any:
            state = value()
            try:
                target.load_state_dict(state)
            except Exception as error:
                what = f"load_state_dict() of {type(target).__qualname__} raised {error!r}"
                end = "the target is partly restored and must not be used"
                raise StateMismatch(f"{tree.show(path)}: {what}; {end}") from error
            return target

        return finish

    # -- leaves -------------------------------------------------------------------------------

    def _tensor(self, node: tree.Tensor, target: Any, path: Path, loose: bool) -> Finish:
        entry = self._entry(node.entry)
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise FormatError(f"torch has no dtype {entry.dtype!r} ({entry.name[:80]!r})")
        if target is not _ABSENT and not isinstance(target, torch.Tensor):
            target = self._differ(path, f"tensor {entry.dtype}{list(entry.shape)}", target, loose)
        if target is _ABSENT:
            return self._new_tensor(node, entry, dtype, path)
        local = memory.local_tensor(target)
        fields = memory.rectangle(target) if memory.is_dtensor(target) else None
        part = tree.Part(**fields) if fields else None
        if part is not None:
            self._meshes.setdefault(_mesh_key(part), target)
        problem = memory.unusual(local) or ("inference tensor" if local.is_inference() else None)
        if problem or (dtype, entry.shape, node.part) != (local.dtype, tuple(local.shape), part):
            own = problem or f"{local.dtype}{list(local.shape)} {part or ''}".removeprefix("torch.")
            saved = f"saved {entry.dtype}{list(entry.shape)} {node.part or ''}".rstrip()
            self._misfit.differing.append(f"{tree.show(path)}: {saved}, target {own}".rstrip())
        else:
            self.jobs.append(_Job(entry, path, local.detach()))
        return lambda: target

    def _new_tensor(
        self, node: tree.Tensor, entry: tables.Entry, dtype: torch.dtype, path: Path
    ) -> Finish:
        if node.entry not in self._made:
            self._made[node.entry] = torch.empty(entry.shape, dtype=dtype)
            self.jobs.append(_Job(entry, path, self._made[node.entry]))
        if node.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            raise FormatError(f"{tree.show(path)}: {entry.dtype} cannot require a gradient")
        part = node.part
        if part is not None:
            if tuple(part.lengths) != entry.shape:
                raise FormatError(f"{tree.show(path)}: {part} is not of shape {entry.shape}")
            self._unmeshed.append((tree.show(path), part))

        def finish() -> Any:
            model = self._meshes.get(_mesh_key(part)) if part else None
            key = (node.entry, node.parameter, node.requires_grad, model is None)
            if key not in self._wrapped:
                value = self._made[node.entry].detach()
                if part is not None and model is not None:
                    value = memory.distribute(value, part.shape, model)
                if node.parameter:
                    value = torch.nn.Parameter(value, node.requires_grad)
                self._wrapped[key] = value.requires_grad_(node.requires_grad)
            return self._wrapped[key]

        return finish

    def _array(self, node: tree.Array, target: Any, path: Path, loose: bool) -> Finish:
        entry = self._entry(node.entry)
        dtype = tables.numpy_dtype(entry.dtype)
        saved = f"array {dtype}{list(entry.shape)}"
        if node.scalar and tree.is_plain(target):
            target = _ABSENT
        if target is not _ABSENT and type(target) is not np.ndarray:
            target = self._differ(path, saved, target, loose)
        array: np.ndarray[Any, Any] = target
        if node.scalar and entry.shape:
            raise FormatError(f"{tree.show(path)}: a scalar of shape {entry.shape}")
        fits = target is not _ABSENT and (dtype, entry.shape) == (array.dtype, array.shape)
        if target is _ABSENT or (loose and not (fits and array.flags.writeable)):
            array = np.empty(entry.shape, dtype)
        elif not (fits and array.flags.writeable):
            own = f"{array.dtype}{list(array.shape)}{'' if array.flags.writeable else ' read-only'}"
            self._misfit.differing.append(f"{tree.show(path)}: saved {saved}, target {own}")
        self.jobs.append(_Job(entry, path, array))
        return lambda: array[()] if node.scalar else array

    def _generator(self, node: tree.Generator, target: Any, path: Path, loose: bool) -> Finish:
        state = torch.frombuffer(bytearray(node.state or b"\0"), dtype=torch.uint8)
        try:
            fresh = torch.Generator(tree.value(tree.Device(node.device)))
        except RuntimeError as error:
            self._misfit.differing.append(f"{tree.show(path)}: generator on {node.device}: {error}")
            return lambda: target
        try:
            fresh.set_state(state)
        except (RuntimeError, TypeError) as error:
            raise FormatError(f"{tree.show(path)}: generator state: {error}") from error
        if target is not _ABSENT and not isinstance(target, torch.Generator):
            target = self._differ(path, "a generator", target, loose)
        if target is _ABSENT:
            return lambda: fresh
        if target.device.type != fresh.device.type:
            self._differ(path, f"a generator on {node.device}", target)
        return lambda: target.set_state(state)

    def _entry(self, index: int) -> tables.Entry:
        if not 0 <= index < len(self.table.entries):
            raise FormatError(f"tree names tensor {index} of {len(self.table.entries)}")
        self._used.add(index)
        return self.table.entries[index]

    # -- problems -----------------------------------------------------------------------------

    def _differ(self, path: Path, saved: str, target: Any, loose: bool = False) -> Any:
        if not loose:
            kind = f"{type(target).__module__}.{type(target).__qualname__}"
            self._misfit.differing.append(f"{tree.show(path)}: saved {saved}, target {kind}")
        return _ABSENT

    def _relations(self) -> None:
        """Refuse a target in which copying one tensor would change another or itself."""
        jobs = [job for job in self.jobs if job.place is not None and job.entry.nbytes]
        numbers = {id(entry): i for i, entry in enumerate(self.table.entries)}
        order = [numbers[id(job.entry)] for job in jobs]
        views = map(self.table.views.get, order)
        placed = list(zip(order, [memory.extent_of(job.place) for job in jobs], views, strict=True))
        for i, j in memory.conflicts(placed):
            where = " and ".join(tree.show(jobs[n].path) for n in sorted({i, j}))
            self._misfit.differing.append(f"{where}: shares memory in the target, not when saved")


# -- values -------------------------------------------------------------------------------------


def _mesh_key(part: tree.Part) -> Any:
    return tuple(part.mesh), tuple(part.coordinate), tuple(part.placements)


def _given(target: Any) -> Any:
    return _ABSENT if target is None else target


def _loads(target: Any) -> bool:
    needed = "state_dict", "load_state_dict"
    return all(callable(getattr(type(target), name, None)) for name in needed)


def _holds_data(target: Any) -> bool:
    """Say whether a target holds a tensor, array, generator or object, at any depth."""
    if type(target) in _MAPPINGS.values():
        return any(map(_holds_data, target.values()))
    if type(target) in _SEQUENCES.values():
        return any(map(_holds_data, target))
    return target is not None and not tree.is_plain(target)


def _fill(target: Any, value: Any, loose: bool) -> Any:
    """Return ``value``, in the target's own list or set where there is one."""
    if loose or target is _ABSENT or type(value) not in (list, set):
        return value
    target.clear()
    (target.extend if type(value) is list else target.update)(value)
    return target
