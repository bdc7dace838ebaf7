"""One start of an agent, as its doors see it: what it does ends and rests with it.

Intuition. A process that is dead does nothing more, and one that is stopped does nothing now. The
doors themselves know neither; wrapping them in the agent's `Life` says it once for all of them.

Contract. Each awaited call begins and returns only while the agent runs: while it is paused it
hangs; what was sent goes on its way. After the end of a life every use of one of its doors raises
CancelledError, calls in progress are cancelled, and so are its handlers at work. A pause does not
stop plain Python between two awaits, nor the synchronous calls of the arena. All runs in the
context in which the life began, so that what peers call runs by this node's clock.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from p2pckpt.ports import Change, PeerHandler, TrainerHandler, TrainerId
from p2pckpt.records import Record

T = TypeVar("T")


class Life:
    """From a start of an agent to its end."""

    def __init__(self, node: str) -> None:
        self.alive = True
        self._node = node
        self._context = contextvars.copy_context()
        self._paused = False
        self._tasks: list[asyncio.Task[Any]] = []
        self._waiting: list[asyncio.Future[None]] = []

    def check(self) -> None:
        """Raise CancelledError if it is over."""
        if not self.alive:
            raise asyncio.CancelledError(f"this start of the agent of {self._node} is over")

    async def runs(self) -> None:
        """Wait while it is paused."""
        self.check()
        while self._paused:
            bell: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(bell)
            await bell
            self.check()

    async def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Do a call as part of this life."""
        try:
            await self.runs()
        except asyncio.CancelledError:
            call.close()
            raise
        name = f"{self._node}: {_name(call)}"
        task = asyncio.create_task(call, name=name, context=self._context)
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)
        result = await task
        await self.runs()
        return result

    def pause(self) -> None:
        """Stand still."""
        self._paused = True

    def resume(self) -> None:
        """Go on."""
        self._paused = False
        self._wake()

    def end(self) -> None:
        """Die. Calls and handlers in progress are cancelled in the order in which they began."""
        self.alive = False
        for task in list(self._tasks):
            task.cancel()
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for bell in waiting:
            if not bell.done():
                bell.set_result(None)


class Guarded:
    """A door that works only during a life: the same attributes, each checked."""

    def __init__(self, door: Any, life: Life) -> None:
        self._door = door
        self._life = life
        self._synchronous: dict[str, None] = {}

    def __getattr__(self, name: str) -> Any:
        self._life.check()
        attribute = getattr(self._door, name)
        if name in self._synchronous:
            return attribute
        if not inspect.iscoroutinefunction(attribute):
            self._synchronous[name] = None
            return attribute

        async def call(*args: Any, **options: Any) -> Any:
            self._life.check()
            return await self._life.run(attribute(*args, **options))

        setattr(self, name, call)  # the next time it is found at once
        return call


class GuardedLedger(Guarded):
    """`ports.Ledger` during a life."""

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Sequence[Change]]:
        """The door's watch, resting while the agent is paused."""
        self._life.check()
        return _GuardedWatch(self._door.watch(prefix, from_revision), self._life)


class _GuardedWatch:
    """Keeps a batch that came while the agent was paused, so that a cancelled next loses none."""

    def __init__(self, watch: AsyncIterator[Sequence[Change]], life: Life) -> None:
        self._watch = watch
        self._life = life
        self._held: Sequence[Change] | None = None

    def __aiter__(self) -> AsyncIterator[Sequence[Change]]:
        return self

    async def __anext__(self) -> Sequence[Change]:
        await self._life.runs()
        if self._held is None:
            self._held = await anext(self._watch)
        await self._life.runs()
        batch, self._held = self._held, None
        return batch


class GuardedTransport(Guarded):
    """`ports.Transport` during a life, with what it grants."""

    async def expect(self, *args: Any, **options: Any) -> Any:
        """The door's grant, guarded too."""
        return Guarded(await self._life.run(self._door.expect(*args, **options)), self._life)


class GuardedPeers(Guarded):
    """`ports.Peers` during a life, with its handler."""

    async def serve(self, handler: PeerHandler) -> None:
        """Answer by a handler that ends and rests with the agent."""

        async def answer(caller: str, request: Record) -> Record:
            async def work() -> Record:
                return await handler(caller, request)

            return await self._life.run(work())

        await self._life.run(self._door.serve(answer))


class GuardedTrainers(Guarded):
    """`ports.Trainers` during a life, with its handler."""

    async def serve(self, handler: TrainerHandler) -> None:
        """Answer by a handler that ends and rests with the agent."""
        await self._life.run(self._door.serve(_GuardedHandler(handler, self._life)))


class _GuardedHandler:
    def __init__(self, handler: TrainerHandler, life: Life) -> None:
        self._handler = handler
        self._life = life

    async def on_call(self, trainer: TrainerId, request: Record) -> Record:
        async def work() -> Record:
            return await self._handler.on_call(trainer, request)

        return await self._life.run(work())

    async def on_gone(self, trainer: TrainerId) -> None:
        async def work() -> None:
            await self._handler.on_gone(trainer)

        await self._life.run(work())


def _name(call: Coroutine[Any, Any, Any]) -> str:
    return str(getattr(call, "__qualname__", call))
