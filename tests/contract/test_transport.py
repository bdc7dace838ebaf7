"""The port Transport: payload moves only by the receiver's grant, whole or not at all."""

import asyncio
import random

import pytest

from p2pckpt.errors import IntegrityError, PeerUnreachable, Refused
from p2pckpt.ports import Region
from p2pckpt.traffic import SLICE_S, Traffic

from .harness import fill, read


def pattern(length, seed=0):
    return random.Random(seed).randbytes(length)


async def move(rig, data, offset=0, timeout_s=20.0):
    """Send `data` from a file of a's to a file of b's."""
    await fill(rig.a_arena, "from", data)
    await rig.b_arena.reserve("to", 1 << 22)
    grant = await rig.b.expect(Region("to", offset, len(data)))
    receiving = asyncio.create_task(grant.received(timeout_s))
    await rig.a.send(rig.b.address, grant.nonce, Region("from", 0, len(data)), timeout_s)
    await receiving


@pytest.mark.parametrize("length", [0, 1, 4095, 65536, 65537, 3_000_001])
def test_exactly_the_bytes_arrive_where_they_were_granted(transports, length):
    async def story(rig):
        data = pattern(length)
        await move(rig, data, offset=1000)
        assert read(rig.b_arena, "to", length, offset=1000) == data
        assert read(rig.b_arena, "to", 1000) == bytes(1000)
        assert read(rig.b_arena, "to", 1000, offset=1000 + length) == bytes(1000)

    transports.run(story)


def test_many_transfers_at_once_do_not_mix(transports):
    async def story(rig):
        size, count = 100_000, 8
        parts = [pattern(size, seed=i) for i in range(count)]
        await fill(rig.a_arena, "from", b"".join(parts))
        await rig.b_arena.reserve("to", 1 << 20)

        async def one(i):
            grant = await rig.b.expect(Region("to", i * size, size))
            region = Region("from", i * size, size)
            async with asyncio.TaskGroup() as group:
                group.create_task(grant.received(20.0))
                group.create_task(rig.a.send(rig.b.address, grant.nonce, region, 20.0))

        await asyncio.gather(*(one(i) for i in range(count)))
        assert read(rig.b_arena, "to", size * count) == b"".join(parts)

    transports.run(story)


def test_both_ways_at_once(transports):
    async def story(rig):
        for arena, file in ((rig.a_arena, "a"), (rig.b_arena, "b")):
            await fill(arena, "mine", file.encode() * 500_000)
            await arena.reserve("yours", 1 << 20)
        region, target = Region("mine", 0, 500_000), Region("yours", 0, 500_000)
        to_a, to_b = await rig.a.expect(target), await rig.b.expect(target)
        async with asyncio.TaskGroup() as group:
            group.create_task(rig.a.send(rig.b.address, to_b.nonce, region, 20.0))
            group.create_task(rig.b.send(rig.a.address, to_a.nonce, region, 20.0))
            group.create_task(to_a.received(20.0))
            group.create_task(to_b.received(20.0))
        assert read(rig.a_arena, "yours", 500_000) == b"b" * 500_000
        assert read(rig.b_arena, "yours", 500_000) == b"a" * 500_000

    transports.run(story)


def test_nonces_are_never_the_same(transports):
    async def story(rig):
        await rig.b_arena.reserve("to", 4096)
        grants = [await rig.b.expect(Region("to", 0, 16)) for _ in range(50)]
        assert len({grant.nonce for grant in grants}) == 50

    transports.run(story)


@pytest.mark.parametrize("sent", [999, 1001, 0, 4096])
def test_another_length_than_granted_is_an_error_of_the_receiver(transports, sent):
    """B077: lengths are named, and nothing counts as received."""

    async def story(rig):
        await fill(rig.a_arena, "from", pattern(4096))
        await rig.b_arena.reserve("to", 4096)
        grant = await rig.b.expect(Region("to", 1000, 1000))
        receiving = asyncio.create_task(grant.received(20.0))
        try:
            await rig.a.send(rig.b.address, grant.nonce, Region("from", 0, sent), 20.0)
        except Refused:
            pass  # the sender may hear of it, too
        with pytest.raises(IntegrityError) as wrong:
            await receiving
        assert "1000" in str(wrong.value)
        assert str(sent) in str(wrong.value)
        assert read(rig.b_arena, "to", 1000) == bytes(1000)
        assert read(rig.b_arena, "to", 2096, offset=2000) == bytes(2096)

    transports.run(story)


async def refused_send(rig, nonce, length):
    """The sender hears of it, unless its bytes had left already: then nothing was written."""
    try:
        await rig.a.send(rig.b.address, nonce, Region("from", 0, length), 5.0)
    except (Refused, PeerUnreachable):
        pass


