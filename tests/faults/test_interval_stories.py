"""Stories of the two intervals with every="auto": saves to RAM, and every Nth of them to the store.

Four ranks on n0 to n3 train and save by `Looping`; a step takes a second. The RAM interval is kept
at 4 steps by its bounds, so that one number moves: N, which the agents' setting has at 1.
"""

import asyncio
import json

from stage import COMMIT, JOB, play, until
from test_schedule_stories import FOUR, Looping

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.tuning import tiers_of
from p2pckpt.cli.status import _text
from p2pckpt.save.due import Wish
from p2pckpt.save.offload import due
from p2pckpt.save.schedule import decide_schedule
from p2pckpt.traffic import Traffic

EVERY = 4
FIXED = {"every_low_s": 3.9, "every_high_s": 4.1, "offload_every": 1, "s3_url": "s3://bucket"}
TEN = {**FIXED, "offload_low_s": 39.0, "offload_high_s": 41.0}
"""N is to be 10."""


class Ranks:
    """The ranks of a launch, under way from a step on."""

    def __init__(self, found):
        self.found = found
        self.tasks = [asyncio.create_task(one.run()) for one in found]

    async def at(self, step):
        await until(lambda: self.found[0].step >= step, 2000)

    async def all_commit(self):
        """Every save of this launch so far committed, and none was skipped."""
        rank = self.found[0]
        assert rank.saves == [s for s in range(rank.saves[0], rank.step + 1) if s % EVERY == 0]
        for one in self.found:
            for step, told in one.outcomes.items():
                assert (await told).verdict is COMMIT, step


async def train(stage, launch, step=0, kind=Looping, restore_s=0.0, **options):
    found = []
    for rank in launch.ranks:
        one = kind(rank, EVERY, **{"auto": True, "pace_s": 1.0, **options})
        one.step, one.loop.restore_s = step, restore_s
        await one.seat()
        found.append(one)
    return Ranks(found)


async def begin(stage, **options):
    """A store, all agents with it, and a job that trains."""
    stage.cluster.add_bucket()
    for name in list(stage.nodes):
        stage.restart(name)
    return await train(stage, await stage.launch(*FOUR), **options)


def named(stage):
    """(number, N that it names) of every commit that there ever was."""
    changes = stage.etcd.changes(r.JobKeys(JOB).commits, 0)
    commits = [w.unpack(c.value, r.Commit) for c in changes if c.value is not None]
    return [(c.number, c.offload_every) for c in commits]


def wanted(stage):
    """The steps that were to go out, by what their commits name."""
    return {n * EVERY for n, every in named(stage) if n % (every or 1) == 0}


def went_out(stage):
    """The steps that ever lay whole in the store."""
    changes = stage.etcd.changes(r.JobKeys(JOB).offloads, 0)
    found = [w.unpack(c.value, r.Offloaded) for c in changes if c.value is not None]
    return {o.commit.attempt.step for o in found}


def clean_behind(stage):
    """No reader's record, no report of a share, nothing in RAM but what the job retains."""
    keys = r.JobKeys(JOB)
    readers = [e.key for e in stage.etcd.list(keys.root + "readers/").entries]
    reports = [e.key for e in stage.etcd.list(keys.shares).entries]
    return not readers and not reports and len({h.attempt for _, h in stage.held()}) == 1


