"""A world of virtual time in which the product's own agents live, fail and recover.

The agents are the real ones (`p2pckpt.agent.daemon.Agent`) behind the shipped in-process doors,
each with a clock of its own; trainers and their launcher are simulated (`launcher`). Faults come
from a plan that the seed draws (`failures`, `shocks`). Checkers look at the world from outside
while it runs (`checkers`, `told`) and when it has become quiet (`quiet`).

Contract: one seed is one run. The same options give the same event log, byte for byte. A run ends
in one of these ways, told apart: ok; lost (more was lost than the layout promises to survive, and
the restore said so); crash (an unexpected exception in the product); stuck (a wait without end);
wrong (a checker objects).
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from p2pckpt import records as r
from p2pckpt.agent.daemon import Agent
from p2pckpt.backends.inproc.cluster import FakeCluster, FakeNode
from p2pckpt.config import Config
from p2pckpt.errors import UsageError
from simulations.world import clock
from simulations.world.checkers import Checkers
from simulations.world.failures import FAULTS as OF_NODES
from simulations.world.failures import Fault, Strike, from_trace, plan
from simulations.world.launcher import Launcher
from simulations.world.quiet import Quiet
from simulations.world.relaunches import RELAUNCHES
from simulations.world.shocks import SHOCKS
from simulations.world.training import Training

FAULTS: dict[str, Strike] = {**OF_NODES, **SHOCKS, **RELAUNCHES}
JOB = r.Job(owner_uid=1000, name="world").key
OTHER_JOB = r.Job(owner_uid=1000, name="other").key
EXIT_CODES = {"ok": 0, "lost": 4, "wrong": 1, "crash": 5, "stuck": 6}
MAX_TURNS = 5_000_000
"""Of the loop, for 16 nodes or fewer: ten times what a long run takes. Code that goes round without
waiting ends here."""

CALM_AFTER_S = 30.0
"""After a fault, leases that it ended and agents that it stopped are no surprise so long."""


@dataclass(frozen=True)
class Options:
    """What a seed is run with; all of it is printed before the run.

    ``switches`` have the racks in turn; ``offload_every`` 0: no object store. ``quiet_saves``: due
    after the last fault is over. ``overlap``: a fault does not wait for the end of the one before.
    ``checkers`` False: nobody looks, so that only crash and stuck can be found. ``absences``: of a
    trace, as `failures.from_trace` takes them, in place of the faults. ``nic_bytes_s``, if
    not 0: agents hold their traffic back, as if that were all the network gives. ``auto``: agents
    choose which saves go to the object store, from ``offload_every`` on; the steps between saves
    stay as they are.
    """

    seed: int
    nodes: int = 5
    racks: int = 5
    switches: int = 3
    spread: str = "rack"
    layout: str = "rs:2,1"
    ranks: int = 4
    jobs: int = 1
    saves: int = 20
    quiet_saves: int = 6
    every: int = 5
    keep_last: int = 1
    step_s: float = 1.0
    offload_every: int = 0
    overlap: bool = False
    faults: tuple[str, ...] = ("crash_lose", "partition")
    absences: tuple[tuple[float, float], ...] = ()
    checkers: bool = True
    nic_bytes_s: int = 0
    auto: bool = False
    limit_s: float = 2400.0

    @property
    def turns(self) -> int:
        """Of the loop at most."""
        return MAX_TURNS * -(-self.nodes // 16)

    def __post_init__(self) -> None:
        r.Layout.parse(self.layout)
        if unknown := sorted(set(self.faults) - set(FAULTS)):
            raise UsageError(f"faults {unknown}: known are {', '.join(sorted(FAULTS))}")
        for name in ("nodes", "racks", "switches", "ranks", "jobs", "saves", "every", "keep_last"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)}: needs 1 or more")
        if self.jobs > 2:
            raise UsageError(f"jobs {self.jobs}: needs 1 or 2")


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
    moves: dict[str, int] = field(default_factory=dict)
    virtual_s: float = 0.0
    digest: str = ""
    log: str = ""


def run(options: Options, keep_log: bool = True) -> Result:
    """One seed from beginning to end."""
    world = World(options)
    result = world.result
    try:
        clock.run(world.main(), limit_s=options.limit_s, limit_turns=options.turns)
    except clock.Stuck as e:
        result.end, result.why = "stuck", str(e)
    log = world.cluster.log
    result.digest, result.log = log.digest(), log.text() if keep_log else ""
    objections = [what for checkers in world.checkers for what in checkers.objections]
    if options.checkers and objections:
        result.end, result.why = "wrong", "; ".join(objections[:5])
    crashes = [str(f) for _, _, what, f in log.events if what in CRASHES]
    if crashes := [*crashes, *(x.crashed for x in world.launchers if x.crashed)]:
        result.end, result.why = "crash", crashes[0]
    return result


CRASHES = ("note.crash", "trainer.handler_failed", "loop.error")


def config(options: Options) -> Config:
    """The product's defaults, with chunks and slots as small as the world's snapshots; and failures
    so frequent and deep that uploads have a narrow best, which moves as the job fails."""
    every_s = options.every * options.step_s
    return Config(
        chunk_bytes=1024,
        slot_round_bytes=4096,
        spread=options.spread,
        offload_every=options.offload_every,
        s3_url="s3://world" if options.offload_every else "",
        nic_bytes_s=options.nic_bytes_s,
        floor_bytes_per_s=options.nic_bytes_s // 5 or Config.floor_bytes_per_s,
        every_low_s=every_s * 0.9,
        every_high_s=every_s * 1.5,
        mtbf_prior_s=60.0,
        deep_share_prior=0.5,
        offload_low_s=every_s,
        offload_high_s=every_s * 12,
    )


async def _ended(task: asyncio.Task[None]) -> None:
    """Wait for a fault. One that was broken off is an error: nobody would wait for the others."""
    await asyncio.wait((task,))
    if task.cancelled():
        raise RuntimeError(f"{task.get_name()} was broken off")
    task.result()


class World:
    """The nodes with their agents, the launchers with their ranks, the plan of faults."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.cluster = FakeCluster(options.seed, bytes_per_s=50e6, piece_bytes=64 * 1024)
        self.result = Result(options)
        self.restores = self.result.restores
        jobs = (JOB, OTHER_JOB)[: options.jobs]
        spread = "rack" in options.spread
        self.checkers = [Checkers(self.cluster, job, spread) for job in jobs]
        self.launchers = [
            Launcher(self, self._training(i), checkers) for i, checkers in enumerate(self.checkers)
        ]
        self.agents: dict[str, Agent] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.clocks: dict[str, clock.LocalClock] = {}
        self.living: list[str] = []
        self.calm_since: float | None = None
        """When the last fault was over; None: not yet."""
        for checkers in self.checkers:
            checkers.living = self.living
        self.troubles: list[tuple[float, float]] = []
        """From when to when each fault worked."""
        self._struck = 0
        self._offsets = Random(f"clocks {options.seed}")
        self._replaced = 0

    def _training(self, number: int) -> Training:
        options, job = self.options, (JOB, OTHER_JOB)[number]
        return Training(
            job,
            number * 2,
            options.ranks,
            options.layout,
            options.keep_last,
            options.every,
            options.saves,
            options.quiet_saves,
            options.step_s,
            options.auto,
        )

    # -- the story --------------------------------------------------------------------------------

    async def main(self) -> None:
        """Start nodes, run the jobs under their faults, check at the end."""
        asyncio.get_running_loop().set_exception_handler(self._on_error)
        if self.options.offload_every:
            self.cluster.add_bucket()
        for i in range(self.options.nodes):
            rack = i % self.options.racks
            switch = rack % self.options.switches
            self.add_node(f"n{i}", {"rack": f"rack{rack}", "switch": f"switch{switch}"})
        loop = asyncio.get_running_loop()
        faults = asyncio.create_task(self._faults(), name="faults")
        jobs = [asyncio.create_task(x.run(), name=x.training.job) for x in self.launchers]
        running = asyncio.gather(*jobs)
        await asyncio.wait((running, faults), return_when=asyncio.FIRST_EXCEPTION)
        if faults.done():
            faults.result()
        faults.cancel()
        await running
        self._tally()
        lost = [launcher.lost for launcher in self.launchers if launcher.lost]
        if lost:
            self.result.end, self.result.why = "lost", lost[0]
        else:
            await Quiet(self).check()
        self.result.virtual_s = loop.time()
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    def _tally(self) -> None:
        result = self.result
        result.commits = sum(checkers.commits for checkers in self.checkers)
        result.due = sum(len(launcher.due) for launcher in self.launchers)
        result.launches = sum(launcher.launches for launcher in self.launchers)
        for checkers in self.checkers:
            for move, times in checkers.lives.taken.items():
                result.moves[move] = result.moves.get(move, 0) + times

    def _on_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        why = f"{context.get('message')}: {context.get('exception')!r}"
        self.cluster.log.add("loop", "loop.error", {"why": why})

    # -- machines ---------------------------------------------------------------------------------

    @property
    def usable(self) -> list[str]:
        """Nodes on which a trainer finds a running agent."""
        return [name for name in self.living if name in self.tasks]

    def add_node(self, name: str, domains: Mapping[str, str]) -> None:
        """A new machine with a running agent, whose clock shows something else than others'."""
        node = self.cluster.node(name, domains=dict(domains), budget_bytes=64 * 1024 * 1024)
        self.clocks[name] = clock.LocalClock(self._offsets.uniform(0.0, 1e4))
        self.start_agent(node)
        self.living.append(name)

    def start_agent(self, node: FakeNode) -> None:
        """Start the agent of a machine, on the memory that it has, by its own clock."""
        if node.name not in self.tasks:
            context = contextvars.copy_context()
            context.run(clock.LOCAL.set, self.clocks[node.name])
            context.run(self._start_agent, node, context)

    def _start_agent(self, node: FakeNode, context: contextvars.Context) -> None:
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
        agent = self.agents[node.name] = Agent(config(self.options), doors, member)
        work = agent.run()
        self.tasks[node.name] = asyncio.create_task(
            work, name=f"agent {node.name}", context=context
        )

    async def stop_agent(self, node: FakeNode, keep_memory: bool) -> None:
        """The agent process dies, or the whole machine; no harm if it is dead already."""
        node.crash(keep_memory=keep_memory)
        task = self.tasks.pop(node.name, None)
        self.agents.pop(node.name, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def dismiss(self, node: FakeNode) -> None:
        """Tell the agent to stop, as SIGTERM does, and wait until it has."""
        if (agent := self.agents.get(node.name)) is not None:
            context = contextvars.copy_context()
            context.run(clock.LOCAL.set, self.clocks[node.name])
            stopping = asyncio.create_task(agent.stop(), name=f"{node.name} stops", context=context)
            await asyncio.gather(stopping, return_exceptions=True)

    def spare_name(self) -> str:
        """A name that no node had before."""
        self._replaced += 1
        return f"r{self._replaced}"

    # -- faults -----------------------------------------------------------------------------------

    async def _faults(self) -> None:
        """Fire the plan; then the world is calm."""
        options, loop = self.options, asyncio.get_running_loop()
        span_s = max(1, options.saves - options.quiet_saves) * options.every * options.step_s
        running: list[asyncio.Task[None]] = []
        faults = plan(options.seed, options.faults, span_s)
        if options.absences:
            faults = from_trace(options.seed, options.absences, span_s)
        for fault in faults:
            await asyncio.sleep(max(0.0, fault.at_s - loop.time()))
            running.append(asyncio.create_task(self._strike(fault), name=f"fault {fault.what}"))
            if not (options.overlap or options.absences):
                await _ended(running[-1])
        for task in running:
            await _ended(task)
        await asyncio.sleep(CALM_AFTER_S)
        self.calm_since = loop.time()

    async def _strike(self, fault: Fault) -> None:
        while not self.living:
            await asyncio.sleep(1.0)
        name = self.living[int(fault.pick * len(self.living))]
        self.cluster.log.add("world", "fault", {"what": fault.what, "node": name})
        self.result.faults[fault.what] = self.result.faults.get(fault.what, 0) + 1
        self._calm(False)
        self._struck += 1
        began_s = asyncio.get_running_loop().time()
        try:
            await FAULTS[fault.what](self, self.cluster.nodes[name], fault)
        finally:
            self.cluster.log.add("world", "fault.over", {"what": fault.what, "node": name})
            loop = asyncio.get_running_loop()
            self.troubles.append((began_s, loop.time()))
            loop.call_later(CALM_AFTER_S, self._over)

    def _over(self) -> None:
        self._struck -= 1
        self._calm(self._struck == 0)

    def _calm(self, calm: bool) -> None:
        for checkers in self.checkers:
            checkers.calm = calm
