"""The governor's judgement, step by step under virtual time: what slows it, and what does not."""

import asyncio
from random import Random

import pytest
from msgspec import structs

from p2pckpt import records as r
from p2pckpt.agent.governing import LOWEST, Clock, Governed, Governing, Steps, judge
from p2pckpt.backends.inproc.cluster import FakeCluster
from p2pckpt.config import Config
from p2pckpt.ports import Region
from p2pckpt.traffic import Traffic
from simulations.world import clock

NIC = 10_000_000_000
LEAST = Config().floor_bytes_per_s / 8


def steps(idle, busy):
    made = Steps()
    made.idle_s.extend(idle)
    made.busy_s.extend(busy)
    return judge(made)


def test_medians_are_compared_with_the_percentage_stated():
    assert steps([1.0] * 5, [1.09, 1.09, 9.0]).slowed is False
    found = steps([1.0] * 5, [1.11, 1.11, 0.5])
    assert found.slowed
    assert found.reason == "steps take 1.11 s with transfers, 1 s without"


def test_few_steps_say_nothing():
    assert steps([1.0] * 4, [9.0] * 10).slowed is None
    assert steps([1.0] * 64, [9.0] * 2).slowed is None


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_vary_by_themselves_are_no_reason(seed):
    """Lengths of sequences differ: half of a median's luck is above the other's. It backs off for
    nothing in fewer than one of twenty judgements, and sees what is real."""
    chance = Random(seed)

    def some(count, slow=1.0):
        return [slow * chance.uniform(0.5, 1.5) for _ in range(count)]

    wrong = sum(bool(steps(some(40), some(3)).slowed) for _ in range(400))
    assert wrong < 20
    seen = sum(bool(steps(some(40), some(9, slow=2.0)).slowed) for _ in range(400))
    assert seen > 300


def test_a_clock_tells_the_part_of_a_span():
    ticking = Clock()
    assert ticking.busy_part(0.0, 1.0) is None
    for tenth in range(101):
        ticking.advance(tenth / 10, busy=50 < tenth <= 75)
        ticking.look(tenth / 10)
    assert ticking.busy_part(10.0, 2.0) == 0
    assert ticking.busy_part(10.0, 5.0) == pytest.approx(0.5)
    assert ticking.busy_part(10.0, 10.0) == pytest.approx(0.25)
    assert ticking.busy_part(10.0, 10.5) is None


class Training:
    """A loop whose steps take `usual_s`, and longer by `slow` while the governor lets much move."""

    def __init__(self, governing, usual_s=1.0, slow=lambda rate: 1.0):
        self.governing, self.usual_s, self.slow = governing, usual_s, slow
        self.step, self.last_s = 0, 0.0
        governing.progress = self.told

    def told(self):
        nothing = (1, 0.0, 0.0, 0.0, 0)
        progress = r.Progress(1, self.step, self.step, *nothing[:1], 10, False, *nothing[1:])
        return {"job": structs.replace(progress, last_s=self.last_s)} if self.step else {}

    async def run(self):
        while True:
            begun = asyncio.get_running_loop().time()
            await asyncio.sleep(self.usual_s * self.slow(sum(self.governing.rates.values())))
            self.step, self.last_s = self.step + 1, asyncio.get_running_loop().time() - begun


def play(story, slow=lambda rate: 1.0, **settings):
    """The story beside a training loop."""

    async def main():
        cluster = FakeCluster(1)
        doors = cluster.node("n", budget_bytes=1 << 20).doors()
        await doors.arena.reserve("file", 1 << 16)
        governing = Governing(Config(nic_bytes_s=NIC, **settings), doors.transport)
        tasks = [
            asyncio.create_task(Training(governing, slow=slow).run()),
            asyncio.create_task(governing.loop()),
        ]
        try:
            await story(governing, Governed(doors.transport, governing))
        finally:
            for task in tasks:
                task.cancel()

    clock.run(main(), limit_s=100_000)


def test_it_halves_while_steps_are_slowed_and_comes_back_in_steps():
    """Steps take twice as long while more than 2 GB/s move: it finds a level below, tries a little
    more again and again, and is at the top some time after the transfers."""

    async def story(governing, _):
        await asyncio.sleep(20)
        assert governing.level == 1
        with governing.moving(Traffic.REPAIR):
            levels = []
            for _ in range(600):
                await asyncio.sleep(0.5)
                levels.append(governing.level)
            assert levels[0] == 1
            assert min(levels[100:]) < 0.2
            assert max(levels[100:]) < 0.4, "it stays about where steps are not slowed"
            assert len(set(levels[200:])) > 1, "and tries again"
        await asyncio.sleep(200)
        assert governing.level == 1

    play(story, slow=lambda rate: 2.0 if rate > 2e9 else 1.0)


