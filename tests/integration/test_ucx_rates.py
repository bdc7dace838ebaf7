"""Real movers that keep to rates, and how fast a node finds its network to be."""

import asyncio
import os
import signal
import tempfile
from contextlib import asynccontextmanager

import numpy as np
import pytest
from ucx_rig import BIG, HOST, MIB, ucx_world

from p2pckpt.backends import nic
from p2pckpt.backends.arena import TmpfsArena
from p2pckpt.backends.ucx import UcxTransport
from p2pckpt.errors import Refused
from p2pckpt.ports import Region
from p2pckpt.traffic import SLICE_S, Traffic

RATE = 40e6
SIZE = 40 * MIB
SLACK_S = 3 * SLICE_S
"""A pace may catch up two slices, and the last one goes without waiting for its own end."""


@pytest.fixture(scope="module")
def world():
    with ucx_world() as made:
        yield made


async def limit(transport, rates):
    """Within the loop, as the agent does."""
    transport.limit(rates)


@pytest.fixture
def unlimited(world):
    yield world
    world.run(limit(world.a, {}))
    world.run(limit(world.b, {}))


async def timed(world, source, target, traffic):
    """Seconds that a transfer from a to b takes."""
    clock = asyncio.get_running_loop().time
    begun, grant = clock(), await world.b.expect(target, traffic)
    async with asyncio.TaskGroup() as group:
        group.create_task(world.a.send(world.b.address, grant.nonce, source, 30, traffic))
        group.create_task(grant.received(30))
    return clock() - begun


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_kind_takes_its_time_and_a_restore_beside_it_none(unlimited, side):
    """40 MiB of repair at 40 MB/s take a second; 150 MiB for a restore, begun in the middle, have
    the rest of the link and of the window: they are there long before."""
    world = unlimited
    limited = world.a if side == "sender" else world.b
    world.run(limit(limited, {Traffic.REPAIR: RATE}))

    async def story():
        big = Region("big-source", 0, BIG - SIZE), Region("big-target", 0, BIG - SIZE)
        small = Region("big-source", BIG - SIZE, SIZE), Region("big-target", BIG - SIZE, SIZE)
        await timed(world, *big, Traffic.RESTORE)  # mapped and connected
        alone_s = await timed(world, *big, Traffic.RESTORE)
        repair = asyncio.create_task(timed(world, *small, Traffic.REPAIR))
        await asyncio.sleep(0.2)
        beside_s = await timed(world, *big, Traffic.RESTORE)
        assert not repair.done()
        return alone_s, beside_s, await repair

    alone_s, beside_s, repair_s = world.run(story())
    assert SIZE / RATE - SLACK_S <= repair_s < SIZE / RATE + 1
    assert beside_s < max(4 * alone_s, 0.5)
    source = np.memmap(world.directory / "big-source", np.uint8, "r")
    assert np.array_equal(world.big_target, source)


def test_two_of_a_kind_share_its_rate(unlimited):
    world, half = unlimited, SIZE // 2
    world.run(limit(world.a, {Traffic.SAVE: RATE}))

    async def story():
        places = [
            (Region("big-source", at, half), Region("big-target", at, half)) for at in (0, half)
        ]
        return await asyncio.gather(*(timed(world, *place, Traffic.SAVE) for place in places))

    took_s = world.run(story())
    assert SIZE / RATE - SLACK_S <= max(took_s) < SIZE / RATE + 1
    assert min(took_s) > 0.7 * max(took_s), "in turn"


def test_a_refusal_is_heard_by_who_keeps_to_a_rate(unlimited):
    """What it says before it hears of that is no reason to break the connection."""
    world = unlimited
    world.run(limit(world.a, {Traffic.SAVE: RATE}))

    async def story():
        for _ in range(5):
            region = Region("big-source", 0, SIZE)
            with pytest.raises(Refused, match="unknown or cancelled"):
                await world.a.send(world.b.address, "0" * 32, region, 10, Traffic.SAVE)

    world.run(story())


def test_a_mover_that_is_started_again_keeps_to_the_rates(unlimited):
    world = unlimited
    world.run(limit(world.b, {Traffic.DRAIN: RATE}))
    os.kill(world.b.mover_pid, signal.SIGKILL)

    async def story():
        await world.running(world.b)
        place = Region("big-source", 0, SIZE // 2), Region("big-target", 0, SIZE // 2)
        return await timed(world, *place, Traffic.DRAIN)

    assert world.run(story()) >= SIZE / 2 / RATE - SLACK_S


# -- the network, measured -------------------------------------------------------------------------


@asynccontextmanager
async def node(budget_bytes):
    with tempfile.TemporaryDirectory(prefix="p2pckpt-test-", dir="/dev/shm") as directory:
        arena = TmpfsArena(directory, budget_bytes)
        transport = await UcxTransport.start(arena.descriptor, HOST)
        try:
            yield arena, transport
        finally:
            await transport.close()
            arena.close()


def test_the_network_is_measured_and_nothing_is_left_of_it():
    async def story():
        async with node(64 * MIB) as (arena, transport):
            found, how = await nic.measure(arena, transport, HOST)
            assert arena.used_bytes == 0
            return found, how

    found, how = asyncio.run(story())
    assert 50e6 < found < 100e9
    assert how == f"measured: {found / 1e9:.2f} GB/s from the mover to itself"


def test_without_room_it_is_not_measured_and_says_so():
    async def story():
        async with node(8 * MIB) as (arena, transport):
            return await nic.measure(arena, transport, HOST)

    found, how = asyncio.run(story())
    assert found == 0
    assert how.startswith("not measured: NoRoom: ")


def test_the_link_of_an_address():
    assert nic.link_of("127.0.0.1") == ("lo", 0)
    assert nic.link_of("192.0.2.1") == ("", 0)
    assert nic.link_of("no such host.") == ("", 0)
