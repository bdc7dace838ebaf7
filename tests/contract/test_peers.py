"""The port Peers: small requests between agents."""

import asyncio

import pytest

from p2pckpt import wire
from p2pckpt.errors import CheckpointError, NoRoom, PeerUnreachable, Refused, UsageError


async def pong(caller, request):
    return wire.Pong(store_id=request.store_id, session=caller)


def test_a_request_is_answered(peers):
    async def story(rig):
        await rig.b.serve(pong)
        reply = await rig.a.call(rig.b.address, wire.Ping(store_id="s"), 5.0)
        assert isinstance(reply, wire.Pong)
        assert reply.store_id == "s"
        assert reply.session  # the caller has a name

    peers.run(story)


def test_agents_ask_each_other_and_themselves(peers):
    async def story(rig):
        async def relay(caller, request):
            return await rig.b.call(rig.a.address, request, 5.0)

        await rig.a.serve(pong)
        await rig.b.serve(relay)
        for asker in (rig.a, rig.b):
            reply = await asker.call(rig.b.address, wire.Ping(store_id="s"), 5.0)
            assert reply.store_id == "s"

    peers.run(story)


@pytest.mark.parametrize("kind", [Refused, NoRoom, PeerUnreachable, UsageError, CheckpointError])
def test_an_error_of_the_handler_reaches_the_caller(peers, kind):
    async def story(rig):
        async def refuse(caller, request):
            raise kind("needs 5, has 3")

        await rig.b.serve(refuse)
        with pytest.raises(kind, match="needs 5, has 3") as raised:
            await rig.a.call(rig.b.address, wire.Ping(), 5.0)
        assert type(raised.value) is kind

    peers.run(story)


def test_a_silent_peer_is_unreachable_at_the_timeout_and_not_before(peers):
    async def story(rig):
        async def sleep(caller, request):
            await asyncio.sleep(30)

        await rig.b.serve(sleep)
        clock = asyncio.get_running_loop()
        begun = clock.time()
        with pytest.raises(PeerUnreachable):
            await rig.a.call(rig.b.address, wire.Ping(), 0.5)
        assert 0.45 <= clock.time() - begun < 3.0

    peers.run(story)


def test_who_does_not_serve_or_no_longer_is_unreachable(peers):
    async def story(rig):
        with pytest.raises(PeerUnreachable):
            await rig.a.call(rig.b.address, wire.Ping(), 1.0)
        await rig.b.serve(pong)
        address = rig.b.address
        await rig.a.call(address, wire.Ping(), 5.0)
        await rig.b.close()
        with pytest.raises(PeerUnreachable):
            await rig.a.call(address, wire.Ping(), 1.0)

    peers.run(story)


def test_a_slow_request_does_not_hold_up_others(peers):
    async def story(rig):
        release = asyncio.Event()

        async def answer(caller, request):
            if request.store_id == "slow":
                await release.wait()
            return wire.Pong(store_id=request.store_id, session="x")

        await rig.b.serve(answer)
        slow = asyncio.create_task(rig.a.call(rig.b.address, wire.Ping(store_id="slow"), 20.0))
        replies = await asyncio.gather(
            *(rig.a.call(rig.b.address, wire.Ping(store_id=f"{i}"), 20.0) for i in range(50))
        )
        assert [r.store_id for r in replies] == [f"{i}" for i in range(50)]
        assert not slow.done()
        release.set()
        assert (await slow).store_id == "slow"

    peers.run(story)


def test_a_call_can_be_cancelled_and_the_next_one_works(peers):
    async def story(rig):
        arrived = asyncio.Event()

        async def answer(caller, request):
            if request.store_id == "first":
                arrived.set()
                await asyncio.sleep(5)
            return wire.Pong(store_id=request.store_id, session="x")

        await rig.b.serve(answer)
        first = asyncio.create_task(rig.a.call(rig.b.address, wire.Ping(store_id="first"), 20.0))
        await asyncio.wait_for(arrived.wait(), 10)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        reply = await rig.a.call(rig.b.address, wire.Ping(store_id="second"), 5.0)
        assert reply.store_id == "second"

    peers.run(story)


def test_messages_of_some_megabytes_pass_and_larger_ones_are_refused_unsent(peers):
    async def story(rig):
        asked = []

        async def answer(caller, request):
            asked.append(len(request.packed))
            return wire.ManifestReply(total=request.total, packed=request.packed)

        await rig.b.serve(answer)
        big = bytes(range(256)) * 4096 * 2  # 2 MiB, 2.7 MiB as text
        reply = await rig.a.call(rig.b.address, wire.ManifestReply(len(big), big), 20.0)
        assert reply.packed == big
        with pytest.raises(UsageError):
            await rig.a.call(rig.b.address, wire.ManifestReply(2 * len(big), big * 2), 20.0)
        assert asked == [len(big)]

    peers.run(story)