def test_the_floor_of_a_save_stands_whatever_it_costs():
    async def story(governing, transport):
        await asyncio.sleep(20)
        with governing.moving(Traffic.REPAIR), governing.moving(Traffic.OFFLOAD):
            governing.begin(Traffic.SAVE, 40_000_000_000, 50.0, inward=True)
            governing.begin(Traffic.SAVE, 10_000_000_000, 50.0, inward=False)
            assert governing.rates[Traffic.SAVE] == pytest.approx(NIC * 8 / 14)
            await asyncio.sleep(100)
            assert governing.level == LOWEST
            assert governing.rates == {
                Traffic.SAVE: pytest.approx(1e9),  # 40 GB in 50 s, and a quarter
                Traffic.REPAIR: LEAST,
                Traffic.OFFLOAD: LEAST,
            }
            facts = governing.facts()
            assert facts["rates_bytes_s"]["save"] == 1_000_000_000
            assert "with transfers" in facts["why"]

    play(story, slow=lambda rate: 2.0 if rate else 1.0)


def test_slow_steps_without_transfers_and_short_transfers_say_nothing():
    """Every fifth step is an evaluation, ten times as long; a transfer takes a tenth of a step."""
    count = iter(range(10_000))

    async def story(governing, _):
        for _ in range(50):
            await asyncio.sleep(5)
            with governing.moving(Traffic.OFFLOAD):
                await asyncio.sleep(0.1)
            assert governing.level == 1
        assert not governing._steps["job"].busy_s

    play(story, slow=lambda _: 10.0 if next(count) % 5 == 0 else 1.0)


def test_without_a_measured_network_and_without_training_nothing_is_held_back():
    async def untold():
        doors = FakeCluster(1).node("n", budget_bytes=1 << 20).doors()
        unknown = Governing(Config(), doors.transport)
        with unknown.moving(Traffic.REPAIR):
            assert unknown.rates == {}
        await unknown.loop()  # there is nothing to look at

        known = Governing(Config(nic_bytes_s=NIC), doors.transport, level=0.2)
        known.look(1.0)
        assert known.level == 1
        assert known.why == "no job trains here"

    clock.run(untold(), limit_s=10)


def test_what_goes_through_the_door_is_under_way_until_it_is_over():
    async def story(governing, transport):
        region = Region("file", 0, 1 << 16)
        grant = await transport.expect(region, Traffic.REPAIR, 5.0)
        assert governing.rates.keys() == {Traffic.REPAIR}
        send = (transport.address, grant.nonce, region, 5.0, Traffic.DRAIN)
        sending = asyncio.create_task(transport.send(*send))
        await asyncio.sleep(0)
        assert governing.rates.keys() == {Traffic.REPAIR, Traffic.DRAIN}
        await grant.received(5.0)
        await sending
        assert not governing._loads
        cancelled = await transport.expect(region, Traffic.SAVE, 5.0)
        await cancelled.cancel()
        await cancelled.cancel()
        await transport.expect(region)  # a restore
        assert not governing._loads
        assert governing.rates == {}

    play(story)


# -- uploads ---------------------------------------------------------------------------------------


def test_what_uploads_slow_is_told_by_the_steps_beside_them():
    """Steps take 1 s, and 1.25 s beside an upload: a fifth of that time is lost. Repair beside no
    upload, which slows more, says nothing of uploads; nor do uploads that no step was seen beside.
    """
    slow = {"by": 1.0}

    async def story(governing, _):
        assert governing.upload_slowdown("job") is None
        await asyncio.sleep(20)
        assert governing.upload_slowdown("job") is None, "no upload was seen"
        slow["by"] = 3.0
        with governing.moving(Traffic.REPAIR):
            await asyncio.sleep(30)
        assert governing.uploading_s == 0
        slow["by"] = 1.0
        await asyncio.sleep(60)
        slow["by"] = 1.25
        with governing.moving(Traffic.OFFLOAD):
            await asyncio.sleep(30)
        slow["by"] = 1.0
        await asyncio.sleep(20)
        assert governing.uploading_s == pytest.approx(30)
        assert governing.upload_slowdown("job") == pytest.approx(0.2, abs=0.02)
        assert governing.upload_slowdown("another") is None

    play(story, slow=lambda rate: slow["by"])


def test_uploads_that_slow_nothing_cost_nothing():
    async def story(governing, _):
        await asyncio.sleep(20)
        with governing.moving(Traffic.OFFLOAD):
            await asyncio.sleep(30)
        assert governing.upload_slowdown("job") == pytest.approx(0.0, abs=1e-6)

    play(story)
