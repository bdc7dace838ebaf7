"""The fault switches of the fake ledger, network and RAM: what breaks, and what must hold."""

import asyncio

import pytest
from inproc_world import SIZE, WHOLE, content, member, now, play, pong, prepare, transfer, write

from p2pckpt import wire
from p2pckpt.errors import (
    AmbiguousAnswer,
    Compacted,
    LedgerUnavailable,
    PeerUnreachable,
    Refused,
    UsageError,
)
from p2pckpt.ports import Txn

# -- the ledger -----------------------------------------------------------------------------------


def test_an_ambiguous_transaction_happened_or_not_and_reading_settles_it():
    outcomes = []

    async def story(cluster, a, b, c):
        ledger = a.doors().ledger
        for i in range(40):
            cluster.etcd.ambiguous_next("a")
            with pytest.raises(AmbiguousAnswer):
                await ledger.transact(write(f"p/{i}"))
            outcomes.append(await ledger.get(f"p/{i}") is not None)
            assert await ledger.transact(write(f"q/{i}")) is not None  # the next one is fine

    play(story)
    assert 8 < sum(outcomes) < 32


def test_an_unavailable_ledger_costs_one_client_its_deadline_and_writes_nothing():
    async def story(cluster, a, b, c):
        cluster.etcd.unavailable("a", 30.0)
        ledger, other = a.doors().ledger, b.doors().ledger
        for call in (ledger.get("p/a"), ledger.list("p/"), ledger.transact(write("p/a"))):
            begun = now()
            with pytest.raises(LedgerUnavailable):
                await call
            assert now() - begun == pytest.approx(cluster.etcd.operation_timeout_s, abs=0.01)
        assert (await other.list("p/")).entries == ()
        assert await ledger.transact(write("p/a")) is not None  # 30 s are over

    play(story)


def test_a_short_outage_is_bridged():
    async def story(cluster, a, b, c):
        cluster.etcd.unavailable("a", 3.0)
        assert await a.doors().ledger.transact(write("p/a")) is not None
        assert now() == pytest.approx(3.0, abs=0.01)

    play(story)


def test_a_cut_during_a_write_makes_it_ambiguous_whether_or_not_it_arrived():
    found = set()
    for i in range(30):

        async def story(cluster, a, b, c, i=i):
            ledger, other = a.doors().ledger, b.doors().ledger
            task = asyncio.create_task(ledger.transact(write("p/a")))
            await asyncio.sleep(0.0001 * (i + 1))
            cluster.cut_from_ledger("a")
            try:
                await task
                outcome = "answered"
            except AmbiguousAnswer:
                outcome = "ambiguous"
            found.add((outcome, await other.get("p/a") is not None))

        play(story, seed=i)
    assert found == {("answered", True), ("ambiguous", True), ("ambiguous", False)}


def test_a_watch_outlives_a_cut_and_loses_nothing():
    async def story(cluster, a, b, c):
        ledger, other = a.doors().ledger, b.doors().ledger
        watch = ledger.watch("p/", 1)
        seen = []

        async def follow():
            async for batch in watch:
                seen.extend(batch)

        task = asyncio.create_task(follow())
        for i in range(30):
            if i % 10 == 3:
                cluster.cut_from_ledger("a")
            if i % 10 == 8:
                cluster.heal()
            await other.transact(write(f"p/{i}"))
        await asyncio.sleep(1)
        assert [c.key for c in seen] == [f"p/{i}" for i in range(30)]
        task.cancel()

    play(story)


def test_compaction_ends_watches_that_fell_behind_and_no_others():
    async def story(cluster, a, b, c):
        ledger, other, third = (n.doors().ledger for n in (a, b, c))
        for i in range(5):
            await third.transact(write(f"p/{i}"))
        connected, behind = ledger.watch("p/", 1), other.watch("p/", 1)
        assert len(await anext(connected)) == 5
        assert len(await anext(behind)) == 5
        cluster.cut_from_ledger("b")
        for i in range(5, 9):
            await third.transact(write(f"p/{i}"))
        cluster.etcd.compact(cluster.etcd.revision)
        cluster.heal()
        assert len(await anext(connected)) == 4
        with pytest.raises(Compacted):
            await anext(behind)
        assert [batch async for batch in behind] == []  # it is over
        with pytest.raises(Compacted):
            await anext(ledger.watch("p/", 2))
        revision = (await other.list("p/")).revision
        later = other.watch("p/", revision + 1)
        await third.transact(write("p/9"))
        assert [c.key for c in await anext(later)] == ["p/9"]

    play(story)


