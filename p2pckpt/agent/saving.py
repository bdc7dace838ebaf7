"""One attempt on this node, from the first slot to the outcome.

    open_slot -> (trainer writes) -> slot_done -> save_share -> hand_in -> settle

A rank gets one of its slots at once or, after a short bounded wait, the attempt is skipped for
everybody: ABORT is written before anyone is told. When the last local rank is done the share is
encoded, sent, sealed and handed in, without the trainers; then this node, like every other of the
roster, sees to it that the attempt gets its one outcome.

Contract: whatever fails ends in ABORT with the reason, never in a wait without end; a slot is
reused only after its attempt is settled and its writer is done or dead. A rank writes one slot at
a time, so one that asks for the next, or says that it failed, is done with those before: its
patience may have ended before this agent answered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.context import JobContext, Roster
from p2pckpt.agent.gather import Gathering
from p2pckpt.agent.holdings import Held, Want, document_name
from p2pckpt.agent.readying import prepare_files
from p2pckpt.agent.settling import hand_in_share, settle
from p2pckpt.errors import (
    CheckpointError,
    LedgerForgot,
    NoRoom,
    SaveAborted,
    StaleGenerationError,
    UsageError,
    cause_of,
)
from p2pckpt.ports import Region, TrainerId
from p2pckpt.save.offload import held_back
from p2pckpt.save.pipeline import Origin, OwnSlot, save_share
from p2pckpt.save.send import Crew, crew_of
from p2pckpt.wire import pack

REMEMBERED = 64
"""Attempts that are over whose outcome is kept, for trainers that ask late."""


@dataclass
class OwnAttempt:
    """This node's side of an attempt: the slots of its ranks, and what they said."""

    attempt: r.Attempt
    ranks: tuple[int, ...]
    lineage: str | None = None
    """Of the generation when the save began: a restore that closes meanwhile does not change it."""
    outcome: r.Outcome | None = None
    slots: dict[int, Held] = field(default_factory=dict)
    done: dict[int, w.SlotDone] = field(default_factory=dict)


