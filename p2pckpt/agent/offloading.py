"""Every Nth committed step of a job goes to the object store, in the background, from RAM.

    a due commit -> hold it (reader's record) -> upload own shares -> report each
                 -> all reported: checkpoint.json, read back -> Offloaded record -> let go

Two loops a job. `hold` needs the ledger only: it keeps due steps from being retired, and gives the
oldest up when too many wait or saves need the room; so an outage of the store costs at most a few
versions of RAM and never a save. `upload` does the slow part, the oldest step first on all nodes;
whoever has all slots of a share uploads it. Rank 0's agent finishes a step at once, others if it
does not.

Contract: what goes out is checked against the committed manifest as it is read. A step counts as
offloaded only by its ledger record, after its manifest was read back and its objects were listed.
Objects are deleted only under an OffloadRetired record, the manifest last. Two agents that both
finish a step write the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from p2pckpt import records as r
from p2pckpt.agent.bucket import WRONG, checkpoint
from p2pckpt.agent.context import RETRY_S, JobContext
from p2pckpt.agent.deciding import groups_of
from p2pckpt.agent.holdings import Held, document_name
from p2pckpt.agent.reading import hold, holds, let_go
from p2pckpt.errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    LedgerForgot,
    LedgerUnavailable,
    ObjectAbsent,
)
from p2pckpt.jobstate import JobState
from p2pckpt.ports import ObjectStore, Txn, Upload
from p2pckpt.restore.verify import open_manifest
from p2pckpt.save.offload import (
    KEPT_DUE,
    Ram,
    abandoned,
    checked_part,
    checkpoint_name,
    checkpoint_of,
    decide_drops,
    decide_retention,
    directory,
    drop_txn,
    due,
    encode_checkpoint,
    incomplete,
    job_directory,
    names_to_delete,
    offloaded_txn,
    removal_txn,
    share_objects,
    share_txn,
)
from p2pckpt.traffic import Traffic
from p2pckpt.wire import unpack

LOOK_EVERY_S = 1.0
"""Between two looks of the agent that finishes, while a step waits for other nodes' reports."""

AWAY_PAUSE_S = 5.0
"""After a failure of the store; the store's own retries with back-off are within one call."""

QUIET_S = 15.0
"""Agents that have done their part for a step look again after this."""

OTHERS_AFTER_S = 30.0
"""Agents other than that of rank 0 finish a step after this."""

SWEEP_EVERY_S = 600.0
"""Between two looks for abandoned multipart uploads."""

READER = "/offload"
"""What the key of the reader's record has after the node's name."""

OPERATIONS = 100
"""Of one transaction; etcd allows 128."""


