"""The agent's side of the trainers' socket: who calls, what they ask, and when they died.

Intuition: every training process on the node opens a Unix stream socket to its agent. The kernel
says who it is (SO_PEERCRED), a pidfd says when it is dead, and SCM_RIGHTS hands it the memory that
a reply names. A frame is a length (4 bytes, little-endian) and an envelope of `p2pckpt.wire`; a
descriptor travels with the first byte of its frame.

Contract: requests of one connection are answered in order, connections run side by side, and all
connections of a process are one trainer. `on_gone` is called exactly once for every process that
asked something, when that process is dead: a closed socket is not death. By then no request of that
trainer is being handled, and none will be. Time and size of frames, connections of a process and in
all are bounded (`SocketLimits`).

Consequence: whoever sends garbage, half or oversized frames, floods, or does not read its replies
loses its connection, with the reason counted in `dropped`, and nobody else notices.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import stat
import struct
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2pckpt import wire
from p2pckpt.errors import CheckpointError, FormatError, UsageError
from p2pckpt.ports import TrainerHandler, TrainerId
from p2pckpt.records import Record

_SO_PEERPIDFD = 77  # Linux 6.5: the pidfd of who connected, whatever became of its pid
_PATH_BYTES = 107  # sun_path, less its final zero
_MALFORMED = ("oversized", "half frame", "slow", "garbage")
_ACCEPT_PAUSE_S = 0.1  # when the process is out of descriptors


def default_socket_paths(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Where the agent's socket may be, best first: P2PCKPT_AGENT, the user's, the system's."""
    own, runtime = environ.get("P2PCKPT_AGENT"), environ.get("XDG_RUNTIME_DIR")
    paths = (own, runtime and f"{runtime}/p2pckpt/agent.sock", "/run/p2pckpt/agent.sock")
    return tuple(path for path in paths if path)


@dataclass(frozen=True)
class SocketLimits:
    """Bounds of the trainers' socket. Requests are small: a step's `meta` is the largest."""

    frame_bytes: int = 1024 * 1024
    frame_s: float = 10.0
    """From a frame's first byte to its last, either way: a process may be stopped for a while."""
    connections: int = 256
    connections_each: int = 16


@dataclass(eq=False)
class _Process:
    """A process that has connected; `asked` once the handler has heard of it."""

    trainer: TrainerId
    pidfd: int
    asked: bool = False
    conversations: set[asyncio.Task[None]] = field(default_factory=set)


