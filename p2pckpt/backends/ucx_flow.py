"""How payload flows between two movers: frames and the state of each transfer, without any I/O.

A connection carries one transfer at a time, so that closing it stops exactly that transfer. The
sender shows a nonce and a length (OFFER). The receiver grants piece by piece (GRANT: offset, length
and a random tag); the sender answers with the bytes under that tag, and nothing else. Pieces of all
transfers share one window, dealt out in turn. While a sender must wait the receiver says so every
second (WAIT); when all bytes landed it says DONE, else REFUSED and why.

    sender    OFFER nonce 40 MiB      ======8 MiB====>  ======8 MiB====>
    receiver            GRANT 0 8 MiB  GRANT 8 8 MiB  ...                DONE

Contract: these classes take the time and random tags as arguments, and touch no socket, file or
clock. A peer that breaks the protocol (unknown version, a frame out of turn, more frames than the
transfer can need) raises FormatError, another length IntegrityError, silence PeerUnreachable.
Consequence: all rules of the flow can be tested exhaustively, and the UCX side only carries out.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

import msgspec

from p2pckpt.coding.checksum import crc32c
from p2pckpt.errors import FormatError, IntegrityError, PeerUnreachable, Refused

FRAME_BYTES = 256
"""Every control frame has this size, so that a receive for the next one can always be posted."""
VERSION = 1
TAG_BITS = 62
_MAGIC = b"p2px"
_HEAD = struct.Struct("<4sBBH16sQQQ")
_TEXT_BYTES = FRAME_BYTES - _HEAD.size - 4
_CRC = struct.Struct("<I")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and deadlines of a mover; why each: see the field."""

    piece_bytes: int = 8 << 20
    """One grant: large enough for rendezvous, small enough to take turns (4 to 8 MiB)."""
    open_pieces: int = 8
    """Grants open at once over the whole mover: 64 MiB fill 100 Gbit/s for 5 ms."""
    piece_s: float = 2.0
    """A piece arrives within this time or at the floor rate, whichever is longer."""
    floor_bytes_per_s: float = 50e6
    silent_s: float = 5.0
    """A peer of which nothing was heard for so long is unreachable."""
    wait_every_s: float = 1.0
    """A receiver that grants nothing says that it lives: well below `silent_s`."""
    idle_s: float = 10.0
    """A sender keeps an unused connection so long; the receiver six times as long."""
    refusals: int = 16
    """Offers refused in a row before a connection is dropped."""
    connections: int = 1024
    """Accepted connections; more are turned away."""

    @property
    def share_pieces(self) -> int:
        """What one transfer may hold of the window: half, so that a stuck one leaves the rest."""
        return max(1, self.open_pieces // 2)

    def piece_deadline_s(self, length: int) -> float:
        """From the grant of a piece of `length` bytes to its arrival."""
        return max(self.piece_s, length / self.floor_bytes_per_s)


# -- frames between movers ------------------------------------------------------------------------


class Kind(IntEnum):
    """What a frame says."""

    OFFER = 1
    GRANT = 2
    WAIT = 3
    DONE = 4
    REFUSED = 5


@dataclass(frozen=True)
class Frame:
    """256 bytes: magic, version, kind, text length, nonce, offset, length, tag, text, CRC32C."""

    kind: Kind
    nonce: str
    offset: int = 0
    length: int = 0
    tag: int = 0
    text: str = ""

    def pack(self) -> bytes:
        """The frame's bytes; a text that is too long is cut."""
        text = self.text.encode()[:_TEXT_BYTES].decode(errors="ignore").encode()
        numbers = (self.offset, self.length, self.tag)
        nonce = bytes.fromhex(self.nonce)
        head = _HEAD.pack(_MAGIC, VERSION, self.kind, len(text), nonce, *numbers)
        body = head + text.ljust(_TEXT_BYTES, b"\0")
        return body + _CRC.pack(crc32c(body))

    @classmethod
    def unpack(cls, data: bytes) -> Frame:
        """The frame of 256 bytes. Raises FormatError."""
        if len(data) != FRAME_BYTES or data[:4] != _MAGIC:
            raise FormatError(f"mover frame: needs {FRAME_BYTES} bytes from {_MAGIC!r} on")
        _, version, kind, size, nonce, offset, length, tag = _HEAD.unpack_from(data)
        if version != VERSION:
            raise FormatError(f"mover frame: version {version}, this release reads {VERSION}")
        (crc,) = _CRC.unpack_from(data, FRAME_BYTES - 4)
        if (found := crc32c(data[:-4])) != crc:
            raise FormatError(f"mover frame: CRC32C needs {crc:08x}, has {found:08x}")
        text, pad = data[_HEAD.size : -4][:size], data[_HEAD.size : -4][size:]
        try:
            if size > _TEXT_BYTES or pad.strip(b"\0"):
                raise ValueError(f"text of {size} bytes")
            return cls(Kind(kind), nonce.hex(), offset, length, tag, text.decode())
        except ValueError as e:
            raise FormatError(f"mover frame: {e}") from None


@dataclass(frozen=True)
class Piece:
    """`length` bytes from `offset` of the region, on their way under `tag`."""

    offset: int
    length: int
    tag: int
    until_s: float = 0.0


# -- the receiver ---------------------------------------------------------------------------------


@dataclass(eq=False)
class Inbound:
    """A grant of ours: what is still to be granted, what is on its way, what has landed."""

    op: int
    nonce: str
    length: int
    limits: Limits
    offered: bool = False
    asked: int = 0
    received: int = 0
    said_s: float = 0.0
    open: dict[int, Piece] = field(default_factory=dict)

    def offer(self, frame: Frame, now_s: float) -> None:
        """A sender shows the nonce. Raises Refused (another one did already), IntegrityError."""
        if self.offered:
            raise Refused(f"nonce {self.nonce[:8]}: another connection is already sending")
        if frame.length != self.length:
            raise IntegrityError(
                f"nonce {self.nonce[:8]}: the region needs {self.length} bytes, "
                f"the sender has {frame.length}"
            )
        self.offered = True
        self.said_s = now_s

    @property
    def wants(self) -> bool:
        """Whether another piece may be granted."""
        return (
            self.offered and self.asked < self.length and len(self.open) < self.limits.share_pieces
        )

    @property
    def whole(self) -> bool:
        """Whether the sender came and every byte landed."""
        return self.offered and self.received == self.length

    def grant(self, tag: int, now_s: float) -> Piece:
        """The next piece, to be awaited first and said then."""
        length = min(self.limits.piece_bytes, self.length - self.asked)
        piece = Piece(self.asked, length, tag, now_s + self.limits.piece_deadline_s(length))
        self.asked += length
        self.open[tag] = piece
        self.said_s = now_s
        return piece

    def landed(self, tag: int) -> int:
        """All bytes of a piece are in the region; returns how many."""
        length = self.open.pop(tag).length
        self.received += length
        return length

    def due(self, now_s: float) -> bool:
        """Whether a WAIT is to be said. Raises PeerUnreachable if a piece is overdue."""
        for piece in self.open.values():
            if now_s > piece.until_s:
                raise PeerUnreachable(
                    f"nonce {self.nonce[:8]}: {piece.length} bytes at {piece.offset} did not "
                    f"arrive within {self.limits.piece_deadline_s(piece.length):.1f} s"
                )
        if not self.offered or now_s - self.said_s < self.limits.wait_every_s:
            return False
        self.said_s = now_s
        return True


class Window:
    """At most `open_pieces` grants over all transfers, one to each in turn."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._turn: deque[Inbound] = deque()

    @property
    def open(self) -> int:
        """Pieces on their way now."""
        return sum(len(inbound.open) for inbound in self._turn)

    def join(self, inbound: Inbound) -> None:
        """A transfer that was offered takes part from now on."""
        self._turn.append(inbound)

    def leave(self, inbound: Inbound) -> None:
        """It ended; its places are free. Absent is fine."""
        if inbound in self._turn:
            self._turn.remove(inbound)

    def next(self) -> Inbound | None:
        """Whose turn it is to be granted a piece, if there is room and anybody wants one."""
        if self.open >= self._limits.open_pieces:
            return None
        for _ in range(len(self._turn)):
            self._turn.rotate(-1)
            if self._turn[-1].wants:
                return self._turn[-1]
        return None


# -- the sender -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Outbound:
    """A region of ours on its way to a peer's grant."""

    op: int
    nonce: str
    length: int
    peer: str
    limits: Limits
    heard_s: float
    begun_s: float = 0.0
    granted: int = 0
    sending: int = 0
    frames: int = 0
    done: bool = False

    def __post_init__(self) -> None:
        self.begun_s = self.heard_s

    def offer(self) -> Frame:
        """What is said first."""
        return Frame(Kind.OFFER, self.nonce, length=self.length)

    def hear(self, frame: Frame, now_s: float) -> Piece | None:
        """Take a frame of the receiver's; a piece is to be sent. Raises Refused, FormatError."""
        self.heard_s = now_s
        self.frames += 1
        pieces = self.granted // min(self.limits.piece_bytes, 1 << 20)
        if self.frames > 64 + pieces + 4 * (now_s - self.begun_s):
            raise FormatError(f"{self.peer}: flood of {self.frames} control frames, dropped")
        if frame.nonce != self.nonce or self.done:
            raise FormatError(f"{self.peer}: {frame.kind.name} of another transfer")
        if frame.kind is Kind.REFUSED:
            raise Refused(f"{self.peer}: {frame.text}")
        if frame.kind is Kind.GRANT:
            return self._granted(frame)
        if frame.kind is Kind.DONE and self.granted == self.length:
            self.done = True
        elif frame.kind is not Kind.WAIT:
            raise FormatError(f"{self.peer}: {frame.kind.name} at {self.granted} of {self.length}")
        return None

    def _granted(self, frame: Frame) -> Piece:
        room = self.length - self.granted
        if frame.offset != self.granted or not 0 < frame.length <= room:
            raise FormatError(
                f"{self.peer}: grants {frame.length} bytes at {frame.offset}, "
                f"of {self.length} the first {self.granted} were granted"
            )
        self.granted += frame.length
        self.sending += 1
        return Piece(frame.offset, frame.length, frame.tag)

    def left(self, now_s: float) -> None:
        """UCX no longer needs the bytes of a piece."""
        self.sending -= 1
        self.heard_s = now_s

    @property
    def ended(self) -> bool:
        """The receiver has everything, and the region is no longer read."""
        return self.done and self.sending == 0

    def check(self, now_s: float) -> None:
        """Raises PeerUnreachable if nothing was heard for too long."""
        if (silent_s := now_s - self.heard_s) > self.limits.silent_s:
            raise PeerUnreachable(f"{self.peer}: silent for {silent_s:.1f} s")


# -- what agent and mover tell each other ---------------------------------------------------------


class Expect(msgspec.Struct, tag=True, frozen=True):
    """Grant a write into a region; the file's descriptor comes along."""

    op: int
    nonce: str
    file: str
    offset: int
    length: int


class Send(msgspec.Struct, tag=True, frozen=True):
    """Send a region to a grant of a peer's; the file's descriptor comes along."""

    op: int
    nonce: str
    file: str
    offset: int
    length: int
    host: str
    port: int


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """End an operation; answered by Ended in any case."""

    op: int


class Unmap(msgspec.Struct, tag=True, frozen=True):
    """The file is gone; keep no mapping of it."""

    file: str


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The mover is ready. `missing` != "": it cannot work, and why."""

    port: int = 0
    facts: dict[str, str] = {}
    missing: str = ""


class Granted(msgspec.Struct, tag=True, frozen=True):
    """A sender that shows the nonce is let in from now on."""

    op: int


class Received(msgspec.Struct, tag=True, frozen=True):
    """A piece landed."""

    op: int
    size_bytes: int


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The operation touches its region no more. `error` == "": all went well."""

    op: int
    error: str = ""
    message: str = ""


ToMover = Expect | Send | Cancel | Unmap
FromMover = Hello | Granted | Received | Ended
