"""Stories of the governor: training, saves, repair and offload on one slow network.

Four ranks on n0 to n3 train; n4 and n5 hold shards. A link has 2 MB/s each way, a snapshot 2 MB. A
step takes half a second, and half as long again while more than SPARE bytes a second pass the
node's links for others: what `Links` measures on the fake network, not what anybody claims. As in
real training, the slowest rank sets the pace of all.
"""

import asyncio
import json
from random import Random

import pytest
from msgspec.structs import replace
from stage import COMMIT, now, play, until
from test_schedule_stories import FOUR, Looping

from p2pckpt import wire as w
from p2pckpt.agent import rereading
from p2pckpt.backends.inproc.workers import InlineWorkers
from p2pckpt.records import FileKind
from p2pckpt.traffic import Traffic
from simulations.world.story import Options, run

NIC = 500_000
SPARE = 100_000
SIZE = 2_000_000
NETWORK = {
    "bytes_per_s": NIC,
    "nic_bytes_s": NIC,
    "floor_bytes_per_s": NIC // 10,
    "budget_bytes": 1 << 26,
}


def snapshot(rank, step):
    """Larger than the stage's."""
    return Random(f"{rank} {step}").randbytes(SIZE)


class Links:
    """What passes each node's links, as the network sees it."""

    def __init__(self, net):
        self.passed = []
        self._pass_piece, net.pass_piece = net.pass_piece, self.pass_piece

    def hear(self, bucket):
        """What goes to the object store counts, too: as if from each of the four alike."""
        reach = bucket.reach

        async def heard(count=0):
            await reach(count)
            self.passed += [(now(), name, "store", count / 4) for name in FOUR]

        bucket.reach = heard

    async def pass_piece(self, source, target, count):
        await self._pass_piece(source, target, count)
        self.passed.append((now(), source, target, count))

    def rate(self, nodes, span_s, until_s=None):
        """Bytes a second of the busiest of these nodes, in or out, in the newest seconds."""
        end, ways = now() if until_s is None else until_s, {}
        for at, source, target, count in reversed(self.passed):
            if at <= end - span_s:
                break
            if at <= end:
                for way in ((source, "out"), (target, "in")):
                    ways[way] = ways.get(way, 0) + count
        return max((n for (node, _), n in ways.items() if node in nodes), default=0) / span_s


class Training(Looping):
    """A rank whose steps are slowed by what moves, anywhere in the job."""

    def __init__(self, links, minds, *args, **options):
        super().__init__(*args, **options)
        self.links, self.minds = links, minds

    @property
    def pace_s(self):
        return 0.75 if self.minds and self.links.rate(FOUR, 1.0) > SPARE else 0.5

    @pace_s.setter
    def pace_s(self, _): ...

    async def save(self):
        begun, ordinal = now(), self.loop.begin_save()
        self.saves.append(self.step)
        await self.rank.write(ordinal, self.step, snapshot(self.rank.rank, self.step))
        self.loop.saved(now() - begun)
        self.outcomes[self.step] = asyncio.create_task(self.rank.outcome(ordinal, self.step))


class Run:
    """Four ranks under way, and the levels of their nodes' governors, looked at twice a second."""

    def __init__(self, stage, launch, every, minds):
        self.stage, self.levels = stage, []
        self.links = Links(stage.net)
        self.ranks = [Training(self.links, minds, rank, every) for rank in launch.ranks]

    async def begin(self):
        for one in self.ranks:
            await one.seat()
        self.tasks = [asyncio.create_task(one.run()) for one in self.ranks]
        self.tasks.append(asyncio.create_task(self._watch()))

    async def _watch(self):
        while True:
            agents = [self.stage.agents[name].home.governing for name in FOUR]
            self.levels.append((now(), [governing.level for governing in agents]))
            await asyncio.sleep(0.5)

    async def at_step(self, step):
        await until(lambda: self.ranks[0].step >= step, 1000)

    def lowest(self, begun=0.0):
        return min(level for at, some in self.levels if at >= begun for level in some)

    async def all_committed(self):
        outcomes = [o for one in self.ranks for o in one.outcomes.values()]
        told = await asyncio.gather(*outcomes)
        assert {o.verdict for o in told} == {COMMIT}, [o.reason for o in told]
        return len(told) // len(self.ranks)


async def train(stage, every, minds=True):
    run = Run(stage, await stage.launch(*FOUR), every, minds)
    await run.begin()
    return run


