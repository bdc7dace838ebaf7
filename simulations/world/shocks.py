"""Faults of what all nodes share: ledger, object store, racks and switches.

Intuition. A shock has no single victim: the ledger forgets, the bucket is away, all machines behind
one switch go dark. Some are mended by a deed of an operator, `ledger rebuild`, which is part of the
fault here.

Contract: as in `failures`, whose table these functions join: through the world's own switches only,
each told to the event log, mended at the end but for what was lost for good.
"""

from __future__ import annotations

import asyncio
from random import Random

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.backends.inproc.cluster import FakeNode
from p2pckpt.errors import AgentUnreachable, CheckpointError
from simulations.world.failures import Fault, HasWorld, Strike

REBUILD_TRIES = 40

# -- racks and switches ---------------------------------------------------------------------------


def _behind(world: HasWorld, node: FakeNode, level: str) -> list[FakeNode]:
    nodes = [world.cluster.nodes[name] for name in world.living]
    return [n for n in nodes if n.domains[level] == node.domains[level]]


async def rack_lost(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """All machines of a rack are lost for good, at once; others take their places later."""
    lost = _behind(world, node, "rack")
    for gone in lost:
        world.living.remove(gone.name)
    for gone in lost:
        await world.stop_agent(gone, keep_memory=False)
    await asyncio.sleep(fault.lasts_s)
    for gone in lost:
        world.add_node(world.spare_name(), gone.domains)


async def switch_dead(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """What is behind one switch is cut off from all others, and from the ledger."""
    inside = [n.name for n in _behind(world, node, "switch")]
    for name in inside:
        world.cluster.cut_from_ledger(name)
        for other in list(world.cluster.nodes):
            if other not in inside:
                world.cluster.partition(name, other)
    await asyncio.sleep(fault.lasts_s)
    world.cluster.heal()


async def power_blinks(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """Behind one switch all agents and trainers die at once; the memory survives."""
    inside = _behind(world, node, "switch")
    for gone in inside:
        for trainer in gone.trainers:
            trainer.kill()
        await world.stop_agent(gone, keep_memory=True)
    await asyncio.sleep(fault.lasts_s / 2)
    for gone in inside:
        world.start_agent(gone)


async def power_lost(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """All machines behind one switch lose their memory, and come back."""
    inside = _behind(world, node, "switch")
    for gone in inside:
        world.living.remove(gone.name)
    for gone in inside:
        await world.stop_agent(gone, keep_memory=False)
    await asyncio.sleep(fault.lasts_s)
    for gone in inside:
        world.start_agent(gone)
        world.living.append(gone.name)


# -- memory ---------------------------------------------------------------------------------------


async def share_rots(world: HasWorld, _node: FakeNode, fault: Fault) -> None:
    """One share of the newest step has wrong bits wherever it lies, more than can be decoded from;
    then the job is started anew. Only if it can go on from an older step."""
    launcher = world.launchers[fault.chance % len(world.launchers)]
    checkers = launcher.checkers
    tip = checkers.tip
    if tip is None or not checkers.can_go_back() or launcher.successor is not None:
        return
    shares = checkers.find(tip)
    owner = shares[fault.chance % len(shares)].share.node
    for name, file, length in checkers.files_of(tip, owner):
        if length:
            world.cluster.nodes[name].store.flip(file, fault.chance % length, fault.chance % 8)
    launcher.end()


# -- ledger ---------------------------------------------------------------------------------------


async def ambiguous(world: HasWorld, _node: FakeNode, _fault: Fault) -> None:
    """The next transaction of every agent gets no answer; half of them happened."""
    for name in world.living:
        world.cluster.etcd.ambiguous_next(name)


async def late_transactions(world: HasWorld, _node: FakeNode, fault: Fault) -> None:
    """What is sent to the ledger is carried out some seconds later, when nobody waits for it."""
    for name in list(world.cluster.nodes):
        world.cluster.etcd.late(name, 4.0)
    await asyncio.sleep(fault.lasts_s / 2)
    for name in list(world.cluster.nodes):
        world.cluster.etcd.late(name, 0.0)


async def ledger_outage(world: HasWorld, _node: FakeNode, fault: Fault) -> None:
    """Nobody reaches the ledger for a while."""
    for name in list(world.cluster.nodes):
        world.cluster.etcd.unavailable(name, fault.lasts_s)
    await asyncio.sleep(fault.lasts_s)


async def ttl_reset(world: HasWorld, _node: FakeNode, _fault: Fault) -> None:
    """The ledger's leader changes: all leases begin anew."""
    world.cluster.etcd.expire_all_ttl_reset()


async def stale_reads(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """A node's watches are served by a member that lags: what it reads there is seconds old."""
    world.cluster.etcd.lag(node.name, Random(fault.chance).uniform(0.5, 6.0))
    await asyncio.sleep(fault.lasts_s)
    world.cluster.etcd.heal()


async def compact(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """The ledger forgets its history while a node cannot follow it."""
    world.cluster.cut_from_ledger(node.name)
    await asyncio.sleep(fault.lasts_s)
    etcd = world.cluster.etcd
    if etcd.revision > etcd.compacted:
        etcd.compact(etcd.revision)
    world.cluster.heal()


async def ledger_wiped(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """An empty ledger stands in the place of the old one; later an operator rebuilds it. By chance
    a job is started meanwhile on machines that just came, whom the others do not answer."""
    world.cluster.etcd.wipe()
    if fault.chance % 2:
        await _start_on_strangers(world, node, fault)
    await _rebuild(world, fault)


async def _start_on_strangers(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    launcher = world.launchers[fault.chance % len(world.launchers)]
    known, new = list(world.living), [world.spare_name(), world.spare_name()]
    for name in new:
        world.add_node(name, node.domains)
    await asyncio.sleep(6.0)  # for all agents to be members again
    for name in new:
        for other in known:
            world.cluster.partition(name, other)
    launcher.left = known
    launcher.end()
    await asyncio.sleep(20.0 + fault.lasts_s)
    launcher.left = []
    world.cluster.heal()


async def ledger_rolled_back(world: HasWorld, _node: FakeNode, fault: Fault) -> None:
    """The ledger is set back to a backup of some while ago; later an operator rebuilds it."""
    etcd = world.cluster.etcd
    etcd.rollback(max(etcd.compacted + 1, etcd.revision - 5 - fault.chance % 60))
    await _rebuild(world, fault)


async def _rebuild(world: HasWorld, fault: Fault) -> None:
    """`p2pckpt ledger rebuild` of every job, from any node, again until there is nothing to do."""
    await asyncio.sleep(fault.lasts_s)
    left = [launcher.training.job for launcher in world.launchers]
    for attempt in range(REBUILD_TRIES):
        for job in list(left):
            while not world.living:
                await asyncio.sleep(1.0)
            node = world.cluster.nodes[world.living[attempt % len(world.living)]]
            try:
                reply = await _asked(node, w.RebuildCall(job))
            except CheckpointError as e:
                world.cluster.log.add("operator", "rebuild.later", {"job": job, "why": repr(e)})
                continue
            assert isinstance(reply, w.RebuildReply)
            facts = {"job": job, "problem": reply.problem, "steps": list(reply.steps)}
            world.cluster.log.add("operator", "rebuild", facts)
            asked_all = attempt > len(world.living)
            nothing = asked_all and "nothing to rebuild" in reply.problem
            lost = asked_all and "no living agent has a copy" in reply.problem
            if not reply.problem or nothing or (lost and await _clean(world, node, job)):
                left.remove(job)
        if not left:
            return
        await asyncio.sleep(2.0)


async def _asked(node: FakeNode, request: r.Record) -> r.Record:
    """What a command of the operator there is answered; nothing if the machine is lost."""
    command = node.trainer()
    try:
        return await command.call(request)
    except asyncio.CancelledError:
        if command.alive:
            raise
        raise AgentUnreachable(f"node {node.name}: lost, with the command that ran there") from None


async def _clean(world: HasWorld, node: FakeNode, job: str) -> bool:
    """The job had not committed anything: `p2pckpt job clean`, while no trainer lives. False: it
    was refused, as it is not known yet that none does, or that its joins are gone."""
    for launcher in world.launchers:
        if launcher.training.job == job:
            launcher.checkers.forgotten()
            launcher.end()
    try:
        reply = await _asked(node, w.CleanCall(job, dry_run=False))
    except CheckpointError as e:
        world.cluster.log.add("operator", "clean.failed", {"job": job, "why": repr(e)})
        return False
    world.cluster.log.add("operator", "clean", {"job": job, "reply": reply})
    assert isinstance(reply, w.CleanReply)
    return not reply.problem or "nothing is known" in reply.problem


# -- object store ---------------------------------------------------------------------------------


async def bucket_outage(world: HasWorld, _node: FakeNode, fault: Fault) -> None:
    """The object store does not answer for a while."""
    if (bucket := world.cluster.bucket) is not None:
        bucket.outage(fault.lasts_s)
        await asyncio.sleep(fault.lasts_s)


async def bucket_slow(world: HasWorld, _node: FakeNode, fault: Fault) -> None:
    """The object store is slower than training saves."""
    if (bucket := world.cluster.bucket) is not None:
        fast = bucket.bytes_per_s
        bucket.slow(2e3)
        await asyncio.sleep(fault.lasts_s)
        bucket.slow(fast)


async def bucket_errors(world: HasWorld, _node: FakeNode, fault: Fault) -> None:
    """The object store does what it is asked, and says that it failed."""
    if (bucket := world.cluster.bucket) is not None:
        bucket.error_after_the_fact(3)
        await asyncio.sleep(fault.lasts_s)
        bucket.error_after_the_fact(0)


async def bucket_damage(world: HasWorld, _node: FakeNode, fault: Fault) -> None:
    """Objects rot, lose their end, or go."""
    bucket, rng = world.cluster.bucket, Random(fault.chance)
    if bucket is None:
        return
    for name in rng.sample(sorted(bucket.objects), min(2, len(bucket.objects))):
        length = len(bucket.objects[name])
        match rng.randrange(3):
            case 0 if length:
                bucket.flip(name, rng.randrange(length), rng.randrange(8))
            case 1:
                bucket.truncate(name, length // 2)
            case _:
                bucket.lose(name)


SHOCKS: dict[str, Strike] = {
    f.__name__: f
    for f in (
        rack_lost,
        switch_dead,
        power_blinks,
        power_lost,
        share_rots,
        ambiguous,
        late_transactions,
        ledger_outage,
        ttl_reset,
        stale_reads,
        compact,
        ledger_wiped,
        ledger_rolled_back,
        bucket_outage,
        bucket_slow,
        bucket_errors,
        bucket_damage,
    )
}
"""By name, as options and results name them."""