def test_n_is_changed_in_a_running_job_and_uploads_follow_it():
    """From every save to every tenth: all ranks go on as before, what was due at the change
    still goes out, and `status` says N, why, and what would be as good."""

    async def story(stage):
        ranks = await begin(stage)
        await ranks.at(33 * EVERY)
        await ranks.all_commit()
        (schedule,) = stage.state().schedules.values()
        assert (schedule.offload_every, schedule.version, schedule.by) == (10, 1, "n0")
        assert schedule.plan == ((0, EVERY),)
        assert "to the store one of 10: a save blocks" in schedule.reason
        ns = [every for _, every in named(stage)]
        assert ns[0] == 0
        assert ns[2:] == [10] * (len(ns) - 2)
        await until(lambda: went_out(stage) == wanted(stage))
        assert went_out(stage) >= {EVERY, 10 * EVERY, 20 * EVERY, 30 * EVERY}
        assert len(went_out(stage)) <= 5
        facts = (await stage.status("n0"))["schedule"]
        assert (facts["every"], facts["store"]["every"], facts["store"]["set"]) == (4, 10, 1)
        assert facts["store"]["as_good_s"] == [39, 41]
        assert "bound" in facts["store"]["why"]
        assert 0 < facts["settle_s"] < facts["store"]["settle_s"]
        assert 0 < facts["overhead"] < 1
        json.dumps(facts)
        text = await text_of(stage, "n0")
        assert "saves every 4 steps (chosen: a save blocks" in text
        assert "one of 10 saves goes to S3 (chosen: a save blocks" in text
        assert "as good: 39 to 41 s" in text
        assert "one of 10 saves goes to S3 (chosen; the agent of rank 0" in await text_of(
            stage, "n1"
        )
        for task in ranks.tasks:
            task.cancel()
        await until(lambda: clean_behind(stage))

    play(story, **TEN)


async def text_of(stage, node):
    reply = await stage.nodes[node].trainer().call(w.StatusQuery())
    return _text(json.loads(reply.document))


class Slowed(Looping):
    """A loop whose steps take a quarter longer while anybody uploads."""

    stage = None

    @property
    def pace_s(self):
        homes = [agent.home for agent in self.stage.agents.values()]
        loads = [load.traffic for home in homes for load in home.governing._loads]
        return 1.25 if Traffic.OFFLOAD in loads else 1.0

    @pace_s.setter
    def pace_s(self, _): ...


def test_n_follows_what_uploads_slow_and_how_often_the_job_fails():
    """An upload takes some 20 s and slows steps by a fifth; one of two failures is deep. With a
    failure an hour N becomes what the decider says, and less when the job has failed often."""

    async def story(stage):
        Slowed.stage = stage
        ranks = await begin(stage, kind=Slowed)
        stage.cluster.bucket.slow(450)
        await ranks.at(90 * EVERY)
        await ranks.all_commit()
        tuning = stage.agents["n0"].jobs[JOB].scheduling.tuning
        costs = tuning.costs(stage.agents["n0"].jobs[JOB].scheduling.seen())
        assert 20 < costs.store.settle_s < 45
        assert 3 < costs.store.block_s < 5
        calm = tuning.offload_every
        assert calm > 40
        tiers = tiers_of(costs, stage.config)
        best = decide_schedule(*tiers, costs.failures_per_s, costs.deep_share)
        low, high = best.store.flat_s
        assert low <= calm * EVERY <= high
        # seven launches in a row that end soon
        step = ranks.found[0].step
        for _ in range(7):
            launch = await again(ranks)
            step = await launch.restore()
            ranks = await train(stage, launch, step, kind=Slowed)
            await ranks.at(step + 6)
        await ranks.at(step + 30 * EVERY)
        restless = tuning.offload_every
        assert restless < calm / 1.5
        costs = tuning.costs(stage.agents["n0"].jobs[JOB].scheduling.seen())
        tiers = tiers_of(costs, stage.config)
        best = decide_schedule(*tiers, costs.failures_per_s, costs.deep_share)
        assert best.store.flat_s[0] <= restless * EVERY <= best.store.flat_s[1]
        assert stage.state().schedules[launch.generation].offload_every == restless

    play(
        story, limit_s=20_000, nic_bytes_s=10_000_000_000, mtbf_prior_s=3600.0,
        deep_share_prior=0.5, offload_low_s=4.0, offload_high_s=4000.0,
        **{**FIXED, "offload_every": 12},
    )  # fmt: skip


async def again(ranks):
    """The job fails, and is launched again, joined."""
    for task in ranks.tasks:
        task.cancel()
    await asyncio.gather(*ranks.tasks, return_exceptions=True)
    return await ranks.found[0].rank.launch.again()


