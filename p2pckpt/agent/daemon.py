"""The agent of a node, as a story: adopt, announce, then answer trainers and peers for ever.

    adopt files -> serve peers and trainers -> keep a session -> one JobAgent per job that is here

All parts share one Home (doors, holdings, session). Every background task belongs to the agent's
task group: it ends with the agent. A failure of one is noted and never ends the agent: a store
that is out of order must not kill training.

Contract: `run` returns only by cancellation; it leaves the files and, through the lease, the
membership to expire, so that a restarted agent adopts them. `stop` ends saves in flight first.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from functools import partial
from typing import Any

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.asking import Asking, Question
from p2pckpt.agent.cleaning import free_cleaned, known_jobs
from p2pckpt.agent.context import Home
from p2pckpt.agent.copies import rebuild, remembered
from p2pckpt.agent.drain import Draining
from p2pckpt.agent.holdings import Holdings
from p2pckpt.agent.job import JobAgent
from p2pckpt.agent.living import tell_living
from p2pckpt.agent.members import keep_session
from p2pckpt.agent.owning import look_at_own
from p2pckpt.agent.readying import make_store_ready
from p2pckpt.agent.scheduling import make_wish
from p2pckpt.agent.scrub import Scrubbing
from p2pckpt.agent.serve import Serving, answer
from p2pckpt.agent.status import status
from p2pckpt.config import Config
from p2pckpt.errors import CheckpointError, LedgerUnavailable, NotSeated, UsageError
from p2pckpt.ports import Doors, TrainerId
from p2pckpt.save.due import Wish

MAX_JOBS = 256
"""Jobs that one agent follows at most; past it a new one is refused."""


class Agent:
    """One start of a node's agent. ``member`` says who and where; its session is filled in."""

    def __init__(self, config: Config, doors: Doors, member: r.Member) -> None:
        holdings = Holdings(doors.arena, doors.ids.new, config.job_quota_bytes)
        self.home = Home(member.node, config, doors, holdings, self._spawn, member)
        self.serving = Serving(self.home, self._context)
        self.asking = Asking(self.home, self._context)
        self.jobs: dict[str, JobAgent] = {}
        self.draining = Draining(self.home, self.jobs)
        self.scrubbing = Scrubbing(self.home, self.jobs, self._busy)
        self.home.governing.progress = self._progress
        self.ready = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            adopted = self.home.holdings.adopt()
            self.home.doors.notes("adopted", {"node": self.home.node, "files": len(adopted)})
            for job in sorted({held.job for held in adopted}):
                await self._job(job)
            await self.home.doors.peers.serve(self.on_peer)
            await self.home.doors.trainers.serve(self)
            self._spawn("session", keep_session(self.home, self._on_session))
            self._spawn("scrub", self.scrubbing.loop())
            self._spawn("mend", self.scrubbing.mending.loop())
            self._spawn("drain", self.draining.loop())
            self._spawn("members", self.home.follow_members())
            self._spawn("govern", self.home.governing.loop())
            await asyncio.get_running_loop().create_future()

    async def stop(self) -> None:
        """Let saves in flight end, within `stop_grace_s`; then give the lease back."""
        deadline = self.home.now() + self.home.config.stop_grace_s
        for job in list(self.jobs.values()):
            open_now = [own.attempt for own in job.saving.open.values()]
            left = max(0.0, deadline - self.home.now())
            await job.ctx.until(partial(_all_decided, job, open_now), left)
        session, self.home.session = self.home.session, None
        if session is not None:
            try:
                await self.home.doors.membership.close(session)
            except CheckpointError as e:
                self.home.doors.notes("lease_stays", {"why": str(e)})

    # -- trainers ---------------------------------------------------------------------------------

    async def on_call(self, trainer: TrainerId, request: r.Record) -> r.Record:
        """See ports.TrainerHandler."""
        if isinstance(request, w.TrainerJoin | w.TrainerRejoin):
            self._refuse_second(trainer, request.job)
        if isinstance(request, w.TrainerJoin):
            return await (await self._job(request.job)).join(trainer, request)
        if isinstance(request, w.TrainerRejoin):
            return await (await self._job(request.job)).rejoin(trainer, request)
        if isinstance(request, w.RebuildCall):
            return await rebuild((await self._job(request.job)).ctx, request.dry_run)
        if isinstance(request, w.StatusQuery):
            told = await status(self.home, self.jobs)
            parts = {"scrub": self.scrubbing.shown(), "bandwidth": self.home.governing.facts()}
            return w.StatusReply(json.dumps({**told, **parts}))
        if isinstance(request, w.DrainCall):
            return await self.draining.call(request)
        if isinstance(request, w.ScheduleCall):
            return await self._schedule(request)
        if isinstance(request, Question):
            return await self.asking.answer(trainer, request)
        for job in self.jobs.values():
            if trainer in job.seats:
                return await job.call(trainer, request)
        if isinstance(request, w.Leave):  # it gave up joining
            for job in list(self.jobs.values()):
                await job.launches.trainer_gone(trainer)
            return w.Accepted()
        raise NotSeated(f"pid {trainer.pid} has not joined a job here")

    def _refuse_second(self, trainer: TrainerId, job: str) -> None:
        """A rank's requests name no job: one process of two jobs would mix their states. Raises
        UsageError."""
        for name, known in self.jobs.items():
            if name != job and trainer in known.seats:
                raise UsageError(
                    f"pid {trainer.pid} is a rank of job {name}; it can be one of job {job} when "
                    "that Checkpointer is closed"
                )

    async def on_gone(self, trainer: TrainerId) -> None:
        """See ports.TrainerHandler."""
        jobs = [job.trainer_gone(trainer) for job in self.jobs.values()]
        await asyncio.gather(*jobs)  # at once: one whose ledger is away must not hold up the others
        await self.asking.gone(trainer)

    async def _schedule(self, call: w.ScheduleCall) -> r.Record:
        """An operator's extra step, or the last one of a job that is preempted."""
        wish = Wish(extra=not call.last, last=call.last, by=self.home.node, reason=call.reason)
        known = {name: job.scheduling for name, job in self.jobs.items()}
        schedules, problems = await make_wish(known, call.job, wish, call.wait_s)
        return w.ScheduleReply(schedules, problems)

    # -- peers ------------------------------------------------------------------------------------

    async def on_peer(self, _caller: str, request: r.Record) -> r.Record:
        """See ports.PeerHandler."""
        if isinstance(request, w.HandIn):
            job = await self._job(request.job)
            generation = job.ctx.state.generation
            if generation is not None and request.generation < generation.number:
                return w.RefusedReply(reason=f"generation {request.generation} is over")
            job.gathering.take(request)
            job.ctx.wake()
            return w.Accepted()
        if isinstance(request, w.CopiesQuery):
            return remembered((await self._job(request.job)).ctx)
        if isinstance(request, w.FreeCleaned):
            await free_cleaned((await self._job(request.job)).ctx)
            return self.serving.held(w.HeldQuery(request.job))
        if isinstance(request, w.LookAgain):
            ctx = (await self._job(request.attempt.job)).ctx
            ctx.elsewhere.update((request.attempt, node) for node in request.nodes)
            if not request.nodes:
                ctx.tell_lost()
            return w.Accepted()
        if isinstance(request, w.LookAtOwn):
            job = await self._job(request.job)
            await look_at_own(job.ctx, job.launches)
            return w.Accepted()
        if isinstance(request, w.DrainCall):
            return await self.draining.answer(request)
        if isinstance(request, w.VerifyQuery):
            return await self.asking.check(request)
        return await answer(self.serving, request)

    # -- parts ------------------------------------------------------------------------------------

    async def _job(self, name: str) -> JobAgent:
        job = self.jobs.get(name)
        if job is None:
            if len(self.jobs) >= MAX_JOBS:
                raise UsageError(f"job {name}: this agent follows {MAX_JOBS} jobs already")
            job = self.jobs[name] = JobAgent(self.home, name)
            await job.start()
        return job

    async def _context(self, name: str) -> Any:
        ctx = (await self._job(name)).ctx
        timeout_s = self.home.config.peer_timeout_s / 2
        if not await ctx.until(lambda: ctx.following, timeout_s):
            raise LedgerUnavailable(f"{self.home.node}: job {name} cannot be read yet")
        return ctx

    async def _on_session(self) -> None:
        """A new session: say again which trainers live, and that this agent is ready. A job whose
        ledger cannot be told holds up no other: who is not told of seems to be dead."""
        untold: list[CheckpointError] = []
        for job in list(self.jobs.values()):
            job.ctx.wake()  # for who waits for the session
            for launch in list(job.launches.launches.values()):
                if launch.generation is not None and launch.trainers:
                    of = launch.ledger_id, launch.generation.number
                    try:
                        await tell_living(job.ctx, *of, launch.trainers)
                    except CheckpointError as e:
                        untold.append(e)
        if untold:
            raise untold[0]  # and all of it again
        if not self.ready.is_set() and not any(self.home.holdings):
            self._spawn("make ready", self._make_ready())
        self.ready.set()

    async def _make_ready(self) -> None:
        """A node with a new store probably takes a lost one's place: room for what that held."""
        for job, state in sorted((await known_jobs(self.home)).items()):
            if state.latest() is not None:
                ctx = (await self._job(job)).ctx
                await ctx.refresh()
                await make_store_ready(ctx)

    def _progress(self) -> dict[str, r.Progress]:
        """Of each job with ranks here: that of the rank which is farthest."""
        told = {name: job.scheduling.told() for name, job in self.jobs.items()}
        return {name: max(ranks, key=lambda p: p.step) for name, ranks in told.items() if ranks}

    def _busy(self) -> bool:
        return any(job.busy() for job in self.jobs.values())

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._group is not None, "parts work only while the agent runs"
        guarded = self._guard(name, work)
        try:
            task = self._group.create_task(guarded, name=name)
            task.add_done_callback(lambda _: work.close())  # one that ends before it began
            return task
        except RuntimeError:  # the agent is ending: nothing new begins
            guarded.close()
            work.close()
            raise asyncio.CancelledError from None

    async def _guard(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except CheckpointError as e:
            self.home.doors.notes("task_failed", {"task": name, "why": f"{type(e).__name__}: {e}"})
        except Exception as e:
            self.home.doors.notes("crash", {"task": name, "why": f"{type(e).__name__}: {e}"})


def _all_decided(job: JobAgent, attempts: list[r.Attempt]) -> bool:
    return all(job.ctx.decided(attempt) for attempt in attempts)
