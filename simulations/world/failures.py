"""What can go wrong in the simulated world, and when, by seed: machines, network, memory.

A fault is a function that does its harm to a node (or the ledger, or the network) and mends it
after a while, where it can be mended. `plan` draws when each of a list of faults strikes, on which
of the nodes that then live, and for how long: only from the seed. Faults of the ledger, the object
store, the jobs and whole racks are in `shocks`.

Contract: faults act through the world's own switches (crash, pause, partition, RAM, weather,
ledger), never on the product's objects; each is told to the event log. At its end the world is
whole again, but for what was lost for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Protocol

from p2pckpt import records as r
from p2pckpt.backends.inproc.cluster import FakeCluster, FakeNode
from p2pckpt.errors import FormatError
from p2pckpt.wire import unpack


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
    launchers: list[Any]
    clocks: dict[str, Any]

    def add_node(self, name: str, domains: Mapping[str, str]) -> None:
        """A new machine with a running agent."""
        ...

    def spare_name(self) -> str:
        """A name that no node had before."""
        ...

    def start_agent(self, node: FakeNode) -> None:
        """Start the agent of a machine, on the memory that it has."""
        ...

    async def stop_agent(self, node: FakeNode, keep_memory: bool) -> None:
        """The agent process dies, or the whole machine; no harm if it is dead already."""
        ...

    async def dismiss(self, node: FakeNode) -> None:
        """Tell the agent to stop, as SIGTERM does, and wait until it has."""
        ...


Strike = Callable[[HasWorld, FakeNode, Fault], Awaitable[None]]


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


def from_trace(seed: int, absences: Sequence[tuple[float, float]], span_s: float) -> list[Fault]:
    """The faults of a trace: a machine is lost from each of these moments on, another one comes at
    the other; both are shares of `span_s`. Which machine, the seed says."""
    rng = Random(f"trace {seed}")
    return [
        Fault(
            at_s=span_s * gone,
            what="crash_lose",
            pick=rng.random(),
            lasts_s=span_s * (back - gone),
            chance=rng.getrandbits(32),
        )
        for gone, back in sorted(absences)
    ]


# -- nodes ----------------------------------------------------------------------------------------


async def crash_lose(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """A machine is lost for good; another one, of another name, takes its place later."""
    world.living.remove(node.name)
    await world.stop_agent(node, keep_memory=False)
    await asyncio.sleep(fault.lasts_s)
    world.add_node(world.spare_name(), node.domains)


async def reboot(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """A machine loses its memory, and comes back under its name."""
    world.living.remove(node.name)
    await world.stop_agent(node, keep_memory=False)
    await asyncio.sleep(fault.lasts_s)
    world.start_agent(node)
    world.living.append(node.name)


async def crash_keep(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """The agent process dies and is started again, on the memory that stayed."""
    await world.stop_agent(node, keep_memory=True)
    await asyncio.sleep(fault.lasts_s)
    world.start_agent(node)


async def flapping(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """The agent process dies again and again, soon after each start."""
    rng = Random(fault.chance)
    for _ in range(3):
        await world.stop_agent(node, keep_memory=True)
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        world.start_agent(node)
        await asyncio.sleep(rng.uniform(0.0, 4.0))


async def pause(_world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """An agent stands still, perhaps for longer than its lease."""
    node.pause()
    await asyncio.sleep(fault.lasts_s)
    node.resume()


async def busy_cores(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """Somebody else takes all cores of a node; or of all nodes, and for longer than a save may
    take: what the agents compute (codes, checksums) stands, and they themselves live."""
    nodes, lasts_s = [node], fault.lasts_s
    if Random(fault.chance).random() < 0.5:
        nodes, lasts_s = [world.cluster.nodes[name] for name in world.living], 3 * lasts_s
    for each in nodes:
        each.take_cores()
    await asyncio.sleep(lasts_s)
    for each in nodes:
        each.give_cores()


async def mover_dies(_world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """The process that moves payload dies some times; the agent lives."""
    for _ in range(5):
        node.mover_dies()
        await asyncio.sleep(fault.lasts_s / 5)


async def trainer_dies(_world: HasWorld, node: FakeNode, _fault: Fault) -> None:
    """The ranks of a node are killed; its agent lives."""
    for trainer in node.trainers:
        trainer.kill()


async def node_leaves(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """An agent is told to stop, then its machine goes; another one comes later."""
    if len(world.living) > 1:
        world.living.remove(node.name)
        for trainer in node.trainers:
            trainer.kill()
        await world.dismiss(node)
        await world.stop_agent(node, keep_memory=False)
        await asyncio.sleep(fault.lasts_s)
        world.add_node(world.spare_name(), node.domains)


async def node_joins(world: HasWorld, node: FakeNode, _fault: Fault) -> None:
    """A spare machine comes, beside a node."""
    world.add_node(world.spare_name(), node.domains)


async def clock_skew(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """A node's clock goes up to a quarter too fast or too slow for a while."""
    clock, now = world.clocks[node.name], asyncio.get_running_loop().time
    clock.set_rate(Random(fault.chance).choice((0.8, 0.95, 1.05, 1.25)), now())
    await asyncio.sleep(fault.lasts_s)
    clock.set_rate(1.0, now())


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