class Saving:
    """The attempts of one job on this node."""

    def __init__(
        self, ctx: JobContext, gathering: Gathering, living_ranks: Callable[[], set[int]]
    ) -> None:
        self.ctx = ctx
        self.gathering = gathering
        self.living_ranks = living_ranks
        self.open: dict[str, OwnAttempt] = {}
        self._untold: list[OwnAttempt] = []
        ctx.waiting.first.append(self._remember)

    # -- the trainers' calls ----------------------------------------------------------------------

    async def open_slot(self, trainer: TrainerId, rank: int, call: w.OpenSlot) -> r.Record:
        """A slot to write into, or Skipped after `skip_wait_s`."""
        ctx = self.ctx
        own = self._own(call.ordinal, call.step)
        attempt = own.attempt
        self._done_before(trainer, rank, attempt)
        if rank in own.slots:
            raise UsageError(f"rank {rank} opened attempt {attempt.key} twice")
        if ctx.decided(attempt):
            return w.Skipped(reason=self._why(attempt))
        layout = ctx.roster.generation.layout if ctx.roster else r.Layout(1, 0)
        sent_bytes = call.capacity * len(own.ranks) * layout.shards // layout.k
        ctx.track(attempt, sent_bytes)
        spare_s = ctx.home.config.skip_wait_s
        if not await ctx.until(lambda: ctx.decided(attempt) or self._may_take(rank), spare_s):
            return await self._skip(attempt, rank, "its earlier saves are still in flight")
        if ctx.decided(attempt):
            return w.Skipped(reason=self._why(attempt))
        want = Want(r.FileKind.SLOT, attempt, ctx.home.node, rank, self._capacity(call.capacity))
        try:
            held = await ctx.home.holdings.take(want, trainer)
        except NoRoom as e:
            return await self._skip(attempt, rank, str(e))
        own.slots[rank] = held
        ctx.track(attempt, sent_bytes)  # it may have been settled, and freed, while a file was made
        job, kind = ctx.job, r.FileKind.SLOT
        slots = tuple(h.file for h in ctx.home.holdings if (h.job, h.kind) == (job, kind))
        return w.Slot(file=held.file, capacity=held.capacity, slots=slots)

    async def _skip(self, attempt: r.Attempt, rank: int, why: str) -> w.Skipped:
        reason = f"skipped by rank {rank}: {why}"
        decided = await self._end(attempt, reason)
        return w.Skipped(reason=self._why(attempt) if decided else self.ctx.because(reason))

    async def _end(self, attempt: r.Attempt, reason: str) -> bool:
        """ABORT; is it decided within `skip_wait_s`? Without this rank's share there is no commit,
        so the trainer need not wait for a ledger that is away."""
        ctx = self.ctx
        ctx.home.spawn(f"end {attempt.key}", ctx.abort(attempt, reason))
        return await ctx.until(lambda: ctx.decided(attempt), ctx.home.config.skip_wait_s)

    async def _given_up(self, attempt: r.Attempt, reason: str) -> SaveAborted:
        decided = await self._end(attempt, reason)
        why = self._why(attempt) if decided else self.ctx.because(reason)
        return SaveAborted(f"step {attempt.step}: {why}")

    async def slot_done(self, rank: int, call: w.SlotDone) -> r.Record:
        """The snapshot is whole; the last local rank starts the share on its way."""
        own = self._own(call.ordinal, call.step)
        held = own.slots.get(rank)
        if held is None or held.attempt != own.attempt:
            reason = f"rank {rank} has no slot for it: the agent restarted, or it was given up"
            raise await self._given_up(own.attempt, reason)
        try:
            self.ctx.home.holdings.seal(held, call.length, "")
        except CheckpointError as e:
            raise await self._given_up(own.attempt, f"rank {rank}: {e}") from e
        own.done[rank] = call
        self.prepare(held.capacity)
        if set(own.done) == set(own.ranks) and not self.ctx.decided(own.attempt):
            self.ctx.note("process_safe", attempt=own.attempt.key)
            self.ctx.home.spawn(f"save {own.attempt.key}", self._save(own))
        return w.Accepted()

    def prepare(self, wanted_bytes: int) -> None:
        """Make the slots that saves to come need, in the background: clearing fresh pages costs
        many copies of the same bytes, and no save should wait for it."""
        roster = self.ctx.roster
        found = roster.find(self.ctx.home.node) if roster else None
        if roster is not None and found is not None:
            count = (roster.generation.keep_last + 1) * len(found[1].ranks)
            size = self._capacity(wanted_bytes)
            work = prepare_files(self.ctx, r.FileKind.SLOT, size, count)
            self.ctx.home.spawn("prepare slots", work)

    async def slot_failed(self, rank: int, call: w.SlotFailed) -> r.Record:
        """The trainer could not write, or not be served in time: ABORT, and it writes no more."""
        own = self._own(call.ordinal, call.step)
        if held := own.slots.get(rank):
            self.ctx.home.holdings.writer_done(held)
        await self._end(own.attempt, f"rank {rank}: {call.reason}")
        return w.Accepted()

    def _done_before(self, trainer: TrainerId, rank: int, attempt: r.Attempt) -> None:
        """The rank asks for the next slot: it writes into no other one any more."""
        for held in self.ctx.home.holdings.written_by(trainer):
            mine = (held.job, held.kind, held.part) == (self.ctx.job, r.FileKind.SLOT, rank)
            if mine and held.attempt != attempt:
                self.ctx.home.holdings.writer_done(held)

    def _remember(self) -> None:
        """Keep the outcomes for trainers that ask when the ledger has forgotten them."""
        if self._untold:
            for own in self._untold:
                own.outcome = self._outcome(own.attempt)
            self._untold = [o for o in self._untold if o.outcome is None and self._has(o)]

    def _has(self, own: OwnAttempt) -> bool:
        return self.open.get(own.attempt.key) is own

    async def status(self, call: w.SaveStatus) -> r.Record:
        """The outcome, waiting at most `wait_s`."""
        own = self._own(call.ordinal, call.step)

        def known() -> r.Outcome | None:
            return own.outcome or self._outcome(own.attempt)

        await self.ctx.until(lambda: known() is not None, min(call.wait_s, 60.0))
        return w.SaveState(outcome=known())

    async def trainer_gone(self, trainer: TrainerId) -> None:
        """A process is dead: what it had not finished cannot be finished."""
        mine = [h for h in self.ctx.home.holdings.written_by(trainer) if h.job == self.ctx.job]
        for held in mine:
            self.ctx.home.holdings.writer_done(held)
            if held.attempt is not None and not held.whole:
                await self.ctx.abort(held.attempt, f"rank {held.part} died while writing")
        for own in list(self.open.values()):
            lost = sorted(set(own.ranks) - set(own.done) - self.living_ranks())
            if lost and not self.ctx.decided(own.attempt):
                await self.ctx.abort(own.attempt, f"ranks {lost} died before they saved")

    # -- one attempt ------------------------------------------------------------------------------

    async def _save(self, own: OwnAttempt) -> None:
        ctx, attempt = self.ctx, own.attempt
        stages: list[Held] = []
        ctx.hindered[attempt] = f"{ctx.home.node} has not sealed its share"
        try:
            roster = await self._roster(attempt)
            slots = [
                OwnSlot(rank, ctx.home.holdings.region(held), own.done[rank].meta)
                for rank, held in own.slots.items()
            ]
            telemetry = ctx.home.doors.telemetry
            with telemetry.stage("save", sum(done.length for done in own.done.values())):
                sealed, manifest = await save_share(
                    slots,
                    self._origin(attempt, roster),
                    lambda: self._crew(roster),
                    lambda size: self._stage(attempt, size, stages),
                    ctx.home.doors,
                    ctx.home.config,
                )
            document = document_name(sealed.manifest_digest)
            ctx.home.doors.arena.put_document(document, pack(manifest))
            for held in own.slots.values():
                if held.attempt == attempt:
                    ctx.home.holdings.seal(held, held.length, sealed.manifest_digest)
            ctx.hindered.pop(attempt, None)
            ctx.note("sealed", attempt=attempt.key, holders=list(sealed.holders))
            work = hand_in_share(ctx, self.gathering, roster, attempt, sealed)
            handing = ctx.home.spawn(f"hand in {attempt.key}", work)
            takeover_s = ctx.home.config.takeover_s
            await ctx.until(lambda: handing.done() or ctx.decided(attempt), takeover_s)
            with telemetry.stage("settle"):
                await settle(ctx, roster, attempt, own.lineage, handing)
        except Exception as e:
            cause = cause_of(e)
            await ctx.abort(attempt, f"{ctx.home.node}: {type(cause).__name__}: {cause}")
            if not isinstance(cause, CheckpointError):
                raise
        finally:
            for stage in stages:
                ctx.home.holdings.release(stage)
            ctx.hindered.pop(attempt, None)

    # -- small things -----------------------------------------------------------------------------

    def _own(self, ordinal: int, step: int) -> OwnAttempt:
        ctx, generation = self.ctx, self.ctx.state.generation
        if generation is None or ctx.roster is None:
            why = "the generation that its ranks joined is gone from the ledger"
            raise LedgerForgot(f"job {ctx.job}: {why}; see `p2pckpt ledger rebuild`")
        found = ctx.roster.find(ctx.home.node)
        attempt = r.Attempt(
            ledger_id=ctx.state.ledger_id,
            job=ctx.job,
            generation=ctx.roster.generation.number,
            ordinal=ordinal,
            step=step,
        )
        if found is None:
            raise StaleGenerationError(f"{ctx.home.node} has no rank in generation {generation}")
        own = self.open.get(attempt.key)
        if own is None or own.attempt != attempt:  # one of a ledger that is gone may have its key
            for old in [a for a in self.open.values() if ctx.decided(a.attempt)][:-REMEMBERED]:
                del self.open[old.attempt.key]
            closed = ctx.state.lineage(attempt.generation)
            lineage = closed.lineage if closed and closed.ballot else None
            own = self.open[attempt.key] = OwnAttempt(attempt, found[1].ranks, lineage)
            self._untold.append(own)
            self._remember()
        return own

    def _may_take(self, rank: int) -> bool:
        """Has the rank a slot left? keep_last retained ones and one in flight. What was open when
        the ledger was lost is kept, as nobody knows its outcome, and takes no slot for that."""
        assert self.ctx.roster is not None
        state = self.ctx.state
        keep_last = self.ctx.roster.generation.keep_last
        extra = held_back(self.ctx.state, self.ctx.home.config.offload_every, keep_last)
        extra |= self._older_lineages(self.ctx.roster.generation.number)
        taken = sum(
            1
            for h in self.ctx.home.holdings.of_job(self.ctx.job)
            if h.kind is r.FileKind.SLOT
            and h.part == rank
            and h.attempt is not None
            and h.attempt.key not in extra
            and (h.attempt.ledger_id == state.ledger_id or state.committed(h.attempt) is not None)
        )
        return taken < keep_last + 1

    def _older_lineages(self, generation: int) -> set[str]:
        """Commits that a new lineage replaces: they stay until it has keep_last of its own, and
        must not take its slots until then."""
        closed = self.ctx.state.lineage(generation)
        commits = self.ctx.state.commits.items()
        return {c.attempt.key for (name, _), c in commits if closed and name != closed.lineage}

    def _capacity(self, wanted_bytes: int) -> int:
        unit = self.ctx.home.config.slot_round_bytes
        return max(1, -(-wanted_bytes // unit)) * unit

    def _why(self, attempt: r.Attempt) -> str:
        outcome = self._outcome(attempt)
        return outcome.reason if outcome else "the attempt is over"

    def _outcome(self, attempt: r.Attempt) -> r.Outcome | None:
        """The outcome as the mirror knows it; one that was trimmed is told from what is left."""
        state = self.ctx.state
        if (known := state.outcomes.get(attempt.key)) is not None:
            return known
        if (commit := state.committed(attempt)) is not None:
            return r.Outcome(
                attempt=attempt,
                verdict=r.Verdict.COMMIT,
                by=self.ctx.home.node,
                lineage=commit.lineage,
                degraded=commit.degraded,
            )
        if (reason := state.settled(attempt)) and attempt.key not in state.retired:
            return r.Outcome(
                attempt=attempt, verdict=r.Verdict.ABORT, by=self.ctx.home.node, reason=reason
            )
        return None

    async def _roster(self, attempt: r.Attempt) -> Roster:
        roster, ledger_id = await self.ctx.load_roster(), self.ctx.state.ledger_id
        if ledger_id != attempt.ledger_id:
            raise StaleGenerationError(f"ledger {attempt.ledger_id[:8]} is gone, and its attempts")
        if roster is None or roster.generation.number != attempt.generation:
            raise StaleGenerationError(f"generation {attempt.generation} is over")
        return roster

    def _origin(self, attempt: r.Attempt, roster: Roster) -> Origin:
        home = self.ctx.home
        layout = roster.generation.layout
        return Origin(attempt, home.node, home.member.store_id, layout)

    async def _crew(self, roster: Roster) -> Crew:
        """Everybody alive, as a cluster; labels and rules from the members and the config."""
        home = self.ctx.home
        members = (await home.living(home.config.keepalive_s)).members
        return crew_of(members, home.member, roster.generation.layout, home.config.spread_levels)

    async def _stage(self, attempt: r.Attempt, size: int, stages: list[Held]) -> Region:
        want = Want(r.FileKind.STAGE, attempt, self.ctx.home.node, len(stages), max(1, size))
        held = await self.ctx.home.holdings.take(want)
        stages.append(held)
        return self.ctx.home.holdings.region(held, 0, size)
