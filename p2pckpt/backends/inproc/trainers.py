"""Fake training processes of a node, and the agent's door to them: the port Trainers.

Intuition. `TrainerSocket` is the path in the file system at which agent and trainers meet: it stays
when the agent dies. `TrainersDoor` is the agent's end, `FakeTrainer` a process at the other.

Contract. A trainer sees only the files that a reply handed to it (`wire.file_of`), and keeps
them as descriptors: they outlive the agent and the file's name. Requests and replies pass through
the wire format. An error of `errors` in the handler reaches `call` as the same class; with no agent
there, or one that dies during the call, it is AgentUnreachable. `on_gone` comes for each trainer
that called this start of the agent and then died, when what it had asked for is ended; a dead
trainer calls and writes no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from p2pckpt import errors, wire
from p2pckpt.errors import AgentUnreachable, CheckpointError, FormatError, UsageError
from p2pckpt.ports import TrainerHandler, TrainerId
from p2pckpt.records import Record

Log = Callable[[str, dict[str, Any]], None]

_WAY_S = 50e-6
"""One way over a Unix socket."""

_END_S = 10.0
"""A request of a dead trainer that has not ended by then is not waited for."""


class TrainerSocket:
    """Where agent and trainers of a node meet. ``descriptor(file)`` opens a file of the arena."""

    def __init__(self, node: str, descriptor: Callable[[str], bytearray], log: Log) -> None:
        self.node = node
        self.descriptor = descriptor
        self.log = log
        self.handler: TrainerHandler | None = None
        self.callers: list[TrainerId] = []
        self.tasks: list[asyncio.Task[Any]] = []

    def start(self, call: Any, name: str) -> asyncio.Task[Any]:
        """Run a handler beside its caller, and hold on to it."""
        task = asyncio.create_task(call, name=name)
        self.tasks.append(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """A trainer that died in the call does not ask how it ended: an error of ours is no news,
        any other is told."""
        self.tasks.remove(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, CheckpointError):
            self.log("trainer.handler_failed", {"why": repr(error)})


class TrainersDoor:
    """`ports.Trainers` of one start of the agent."""

    def __init__(self, socket: TrainerSocket) -> None:
        self._socket = socket
        self._handler: TrainerHandler | None = None

    async def serve(self, handler: TrainerHandler) -> None:
        """Answer from now on; a later start of the agent takes the socket over."""
        self._handler = self._socket.handler = handler
        self._socket.callers = []

    async def close(self) -> None:
        """Stop, if it is still this one that serves."""
        if self._socket.handler is self._handler:
            self._socket.handler = None


class FakeTrainer:
    """A training process."""

    def __init__(self, socket: TrainerSocket, trainer: TrainerId) -> None:
        self.id = trainer
        self.alive = True
        self._socket = socket
        self._files: dict[str, bytearray] = {}
        self._asked: set[asyncio.Task[Record]] = set()

    async def call(self, request: Record) -> Record:
        """Ask the node's agent. Raises what it answered with Failed, or AgentUnreachable."""
        self._check_alive()
        await asyncio.sleep(_WAY_S)
        self._check_alive()
        socket, handler = self._socket, self._socket.handler
        if handler is None:
            raise AgentUnreachable(f"node {socket.node}: no agent answers its trainers")
        if self.id not in socket.callers:
            socket.callers.append(self.id)
        self._log("trainer.call", request)
        task = socket.start(
            handler.on_call(self.id, wire.unpack_any(wire.pack(request))),
            f"{socket.node} answers trainer {self.id.pid}",
        )
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        await asyncio.wait((task,))
        self._check_alive()
        if task.cancelled():
            raise AgentUnreachable(f"node {socket.node}: its agent died during the call")
        reply = _reply(task)
        await asyncio.sleep(_WAY_S)
        self._check_alive()
        self._log("trainer.reply", reply)
        if isinstance(reply, wire.Failed):
            raise _error(reply)
        if (file := wire.file_of(reply)) is not None:
            self._files[file[0]] = socket.descriptor(file[0])
        return reply

    def view(self, file: str, length: int) -> memoryview:
        """The first `length` bytes of a file that was handed over, writable."""
        self._check_alive()
        if file not in self._files:
            raise UsageError(f"trainer {self.id.pid}: file {file!r} was not handed over")
        if not 0 <= length <= len(self._files[file]):
            raise UsageError(
                f"trainer {self.id.pid}: {length} bytes of {file!r}, has {len(self._files[file])}"
            )
        return memoryview(self._files[file])[:length]

    def kill(self, *, host_lost: bool = False) -> None:
        """Die at once; the agent hears of it, unless the whole host is lost."""
        if not self.alive:
            return
        self.alive = False
        socket, handler = self._socket, self._socket.handler
        socket.log("fault.trainer.kill", {"pid": self.id.pid})
        if handler is not None and self.id in socket.callers and not host_lost:
            socket.callers.remove(self.id)
            socket.start(self._tell(handler), f"{socket.node} lost trainer {self.id.pid}")

    async def _tell(self, handler: TrainerHandler) -> None:
        """End what the dead process asked for, then say that it is gone."""
        for task in (asked := list(self._asked)):
            task.cancel()
        if asked:
            await asyncio.wait(asked, timeout=_END_S)
        await handler.on_gone(self.id)

    def _check_alive(self) -> None:
        if not self.alive:
            raise asyncio.CancelledError(f"trainer {self.id.pid} is dead")

    def _log(self, what: str, record: Record) -> None:
        self._socket.log(what, {"pid": self.id.pid, "kind": type(record).__name__})


def _reply(task: asyncio.Task[Record]) -> Record:
    """What the handler gave, as it comes out of the socket."""
    try:
        reply = task.result()
    except CheckpointError as e:
        reply = wire.Failed(error=type(e).__name__, message=str(e))
    answer: Record = wire.unpack_any(wire.pack(reply))
    return answer


def _error(failed: wire.Failed) -> CheckpointError:
    kind = getattr(errors, failed.error, None)
    if isinstance(kind, type) and issubclass(kind, CheckpointError):
        return kind(failed.message)
    return FormatError(f"the agent failed with {failed.error!r}: {failed.message}")
