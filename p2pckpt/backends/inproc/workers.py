"""Work and chance under virtual time: the ports Workers and Ids.

Intuition. In production heavy work goes to a thread; here it runs inline and takes the virtual
time that its bytes would take. Whether it happens at the beginning or at the end of that time is
drawn, because in a thread it may be either, also for a caller that was cancelled meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import TypeVar

from p2pckpt.traffic import Traffic

T = TypeVar("T")


class InlineWorkers:
    """`ports.Workers`: `cost_bytes` / ``bytes_per_s`` of loop time for each piece of work."""

    def __init__(self, rng: Random, bytes_per_s: float = 4e9) -> None:
        self._rng = rng
        self._bytes_per_s = bytes_per_s

    async def run(
        self,
        work: Callable[[], T],
        cost_bytes: int,
        traffic: Traffic = Traffic.RESTORE,  # noqa: ARG002
    ) -> T:
        """Do the work once, whole; raises what it raises."""
        duration_s = cost_bytes / self._bytes_per_s
        if self._rng.random() < 0.5:
            try:
                return work()
            finally:
                await asyncio.sleep(duration_s)
        await asyncio.sleep(duration_s)
        return work()


class SeededIds:
    """`ports.Ids` from a seeded generator."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def new(self) -> str:
        """32 hex digits."""
        return f"{self._rng.getrandbits(128):032x}"

    def uniform(self, low: float, high: float) -> float:
        """A random delay."""
        return self._rng.uniform(low, high)
