"""A tmpfs of our own that can be full: mounted where only this process and its children see it.

Intuition: a machine's /dev/shm belongs to all who use it, so it cannot be filled for a trial. A
mount in a namespace of our own can, and is full at once when it is told to be no larger than what
lies in it. The namespace goes with its last process, so nothing is left behind, whatever ends us.

Contract: the constructor raises OSError where this is not allowed (it needs CAP_SYS_ADMIN). Make
one, in the thread that starts the processes that shall see it. `fill` and `free` may be repeated.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CLONE_NEWNS = 0x20000
_MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 2, 4, 32, 16384, 1 << 18
_MNT_DETACH = 2


class Room:
    """A mounted tmpfs of `size_bytes` at `place`, which is made."""

    def __init__(self, place: Path, size_bytes: int) -> None:
        self.place = place
        self._size_bytes = size_bytes
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._call("unshare", _CLONE_NEWNS)
        self._call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        place.mkdir()
        self._mount(size_bytes, 0)

    def fill(self) -> None:
        """Not a byte more fits, until `free`."""
        disk = os.statvfs(self.place)
        self._mount(max(1, disk.f_blocks - disk.f_bfree) * disk.f_frsize, _MS_REMOUNT)

    def free(self) -> None:
        """As large as it was."""
        self._mount(self._size_bytes, _MS_REMOUNT)

    def close(self) -> None:
        """Unmount, with all that lies there."""
        self._call("umount2", os.fsencode(self.place), _MNT_DETACH)
        self.place.rmdir()

    def _mount(self, size_bytes: int, flags: int) -> None:
        options = f"size={size_bytes},mode=0700".encode()
        place = os.fsencode(self.place)
        self._call("mount", b"tmpfs", place, b"tmpfs", flags | _MS_NOSUID | _MS_NODEV, options)

    def _call(self, name: str, *arguments: int | bytes | None) -> None:
        words = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
        if getattr(self._libc, name)(*words) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}", str(self.place))