def test_steps_grow_the_offload_goes_slower_saves_are_in_time_and_it_comes_back():
    """Every save goes to the store as well. Steps grow as bytes move, and the offload goes slower
    until they do not, with a try to go faster now and then; saves take what their deadline needs,
    and commit. When nothing moves for a while the level is where it was."""

    async def story(stage):
        stage.cluster.add_bucket()
        for name in list(stage.nodes):
            stage.restart(name)
        run = await train(stage, every=150)
        run.links.hear(stage.cluster.bucket)
        await run.at_step(149)
        assert run.lowest() == 1
        await run.at_step(150)
        begun = now()
        await asyncio.sleep(3)
        assert run.links.rate(FOUR, 2.0) > NIC / 2
        await until(lambda: len(stage.state().offloaded) == 1)
        assert run.lowest(begun) < 0.2
        late = [run.links.rate(FOUR, 2.0, t) for t, _ in run.levels if begun + 12 < t < now()]
        assert len(late) > 20, "the offload takes its time"
        assert max(late) < NIC / 2
        assert sorted(late)[len(late) // 2] < 1.5 * SPARE
        await run.at_step(450)
        assert await run.all_committed() == 3
        for one in run.ranks:
            one.every = one.loop.every = 10_000
            one.loop.schedule = replace(one.loop.schedule, plan=((0, 10_000),))
        await until(lambda: len(stage.state().offloaded) >= 2)
        await asyncio.sleep(150)
        assert run.levels[-1][1] == [1.0] * 4
        assert "nothing moved" in stage.agents["n0"].home.governing.why

    play(story, nodes=6, offload_every=1, **NETWORK)


def test_repair_goes_slower_as_steps_grow_and_still_gets_done():
    """The two nodes that only hold shards are lost: what was there is put elsewhere, at first by
    all of the network, then by as much as training does not mind."""

    async def story(stage):
        run = await train(stage, every=240)
        await until(lambda: 240 in stage.committed(), 1000)
        await asyncio.sleep(60)
        lost = now()
        stage.crash("n4", "n5")
        await until(lambda: len(stage.held(FileKind.SHARD, 240)) == 12)
        assert not any(facts["unplaced"] for facts in stage.events("note.repaired"))
        rates = [(t - lost, run.links.rate(FOUR, 2.0, t)) for t, _ in run.levels if t > lost]
        assert max(rate for _, rate in rates) > 0.8 * NIC
        fast = [at for at, rate in rates if rate > 1.5 * SPARE]
        slow = [at for at, rate in rates if 0 < rate <= 1.5 * SPARE and at > max(fast)]
        assert max(fast) - min(fast) < 8, "three judgements of three steps each"
        assert len(slow) >= 8
        assert run.lowest(lost) <= 0.25
        await run.at_step(482)
        assert await run.all_committed() == 2

    play(story, nodes=6, **NETWORK)


@pytest.mark.parametrize("seed", range(3))
def test_a_save_in_the_middle_of_a_repair_is_in_time(seed):
    """Step 120 is saved while step 60 is repaired and the level is at its lowest: it takes nearly
    all of the time that a holder has before it is taken for silent, and no more."""

    async def story(stage):
        run = await train(stage, every=60)
        await until(lambda: 60 in stage.committed())
        stage.crash("n4", "n5")
        await run.at_step(185)
        assert await run.all_committed() == 3
        assert run.lowest() < 0.1
        begun, took_s = {}, []
        for at, who, what, facts in stage.heard:
            if what == "note.encoded":
                begun[who, facts["attempt"]] = at
            elif what == "note.sent":
                took_s.append(at - begun[who, facts["attempt"]])
        patience_s = stage.config.patience_s(SIZE // 2)
        assert patience_s / 2 < max(took_s) < patience_s

    play(story, seed=seed, nodes=6, **NETWORK)


LARGE = 20_000_000
PERIOD_S = 120.0


class Cores:
    """A slow core of each node that reads again what it holds, and training that minds it: steps
    take half as long again while any node's core reads for over a quarter of a second."""

    bytes_per_s = 8e6

    def __init__(self, monkeypatch):
        self.reads, self.slowed = [], 0
        usual = InlineWorkers.run

        async def run(workers, work, cost_bytes, traffic=Traffic.RESTORE):
            if traffic is not Traffic.SCRUB:
                return await usual(workers, work, cost_bytes, traffic)
            begun = now()
            await asyncio.sleep(cost_bytes / self.bytes_per_s)
            self.reads.append((begun, now(), cost_bytes, workers))
            return work()

        monkeypatch.setattr(InlineWorkers, "run", run)
        monkeypatch.setattr(rereading, "PART_BYTES", 1 << 18)  # short against a step, as real ones

    def busy_s(self, span_s):
        """Of the busiest core, in the newest seconds."""
        cores = {}
        for begun, end, _, core in reversed(self.reads):
            if end < now() - span_s:
                break
            cores[core] = cores.get(core, 0.0) + max(0.0, end - max(begun, now() - span_s))
        return max(cores.values(), default=0.0)


class Minding(Looping):
    """A rank that saves once; its steps are slowed by what cores read, anywhere in the job."""

    def __init__(self, cores, *args, **options):
        super().__init__(*args, **options)
        self.cores, self.paces_s = cores, []

    @property
    def pace_s(self):
        self.paces_s.append(0.75 if self.cores.busy_s(1.0) > 0.25 else 0.5)
        return self.paces_s[-1]

    @pace_s.setter
    def pace_s(self, _): ...

    async def save(self):
        image = Random(f"{self.rank.rank}").randbytes(LARGE)
        await self.rank.write(self.loop.begin_save(), self.step, image)
        self.loop.every = 10_000
        self.loop.schedule = replace(self.loop.schedule, plan=((0, 10_000),))


def slowed_by_reading(monkeypatch, nic):
    """The part of steps that was slowed in two periods, bytes that were read, the lowest level,
    and how late anything was."""
    found = []

    async def story(stage):
        cores = Cores(monkeypatch)
        launch = await stage.launch(*FOUR)
        ranks = [Minding(cores, rank, 12) for rank in launch.ranks]
        for one in ranks:
            await one.seat()
        tasks = [asyncio.create_task(one.run()) for one in ranks]
        await until(lambda: 12 in stage.committed(), 300)
        begun, late_s, levels = now(), [], []
        while now() < begun + 2 * PERIOD_S:
            await asyncio.sleep(1)
            agents = [stage.agents[name] for name in FOUR]
            late_s += [agent.scrubbing.shown()["late_s"] for agent in agents]
            levels += [agent.home.governing.level for agent in agents]
        slow = sum(pace_s == 0.75 for pace_s in ranks[0].paces_s)
        read = sum(size for _, _, size, _ in cores.reads)
        found.extend((slow / len(ranks[0].paces_s), read, min(levels), max(late_s)))
        for task in tasks:
            task.cancel()

    network = {"bytes_per_s": 50e6, "nic_bytes_s": nic, "floor_bytes_per_s": 5_000_000}
    play(story, nodes=4, scrub_period_s=PERIOD_S, budget_bytes=1 << 28, **network)
    return found


def test_steps_grow_what_is_held_is_read_again_more_slowly_and_still_in_time(monkeypatch):
    """A step of 20 MB a rank at rest, read again every 2 minutes by slow cores. Where no governor
    is (no network was measured) it goes at its own pace; with one, fewer steps are slowed, as much
    is read, and nothing is late."""
    with monkeypatch.context() as patch:
        slow, read, level, late_s = slowed_by_reading(patch, nic=0)
    assert (level, late_s) == (1, 0)
    spared = slowed_by_reading(monkeypatch, nic=50_000_000)
    print(f"steps slowed: {slow:.1%} without a governor, {spared[0]:.1%} with one")
    assert spared[0] < slow / 2
    assert spared[1] > 0.6 * read
    assert spared[2] <= 0.25
    assert spared[3] == 0


def test_training_that_does_not_mind_leaves_it_all_the_network():
    async def story(stage):
        run = await train(stage, every=60, minds=False)
        await run.at_step(130)
        assert await run.all_committed() == 2
        assert run.lowest() == 1
        assert max(run.links.rate(FOUR, 2.0, t) for t, _ in run.levels) > 0.8 * NIC
        assert "with transfers" in stage.agents["n0"].home.governing.why

    play(story, nodes=6, **NETWORK)


def test_status_shows_the_rates_and_why():
    async def story(stage):
        run = await train(stage, every=20)
        await run.at_step(21)
        reply = await stage.nodes["n0"].trainer().call(w.StatusQuery())
        told = json.loads(reply.document)["bandwidth"]
        assert told["nic_bytes_s"] == NIC
        assert told["budget_bytes_s"] == NIC * told["level"]
        assert told["rates_bytes_s"].keys() == {"save"}
        assert told["why"]

    play(story, nodes=6, **NETWORK)


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_breaks_what_is_held_back_ends_as_it_should(seed):
    """Agents die, stand still and are cut off, movers die, the store is slow, while everything
    waits for its turn: all promises hold, and the world comes to rest."""
    faults = ("mover_dies", "pause", "crash_lose", "partition", "bucket_slow")
    options = Options(seed, nodes=6, saves=12, offload_every=2, faults=faults, nic_bytes_s=100_000)
    result = run(options)
    assert result.end == "ok", result.why
    assert result.commits >= 12
