"""Stories of the save schedule: one record, and ranks at different steps that all go by it.

Four ranks on n0 to n3 train and save by `Looping`, which does what the hook does with its board:
`save.due.Loop` says what is due, the stage's rank saves it. Loops start at different times, so that
ranks are some steps apart; nothing else keeps them together.
"""

import asyncio
import json

from stage import ABORT, COMMIT, JOB, now, play, until

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.tuning import Cost, Costs, decide_intervals
from p2pckpt.board import PAGE_BYTES, Board
from p2pckpt.config import Config
from p2pckpt.errors import AgentUnreachable, CheckpointError
from p2pckpt.save.due import Loop, Wish

FOUR = ("n0", "n1", "n2", "n3")
PACE_S = 0.25


class Looping:
    """One rank's training loop."""

    def __init__(self, rank, every, auto=False, late_s=0.0, pace_s=PACE_S):
        self.rank, self.pace_s, self.late_s = rank, pace_s, late_s
        self.loop = Loop(rank.launch.generation, every, auto, now)
        self.step, self.saves, self.ended, self.noticed = 0, [], False, False
        self.outcomes = {}

    async def seat(self):
        """As the hook's `Seat.keep`: take the seat, and the board."""
        call = w.TrainerRejoin(self.rank.launch.job, self.rank.rank, self.rank.launch.generation)
        joined = await self.rank.trainer.call(call)
        self.loop.board = Board(self.rank.trainer.view(joined.board, PAGE_BYTES))

    async def run(self, steps=10_000):
        await asyncio.sleep(self.late_s)
        while self.step < steps and not self.ended:
            await asyncio.sleep(self.pace_s)
            self.step += 1
            due = self.loop.due(self.step)
            for ordinal, step in self.loop.late:
                await self.rank.call(w.SlotFailed(ordinal, step, "heard too late"))
            self.loop.late.clear()
            if self.noticed and self.loop.schedule.last is None:
                await self.tell()
            if due:
                await self.save()
            self.ended = self.loop.over(self.step)

    async def save(self):
        begun, ordinal = now(), self.loop.begin_save()
        self.saves.append(self.step)
        await self.rank.write(ordinal, self.step)
        self.loop.saved(now() - begun)
        self.outcomes[self.step] = asyncio.create_task(self.rank.outcome(ordinal, self.step))

    async def tell(self):
        try:
            await self.rank.trainer.call(w.ScheduleCall(JOB, True, "SIGTERM", 0.0))
        except AgentUnreachable:
            pass


async def loops(launch, every=20, late_s=(0.0, 0.05, 0.1, 0.15), **options):
    found = [
        Looping(rank, every, late_s=late, **options)
        for rank, late in zip(launch.ranks, late_s, strict=True)
    ]
    for one in found:
        await one.seat()
    return found


def begin(found, steps=10_000):
    return [asyncio.create_task(one.run(steps)) for one in found]


async def ask(stage, node, last=False, wait_s=10.0):
    """As `p2pckpt preempt` or `save-now` there."""
    reply = await stage.nodes[node].trainer().call(w.ScheduleCall(JOB, last, "test", wait_s))
    assert not reply.problems, reply.problems
    return reply.schedules[JOB]


async def verdicts(found, step):
    return [(await one.outcomes[step]).verdict for one in found if step in one.outcomes]