def test_a_new_leader_restarts_the_time_of_every_lease():
    async def story(cluster, a, b, c):
        doors = a.doors()
        session = await doors.membership.open(member(a), 10.0)
        await asyncio.sleep(9)
        cluster.etcd.expire_all_ttl_reset()
        await asyncio.sleep(9)
        assert await doors.membership.keep(session) is True
        await asyncio.sleep(11)
        assert await doors.membership.keep(session) is False

    play(story)


def test_a_rolled_back_ledger_is_as_it_was_and_counts_from_there():
    async def story(cluster, a, b, c):
        doors = a.doors()
        session = await doors.membership.open(member(a), 10.0)
        await doors.ledger.transact(write("p/a", b"1", session))
        old = await doors.ledger.list("")
        await doors.ledger.transact(write("p/a", b"2"))
        await doors.ledger.transact(Txn(deletes=("p/a",)))
        await doors.membership.close(session)
        cluster.etcd.rollback(old.revision)
        assert await doors.ledger.list("") == old
        assert await doors.membership.keep(session) is True  # a lease is restored, too
        assert await doors.ledger.transact(write("p/b")) == old.revision + 1
        await asyncio.sleep(11)
        assert (await doors.membership.living()).members == {}

    play(story)


def test_a_wiped_ledger_is_empty_and_new():
    async def story(cluster, a, b, c):
        doors = a.doors()
        session = await doors.membership.open(member(a), 10.0)
        await doors.ledger.transact(write("p/a"))
        cluster.etcd.wipe()
        listing = await doors.ledger.list("")
        assert (listing.entries, listing.revision) == ((), 1)
        assert await doors.membership.keep(session) is False

    play(story)


# -- network and RAM ------------------------------------------------------------------------------


def test_a_one_way_partition_loses_requests_one_way_and_replies_the_other():
    async def story(cluster, a, b, c):
        x, y = a.doors(), b.doors()
        answered = []

        async def answer(caller, request):
            answered.append(request.store_id)
            return wire.Pong(store_id="s", session="x")

        await x.peers.serve(answer)
        await y.peers.serve(answer)
        cluster.partition("a", "b", one_way=True)
        for asker, target, name in ((x, y, "a to b"), (y, x, "b to a")):
            begun = now()
            with pytest.raises(PeerUnreachable):
                await asker.peers.call(target.peers.address, wire.Ping(store_id=name), 2.0)
            assert now() - begun == pytest.approx(2.0)
        assert answered == ["b to a"]  # that one was carried out, its answer is lost
        cluster.heal()
        await x.peers.call(y.peers.address, wire.Ping(store_id="healed"), 2.0)
        assert answered == ["b to a", "healed"]

    play(story)


def test_an_isolated_node_reaches_the_ledger_and_a_cut_one_its_peers():
    async def story(cluster, a, b, c):
        doors = [n.doors() for n in (a, b, c)]
        for each in doors:
            await each.peers.serve(pong)
        cluster.isolate("a")
        cluster.cut_from_ledger("b")
        await doors[0].ledger.get("p/a")
        with pytest.raises(LedgerUnavailable):
            await doors[1].ledger.get("p/a")
        for other in doors[1:]:
            with pytest.raises(PeerUnreachable):
                await doors[0].peers.call(other.peers.address, wire.Ping(), 1.0)
        await doors[1].peers.call(doors[2].peers.address, wire.Ping(), 1.0)
        with pytest.raises(UsageError, match="no node 'd'"):
            cluster.partition("a", "d")

    play(story)


def test_loss_and_duplicates_strike_at_their_rates():
    async def story(cluster, a, b, c):
        x, y = a.doors(), b.doors()
        arrivals = []

        async def answer(caller, request):
            arrivals.append(request.store_id)
            return wire.Pong(store_id="s", session="x")

        await y.peers.serve(answer)
        cluster.net.weather.loss = 0.2
        cluster.net.weather.duplicate = 0.3
        lost = 0
        for i in range(300):
            try:
                await x.peers.call(y.peers.address, wire.Ping(store_id=f"{i}"), 1.0)
            except PeerUnreachable:
                lost += 1
        assert 70 < lost < 150  # 1 - 0.8 * 0.8 = 0.36
        assert 40 < len(arrivals) - len(set(arrivals)) < 110  # 0.8 * 0.3 = 0.24

    play(story)


