"""A world of virtual time in which the product's own agents live, fail and recover.

The agents are the real ones (`p2pckpt.agent.daemon.Agent`) behind the shipped in-process doors; the
trainers and their launcher are simulated: ranks that step together, save when due, die, and are
launched again on whatever nodes live, as torchrun does. Faults come from a plan that the seed
draws. Checkers (`simulations/checkers.py`) look at the world from outside.

Contract: one seed is one run. The same seed gives the same event log, byte for byte. A run ends in
one of these ways, told apart: ok; lost (more was lost than the layout promises to survive, and the
restore said so); crash (an unexpected exception in the product); stuck (a wait without end); wrong
(a checker objects).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.daemon import Agent
from p2pckpt.backends.inproc.cluster import FakeCluster, FakeNode
from p2pckpt.backends.inproc.trainers import FakeTrainer
from p2pckpt.coding.checksum import verify_chunks
from p2pckpt.config import Config
from p2pckpt.errors import CheckpointError, UsageError
from simulations import clock
from simulations.checkers import Checkers, content
from simulations.failures import FAULTS, plan

JOB = r.Job(owner_uid=1000, name="world").key
MAX_LAUNCHES = 50
REFUSALS = 3
EXIT_CODES = {"ok": 0, "lost": 4, "wrong": 1, "crash": 5, "stuck": 6}


@dataclass(frozen=True)
class Options:
    """What a seed is run with; all of it is printed before the run."""

    seed: int
    nodes: int = 5
    racks: int = 5
    layout: str = "rs:2,1"
    ranks: int = 4
    saves: int = 20
    every: int = 5
    step_s: float = 1.0
    faults: tuple[str, ...] = ("crash_lose", "partition")
    limit_s: float = 3600.0

    def __post_init__(self) -> None:
        r.Layout.parse(self.layout)
        if unknown := sorted(set(self.faults) - set(FAULTS)):
            raise UsageError(f"faults {unknown}: known are {', '.join(sorted(FAULTS))}")
        for name in ("nodes", "racks", "ranks", "saves", "every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)}: needs 1 or more")


@dataclass
class Result:
    """How a run ended, and what was seen in it."""

    options: Options
    end: str = "ok"
    why: str = ""
    commits: int = 0
    due: int = 0
    launches: int = 0
    restores: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    virtual_s: float = 0.0
    digest: str = ""
    log: str = ""


def run(options: Options) -> Result:
    """One seed from beginning to end."""
    world = World(options)
    result = world.result
    try:
        clock.run(world.main(), limit_s=options.limit_s)
    except clock.Stuck as e:
        result.end, result.why = "stuck", str(e)
    except AssertionError as e:
        result.end, result.why = "wrong", str(e)
    result.digest, result.log = world.cluster.digest(), world.cluster.log.text()
    crashes = [facts for _, _, what, facts in world.cluster.log.events if what == "note.crash"]
    if crashes:
        result.end, result.why = "crash", str(crashes[0])
    return result


def config() -> Config:
    """The product's defaults, with chunks and slots as small as the world's snapshots."""
    return Config(chunk_bytes=1024, slot_round_bytes=4096, spread="rack")


class World:
    """The nodes with their agents, the launcher with its ranks, the plan of faults."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.cluster = FakeCluster(options.seed, bytes_per_s=50e6, piece_bytes=64 * 1024)
        self.result = Result(options)
        self.checkers = Checkers(self.cluster, JOB)
        self.agents: dict[str, asyncio.Task[None]] = {}
        self.living: list[str] = []
        self.replaced = 0

    # -- the story --------------------------------------------------------------------------------

    async def main(self) -> None:
        """Start nodes, run the job under its faults, check at the end."""
        for i in range(self.options.nodes):
            self.add_node(f"n{i}", f"rack{i % self.options.racks}")
        faults = asyncio.create_task(self.faults(), name="faults")
        launcher = asyncio.create_task(Launcher(self).run(), name="launcher")
        try:
            done, _ = await asyncio.wait((launcher, faults), return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            faults.cancel()
            launcher.cancel()
            self.result.virtual_s = asyncio.get_running_loop().time()
            self.result.commits = self.checkers.commits_seen()
        self.checkers.at_end()
        for task in self.agents.values():
            task.cancel()
        await asyncio.gather(*self.agents.values(), return_exceptions=True)

    def add_node(self, name: str, rack: str) -> None:
        """A new machine with a running agent."""
        node = self.cluster.node(name, domains={"rack": rack}, budget_bytes=64 * 1024 * 1024)
        self.start_agent(node)
        self.living.append(name)

    def start_agent(self, node: FakeNode) -> None:
        """Start the agent of a machine, on the memory that it has."""
        doors = node.doors()
        member = r.Member(
            node=node.name,
            host=node.host,
            store_id=doors.arena.store_id,
            session="",
            peers_address="",
            transport_address="",
            domains=node.domains,
        )
        agent = Agent(config(), doors, member)
        self.agents[node.name] = asyncio.create_task(agent.run(), name=f"agent {node.name}")

    def spare_name(self) -> str:
        """A name that no node had before."""
        self.replaced += 1
        return f"r{self.replaced}"

    async def faults(self) -> None:
        """Fire the plan."""
        loop = asyncio.get_running_loop()
        options = self.options
        span_s = options.saves * options.every * options.step_s
        for fault in plan(options.seed, options.faults, span_s):
            await asyncio.sleep(max(0.0, fault.at_s - loop.time()))
            name = self.living[int(fault.pick * len(self.living))]
            self.cluster.log.add("world", "fault", {"what": fault.what, "node": name})
            self.result.faults[fault.what] = self.result.faults.get(fault.what, 0) + 1
            await FAULTS[fault.what](self, self.cluster.nodes[name], fault)

    async def stop_agent(self, node: FakeNode, keep_memory: bool) -> None:
        """The agent process dies, or the whole machine."""
        node.crash(keep_memory=keep_memory)
        task = self.agents.pop(node.name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Launcher:
    """What torchrun does: start all ranks, and when one fails, end all and start again."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.options = world.options
        self.token = 0
        self.refused = 0
        """Launches in a row whose restore raised RestoreFailed."""

    async def run(self) -> None:
        """Launch until a launch reaches the last step."""
        while not await self.launch():
            await asyncio.sleep(3.0)
            assert self.token < MAX_LAUNCHES, f"the job failed {MAX_LAUNCHES} times"
            if self.refused >= REFUSALS:
                self.world.checkers.refused_for_good()
                self.world.result.end = "lost"
                self.world.result.why = f"no restore in {self.refused} launches"
                return

    async def launch(self) -> bool:
        """One launch; True if all ranks reached the last step."""
        self.token += 1
        self.world.result.launches += 1
        while len(self.world.living) < 1:
            await asyncio.sleep(1.0)
        nodes = self.world.living[: self.options.ranks]
        steps = Lockstep(self.options.ranks)
        ranks = []
        for rank in range(self.options.ranks):
            node = self.world.cluster.nodes[nodes[rank % len(nodes)]]
            trainer = node.trainer()
            ranks.append(SimulatedRank(self.world, trainer, rank, f"launch-{self.token}", steps))
        tasks = [asyncio.create_task(rank.main(), name=f"rank {rank.rank}") for rank in ranks]
        watch = asyncio.create_task(self._watch(ranks), name="watch")
        done, _ = await asyncio.wait((*tasks, watch), return_when=asyncio.FIRST_EXCEPTION)
        watch.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, watch, return_exceptions=True)
        for simulated in ranks:
            simulated.trainer.kill()
        whys = [repr(t.exception()) for t in done if not t.cancelled() and t.exception()]
        self.world.cluster.log.add("launcher", "launch.ended", {"token": self.token, "why": whys})
        refused = any(why.startswith("RestoreFailed") for why in whys)
        self.refused = self.refused + 1 if refused else 0
        for task in done:
            if not task.cancelled() and isinstance(task.exception(), AssertionError):
                raise task.exception()  # type: ignore[misc]
        return all(t in done and not t.cancelled() and t.exception() is None for t in tasks)

    async def _watch(self, ranks: list[SimulatedRank]) -> None:
        """Notice a dead rank, a little later, and end the launch."""
        while all(rank.trainer.alive for rank in ranks):
            await asyncio.sleep(0.5)
            if all(rank.finished for rank in ranks):
                return
        raise CheckpointError("a rank died")


class Lockstep:
    """Collectives: nobody begins a step before all have ended the one before."""

    def __init__(self, ranks: int) -> None:
        self.barrier = asyncio.Barrier(ranks)


class SimulatedRank:
    """A training process: join, restore, then step and save."""

    def __init__(
        self, world: World, trainer: FakeTrainer, rank: int, token: str, steps: Lockstep
    ) -> None:
        self.world = world
        self.trainer = trainer
        self.rank = rank
        self.token = token
        self.steps = steps
        self.finished = False

    async def main(self) -> None:
        """The user's training script."""
        options = self.world.options
        join = w.TrainerJoin(
            job=JOB,
            rank=self.rank,
            world_size=options.ranks,
            run_token=self.token,
            layout=r.Layout.parse(options.layout),
            keep_last=1,
            timeout_s=120.0,
        )
        await self.trainer.call(join)
        step = await self.restore()
        ordinal = 0
        while step < options.saves * options.every:
            await asyncio.sleep(options.step_s)
            await self.steps.barrier.wait()
            step += 1
            if step % options.every == 0:
                await self.save(ordinal, step)
                ordinal += 1
        await self.settle(ordinal - 1, step)
        self.finished = True

    async def save(self, ordinal: int, step: int) -> None:
        """Write the snapshot of this rank and step, if a slot is to be had."""
        image = content(self.rank, step)
        if self.rank == 0:
            self.world.result.due += 1
        reply = await self.trainer.call(w.OpenSlot(ordinal, step, len(image)))
        if isinstance(reply, w.Slot):
            self.trainer.view(reply.file, len(image))[:] = image
            await self.trainer.call(w.SlotDone(ordinal, step, len(image), '{"lr":0.1}'))

    async def settle(self, ordinal: int, step: int) -> None:
        """Wait for the last save's outcome, so that the end of the run is quiet."""
        if ordinal >= 0:
            await self.trainer.call(w.SaveStatus(ordinal, step, 60.0))

    async def restore(self) -> int:
        """The step to go on from; checks every byte."""
        while True:
            reply = await self.trainer.call(w.RestoreCall(0))
            if isinstance(reply, w.RestoreNothing):
                self.world.checkers.restored_nothing()
                return 0
            if isinstance(reply, w.RestoreFile) and await self.load(reply):
                return reply.step

    async def load(self, reply: w.RestoreFile) -> bool:
        """Verify, compare with what was saved, and report."""
        image = self.trainer.view(reply.file, reply.length)
        table = memoryview(reply.table).cast("I")
        for chunk in verify_chunks(image, reply.chunk_bytes, list(table)):
            start = chunk * reply.chunk_bytes
            length = min(reply.chunk_bytes, reply.length - start)
            await self.trainer.call(w.MendChunk(reply.ballot, start, length))
        self.world.checkers.restored(self.token, self.rank, reply.step, bytes(image))
        done = await self.trainer.call(w.RestoreDone(reply.ballot))
        assert isinstance(done, w.RestoreClosed)
        restores = self.world.result.restores
        restores[reply.source] = restores.get(reply.source, 0) + 1
        return done.closed.close is r.Close.OK
