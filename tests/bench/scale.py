"""1,250 agents' own membership and commit code against a real etcd of three, on one machine.

All agents are real (`p2pckpt.agent.daemon.Agent`) and share one process and one event loop, in real
time; each has an etcd client of its own with its own connection. What is not to be measured is in
the same process: payload, RAM and trainers are the shipped fakes, control between agents is a call.
Saves are tiny, so that a checkpoint costs little but what it takes to agree on it.

    last receipt --hand in, group records--> seal --commit transaction--> decide
                 --watches, until the last agent's mirror has the outcome--> notify

Contract: every RPC to etcd is counted where it leaves, with its size and its operations. What goes
by the clock (lease renewals, reads of the ledger's revision) is told apart from what a checkpoint
takes. Exits with 1 if a bound does not hold.

Consequence: one core does here what 1,250 do elsewhere. So timers that stand for a silent peer are
longer (`slow`), the memory lies on large pages, and the share of the time in which this process
computes is printed beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent import launch
from p2pckpt.agent.daemon import Agent
from p2pckpt.agent.home import NO_KEY
from p2pckpt.backends import etcd_watch
from p2pckpt.backends.etcd import Etcd
from p2pckpt.backends.etcd_server import EtcdOptions, EtcdServers
from p2pckpt.backends.inproc.cluster import EventLog, FakeCluster
from p2pckpt.backends.inproc.trainers import FakeTrainer
from p2pckpt.config import Config
from p2pckpt.ports import PeerHandler
from tests.bench.huge_pages import collapse
from tests.bench.sizes import Checkpoint, Size, broken, table
from tests.bench.straight_peers import StraightPeers

JOB = r.Job(owner_uid=1000, name="scale").key
STARTED_AT_ONCE = 50
LOOK_S = 1.0
SNAPSHOT_BYTES = 700
WAIT_S = 900.0


def slow(agents: int) -> Config:
    """The timers of agents that share one core: by the clock each does a little now and then."""
    keepalive_s = max(20.0, agents / 10)
    return Config(
        chunk_bytes=1024,
        slot_round_bytes=4096,
        rpc_timeout_s=20.0,
        ledger_timeout_s=60.0,
        peer_timeout_s=60.0,
        silent_holder_s=120.0,
        attempt_timeout_s=600.0,
        skip_wait_s=60.0,
        takeover_s=15.0,
        commit_delay_low_s=5.0,
        commit_delay_high_s=20.0,
        lease_s=4 * keepalive_s,
        keepalive_s=keepalive_s,
        join_timeout_s=600.0,
    )


class Quiet(EventLog):
    """Keeps nothing: a million events would be what is measured."""

    def add(self, who: str, what: str, facts: dict[str, Any]) -> None:
        """Forget it."""


# -- what leaves for etcd --------------------------------------------------------------------------


@dataclass
class Tally:
    """The requests of one agent, and the largest of all agents."""

    largest: dict[str, int]
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, request: Any) -> None:
        """One more; the few that go by the clock have names of their own."""
        if kind == "Range" and request.key.decode() == NO_KEY:
            kind = "revision"
        self.kinds[kind] += 1
        size = request.ByteSize() if request is not None else 0
        self.largest["bytes"] = max(self.largest["bytes"], size)
        if kind == "Txn":
            operations = max(len(request.success), len(request.compare))
            self.largest["operations"] = max(self.largest["operations"], operations)

    @property
    def asked(self) -> int:
        """But for what goes by the clock."""
        by_clock = self.kinds["revision"] + self.kinds["LeaseKeepAlive"]
        return self.kinds.total() - by_clock


def counted(etcd: Etcd, tally: Tally) -> None:
    """Have every RPC of a client pass the tally."""
    for member in etcd._calls.members:
        for stub, names in (
            (member.kv, ("Range", "Txn")),
            (member.lease, ("LeaseGrant", "LeaseRevoke", "LeaseKeepAlive")),
            (member.maintenance, ("Status",)),
            (member.watch, ("Watch",)),
        ):
            for name in names:
                setattr(stub, name, _passing(getattr(stub, name), name, tally))


def _passing(rpc: Callable[..., Any], name: str, tally: Tally) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        plain = bool(args) and hasattr(args[0], "ByteSize")
        tally.add(name, args[0] if plain else None)
        return rpc(*args, **options)

    return call


# -- the agents ------------------------------------------------------------------------------------


@dataclass
class Moment:
    """When something happened: wall clock, and the CPU time of this process by then."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Moment:
        """This one."""
        return cls(time.perf_counter(), time.process_time())


