"""What bytes this node holds: the table of RAM files, and the rules by which a file changes hands.

Every file is FREE (of no attempt, may be reused), FILLING (somebody may be writing) or WHOLE (all
writers joined and the digests matched). The record beside the file says so for the next agent of
this store; this table says so for the running one, and also who may still be writing.

Contract: a file is taken only after its record says FILLING; it becomes WHOLE only by `seal`; it
becomes free only when its attempt was let go *and* its writer said done or is proven dead. So a
late writer finds only its own file. Nothing here decides whether an attempt may be let go; that is
`JobState.settled` on a linearizable read.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from p2pckpt import records as r
from p2pckpt.errors import NoRoom, UsageError
from p2pckpt.ports import Arena, Region

ROUND_BYTES = 4096
"""Files are whole pages, so that a longer number in a manifest does not need a new file."""


IDLE_TAKES = 64
"""A free file is given back after so many other files were taken: some eight saves."""


def document_name(manifest_digest: str) -> str:
    """Where a manifest lies beside the files that it describes."""
    return f"manifest-{manifest_digest}"


def seen_name(job: str) -> str:
    """Document beside the bytes: LedgerSeen of a job."""
    return f"seen-{_digest(job)}"


def copy_name(attempt: r.Attempt) -> str:
    """Document beside the bytes: CommitCopy of an attempt."""
    return f"copy-{_digest(attempt.job)}-{attempt.key}"


@lru_cache(maxsize=256)
def _digest(job: str) -> str:
    return hashlib.sha256(job.encode()).hexdigest()[:16]


@dataclass
class Held:
    """One RAM file. ``attempt`` None: free. ``writer`` is who may still write into it."""

    file: str
    capacity: int
    kind: r.FileKind
    job: str
    attempt: r.Attempt | None = None
    owner: str = ""
    part: int = 0
    length: int = 0
    whole: bool = False
    manifest_digest: str = ""
    writer: object | None = None
    doomed: bool = False
    bad: bool = False
    """Some byte is not what the manifest says: an erasure, though pieces of it may be right."""
    doubted: bool = False
    """Whoever used it found something wrong: it is to be read again before all others."""
    freed_at: int = 0
    """Count of takes when it became free."""

    def record(self) -> r.FileRecord:
        """As it is written beside the file."""
        assert self.attempt is not None
        return r.FileRecord(
            state=r.FileState.WHOLE if self.whole else r.FileState.FILLING,
            kind=self.kind,
            attempt=self.attempt,
            owner=self.owner,
            part=self.part,
            length=self.length,
            manifest_digest=self.manifest_digest,
        )


@dataclass(frozen=True)
class Want:
    """What a file is to hold; ``capacity`` in bytes."""

    kind: r.FileKind
    attempt: r.Attempt
    owner: str
    part: int
    capacity: int


class Holdings:
    """The files of one arena. ``new_name`` makes unique suffixes for file names."""

    def __init__(self, arena: Arena, new_name: Callable[[], str], job_quota_bytes: int = 0) -> None:
        self._arena = arena
        self._new_name = new_name
        self._quota_bytes = job_quota_bytes
        self._files: dict[str, Held] = {}
        self._by_attempt: dict[r.Attempt, dict[str, Held]] = {}
        """The files that are not free, by name: everybody who waits asks, after every change."""
        self._takes = 0
        self._preparing: dict[tuple[str, r.FileKind], list[int]] = {}
        self._prepared = asyncio.Event()

    def adopt(self) -> list[Held]:
        """At start: take over every file that an earlier agent of this store left WHOLE."""
        for kept in self._arena.adopt():
            rec = kept.record
            held = self._files[kept.file] = Held(
                file=kept.file,
                capacity=kept.capacity,
                kind=rec.kind,
                job=rec.attempt.job,
                attempt=rec.attempt,
                owner=rec.owner,
                part=rec.part,
                length=rec.length,
                whole=True,
                manifest_digest=rec.manifest_digest,
            )
            self._by_attempt.setdefault(rec.attempt, {})[kept.file] = held
        return list(self._files.values())

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._files.values()))

    def of_attempt(self, attempt: r.Attempt) -> list[Held]:
        """All files that belong to an attempt, whole or not."""
        return list(self._by_attempt.get(attempt, {}).values())

    def of_job(self, job: str) -> list[Held]:
        """All files of a job that are not free."""
        return [h for h in self if h.job == job and h.attempt is not None]

    def find(
        self, attempt: r.Attempt, kind: r.FileKind, part: int, owner: str | None = None
    ) -> Held | None:
        """The WHOLE file of one slot (part = rank) or shard (part = index, of `owner`); one that
        is known to be bad only if there is no other."""
        bad = None
        for h in self:
            same = h.whole and h.attempt == attempt and h.kind == kind and h.part == part
            if same and owner in (None, h.owner):
                if not h.bad:
                    return h
                bad = h
        return bad

    async def take(self, want: Want, writer: object | None = None) -> Held:
        """A file for `want`, FILLING: a free one of the job that is large enough, else a new one.

        Free files are given up for lack of room, smallest loss first. Raises NoRoom(need, have).
        """
        need = -(-want.capacity // ROUND_BYTES) * ROUND_BYTES
        self._outgrown(want.attempt.job, (want.kind, want.owner, want.part), need)
        self._give_back_idle()
        free = self._reusable(want, need)
        while free is None and self._is_made(want, need):
            await self._prepared.wait()  # as long as making one
            free = self._reusable(want, need)
        if free is None:
            name = f"{want.kind}-{self._new_name()[:16]}"
            capacity = need
            self._check_quota(want)
            await self._reserve(name, capacity)
        else:
            name, capacity = free.file, free.capacity
        job, attempt = want.attempt.job, want.attempt
        held = Held(name, capacity, want.kind, job, attempt, want.owner, want.part, writer=writer)
        try:
            self._arena.put_record(name, held.record())
        except BaseException:
            self._arena.remove(name)
            raise
        self._files[name] = self._by_attempt.setdefault(attempt, {})[name] = held
        return held

    def _check_quota(self, want: Want) -> None:
        """Raises NoRoom if the job would take more than its quota."""
        taken = sum(h.capacity for h in self if h.job == want.attempt.job)
        if self._quota_bytes and taken + want.capacity > self._quota_bytes:
            raise NoRoom(
                f"job {want.attempt.job}: needs {want.capacity} bytes, has "
                f"{self._quota_bytes - taken} left of its quota of {self._quota_bytes}"
            )

    async def prepare(self, job: str, kind: r.FileKind, capacity: int, count: int) -> None:
        """Free files ahead of time, until the job has `count` of a kind, of `capacity` at least.

        Raises NoRoom. Never gives up other free files for it.
        """
        capacity = -(-capacity // ROUND_BYTES) * ROUND_BYTES
        while True:
            have = sum(1 for h in self if (h.job, h.kind) == (job, kind) and h.capacity >= capacity)
            under_way = self._preparing.setdefault((job, kind), [])
            if have + len(under_way) >= count:
                return
            self._outgrown(job, (kind, "", 0), capacity)  # prepared before, and never used
            under_way.append(capacity)
            try:
                name = f"{kind}-{self._new_name()[:16]}"
                await self._arena.reserve(name, capacity)
                self._files[name] = Held(name, capacity, kind, job, freed_at=self._takes)
            finally:
                under_way.remove(capacity)
                self._prepared.set()
                self._prepared = asyncio.Event()

    def _is_made(self, want: Want, need: int) -> bool:
        """Is a file that would do being prepared?"""
        under_way = self._preparing.get((want.attempt.job, want.kind), ())
        return any(need <= capacity <= 2 * need for capacity in under_way)

    def _outgrown(self, job: str, use: tuple[r.FileKind, str, int], need: int) -> None:
        """Give up free files that were last of a use (kind, owner, part) that now needs more."""
        for h in self:
            small = h.attempt is None and h.job == job and h.capacity < need
            if small and (h.kind, h.owner, h.part) == use:
                self._remove(h)

    def _give_back_idle(self) -> None:
        """Free files that nobody wanted for long: a node that came or went changes who holds what,
        and no node should keep the most that it ever needed."""
        self._takes += 1
        for h in self:
            if h.attempt is None and self._takes - h.freed_at > IDLE_TAKES:
                self._remove(h)

    def _mine(self, held: Held) -> bool:
        """Does this handle still stand for its file? A file that was reused has a new one."""
        return self._files.get(held.file) is held

    def _reusable(self, want: Want, need: int) -> Held | None:
        fit = [
            h
            for h in self
            if h.attempt is None and h.job == want.attempt.job and need <= h.capacity <= 2 * need
        ]

        def loss(h: Held) -> tuple[bool, bool, int, str]:
            """A file goes back to its use, so that those of unlike size do not change places."""
            other = (h.owner, h.part) != (want.owner, want.part)
            return h.kind is not want.kind, other, h.capacity, h.file

        best = min(fit, key=loss, default=None)
        if best is not None:
            del self._files[best.file]
        return best

    async def _reserve(self, name: str, capacity: int) -> None:
        while True:
            try:
                return await self._arena.reserve(name, capacity)
            except NoRoom:
                free = [h for h in self if h.attempt is None]
                if not free:
                    raise
                self._remove(min(free, key=lambda h: (h.capacity, h.file)))

    async def reserve_page(self, name: str, capacity: int) -> None:
        """A file that is no slot and no shard, and goes with this start of the agent; free files
        are given up for it. Raises NoRoom."""
        await self._reserve(name, capacity)

    def seal(self, held: Held, length: int, manifest_digest: str) -> None:
        """The bytes are whole and verified; its writer is done. The digest may come later."""
        if not self._mine(held) or held.attempt is None or not 0 <= length <= held.capacity:
            raise UsageError(f"{held.file}: seal of {length} bytes, capacity {held.capacity}")
        held.length, held.manifest_digest, held.whole, held.writer = (
            length,
            manifest_digest,
            True,
            None,
        )
        held.bad = held.doubted = False
        if not held.doomed:
            self._arena.put_record(held.file, held.record())
        self._settle(held)

    def writer_done(self, held: Held) -> None:
        """Its writer stopped without finishing, or is proven dead."""
        if self._mine(held):
            held.writer = None
            self._settle(held)

    def written_by(self, writer: object) -> list[Held]:
        """Files that a writer may still be writing."""
        return [h for h in self if h.writer == writer]

    def release(self, held: Held) -> None:
        """Its attempt is settled: free it, at once or when its writer is done."""
        if self._mine(held):
            held.doomed = True
            self._settle(held)

    def _settle(self, held: Held) -> None:
        if held.doomed and held.writer is None:
            self._leave(held)
            held.whole, held.doomed, held.length = False, False, 0
            held.freed_at = self._takes

    def _leave(self, held: Held) -> None:
        if held.attempt is not None:
            files = self._by_attempt[held.attempt]
            del files[held.file]
            if not files:
                del self._by_attempt[held.attempt]
            held.attempt = None

    def discard(self, held: Held) -> None:
        """A file that is known to be bad goes, record first, with the pages that it lay in."""
        if self._mine(held) and held.bad and held.attempt is not None and held.writer is None:
            held.whole = False
            self._arena.put_record(held.file, held.record())
            self._leave(held)
            self._remove(held)

    def drop_free(self, job: str) -> None:
        """Give the free files of a job back to the node."""
        for held in self:
            if held.attempt is None and held.job == job:
                self._remove(held)

    def reopen(self, held: Held, writer: object) -> None:
        """Bytes of a WHOLE file are to be written again in place."""
        if not self._mine(held) or held.attempt is None:
            raise UsageError(f"{held.file}: was given to another attempt meanwhile")
        held.whole, held.writer = False, writer
        self._arena.put_record(held.file, held.record())

    def sweep_documents(self) -> None:
        """Remove manifests that no file refers to."""
        wanted = {document_name(h.manifest_digest) for h in self if h.attempt is not None}
        for name in sorted(self._arena.documents()):
            if name.startswith("manifest-") and name not in wanted:
                self._arena.remove(name)

    def _remove(self, held: Held) -> None:
        self._arena.remove(held.file)
        del self._files[held.file]

    def region(self, held: Held, offset: int = 0, length: int | None = None) -> Region:
        """A part of the file, the written part by default. Raises UsageError if out of range."""
        length = held.length - offset if length is None else length
        if min(offset, length) < 0 or offset + length > held.capacity:
            raise UsageError(
                f"{held.file}: range {offset}+{length} is outside its {held.capacity} bytes"
            )
        return Region(held.file, offset, length)

    def view(self, held: Held, offset: int = 0, length: int | None = None) -> memoryview:
        """The bytes of `region`."""
        return self._arena.view(self.region(held, offset, length))
