"""Threads for heavy or blocking work, and chance from the operating system.

Intuition: coding, checksums and large copies take milliseconds to seconds and release the
interpreter lock, so a few threads keep the event loop free; how many bounds what runs at once, the
rest waits in line.

Work that no job stands still for may have fewer threads, so that training keeps its cores.

Contract: `run` returns what the work returns or raises what it raises. When a call is cancelled,
work that has not begun never begins, and work that has begun is waited for: after `run` ended, by
whatever way, nobody touches the buffers it was given. So cancelling takes as long as the piece of
work does, and callers cut their work accordingly.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from p2pckpt.errors import UsageError
from p2pckpt.traffic import Traffic

T = TypeVar("T")


class ThreadWorkers:
    """:class:`p2pckpt.ports.Workers` on `threads` threads."""

    def __init__(self, threads: int, background_threads: int = 0) -> None:
        """``background_threads``: what is not for a RESTORE has at most so many; 0: all."""
        if threads < 1:
            raise UsageError(f"workers: needs 1 thread or more, has {threads}")
        self._background = asyncio.Semaphore(background_threads or threads)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="p2pckpt-worker")
        self._closed = False

    async def run(
        self,
        work: Callable[[], T],
        cost_bytes: int,  # noqa: ARG002
        traffic: Traffic = Traffic.RESTORE,
    ) -> T:
        """Run `work` in a thread; `cost_bytes` matters to the simulator only.

        Raises what `work` raises, UsageError after close().
        """
        if traffic is Traffic.RESTORE:
            return await self._run(work)
        async with self._background:
            return await self._run(work)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise UsageError("workers: are closed")
        future = self._pool.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancel():  # it runs
                ended = asyncio.Event()
                loop = asyncio.get_running_loop()
                future.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
                while not ended.is_set():
                    try:
                        await ended.wait()
                    except asyncio.CancelledError:
                        pass  # the first one is raised below
            raise

    def close(self) -> None:
        """Wait for the work that runs; what waits in line is cancelled."""
        self._closed = True
        self._pool.shutdown(cancel_futures=True)


class SystemIds:
    """:class:`p2pckpt.ports.Ids` from the operating system's source of chance."""

    def __init__(self) -> None:
        self._chance = random.SystemRandom()

    def new(self) -> str:
        """A fresh identity: 32 hex digits."""
        return secrets.token_hex(16)

    def uniform(self, low: float, high: float) -> float:
        """A random number from [low, high]."""
        return self._chance.uniform(low, high)
