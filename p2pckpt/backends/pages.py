"""Pages of RAM files: mapped where huge ones fit, gathered into huge ones, cleared and counted.

Intuition: a gigabyte is 262,144 pages of 4 KiB. Clearing and entering them one by one costs several
times what a copy of the same bytes costs, and every process that maps the file pays its part
again. As 512 huge pages it costs a fraction of a copy. A tmpfs gives huge pages by itself only if
it was mounted so, which hardly any machine has; but Linux 6.1 and later *gathers* pages into huge
ones on request (MADV_COLLAPSE), whatever the mount says, unless `shmem_enabled` is "deny". A huge
page is entered in one step only where file and address are aligned alike, so files are mapped at
multiples of the huge page.

Contract: `gather` and `touch` change no byte: what was written stays, what was not is zero. Where
huge pages cannot be had, everything works with small ones. A mapping ends with the last view of it,
and not before. ctypes is used because `mmap` cannot choose an address and its `madvise` keeps the
interpreter lock, for seconds per gigabyte.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import tempfile
import weakref
from pathlib import Path

_KERNEL = Path("/sys/kernel/mm/transparent_hugepage")
_USUAL_BYTES = 2 * 1024 * 1024
_MOST_BYTES = 32 * 1024 * 1024  # larger ones (aarch64 with 64 KiB pages: 512 MiB) fit no file
_MADV_POPULATE_WRITE = 23  # Linux 5.14; touches pages, with an error instead of SIGBUS
_MADV_COLLAPSE = 25  # Linux 6.1
_EINVAL = 22
_MAP_FIXED, _MAP_NORESERVE, _FAILED = 0x10, 0x4000, ctypes.c_void_p(-1).value

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip


@functools.cache
def huge_bytes() -> int:
    """The size of a huge page on this machine."""
    try:
        found = int((_KERNEL / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return _USUAL_BYTES
    return found if found <= _MOST_BYTES else _USUAL_BYTES


def mapped(descriptor: int, length: int, writable: bool = True) -> memoryview:
    """The first `length` bytes of a file as memory, at an address that suits huge pages.

    The mapping ends when nobody has a view of it any more; the descriptor may be closed before.
    Raises OSError. What is read or written beyond the file's end is SIGBUS, as always.
    """
    huge = huge_bytes()
    whole = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    room = _mmap(None, whole + huge, 0, nothing, -1)
    start = -(-room // huge) * huge
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        _mmap(start, whole, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except OSError:
        _LIBC.munmap(room, whole + huge)
        raise
    for low, high in ((room, start), (start + whole, room + whole + huge)):
        if low < high:
            _LIBC.munmap(low, high - low)
    memory = (ctypes.c_ubyte * length).from_address(start)
    weakref.finalize(memory, _LIBC.munmap, start, whole).atexit = False
    view = memoryview(memory).cast("B")
    return view if writable else view.toreadonly()


def _mmap(address: int | None, length: int, access: int, flags: int, descriptor: int) -> int:
    found: int | None = _LIBC.mmap(address, length, access, flags, descriptor, 0)
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found


def life(memory: memoryview) -> weakref.ref[object]:
    """Gives None as soon as a mapping has ended."""
    return weakref.ref(memory.obj)


def gather(descriptor: int, memory: memoryview, start: int, length: int) -> bool:
    """Make the whole huge pages in a range of a file; False if that did not fully succeed.

    One page of each must be there first: the kernel gathers nothing from nothing.
    """
    huge = huge_bytes()
    low, high = -(-start // huge) * huge, (start + length) // huge * huge
    if low >= high:
        return True
    try:
        for at in range(low, high, huge):
            os.pwrite(descriptor, os.pread(descriptor, 1, at), at)
    except OSError:
        return False  # no room: who allocates learns it, with need and have
    return bool(_LIBC.madvise(_address(memory) + low, high - low, _MADV_COLLAPSE) == 0)


def touch(descriptor: int, memory: memoryview, start: int, length: int) -> None:
    """Clear the pages of a range and enter them in this process's page table. Raises OSError."""
    if _LIBC.madvise(_address(memory) + start, length, _MADV_POPULATE_WRITE) == 0:
        return
    if (code := ctypes.get_errno()) != _EINVAL:
        raise OSError(code, os.strerror(code))
    zeros = bytes(1 << 20)  # before Linux 5.14; writing also releases the lock
    for offset in range(start, start + length, len(zeros)):
        os.pwrite(descriptor, zeros[: start + length - offset], offset)


def _address(memory: memoryview) -> int:
    obj = memory.obj
    assert isinstance(obj, ctypes.Array), "a mapping of this file's"
    return ctypes.addressof(obj)


def page_facts(directory: str | os.PathLike[str]) -> dict[str, str]:
    """What RAM files in a directory are made of, found by making one page. Raises OSError.

    ``pages``: "huge" or "small"; ``why``; ``shmem_enabled``: the kernel's setting; ``huge_bytes``.
    """
    huge = huge_bytes()
    try:
        setting = (_KERNEL / "shmem_enabled").read_text().partition("[")[2].partition("]")[0]
    except OSError:
        setting = "absent"
    with tempfile.TemporaryFile(dir=directory) as file:
        os.ftruncate(file.fileno(), huge)
        memory = mapped(file.fileno(), huge)
        works = gather(file.fileno(), memory, 0, huge)
    why = "gathered on request" if works else f"needs Linux 6.1, and shmem_enabled not {setting!r}"
    return {
        "pages": "huge" if works else "small",
        "why": why,
        "shmem_enabled": setting,
        "huge_bytes": str(huge),
    }