def test_without_a_grant_nothing_is_written(transports):
    async def story(rig):
        await fill(rig.a_arena, "from", pattern(4096))
        await rig.b_arena.reserve("to", 4096)
        grant = await rig.b.expect(Region("to", 0, 4096))
        await refused_send(rig, "0" * 32, 4096)
        with pytest.raises(PeerUnreachable):
            await grant.received(0.3)
        assert read(rig.b_arena, "to", 4096) == bytes(4096)

    transports.run(story)


def test_a_grant_is_good_for_one_write(transports):
    async def story(rig):
        await move(rig, pattern(4096))
        await rig.b_arena.reserve("next", 4096)
        grant = await rig.b.expect(Region("to", 0, 4096))
        nonce = grant.nonce
        region = Region("from", 0, 4096)
        await rig.a.send(rig.b.address, nonce, region, 20.0)
        await grant.received(20.0)
        rig.b_arena.view(Region("to", 0, 4096))[:] = bytes(4096)
        await refused_send(rig, nonce, 4096)
        after = await rig.b.expect(Region("next", 0, 4096))
        await rig.a.send(rig.b.address, after.nonce, region, 20.0)
        await after.received(20.0)  # so the refused one is over, too
        assert read(rig.b_arena, "to", 4096) == bytes(4096)

    transports.run(story)


def test_of_two_senders_with_one_nonce_one_is_served(transports):
    async def story(rig):
        size = 1_000_000
        await fill(rig.a_arena, "from", b"1" * size + b"2" * size)
        await rig.b_arena.reserve("to", 1 << 20)
        grant = await rig.b.expect(Region("to", 0, size))

        async def send(i):
            region = Region("from", i * size, size)
            await rig.a.send(rig.b.address, grant.nonce, region, 5.0)

        sends = [asyncio.create_task(send(i)) for i in range(2)]
        await grant.received(20.0)
        got = read(rig.b_arena, "to", size)
        await asyncio.wait(sends)
        served = [i for i, task in enumerate(sends) if task.exception() is None]
        assert got in [bytes([ord("1") + i]) * size for i in served]
        await rig.b_arena.reserve("next", 1 << 20)
        after = await rig.b.expect(Region("next", 0, size))
        await rig.a.send(rig.b.address, after.nonce, Region("from", 0, size), 20.0)
        await after.received(20.0)  # so all that was under way is over
        assert read(rig.b_arena, "to", size) == got

    transports.run(story)


def test_nothing_comes_within_the_timeout_if_nobody_sends(transports):
    async def story(rig):
        await rig.b_arena.reserve("to", 4096)
        grant = await rig.b.expect(Region("to", 0, 4096))
        clock = asyncio.get_running_loop()
        begun = clock.time()
        with pytest.raises(PeerUnreachable):
            await grant.received(0.5)
        assert 0.45 <= clock.time() - begun < 3.0

    transports.run(story)


def test_waiting_may_be_given_up_and_taken_up_again(transports):
    async def story(rig):
        data = pattern(4096)
        await fill(rig.a_arena, "from", data)
        await rig.b_arena.reserve("to", 4096)
        grant = await rig.b.expect(Region("to", 0, 4096))
        waiting = asyncio.create_task(grant.received(20.0))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait((waiting,))
        await rig.a.send(rig.b.address, grant.nonce, Region("from", 0, 4096), 20.0)
        await grant.received(20.0)
        assert read(rig.b_arena, "to", 4096) == data

    transports.run(story)


def test_after_cancel_nothing_is_written_and_waiting_ends_with_refused(transports):
    async def story(rig):
        await fill(rig.a_arena, "from", pattern(3_000_000))
        await rig.b_arena.reserve("to", 1 << 22)
        for delay_s in (0.0, 0.0003, 0.0006, 0.001, 0.003, 0.01):
            region = Region("to", 0, 3_000_000)
            grant = await rig.b.expect(region)
            receiving = asyncio.create_task(grant.received(20.0))
            sending = asyncio.create_task(refused_send(rig, grant.nonce, 3_000_000))
            await asyncio.sleep(delay_s)
            await grant.cancel()
            rig.b_arena.view(region)[:] = bytes(3_000_000)  # ours again: it must stay as it is
            await asyncio.wait((receiving, sending))
            if receiving.exception() is not None:  # else it had come whole before
                assert isinstance(receiving.exception(), Refused)
            assert read(rig.b_arena, "to", 3_000_000) == bytes(3_000_000), delay_s
        await rig.a_arena.reserve("last", 4096)
        last = await rig.b.expect(Region("to", 0, 4096))
        await rig.a.send(rig.b.address, last.nonce, Region("last", 0, 4096), 20.0)
        await last.received(20.0)

    transports.run(story)


