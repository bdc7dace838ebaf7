"""1,250 agents' own membership and commit code against a real etcd of three, on one machine.

All agents are real (`p2pckpt.agent.daemon.Agent`) and share one process and one event loop, in real
time; each has an etcd client of its own with its own connection. What is not to be measured is in
the same process: control between agents, payload, RAM and trainers are the shipped fakes. Saves are
tiny, so that a checkpoint costs little but what it takes to agree on it.

    last receipt --hand in, group records--> seal --commit transaction--> decide
                 --watches, until the last agent's mirror has the outcome--> notify

Contract: every RPC to etcd is counted where it leaves, with its size and its operations. What goes
by the clock (lease renewals, reads of the ledger's revision) is told apart from what a checkpoint
takes. Exits with 1 if a bound does not hold.

Consequence: one core does here what 1,250 do elsewhere. So timers that stand for a silent peer are
longer (SLOW), and the share of the time in which this process computes is printed beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.daemon import Agent
from p2pckpt.agent.home import NO_KEY
from p2pckpt.backends import etcd_watch
from p2pckpt.backends.etcd import Etcd
from p2pckpt.backends.etcd_server import EtcdOptions, EtcdServers
from p2pckpt.backends.inproc.cluster import EventLog, FakeCluster
from p2pckpt.backends.inproc.trainers import FakeTrainer
from p2pckpt.config import Config

JOB = r.Job(owner_uid=1000, name="scale").key
SLOW = Config(
    chunk_bytes=1024,
    slot_round_bytes=4096,
    rpc_timeout_s=20.0,
    ledger_timeout_s=60.0,
    peer_timeout_s=60.0,
    silent_holder_s=120.0,
    attempt_timeout_s=600.0,
    skip_wait_s=60.0,
    takeover_s=15.0,
    lease_s=60.0,
    keepalive_s=20.0,
    join_timeout_s=600.0,
)
STARTED_AT_ONCE = 50
SNAPSHOT_BYTES = 700
WAIT_S = 600.0

MOST_REQUESTS, MOST_BYTES, MOST_OPERATIONS = 2, 64 * 1024, 128
MOST_S, MOST_GROWTH = 3.0, 10.0


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


@dataclass
class Checkpoint:
    """One checkpoint: seconds of each part, and requests of each node but those by the clock."""

    seal_s: float
    decide_s: float
    notify_s: float
    cpu_share: float
    requests: list[int]

    @property
    def total_s(self) -> float:
        """From the last receipt to the last agent that knows."""
        return self.seal_s + self.decide_s + self.notify_s


class Crowd:
    """All agents, each with one rank, and what is seen of them."""

    def __init__(self, endpoints: Sequence[str], agents: int, layout: str) -> None:
        self.layout = r.Layout.parse(layout)
        self.endpoints = list(endpoints)
        self.cluster = FakeCluster(1)
        self.cluster.log = Quiet()
        self.cluster.net.log = self.cluster.log.add
        self.names = [f"n{i:04d}" for i in range(agents)]
        self.largest = {"bytes": 0, "operations": 0}
        self.tallies: dict[str, Tally] = {}
        self.agents: dict[str, Agent] = {}
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
        etcd = Etcd(endpoints, None, SLOW.rpc_timeout_s, SLOW.ledger_timeout_s)
        tally = self.tallies[name] = Tally(self.largest)
        counted(etcd, tally)
        self.etcds.append(etcd)
        doors = replace(
            node.doors(), ledger=etcd.ledger, membership=etcd.membership, notes=self.note
        )
        member = r.Member(name, node.host, doors.arena.store_id, "", "", "", node.domains)
        agent = self.agents[name] = Agent(SLOW, doors, member)
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
        self.trainers = [self.cluster.nodes[name].trainer() for name in self.names]
        await asyncio.gather(*(t.call(self._join(i)) for i, t in enumerate(self.trainers)))
        # the members are followed by a watch, as they are in a cluster that has been up for a while
        await self._until(lambda: all(a.home._followed is not None for a in self.agents.values()))

    def _join(self, rank: int) -> w.TrainerJoin:
        size, keep = len(self.names), 1
        return w.TrainerJoin(JOB, rank, size, "run", self.layout, keep, timeout_s=WAIT_S)

    async def checkpoint(self, ordinal: int) -> Checkpoint:
        """All ranks save; until all agents know, and have done what follows from it."""
        await self._until(self._at_rest)
        before = {name: tally.asked for name, tally in self.tallies.items()}
        self.last.clear()
        step = ordinal + 1
        state = self.agents[self.names[0]].jobs[JOB].ctx.state
        assert state.generation is not None
        attempt = r.Attempt(state.ledger_id, JOB, state.generation.number, ordinal, step)
        knowing = [asyncio.create_task(self._knows(agent, attempt)) for agent in self.everybody]
        await asyncio.gather(*(self._save(t, ordinal, step) for t in self.trainers))
        last = max(await asyncio.gather(*knowing), key=lambda moment: moment.wall_s)
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
                await asyncio.sleep(0.25)

    async def stop(self) -> None:
        """End all agents and connections."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for etcd in self.etcds:
            await etcd.close()


# -- figures ---------------------------------------------------------------------------------------


