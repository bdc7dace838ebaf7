"""How payload flows between two movers: frames and the state of each transfer, without any I/O.

A connection carries one transfer at a time, so that closing it stops exactly that transfer. The
sender shows a nonce and a length (OFFER). The receiver grants piece by piece (GRANT: offset, length
and a random tag); the sender answers with the bytes under that tag, and nothing else. Pieces of all
transfers share one window, dealt out in turn. While a sender must wait the receiver says so every
second (WAIT); when all bytes landed it says DONE, else REFUSED and why. Who keeps to a rate does so
before a grant, so that what waits holds no place: the receiver grants when it is time, the sender
says up to where it may be granted (READY).

    sender    OFFER nonce 40 MiB      ======8 MiB====>  ======8 MiB====>   [READY 24 MiB]
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
from p2pckpt.traffic import LEAST_SLICE_BYTES, Pace, Traffic

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
    """A piece arrives within this time, or with a window of its like at the floor rate, whichever
    is longer."""
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
        """From the grant of a piece of `length` bytes to its arrival: others that were granted
        before may be on the same link, ahead of it."""
        return max(self.piece_s, self.open_pieces * length / self.floor_bytes_per_s)


# -- frames between movers ------------------------------------------------------------------------


class Kind(IntEnum):
    """What a frame says."""

    OFFER = 1
    GRANT = 2
    WAIT = 3
    DONE = 4
    REFUSED = 5
    READY = 6


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
    traffic: Traffic = Traffic.RESTORE
    offered: bool = False
    ready: int = 0
    asked: int = 0
    received: int = 0
    begun_s: float = 0.0
    said_s: float = 0.0
    heard_s: float = 0.0
    frames: int = 0
    open: dict[int, Piece] = field(default_factory=dict)

    def offer(self, frame: Frame, now_s: float) -> None:
        """A sender shows the nonce. Raises Refused (another one did already), IntegrityError,
        FormatError."""
        if self.offered:
            raise Refused(f"nonce {self.nonce[:8]}: another connection is already sending")
        if frame.length != self.length:
            raise IntegrityError(
                f"nonce {self.nonce[:8]}: the region needs {self.length} bytes, "
                f"the sender has {frame.length}"
            )
        if frame.offset > self.length:
            raise FormatError(f"OFFER of {self.length} bytes without {frame.offset}")
        self.offered, self.ready = True, self.length - frame.offset
        self.begun_s = self.said_s = self.heard_s = now_s

    def hear(self, frame: Frame, now_s: float) -> None:
        """The sender is ready for more, or says that it lives. Raises FormatError."""
        self.heard_s, self.frames = now_s, self.frames + 1
        slices, passed_s = self.ready // LEAST_SLICE_BYTES, now_s - self.begun_s
        if frame.nonce != self.nonce or self.frames > 64 + slices + 4 * passed_s:
            raise FormatError(f"{self.frames} {frame.kind.name} at {self.ready} bytes: flood")
        if not self.ready <= frame.offset <= self.length:
            raise FormatError(f"READY {frame.offset}, was {self.ready} of {self.length}")
        self.ready = frame.offset

    @property
    def wants(self) -> bool:
        """Whether another piece may be granted."""
        return (
            self.offered and self.asked < self.ready and len(self.open) < self.limits.share_pieces
        )

    @property
    def whole(self) -> bool:
        """Whether the sender came and every byte landed."""
        return self.offered and self.received == self.length

    def grant(self, tag: int, now_s: float, most_bytes: int = 1 << 62) -> Piece:
        """The next piece, to be awaited first and said then."""
        length = min(self.limits.piece_bytes, self.ready - self.asked, most_bytes)
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
        """Whether a WAIT is to be said. Raises PeerUnreachable if a piece is overdue, or a sender
        that was not ready for all has been silent for too long."""
        for piece in self.open.values():
            if now_s > piece.until_s:
                raise PeerUnreachable(
                    f"nonce {self.nonce[:8]}: {piece.length} bytes at {piece.offset} did not "
                    f"arrive within {self.limits.piece_deadline_s(piece.length):.1f} s"
                )
        starved = self.offered and not self.open and self.asked == self.ready < self.length
        if starved and (silent_s := now_s - self.heard_s) > self.limits.silent_s:
            raise PeerUnreachable(f"nonce {self.nonce[:8]}: the sender is silent for {silent_s} s")
        if not self.offered or now_s - self.said_s < self.limits.wait_every_s:
            return False
        self.said_s = now_s
        return True


class Window:
    """At most `open_pieces` grants over all transfers, one to each in turn, when it is time."""

    def __init__(self, limits: Limits, pace: Pace | None = None) -> None:
        self._limits = limits
        self._pace = pace or Pace()
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

    def next(self, now_s: float = 0.0) -> Inbound | None:
        """Whose turn it is to be granted a piece, if there is room and anybody wants one now."""
        if self.open >= self._limits.open_pieces:
            return None
        for _ in range(len(self._turn)):
            self._turn.rotate(-1)
            inbound = self._turn[-1]
            if inbound.wants and not self._pace.wait_s(inbound.traffic, now_s):
                return inbound
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
    traffic: Traffic = Traffic.RESTORE
    begun_s: float = 0.0
    said_s: float = 0.0
    given_s: float = 0.0
    ready: int = 0
    granted: int = 0
    sending: int = 0
    frames: int = 0
    done: bool = False

    def __post_init__(self) -> None:
        self.begun_s = self.said_s = self.heard_s
        self.ready = self.length

    def offer(self, bounded: bool = False) -> Frame:
        """What is said first; ``bounded``: `more` says how much may be granted."""
        self.ready = self.length * (not bounded)
        return Frame(Kind.OFFER, self.nonce, self.length - self.ready, self.length)

    def more(self, pace: Pace, now_s: float) -> Frame | None:
        """READY, if it is time for another slice, or to say that we live."""
        if self.ready == self.length:
            return None
        left, ahead = self.length - self.ready, self.ready - self.granted
        if ahead < self.limits.piece_bytes and not pace.wait_s(self.traffic, now_s):
            size = pace.slice_bytes(self.traffic, min(left, self.limits.piece_bytes))
            pace.spend(self.traffic, size, now_s)
            self.ready, self.given_s = self.ready + size, now_s
        elif now_s - self.said_s < self.limits.wait_every_s:
            return None
        self.said_s = now_s
        return Frame(Kind.READY, self.nonce, self.ready)

    def hear(self, frame: Frame, now_s: float) -> Piece | None:
        """Take a frame of the receiver's; a piece is to be sent. Raises Refused, FormatError."""
        self.heard_s = now_s
        self.frames += 1
        pieces = self.granted // min(self.limits.piece_bytes, LEAST_SLICE_BYTES // 2)
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
        room = self.ready - self.granted
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