def test_n_changes_while_the_store_is_away_and_a_due_step_waits():
    """The upload of the first save waits for the store as N becomes 10: it stays due, nothing is
    left half, saves take their time as ever, and after the outage what was due goes out."""

    async def story(stage):
        ranks = await begin(stage)
        stage.cluster.bucket.outage()
        await until(lambda: stage.events("note.offload_later"), 60)
        await until(lambda: stage.state().schedules)
        assert next(iter(stage.state().schedules.values())).offload_every == 10
        assert (await stage.status("n1"))["offload_due"] == [EVERY]
        await ranks.at(23 * EVERY)
        await ranks.all_commit()
        assert went_out(stage) == set()
        assert (await stage.status("n1"))["offload_due"] == [EVERY, 10 * EVERY, 20 * EVERY]
        stage.cluster.bucket.outage(0)
        await until(lambda: {EVERY, 10 * EVERY, 20 * EVERY} <= went_out(stage))
        await ranks.at(30 * EVERY)
        await ranks.all_commit()
        assert went_out(stage) <= wanted(stage)
        for task in ranks.tasks:
            task.cancel()
        await until(lambda: clean_behind(stage))

    play(story, **TEN)


def test_n_changes_in_the_middle_of_an_upload():
    """The bytes of a step go out as N changes, again and again: each commit is what it was made,
    and what is due goes out whole."""

    async def story(stage):
        ranks = await begin(stage, auto=False)
        stage.cluster.bucket.slow(20_000)
        scheduling = stage.agents["n0"].jobs[JOB].scheduling
        for n in (3, 2, 7, 4, 5):
            held = len(stage.events("note.share_offloaded"))
            await until(lambda held=held: len(stage.events("note.share_offloaded")) > held)
            await scheduling.wish(Wish(offload_every=n, by="n0", reason="story"))
        at = ranks.found[0].step
        await ranks.at(at + 12 * EVERY)
        await ranks.all_commit()
        assert {every for _, every in named(stage)} == {0, 3, 2, 7, 4, 5}
        stage.cluster.bucket.slow(1e8)
        await ranks.at(at + 14 * EVERY)
        for task in ranks.tasks:
            task.cancel()
        await until(lambda: clean_behind(stage))
        dropped = {f["step"] for f in stage.events("note.offload_dropped")}
        assert wanted(stage) - dropped == went_out(stage)

    play(story, **FIXED)


def test_agents_that_hear_of_another_n_at_different_times_agree_on_every_commit():
    """n3 is cut off from etcd as N changes: it goes by what it knew, and when it is back all agents
    have the same commits due, and never wanted others."""

    async def story(stage):
        ranks = await begin(stage, auto=False)
        await ranks.at(6 * EVERY)
        stage.cluster.bucket.outage()
        stage.cluster.cut_from_ledger("n3")
        scheduling = stage.agents["n0"].jobs[JOB].scheduling
        await scheduling.wish(Wish(offload_every=3, by="n0", reason="story"))
        await asyncio.sleep(2)
        old = stage.agents["n3"].jobs[JOB].ctx.state
        assert not old.schedules
        views = {c.attempt.key for c in due(old, 1)}
        assert views <= {c.attempt.key for c in due(stage.state(), 1)}
        stage.cluster.heal()
        step = ranks.found[0].step
        await ranks.at(step + 8 * EVERY)

        def agree():
            states = [stage.agents[name].jobs[JOB].ctx.state for name in FOUR]
            return len({tuple(c.attempt.key for c in due(state, 1)) for state in states}) == 1

        await until(agree)
        stage.cluster.bucket.outage(0)
        await ranks.at(step + 12 * EVERY)
        for task in ranks.tasks:
            task.cancel()
        await until(lambda: clean_behind(stage))
        dropped = {f["step"] for f in stage.events("note.offload_dropped")}
        number = dict(named(stage))
        assert set(number.values()) == {0, 3}
        steps = {commit.attempt.step for commit in commits(stage) if is_due(commit)}
        assert steps - dropped == went_out(stage)

    play(story, lease_s=60.0, **FIXED)


def commits(stage):
    changes = stage.etcd.changes(r.JobKeys(JOB).commits, 0)
    return [w.unpack(c.value, r.Commit) for c in changes if c.value is not None]