async def _weather(world: HasWorld, lasts_s: float, **change: Any) -> None:
    """Add to what the weather is now, and take away as much: faults may overlap."""
    net = world.cluster.net
    for sign in (1, -1):
        now = {name: getattr(net.weather, name) + sign * by for name, by in change.items()}
        net.weather = replace(net.weather, **{name: round(x, 9) for name, x in now.items()})
        if sign > 0:
            await asyncio.sleep(lasts_s)


async def bad_weather(world: HasWorld, _node: FakeNode, fault: Fault) -> None:
    """Messages are lost and doubled."""
    await _weather(world, fault.lasts_s, loss=0.05, duplicate=0.05)


async def reorder(world: HasWorld, _node: FakeNode, fault: Fault) -> None:
    """Some messages come late, and others overtake them."""
    await _weather(world, fault.lasts_s, late=0.1, duplicate=0.02)


async def flip_wire(world: HasWorld, _node: FakeNode, fault: Fault) -> None:
    """Bits flip on the wire."""
    await _weather(world, fault.lasts_s, flip=0.1)


async def late_write(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """A node's link nearly stands, and what is under way is written even if nobody waits for it
    any more: into a buffer whose grant was cancelled."""
    world.cluster.net.slow(node.name, 1e3)
    await _weather(world, 15.0 + fault.lasts_s, late_write=True)
    world.cluster.net.slow(node.name, 50e6)
    await asyncio.sleep(2.0)


async def slow_node(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """A node's link passes a hundredth of what it should."""
    world.cluster.net.slow(node.name, 5e5)
    await asyncio.sleep(fault.lasts_s)
    world.cluster.net.slow(node.name, 50e6)


# -- memory ---------------------------------------------------------------------------------------


async def flip_memory(_world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """One bit of one RAM file turns around; not of a snapshot without a manifest: what turns before
    the agent takes its checksums is part of it, as in the training's own memory."""
    files = sorted(name for name, image in node.store.files.items() if len(image) > 0)
    files = [name for name in files if not _is_unproven(node.store.records.get(name))]
    if files:
        rng = Random(fault.chance)
        file = rng.choice(files)
        node.store.flip(file, rng.randrange(len(node.store.files[file])), rng.randrange(8))


def _is_unproven(packed: bytes | None) -> bool:
    """Is this the record of a slot that a rank or an encoder may be at?"""
    if packed is None:
        return False
    try:
        record = unpack(packed, r.FileRecord)
    except FormatError:
        return True
    return record.kind is r.FileKind.SLOT and not record.manifest_digest


async def flip_record(_world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """One bit of the record beside a RAM file turns around."""
    if files := sorted(node.store.records):
        rng = Random(fault.chance)
        file = rng.choice(files)
        node.store.flip_record(file, rng.randrange(len(node.store.records[file])), rng.randrange(8))


async def full_ram(_world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """Somebody else takes nearly all of a node's memory for a while."""
    used = sum(len(held) for held in node.store.files.values())
    node.store.fill(max(0, node.budget_bytes - used - Random(fault.chance).randrange(30_000)))
    await asyncio.sleep(fault.lasts_s)
    node.store.fill(0)


FAULTS: dict[str, Strike] = {
    f.__name__: f
    for f in (
        crash_lose,
        reboot,
        crash_keep,
        flapping,
        pause,
        busy_cores,
        mover_dies,
        trainer_dies,
        node_leaves,
        node_joins,
        clock_skew,
        partition,
        one_way,
        cut_from_ledger,
        bad_weather,
        reorder,
        flip_wire,
        late_write,
        slow_node,
        flip_memory,
        flip_record,
        full_ram,
    )
}
"""By name, as options and results name them; `shocks` adds its own."""
