"""What is wrong or gone here is mended: the wounds that the scrubber, or a look, found.

A *wound* is a piece of a kept step that should be here and is wrong or gone: one more erasure. An
own copy is fetched anew from peers, and so is a manifest beside the bytes; a shard of the newest
step is left to repair, whose node is told to look, and one of an older step is made anew here. The
bad file goes when that is done, or before if one more node may be lost without it. A file of the
newest step that should be here and is not (the agent restarted without it) is a wound as well.

Contract: nothing is persisted; what is told counts from the start of this agent. While a file is
bad, pieces of it that are right can still be asked for by who knows of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.bringing import bring, fetching
from p2pckpt.agent.context import Home, JobContext
from p2pckpt.agent.deciding import ask_all, copied_groups, groups_of
from p2pckpt.agent.holdings import Held, document_name
from p2pckpt.agent.rebuilding import rebuild_shard
from p2pckpt.agent.repair import decide_repair
from p2pckpt.errors import CheckpointError, NoRoom
from p2pckpt.restore.fetch import Fetching, fetch_manifest
from p2pckpt.restore.locate import Facts, Sources, sources_of
from p2pckpt.wire import pack

LOOK_EVERY_S, LOOK_AGAIN_S = 30.0, 5.0
"""For what is gone; while there are wounds."""

AGAIN_S, AGAIN_AT_MOST_S = 5.0, 60.0
"""Between two tries to mend a wound: twice as long each time, up to so much."""

TELL_EVERY_S = 60.0
"""The node that repairs is told again; it goes on by itself, so its word may have been lost."""

PATIENCE_S = 10.0
"""A wound waits so long for saves to end: the next commit places everything anew."""


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
class Mending:
    """The wounds of one agent. ``busy``: is a save or a restore in flight here?
    ``read_anew``: what a manifest describes is to be read, as the manifest was not to be trusted.
    """

    home: Home
    jobs: Mapping[str, HasContext]
    busy: Callable[[], bool]
    read_anew: Callable[[str], None]
    wounds: dict[Piece, Wound] = field(default_factory=dict)
    found: int = 0
    mended: int = 0
    _expected: dict[str, tuple[r.Attempt, tuple[Piece, ...]]] = field(default_factory=dict)
    _healed: set[Piece] = field(default_factory=set)
    _noted: asyncio.Event = field(default_factory=asyncio.Event)

    async def loop(self) -> None:
        """For ever."""
        while True:
            self._noted.clear()
            try:
                self._look_for_lost()
                await self._heal()
            except CheckpointError as e:
                self.home.doors.notes("scrub_later", {"why": f"{type(e).__name__}: {e}"})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S if self.wounds else LOOK_EVERY_S):
                    await self._noted.wait()

    def note(self, ctx: JobContext, piece: Piece, held: Held | None, why: str) -> None:
        """One more wound, if it is not known."""
        if piece in self.wounds:
            return
        self.found += 1
        self.wounds[piece] = Wound(ctx, piece, held, self.home.now())
        self._noted.set()
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
                    self.note(job.ctx, piece, None, why="it is not here any more")

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
            ctx.tell_lost()  # who repairs the share may be this node again
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
        self.read_anew(digest)
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
        this node has another one of the share in its place (with too few hosts for all). Of an
        older step, which nobody repairs, it is made anew here."""
        ctx, piece = wound.ctx, wound.piece
        commit = ctx.state.committed(piece.attempt)
        if commit is None:
            return False
        members = (await self.home.living()).members
        answers, _ = await ask_all(ctx, w.HeldQuery(ctx.job, piece.attempt))
        sources = sources_of(share, piece.attempt, Facts(ctx.state, answers, (), {}, False))
        if ctx.state.latest() != commit:
            if piece.part not in sources.shards:
                await rebuild_shard(ctx, piece.attempt, share, piece.part)
                ctx.track(piece.attempt)  # it may have been retired meanwhile
            return True
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
            ctx.tell_lost()
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
