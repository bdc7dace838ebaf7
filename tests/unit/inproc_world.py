"""A small fake cluster for the tests of the shipped fake: how to play a story on it."""

import asyncio

from p2pckpt import wire
from p2pckpt.backends.inproc.cluster import FakeCluster
from p2pckpt.ports import Put, Region, Txn
from p2pckpt.records import Member
from simulations.world import clock

SIZE = 1_000_000


def play(story, seed=1, names="abc"):
    """Run a story on a cluster of some nodes, links of 10 MB/s, pieces of 100 kB; its cluster."""

    async def main():
        cluster = FakeCluster(seed, bytes_per_s=1e7, piece_bytes=100_000)
        nodes = [cluster.node(name, budget_bytes=1 << 24) for name in names]
        await story(cluster, *nodes)
        return cluster

    return clock.run(main(), limit_s=3600)


def now():
    return asyncio.get_running_loop().time()


def write(key, value=b"", session=None):
    return Txn(puts=(Put(key, value, session),))


def member(node, session="x"):
    return Member(
        node=node.name,
        host=node.host,
        store_id=node.store.store_id,
        session=session,
        peers_address="p",
        transport_address="t",
    )


async def pong(caller, request):
    return wire.Pong(store_id=request.store_id, session=caller)


async def prepare(*doors):
    """A file "f" of SIZE bytes in each arena, full of the door's number."""
    for i, each in enumerate(doors):
        await each.arena.reserve("f", SIZE)
        each.arena.view(Region("f", 0, SIZE))[:] = bytes([i + 1]) * SIZE


WHOLE = Region("f", 0, SIZE)


def content(doors):
    return set(bytes(doors.arena.view(WHOLE)))


async def transfer(a, b, timeout_s=10.0):
    """Tasks that send a's file to b's, and receive it; and the grant."""
    grant = await b.transport.expect(WHOLE)
    sending = asyncio.create_task(
        a.transport.send(b.transport.address, grant.nonce, WHOLE, timeout_s)
    )
    return sending, asyncio.create_task(grant.received(timeout_s)), grant