def test_a_send_can_be_cancelled_and_the_next_one_works(transports):
    async def story(rig):
        data = pattern(3_000_000)
        await fill(rig.a_arena, "from", data)
        await rig.b_arena.reserve("to", 1 << 22)
        region = Region("from", 0, len(data))
        for _ in range(3):
            grant = await rig.b.expect(Region("to", 0, len(data)))
            sending = asyncio.create_task(rig.a.send(rig.b.address, grant.nonce, region, 20.0))
            await asyncio.sleep(0.0002)
            sending.cancel()
            await asyncio.wait((sending,))
            await grant.cancel()
        grant = await rig.b.expect(Region("to", 0, len(data)))
        await rig.a.send(rig.b.address, grant.nonce, region, 20.0)
        await grant.received(20.0)
        assert read(rig.b_arena, "to", len(data)) == data

    transports.run(story)


@pytest.mark.parametrize("limited", ["sender", "receiver", "both"])
def test_a_kind_keeps_to_its_rate_and_a_restore_beside_it_has_none(transports, limited):
    async def story(rig):
        size, rate, clock = 1_500_000, 2e6, asyncio.get_running_loop()
        await fill(rig.a_arena, "from", pattern(2 * size))
        await rig.b_arena.reserve("to", 1 << 22)
        for side, transport in (("sender", rig.a), ("receiver", rig.b)):
            if limited in (side, "both"):
                transport.limit({Traffic.REPAIR: rate})

        async def one(offset, traffic):
            begun, region = clock.time(), Region("from", offset, size)
            grant = await rig.b.expect(Region("to", offset, size), traffic, 20.0)
            async with asyncio.TaskGroup() as group:
                send = rig.a.send(rig.b.address, grant.nonce, region, 20.0, traffic)
                group.create_task(send)
                group.create_task(grant.received(20.0))
            return clock.time() - begun

        await one(0, Traffic.RESTORE)  # connected, mapped
        took = await asyncio.gather(one(0, Traffic.REPAIR), one(size, Traffic.RESTORE))
        least_s = size / rate - 2 * SLICE_S - SLICE_S  # may catch up; the last slice goes at once
        assert least_s <= took[0] < least_s + 2
        assert took[1] < took[0] / 2
        assert read(rig.b_arena, "to", 2 * size) == pattern(2 * size)

        repair = asyncio.create_task(one(0, Traffic.REPAIR))
        await asyncio.sleep(0.1)
        rig.a.limit({})
        rig.b.limit({})
        assert await repair < size / rate / 2, "new rates hold for what is under way"

    transports.run(story)


def test_a_paced_transfer_can_be_cancelled_on_either_side(transports):
    async def story(rig):
        await fill(rig.a_arena, "from", pattern(3_000_000))
        await rig.b_arena.reserve("to", 1 << 22)
        region, kind = Region("from", 0, 3_000_000), Traffic.DRAIN
        rig.a.limit({kind: 1e5})
        for side in ("sender", "receiver"):
            grant = await rig.b.expect(Region("to", 0, 3_000_000), kind)
            send = rig.a.send(rig.b.address, grant.nonce, region, 20.0, kind)
            sending = asyncio.create_task(send)
            await asyncio.sleep(0.3)
            assert not sending.done()
            if side == "sender":
                sending.cancel()
            await grant.cancel()
            (ended,) = await asyncio.gather(sending, return_exceptions=True)
            assert isinstance(ended, asyncio.CancelledError | PeerUnreachable | Refused)
        rig.a.limit({})
        grant = await rig.b.expect(Region("to", 0, 3_000_000), kind)
        await rig.a.send(rig.b.address, grant.nonce, region, 20.0, kind)
        await grant.received(20.0)
        assert read(rig.b_arena, "to", 3_000_000) == pattern(3_000_000)

    transports.run(story)


def test_close_ends_what_is_awaited_on_both_sides(transports):
    async def story(rig):
        await fill(rig.a_arena, "from", pattern(4096))
        await rig.b_arena.reserve("to", 4096)
        address = rig.b.address
        grant = await rig.b.expect(Region("to", 0, 4096))
        receiving = asyncio.create_task(grant.received(20.0))
        await asyncio.sleep(0)
        await rig.b.close()
        with pytest.raises((PeerUnreachable, Refused)):
            await receiving
        with pytest.raises((PeerUnreachable, Refused)):
            await rig.a.send(address, grant.nonce, Region("from", 0, 4096), 2.0)
        assert read(rig.b_arena, "to", 4096) == bytes(4096)

    transports.run(story)


def test_close_ends_a_send_in_progress(transports):
    async def story(rig):
        await fill(rig.a_arena, "from", pattern(3_000_000))
        await rig.b_arena.reserve("to", 1 << 22)
        grant = await rig.b.expect(Region("to", 0, 3_000_000))
        region = Region("from", 0, 3_000_000)
        sending = asyncio.create_task(rig.a.send(rig.b.address, grant.nonce, region, 50.0))
        await asyncio.sleep(0.0005)
        await rig.a.close()
        await asyncio.wait_for(asyncio.wait((sending,)), 10)
        if sending.exception() is not None:  # else all had left
            assert isinstance(sending.exception(), PeerUnreachable | Refused)
        await grant.cancel()

    transports.run(story)