@dataclass
class Offloading:
    """The offloads of one job on this node."""

    ctx: JobContext
    objects: ObjectStore
    held: dict[str, r.Attempt] = field(default_factory=dict)
    """Steps for which a reader's record was asked for and not let go, by attempt key."""
    busy: str | None = None
    """The attempt of which bytes went out last."""
    away: bool = False
    """The store did not answer when it was asked last."""
    gone: set[r.Attempt] = field(default_factory=set)
    """Retired steps that were dealt with in this life. Whole, as after a clean keys come again."""
    since: dict[str, float] = field(default_factory=dict)
    """When this agent first worked on a due step."""
    quiet_until: dict[str, float] = field(default_factory=dict)
    swept_at: float = -SWEEP_EVERY_S

    # -- hold -------------------------------------------------------------------------------------

    async def hold(self) -> None:
        """For ever: a reader's record on every due step, and none on others."""
        ctx = self.ctx
        while True:
            # bounded, as a new session of this agent is no news of the job
            await ctx.until(lambda: bool(self._moves()) or bool(self._drops()), LOOK_EVERY_S)
            try:
                await self._give_up()
                for attempt, wanted in self._moves():
                    await self._hold(attempt, wanted)
            except CheckpointError as e:
                ctx.note("offload_hold_later", why=str(e))
            await ctx.until(lambda: False, RETRY_S)

    def _due(self) -> list[r.Commit]:
        return due(self.ctx.state, self.ctx.home.config.offload_every)

    def _moves(self) -> list[tuple[r.Attempt, bool]]:
        """Due steps to hold under the present session (True), and held ones to let go (False)."""
        waiting = {c.attempt.key: c.attempt for c in self._due()}
        out = [
            (attempt, True)
            for attempt in waiting.values()
            if self._takes_part(attempt) and not holds(self.ctx, attempt, READER)
        ]
        return out + [(a, False) for key, a in self.held.items() if key not in waiting]

    def _takes_part(self, attempt: r.Attempt) -> bool:
        return self._leads() or bool(self._slots(attempt))

    def _leads(self) -> bool:
        roster = self.ctx.roster
        return roster is not None and roster.leads(self.ctx.home.node)

    def _slots(self, attempt: r.Attempt) -> dict[int, Held]:
        """This node's own copies of ranks of an attempt."""
        files = self.ctx.home.holdings.of_attempt(attempt)
        return {h.part: h for h in files if h.whole and h.kind is r.FileKind.SLOT}

    async def _hold(self, attempt: r.Attempt, wanted: bool) -> None:
        ctx, key = self.ctx, attempt.key
        if wanted:
            self.held[key] = attempt
            await hold(ctx, attempt, READER)
            ctx.wake()
        else:
            for known in (self.held, self.since, self.quiet_until):
                known.pop(key, None)
            ctx.home.spawn(f"reader {key}", let_go(ctx, attempt, READER))

    def _ram(self) -> Ram:
        home, held = self.ctx.home, dict[str, int]()
        for file in home.holdings.of_job(self.ctx.job):
            assert file.attempt is not None
            held[file.attempt.key] = held.get(file.attempt.key, 0) + file.capacity
        generation = self.ctx.state.generation
        keep_last = generation.keep_last if generation else 1
        return Ram(held, home.doors.arena.budget_bytes, keep_last)

    def _drops(self) -> list[tuple[r.Commit, str]]:
        waiting, every = self._due(), self.ctx.home.config.offload_every
        if not waiting:
            return []
        # Whether the store is away, and so which of too many goes, knows only who takes part.
        takes_part = any(self._takes_part(c.attempt) for c in waiting)
        most = KEPT_DUE if takes_part else len(waiting)
        return decide_drops(self.ctx.state, every, self._ram(), self._getting_on(), most)

    def _getting_on(self) -> list[str]:
        """The oldest due step, which all nodes upload first and rank 0's agent waits for, and the
        one that this node is at; none while the store is away."""
        oldest = self._due()[0].attempt.key
        return [] if self.away else [oldest, self.busy or oldest]

    async def _give_up(self) -> None:
        while drops := self._drops():
            await self._drop(*drops[0])

    async def _drop(self, commit: r.Commit, reason: str) -> None:
        ctx = self.ctx
        if await ctx.transact(drop_txn(ctx.state, commit, ctx.home.node, reason)):
            ctx.note("offload_dropped", step=commit.attempt.step, reason=reason)
        await ctx.refresh()

    # -- upload -----------------------------------------------------------------------------------

    async def upload(self) -> None:
        """For ever: this node's shares of due steps, then the steps themselves, then clean-up."""
        ctx = self.ctx
        while True:
            await ctx.until(self._work, None)
            pause_s = LOOK_EVERY_S
            try:
                for commit in self._due()[:KEPT_DUE]:
                    if await self._try(commit):
                        break  # an older one may be complete by now
                await self._clean_up()
            except CheckpointError as e:
                ctx.note("offload_later", why=f"{type(e).__name__}: {e}")
                pause_s = AWAY_PAUSE_S
                self.away = self.away or not isinstance(e, LedgerUnavailable | LedgerForgot)
            await ctx.until(lambda: False, pause_s)

    def _work(self) -> bool:
        state = self.ctx.state
        if any(holds(self.ctx, c.attempt, READER) for c in self._due()):
            return True
        return self.ctx.following and self._leads() and bool(self._removals(state))

    async def _try(self, commit: r.Commit) -> bool:
        """One step; what is wrong with it alone does not keep the others waiting. Was a share of it
        uploaded?"""
        try:
            return await self._step(commit)
        except (IntegrityError, FormatError) as e:
            self.ctx.note("offload_failed", step=commit.attempt.step, why=str(e))
            return False

    async def _step(self, commit: r.Commit) -> bool:
        """What this node can do for one due step now. Was a share of it uploaded?"""
        ctx, attempt, now = self.ctx, commit.attempt, self.ctx.home.now()
        since = self.since.setdefault(attempt.key, now)
        quiet = now < self.quiet_until.get(attempt.key, -1.0)
        if not holds(ctx, attempt, READER) or not self._is_due(attempt) or quiet:
            return False
        groups, moved = await groups_of(ctx, attempt), False
        for share in (s for group in groups for s in group.shares):
            if self._is_due(attempt) and self._has(share, attempt):
                moved = await self._share(share, attempt) or moved
        overdue = now - since > OTHERS_AFTER_S * (1 + self._place())
        if self._is_due(attempt) and (self._leads() or overdue):
            await self._finish(commit, groups)
        if not self._leads():
            self.quiet_until[attempt.key] = ctx.home.now() + QUIET_S
        return moved

    def _place(self) -> float:
        """Spreads the agents that come in for rank 0's: by their place in the roster."""
        roster = self.ctx.roster
        found = roster.find(self.ctx.home.node) if roster else None
        return found[1].ranks[0] / 100 if found and found[1].ranks else 1.0

    def _is_due(self, attempt: r.Attempt) -> bool:
        return any(c.attempt == attempt for c in self._due())

    def _has(self, share: r.SealedShare, attempt: r.Attempt) -> bool:
        slots = self._slots(attempt)
        right = {rank for rank, h in slots.items() if h.manifest_digest == share.manifest_digest}
        return set(share.ranks) <= right

    async def _share(self, share: r.SealedShare, attempt: r.Attempt) -> bool:
        """Upload a share from this node's slots, and report it; False if it is reported, or if they
        went while that was asked."""
        ctx, holdings = self.ctx, self.ctx.home.holdings
        if await ctx.home.doors.ledger.get(ctx.keys.share(attempt, share.node)) is not None:
            return False
        if not self._has(share, attempt):
            return False
        packed = ctx.home.doors.arena.document(document_name(share.manifest_digest))
        if packed is None:
            raise IntegrityError(f"manifest {share.manifest_digest[:12]} is not held here")
        manifest = open_manifest(packed, share.manifest_digest)
        record = share_objects(share, attempt, manifest, len(packed))
        slots = self._slots(attempt)
        for rank in record.ranks:
            self.busy = attempt.key
            part = checked_part(manifest, rank.rank, holdings.view(slots[rank.rank]))
            ready = partial(ctx.home.governing.take, Traffic.OFFLOAD)
            upload = Upload(rank.name, rank.length, manifest.chunk_bytes, part, ready)
            stage = ctx.home.doors.telemetry.stage("offload", rank.length)
            with ctx.home.governing.moving(Traffic.OFFLOAD), stage:
                await self.objects.put(upload)
            self.away = False
            if not self._is_due(attempt):
                return True
        whole = Upload(record.manifest, len(packed), 1, lambda at, n: packed[at : at + n])
        await self.objects.put(whole)
        await ctx.transact(share_txn(ctx.state, record))
        ctx.note("share_offloaded", step=attempt.step, share=share.node)
        return True

    async def _finish(self, commit: r.Commit, groups: list[r.GroupRecord]) -> None:
        """All shares are there: the job-level manifest, and the step's record."""
        ctx, attempt = self.ctx, commit.attempt
        listing = await ctx.home.doors.ledger.list(ctx.keys.shares_of(attempt))
        shares = [unpack(e.value, r.ShareObjects) for e in listing.entries]
        whole = checkpoint_of(commit, groups, shares)
        if whole is None:
            return
        wrong = incomplete(whole, await self.objects.list(directory(attempt)))
        if wrong:
            await self._report_again(shares, wrong)
            return
        self.away = False
        name, data = checkpoint_name(attempt), encode_checkpoint(whole)
        await self.objects.put_absent(name, data)
        if await self.objects.get(name) != data:
            await self._drop(commit, f"{name} is there with other contents")
        elif await ctx.transact(offloaded_txn(ctx.state, commit, data, ctx.home.node)):
            ctx.note("offloaded", step=attempt.step, attempt=attempt.key, bytes=len(data))
        await ctx.refresh()

    async def _report_again(self, shares: list[r.ShareObjects], wrong: dict[str, str]) -> None:
        """Objects that were reported are not there: their nodes are to upload them again."""
        ctx = self.ctx
        for share in shares:
            if wrong.keys() & {share.manifest, *(rank.name for rank in share.ranks)}:
                await ctx.transact(Txn(deletes=(ctx.keys.share(share.attempt, share.owner),)))
        ctx.note("objects_missing", objects=list(wrong.values())[:3])

    # -- clean-up ---------------------------------------------------------------------------------

    def _removals(self, state: JobState) -> list[object]:
        keep = self.ctx.home.config.offload_keep
        return [*decide_retention(state, keep), *self._open(state)]

    def _open(self, state: JobState) -> list[r.OffloadRetired]:
        """Retired steps whose objects may still be there."""
        retired = (state.offload_retired[key] for key in sorted(state.offload_retired))
        return [one for one in retired if one.offloaded.commit.attempt not in self.gone]

    async def _clean_up(self) -> None:
        """Rank 0's agent: retire old offloaded steps, delete what is retired, tidy reports."""
        ctx = self.ctx
        if not self._leads():
            return
        for removal in decide_retention(ctx.state, ctx.home.config.offload_keep):
            if await ctx.transact(removal_txn(ctx.state, removal, ctx.home.node)):
                step = removal.offloaded.commit.attempt.step
                ctx.note("offload_retired", step=step, reason=removal.reason)
        await ctx.refresh()
        for retired in self._open(ctx.state):
            await self._delete(retired)
        await self._tidy()
        if ctx.home.now() - self.swept_at >= SWEEP_EVERY_S:
            await self._sweep()

    async def _sweep(self) -> None:
        """Abort multipart uploads of this job that nobody goes on with."""
        ctx, every = self.ctx, self.ctx.home.config.offload_every
        self.swept_at = ctx.home.now()
        begun = await self.objects.pending(job_directory(ctx.job))
        for upload in abandoned(begun, ctx.state, every):
            ctx.note("upload_aborted", name=upload.name, age_s=round(upload.age_s))
            await self.objects.abort(upload)

    async def _delete(self, retired: r.OffloadRetired) -> None:
        """A retired step's objects, by the names in its manifest; that one last."""
        ctx, attempt = self.ctx, retired.offloaded.commit.attempt
        try:
            names = names_to_delete(retired, await checkpoint(ctx, retired.offloaded))
            await self.objects.delete(names)
            await self.objects.delete([retired.offloaded.manifest])
            ctx.note("objects_deleted", step=attempt.step, objects=len(names) + 1)
        except ObjectAbsent:
            pass  # its manifest went last: the others are gone
        except WRONG as e:
            ctx.note("objects_stay", step=attempt.step, why=f"not proven to be ours: {e}")
        self.gone.add(attempt)

    async def _tidy(self) -> None:
        """Records that nothing refers to any more: reports of steps that are not due, and the
        ends of offloads whose commits are gone (so that nobody can offload them again)."""
        ctx, keys = self.ctx, self.ctx.keys
        state = ctx.state
        waiting = {c.attempt.key for c in self._due()}
        known = {c.attempt.key for c in state.commits.values()}
        listing = await ctx.home.doors.ledger.list(keys.shares)
        old = [
            e.key
            for e in listing.entries
            if e.key[len(keys.shares) :].partition("/")[0] not in waiting
        ]
        old += [keys.offload_drops + k for k in sorted(state.offload_dropped - known)]
        unfinished = {retired.offloaded.commit.attempt.key for retired in self._open(state)}
        done = set(state.offload_retired) - unfinished
        old += [keys.offload_retirements + k for k in sorted(done - known)]
        for i in range(0, len(old), OPERATIONS):
            await ctx.transact(Txn((state.same_ledger(),), deletes=tuple(old[i : i + OPERATIONS])))


def start(ctx: JobContext) -> None:
    """Begin the loops of a job, if this agent has an object store."""
    if ctx.home.doors.objects is not None:
        offloading = Offloading(ctx, ctx.home.doors.objects)
        ctx.home.spawn(f"offload hold {ctx.job}", offloading.hold())
        ctx.home.spawn(f"offload {ctx.job}", offloading.upload())
