"""An asyncio event loop under virtual time: it never sleeps, it jumps to the next timer.

Intuition. An event loop sleeps in one place only, its selector. A selector that moves a number
forward instead of sleeping runs ordinary asyncio code (`sleep`, `timeout`, `TaskGroup`) unchanged
and at full speed, and nothing but that code decides what happens next.

Contract. The same coroutine gives the same schedule, in any process: there is no real I/O, thread
or clock in the loop (they are refused), and tasks and futures hash by creation number, because
`asyncio.TaskGroup` and `asyncio.wait` walk sets whose order would otherwise follow addresses.
A run that can never go on (nothing is ready, no timer is set, the main task is not done) raises
`Stuck` with the pending tasks named; so does one that passes its bound of virtual seconds or turns.
What runs in a context with a `LocalClock` reads that one, and its timers go by it.

Consequence. A hang is a finding with a name, hours cost milliseconds, and a seed reproduces a run.
A turn in which code never awaits cannot be noticed here, as in any event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from p2pckpt.errors import UsageError

T = TypeVar("T")

_CLEANUP_TURNS = 100_000
"""Turns that cancelled tasks get to end in: enough for any cleanup, and a loop in one is left."""


class Stuck(Exception):
    """The run cannot end, or did not within its bounds. ``pending`` names the waiting tasks."""

    def __init__(self, why: str, pending: tuple[str, ...]) -> None:
        super().__init__("\n  ".join((f"{why}; {len(pending)} pending tasks:", *pending)))
        self.why = why
        self.pending = pending


class LocalClock:
    """A machine's own clock: it began somewhere else, and may be faster or slower than others."""

    def __init__(self, offset_s: float = 0.0) -> None:
        self.rate = 1.0
        self._true = 0.0
        self._local = offset_s

    def at(self, true_s: float) -> float:
        """What it shows."""
        return self._local + (true_s - self._true) * self.rate

    def true(self, local_s: float) -> float:
        """When it will show that, or did."""
        return self._true + (local_s - self._local) / self.rate

    def set_rate(self, rate: float, true_s: float) -> None:
        """From now on another rate; it never jumps."""
        self._local, self._true, self.rate = self.at(true_s), true_s, rate


LOCAL: contextvars.ContextVar[LocalClock | None] = contextvars.ContextVar("LOCAL", default=None)
"""The clock of the machine on which what runs now runs; None: true time."""


class _NumberedTask(asyncio.Task[Any]):
    """A task that hashes by creation number."""

    def __new__(cls, _coro: Any, *, number: int, **_options: Any) -> _NumberedTask:
        task = super().__new__(cls)
        task.number = number  # before __init__, which hashes the task
        return task

    def __init__(self, coro: Any, *, number: int, **options: Any) -> None:
        options["name"] = options.get("name") or f"task-{number}"
        super().__init__(coro, **options)

    number: int

    def __hash__(self) -> int:
        return self.number


class _NumberedFuture(asyncio.Future[Any]):
    """A future that hashes by creation number."""

    def __init__(self, *, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: tells `advance` how long it would have waited (None: for ever)."""

    def __init__(self) -> None:
        super().__init__()
        self.advance: Callable[[float | None], None] = lambda _wait_s: None

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Accept one file, the loop's own wake-up pipe; refuse all real I/O."""
        if self.get_map():
            raise UsageError("virtual time: files and sockets have no place here; use a port")
        return super().register(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let the clock jump; no file is ever ready."""
        self.advance(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop that `run` uses; see the module's docstring."""

    def __init__(self, start: float, limit_s: float, limit_turns: int | None = None) -> None:
        self._now = start
        self._numbers = itertools.count(1)
        selector = _JumpingSelector()
        super().__init__(selector)
        selector.advance = self._advance
        # What is due within the resolution runs at once. It must exceed the rounding of `_now`.
        self._clock_resolution = max(1e-9, 4 * math.ulp(start + limit_s))
        self.set_task_factory(self._make_task)
        self.bound(limit_s, limit_turns)

    def bound(self, limit_s: float, limit_turns: int | None) -> None:
        """From now on, raise Stuck after so many virtual seconds or turns of the loop."""
        self._last = self._now + limit_s
        self._limit_s = limit_s
        self._limit_turns = limit_turns
        self.turns = 0

    def time(self) -> float:
        """Virtual seconds, by the local clock if there is one."""
        local = LOCAL.get()
        return self._now if local is None else local.at(self._now)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        """A timer by the clock that `time` shows here."""
        if (local := LOCAL.get()) is not None:
            when = max(self._now, local.true(when))
        return super().call_at(when, callback, *args, context=context)

    def pending(self) -> list[asyncio.Task[Any]]:
        """All unfinished tasks in order of creation."""
        return sorted(asyncio.all_tasks(self), key=hash)

    def create_future(self) -> asyncio.Future[Any]:
        """Make a numbered future."""
        return _NumberedFuture(number=next(self._numbers), loop=self)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        """There are no threads, so this is `call_soon`, without a byte in the wake-up pipe."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]  # noqa: ARG002
        """Refuse: a thread runs in real time, so a run would no longer be reproducible."""
        raise UsageError(f"virtual time: {func!r} may not run in a thread; use the port Workers")

    def _make_task(self, _loop: Any, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return _NumberedTask(coro, number=next(self._numbers), loop=self, **options)

    def _advance(self, wait_s: float | None) -> None:
        self.turns += 1
        if self._limit_turns is not None and self.turns > self._limit_turns:
            raise self._stuck(f"more than {self._limit_turns} turns, at {self._now:.6f} s")
        if wait_s is None:
            raise self._stuck(f"nothing can happen any more, at {self._now:.6f} s")
        if self._now + wait_s > self._last:
            raise self._stuck(f"not done after {self._limit_s} virtual seconds")
        self._now += wait_s

    def _stuck(self, why: str) -> Stuck:
        return Stuck(why, tuple(_describe(task) for task in self.pending()))


def run(
    main: Coroutine[Any, Any, T],
    *,
    start: float = 0.0,
    limit_s: float,
    limit_turns: int | None = None,
) -> T:
    """Run `main` under virtual time and return its result or raise its exception.

    ``start`` is the first `loop.time()`; ``limit_s`` bounds the virtual seconds and ``limit_turns``
    the turns of the loop (each runs all that is ready), else Stuck. Tasks that are left over are
    cancelled, in order of creation, as `asyncio.run` does.
    """
    loop = VirtualLoop(start, limit_s, limit_turns)
    task = loop.create_task(main, name="main")
    try:
        return loop.run_until_complete(task)
    finally:
        try:
            _end(loop)
        finally:
            loop.close()


def _end(loop: VirtualLoop) -> None:
    """Cancel what is left; what does not end even then is dropped without a further word."""
    loop.bound(limit_s=3600.0, limit_turns=_CLEANUP_TURNS)
    left = loop.pending()
    for task in left:
        task.cancel()
    try:
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.run_until_complete(loop.shutdown_asyncgens())
    except Stuck:
        for task in loop.pending():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
    for task in left:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            loop.call_exception_handler(
                {"message": f"{task.get_name()} failed while it was cancelled", "exception": error}
            )


def _describe(task: asyncio.Task[Any]) -> str:
    """Name, coroutine and the place where it waits."""
    coro = task.get_coro()
    name = getattr(coro, "__qualname__", repr(coro))
    frames = task.get_stack(limit=1)
    where = f" at {frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else ""
    return f"{task.get_name()} ({name}{where})"