class Crowd:
    """All agents, each with one rank, and what is seen of them."""

    def __init__(self, endpoints: Sequence[str], agents: int, layout: str) -> None:
        self.layout = r.Layout.parse(layout)
        self.endpoints = list(endpoints)
        self.config = slow(agents)
        self.cluster = FakeCluster(1)
        self.cluster.log = Quiet()
        self.cluster.net.log = self.cluster.log.add
        self.names = [f"n{i:04d}" for i in range(agents)]
        self.largest = {"bytes": 0, "operations": 0}
        self.tallies: dict[str, Tally] = {}
        self.agents: dict[str, Agent] = {}
        self.peers: dict[str, PeerHandler] = {}
        self.trainers: list[FakeTrainer] = []
        self.etcds: list[Etcd] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.last: dict[str, Moment] = {}
        """By note: when any agent gave it last."""
        self.failed: Counter[str] = Counter()

    def add(self, number: int) -> Agent:
        """Start one agent."""
        name = self.names[number]
        node = self.cluster.node(
            name, domains={"rack": f"r{number % 25}"}, budget_bytes=64 * 1024 * 1024
        )
        turned = number % len(self.endpoints)
        endpoints = self.endpoints[turned:] + self.endpoints[:turned]
        etcd = Etcd(endpoints, None, self.config.rpc_timeout_s, self.config.ledger_timeout_s)
        tally = self.tallies[name] = Tally(self.largest)
        counted(etcd, tally)
        self.etcds.append(etcd)
        doors = replace(
            node.doors(),
            ledger=etcd.ledger,
            membership=etcd.membership,
            peers=StraightPeers(name, self.peers),
            notes=self.note,
        )
        member = r.Member(name, node.host, doors.arena.store_id, "", "", "", node.domains)
        agent = self.agents[name] = Agent(self.config, doors, member)
        self.tasks.append(asyncio.create_task(agent.run(), name=f"agent {name}"))
        return agent

    def note(self, what: str, facts: dict[str, Any]) -> None:
        """What the agents tell."""
        if what in ("sent", "group_record", "commit"):
            self.last[what] = Moment.now()
        elif what in ("crash", "task_failed", "abort", "holder_failed", "decide_later"):
            self.failed[f"{what}: {facts.get('why') or facts.get('reason')}"[:160]] += 1

    async def start(self) -> None:
        """All agents with their sessions, then all ranks of one launch."""
        for at in range(0, len(self.names), STARTED_AT_ONCE):
            numbers = range(at, min(at + STARTED_AT_ONCE, len(self.names)))
            await asyncio.gather(*(self.add(i).ready.wait() for i in numbers))
        say(f"{len(self.names)} agents have a session")
        self.trainers = [self.cluster.nodes[name].trainer() for name in self.names]
        await asyncio.gather(*(t.call(self._join(i)) for i, t in enumerate(self.trainers)))
        say("the launch stands")
        # the members are followed by a watch, as they are in a cluster that has been up for a while
        await self._until(lambda: all(a.home._followed is not None for a in self.agents.values()))

    def _join(self, rank: int) -> w.TrainerJoin:
        size, keep = len(self.names), 1
        return w.TrainerJoin(JOB, rank, size, "run", self.layout, keep, timeout_s=WAIT_S)

    async def checkpoint(self, ordinal: int) -> Checkpoint:
        """All ranks save; until all agents know, and have done what follows from it."""
        await self._until(self._at_rest)
        before = {name: tally.asked for name, tally in self.tallies.items()}
        gc.collect()  # of a heap as large as a thousand agents', so not meanwhile
        gc.disable()
        self.last.clear()
        step = ordinal + 1
        state = self.agents[self.names[0]].jobs[JOB].ctx.state
        assert state.generation is not None
        attempt = r.Attempt(state.ledger_id, JOB, state.generation.number, ordinal, step)
        knowing = [asyncio.create_task(self._knows(agent, attempt)) for agent in self.everybody]
        await asyncio.gather(*(self._save(t, ordinal, step) for t in self.trainers))
        last = max(await asyncio.gather(*knowing), key=lambda moment: moment.wall_s)
        gc.enable()
        if self.everybody[0].jobs[JOB].ctx.state.committed(attempt) is None:
            raise RuntimeError(f"step {step} did not commit: {self.failed.most_common(3)}")
        await self._until(self._at_rest)
        sent, grouped, committed = (self.last[k] for k in ("sent", "group_record", "commit"))
        return Checkpoint(
            grouped.wall_s - sent.wall_s,
            committed.wall_s - grouped.wall_s,
            last.wall_s - committed.wall_s,
            (last.cpu_s - sent.cpu_s) / (last.wall_s - sent.wall_s),
            [tally.asked - before[name] for name, tally in self.tallies.items()],
        )

    @property
    def everybody(self) -> list[Agent]:
        """All agents."""
        return list(self.agents.values())

    async def _save(self, trainer: FakeTrainer, ordinal: int, step: int) -> None:
        slot = await trainer.call(w.OpenSlot(ordinal, step, SNAPSHOT_BYTES))
        if not isinstance(slot, w.Slot):
            raise RuntimeError(f"step {step}: {slot}")
        trainer.view(slot.file, SNAPSHOT_BYTES)[:] = step.to_bytes(1, "big") * SNAPSHOT_BYTES
        await trainer.call(w.SlotDone(ordinal, step, SNAPSHOT_BYTES, "{}"))

    async def _knows(self, agent: Agent, attempt: r.Attempt) -> Moment:
        ctx = agent.jobs[JOB].ctx
        if not await ctx.until(lambda: ctx.decided(attempt), WAIT_S):
            raise RuntimeError(f"{agent.home.node} does not know after {WAIT_S:.0f} s")
        return Moment.now()

    def _at_rest(self) -> bool:
        """Copies are kept, old bytes are free: nothing follows from the last commit any more."""
        contexts = [agent.jobs[JOB].ctx for agent in self.everybody]
        return not any(ctx.uncopied() or len(ctx.tracked) > 1 for ctx in contexts)

    async def _until(self, ready: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not ready():
                await asyncio.sleep(LOOK_S)

    async def stop(self) -> None:
        """End all agents and connections."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.gather(*(etcd.close() for etcd in self.etcds))


# -- running it ------------------------------------------------------------------------------------


async def measure(orders: Connection, endpoints: Sequence[str], agents: int, layout: str) -> None:
    """One size: start, one checkpoint to warm up, then one for each ordinal that is asked for."""
    crowd, begun = Crowd(endpoints, agents, layout), time.perf_counter()
    try:
        await crowd.start()
        start_s = time.perf_counter() - begun
        await crowd.checkpoint(0)
        say(f"{agents} agents stand after {start_s:.0f} s, {collapse():.0%} on large pages")
        begun, by_clock = time.perf_counter(), _by_clock(crowd)
        done: list[Checkpoint] = []
        orders.send(None)
        while (ordinal := await asyncio.to_thread(orders.recv)) is not None:
            done.append(await crowd.checkpoint(ordinal))
            c = done[-1]
            parts = f"{c.seal_s:.3f} + {c.decide_s:.3f} + {c.notify_s:.3f}"
            say(f"checkpoint {ordinal} of {agents} agents: {c.total_s:.3f} s = {parts}")
            orders.send(None)
        rate = (_by_clock(crowd) - by_clock) / (time.perf_counter() - begun) / agents
        orders.send(Size(agents, done, dict(crowd.largest), rate, start_s))
    finally:
        await crowd.stop()


def _by_clock(crowd: Crowd) -> int:
    return sum(t.kinds["revision"] + t.kinds["LeaseKeepAlive"] for t in crowd.tallies.values())


def run(sizes: Sequence[int], checkpoints: int, layout: str, durable: bool) -> list[Size]:
    """Each size in a process of its own (gRPC keeps to one event loop), on an etcd of its own. They
    take turns, so that a machine that is slower for a while is so for all."""
    spawn = multiprocessing.get_context("spawn")
    orders: list[Connection] = []
    processes = []
    try:
        for agents in sizes:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=one, args=(theirs, agents, layout, durable))
            process.start()
            theirs.close()
            processes.append(process)
            orders.append(ours)
            ours.recv()
        for ordinal in range(1, checkpoints + 1):
            for order in orders:
                order.send(ordinal)
                order.recv()
        for order in orders:
            order.send(None)
        return [order.recv() for order in orders]
    finally:
        for order in orders:
            order.close()  # who waits for an order ends
        for process in processes:
            process.join(WAIT_S)


def one(orders: Connection, agents: int, layout: str, durable: bool) -> None:
    """One size."""
    etcd_watch.PROGRESS_S, etcd_watch.SILENT_S = WAIT_S, WAIT_S  # no dead members here
    launch.LOOK_AT_LEAST_S = WAIT_S  # rank 0 looks
    with tempfile.TemporaryDirectory(prefix="p2pckpt-scale-") as place:
        options = EtcdOptions(durable=durable, heartbeat_ms=500, election_ms=5000)
        with EtcdServers.start(Path(place), 3, options) as servers:
            say(f"etcd with 3 members, {agents} agents")
            asyncio.run(measure(orders, servers.endpoints, agents, layout))


def say(what: str) -> None:
    """Progress, for whoever waits."""
    print(f"[{time.strftime('%H:%M:%S')}] {what}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """The table; 1 if a bound does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale", description=__doc__)
    parser.add_argument("--agents", type=int, nargs="+", default=[125, 1250])
    parser.add_argument("--checkpoints", type=int, default=20)
    parser.add_argument("--layout", default="rs:2,1")
    parser.add_argument("--no-fsync", action="store_true", help="etcd on throw-away data")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    sizes = run(options.agents, options.checkpoints, options.layout, not options.no_fsync)
    print(table(sizes))
    wrong = broken(sizes)
    for what in wrong:
        print(f"does not hold: {what}")
    if options.json:
        document = {
            "layout": options.layout,
            "fsync": not options.no_fsync,
            "sizes": [size.record() for size in sizes],
            "broken": wrong,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
