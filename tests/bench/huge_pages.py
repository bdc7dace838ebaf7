"""The memory of this process on pages of 2 MiB.

A thousand agents in one process have a thousand times the memory of one, and so many pages that a
core no longer knows where they are: each look-up that it must do again is time which no agent on a
core of its own would spend. With large pages there are as few as a few agents have.

Contract: Linux 6.1 or newer; elsewhere nothing happens. Returns which part of the memory it got.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

PAGE_BYTES = 2 * 1024 * 1024
MADV_COLLAPSE = 25


def collapse() -> float:
    """Put all memory that was allocated until now on large pages; 0..1: so much of it is."""
    madvise = ctypes.CDLL(None).madvise
    wanted = done = 0
    for start, end in _anonymous():
        for at in range(start, end, PAGE_BYTES):
            wanted += 1
            done += madvise(ctypes.c_void_p(at), ctypes.c_size_t(PAGE_BYTES), MADV_COLLAPSE) == 0
    return done / max(1, wanted)


def _anonymous() -> list[tuple[int, int]]:
    """Whole large pages inside the private memory of no file, as (start, end)."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, rights, *_, name = [*line.split(maxsplit=5), ""][:6]
        if rights == "rw-p" and name.strip() in ("", "[heap]"):
            start, end = (int(part, 16) for part in where.split("-"))
            found.append((-(-start // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES))
    return found
