"""The training process's line to its node's agent: one socket, blocking, no threads.

Intuition: a rank asks and waits; the answer may bring memory along. A Slot is mapped for writing, a
RestoreFile for reading, from the descriptor that travels with the reply, so neither path nor owner
of the file matters here.

Contract: `call` returns the reply or raises: the agent's own error by its class, UsageError in a
forked child, AgentUnreachable when nobody answers in time or the connection breaks (the request may
then have been carried out). After that the next call connects again, perhaps to a new agent. A
mapping stays valid, whatever becomes of the agent or the file, until `release` or `close`.

Consequence: a fork (data-loader workers) shares the parent's socket and mappings but cannot use
them by accident, and its end leaves the parent's connection as it was. One thread at a time.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass

from p2pckpt import errors, wire
from p2pckpt.backends import pages
from p2pckpt.errors import AgentUnreachable, CheckpointError, FormatError, UsageError
from p2pckpt.records import Record

_CONNECT_S = 2.0
"""An agent whose queue of connections is full for longer does not answer. For all paths."""

_MAX_FRAME_BYTES = wire.MAX_FRAME_BYTES + 4096
"""Of a reply: the largest envelope with its first line."""


@dataclass(eq=False)
class _Mapped:
    """A file of the agent's as we see it: `inode`, with its file system's number, tells a new file
    from an old one of its name. (Each tmpfs counts its inodes from 1.)"""

    memory: memoryview
    inode: tuple[int, int]
    writable: bool
    length: int


class AgentLink:
    """Connects to the first of `paths` that answers; AgentUnreachable says why none does."""

    def __init__(self, paths: Sequence[str]) -> None:
        if not paths:
            raise UsageError("agent link: needs at least one socket path")
        self._paths = tuple(paths)
        self._pid = os.getpid()
        self._mapped: dict[str, _Mapped] = {}
        self._board = ""
        self._sock: socket.socket | None = _connect(self._paths, _CONNECT_S)

    def __enter__(self) -> AgentLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, request: Record, timeout_s: float) -> Record:
        """Ask the agent and wait at most `timeout_s` for its reply.

        Raises the agent's error by its class, AgentUnreachable, UsageError, FormatError.
        """
        self._check_process()
        packed = wire.pack(request)
        deadline_s = time.monotonic() + timeout_s
        if self._sock is None:
            self._sock = _connect(self._paths, min(_CONNECT_S, timeout_s))
        descriptors: list[int] = []
        answered = False
        try:
            _arm(self._sock, deadline_s)
            try:
                self._sock.sendall(len(packed).to_bytes(4, "little") + packed)
            except (BrokenPipeError, ConnectionResetError):
                pass  # an agent that refuses us has said why before it closed
            reply = _receive(self._sock, deadline_s, descriptors)
            answered = True
            if wire.file_of(reply) is not None:
                self._map(reply, descriptors)
            if isinstance(reply, wire.Joined):
                if self._board != reply.board:  # else `_map` has put the new file in its place
                    self.release(self._board)
                self._board = reply.board
            if isinstance(reply, wire.Slot) and reply.slots:
                for file in self._mapped.keys() - {reply.file, self._board, *reply.slots}:
                    self.release(file)  # its pages would stay beyond the agent's budget
        except OSError as e:
            why = f"no reply within {timeout_s:.3g} s" if isinstance(e, TimeoutError) else str(e)
            what = type(request).__name__
            raise AgentUnreachable(
                f"{what}: the agent's connection broke ({why}); it may have been carried out"
            ) from e
        finally:
            for fd in descriptors:
                os.close(fd)
            if not answered:  # a late reply must not be taken for the next one
                self._disconnect()
        if isinstance(reply, wire.Failed):
            raise _error(reply)
        return reply

    @property
    def broken(self) -> bool:
        """Has the agent left since its last answer? One that only stands still has not."""
        if self._sock is None:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))  # nothing comes unasked, but the end

    def map(self, file: str) -> memoryview:
        """The memory of a Slot (writable, its capacity), a RestoreFile (read-only, its length), or
        a board (writable, all of it).

        Raises UsageError for a file that no reply has brought, or in a forked child.
        """
        self._check_process()
        if (mapped := self._mapped.get(file)) is None:
            raise UsageError(f"file {file}: the agent has not handed it over")
        return mapped.memory[: mapped.length]

    def release(self, file: str) -> None:
        """Give a mapping back; absent is fine. One that is still viewed goes with its last view."""
        self._mapped.pop(file, None)

    def close(self) -> None:
        """Let go of everything. In a forked child only the child's copies go."""
        self._disconnect()
        for file in list(self._mapped):
            self.release(file)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"agent link: belongs to pid {self._pid}, is used in its forked child "
                f"{os.getpid()}; a child needs a link of its own"
            )

    def _disconnect(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _map(self, reply: Record, descriptors: list[int]) -> None:
        file, writable = wire.file_of(reply) or ("", False)
        if len(descriptors) != 1:
            raise FormatError(f"file {file}: needs 1 descriptor, has {len(descriptors)}")
        found = os.fstat(descriptors[0])
        length = getattr(reply, "capacity", getattr(reply, "length", found.st_size))
        if not 0 <= length <= found.st_size > 0:  # touching more would be SIGBUS
            raise FormatError(f"file {file}: needs {length} bytes, has {found.st_size}")
        old, inode = self._mapped.get(file), (found.st_dev, found.st_ino)
        if old and (old.inode, old.writable) == (inode, writable):
            old.length = length  # its pages are in our page table already
            return
        self.release(file)
        memory = pages.mapped(descriptors[0], found.st_size, writable)
        self._mapped[file] = _Mapped(memory, inode, writable, length)


# -- the socket ------------------------------------------------------------------------------------


def _connect(paths: Sequence[str], within_s: float) -> socket.socket:
    reasons, deadline_s = [], time.monotonic() + within_s
    for path in paths:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _arm(sock, deadline_s)
            sock.connect(path)
            return sock
        except OSError as e:  # also a path that is too long
            sock.close()
            reasons.append(f"{path} ({e.strerror or e}{_owner(path)})")
    raise AgentUnreachable(f"no agent answers on this node; looked at {', '.join(reasons)}")


def _owner(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f": {stat.filemode(found.st_mode)} of uid {found.st_uid}, gid {found.st_gid}"


def _arm(sock: socket.socket, deadline_s: float) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no time left")
    sock.settimeout(left_s)


def _receive(sock: socket.socket, deadline_s: float, descriptors: list[int]) -> Record:
    """One frame; the descriptors that come with its first byte are added to the list."""
    _arm(sock, deadline_s)
    head, found, _, _ = socket.recv_fds(sock, 4, 1, socket.MSG_CMSG_CLOEXEC)
    descriptors += found
    head += _exactly(sock, 4 - len(head), deadline_s) if head else b""
    length = int.from_bytes(head, "little")
    if len(head) < 4:
        raise ConnectionResetError("closed by the agent")
    if length > _MAX_FRAME_BYTES:
        raise FormatError(f"frame: has {length} bytes, needs at most {_MAX_FRAME_BYTES}")
    reply: Record = wire.unpack_any(_exactly(sock, length, deadline_s))
    return reply


def _exactly(sock: socket.socket, count: int, deadline_s: float) -> bytes:
    found = bytearray()
    while len(found) < count:
        _arm(sock, deadline_s)
        piece = sock.recv(min(count - len(found), 1024 * 1024))
        if not piece:
            raise ConnectionResetError("closed by the agent")
        found += piece
    return bytes(found)


def _error(failed: wire.Failed) -> CheckpointError:
    kind = getattr(errors, failed.error, None)
    if isinstance(kind, type) and issubclass(kind, CheckpointError):
        return kind(failed.message)
    return CheckpointError(f"{failed.error}: {failed.message}")
