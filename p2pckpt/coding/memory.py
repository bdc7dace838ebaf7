"""Where tensors and arrays lie in memory at one instant, and which of them share it.

Saving must know which tensors are one (stored once) and restoring must know whether writing one
changes another. Both ask only for addresses, shapes and strides, never for contents, and only
about objects that are alive right now: a remembered address may belong to something else. This
file needs no torch; it asks torch's objects by their own methods.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_WORK: Any = 100_000  # candidate solutions tried by numpy.shares_memory


class Extent(NamedTuple):
    """Where an array lies in memory now; strides in bytes, one per dimension.

    ``dense_bytes`` is its size if it is contiguous, else 0: the common case needs no arithmetic.
    """

    device: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item: int
    dense_bytes: int = 0

    def span(self) -> tuple[str, int, int]:
        """Return device, first and one past the last byte."""
        if self.dense_bytes:
            return self.device, self.address, self.address + self.dense_bytes
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low = self.address + sum(r for r in reach if r < 0)
        return self.device, low, self.address + sum(r for r in reach if r > 0) + self.item

    def overlaps_itself(self) -> bool:
        """Say whether two of its elements may share memory (exact for stride 0)."""
        if self.dense_bytes:
            return False
        size = self.item
        for stride, n in sorted(
            (abs(s), n) for s, n in zip(self.strides, self.shape, strict=True) if n > 1
        ):
            if stride < size:
                return True
            size += stride * (n - 1)
        return False

    def overlaps(self, other: Extent) -> bool:
        """Say whether an element of each shares memory; True if that is too hard to tell.

        Solved exactly by ``numpy.shares_memory``, which looks at addresses and strides only.
        """
        try:
            return np.shares_memory(self._fake(), other._fake(), max_work=_WORK)
        except np.exceptions.TooHardError:
            return True

    def _fake(self) -> np.ndarray[Any, Any]:
        class Fake:
            __array_interface__ = {
                "version": 3, "typestr": f"|V{self.item}", "data": (self.address, True),
                "shape": self.shape, "strides": self.strides,
            }  # fmt: skip

        return np.asarray(Fake())


def groups(extents: Sequence[Extent]) -> list[list[int]]:
    """Return, as indices, the sets of two or more extents whose spans touch, by address."""
    found: list[list[int]] = []
    device, last, end, open_group = "", -1, 0, False
    for (where, low, high), i in sorted((e.span(), i) for i, e in enumerate(extents)):
        if where == device and low < end:
            if not open_group:
                found.append([last])
            found[-1].append(i)
            open_group, end = True, max(end, high)
        else:
            device, end, open_group = where, high, False
        last = i
    return found


def pairs(extents: Sequence[Extent]) -> Iterator[tuple[int, int]]:
    """Yield the index pairs of extents whose spans overlap."""
    for group in groups(extents):
        alive: list[tuple[int, int]] = []
        for i in group:
            _, low, high = extents[i].span()
            alive = [item for item in alive if item[0] > low]
            yield from ((j, i) for _, j in alive)
            alive.append((high, i))


def views(extents: Mapping[int, Extent]) -> dict[int, tuple[int, int, tuple[int, ...]]]:
    """Return (group, bytes from its start, strides) of each extent that overlaps another or itself.

    Keys are the caller's. All extents must be of memory alive at this moment, none empty.
    """
    keys = list(extents)
    sets = [[keys[i] for i in group] for group in groups(list(extents.values()))]
    grouped = {key for group in sets for key in group}
    sets += [[k] for k in keys if k not in grouped and extents[k].overlaps_itself()]
    found: dict[int, tuple[int, int, tuple[int, ...]]] = {}
    for number, group in enumerate(sets):
        start = min(extents[key].span()[1] for key in group)
        for key in group:
            extent = extents[key]
            found[key] = (number, extent.address - start, extent.strides)
    return found


def conflicts(
    placed: Sequence[tuple[int, Extent, tuple[int, int, tuple[int, ...]] | None]],
) -> Iterator[tuple[int, int]]:
    """Yield the indices of destinations where writing one would change the other.

    ``placed`` gives for each destination which source it gets, where it lies, and the source's
    own place as in :func:`views`. Two that overlap are right if their sources overlapped alike:
    then both are written with the same bytes. (i, i): one that overlaps itself.
    """
    for i, (_, extent, view) in enumerate(placed):
        if extent.overlaps_itself() and (view is None or view[2] != extent.strides):
            yield i, i
    for i, j in pairs([extent for _, extent, _ in placed]):
        (source_i, a, one), (source_j, b, two) = placed[i], placed[j]
        if source_i == source_j and (a.address, a.strides) == (b.address, b.strides):
            continue
        if one is not None and two is not None and one[0] == two[0]:
            alike = two[1] - one[1] == b.address - a.address
            if alike and (one[2], two[2]) == (a.strides, b.strides):
                continue
        if a.overlaps(b):
            yield i, j


def extent_of(x: Any) -> Extent:
    """Return where a plain torch tensor or numpy array lies; address 0 if it has no bytes."""
    if isinstance(x, np.ndarray):
        dense = x.nbytes if x.flags.c_contiguous else 0
        address = x.ctypes.data if x.nbytes else 0
        return Extent("cpu", address, x.shape, x.strides, x.itemsize, dense)
    size = x.element_size()
    strides = tuple([stride * size for stride in x.stride()])
    device = "cpu" if x.is_cpu else str(x.device)
    dense = x.numel() * size if x.is_contiguous() else 0
    address = x.data_ptr() if dense or x.numel() else 0
    return Extent(device, address, tuple(x.shape), strides, size, dense)


def is_dtensor(x: Any) -> bool:
    """Say whether ``x`` is a torch DTensor; none can exist before its module was imported."""
    if type(x).__name__ in ("Tensor", "Parameter"):  # the usual case, and never a DTensor
        return False
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(x, kind)


def local_tensor(x: Any) -> Any:
    """Return this rank's part of a DTensor, any other tensor as it is."""
    if not is_dtensor(x):
        return x
    local = x.to_local()
    return local.wait() if hasattr(local, "wait") else local