def is_due(commit):
    return commit.number % (commit.offload_every or 1) == 0


def test_a_restore_from_the_store_is_learned_of_and_n_begins_anew():
    """All RAM is lost; the job comes back from the store. The next generation begins with the
    agents' setting, knows that one restore of one was deep and how long it took, and is tuned."""

    async def story(stage):
        ranks = await begin(stage)
        await ranks.at(12 * EVERY)
        await until(lambda: 10 * EVERY in went_out(stage))
        for task in ranks.tasks:
            task.cancel()
        await asyncio.gather(*ranks.tasks, return_exceptions=True)
        launch = ranks.found[0].rank.launch
        launch.kill()
        for name in list(stage.nodes):
            stage.crash(name)
            stage.start(name)
        await asyncio.sleep(30)
        launch = await launch.again()
        assert await launch.restore() == 10 * EVERY
        (decision,) = stage.state().decisions.values()
        assert decision.stored
        ranks = await train(stage, launch, 10 * EVERY, restore_s=77.0)
        await ranks.at(10 * EVERY + 2)
        assert (await stage.status("n0"))["schedule"]["store"]["every"] == 1
        await ranks.at(24 * EVERY)
        await ranks.all_commit()
        facts = (await stage.status("n0"))["schedule"]
        assert facts["deep_share"] == (0.01 * 10 + 1) / 11
        assert facts["store"]["restore_s"] == 77.0
        assert facts["store"]["every"] == 10
        # a launch that RAM brings back
        launch = await again(ranks)
        step = await launch.restore()
        (decision,) = stage.state().decisions.values()
        assert not decision.stored
        ranks = await train(stage, launch, step, restore_s=3.0)
        await ranks.at(step + 3 * EVERY)
        facts = (await stage.status("n0"))["schedule"]
        assert facts["deep_share"] == (0.01 * 10 + 1) / 12
        assert facts["store"]["restore_s"] == 77.0

    play(story, **TEN, decide_wait_s=5.0)


def test_an_agent_that_starts_again_goes_on_with_n_as_it_was():
    async def story(stage):
        ranks = await begin(stage)
        await until(lambda: stage.state().schedules)
        stage.restart("n0")
        await ranks.at(12 * EVERY)
        (schedule,) = stage.state().schedules.values()
        assert (schedule.offload_every, schedule.version) == (10, 1)
        assert (await stage.status("n0"))["schedule"]["store"]["every"] == 10

    play(story, **TEN)


def test_a_store_that_is_slower_than_steps_fall_due_has_some_of_them_whole():
    """Every save is due, every 4 s, and an upload takes over 30: what is given up is none of those
    that are on their way, whoever of the nodes is done with its part, or has none."""

    async def story(stage):
        ranks = await begin(stage, auto=False)
        stage.cluster.bucket.slow(450)
        await ranks.at(50 * EVERY)
        await ranks.all_commit()
        assert len(went_out(stage)) >= 3
        assert max(went_out(stage)) >= 20 * EVERY
        given_up = {facts["step"] for facts in stage.events("note.offload_dropped")}
        begun = {facts["step"] for facts in stage.events("note.share_offloaded")}
        assert len(given_up) > 30
        assert not given_up & begun

    play(story, **FIXED)


def test_a_fixed_interval_keeps_the_agents_n():
    async def story(stage):
        ranks = await begin(stage, auto=False)
        await ranks.at(12 * EVERY)
        await ranks.all_commit()
        assert not stage.state().schedules
        await until(lambda: went_out(stage) == wanted(stage))
        text = await text_of(stage, "n0")
        assert "every save goes to S3\n" in text

    play(story, **TEN)


def test_a_store_that_is_off_is_not_turned_on():
    async def story(stage):
        ranks = await begin(stage)
        await ranks.at(12 * EVERY)
        await ranks.all_commit()
        assert stage.cluster.bucket.objects == {}
        assert (await stage.status("n0"))["schedule"]["store"] is None
        assert {every for _, every in named(stage)} == {0}

    play(story, **{**TEN, "offload_every": 0})
