"""What this node holds is read again, again and again, before anybody needs it.

A bit that flips in RAM is found today only when somebody restores. So every file of a kept step
is read against its manifest within `scrub_period_s`: the one that was read longest ago first, in
parts, slowly, and not while a save or a restore is in flight, unless the period would be missed;
one that repair stumbled over at once. A save or a receipt reads all bytes, so a file counts as read
when it becomes WHOLE; a job that saves more often than that costs nothing here.

    ages and sizes -> next_file    which one, if any
                   -> needed       how fast at least -+
                      level of the governor ----------+-> how fast

Reading takes no network, but cores and memory: while training is slowed by what goes on beside it,
it goes as slowly as the period allows. A file with a wrong byte is an erasure, a *wound*: it is not
listed as held any more, and `mending.py` mends it.

Contract: nothing is persisted; what is told counts from the start of this agent. `next_file` and
`needed_bytes_s` are pure. Who reads at `needed_bytes_s` is never late; if it is late, status says
by how much.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from p2pckpt import records as r
from p2pckpt.agent.context import Home, JobContext
from p2pckpt.agent.holdings import Held, document_name
from p2pckpt.agent.mending import HasContext, Mending, Piece
from p2pckpt.agent.rereading import Part, bad_in_part, parts_of
from p2pckpt.errors import CheckpointError, IntegrityError
from p2pckpt.restore.verify import open_manifest
from p2pckpt.traffic import Traffic

LOOK_EVERY_S = 30.0
LOOKS = 100
"""In a period, if that is more often."""

PAUSE_S = 1.0
"""While a save or a restore is in flight; then it is looked whether it still is."""

DUE = 1 / 3
URGENT = 5 / 6
"""Parts of the period: a file is read again after the first, and, whatever is in flight, after the
second. Beside training that does not mind all that is held is read in half a period."""

SLOWEST_BYTES_PER_S = 4 * 1024 * 1024

K = TypeVar("K", bound=Hashable)
Key = tuple[str, str, str]
"""File, attempt, manifest digest: the same bytes as long as all three stay."""


def next_file(ages_s: Mapping[K, float], period_s: float, busy: bool) -> K | None:
    """What was read longest ago, if it is due. ``busy``: a save or a restore is in flight."""
    oldest = max(ages_s, key=lambda key: ages_s[key], default=None)
    if oldest is None or period_s <= 0:
        return None
    return oldest if ages_s[oldest] >= period_s * (URGENT if busy else DUE) else None


def needed_bytes_s(files: Iterable[tuple[float, int]], period_s: float, held_bytes: int) -> float:
    """Reading so fast, oldest first, nothing gets older than the period. ``files``: age in seconds
    and bytes to read of each.

    For each file, what is to be read until it is, in the time that it has left: the most of these
    (earliest deadline first: Liu and Layland, JACM 20, 1973). At most what reads ``held_bytes``,
    all that is held, in the last part of a period, for what is late already is late.
    """
    read, needed = 0, 0.0
    for age_s, length in sorted(files, reverse=True):
        read += length
        needed = max(needed, read / (period_s - age_s) if age_s < period_s else math.inf)
    return min(needed, held_bytes / (period_s * (1 - URGENT)))


@dataclass
class Scrubbing:
    """The re-reading of one agent. ``busy``: is a save or a restore in flight here?"""

    home: Home
    jobs: Mapping[str, HasContext]
    busy: Callable[[], bool]
    bytes: int = 0
    mending: Mending = field(init=False)
    _read_at: dict[Key, float] = field(default_factory=dict)
    _started_at: float = 0.0

    def __post_init__(self) -> None:
        self.mending = Mending(self.home, self.jobs, self.busy, self._read_anew)

    async def loop(self) -> None:
        """For ever."""
        self._started_at = self.home.now()
        self._read_at = dict.fromkeys(self._whole(), -math.inf)  # adopted: nobody knows when
        while True:
            try:
                due = next_file(self._ages(), self._period_s, self.busy())
                if due is not None:
                    await self._reread(due)
                    continue
            except CheckpointError as e:
                self.home.doors.notes("scrub_later", {"why": f"{type(e).__name__}: {e}"})
            look_s = self._period_s / LOOKS or LOOK_EVERY_S
            await asyncio.sleep(min(LOOK_EVERY_S, look_s))

    def shown(self) -> dict[str, Any]:
        """For the status document. ``last_pass_s``: all that is held was read within so long; null
        until this agent has read all that it found at its start. ``late_s``: by so much the oldest
        is older than the period allows. ``bytes_s``: how fast it reads, or would."""
        kept, now = self._kept(), self.home.now()
        oldest = min((self._read_at.get(key, -math.inf) for key in kept), default=now)
        late_s = max((self._age(key) for key in kept), default=0.0) - self._period_s
        return {
            "period_s": self._period_s,
            "last_pass_s": None if oldest == -math.inf else round(now - oldest, 3),
            "late_s": round(max(0.0, late_s), 3) if self._period_s else 0.0,
            "bytes": self.bytes,
            "bytes_s": round(self._bytes_per_s()) if self._period_s else 0,
            "found": self.mending.found,
            "mended": self.mending.mended,
            "open": len(self.mending.wounds),
        }

    @property
    def _period_s(self) -> float:
        return self.home.config.scrub_period_s

    def _whole(self) -> dict[Key, Held]:
        """Files that can be read against a manifest."""
        return {
            (h.file, h.attempt.key, h.manifest_digest): h
            for h in self.home.holdings
            if h.whole and h.attempt is not None and h.manifest_digest and not h.bad
        }

    def _kept(self) -> dict[Key, Held]:
        """Those of committed steps; from now on others are followed as just written."""
        whole, now = self._whole(), self.home.now()
        self._read_at = {key: self._read_at.get(key, now) for key in whole}
        return {key: held for key, held in whole.items() if self._commit_of(held) is not None}

    def _commit_of(self, held: Held) -> r.Commit | None:
        job = self.jobs.get(held.job)
        if job is None or held.attempt is None:
            return None
        return job.ctx.state.committed(held.attempt)

    def _age(self, key: Key) -> float:
        """What was adopted is due at once, but not urgent."""
        start = self._started_at - DUE * self._period_s
        return self.home.now() - max(self._read_at.get(key, -math.inf), start)

    def _ages(self) -> dict[Key, float]:
        kept = self._kept().items()
        return {key: math.inf if held.doubted else self._age(key) for key, held in kept}

    def _read_anew(self, digest: str) -> None:
        self._read_at |= {key: -math.inf for key in self._read_at if key[2] == digest}

    async def _reread(self, key: Key) -> None:
        """One file, in parts; given up for one that is doubted."""
        held = self._kept().get(key)
        if held is None or held.attempt is None:
            return
        ctx, begun, done = self.jobs[held.job].ctx, self.home.now(), 0
        manifest = self._manifest(ctx, held)
        if manifest is None:  # who mends that has it read anew; were it due now, nobody else ran
            self._read_at[key], held.doubted = begun, False
            return
        for part in parts_of(manifest, held.kind, held.part):
            while self.busy() and self._age(key) < URGENT * self._period_s and not held.doubted:
                await asyncio.sleep(PAUSE_S)
            if key not in self._whole():
                return
            if not held.doubted and any(other.doubted for other in self._kept().values()):
                return
            part_begun = self.home.now()
            with self.home.governing.moving(Traffic.SCRUB):
                wrong = await bad_in_part(self.home, held, manifest, part)
            if key not in self._whole():  # it was given to others meanwhile
                return
            self.bytes, done = self.bytes + part.length, done + part.length
            if wrong:
                self._wound(ctx, held, part, wrong)
                return
            next_at = part_begun + part.length / self._bytes_per_s({key: done})
            await asyncio.sleep(max(0.0, next_at - self.home.now()))
        self._read_at[key], held.doubted = begun, False

    def _bytes_per_s(self, done: Mapping[Key, int] | None = None) -> float:
        """How fast to read, when so much of some files is. What may go slower is what is beyond
        the need."""
        done, kept, period_s = done or {}, self._kept(), self._period_s
        left = [(self._age(key), held.length - done.get(key, 0)) for key, held in kept.items()]
        total = sum(held.length for held in kept.values())
        usual = max(SLOWEST_BYTES_PER_S, 2 * total / period_s)
        return self.home.governing.reading_bytes_s(usual, needed_bytes_s(left, period_s, total))

    def _manifest(self, ctx: JobContext, held: Held) -> r.Manifest | None:
        """The manifest beside a file; a wrong one is a wound of its own."""
        assert held.attempt is not None
        digest = held.manifest_digest
        packed = self.home.doors.arena.document(document_name(digest))
        try:
            if packed is None:
                raise IntegrityError(f"manifest {digest[:12]} is not beside its bytes")
            return open_manifest(packed, digest)
        except CheckpointError as e:
            piece = Piece(held.attempt, "manifest", 0, held.owner, digest)
            self.mending.note(ctx, piece, None, why=str(e))
            return None

    def _wound(self, ctx: JobContext, held: Held, part: Part, wrong: list[int]) -> None:
        assert held.attempt is not None
        held.bad = True
        piece = Piece(held.attempt, held.kind, held.part, held.owner, held.manifest_digest)
        why = f"rank {part.rank}, shard {part.shard}: {len(wrong)} wrong chunks, {wrong[:5]}"
        self.mending.note(ctx, piece, held, why=why)
