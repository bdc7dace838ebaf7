"""The state that is saved: a small transformer in mixed precision, every bit of it random.

37 weights in bf16, each with an fp32 master copy and Adam's two moments, and 7 scalars: 155 tensors
from 2 KiB to 54 MiB, 1023 MiB at scale 1. Beside them the plain Python state that a real loop has.
Random bits mean NaNs and denormals too, so what comes back must be equal as bytes, not as numbers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from p2pckpt.coding.checksum import crc32c

BLOCKS = 5


def shapes(scale: float) -> list[tuple[int, ...]]:
    """Of the weights; their bytes grow with `scale`, their number does not."""
    root = scale**0.5
    hidden, words = (max(64, round(n * root / 64) * 64) for n in (896, 15872))
    vectors = [(hidden,), (hidden,), (3 * hidden,)]
    block = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    return [(words, hidden), *(block + vectors) * BLOCKS, (hidden, words)]


def empty(scale: float) -> dict[str, Any]:
    """A state of zeros, its pages touched, as a freshly initialised model has."""
    weights, moments = {}, {}
    for i, shape in enumerate(shapes(scale)):
        weights[f"w{i}"] = torch.zeros(shape, dtype=torch.bfloat16).fill_(1)
        moments[f"w{i}"] = {k: torch.zeros(shape).fill_(1) for k in ("master", "m", "v")}
    scalars = {f"step{i}": torch.zeros(()) for i in range(5)}
    scalars["scale"] = torch.zeros((), dtype=torch.float64)
    scalars["tokens"] = torch.zeros((), dtype=torch.int64)
    return {"model": weights, "optimizer": moments, "scalars": scalars, "python": {}}


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors of a state, in order."""
    for value in tree.values():
        if isinstance(value, dict):
            yield from tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def raw(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's own bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def fill(state: dict[str, Any], seed: int) -> None:
    """Random bits in every tensor of a dimension, and Python state of every usual kind."""
    chance = np.random.Generator(np.random.SFC64(seed))
    for tensor in tensors(state):
        if tensor.dim():
            words = raw(tensor).view(np.uint64)
            words[:] = chance.integers(0, 1 << 64, words.size, np.uint64)
    state["python"] = {
        "step": seed,
        "random": random.Random(seed).getstate(),
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "schedule": {"base_lrs": [3e-4], "last_epoch": seed, "warm": True},
    }


def change(state: dict[str, Any]) -> None:
    """Another value in every tensor, in place, as an optimiser's step gives."""
    for tensor in tensors({k: v for k, v in state.items() if k != "python"}):
        if tensor.dim():
            tensor.view(-1).view(torch.int64).add_(1)
        else:
            tensor.add_(1)
    state["python"]["step"] += 1


def digest(state: dict[str, Any]) -> str:
    """Equal for equal bytes of all tensors and equal Python state."""
    value = 0
    for tensor in tensors(state):
        value = crc32c(raw(tensor), value)
    plain = {k: v for k, v in state["python"].items() if not isinstance(v, torch.Tensor)}
    return f"{value:08x} {plain!r}"


class Copy:
    """The measure of everything: `torch.copy_` of all tensors into memory that is warm."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.pairs = [(torch.zeros_like(t).fill_(1), t) for t in tensors(state)]
        self.bytes = sum(t.nbytes for _, t in self.pairs)

    def seconds(self) -> float:
        """Of one copy."""
        begun = time.perf_counter()
        for target, source in self.pairs:
            target.copy_(source)
        return time.perf_counter() - begun
