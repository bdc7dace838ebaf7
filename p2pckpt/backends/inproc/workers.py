"""Work and chance under virtual time: the ports Workers and Ids.

Intuition. In production heavy work goes to a thread; here it runs inline and takes the virtual
time that its bytes would take. Whether it happens at the beginning or at the end of that time is
drawn, because in a thread it may be either, also for a caller that was cancelled meanwhile. While
somebody else has the cores of the machine, no work comes to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import TypeVar

from p2pckpt.traffic import Traffic

T = TypeVar("T")


class Cores:
    """Of one machine: who computes there waits while they are taken."""

    def __init__(self) -> None:
        self._takers = 0
        self._waiting: list[asyncio.Future[None]] = []

    def take(self) -> None:
        """Nobody else gets any of them, until as many `give`."""
        self._takers += 1

    def give(self) -> None:
        """The others go on."""
        self._takers -= 1
        if self._takers == 0:
            for bell in self._waiting:
                if not bell.done():
                    bell.set_result(None)
            self._waiting.clear()

    async def free(self) -> None:
        """Wait while they are taken."""
        while self._takers:
            bell: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(bell)
            await bell


class InlineWorkers:
    """`ports.Workers`: `cost_bytes` / ``bytes_per_s`` of loop time for each piece of work."""

    def __init__(self, rng: Random, cores: Cores, bytes_per_s: float = 4e9) -> None:
        self._rng = rng
        self._cores = cores
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
                await self._takes(duration_s)
        await self._takes(duration_s)
        return work()

    async def _takes(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)
        await self._cores.free()


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
