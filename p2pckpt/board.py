"""One page of shared memory between an agent and a rank: what is to be saved, how far the rank is.

Intuition: the training loop asks after every step whether a save is due, so the answer must cost
microseconds and must not depend on whether the agent runs just now. The agent writes the schedule
into the page whenever it changes, the rank writes its progress; each reads the other's half when it
likes. Nobody locks, nobody waits, nobody calls the kernel.

    bytes 0 to 2047       two cells of 1 KiB, written by the agent: Schedule
    bytes 2048 to 4095    two cells of 1 KiB, written by the rank: Progress

A half has one writer, which fills its two cells in turn, each with a packed record and zeros behind
it. A reader takes the record with the higher version. If it meets a cell half written, the CRC32C
of the envelope is wrong, and the other cell has the record before.

Contract: `read` gives a record that was written whole, or None before the first; it may be one
write old. A writer that dies in a write leaves the record before. A page belongs to one seat of one
rank: the next seat gets a fresh one, all zeros.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from p2pckpt.errors import FormatError, UsageError
from p2pckpt.records import Progress, Schedule
from p2pckpt.wire import pack, unpack

PAGE_BYTES = 4096
CELL_BYTES = 1024

T = TypeVar("T", Schedule, Progress)


class Half(Generic[T]):
    """Two cells for records of one kind, whose versions only grow; written by one process."""

    def __init__(self, memory: memoryview, kind: type[T]) -> None:
        self._cells = (memory[:CELL_BYTES], memory[CELL_BYTES : 2 * CELL_BYTES])
        self._kind: type[T] = kind
        self._writes = 0
        self._seen = [b"", b""]
        self._found: list[T | None] = [None, None]

    def write(self, record: T) -> None:
        """Make it the newest. Raises UsageError if it is too long for a cell."""
        packed = pack(record)
        if len(packed) > CELL_BYTES:
            raise UsageError(f"board: needs records of {CELL_BYTES} bytes, has {len(packed)}")
        self._writes += 1
        self._cells[self._writes % 2][:] = packed.ljust(CELL_BYTES, b"\0")

    def read(self) -> T | None:
        """The record of the highest version that is whole; None before the first."""
        for i, cell in enumerate(self._cells):
            raw = bytes(cell)
            if raw != self._seen[i]:
                self._seen[i], self._found[i] = raw, self._whole(raw)
        a, b = self._found
        if a is None or b is None:
            return a or b
        return a if a.version > b.version else b

    def _whole(self, raw: bytes) -> T | None:
        try:
            record: T = unpack(raw.rstrip(b"\0"), self._kind)
        except FormatError:
            return None
        return record


class Board:
    """A page of PAGE_BYTES bytes, writable, as either side sees it."""

    def __init__(self, page: memoryview) -> None:
        half = PAGE_BYTES // 2
        if len(page) != PAGE_BYTES:
            raise UsageError(f"board: needs a page of {PAGE_BYTES} bytes, has {len(page)}")
        self.schedule: Half[Schedule] = Half(page[:half], Schedule)
        self.progress: Half[Progress] = Half(page[half:], Progress)