def rectangle(x: Any) -> dict[str, Any] | None:
    """Return which rectangle of the DTensor ``x`` is local, as fields of a tree Part.

    None if the local tensor is no rectangle of it, or this rank is outside its mesh.
    """
    utils = sys.modules["torch.distributed.tensor._utils"]
    mesh, coordinate = x.device_mesh, x.device_mesh.get_coordinate()
    lengths, offset = utils.compute_local_shape_and_global_offset(x.shape, mesh, x.placements)
    if coordinate is None or tuple(lengths) != tuple(local_tensor(x).shape):
        return None
    return {
        "shape": list(x.shape),
        "offset": list(offset),
        "lengths": list(lengths),
        "placements": [str(placement) for placement in x.placements],
        "mesh": list(mesh.shape),
        "coordinate": list(coordinate),
    }


def distribute(local: Any, shape: Sequence[int], model: Any) -> Any:
    """Return ``local`` as this rank's part of a DTensor of ``shape``, placed like ``model``."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return type(model).from_local(
        local.to(local_tensor(model).device),
        model.device_mesh,
        model.placements,
        run_check=False,
        shape=type(model.shape)(shape),
        stride=tuple(strides),
    )


def unusual(x: Any) -> str | None:
    """Return what keeps a torch tensor from being plain dense memory, None if nothing does."""
    kind = type(x)
    if kind.__name__ not in ("Tensor", "Parameter") or not kind.__module__.startswith("torch"):
        return f"tensor of class {kind.__module__}.{kind.__qualname__}"
    if x.is_quantized:
        return f"quantised tensor of dtype {x.dtype}"
    if x.is_nested or str(x.layout) != "torch.strided":
        return f"{'nested ' if x.is_nested else ''}tensor of layout {x.layout}"
    return "meta tensor (it has no values)" if x.is_meta else None
