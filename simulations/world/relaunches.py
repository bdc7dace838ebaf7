"""Faults of the jobs themselves: started twice, taken over, set back, slow.

Intuition. Processes of an older launch that live on are what fences are for: they write into files
that should be others' by now, and what their agents sent to the ledger may arrive when the job is
another one's. Ranks that stand still keep a save open for longer than anybody waits.

Contract: as in `failures`, whose table these functions join: they act on launches and ranks, and on
the world's own switches, never on the product's objects.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

from p2pckpt.backends.inproc.cluster import FakeNode
from simulations.world.failures import Fault, HasWorld, Strike, crash_lose, reboot
from simulations.world.training import COPY_S


async def second_launch(world: HasWorld, _node: FakeNode, fault: Fault) -> None:
    """A job is launched while it runs, without takeover: it is refused, and the first goes on."""
    launcher = world.launchers[fault.chance % len(world.launchers)]
    if launcher.successor is not None or launcher.lost:
        return
    second = launcher.launch()
    await asyncio.wait((second.task,), timeout=fault.lasts_s)
    if second.joined.is_set():
        launcher.successor = second  # the first had died meanwhile
    else:
        second.kill()
        await second.task


async def takeover(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """A second launch takes the job over, and the first one's ranks live on, fenced off. By chance
    they had been stuck in the middle of their copies, and an agent was restarted for it; or the
    second one is on other nodes, and what the first one's agents send to the ledger comes late."""
    rng = Random(fault.chance)
    launcher = world.launchers[fault.chance % len(world.launchers)]
    if launcher.successor is not None or launcher.lost:
        return
    how = rng.choice(("at once", "stuck", "restart", "restart", "late", "late"))
    first = launcher.current
    ranks = first.ranks if first is not None else []
    late = [rank.node for rank in ranks] if how == "late" else []
    for rank in ranks:
        rank.copy_s = 14.0 if how in ("stuck", "restart") else rank.copy_s
    try:
        if how in ("stuck", "restart"):
            await asyncio.sleep(rng.uniform(1.0, 6.0))
        elif late:
            await _next_group_record(world, launcher.training.job)
        for name in late:
            world.cluster.etcd.late(name, 8.0)
        if how == "restart" and node.name in world.living:
            await world.stop_agent(node, keep_memory=True)
            await asyncio.sleep(0.2)
            world.start_agent(node)
            await asyncio.sleep(1.0)
        if launcher.successor is not None or launcher.lost or launcher.current is not first:
            for rank in ranks:
                rank.copy_s = COPY_S
            return
        launcher.left = late
        await _take_over(launcher, first)
    finally:
        launcher.left = []
        for name in late:
            world.cluster.etcd.late(name, 0.0)
    await asyncio.sleep(fault.lasts_s)
    if first is not None and first is launcher.current:
        first.kill()


async def _next_group_record(world: HasWorld, job: str) -> None:
    """Wait until a save of a job only lacks its outcome, at most some saves long."""
    bell: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def heard(_who: str, what: str, facts: dict[str, Any]) -> None:
        if what == "note.group_record" and facts["job"] == job and not bell.done():
            bell.set_result(None)

    world.cluster.log.listeners.append(heard)
    try:
        await asyncio.wait((bell,), timeout=12.0)
    finally:
        world.cluster.log.listeners.remove(heard)


async def _take_over(launcher: Any, first: Any) -> None:
    """Launch, and wait until that stands or failed."""
    if first is not None:
        first.stubborn = True
    launcher.successor = second = launcher.launch(takeover=True)
    joined = asyncio.ensure_future(second.joined.wait())
    await asyncio.wait((second.task, joined), timeout=60.0, return_when=asyncio.FIRST_COMPLETED)
    joined.cancel()


async def roll_back(world: HasWorld, _node: FakeNode, fault: Fault) -> None:
    """A job is stopped, and started again from the oldest step that is committed."""
    launcher = world.launchers[fault.chance % len(world.launchers)]
    if launcher.current is not None:
        launcher.roll_back()
        await asyncio.sleep(fault.lasts_s)


async def straggler(world: HasWorld, node: FakeNode, fault: Fault) -> None:
    """The ranks of a node stand still in the middle of their copies, longer than a lease or than a
    save may take, while all others wait for them; by chance a machine that holds shards loses
    them meanwhile, for good or to come back empty."""
    launcher = world.launchers[fault.chance % len(world.launchers)]
    ranks = launcher.current.ranks if launcher.current is not None else []
    slow = [rank for rank in ranks if rank.node == (node.name, ranks[0].node)[fault.chance % 2]]
    for rank in slow:
        rank.copy_s = 14.0 + 1.5 * fault.lasts_s
    for _ in range(100):
        if any(rank.copying for rank in slow):
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)
    for rank in slow:
        rank.copy_s = COPY_S
    others = [name for name in world.living if name not in [rank.node for rank in ranks]]
    if others and fault.chance % 3:
        lost = world.cluster.nodes[others[fault.chance % len(others)]]
        if fault.chance % 3 == 1:
            await crash_lose(world, lost, replace(fault, lasts_s=30.0))
        else:
            await reboot(world, lost, replace(fault, lasts_s=4.0))
            await asyncio.sleep(20.0)
    else:
        await asyncio.sleep(fault.lasts_s)


RELAUNCHES: dict[str, Strike] = {
    f.__name__: f for f in (second_launch, takeover, roll_back, straggler)
}
"""By name, as options and results name them."""
