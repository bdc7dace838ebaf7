"""One job on this node: who of its ranks is here, and which part answers which call.

A trainer's first call is TrainerJoin; from then on its calls go to the parts: saving, restoring.
Calls of a rank whose generation is over are refused by name, so a zombie rank learns it at once;
what it could still do to the ledger is fenced anyway.

Contract: one `JobAgent` a job, also for jobs of which this node only holds shards. Background
loops (mirror, retirement) run as long as the agent does.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.cleaning import begin_anew, obey
from p2pckpt.agent.context import Home, JobContext
from p2pckpt.agent.copies import keep_copies, remembered
from p2pckpt.agent.gather import Gathering
from p2pckpt.agent.launch import Launch, Launches
from p2pckpt.agent.living import tell_living
from p2pckpt.agent.offloading import start as start_offloading
from p2pckpt.agent.reading import look_again
from p2pckpt.agent.readying import make_ready
from p2pckpt.agent.repair import Repairing
from p2pckpt.agent.restoring import Restoring
from p2pckpt.agent.retire import retire
from p2pckpt.agent.saving import Saving
from p2pckpt.agent.scheduling import Scheduling
from p2pckpt.errors import LedgerForgot, LedgerUnavailable, StaleGenerationError, UsageError
from p2pckpt.ports import TrainerId


@dataclass(frozen=True)
class Seat:
    """A living rank: which rank of which launch a process is."""

    rank: int
    launch: Launch


class JobAgent:
    """One job on one node."""

    def __init__(self, home: Home, job: str) -> None:
        self.ctx = JobContext(home, job)
        self.gathering = Gathering()
        self.launches = Launches(self.ctx)
        self.saving = Saving(self.ctx, self.gathering, self.living_ranks)
        self.restoring = Restoring(self.ctx, self.gathering)
        self.scheduling = Scheduling(self.ctx)
        self.seats: dict[TrainerId, Seat] = {}

    async def start(self) -> None:
        """Read the job's records and follow them; track what is held of it from before."""
        home = self.ctx.home
        home.spawn(f"follow {self.ctx.job}", self.ctx.follow())
        home.spawn(f"retire {self.ctx.job}", retire(self.ctx))
        home.spawn(f"copies {self.ctx.job}", keep_copies(self.ctx))
        home.spawn(f"repair {self.ctx.job}", Repairing(self.ctx).loop())
        home.spawn(f"adopt {self.ctx.job}", self._adopted())
        home.spawn(f"obey {self.ctx.job}", obey(self.ctx))
        home.spawn(f"begin anew {self.ctx.job}", begin_anew(self.ctx, self._forget))
        home.spawn(f"schedule {self.ctx.job}", self.scheduling.loop())
        home.spawn(f"look again {self.ctx.job}", look_again(self.ctx))
        start_offloading(self.ctx)

    async def _adopted(self) -> None:
        """Files from before: an unsealed slot's attempt cannot be finished by this session."""
        ctx = self.ctx
        await ctx.until(lambda: ctx.following, None)
        found = [(held, held.attempt) for held in ctx.home.holdings.of_job(ctx.job)]
        for held, attempt in found:  # a file may go back while another's attempt is aborted
            assert attempt is not None
            if attempt.ledger_id != ctx.state.ledger_id:
                if ctx.state.committed(attempt) is not None:  # kept by a rebuild
                    ctx.track(attempt)
                else:
                    ctx.note("stranger", file=held.file, ledger=attempt.ledger_id)
                continue
            if held.kind is r.FileKind.SLOT and not held.manifest_digest:
                await ctx.abort(attempt, f"the agent of {ctx.home.node} restarted before seal")
            ctx.track(attempt)
        for copy in remembered(ctx).copies:  # also where the bytes themselves were not kept
            attempt = copy.commit.attempt
            known = ctx.state.committed(attempt) is not None  # perhaps kept by a rebuild
            if known or attempt.ledger_id == ctx.state.ledger_id:
                ctx.track(attempt)

    def _forget(self) -> None:
        """The job was cleaned: what its trainers had begun is over."""
        self.gathering.pieces.clear()
        self.saving.open.clear()
        self.restoring.ballots.clear()
        self.ctx.readings.clear()
        self.ctx.roster = None

    # -- trainers ---------------------------------------------------------------------------------

    async def join(self, trainer: TrainerId, call: w.TrainerJoin) -> r.Record:
        """Seat a rank in the generation of its launch."""
        if (seat := self.seats.pop(trainer, None)) is not None:
            seat.launch.trainers.pop(seat.rank, None)
            if seat.launch.generation is not None:
                of = seat.launch.ledger_id, seat.launch.generation.number
                await tell_living(self.ctx, *of, seat.launch.trainers)
        launch = await self.launches.join(trainer, call)
        assert launch.generation is not None
        self.seats[trainer] = Seat(call.rank, launch)
        await self.ctx.load_roster()
        self.ctx.home.spawn("make ready", make_ready(self.ctx, len(launch.trainers)))
        return await self._joined(trainer, launch.generation)

    async def rejoin(self, trainer: TrainerId, call: w.TrainerRejoin) -> r.Record:
        """Seat a rank that joined at an earlier start of this agent. Refuses any other.

        Raises StaleGenerationError, UsageError; LedgerUnavailable, LedgerForgot if it is not known.
        """
        ctx = self.ctx
        ready_s = ctx.home.config.ledger_timeout_s
        known = await ctx.until(lambda: ctx.following and ctx.home.session is not None, ready_s)
        if not known and ctx.frozen:
            raise LedgerForgot(f"job {ctx.job}: {ctx.frozen}; see `p2pckpt ledger rebuild`")
        if not known:  # which is no reason to say that anything is over
            raise LedgerUnavailable(f"{ctx.home.node}: not answered by the ledger since its start")
        roster = await ctx.load_roster()
        found = roster.find(ctx.home.node) if roster else None
        if roster is None or found is None or roster.generation.number != call.generation:
            raise StaleGenerationError(f"generation {call.generation} of job {ctx.job} is over")
        if call.nonce not in ("", roster.generation.nonce):  # the job was cleaned, and counts anew
            raise StaleGenerationError(
                f"job {ctx.job} was cleaned: its generation {call.generation} is another one now"
            )
        if call.rank not in found[1].ranks or found[1].store_id != ctx.home.member.store_id:
            raise UsageError(f"rank {call.rank} did not join on {ctx.home.node}")
        launch = self.launches.resume(roster.generation, found[1], call.rank, trainer)
        await tell_living(self.ctx, launch.ledger_id, call.generation, launch.trainers)
        self.seats[trainer] = Seat(call.rank, launch)
        return await self._joined(trainer, roster.generation)

    async def _joined(self, trainer: TrainerId, generation: r.Generation) -> w.Joined:
        """The answer, with a board for the seat that was just taken."""
        board = await self.scheduling.seat(trainer, generation.number)
        if trainer not in self.seats:  # it died meanwhile
            self.scheduling.unseat(trainer)
        return w.Joined(generation.number, self.ctx.home.node, board, generation.nonce)

    async def call(self, trainer: TrainerId, request: r.Record) -> r.Record:
        """One call of a seated rank."""
        rank = self._seat(trainer).rank
        match request:
            case w.OpenSlot():
                ours = [own.attempt for own in self.saving.open.values()]
                await self.scheduling.make_way(
                    request.step, [a for a in ours if a.ordinal < request.ordinal]
                )
                reply = await self.saving.open_slot(trainer, rank, request)
                if trainer not in self.seats:  # it died meanwhile, and its death was told before
                    await self.saving.trainer_gone(trainer)
                return reply
            case w.PrepareSlots():
                self.saving.prepare(request.capacity)
                return w.Accepted()
            case w.SlotDone():
                reply = await self.saving.slot_done(rank, request)
                self._slot_done(request)
                return reply
            case w.SlotFailed():
                return await self.saving.slot_failed(rank, request)
            case w.SaveStatus():
                return await self.saving.status(request)
            case w.RestoreCall():
                return await self.restoring.restore(rank, request)
            case w.MendChunk():
                return await self.restoring.mend(rank, request)
            case w.RestoreDone():
                return await self.restoring.done(rank, request)
            case w.ListSteps():
                return self._steps()
            case w.Leave():
                await self._leave(trainer)
                return w.Accepted()
        raise UsageError(f"{type(request).__name__} is not a request of a trainer")

    async def trainer_gone(self, trainer: TrainerId) -> None:
        """A process died: the ledger is told, and what its rank had begun ends. In this order, as
        a ledger that forgot has no end for an attempt, and is cleaned only when all are dead."""
        self.seats.pop(trainer, None)
        self.scheduling.unseat(trainer)
        await self.launches.trainer_gone(trainer)
        await self.saving.trainer_gone(trainer)

    def busy(self) -> bool:
        """Is a save or a restore of this job in flight here?"""
        held = self.ctx.home.holdings.of_job(self.ctx.job)
        return bool(self.restoring.reading) or any(
            h.attempt is not None and not self.ctx.decided(h.attempt) for h in held
        )

    def living_ranks(self) -> set[int]:
        """Ranks of this job that live on this node."""
        return {seat.rank for seat in self.seats.values()}

    async def _leave(self, trainer: TrainerId) -> None:
        self.seats.pop(trainer, None)
        self.scheduling.unseat(trainer)
        await self.launches.trainer_gone(trainer)

    def _slot_done(self, call: w.SlotDone) -> None:
        for own in self.saving.open.values():
            if (own.attempt.ordinal, own.attempt.step) == (call.ordinal, call.step):
                self.scheduling.slot_done(own.attempt)

    def _seat(self, trainer: TrainerId) -> Seat:
        seat = self.seats.get(trainer)
        if seat is None or seat.launch.generation is None:
            raise UsageError(f"pid {trainer.pid} has not joined job {self.ctx.job}")
        current = self.ctx.state.generation
        if current is not None and current.number > seat.launch.generation.number:
            raise StaleGenerationError(
                f"rank {seat.rank} belongs to generation {seat.launch.generation.number} of job "
                f"{self.ctx.job}; generation {current.number} began"
            )
        if seat.launch.ledger_id != self.ctx.state.ledger_id != "":
            raise StaleGenerationError(
                f"rank {seat.rank} of job {self.ctx.job} joined in ledger "
                f"{seat.launch.ledger_id[:8]}, which is gone"
            )
        return seat

    def _steps(self) -> r.Record:
        state = self.ctx.state
        closed = state.current_lineage()
        committed = tuple(state.steps(closed.lineage)) if closed else ()
        if not committed and (latest := state.latest()):
            committed = (latest.attempt.step,)
        in_flight = sorted(
            own.attempt.step
            for own in self.saving.open.values()
            if not self.ctx.decided(own.attempt)
        )
        return w.Steps(committed=committed, in_flight=tuple(in_flight))