def test_a_changed_interval_and_an_extra_step_are_the_same_for_ranks_out_of_step():
    """Every 20 becomes every 8 while the ranks are up to a step apart, and n2's operator wants one
    step more: all ranks save the same steps, and all of them commit."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        found = await loops(launch)
        running = begin(found, 100)
        await until(lambda: found[0].step >= 25)
        agent = stage.agents["n1"].jobs[JOB].scheduling
        changed = await agent.wish(Wish(every=8, by="n1", reason="story"))
        assert changed.plan[-1][0] >= 25 + 4, "news has a second, which is four steps"
        await until(lambda: found[0].step >= 50)
        extra = (await ask(stage, "n2")).extra[-1]
        await asyncio.gather(*running)
        start = changed.plan[-1][0]
        plan = [20, *range(-(-start // 8) * 8, 101, 8)]
        assert found[0].saves == sorted({*plan, extra})
        assert all(one.saves == found[0].saves for one in found)
        for step in found[0].saves:
            assert await verdicts(found, step) == [COMMIT] * 4, step

    play(story)


def test_a_rank_that_missed_the_news_costs_its_steps_and_no_more():
    """n3 is cut off from the ledger as the interval changes: the steps that n3 did not save, or
    saved alone, are aborted; when it is back, all saves commit again, in the same generation."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        found = await loops(launch, every=10)
        running = begin(found, 200)
        await until(lambda: found[0].step >= 12)
        stage.cluster.cut_from_ledger("n3")
        extra = (await ask(stage, "n0")).extra[-1]
        await until(lambda: found[3].step > extra + 2)
        assert extra not in found[3].saves
        assert extra in found[0].saves
        stage.cluster.heal()
        await asyncio.gather(*running)
        assert await verdicts(found, extra) == [ABORT] * 3
        assert found[3].loop.ordinal == found[0].loop.ordinal
        for step in range(extra // 10 * 10 + 60, 201, 10):
            assert await verdicts(found, step) == [COMMIT] * 4, step

    play(story, lease_s=60.0)


def test_sigterm_to_all_ranks_within_300_ms_gives_one_last_step():
    """Each rank passes it on at its next step, all agents propose: one step is agreed, saved by all
    and committed, and every loop ends there by itself, also that of the rank which got none.
    (B056)"""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        found = await loops(launch, every=1000)
        running = begin(found)
        await until(lambda: found[0].step >= 7)
        for one, skew_s in zip(found, (0.3, 0.0, 0.12, None), strict=True):
            if skew_s is not None:
                asyncio.get_running_loop().call_later(skew_s, setattr, one, "noticed", True)
        begun = now()
        await asyncio.gather(*running)
        assert now() - begun < 5
        (last,) = {one.step for one in found}
        assert [one.saves for one in found] == [[last]] * 4
        for one in found:
            await one.rank.call(w.Leave())
            one.rank.trainer.kill()
        await until(lambda: last in stage.committed())
        schedules = stage.state().schedules
        assert [s.last for s in schedules.values()] == [last]
        assert schedules[launch.generation].version == 1

    play(story)


def test_the_last_step_waits_for_the_save_before_it():
    """Step 8 is not committed yet when the last one, 9 or 10, is due, and there are two slots: the
    last is not skipped for that."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        found = await loops(launch, every=8, late_s=(0.0,) * 4)
        await launch.saved(1)
        for one in found:
            one.loop.ordinal = 1
        running = begin(found)
        await until(lambda: found[0].step >= 7)
        gate = stage.hold_commit("n0")
        last = (await ask(stage, "n0", last=True)).last
        assert last in (9, 10)
        await until(lambda: found[0].step == last)
        await asyncio.sleep(1.5)
        assert not found[0].ended, "it waits"
        gate.set()
        await asyncio.gather(*running)
        assert await verdicts(found, last) == [COMMIT] * 4

    play(story, notice_s=0.5, commit_delay_low_s=40.0, commit_delay_high_s=50.0)


def test_an_agent_that_restarts_in_between_finds_the_schedule_and_its_rank_too():
    """n2's agent is killed when the last step is agreed and starts again; its rank takes its seat,
    finds the step on its new board, and all end at the same one."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        found = await loops(launch, every=1000)
        running = begin(found)
        await until(lambda: found[0].step >= 7)
        stage.crash("n2", keep_memory=True)
        last = (await ask(stage, "n0", last=True)).last
        stage.start("n2")

        async def seated():
            while True:
                try:
                    return await found[2].seat()
                except CheckpointError:
                    await asyncio.sleep(0.1)

        await seated()
        await asyncio.gather(*running)
        assert [one.step for one in found] == [last] * 4
        assert await verdicts(found, last) == [COMMIT] * 4
        assert len([f for f in stage.nodes["n2"].store.files if "board" in f]) == 1

    play(story, notice_s=3.0)


def test_a_new_generation_begins_without_the_old_ones_schedule():
    """The job was preempted; started again it has its own interval and no end, and the old record
    goes with the clean-up."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        found = await loops(launch)
        running = begin(found)
        await until(lambda: found[0].step >= 7)
        last = (await ask(stage, "n1", last=True)).last
        await asyncio.gather(*running)
        assert await verdicts(found, last) == [COMMIT] * 4
        launch = await launch.again()
        assert await launch.restore() == last
        launch.ordinal = 0
        found = await loops(launch, every=7)
        for one in found:
            one.step = last
        running = begin(found, last + 30)
        await asyncio.gather(*running)
        assert found[0].saves == [s for s in range(last + 1, last + 31) if s % 7 == 0]
        await until(lambda: not stage.state().schedules)

    play(story)


def test_who_wishes_of_an_agent_without_ranks_is_told_where_to_ask():
    async def story(stage):
        launch = await stage.launch(*FOUR)
        reply = await stage.nodes["n4"].trainer().call(w.ScheduleCall(JOB, False, "x", 5.0))
        assert "does not know the job" in reply.problems[JOB]
        reply = await stage.nodes["n0"].trainer().call(w.ScheduleCall(JOB, False, "x", 5.0))
        assert "no rank on n0 has told a step" in reply.problems[JOB]
        found = await loops(launch)
        await asyncio.gather(*begin(found, 3))
        reply = await stage.nodes["n0"].trainer().call(w.ScheduleCall("", True, "x", 5.0))
        assert reply.schedules[JOB].last in (3 + 4, 3 + 5)

    play(story)


def test_boards_go_with_their_ranks():
    """Ranks leave or die, jobs start again: no page is left, and the budget is what it was."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        for _ in range(3):
            found = await loops(launch)
            assert all(len(stage.agents[n].jobs[JOB].scheduling.pages) == 1 for n in FOUR)
            await asyncio.gather(*begin(found, 3))
            await launch.ranks[0].call(w.Leave())
            launch = await launch.again()
        launch.kill()
        await asyncio.sleep(1)
        left = [f for node in stage.nodes.values() for f in node.store.files if "board" in f]
        assert not left

    play(story)


def test_a_rank_that_asks_for_its_seat_again_before_it_was_answered_gets_it():
    """Its first question outlived its patience, as memory was being cleared: wherever the agent is
    with that one, the second is answered or told to come again, and there is one page in the end.
    """

    async def story(stage):
        launch = await stage.launch(*FOUR)
        rank = launch.ranks[1]
        stage.agents["n1"].home.doors.arena._door._fault_bytes_per_s = PAGE_BYTES / 0.01

        async def rejoin(late_s):
            await asyncio.sleep(late_s)
            return await rank.trainer.call(w.TrainerRejoin(JOB, 1, launch.generation))

        for ms in range(0, 30, 3):
            first, again = asyncio.create_task(rejoin(0)), asyncio.create_task(rejoin(ms / 1000))
            await asyncio.wait((first, again))
            assert all(not e or e.retryable for e in (first.exception(), again.exception()))
            assert (await rejoin(0)).board
            assert len([f for f in stage.nodes["n1"].store.files if "board" in f]) == 1
        await launch.saved(1)

    play(story)


def test_a_rank_without_room_for_a_board_trains_and_asks_again():
    async def story(stage):
        await asyncio.sleep(1)
        stage.fill("n1")
        launch = await stage.launch(*FOUR)
        rank = launch.ranks[1]
        call = w.TrainerRejoin(JOB, 1, launch.generation)
        assert (await rank.trainer.call(call)).board == ""
        del stage.nodes["n1"].store.files["ballast"]
        assert (await rank.trainer.call(call)).board != ""
        await launch.saved(1)

    play(story)


# -- the interval ----------------------------------------------------------------------------------


def costs(step_s, block_s, settle_s, failures_per_s, store=None):
    return Costs(step_s, Cost(block_s, settle_s), store, failures_per_s, 0.1)


def test_the_interval_follows_the_costs_and_the_bounds():
    def every(costs, now):
        return decide_intervals(costs, now, 0, Config()).schedule.every

    young = costs(1.0, 2.0, 3.0, 1 / 10_000)
    assert 180 < every(young, 20) < 220, "Young: sqrt(2 * 2 * 10000) = 200 s"
    assert "Daly" in decide_intervals(young, 20, 0, Config()).reason
    assert every(young, 150) == 150, "as good: left alone"
    assert every(costs(1.0, 2.0, 3.0, 0.0), 20) == 1800
    assert every(costs(0.1, 0.0, 30.0, 1.0), 20) == 300, "a save that settles for 30 s"
    assert every(costs(100.0, 0.0, 0.0, 1.0), 1) == 1


def test_both_intervals_come_from_one_decision_which_says_what_is_not_known():
    known = costs(1.0, 2.0, 3.0, 1 / 10_000, Cost(30.0, 120.0, 60.0))
    found = decide_intervals(known, 20, 1, Config())
    interval_s = found.schedule.offload_every * found.schedule.every
    assert 2100 < interval_s < 2800, "Young: sqrt(2 * 30 * 100000) = 2450 s"
    assert found.reason.count("Daly") == 2
    assert "not known" not in found.reason
    unknown = costs(1.0, 2.0, 3.0, 1 / 10_000, Cost(None, 0.0))
    found = decide_intervals(unknown, 150, 1, Config())
    assert (found.schedule.every, found.schedule.offload_every) == (150, 4), "600 s, the bound"
    assert "lower bound; what uploads slow is not known yet" in found.reason
    assert decide_intervals(unknown, 150, 9, Config()).schedule.offload_every == 9, "as good"


def test_auto_chooses_an_interval_and_says_why():
    """Saves cost next to nothing and failures are rare: every 20 steps of a quarter second is too
    often for bounds of 20 to 60 s. It is changed once, alike on all ranks, and commits go on."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        found = await loops(launch, auto=True)
        await asyncio.gather(*begin(found, 1200))
        assert all(one.saves == found[0].saves for one in found)
        gaps = [b - a for a, b in zip(found[0].saves, found[0].saves[1:], strict=False)]
        assert found[0].saves[0] == 20
        assert gaps[-1] * PACE_S >= 20
        schedule = stage.state().schedules[launch.generation]
        assert schedule.version <= 2
        assert schedule.by == "n0"
        facts = (await stage.status("n0"))["schedule"]
        assert facts["auto"] is True
        assert facts["every"] == gaps[-1]
        assert "a save blocks" in facts["why"]
        assert facts["settle_s"] > 0
        json.dumps(facts)
        for step in found[0].saves:
            assert await verdicts(found, step) == [COMMIT] * 4, step

    play(story, every_low_s=20.0, every_high_s=60.0)


def test_what_the_hook_said_stands_where_nobody_left_it_to_the_agents():
    async def story(stage):
        launch = await stage.launch(*FOUR)
        found = await loops(launch)
        await asyncio.gather(*begin(found, 200))
        assert found[0].saves == list(range(20, 201, 20))
        assert not stage.state().schedules
        assert isinstance(stage.state().generation, r.Generation)

    play(story, every_low_s=20.0, every_high_s=60.0)