class SocketTrainers:
    """:class:`p2pckpt.ports.Trainers` on a Unix socket at `path`.

    ``descriptor(file, writable)`` opens the file of a reply (`wire.file_of`);
    the descriptor is closed here. Only processes of `allowed_uids` (default: our own) are served;
    with `group` the socket is that group's as well (mode 0660), else it has mode 0600.
    """

    def __init__(
        self,
        path: str,
        descriptor: Callable[[str, bool], int],
        allowed_uids: Collection[int] | None = None,
        group: int | None = None,
        limits: SocketLimits = SocketLimits(),
    ) -> None:
        self.dropped: Counter[str] = Counter()
        """Connections dropped, by reason."""
        self._path = path
        self._descriptor = descriptor
        self._allowed = frozenset({os.geteuid()} if allowed_uids is None else allowed_uids)
        self._group = group
        self._limits = limits
        self._processes: dict[TrainerId, _Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections = 0
        self._listener: socket.socket | None = None
        self._inode = -1
        self._handler: TrainerHandler | None = None

    async def serve(self, handler: TrainerHandler) -> None:
        """Answer from now on.

        Raises UsageError if the path is too long, is no socket, cannot be bound, or if somebody
        answers on it; a socket file on which nobody answers is replaced.
        """
        if self._listener is not None:
            raise UsageError(f"trainers' socket {self._path}: is served already")
        self._handler = handler
        self._listener = _listen(self._path, self._group)
        self._inode = os.stat(self._path).st_ino  # close() removes this one only
        self._spawn(self._accept(self._listener))

    async def close(self) -> None:
        """Stop: from now on no call and no death is reported."""
        if self._listener is None:
            return
        for process in list(self._processes.values()):
            self._forget(process)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=self._limits.frame_s)  # _accept is one of them
        self._listener.close()
        self._listener = None
        if os.path.exists(self._path) and os.stat(self._path).st_ino == self._inode:
            os.unlink(self._path)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- connections -------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:
                self.dropped["no descriptor"] += 1
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            self._welcome(sock)

    def _welcome(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._spawn(self._converse(sock)).add_done_callback(lambda _: sock.close())

    async def _converse(self, sock: socket.socket) -> None:
        """One connection, from hello to end; whatever goes wrong ends this connection only."""
        process = None
        self._connections += 1
        try:
            process = self._introduce(sock)
            while (request := await self._receive(sock)) is not None:
                reply, files = await self._answer(process, request)
                await self._send(sock, reply, files)
                await asyncio.sleep(0)  # a flood that never blocks us must not starve the others
        except CheckpointError as e:
            try:
                await self._send(sock, _failed(e))  # so that an honest peer learns why
            except OSError:  # TimeoutError among them
                pass
        except TimeoutError:
            self.dropped["does not read"] += 1
        except OSError:
            self.dropped["broken"] += 1
        finally:
            self._connections -= 1
            if process is not None:
                self._part(process)

    def _drop(self, reason: str, why: str) -> CheckpointError:
        self.dropped[reason] += 1
        return FormatError(why) if reason in _MALFORMED else UsageError(why)

    async def _receive(self, sock: socket.socket) -> Record | None:
        """The next request; None at the end. Idle time between frames is free."""
        loop = asyncio.get_running_loop()
        head = await loop.sock_recv(sock, 4)
        if not head:
            return None
        try:
            async with asyncio.timeout(self._limits.frame_s):
                head += await _exactly(sock, 4 - len(head))
                length = int.from_bytes(head, "little")
                if length > (most := self._limits.frame_bytes):
                    raise self._drop("oversized", f"frame: has {length} bytes, allowed are {most}")
                body = await _exactly(sock, length)
        except EOFError:
            raise self._drop("half frame", "frame: the connection ended within it") from None
        except TimeoutError:
            raise self._drop("slow", "frame: was not complete in time") from None
        try:
            return wire.unpack_any(body)  # type: ignore[no-any-return]
        except FormatError as e:
            raise self._drop("garbage", str(e)) from None

    async def _answer(self, process: _Process, request: Record) -> tuple[Record, list[int]]:
        """The handler's reply and the descriptors that go with it; errors become Failed."""
        assert self._handler is not None
        process.asked = True
        try:
            reply = await self._handler.on_call(process.trainer, request)
            if (file := wire.file_of(reply)) is not None:
                return reply, [self._descriptor(*file)]
        except CheckpointError as e:
            reply = _failed(e)
        except Exception as e:
            _report("a trainer's request", e)
            reply = _failed(CheckpointError(f"agent: unexpected {type(e).__name__}: {e}"))
        return reply, []

    async def _send(self, sock: socket.socket, reply: Record, files: Sequence[int] = ()) -> None:
        loop = asyncio.get_running_loop()
        try:
            body = wire.pack(reply)
            frame = memoryview(len(body).to_bytes(4, "little") + body)
            async with asyncio.timeout(self._limits.frame_s):
                while True:
                    try:
                        sent = socket.send_fds(sock, [frame], files)
                        break
                    except BlockingIOError:
                        await _writable(sock)
                if sent < len(frame):  # sending nothing to who has left is an error as well
                    await loop.sock_sendall(sock, frame[sent:])
        finally:
            for fd in files:
                os.close(fd)

    # -- processes ---------------------------------------------------------------------------------

    def _introduce(self, sock: socket.socket) -> _Process:
        """Who is there? Raises UsageError, counted, if we do not serve them."""
        pid, uid, _ = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        if uid not in self._allowed:
            raise self._drop("uid", f"uid {uid} is not served, only {sorted(self._allowed)}")
        if self._connections > (most := self._limits.connections):
            raise self._drop("connections", f"the agent has its {most} connections already")
        process = self._known(sock, pid)
        if len(process.conversations) >= (most := self._limits.connections_each):
            raise self._drop("connections of a process", f"pid {pid} has its {most} connections")
        task = asyncio.current_task()
        assert task is not None
        process.conversations.add(task)
        return process

    def _known(self, sock: socket.socket, pid: int) -> _Process:
        pidfd = -1
        try:
            pidfd = _pidfd(sock, pid)
            trainer = TrainerId(pid, _started_s(pid))
            if _is_dead(pidfd):  # then the pid may have been another's already
                raise ProcessLookupError("it died")
        except OSError as e:
            if pidfd >= 0:
                os.close(pidfd)
            why = f"pid {pid}: {e}; agent and trainer need one PID namespace"
            raise self._drop("pid", why) from None
        if trainer in self._processes:
            os.close(pidfd)
        else:
            self._processes[trainer] = process = _Process(trainer, pidfd)
            asyncio.get_running_loop().add_reader(pidfd, self._died, process)
        return self._processes[trainer]

    def _part(self, process: _Process) -> None:
        """A conversation ended. A process that never asked anything is nobody's trainer."""
        process.conversations -= {asyncio.current_task()}
        if not process.asked and not process.conversations:
            self._forget(process)

    def _forget(self, process: _Process) -> None:
        if self._processes.pop(process.trainer, None) is not None:
            asyncio.get_running_loop().remove_reader(process.pidfd)
            os.close(process.pidfd)

    def _died(self, process: _Process) -> None:
        self._forget(process)
        self._spawn(self._tell(process))

    async def _tell(self, process: _Process) -> None:
        """End what the dead process asked for, then say that it is gone."""
        conversations = set(process.conversations)
        for conversation in conversations:
            conversation.cancel()
        if conversations:
            await asyncio.wait(conversations, timeout=self._limits.frame_s)
        if process.asked:
            assert self._handler is not None
            try:
                await self._handler.on_gone(process.trainer)
            except Exception as e:
                _report(f"the death of pid {process.trainer.pid}", e)


# -- the socket ------------------------------------------------------------------------------------


def _listen(path: str, group: int | None) -> socket.socket:
    length = len(os.fsencode(path))
    if length > _PATH_BYTES:
        raise UsageError(f"socket path {path}: has {length} bytes, needs at most {_PATH_BYTES}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        folder = Path(path).parent
        if not folder.exists():
            folder.mkdir()
            folder.chmod(0o755)  # whatever the umask is; the socket's own mode says who may
        _clear(path)
        listener.bind(path)
        os.chmod(path, 0o600 if group is None else 0o660)  # nobody can connect before listen()
        if group is not None:
            os.chown(path, -1, group)
        listener.listen(128)
    except (OSError, UsageError) as e:
        listener.close()
        raise UsageError(f"socket path {path}: {e}") from e
    return listener


def _clear(path: str) -> None:
    """Make way if nobody answers on an old socket of this name."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        what = f"{stat.filemode(found.st_mode)} of uid {found.st_uid}"
        raise UsageError(f"needs no file or an old socket, found {what}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except TimeoutError:
            pass  # its queue is full: somebody lives there
    raise UsageError("another agent answers on it")


async def _exactly(sock: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    found = bytearray()
    while len(found) < count:
        piece = await loop.sock_recv(sock, min(count - len(found), 65536))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(sock)


def _failed(error: CheckpointError) -> wire.Failed:
    return wire.Failed(error=type(error).__name__, message=str(error))


def _report(what: str, error: Exception) -> None:
    asyncio.get_running_loop().call_exception_handler(
        {"message": f"p2pckpt: error while handling {what}", "exception": error}
    )


# -- who is there ----------------------------------------------------------------------------------


def _pidfd(sock: socket.socket, pid: int) -> int:
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # before Linux 6.5
        return os.pidfd_open(pid)


def _is_dead(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _started_s(pid: int) -> float:
    """When a process started, in seconds since boot: field 22 of /proc/PID/stat (proc(5))."""
    line = Path(f"/proc/{pid}/stat").read_text()
    after_name = line[line.rindex(")") + 2 :].split()  # the name may hold spaces and brackets
    return int(after_name[22 - 3]) / os.sysconf("SC_CLK_TCK")
