"""What this node holds is read again, again and again, and what is wrong or gone is mended.

A bit that flips in RAM is found today only when somebody restores. So every file of a kept step
is read against its manifest within `scrub_period_s`: the one that was read longest ago first, in
parts, slowly, and not while a save or a restore is in flight, unless the period would be missed;
one that repair stumbled over at once.
A save or a receipt reads all bytes, so a file counts as read when it becomes WHOLE; a job that
saves more often than that costs nothing here.

A file with a wrong byte is an erasure (a *wound*): it is not listed as held any more. An own copy
is fetched anew from peers, and so is a manifest beside the bytes; a shard of the newest step is
left to repair, whose node is told to look. The bad file goes when that is done, or before if one
more node may be lost without it. A file of the newest step that should be here and is not (the
agent restarted without it) is a wound as well.

Contract: nothing is persisted; what is told counts from the start of this agent. `next_file` is
pure. While the file is bad, pieces of it that are right can still be asked for by who knows of it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.bringing import bring, fetching
from p2pckpt.agent.context import Home, JobContext
from p2pckpt.agent.deciding import ask_all, copied_groups, groups_of
from p2pckpt.agent.holdings import Held, document_name
from p2pckpt.agent.repair import decide_repair
from p2pckpt.agent.rereading import Part, bad_in_part, parts_of
from p2pckpt.errors import CheckpointError, IntegrityError, NoRoom
from p2pckpt.restore.fetch import Fetching, fetch_manifest
from p2pckpt.restore.locate import Facts, Sources, sources_of
from p2pckpt.restore.verify import open_manifest
from p2pckpt.wire import pack

LOOK_EVERY_S = 5.0
PAUSE_S = 1.0
"""While a save or a restore is in flight; then it is looked whether it still is."""

AGAIN_S, AGAIN_AT_MOST_S = 5.0, 60.0
"""Between two tries to mend a wound: twice as long each time, up to so much."""

TELL_EVERY_S = 60.0
"""The node that repairs is told again; it goes on by itself, so its word may have been lost."""

PATIENCE_S = 10.0
"""A wound waits so long for saves to end: the next commit places everything anew."""

DUE = 1 / 3
URGENT = 5 / 6
"""Parts of the period: a file is read again after the first, and, whatever is in flight, after the
second. All that is held is read in half a period, so nothing gets older than a whole one."""

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


class HasContext(Protocol):
    """A job on this node."""

    ctx: JobContext


@dataclass(frozen=True)
class Piece:
    """What is, or should be, here: ``what`` is a FileKind, or "manifest" with part 0."""

    attempt: r.Attempt
    what: str
    part: int
    owner: str
    digest: str


@dataclass
class Wound:
    """A piece that is wrong or gone; ``held``: the bad file, as long as it is there."""

    ctx: JobContext
    piece: Piece
    held: Held | None
    since: float
    again_at: float = 0.0
    pause_s: float = AGAIN_S
    told_at: float = -math.inf


@dataclass
class Scrubbing:
    """The re-reading of one agent. ``busy``: is a save or a restore in flight here?"""

    home: Home
    jobs: Mapping[str, HasContext]
    busy: Callable[[], bool]
    wounds: dict[Piece, Wound] = field(default_factory=dict)
    bytes: int = 0
    found: int = 0
    mended: int = 0
    _read_at: dict[Key, float] = field(default_factory=dict)
    _expected: dict[str, tuple[r.Attempt, tuple[Piece, ...]]] = field(default_factory=dict)
    _healed: set[Piece] = field(default_factory=set)
    _started_at: float = 0.0

    async def loop(self) -> None:
        """For ever."""
        self._started_at = self.home.now()
        self._read_at = dict.fromkeys(self._whole(), -math.inf)  # adopted: nobody knows when
        while True:
            try:
                self._look_for_lost()
                await self._heal()
                due = next_file(self._ages(), self._period_s, self.busy())
                if due is not None:
                    await self._reread(due)
                    continue
            except CheckpointError as e:
                self.home.doors.notes("scrub_later", {"why": f"{type(e).__name__}: {e}"})
            await asyncio.sleep(LOOK_EVERY_S)

    def shown(self) -> dict[str, Any]:
        """For the status document. ``last_pass_s``: all that is held was read within so long; null
        until this agent has read all that it found at its start."""
        kept = self._kept()
        oldest = min((self._read_at.get(key, -math.inf) for key in kept), default=self.home.now())
        return {
            "period_s": self._period_s,
            "last_pass_s": None if oldest == -math.inf else round(self.home.now() - oldest, 3),
            "bytes": self.bytes,
            "found": self.found,
            "mended": self.mended,
            "open": len(self.wounds),
        }

    # -- reading ----------------------------------------------------------------------------------

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

    async def _reread(self, key: Key) -> None:
        """One file, in parts, as slowly as the period allows."""
        held = self._kept().get(key)
        if held is None or held.attempt is None:
            return
        ctx, begun, period_s = self.jobs[held.job].ctx, self.home.now(), self._period_s
        manifest = await self._manifest(ctx, held)
        if manifest is None:
            self._read_at[key] = begun
            return
        for part in parts_of(manifest, held.kind, held.part):
            while self.busy() and self._age(key) < URGENT * period_s and not held.doubted:
                await asyncio.sleep(PAUSE_S)
            if key not in self._whole():
                return
            wrong = await bad_in_part(self.home, held, manifest, part)
            if key not in self._whole():  # it was given to others meanwhile
                return
            self.bytes += part.length
            if wrong:
                self._wound(ctx, held, part, wrong)
                return
            spare = 1.0 if self._age(key) >= URGENT * period_s else self.home.governing.level
            await asyncio.sleep(part.length / self._bytes_per_s() / spare)
        self._read_at[key], held.doubted = begun, False

    def _bytes_per_s(self) -> float:
        total = sum(held.length for held in self._whole().values())
        return max(SLOWEST_BYTES_PER_S, 2 * total / self._period_s)

    async def _manifest(self, ctx: JobContext, held: Held) -> r.Manifest | None:
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
            self._note_wound(ctx, piece, None, why=str(e))
            return None

    # -- wounds -----------------------------------------------------------------------------------

    def _wound(self, ctx: JobContext, held: Held, part: Part, wrong: list[int]) -> None:
        assert held.attempt is not None
        held.bad = True
        piece = Piece(held.attempt, held.kind, held.part, held.owner, held.manifest_digest)
        why = f"rank {part.rank}, shard {part.shard}: {len(wrong)} wrong chunks, {wrong[:5]}"
        self._note_wound(ctx, piece, held, why=why)

    def _note_wound(self, ctx: JobContext, piece: Piece, held: Held | None, why: str) -> None:
        if piece in self.wounds:
            return
        self.found += 1
        self.wounds[piece] = Wound(ctx, piece, held, self.home.now())
        facts = {"step": piece.attempt.step, "kind": piece.what, "part": piece.part}
        ctx.note("scrub_found", **facts, owner=piece.owner, why=why)

    def _look_for_lost(self) -> None:
        """Files of the newest step that the records say are here."""
        if self.busy():
            return
        for job in list(self.jobs.values()):
            for piece in self._should_be_here(job.ctx):
                kind, owner = r.FileKind(piece.what), piece.owner
                is_shard = kind is r.FileKind.SHARD
                found = self.home.holdings.find(
                    piece.attempt, kind, piece.part, owner if is_shard else None
                )
                gone = found is None or found.manifest_digest != piece.digest
                if gone and piece not in self._healed:
                    self._note_wound(job.ctx, piece, None, why="it is not here any more")

    def _should_be_here(self, ctx: JobContext) -> tuple[Piece, ...]:
        """By the copy of the newest step's records beside the bytes."""
        commit = ctx.state.latest()
        if commit is None or ctx.frozen or not _stands(ctx, commit.attempt):
            return ()
        attempt, store_id = commit.attempt, self.home.doors.arena.store_id
        known = self._expected.get(ctx.job)
        if known is not None and known[0] == attempt:
            return known[1]
        groups = copied_groups(ctx, attempt)
        pieces = []
        for share in (share for group in groups for share in group.shares):
            digest, owner = share.manifest_digest, share.node
            if share.store_id == store_id:
                slot = r.FileKind.SLOT
                pieces += [Piece(attempt, slot, rank, owner, digest) for rank in share.ranks]
            for i, holder in enumerate(share.holders):
                if holder == store_id:
                    pieces.append(Piece(attempt, r.FileKind.SHARD, i, owner, digest))
        if groups:
            self._expected[ctx.job] = (attempt, tuple(pieces))
            mine = {p for p in self._healed if p.attempt.job == ctx.job and p.attempt != attempt}
            self._healed -= mine
        return tuple(pieces)

    async def _heal(self) -> None:
        """Each wound that is due once; it is over when the piece is right again, or not needed."""
        now, busy = self.home.now(), self.busy()
        for piece, wound in list(self.wounds.items()):
            ctx = wound.ctx
            if ctx.following and not ctx.frozen and not _stands(ctx, piece.attempt):
                del self.wounds[piece]  # its step goes, and the bad file with it
                continue
            if now < wound.again_at or (busy and now - wound.since < PATIENCE_S):
                continue
            wound.again_at = now + wound.pause_s
            wound.pause_s = min(AGAIN_AT_MOST_S, 2 * wound.pause_s)
            try:
                if not await self._heal_one(wound):
                    continue
            except CheckpointError as e:
                ctx.note("scrub_later", step=piece.attempt.step, why=f"{type(e).__name__}: {e}")
                continue
            if wound.held is not None:
                self.home.holdings.discard(wound.held)
            del self.wounds[piece]
            self.mended += 1
            if piece.what == r.FileKind.SHARD:  # perhaps it is elsewhere now
                self._healed.add(piece)
            facts = {"step": piece.attempt.step, "kind": piece.what, "part": piece.part}
            ctx.note("scrub_mended", **facts, owner=piece.owner)

    async def _heal_one(self, wound: Wound) -> bool:
        """Is the piece right again, here or, for a shard, anywhere?"""
        ctx, piece = wound.ctx, wound.piece
        groups = copied_groups(ctx, piece.attempt) or await groups_of(ctx, piece.attempt)
        shares = (share for group in groups for share in group.shares)
        share = next((s for s in shares if s.manifest_digest == piece.digest), None)
        if share is None:
            return False
        match piece.what:
            case "manifest":
                return await self._fetch_manifest(wound, share)
            case r.FileKind.SLOT:
                return await self._fetch_slot(wound, share)
        return await self._have_repaired(wound, share)

    async def _fetch_manifest(self, wound: Wound, share: r.SealedShare) -> bool:
        """A right copy from others; the bytes that it describes are read with it next."""
        job = await fetching(wound.ctx, wound.piece.attempt, share, share.ranks[0])
        manifest = await fetch_manifest(job)
        digest = wound.piece.digest
        self.home.doors.arena.put_document(document_name(digest), pack(manifest))
        self._read_at |= {key: -math.inf for key in self._read_at if key[2] == digest}
        self.home.holdings.sweep_documents()  # of a step that was retired meanwhile
        return True

    async def _fetch_slot(self, wound: Wound, share: r.SealedShare) -> bool:
        """The own copy from others; from the bad file what of it is right and nobody else has."""
        ctx, piece, holdings = wound.ctx, wound.piece, self.home.holdings
        found = holdings.find(piece.attempt, r.FileKind.SLOT, piece.part)
        if found is not None and not found.bad and found.manifest_digest == piece.digest:
            return True
        job = await fetching(ctx, piece.attempt, share, piece.part)
        if wound.held is not None:
            job.sources = _with_own(job, self.home.node)
        try:
            await bring(self.home, job, r.FileKind.SLOT)
        except NoRoom:
            commit = ctx.state.committed(piece.attempt)
            spare = len(job.sources.shards) - commit.layout.k if commit else 0
            if wound.held is None or spare < 1:
                raise
            holdings.discard(wound.held)  # the others can lose one more
            wound.held = None
            job = await fetching(ctx, piece.attempt, share, piece.part)
            await bring(self.home, job, r.FileKind.SLOT)
        ctx.track(piece.attempt)  # it may have been retired while the bytes came
        return True

    async def _have_repaired(self, wound: Wound, share: r.SealedShare) -> bool:
        """Tell the node that repairs the share; True when the shard is somewhere else, or anew, or
        this node has another one of the share in its place (with too few hosts for all)."""
        ctx, piece = wound.ctx, wound.piece
        commit = ctx.state.latest()
        if commit is None or commit.attempt != piece.attempt:
            return False  # only the newest step is repaired; this one goes
        members = (await self.home.living()).members
        answers, _ = await ask_all(ctx, w.HeldQuery(ctx.job, piece.attempt))
        sources = sources_of(share, piece.attempt, Facts(ctx.state, answers, (), {}, False))
        repair = decide_repair(share, sources, sorted(members), commit.layout)
        if repair is None or piece.part not in repair.missing:
            return piece.part in sources.shards
        here, now = self.home.node, self.home.now()
        if any(here in nodes for nodes in sources.shards.values()):
            return True
        if repair.spare >= 1 and wound.held is not None:
            self.home.holdings.discard(wound.held)
            wound.held = None
        if now - wound.told_at < TELL_EVERY_S:
            return False
        if repair.by == here:
            ctx.losses += 1
        else:
            address, timeout_s = members[repair.by].peers_address, self.home.config.peer_timeout_s
            await self.home.doors.peers.call(address, w.LookAgain(piece.attempt), timeout_s)
        wound.told_at = now
        return False


def _stands(ctx: JobContext, attempt: r.Attempt) -> bool:
    """Is it committed in RAM, and not to be freed?"""
    return ctx.state.committed(attempt) is not None and not ctx.state.settled(attempt)


def _with_own(job: Fetching, node: str) -> Sources:
    """The sources with this node's own file, which is not listed, as the last of them."""
    nodes = (*job.sources.slots.get(job.rank, ()), node)
    return Sources({**job.sources.slots, job.rank: nodes}, job.sources.shards)