def test_transfers_take_the_time_of_their_bytes_and_share_a_link():
    async def story(cluster, a, b, c):
        x, y, z = (n.doors() for n in (a, b, c))
        await prepare(x, y, z)

        async def timed(*pairs):
            begun = now()
            tasks = [task for pair in pairs for task in (await transfer(*pair))[:2]]
            await asyncio.gather(*tasks)
            return now() - begun

        assert await timed((x, y)) == pytest.approx(0.1, rel=0.05)
        assert await timed((x, z), (y, z)) == pytest.approx(0.2, rel=0.05)
        assert await timed((x, y), (y, z)) == pytest.approx(0.1, rel=0.15)
        cluster.net.slow("b", 1e6)
        assert await timed((x, y)) == pytest.approx(1.0, rel=0.05)

    play(story)


def test_a_transfer_stalls_in_a_partition_and_both_sides_time_out():
    async def story(cluster, a, b, c):
        x, y = a.doors(), b.doors()
        await prepare(x, y)
        sending, receiving, grant = await transfer(x, y, timeout_s=3.0)
        await asyncio.sleep(0.05)
        cluster.partition("a", "b")
        for side in (sending, receiving):
            with pytest.raises(PeerUnreachable):
                await side
        assert now() == pytest.approx(3.0, abs=0.1)
        cluster.heal()
        await asyncio.sleep(10)
        assert content(y) == {1, 2}
        await grant.cancel()
        sending, receiving, _ = await transfer(x, y, timeout_s=3.0)
        await asyncio.gather(sending, receiving)

    play(story)


def test_sent_is_not_received():
    """B079: the last bytes may get lost after `send` returned."""

    async def story(cluster, a, b, c):
        x, y = a.doors(), b.doors()
        await prepare(x, y)
        sending, receiving, _ = await transfer(x, y, timeout_s=3.0)
        await asyncio.sleep(0.05)
        cluster.net.weather.loss = 1.0
        await sending
        with pytest.raises(PeerUnreachable):
            await receiving

    play(story)


def test_a_bit_flips_on_the_wire_and_nobody_is_told():
    async def story(cluster, a, b, c):
        x, y = a.doors(), b.doors()
        await prepare(x, y)
        cluster.net.weather.flip = 1.0
        sending, receiving, _ = await transfer(x, y)
        await asyncio.gather(sending, receiving)
        wrong = [byte for byte in bytes(y.arena.view(WHOLE)) if byte != 1]
        assert len(wrong) == SIZE // 100_000
        assert all((byte ^ 1).bit_count() == 1 for byte in wrong)

    play(story)


@pytest.mark.parametrize("planted", [False, True])
def test_the_planted_late_write_writes_into_a_cancelled_grant(planted):
    async def story(cluster, a, b, c):
        x, y = a.doors(), b.doors()
        await prepare(x, y)
        cluster.net.weather.late_write = planted
        sending, receiving, grant = await transfer(x, y)
        await asyncio.sleep(0.05)
        await grant.cancel()
        y.arena.view(WHOLE)[:] = b"\x09" * SIZE
        with pytest.raises(Refused):
            await receiving
        if planted:
            await sending
            await asyncio.sleep(1)
        else:
            with pytest.raises(Refused):
                await sending
        assert content(y) == ({1, 9} if planted else {9})

    play(story)


def test_bits_rot_in_memory():
    async def story(cluster, a, b, c):
        doors = a.doors()
        await prepare(doors)
        a.store.flip("f", 123_456, 7)
        view = doors.arena.view(WHOLE)
        assert [i for i in range(SIZE) if view[i] != 1] == [123_456]
        assert view[123_456] == 0x81

    play(story)


def test_cancelled_work_happened_whole_or_not_at_all():
    seen = set()

    async def story(cluster, a, b, c):
        workers = a.doors().workers
        for _ in range(20):
            done = []
            task = asyncio.create_task(workers.run(lambda done=done: done.append(1), 4e9))
            await asyncio.sleep(0.5)
            task.cancel()
            await asyncio.wait((task,))
            seen.add(len(done))
        begun = now()
        assert await workers.run(lambda: 42, 8e9) == 42
        assert now() - begun == pytest.approx(2.0)
        with pytest.raises(ZeroDivisionError):
            await workers.run(lambda: 1 / 0, 1)

    play(story)
    assert seen == {0, 1}
