"""What can go wrong in the simulated world, and when, by seed.

A fault is a function that does its harm to a node (or the ledger, or the network) and mends it
after a while, where it can be mended. `plan` draws when each of a list of faults strikes, on which
of the nodes that then live, and for how long: only from the seed.

Contract: faults act through the world's own switches (crash, pause, partition, RAM, weather,
ledger), never on the product's objects; each is told to the event log. At its end the world is
whole again, but for what was lost for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from p2pckpt.backends.inproc.cluster import FakeCluster, FakeNode


@dataclass(frozen=True)
class Fault:
    """One planned fault: when, what, on which living node, for how long; ``chance`` is its own."""

    at_s: float
    what: str
    pick: float
    lasts_s: float
    chance: int


class HasWorld(Protocol):
    """What a fault needs of the world."""

    cluster: FakeCluster
    living: list[str]

    def add_node(self, name: str, rack: str) -> None:
        """A new machine with a running agent."""
        ...

    def spare_name(self) -> str:
        """A name that no node had before."""
        ...

    def start_agent(self, node: FakeNode) -> None:
        """Start the agent of a machine, on the memory that it has."""
        ...

    async def stop_agent(self, node: FakeNode, keep_memory: bool) -> None:
        """The agent process dies, or the whole machine."""
        ...


def plan(seed: int, faults: Sequence[str], span_s: float) -> list[Fault]:
    """The faults of a seed, spread over `span_s` in the order given."""
    rng = Random(f"faults {seed}")
    return [
        Fault(
            at_s=span_s * (i + rng.uniform(0.2, 0.8)) / len(faults),
            what=what,
            pick=rng.random(),
            lasts_s=rng.uniform(2.0, 20.0),
            chance=rng.getrandbits(32),
        )
        for i, what in enumerate(faults)
    ]


# -- nodes ----------------------------------------------------------------------------------------


async def crash_lose(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """A machine is lost for good; another one, of another name, takes its place later."""
    await world.stop_agent(node, keep_memory=False)
    world.living.remove(node.name)
    await asyncio.sleep(fault.lasts_s)
    world.add_node(world.spare_name(), node.domains["rack"])


async def rack_lost(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """All machines of a rack are lost for good, at once; others take their places later."""
    nodes, rack = world.cluster.nodes, node.domains["rack"]
    lost = [name for name in world.living if nodes[name].domains["rack"] == rack]
    for name in lost:
        await world.stop_agent(nodes[name], keep_memory=False)
        world.living.remove(name)
    await asyncio.sleep(fault.lasts_s)
    for _ in lost:
        world.add_node(world.spare_name(), rack)


async def crash_keep(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """The agent process dies and is started again, on the memory that stayed."""
    await world.stop_agent(node, keep_memory=True)
    await asyncio.sleep(fault.lasts_s)
    world.start_agent(node)


async def pause(_world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """An agent stands still, perhaps for longer than its lease."""
    node.pause()
    await asyncio.sleep(fault.lasts_s)
    node.resume()


async def trainer_dies(_world: HasWorld, node: FakeNode, _fault: Fault) -> None:
    """The ranks of a node are killed; its agent lives."""
    for trainer in node.trainers:
        trainer.kill()


# -- network --------------------------------------------------------------------------------------


async def partition(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """A node is cut off from its peers and the ledger for a while."""
    world.cluster.isolate(node.name)
    world.cluster.cut_from_ledger(node.name)
    await asyncio.sleep(fault.lasts_s)
    world.cluster.heal()


async def one_way(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """What a node sends does not arrive; what others send does."""
    for other in list(world.cluster.nodes):
        if other != node.name:
            world.cluster.partition(node.name, other, one_way=True)
    await asyncio.sleep(fault.lasts_s)
    world.cluster.heal()


async def cut_from_ledger(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """A node is cut off from the ledger only."""
    world.cluster.cut_from_ledger(node.name)
    await asyncio.sleep(fault.lasts_s)
    world.cluster.heal()


async def bad_weather(world: HasWorld, _node: FakeNode, fault: Fault) -> None:
    """Messages are lost and doubled, and bits flip on the wire."""
    net = world.cluster.net
    fair, net.weather = net.weather, replace(net.weather, loss=0.05, duplicate=0.05, flip=0.05)
    await asyncio.sleep(fault.lasts_s)
    net.weather = fair


async def slow_node(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """A node's link passes a hundredth of what it should."""
    world.cluster.net.slow(node.name, 5e5)
    await asyncio.sleep(fault.lasts_s)
    world.cluster.net.slow(node.name, 50e6)


# -- memory ---------------------------------------------------------------------------------------


async def flip_memory(_world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """One bit of one RAM file turns around."""
    files = sorted(name for name, image in node.store.files.items() if len(image) > 0)
    if files:
        rng = Random(fault.chance)
        file = rng.choice(files)
        node.store.flip(file, rng.randrange(len(node.store.files[file])), rng.randrange(8))


async def flip_record(_world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """One bit of the record beside a RAM file turns around."""
    if files := sorted(node.store.records):
        rng = Random(fault.chance)
        file = rng.choice(files)
        node.store.flip_record(file, rng.randrange(len(node.store.records[file])), rng.randrange(8))


# -- ledger ---------------------------------------------------------------------------------------


async def ambiguous(world: HasWorld, _node: FakeNode, _fault: Fault) -> None:
    """The next transaction of every agent gets no answer; half of them happened."""
    for name in world.living:
        world.cluster.etcd.ambiguous_next(name)


async def ledger_outage(world: HasWorld, _node: FakeNode, fault: Fault) -> None:
    """Nobody reaches the ledger for a while."""
    for name in list(world.cluster.nodes):
        world.cluster.etcd.unavailable(name, fault.lasts_s)
    await asyncio.sleep(fault.lasts_s)


async def ttl_reset(world: HasWorld, _node: FakeNode, _fault: Fault) -> None:
    """The ledger's leader changes: all leases begin anew."""
    world.cluster.etcd.expire_all_ttl_reset()


async def compact(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """The ledger forgets its history while a node cannot follow it."""
    world.cluster.cut_from_ledger(node.name)
    await asyncio.sleep(fault.lasts_s)
    etcd = world.cluster.etcd
    if etcd.revision > etcd.compacted:
        etcd.compact(etcd.revision)
    world.cluster.heal()


FAULTS: dict[str, Callable[[HasWorld, FakeNode, Fault], Awaitable[None]]] = {
    f.__name__: f
    for f in (
        crash_lose,
        rack_lost,
        crash_keep,
        pause,
        trainer_dies,
        partition,
        one_way,
        cut_from_ledger,
        bad_weather,
        slow_node,
        flip_memory,
        flip_record,
        ambiguous,
        ledger_outage,
        ttl_reset,
        compact,
    )
}
"""By name, as options and results name them."""
