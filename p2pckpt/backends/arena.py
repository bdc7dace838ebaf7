"""The node's RAM as files in one directory, on tmpfs in production.

Intuition: bytes that must outlive the agent lie in files; a file is a slot or a shard, and a small
record beside it says what it holds and whether it is whole. In the directory, which belongs to the
arena alone (mode 0700), there are

    lock           held by the one agent that uses the directory; its pid is in it
    store_id       made with the directory; dies with the bytes
    NAME.ram       a file; NAME.rec is its record, NAME.doc a document; renamed from ....tmp

Contract: a file that exists is really there. It is allocated (posix_fallocate, so that a too small
tmpfs is NoRoom now and never SIGBUS later) and its pages are touched and mapped before it gets its
name; this runs in a thread. Every byte counts against the budget from the moment it is asked for
until nobody in this process can reach it any more: reservations under way, and removed files of
which somebody here still holds a view, count as well.

Consequence: after SIGKILL the next agent adopts what has a WHOLE record and sweeps the rest of its
names, no others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import os
import re
import secrets
import stat
import threading
import weakref
from collections.abc import Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from p2pckpt import wire
from p2pckpt.backends import descriptors, pages
from p2pckpt.errors import FormatError, NoRoom, UsageError
from p2pckpt.ports import Kept, Region
from p2pckpt.records import FileRecord, FileState

_NAME = re.compile(r"[a-z0-9._-]{1,200}")
_OURS = re.compile(r"[a-z0-9._-]{1,200}\.(ram|rec|doc)(\.tmp)?")
_STORE_ID = re.compile(r"[0-9a-f]{32}")
_PRIVATE = functools.partial(os.open, mode=0o600)
_PIECE_BYTES = 64 * 1024 * 1024  # made at once; a withdrawn reservation ends between two pieces
_RESERVERS = 4  # threads that clear pages: 0.5 to 5 GB/s a core, and memory serves several cores
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFAULT, errno.EMFILE, errno.ENFILE}


@dataclass(eq=False)
class _RamFile:
    """One file, from the moment it is asked for; `mapping` is None while it is being made."""

    path: str
    capacity: int
    mapping: memoryview | None = None
    withdrawn: bool = False
    made: memoryview | None = None
    """The mapping, from the thread that made it; a future would keep it alive for too long."""
    life: weakref.ref[object] | None = None

    def map(self, mapping: memoryview) -> None:
        """The file is there."""
        self.mapping, self.life, self.made = mapping, pages.life(mapping), None


class TmpfsArena:
    """:class:`p2pckpt.ports.Arena` on a directory, which is made if its parent exists.

    Raises UsageError if another agent holds the directory (naming its pid), or if the directory
    belongs to somebody else or others may look into it (naming owner and mode).
    """

    def __init__(self, directory: str | os.PathLike[str], budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise UsageError(f"arena {directory}: budget_bytes needs 0 or more, has {budget_bytes}")
        self._directory = Path(directory)
        self._budget = budget_bytes
        self._lock = threading.RLock()
        self._files: dict[str, _RamFile] = {}
        self._lingering: list[_RamFile] = []
        self._pool = ThreadPoolExecutor(_RESERVERS, thread_name_prefix="p2pckpt-arena")
        self._holder = -1
        try:
            with self._translated(f"arena {directory}", 0):
                _own_directory(self._directory)
                self._holder = _hold(self._directory)
                self._store_id = self._find_store_id()
                self._documents = {p.stem for p in self._ours() if p.suffix == ".doc"}
            self.adopt()
        except BaseException:
            self.close()
            raise

    @property
    def store_id(self) -> str:
        """Random, made with the directory; dies with the bytes."""
        return self._store_id

    @property
    def budget_bytes(self) -> int:
        """What all files together may take."""
        return self._budget

    @property
    def used_bytes(self) -> int:
        """Capacity of all files, of those under way, and of removed ones that are still viewed."""
        with self._lock:
            self._lingering = [f for f in self._lingering if not _unmapped(f)]
            return sum(f.capacity for f in (*self._files.values(), *self._lingering))

    def path(self, file: str) -> Path:
        """Where a file lies. Raises UsageError if there is none."""
        return Path(self._file(file).path)

    def descriptor(self, file: str, writable: bool) -> int:
        """A fresh descriptor of a file, which the caller closes. Raises UsageError, NoRoom."""
        ram = self._file(file)
        with self._translated(f"arena file {file}: descriptor", 1):
            return os.open(ram.path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)

    # -- files -------------------------------------------------------------------------------------

    async def reserve(self, file: str, capacity: int) -> None:
        """Make a file of `capacity` bytes: allocated, touched, mapped, zero.

        Raises NoRoom naming need and have, UsageError for a name in use. Cancelled, or removed
        meanwhile (UsageError), it does not come to be; its bytes return with the piece under way.
        """
        ram = self._admit(file, capacity)
        work = self._pool.submit(self._make, ram)
        work.add_done_callback(lambda made: self._settle(file, ram, made))
        try:
            await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            with self._lock:
                if self._files.get(file) is ram:
                    self.remove(file)
            raise
        if ram.withdrawn:
            raise UsageError(f"arena file {file}: was removed while it was made")

    def view(self, region: Region) -> memoryview:
        """Writable view of the bytes; valid until the file is removed. Raises UsageError."""
        ram = self._file(region.file)
        end = region.offset + region.length
        if ram.mapping is None or min(region.offset, region.length) < 0 or end > ram.capacity:
            raise UsageError(f"arena file {region.file}: has {ram.capacity} bytes, needs {region}")
        return ram.mapping[region.offset : end]

    def put_record(self, file: str, record: FileRecord) -> None:
        """Replace the file's record atomically. Raises UsageError if there is no such file."""
        with self._lock:
            self._file(file)
            self._write(self._place(file, "rec"), wire.pack(record))

    def adopt(self) -> tuple[Kept, ...]:
        """Files with a valid WHOLE record that fits, by name; everything else of ours is removed.

        Documents stay. Raises UsageError while a reservation is under way.
        """
        with self._lock, self._translated(f"arena {self._directory}: adopt", 0):
            if under_way := sorted(n for n, ram in self._files.items() if ram.mapping is None):
                raise UsageError(f"adopt: reservations are under way: {under_way}")
            found = self._ours()
            kept = [k for path in found if path.suffix == ".ram" and (k := self._kept(path))]
            names = {k.file for k in kept}
            for name in set(self._files) - names:
                self.remove(name)
            whole = {f"{name}.{suffix}" for name in names for suffix in ("ram", "rec")}
            for path in found:
                if path.suffix != ".doc" and path.name not in whole:
                    path.unlink(missing_ok=True)
            for k in kept:
                if k.file not in self._files:
                    place = self._place(k.file, "ram")
                    self._files[k.file] = ram = _RamFile(place, k.capacity)
                    with open(place, "r+b") as f:
                        ram.map(pages.mapped(f.fileno(), k.capacity))
            return tuple(sorted(kept, key=lambda k: k.file))

    def remove(self, name: str) -> None:
        """Remove a file with its record, and a document of this name; absent is fine."""
        with self._lock, self._translated(f"arena {name}: remove", 0):
            ram = self._files.get(name)
            if ram is not None and ram.mapping is None:
                ram.withdrawn = True
                return
            self._files.pop(name, None)
            self._documents.discard(name)
            for suffix in ("rec", "ram", "doc"):  # the record first: no WHOLE without bytes
                _unlink(self._place(name, suffix))
            if ram is not None and not _unmapped(ram):
                self._lingering.append(ram)

    # -- documents ---------------------------------------------------------------------------------

    def put_document(self, name: str, packed: bytes) -> None:
        """Write a small document atomically, outside the budget. Raises NoRoom."""
        with self._lock:
            self._write(self._place(name, "doc"), packed)
            self._documents.add(name)

    def document(self, name: str) -> bytes | None:
        """Read one back, None if absent."""
        with self._translated(f"document {name}", 0):
            return _read(self._place(name, "doc"))

    def documents(self) -> Set[str]:
        """Names of all documents; remembered, so that asking costs nothing."""
        return self._documents

    def close(self) -> None:
        """Let go of the directory; files and documents stay. Reservations under way end."""
        for ram in list(self._files.values()):
            ram.withdrawn = True  # for those under way
        self._pool.shutdown(cancel_futures=True)
        for ram in (*self._files.values(), *self._lingering):
            _unmapped(ram)  # one that is still viewed goes with its last view
        self._files, self._lingering = {}, []
        if self._holder >= 0:
            os.close(self._holder)
            self._holder = -1

    # -- making a file -----------------------------------------------------------------------------

    def _admit(self, file: str, capacity: int) -> _RamFile:
        path = self._place(file, "ram")
        if capacity < 1:
            raise UsageError(f"arena file {file}: capacity needs 1 or more, has {capacity}")
        with self._lock:
            if file in self._files:
                raise UsageError(f"arena file {file}: exists already")
            have = self._budget - self.used_bytes
            if capacity > have:
                have_of = f"{max(have, 0)} left of the budget of {self._budget}"
                raise NoRoom(f"arena file {file}: needs {capacity} bytes, has {have_of}")
            self._files[file] = ram = _RamFile(path, capacity)
            return ram

    def _make(self, ram: _RamFile) -> None:
        """In a thread: the mapped file under its name, unless it was withdrawn meanwhile."""
        temporary = ram.path + ".tmp"
        with self._translated(f"arena file {os.path.basename(ram.path)}", ram.capacity):
            try:
                if _allocate(temporary, ram):
                    os.replace(temporary, ram.path)
            finally:
                _unlink(temporary)  # before the error counts what is free

    def _settle(self, file: str, ram: _RamFile, made: Future[None]) -> None:
        """Runs once for every reservation, before its caller hears of it."""
        with self._lock:
            if not made.cancelled() and not made.exception() and ram.made is not None:
                ram.map(ram.made)
            ram.made = None
            if ram.mapping is None:
                del self._files[file]
            elif ram.withdrawn:
                self.remove(file)

    # -- the directory -----------------------------------------------------------------------------

    def _place(self, name: str, suffix: str) -> str:
        """As text: a Path interns its parts, and names that come and go by the thousand make the
        interpreter's table of such strings grow by a megabyte."""
        if self._holder < 0:
            raise UsageError(f"arena {self._directory}: is closed; another agent may hold it")
        if not _NAME.fullmatch(name):
            raise UsageError(f"arena name {name!r}: needs 1 to 200 of a-z, 0-9, '.', '_', '-'")
        return f"{self._directory}/{name}.{suffix}"

    def _file(self, file: str) -> _RamFile:
        with self._lock:
            ram = self._files.get(file)
            if ram is None or ram.mapping is None:
                raise UsageError(f"arena file {file}: is not in {self._directory}")
            return ram

    def _ours(self) -> list[Path]:
        """At start only, see `_place`."""
        with os.scandir(self._directory) as entries:
            files = [e for e in entries if e.is_file(follow_symlinks=False)]
        return [self._directory / e.name for e in files if _OURS.fullmatch(e.name)]

    def _find_store_id(self) -> str:
        place = f"{self._directory}/store_id"
        found = (_read(place) or b"").decode("ascii", "replace").strip()
        if not _STORE_ID.fullmatch(found):
            for path in self._ours():  # bytes without a store belong to nobody
                path.unlink(missing_ok=True)
            found = secrets.token_hex(16)
            self._write(place, found.encode() + b"\n")
        return found

    def _kept(self, path: Path) -> Kept | None:
        """What adoption believes of a file; None: nothing."""
        capacity = path.stat().st_size
        try:
            record = wire.unpack(_read(self._place(path.stem, "rec")) or b"", FileRecord)
        except FormatError:
            return None
        if record.state is not FileState.WHOLE or not 0 <= record.length <= capacity > 0:
            return None
        return Kept(path.stem, capacity, record)

    def _write(self, path: str, content: bytes) -> None:
        temporary = path + ".tmp"
        with self._translated(f"arena {os.path.basename(path)}", len(content)):
            try:
                with open(temporary, "wb", opener=_PRIVATE) as f:
                    f.write(content)
                os.replace(temporary, path)
            finally:
                _unlink(temporary)

    @contextlib.contextmanager
    def _translated(self, what: str, need_bytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            where = f"{what}: {e.strerror or e}"
            if e.errno not in _NO_ROOM:
                raise UsageError(where) from e
            disk = os.statvfs(self._directory)
            free = f"{self._directory} has {disk.f_bavail * disk.f_frsize}"
            lacks = descriptors.lacking(e) or f"needs {need_bytes} bytes, {free}"
            raise NoRoom(f"{where}; {lacks}") from e


# -- one file --------------------------------------------------------------------------------------


def _allocate(path: str, ram: _RamFile) -> bool:
    """Make the file, piece by piece; False if it was withdrawn meanwhile."""
    with open(path, "w+b", buffering=0, opener=_PRIVATE) as f:
        fd = f.fileno()
        try:
            os.ftruncate(fd, ram.capacity)
            mapping, huge = pages.mapped(fd, ram.capacity), True
            for start in range(0, ram.capacity, _PIECE_BYTES):
                if ram.withdrawn:
                    return False
                length = min(_PIECE_BYTES, ram.capacity - start)
                huge = huge and pages.gather(fd, mapping, start, length)
                os.posix_fallocate(fd, start, length)
                pages.touch(fd, mapping, start, length)
        except OSError:
            os.ftruncate(fd, 0)  # the error's traceback still refers to the mapping
            raise
        ram.made = mapping
        return True


def _unmapped(ram: _RamFile) -> bool:
    """Let go of the mapping; it ends when nobody else has a view of it."""
    ram.mapping = None
    return ram.life is None or ram.life() is None


def _read(path: str) -> bytes | None:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as f:
        return f.read()
    return None


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _own_directory(directory: Path) -> None:
    if not directory.exists():
        directory.mkdir()
        directory.chmod(0o700)  # whatever the umask is
    found = directory.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & ~0o700 != stat.S_IFDIR:
        raise UsageError(
            f"arena {directory}: needs a directory of uid {os.geteuid()} with mode 0700, found "
            f"{stat.filemode(found.st_mode)} of uid {found.st_uid}"
        )


def _hold(directory: Path) -> int:
    """The descriptor that holds the directory's lock; the kernel lets go of it at any death."""
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise UsageError(f"arena {directory}: the agent with pid {pid} holds it") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    return fd