@dataclass
class Size:
    """All checkpoints of one number of agents."""

    agents: int
    checkpoints: list[Checkpoint]
    largest: dict[str, int]
    by_clock_per_s: float
    start_s: float

    def median(self, part: str) -> float:
        """Of one part of all checkpoints."""
        return statistics.median(float(getattr(c, part)) for c in self.checkpoints)

    @property
    def mean_requests(self) -> float:
        """Of a node and checkpoint."""
        return statistics.mean(n for c in self.checkpoints for n in c.requests)

    @property
    def most_requests(self) -> int:
        """Of any node but that of rank 0, which decides for all."""
        return max(n for c in self.checkpoints for n in c.requests[1:])

    @property
    def deciders_requests(self) -> float:
        """Of the node of rank 0."""
        return statistics.median(c.requests[0] for c in self.checkpoints)

    def record(self) -> dict[str, Any]:
        """As it stands in the JSON."""
        parts = ("total_s", "seal_s", "decide_s", "notify_s", "cpu_share")
        return {
            "agents": self.agents,
            "checkpoints": len(self.checkpoints),
            **{part: round(self.median(part), 4) for part in parts},
            "worst_total_s": round(max(c.total_s for c in self.checkpoints), 4),
            "requests_mean": round(self.mean_requests, 3),
            "requests_most": self.most_requests,
            "requests_rank0": self.deciders_requests,
            "largest_request_bytes": self.largest["bytes"],
            "largest_txn_operations": self.largest["operations"],
            "by_clock_per_node_and_s": round(self.by_clock_per_s, 3),
            "start_s": round(self.start_s, 1),
        }


def table(sizes: list[Size]) -> str:
    """The figures as lines of text."""
    rows: list[tuple[str, Callable[[Size], str]]] = [
        ("from the last receipt to the last agent that knows, median", lambda s: _ms(s, "total_s")),
        ("  seal: shares handed in, group records written", lambda s: _ms(s, "seal_s")),
        ("  decide: who lives, the commit's transaction", lambda s: _ms(s, "decide_s")),
        ("  notify: by the watches of all agents", lambda s: _ms(s, "notify_s")),
        (
            "  share of that in which this process computes",
            lambda s: f"{s.median('cpu_share'):.2f}",
        ),
        ("etcd requests of a node and checkpoint, mean", lambda s: f"{s.mean_requests:.2f}"),
        ("  the most of any node but rank 0's", lambda s: f"{s.most_requests}"),
        ("  of rank 0's, which decides for all", lambda s: f"{s.deciders_requests:.0f}"),
        ("by the clock, of a node and second", lambda s: f"{s.by_clock_per_s:.2f}"),
        ("largest request, bytes", lambda s: f"{s.largest['bytes']}"),
        ("largest transaction, operations", lambda s: f"{s.largest['operations']}"),
    ]
    head = f"{'agents':60}" + "".join(f"{s.agents:>12}" for s in sizes)
    lines = [head, "-" * len(head)]
    lines += [f"{name:60}" + "".join(f"{of(s):>12}" for s in sizes) for name, of in rows]
    return "\n".join(lines)


def _ms(size: Size, part: str) -> str:
    return f"{1000 * size.median(part):.0f} ms"


def broken(sizes: list[Size]) -> list[str]:
    """Bounds that do not hold."""
    out = []
    for s in sizes:
        if s.mean_requests > MOST_REQUESTS:
            out.append(f"{s.agents} agents: {s.mean_requests:.2f} requests, at most 2")
        if s.largest["bytes"] > MOST_BYTES:
            out.append(f"{s.agents} agents: a request of {s.largest['bytes']} bytes")
        if s.largest["operations"] > MOST_OPERATIONS:
            out.append(f"{s.agents} agents: {s.largest['operations']} operations at once")
        if s.median("total_s") > MOST_S:
            out.append(f"{s.agents} agents: {s.median('total_s'):.2f} s, at most {MOST_S} s")
    if len(sizes) == 2:
        growth = sizes[1].median("total_s") / sizes[0].median("total_s")
        if growth > MOST_GROWTH:
            out.append(f"{growth:.1f} times as long, at most {MOST_GROWTH:.0f}")
    return out


# -- running it ------------------------------------------------------------------------------------


async def measure(endpoints: Sequence[str], agents: int, checkpoints: int, layout: str) -> Size:
    """One size: start, one checkpoint to warm up, then those that count."""
    crowd, begun = Crowd(endpoints, agents, layout), time.perf_counter()
    try:
        await crowd.start()
        start_s = time.perf_counter() - begun
        say(f"{agents} agents stand after {start_s:.0f} s")
        await crowd.checkpoint(0)
        begun, by_clock = time.perf_counter(), _by_clock(crowd)
        done: list[Checkpoint] = []
        for ordinal in range(1, checkpoints + 1):
            done.append(await crowd.checkpoint(ordinal))
            say(f"checkpoint {ordinal} of {checkpoints}: {done[-1].total_s:.3f} s")
        rate = (_by_clock(crowd) - by_clock) / (time.perf_counter() - begun) / agents
        return Size(agents, done, dict(crowd.largest), rate, start_s)
    finally:
        await crowd.stop()


def _by_clock(crowd: Crowd) -> int:
    return sum(t.kinds["revision"] + t.kinds["LeaseKeepAlive"] for t in crowd.tallies.values())


def run(sizes: Sequence[int], checkpoints: int, layout: str, durable: bool) -> list[Size]:
    """Each size on an etcd of its own."""
    etcd_watch.PROGRESS_S, etcd_watch.SILENT_S = SLOW.keepalive_s, SLOW.lease_s
    out = []
    for agents in sizes:
        with tempfile.TemporaryDirectory(prefix="p2pckpt-scale-") as place:
            options = EtcdOptions(durable=durable, heartbeat_ms=500, election_ms=5000)
            with EtcdServers.start(Path(place), 3, options) as servers:
                say(f"etcd with 3 members, {agents} agents")
                out.append(asyncio.run(measure(servers.endpoints, agents, checkpoints, layout)))
    return out


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
