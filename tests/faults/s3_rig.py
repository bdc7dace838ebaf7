"""A job with real agents and an object store, for the stories of offload and restore."""

import asyncio
from dataclasses import replace

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.daemon import Agent
from p2pckpt.backends.inproc.cluster import FakeCluster
from p2pckpt.coding.checksum import verify_chunks
from p2pckpt.config import Config
from p2pckpt.errors import AgentUnreachable
from p2pckpt.jobstate import JobState
from simulations.world import clock
from simulations.world.checkers import content

JOB = r.Job(owner_uid=1000, name="s3").key
KEYS = r.JobKeys(JOB)
CONFIG = Config(
    chunk_bytes=1024,
    slot_round_bytes=4096,
    s3_url="s3://bucket/runs",
    offload_every=2,
    decide_wait_s=5.0,
)
RANKS = 3


class Rig:
    """Nodes n0..n3 with an agent each, a bucket, and the ranks of one launch after the other."""

    def __init__(self, seed=1, config=CONFIG, keep_last=1, budget_bytes=1 << 22, objects=None):
        self.config, self.keep_last, self.budget_bytes = config, keep_last, budget_bytes
        self.cluster = FakeCluster(seed, bytes_per_s=50e6, piece_bytes=64 * 1024)
        self.bucket = self.cluster.add_bucket()
        self.objects = objects
        self.agents, self.tasks, self.launches, self.ordinal = {}, {}, 0, 0
        for i in range(4):
            self.add_node(f"n{i}")

    def add_node(self, name):
        self.cluster.node(name, budget_bytes=self.budget_bytes)
        self.start(name)

    def start(self, name):
        node = self.cluster.nodes[name]
        doors = node.doors()
        if self.objects is not None:
            doors = replace(doors, objects=self.objects)
        member = r.Member(name, node.host, doors.arena.store_id, "", "", "", {})
        agent = self.agents[name] = Agent(self.config, doors, member)
        self.tasks[name] = asyncio.create_task(agent.run(), name=f"agent {name}")

    async def lose(self, name, keep_memory=False):
        """The machine is lost, or only its agent."""
        self.cluster.nodes[name].crash(keep_memory=keep_memory)
        task = self.tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def lose_all(self, settle_s=30.0):
        """All RAM is lost; the machines come back empty."""
        for name in list(self.tasks):
            await self.lose(name)
            self.start(name)
        await asyncio.sleep(settle_s)

    async def launch(self, nodes=("n0", "n1", "n2")):
        for old in getattr(self, "ranks", ()):
            old.kill()
        self.launches, self.ordinal, self.restored = self.launches + 1, 0, 0
        self.ranks = [self.cluster.nodes[nodes[i]].trainer() for i in range(RANKS)]
        await self.all(self.join)

    async def join(self, rank):
        call = w.TrainerJoin(
            job=JOB,
            rank=rank,
            world_size=RANKS,
            run_token=f"launch-{self.launches}",
            layout=r.Layout(2, 1),
            keep_last=self.keep_last,
            timeout_s=120.0,
        )
        for _ in range(100):
            try:
                return await self.ranks[rank].call(call)
            except AgentUnreachable:  # it starts: a trainer asks again
                await asyncio.sleep(0.1)
        return await self.ranks[rank].call(call)

    async def all(self, work):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work(rank)) for rank in range(RANKS)]
        return [task.result() for task in tasks]

    async def save(self, step):
        """All ranks save; the outcome's verdict."""
        ordinal, self.ordinal = self.ordinal, self.ordinal + 1

        async def one(rank):
            image, trainer = content(rank, step), self.ranks[rank]
            slot = await trainer.call(w.OpenSlot(ordinal, step, len(image)))
            if isinstance(slot, w.Slot):
                trainer.view(slot.file, len(image))[:] = image
                await trainer.call(w.SlotDone(ordinal, step, len(image)))
            return (await trainer.call(w.SaveStatus(ordinal, step, 60.0))).outcome

        outcomes = await self.all(one)
        return outcomes[0].verdict

    async def train(self, *steps):
        for step in steps:
            await asyncio.sleep(2.0)
            assert await self.save(step) is r.Verdict.COMMIT, step

    async def restore(self):
        """(step, sources) that all ranks restored, bit-exact; or why there is nothing."""
        ordinal, self.restored = self.restored, self.restored + 1

        async def one(rank):
            trainer = self.ranks[rank]
            while True:
                reply = await trainer.call(w.RestoreCall(ordinal))
                if isinstance(reply, w.RestoreNothing):
                    return None, reply.reason
                if not isinstance(reply, w.RestoreFile):
                    continue
                image = trainer.view(reply.file, reply.length)
                table = list(memoryview(reply.table).cast("I"))
                assert verify_chunks(image, reply.chunk_bytes, table) == []
                assert bytes(image) == content(rank, reply.step)
                done = await trainer.call(w.RestoreDone(reply.ballot))
                if done.closed.close is r.Close.OK:
                    return reply.step, reply.source

        results = await self.all(one)
        steps = {step for step, _ in results}
        assert len(steps) == 1
        return steps.pop(), [source for _, source in results]

    def state(self):
        return JobState.listed(KEYS, self.cluster.etcd.list(KEYS.state))

    def offloaded(self):
        return sorted(o.commit.attempt.step for o in self.state().offloaded.values())

    def attempt(self, step):
        known = self.state().known_commits().values()
        return next(c.attempt for c in known if c.attempt.step == step)

    async def until(self, ready, timeout_s=60.0):
        async with asyncio.timeout(timeout_s):
            while not ready():
                await asyncio.sleep(0.1)

    def notes(self, what):
        return [facts for _, _, name, facts in self.cluster.log.events if name == f"note.{what}"]


async def tell(story, **options):
    """A story on a fresh rig with a launch; the rig."""
    rig = Rig(**options)
    await rig.launch()
    await story(rig)
    for name in list(rig.tasks):
        await rig.lose(name)
    assert rig.notes("crash") == []
    return rig


def play(story, **options):
    """Under virtual time."""
    return clock.run(tell(story, **options), limit_s=7200)
