"""Redundancy that was lost comes back: missing shards of the newest committed step.

When a store that a share was recorded with is gone for good, one node rebuilds what is missing: a
node that has the share's own copies, else the living holder of its lowest shard, which first brings
the copies back from the others. It re-encodes, and puts each missing shard on a node that the
placement rules allow, by the same offer and receipt as a save. With too few hosts it goes as far as
they allow, and tries again when the membership changes.

A node looks at the shares of which it holds bytes itself, as only such a node ever mends a share;
it asks those whom the record names, and everybody before it mends one or if it must.

Contract: `decide_repair` is pure. Only a committed step is repaired, against its recorded manifest:
what is put has the digest that the group record names, so two repairers at once waste work and
break nothing. What is held is asked of the stores themselves, never recomputed. At once when
nothing more may be lost or no save is under way, else after a while, as a new save heals it anyway.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.bringing import bring, fetching
from p2pckpt.agent.closing import restore_first
from p2pckpt.agent.context import JobContext
from p2pckpt.agent.deciding import ask, ask_all, groups_of
from p2pckpt.agent.holdings import Held, Want, document_name
from p2pckpt.errors import CheckpointError, IntegrityError, Refused
from p2pckpt.ports import Region
from p2pckpt.restore.locate import Facts, Sources, sources_of
from p2pckpt.restore.verify import open_manifest
from p2pckpt.save.encode import encode_rank
from p2pckpt.save.send import Crew, EncodedShare, crew_of, send_shard, substitute
from p2pckpt.traffic import Traffic
from p2pckpt.wire import pack

LOOK_EVERY_S = 1.0
AGAIN_S = 30.0
"""After a look that found no place for some shard, or no answer, while nobody came or went."""

PATIENCE_S = 10.0
"""While saves go on: the next commit places everything anew and mostly makes repair needless."""


@dataclass(frozen=True)
class Repair:
    """One share to repair: who does it, which shards, and how many more losses it survives now."""

    share: r.SealedShare
    by: str
    missing: tuple[int, ...]
    bring: bool
    spare: int


def decide_repair(
    share: r.SealedShare, sources: Sources, living: Sequence[str], layout: r.Layout
) -> Repair | None:
    """What one share lacks, and who mends it. None: nothing is missing, or nothing can be done.

    A shard on the node that has the own copy counts as missing: one loss would take both.
    """
    named = {n for nodes in (*sources.slots.values(), *sources.shards.values()) for n in nodes}
    order = [n for n in living if n in named]
    owners = (n for n in order if all(n in sources.slots.get(k, ()) for k in share.ranks))
    owner = next(owners, "")
    held = {
        i: [n for n in order if n in sources.shards.get(i, ()) and n != owner]
        for i in range(layout.shards)
    }
    missing = tuple(i for i, nodes in held.items() if not nodes)
    present = [i for i, nodes in held.items() if nodes]
    if not missing and owner:
        return None
    if not owner and len(present) < layout.k:
        return None
    by = owner or held[present[0]][0]
    spare = len(present) - layout.k + (1 if owner else 0)
    return Repair(share, by, missing, not owner, spare)


def has_enough(share: r.SealedShare, sources: Sources, living: Container[str], k: int) -> bool:
    """Can the share be had from living nodes?"""
    held = [i for i, nodes in sources.shards.items() if any(n in living for n in nodes)]
    own = all(any(n in living for n in sources.slots.get(rank, ())) for rank in share.ranks)
    return own or len(held) >= k


@dataclass
class Repairing:
    """The repairs of one job on this node."""

    ctx: JobContext
    looked: tuple[object, ...] = ()
    losses: int = -1
    """`JobContext.losses` when last looked at; -1: whatever was before this life is not known."""
    members: Mapping[str, r.Member] | None = None
    stores: dict[str, str] = field(default_factory=dict)
    """Node by store of `members`."""
    since: tuple[r.Attempt | None, float] = (None, 0.0)
    """The newest step, and when this node first saw that it is."""
    again_at: float = math.inf
    noticed_at: float | None = None
    absent_since: dict[str, float] = field(default_factory=dict)

    async def loop(self) -> None:
        """For ever: look, and mend what is this node's to mend; rest until something changes."""
        waiting, rest_s = self.ctx.waiting, self.ctx.home.config.keepalive_s
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            wakes = waiting.wakes
            try:
                if await self.look():
                    await waiting.changed(wakes, rest_s)
            except CheckpointError as e:
                self.ctx.note("repair_later", why=f"{type(e).__name__}: {e}")

    async def look(self) -> bool:
        """One look at the newest committed step. True: nothing is to be done until something
        changes."""
        ctx, config = self.ctx, self.ctx.home.config
        commit = ctx.state.latest()
        held = ctx.home.holdings.of_attempt(commit.attempt) if commit is not None else []
        if commit is None or not held:
            return False
        members = (await ctx.home.living(config.keepalive_s)).members
        if members is not self.members:  # mostly nobody came or went
            self.members, self.stores = members, {m.store_id: n for n, m in members.items()}
        # What is here counts: a copy that a restore brings may make this node the one that mends.
        here, losses = {h.file for h in held if h.whole}, ctx.losses
        picture = (commit.attempt, losses, self.stores, here)
        if picture == self.looked and ctx.home.now() < self.again_at:
            return self.again_at == math.inf
        if (concerned := await self._concerned(commit)) is None:
            return False
        if self._still_within_grace(concerned):
            return False
        lacking = [s for s in concerned if not {s.store_id, *s.holders} <= self.stores.keys()]
        lacking = concerned if losses != self.losses else lacking
        answers, silent = await self._ask(commit, lacking, members)
        mute, repairs = silent, self._repairs(commit, lacking, answers, members)
        mine = any(found.by == ctx.home.node for found in repairs)
        if mine and len(answers) + len(silent) < len(members) and self._due(repairs):
            # An earlier repair, of a node that is gone, may have put shards where no record says.
            answers, mute = await ask_all(ctx, w.HeldQuery(ctx.job, commit.attempt))
            silent = [n for n in silent if n in mute]  # others get nothing, and hold nothing up
            repairs = self._repairs(commit, lacking, answers, members)
        if not repairs:
            return self._rest(picture, losses, not mute)
        if not self._due(repairs) or (silent and min(found.spare for found in repairs) > 0):
            return False  # a silent agent that keeps its lease may only be slow: not lost yet
        whole = True
        for repair in sorted(repairs, key=lambda found: (found.spare, found.share.node)):
            if repair.by == ctx.home.node:
                facts = Facts(ctx.state, answers, (), {}, False)
                sources = sources_of(repair.share, commit.attempt, facts)
                with ctx.home.doors.telemetry.stage("repair"):
                    heard = {n: m for n, m in members.items() if n not in mute}
                    whole &= await self.mend(commit, repair, sources, heard)
        return self._rest(picture, losses, whole and not mute)

    def _rest(self, picture: tuple[object, ...], losses: int, whole: bool) -> bool:
        """Nothing more is done now. Not ``whole``: a shard found no place, or who was asked for it
        did not answer; then it is looked again later, or at once when somebody comes or goes."""
        again_s = math.inf if whole else AGAIN_S
        self.looked, self.again_at, self.noticed_at = picture, self.ctx.home.now() + again_s, None
        self.losses = losses if whole else self.losses
        return whole

    async def _concerned(self, commit: r.Commit) -> list[r.SealedShare] | None:
        """The shares of which this node holds anything; None: not to be known yet."""
        ctx, now = self.ctx, self.ctx.home.now()
        if self.since[0] != commit.attempt:
            self.since = (commit.attempt, now)
            ctx.elsewhere = {known for known in ctx.elsewhere if known[0] == commit.attempt}
        if ctx.groups is not None and ctx.groups[0] == commit.attempt:
            groups = ctx.groups[1]
        elif now - self.since[1] < ctx.home.config.ledger_timeout_s and ctx.uncopied():
            return None  # who keeps the copies is about to read them
        else:
            groups = await groups_of(ctx, commit.attempt)
        held = {h.manifest_digest for h in ctx.home.holdings.of_attempt(commit.attempt)}
        return [s for group in groups for s in group.shares if s.manifest_digest in held]

    async def _ask(
        self,
        commit: r.Commit,
        shares: Sequence[r.SealedShare],
        members: Mapping[str, r.Member],
    ) -> tuple[dict[str, w.HeldReply], list[str]]:
        """Who holds what of some shares: by those whom the records name, those on whose nodes the
        ranks are now, and this node; by everybody, if these have not enough."""
        ctx, here = self.ctx, self.ctx.home.node
        if not shares:
            return {}, []
        ranks = {rank for share in shares for rank in share.ranks}
        nodes = {entry.node for entry in ctx.roster.of_ranks(ranks)} if ctx.roster else set()
        nodes |= {self.stores.get(s, here) for x in shares for s in (x.store_id, *x.holders)}
        query = w.HeldQuery(ctx.job, commit.attempt)
        nodes |= {here, *(node for attempt, node in ctx.elsewhere if attempt == commit.attempt)}
        asked = [members[name] for name in nodes if name in members]
        answers, silent = await ask(ctx, query, asked)
        facts = Facts(ctx.state, answers, (), {}, False)
        clear = all(
            has_enough(share, sources_of(share, commit.attempt, facts), members, commit.layout.k)
            for share in shares
        )
        return (answers, silent) if clear else await ask_all(ctx, query)

    def _repairs(
        self,
        commit: r.Commit,
        shares: Sequence[r.SealedShare],
        answers: Mapping[str, w.HeldReply],
        members: Mapping[str, r.Member],
    ) -> list[Repair]:
        facts = Facts(self.ctx.state, answers, (), {}, False)
        living = sorted(members, key=lambda n: (members[n].draining, n))
        found = (
            decide_repair(s, sources_of(s, commit.attempt, facts), living, commit.layout)
            for s in shares
        )
        return [repair for repair in found if repair]

    def _still_within_grace(self, shares: Sequence[r.SealedShare]) -> bool:
        """Is some recorded store away, but not yet for as long as a restart may take?"""
        wanted = {s for share in shares for s in (*share.holders, share.store_id)}
        away, now = wanted - self.stores.keys() - {""}, self.ctx.home.now()
        for store in list(self.absent_since):
            if store not in away:
                del self.absent_since[store]
        for store in away:
            self.absent_since.setdefault(store, now)
        grace_s = self.ctx.home.config.lost_grace_s
        return any(now - since < grace_s for since in self.absent_since.values())

    def _due(self, repairs: Sequence[Repair]) -> bool:
        """At once if the next loss kills or no save is under way, else after PATIENCE_S."""
        ctx = self.ctx
        now = ctx.home.now()
        if self.noticed_at is None:
            self.noticed_at = now
        saving = any(
            h.attempt is not None and not ctx.decided(h.attempt)
            for h in ctx.home.holdings.of_job(ctx.job)
        )
        urgent = min(repair.spare for repair in repairs) <= 0
        return urgent or not saving or now - self.noticed_at >= PATIENCE_S

    # -- one share --------------------------------------------------------------------------------

    async def mend(
        self,
        commit: r.Commit,
        repair: Repair,
        sources: Sources,
        members: Mapping[str, r.Member],
    ) -> bool:
        """Bring the own copies if they are gone, then put each missing shard; True if all found
        a place. Raises Refused if a restore went first; all is to be looked at anew then."""
        ctx, attempt = self.ctx, commit.attempt
        stages: list[Held] = []
        await self._cede()
        try:
            manifest = await self._copies(commit, repair)
            share = await self._encoded(manifest, repair, stages)
            crew = crew_of(dict(members), ctx.home.member, commit.layout, self._spread())
            missing = list(repair.missing)
            if repair.bring:  # a shard here now lies beside the own copy
                missing += [
                    i for i, nodes in sources.shards.items() if set(nodes) == {ctx.home.node}
                ]
            used = {
                n
                for i, nodes in sources.shards.items()
                if i not in missing
                for n in nodes
                if n in members
            }
            failed = set[str]()
            placed = [await self._put(share, i, crew, used, failed) for i in sorted(missing)]
            ctx.note(
                "repaired",
                attempt=attempt.key,
                share=repair.share.node,
                shards=[i for i, ok in zip(sorted(missing), placed, strict=True) if ok],
                unplaced=placed.count(False),
            )
            return all(placed)
        finally:
            for stage in stages:
                ctx.home.holdings.release(stage)
            ctx.track(attempt)  # what was brought goes with it, if it was retired meanwhile

    async def _cede(self) -> None:
        """Restores go first. Raises Refused after one: who lives and holds what may be another
        answer now, so all is looked at anew."""
        if await restore_first(self.ctx):
            raise Refused("a restore went first")

    def _spread(self) -> tuple[tuple[str, bool], ...]:
        return tuple((level, False) for level, _ in self.ctx.home.config.spread_levels)

    async def _put(
        self, share: EncodedShare, index: int, crew: Crew, used: set[str], failed: set[str]
    ) -> bool:
        """One shard on the best node that has none yet; the next one if it fails. Who failed gets
        no other one of this share, either: it may have that shard, and only its answer is lost."""
        ctx = self.ctx
        while (node := substitute(crew, ctx.home.node, used, failed)) is not None:
            await self._cede()
            try:
                holder, doors = crew.members[node], ctx.home.doors
                await send_shard(share, index, holder, doors, ctx.home.config, Traffic.REPAIR)
                used.add(node)
                ctx.elsewhere.add((share.manifest.attempt, node))
                return True
            except CheckpointError as e:
                failed.add(node)
                ctx.note("repair_holder_failed", node=node, shard=index, why=str(e))
        return False

    async def _copies(self, commit: r.Commit, repair: Repair) -> r.Manifest:
        """The share's manifest, with every rank's slot WHOLE on this node."""
        ctx, share, attempt = self.ctx, repair.share, commit.attempt
        for rank in share.ranks:
            if ctx.home.holdings.find(attempt, r.FileKind.SLOT, rank) is None:
                job = await fetching(ctx, attempt, share, rank)
                await bring(ctx.home, job, r.FileKind.SLOT)
        packed = ctx.home.doors.arena.document(document_name(share.manifest_digest))
        if packed is None:
            raise IntegrityError(f"manifest {share.manifest_digest[:12]} is not beside its slots")
        return open_manifest(packed, share.manifest_digest)

    async def _encoded(
        self, manifest: r.Manifest, repair: Repair, stages: list[Held]
    ) -> EncodedShare:
        """All shards of the share as regions: data in the slots, parity coded again."""
        ctx, layout = self.ctx, manifest.layout
        holdings, doors = ctx.home.holdings, ctx.home.doors
        shards: list[list[Region]] = [[] for _ in range(layout.shards)]
        for entry in manifest.ranks:
            slot = holdings.find(manifest.attempt, r.FileKind.SLOT, entry.rank)
            if slot is None:
                raise IntegrityError(f"slot of rank {entry.rank} went away during the repair")
            size = entry.shard_bytes
            want = Want(
                r.FileKind.STAGE,
                manifest.attempt,
                ctx.home.node,
                entry.rank,
                max(1, layout.m * size),
            )
            stages.append(stage := await holdings.take(want))
            views = [holdings.view(stage, j * size, size) for j in range(layout.m)]
            image = holdings.view(slot)
            work = partial(encode_rank, entry.rank, image, views, layout, manifest.chunk_bytes)
            again = await doors.workers.run(work, entry.length + layout.m * size, Traffic.REPAIR)
            if again.tables != entry.tables:
                slot.doubted = True
                raise IntegrityError(f"slot of rank {entry.rank} differs from its manifest")
            for i in range(layout.k):
                start = min(i * size, entry.length)
                length = entry.stored_bytes(i, layout.k)
                shards[i].append(holdings.region(slot, start, length))
            for j in range(layout.m):
                shards[layout.k + j].append(holdings.region(stage, j * size, size))
        packed = pack(manifest)
        want = Want(r.FileKind.STAGE, manifest.attempt, ctx.home.node, -1, len(packed))
        stages.append(room := await holdings.take(want))
        holdings.view(room, 0, len(packed))[:] = packed
        digest = hashlib.sha256(packed).hexdigest()
        if digest != repair.share.manifest_digest:
            raise IntegrityError(f"manifest of {repair.share.node} packs to another digest")
        region = holdings.region(room, 0, len(packed))
        return EncodedShare(manifest, digest, tuple(tuple(s) for s in shards), region)
