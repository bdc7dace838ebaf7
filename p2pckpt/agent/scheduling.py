"""The save schedule of one job on this node: boards for its ranks, and the one door for changes.

    wish -> amend -> compare-and-swap on schedule/GEN -> every agent's mirror -> every rank's board

Intervals that are tuned, the last step before a preemption, an operator's extra step: all are
wishes, and all go through `wish`. Each agent judges by what its own ranks told (`Progress`), so one
that has no rank of the job here cannot wish. Two who wish at once: one wins, the other judges again
what stands then.

Contract: the record is changed only under the present ledger and generation, and only by who read
the version before. A rank gets a page for each seat it takes; without room for one it goes by what
its hook was told until it asks again. Nothing here is waited for by a rank's step.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p2pckpt import records as r
from p2pckpt.agent.context import JobContext
from p2pckpt.agent.tuning import Seen, Tuning, look
from p2pckpt.board import PAGE_BYTES, Board
from p2pckpt.errors import CheckpointError, LedgerUnavailable, NoRoom, UsageError
from p2pckpt.jobstate import JobState
from p2pckpt.ports import Put, Region, TrainerId, Txn, absent, value_is
from p2pckpt.save.due import Wish, amend, first_schedule, steps_ahead
from p2pckpt.wire import pack

TRIES = 5
"""Of one wish, when others change the schedule at the same time."""

RETUNE_SAVES = 5
"""Commits between two changes of what is chosen here: costs are medians of as many."""


@dataclass(frozen=True)
class Page:
    """The board of one seat."""

    file: str
    generation: int
    board: Board


def board_name(job: str, trainer: TrainerId) -> str:
    """A process has one seat at a time, and may be a rank of several jobs one after the other."""
    return f"board-{trainer.pid}-{hashlib.sha256(job.encode()).hexdigest()[:16]}"


def amend_txn(state: JobState, old: r.Schedule, new: r.Schedule) -> Txn:
    """The change, if `old` still stands; version 0 stands in no ledger."""
    key = state.keys.schedule(new.generation)
    compares = (
        state.same_ledger(),
        state.not_cleaned(),
        state.same_generation(new.generation),
        absent(key) if old.version == 0 else value_is(key, pack(old)),
    )
    return Txn(compares, (Put(key, pack(new)),))


class Scheduling:
    """Boards, wishes and the choice of the interval, of one job on this node."""

    def __init__(self, ctx: JobContext) -> None:
        self.ctx = ctx
        self.pages: dict[TrainerId, Page] = {}
        self.tuning = Tuning(ctx)
        self._seating = asyncio.Lock()
        self._to_tune = False
        ctx.waiting.first.append(self._take_down)

    # -- boards -----------------------------------------------------------------------------------

    async def seat(self, trainer: TrainerId, generation: int) -> str:
        """A fresh page for a rank that takes its seat; "" without room for one."""
        home = self.ctx.home
        name = board_name(self.ctx.job, trainer)
        async with self._seating:  # a rank that lost patience asks again while its page is made
            self.unseat(trainer)
            try:
                await home.holdings.reserve_page(name, PAGE_BYTES)
            except NoRoom as e:
                self.ctx.note("no_board", pid=trainer.pid, why=str(e))
                return ""
            board = Board(home.doors.arena.view(Region(name, 0, PAGE_BYTES)))
            self.pages[trainer] = Page(name, generation, board)
        self._post()
        return name

    def unseat(self, trainer: TrainerId) -> None:
        """The rank left its seat: its page goes; it may have it mapped still."""
        if (page := self.pages.pop(trainer, None)) is not None:
            self.ctx.home.doors.arena.remove(page.file)

    def standing(self, generation: int, every: int) -> r.Schedule:
        """What the mirror says of a generation."""
        return self.ctx.state.schedules.get(generation) or first_schedule(generation, every)

    def seen(self) -> Seen | None:
        """What the ranks of the present generation told, put together."""
        return look(self.told())

    def told(self) -> list[r.Progress]:
        """What each rank of the present generation told last."""
        number = self.ctx.state.generation.number if self.ctx.state.generation else 0
        told = [p.board.progress.read() for p in self.pages.values() if p.generation == number]
        return [p for p in told if p is not None and p.generation == number]

    def _post(self) -> None:
        """Write what stands onto every page that has an older version."""
        for page in self.pages.values():
            if self._is_news(page):
                page.board.schedule.write(self.ctx.state.schedules[page.generation])

    def _is_news(self, page: Page) -> bool:
        known = self.ctx.state.schedules.get(page.generation)
        if known is None:
            return False
        posted = page.board.schedule.read()
        return posted is None or posted.version < known.version

    # -- loops ------------------------------------------------------------------------------------

    async def loop(self) -> None:
        """For ever: tune after each commit of ours."""
        while True:
            await self.ctx.until(lambda: self._to_tune, None)
            self._to_tune = False
            try:
                await self._tune()
            except CheckpointError as e:
                self.ctx.note("tune_later", why=str(e))

    def _take_down(self) -> None:
        """Learn from what is over; post what is new."""
        if self.tuning.has_news() and self.tuning.learn() and self._leads():
            self._to_tune = True
        self._post()

    def slot_done(self, attempt: r.Attempt) -> None:
        """A rank here is done with its part: from now on the save settles without it."""
        self.tuning.begun.setdefault(attempt, self.ctx.home.now())

    async def make_way(self, step: int, others: list[r.Attempt]) -> None:
        """The last step waits for the saves before it, at most `stop_grace_s`: there is no next
        one that could do instead."""
        generation = self.ctx.state.generation
        known = self.ctx.state.schedules.get(generation.number) if generation else None
        last = known.last if known is not None else None
        if last is not None and last <= step and all(a.step < last for a in others):
            grace_s = self.ctx.home.config.stop_grace_s
            await self.ctx.until(lambda: all(map(self.ctx.decided, others)), grace_s)

    # -- wishes -----------------------------------------------------------------------------------

    async def wish(self, wish: Wish) -> r.Schedule:
        """Make a wish come true; the schedule that has it.

        Raises UsageError if no rank here can say how far the loop is, LedgerUnavailable.
        """
        ctx = self.ctx
        for _ in range(TRIES):
            old, new = self._judge(wish)
            if new == old:
                return old
            if await ctx.transact(amend_txn(ctx.state, old, new)):
                ctx.note(
                    "schedule", version=new.version, plan=new.plan, last=new.last, why=new.reason
                )
            if (await ctx.refresh()).schedules.get(new.generation) == new:
                return new
        raise LedgerUnavailable(f"job {ctx.job}: its schedule could not be changed; try again")

    def _judge(self, wish: Wish) -> tuple[r.Schedule, r.Schedule]:
        ctx, seen = self.ctx, self.seen()
        if seen is None or ctx.state.generation is None:
            nodes = [n.node for n in ctx.roster.nodes] if ctx.roster else []
            elsewhere = f"; its ranks are on {', '.join(nodes[:16])}" if nodes else ""
            raise UsageError(
                f"job {ctx.job}: no rank on {ctx.home.node} has told a step{elsewhere}"
            )
        old = self.standing(ctx.state.generation.number, seen.every)
        if not seen.step_s:
            raise UsageError(
                f"job {ctx.job}: its ranks have told one step yet, needs two; try again"
            )
        ahead = steps_ahead(seen.step_s, ctx.home.config.notice_s, seen.stride)
        return old, amend(old, wish, seen.step, ahead)

    def wish_soon(self, wish: Wish) -> None:
        """The same in the background; whoever wished looks at the board, and wishes again."""
        self.ctx.home.spawn("schedule", self._wish_soon(wish))

    async def _wish_soon(self, wish: Wish) -> None:
        try:
            await self.wish(wish)
        except CheckpointError as e:
            self.ctx.note("wish_later", why=str(e))

    # -- the interval -----------------------------------------------------------------------------

    def _leads(self) -> bool:
        return self.ctx.roster is not None and self.ctx.roster.leads(self.ctx.home.node)

    async def _tune(self) -> None:
        """Choose both intervals anew, if the hook left it to us and something was learned."""
        seen, generation = self.seen(), self.ctx.state.generation
        if seen is None or generation is None or not seen.auto or not seen.step_s:
            return
        every = self.standing(generation.number, seen.every).plan[-1][1]
        chosen, saves = self.tuning.choose(seen, every), self.tuning.offload_every
        found = chosen.schedule
        same = (found.every, found.offload_every) == (every, saves)
        if same or (self.tuning.changed and self.tuning.since_change < RETUNE_SAVES):
            return
        offload = found.offload_every if found.offload_every != saves else None
        by, reason = self.ctx.home.node, chosen.reason
        await self.wish(Wish(every=found.every, offload_every=offload, by=by, reason=reason))
        self.tuning.changed, self.tuning.since_change = True, 0

    def facts(self) -> dict[str, Any] | None:
        """For `status`; None while nothing is known here."""
        generation, seen = self.ctx.state.generation, self.seen()
        if generation is None:
            return None
        known = self.ctx.state.schedules.get(generation.number)
        if known is None and seen is not None:
            known = first_schedule(generation.number, seen.every)
        if known is None:
            return None
        decides = bool(seen and seen.auto and self._leads())
        return {
            "every": known.plan[-1][1],
            "from_step": known.plan[-1][0],
            "extra": known.extra[-1] if known.extra else None,
            "last": known.last,
            "version": known.version,
            "by": known.by,
            "reason": known.reason,
            "auto": seen.auto if seen else None,
            "decides": decides,
            "step": seen.step if seen else None,
            "step_s": seen.step_s if seen else None,
            "block_s": seen.block_s if seen else None,
            "restore_s": seen.restore_s if seen else None,
            **self.tuning.facts(decides),
        }


async def make_wish(
    scheduling: Mapping[str, Scheduling], job: str, wish: Wish, wait_s: float
) -> tuple[dict[str, r.Schedule], dict[str, str]]:
    """One wish for a job, or for all that have ranks here (""): schedules, problems, by job."""
    schedules: dict[str, r.Schedule] = {}
    problems: dict[str, str] = {}
    chosen = {name: s for name, s in scheduling.items() if name == job or (not job and s.pages)}
    if job and not chosen:
        problems[job] = "this agent does not know the job"
    for name, one in sorted(chosen.items()):
        if not wait_s:
            one.wish_soon(wish)
            continue
        try:
            schedules[name] = await one.wish(wish)
        except CheckpointError as e:
            problems[name] = str(e)
    return schedules, problems
