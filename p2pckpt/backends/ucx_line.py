"""What UCX refers to: the connections of a mover with their buffers, and the mapped files.

UCX is asynchronous and its bindings do not hold the buffers they were given. So each connection
keeps the requests that are open on it together with their buffers, and each file stays mapped as
long as a transfer looks at it.

Contract: after `Line.close` returns, UCX refers to no region of that connection: nothing is read
or written there any more, whatever the peer still sends. Where that cannot be had the process ends
itself, which is the other proof. A file is known by its inode, never by its name, which may be used
again; a removed file is let go by `sweep`, since a mapping would keep its memory.

Traps, all measured: `endpoint.close()` crashes after a peer's death, `close_blocking` does not, but
requests end only in the progress after it; dropping an endpoint without closing it lets a resumed
peer write into the buffers later on; a stream receive may be forgotten when the peer is gone.
"""

from __future__ import annotations

import collections
import os
import sys
import time
from typing import Any

from p2pckpt.backends import pages
from p2pckpt.backends import ucx_flow as flow
from p2pckpt.backends import ucx_words as words
from p2pckpt.errors import IntegrityError, UsageError

try:
    import ucxx._lib.libucxx as ucx
    from ucxx._lib.arr import Array
    from ucxx.types import Tag

    MISSING = ""
except (ImportError, OSError) as e:
    ucx = Array = Tag = None
    MISSING = f"{type(e).__name__}: {e}"

__all__ = ["MISSING", "Files", "Line", "ucx"]

CLOSE_NS = 200_000_000
"""How long closing an endpoint may take."""
CLOSE_S = 1.0
"""How long, after that, its open requests may take to end, before the process ends instead."""
FILES = 256
"""Files kept mapped; mapping a file anew costs its page faults again."""
EXIT_STUCK = 70
_PARKED: list[tuple[Any, Any]] = []
"""Frames that UCX never gave back (it may forget a stream receive): their buffers must live on."""


class Files:
    """Arena files, mapped when first used and until they are removed."""

    def __init__(self) -> None:
        self._mapped: collections.OrderedDict[tuple[int, ...], tuple[str, int, memoryview]]
        self._mapped = collections.OrderedDict()

    def view(self, region: words.Expect | words.Send, descriptor: int) -> memoryview:
        """A region's bytes, writable: RDMA cannot register others. Takes the descriptor over.

        Raises UsageError if the file is smaller, OSError.
        """
        stat = os.fstat(descriptor)
        key = (stat.st_dev, stat.st_ino, stat.st_size)
        try:
            if not 0 <= region.offset <= region.offset + region.length <= stat.st_size:
                raise UsageError(
                    f"{region.file}: region of {region.length} bytes at {region.offset}, "
                    f"the file has {stat.st_size}"
                )
            if not region.length:
                return memoryview(b"")
            if key not in self._mapped:
                mapped = pages.mapped(descriptor, stat.st_size)
                self._mapped[key] = (region.file, os.dup(descriptor), mapped)
        finally:
            os.close(descriptor)
        self._mapped.move_to_end(key)
        while len(self._mapped) > FILES:
            self._forget(next(iter(self._mapped)))
        return self._mapped[key][2][region.offset :][: region.length]

    def sweep(self, file: str = "") -> None:
        """Let go of files that were removed, and of `file`."""
        for key, (name, descriptor, _) in list(self._mapped.items()):
            if name == file or os.fstat(descriptor).st_nlink == 0:
                self._forget(key)

    def _forget(self, key: tuple[int, ...]) -> None:
        os.close(self._mapped.pop(key)[1])  # unmapped as soon as no transfer looks at it


class Line:
    """One connection with the requests that are open on it and the buffers these need."""

    def __init__(self, worker: Any, endpoint: Any, peer: str, now_s: float) -> None:
        self.peer = peer
        self.flow: flow.Inbound | flow.Outbound | None = None
        self.used_s = now_s
        self.reused = False
        self.refusals = 0
        self._worker = worker
        self._endpoint = endpoint
        self._awaited: dict[int, memoryview] = {}
        self._sends: list[tuple[Any, Any, bool]] = []
        self._receives: dict[int, tuple[Any, Any]] = {}
        self._listen()

    def _listen(self) -> None:
        self._frame = bytearray(flow.FRAME_BYTES)
        self._array = Array(self._frame)
        self._hearing = self._endpoint.stream_recv(self._array)

    def hear(self) -> flow.Frame | None:
        """The next frame, if it is here. Raises UCXError if the connection broke."""
        if not self._hearing.completed:
            self._endpoint.raise_on_error()  # UCX may forget the receive when a peer is gone
            return None
        self._hearing.check_error()
        frame = flow.Frame.unpack(bytes(self._frame))
        self._listen()
        return frame

    def say(self, frame: flow.Frame) -> None:
        """Send a frame."""
        array = Array(bytearray(frame.pack()))
        self._sends.append((self._endpoint.stream_send(array), array, False))

    def send(self, view: memoryview, tag: int) -> None:
        """Send a piece."""
        array = Array(view)
        self._sends.append((self._endpoint.tag_send(array, Tag(tag)), array, True))

    def receive(self, view: memoryview, tag: int) -> None:
        """Let a piece in when it comes."""
        self._awaited[tag] = view

    def settle(self) -> tuple[int, list[int]]:
        """How many pieces have left and the tags of those that landed since the last call.

        Raises IntegrityError if a piece that comes has not the length that was granted.
        """
        for tag in list(self._awaited):
            self._let_in(tag)
        gone = [s for s in self._sends if s[0].completed]
        landed = [tag for tag, (request, _) in self._receives.items() if request.completed]
        for request, _, _ in gone:
            request.check_error()
        for tag in landed:
            self._receives[tag][0].check_error()
            del self._receives[tag]
        if gone:
            self._sends = [s for s in self._sends if s not in gone]
        return sum(is_piece for _, _, is_piece in gone), landed

    def _let_in(self, tag: int) -> None:
        """Only a message that is here and has the right length gets at the region.

        A receive that is posted before would take a shorter message as good, and ucxx does not
        say how long it was.
        """
        probe = self._worker.tag_probe(Tag(tag), remove=True)
        if not probe.matched:
            return
        view = self._awaited.pop(tag)
        if probe.length != len(view):
            raise IntegrityError(
                f"{self.peer}: a piece of {probe.length} bytes, {len(view)} were granted"
            )
        array = Array(view)
        self._receives[tag] = (self._endpoint.tag_recv_with_handle(array, probe), array)

    def close(self) -> None:
        """End the connection: afterwards UCX refers to no region. Else the process ends."""
        self._endpoint.close_blocking(CLOSE_NS, 1)
        pieces = [send[0] for send in self._sends if send[2]]
        pieces += [receive[0] for receive in self._receives.values()]
        end_s = time.monotonic() + CLOSE_S
        while not all(request.completed for request in pieces):
            if time.monotonic() > end_s:
                print(f"mover: pieces to {self.peer} are stuck, giving up", file=sys.stderr)
                os._exit(EXIT_STUCK)
            self._worker.progress()
        frames = [send[:2] for send in self._sends if not send[2]]
        frames.append((self._hearing, self._array))
        _PARKED[:] = [frame for frame in _PARKED + frames if not frame[0].completed]
