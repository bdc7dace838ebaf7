"""The etcd backend against one real etcd server: ledger, watches and membership.

Nothing here is mocked, and other tests of the ports run in tests/contract; these are about what is
etcd's own. Every wait is for an event and bounded by `run`.
"""

import asyncio
import gc
import os
import threading

import pytest
from etcd_rig import FAST, etcdctl, member, run

from p2pckpt.backends.etcd import PAGE_KEYS, Etcd
from p2pckpt.backends.etcd_server import EtcdServers
from p2pckpt.backends.etcd_txn import MAX_TXN_OPERATIONS
from p2pckpt.backends.etcd_watch import _Stream
from p2pckpt.errors import Compacted, LedgerUnavailable, UsageError
from p2pckpt.ports import (
    Change,
    Compare,
    Put,
    Session,
    Txn,
    absent,
    none_in,
    none_newer,
    prefix_end,
    present,
    unchanged,
    value_below,
    value_is,
)
from p2pckpt.records import MEMBERS
from p2pckpt.wire import MAX_RECORD_BYTES


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    with EtcdServers.start(tmp_path_factory.mktemp("one"), 1, FAST) as servers:
        yield servers


@pytest.fixture
def prefix(request):
    """Keys of this test only."""
    return f"{request.node.name}/"


# -- ledger ---------------------------------------------------------------------------------------


def test_a_transaction_happens_whole_or_not_at_all(one, prefix):
    a, b = prefix + "a", prefix + "b"

    async def main():
        async with Etcd(one.endpoints) as etcd:
            ledger = etcd.ledger
            assert await ledger.get(a) is None
            first = await ledger.transact(Txn((absent(a),), (Put(a, b"1"), Put(b, b"\xff\x00"))))
            assert await ledger.transact(Txn((absent(a),), (Put(a, b"2"),))) is None
            entry = await ledger.get(a)
            assert (entry.value, entry.create_revision, entry.mod_revision) == (b"1", first, first)
            listing = await ledger.list(prefix)
            assert [e.key for e in listing.entries] == [a, b]
            assert listing.revision == first
            second = await ledger.transact(Txn((unchanged(entry),), (Put(a, b"3"),), (b,)))
            assert second == first + 1
            assert await ledger.transact(Txn((unchanged(entry),), (Put(a, b"4"),))) is None
            assert await ledger.get(b) is None
            assert etcdctl(one.endpoints[0], "get", a, "--print-value-only") == "3\n"

    run(main)


def test_compares_mean_what_the_port_says(one, prefix):
    key, other = prefix + "k", prefix + "z"

    async def main():
        async with Etcd(one.endpoints) as etcd:
            ledger = etcd.ledger
            revision = await ledger.transact(Txn((), (Put(key, b"m"),)))
            holds = [
                present(key),
                absent(other),
                value_is(key, b"m"),
                value_below(key, b"n"),
                none_in(prefix + "l", prefix + "zz"),
                none_newer(prefix, revision),
                none_newer("nothing here/", 1),
            ]
            fails = [
                absent(key),
                present(other),
                value_is(key, b"n"),
                value_is(other, b""),
                value_below(key, b"m"),
                value_below(other, b"m"),
                none_in(prefix, prefix_end(prefix)),
                none_newer(prefix, revision - 1),
            ]
            for compare in holds:
                assert await ledger.transact(Txn((compare,))) == revision, compare
            for compare in fails:
                assert await ledger.transact(Txn((compare,))) is None, compare
            assert await ledger.transact(Txn((*holds, fails[0]), (Put(other, b""),))) is None
            assert await ledger.get(other) is None

    run(main)


def test_limits_are_usage_errors_and_nothing_is_sent(one, prefix):
    def puts(count):
        return tuple(Put(f"{prefix}{i:04d}", b"x") for i in range(count))

    async def main():
        async with Etcd(one.endpoints) as etcd:
            ledger = etcd.ledger
            before = (await ledger.list(prefix)).revision
            bad = [
                Txn((), puts(MAX_TXN_OPERATIONS + 1)),
                Txn(tuple(absent(f"{prefix}{i}") for i in range(129))),
                Txn((), (Put(prefix + "big", b"x" * (MAX_RECORD_BYTES + 1)),)),
                Txn((), (Put(prefix + "a", b"1"), Put(prefix + "a", b"2"))),
                Txn((), (Put(prefix + "a", b"1"),), (prefix + "a",)),
                Txn((), (Put("", b"1"),)),
                Txn((Compare(prefix, "value", "=", 3),)),
                Txn((Compare(prefix, "version", "=", 3),)),
            ]
            for txn in bad:
                with pytest.raises(UsageError):
                    await ledger.transact(txn)
            assert (await ledger.list(prefix)).revision == before
            with pytest.raises(UsageError, match="revision >= 1"):
                ledger.watch(prefix, 0)
            large = tuple(Put(f"{prefix}{i}", b"x" * MAX_RECORD_BYTES) for i in range(25))
            with pytest.raises(UsageError, match="request is too large"):
                await ledger.transact(Txn((), large))
            compares = tuple(absent(f"{prefix}no{i}") for i in range(128))
            full = Txn(compares, (*puts(127), Put(prefix + "b", b"x" * MAX_RECORD_BYTES)))
            assert await ledger.transact(full) == before + 1

    run(main)


def test_a_long_listing_is_read_in_pages_of_one_revision(one, prefix):
    count = 2 * PAGE_KEYS + 88

    async def main():
        async with Etcd(one.endpoints) as etcd:
            keys = [f"{prefix}{i:05d}" for i in range(count)]
            for at in range(0, count, 100):
                await etcd.ledger.transact(
                    Txn((), tuple(Put(k, k.encode()) for k in keys[at : at + 100]))
                )
            stop = asyncio.Event()

            async def disturb():
                """Write into the last page and compact, so that pages meet both."""
                while not stop.is_set():
                    revision = await etcd.ledger.transact(Txn((), (Put(keys[-1], b"new"),)))
                    await asyncio.to_thread(etcdctl, one.endpoints[0], "compact", str(revision))

            task = asyncio.create_task(disturb())
            for _ in range(20):
                listing = await etcd.ledger.list(prefix)
                assert [e.key for e in listing.entries] == keys
                assert max(e.mod_revision for e in listing.entries) <= listing.revision
            stop.set()
            await task

    run(main)


def test_a_put_under_a_lease_that_is_gone_does_not_happen(one, prefix):
    async def main():
        async with Etcd(one.endpoints) as etcd:
            txn = Txn((), (Put(prefix + "a", b"1", Session(12345, 1)), Put(prefix + "b", b"1")))
            assert await etcd.ledger.transact(txn) is None
            assert (await etcd.ledger.list(prefix)).entries == ()

    run(main)


# -- watches --------------------------------------------------------------------------------------


def test_a_watch_gives_whole_revisions_from_the_one_asked_for(one, prefix):
    a, b = prefix + "a", prefix + "b"

    async def main():
        async with Etcd(one.endpoints) as etcd:
            ledger = etcd.ledger
            await ledger.transact(Txn((), (Put(a, b"0"),)))
            first = await ledger.transact(Txn((), (Put(a, b"1"), Put(b, b"1"))))
            second = await ledger.transact(Txn((), (Put(prefix[:-1] + "0", b"not below"),)))
            third = await ledger.transact(Txn((), (Put(b, b"2"),), (a,)))
            watch = ledger.watch(prefix, first)
            got = []
            while len(got) < 4:
                got += await anext(watch)
            assert got == [
                Change(a, b"1", first, first - 1),
                Change(b, b"1", first, first),
                Change(b, b"2", third, first),
                Change(a, None, third, 0),
            ]
            assert second == first + 1
            await watch.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(watch)

    run(main)


def test_a_cancelled_wait_loses_no_change(one, prefix):
    async def main():
        async with Etcd(one.endpoints) as etcd:
            start = (await etcd.ledger.list(prefix)).revision + 1
            watch = etcd.ledger.watch(prefix, start)
            got = []

            async def read():
                while len(got) < 100:
                    got.extend(await anext(watch))

            async def write():
                for i in range(100):
                    await etcd.ledger.transact(Txn((), (Put(prefix + "k", b"%d" % i),)))

            writing = asyncio.create_task(write())
            delay = 0.0005
            while len(got) < 100:
                try:
                    async with asyncio.timeout(delay):
                        await read()
                except TimeoutError:
                    delay = min(delay * 1.2, 1.0)
            await writing
            assert [int(c.value) for c in got] == list(range(100))
            await watch.aclose()

    run(main)


def test_a_compacted_watch_says_so_and_a_new_one_goes_on(one, prefix):
    async def main():
        async with Etcd(one.endpoints) as etcd:
            ledger = etcd.ledger
            revisions = [
                await ledger.transact(Txn((), (Put(prefix + "k", b"%d" % i),))) for i in range(5)
            ]
            watch = ledger.watch(prefix, revisions[0])
            await anext(watch)
            late = ledger.watch(prefix, revisions[0])
            etcdctl(one.endpoints[0], "compact", str(revisions[3]))
            with pytest.raises(Compacted, match=f"{revisions[0]}.*{revisions[3]}"):
                await anext(late)
            with pytest.raises(StopAsyncIteration):
                await anext(late)
            listing = await ledger.list(prefix)
            again = ledger.watch(prefix, listing.revision + 1)
            last = await ledger.transact(Txn((), (Put(prefix + "k", b"end"),)))
            assert [c.revision for c in await anext(again)] == [last]
            # One that is connected has seen everything and does not care.
            got = []
            while not got or got[-1].revision < last:
                got += await anext(watch)
            await watch.aclose()
            await again.aclose()

    run(main)


def test_a_watch_cut_off_during_a_compaction_says_so(tmp_path, prefix):
    with EtcdServers.start(tmp_path, 1, FAST) as servers:

        async def main():
            async with Etcd(servers.endpoints) as etcd:
                first = await etcd.ledger.transact(Txn((), (Put(prefix + "k", b"0"),)))
                watch = etcd.ledger.watch(prefix, first)
                assert [c.revision for c in await anext(watch)] == [first]
                waiting = asyncio.create_task(anext(watch))
                await asyncio.sleep(0)
                # All this blocks our loop, so that our watch cannot come back in between.
                servers.kill(0)
                servers.spawn(0)
                servers.wait_healthy([0])
                for i in range(1, 4):
                    etcdctl(servers.endpoints[0], "put", prefix + "k", str(i))
                etcdctl(servers.endpoints[0], "compact", str(first + 3))
                assert await waiting == (), "another connection"
                with pytest.raises(Compacted):
                    await anext(watch)

        run(main)


def test_a_thousand_cancelled_watches_leave_nothing_behind(one, prefix):
    """B093."""

    def counts():
        fds = os.listdir("/proc/self/fd")
        return threading.active_count(), len(fds), len(asyncio.all_tasks())

    async def main():
        async with Etcd(one.endpoints) as etcd:

            async def cancel_one(i):
                watch = etcd.ledger.watch(prefix, 1_000_000)
                waiting = asyncio.create_task(anext(watch))
                for _ in range(i % 7):
                    await asyncio.sleep(0.0005)
                waiting.cancel()
                await asyncio.wait({waiting})
                assert waiting.cancelled()

            async def cancel(count):
                for start in range(0, count, 10):
                    await asyncio.gather(*(cancel_one(start + i) for i in range(10)))
                await etcd.ledger.get(prefix)
                await asyncio.sleep(0.05)

            await cancel(20)
            before = counts()
            await cancel(1000)
            assert counts() == before

    run(main)


def test_a_watch_that_is_dropped_leaves_no_stream_behind(one, prefix):
    """Whoever has seen enough leaves the loop over a watch, and has nothing to close there."""

    def streams():
        gc.collect()
        # `type`, since isinstance asks every object for its class, and some of torch's warn then
        found = [each for each in gc.get_objects() if type(each) is _Stream]
        return sum(each._loop is asyncio.get_running_loop() for each in found)

    async def main():
        async with Etcd(one.endpoints) as etcd:
            revision = await etcd.ledger.transact(Txn((), (Put(prefix + "k", b"v"),)))

            async def see_one():
                async for changes in etcd.ledger.watch(prefix, revision):
                    assert [c.key for c in changes] == [prefix + "k"]
                    break

            for _ in range(20):
                await see_one()
            async with asyncio.timeout(20):
                while streams():
                    await asyncio.sleep(0.1)

    run(main)


def test_closing_ends_watches_and_later_calls(one, prefix):
    async def main():
        etcd = Etcd(one.endpoints)
        revision = (await etcd.ledger.list(prefix)).revision
        watch = etcd.ledger.watch(prefix, revision)
        waiting = asyncio.create_task(anext(watch))
        while watch._stream is None or watch._stream.waiting_since is None:
            await asyncio.sleep(0.001)
        await etcd.close()
        with pytest.raises(LedgerUnavailable, match="closed"):
            await waiting
        with pytest.raises(LedgerUnavailable, match="closed"):
            await etcd.ledger.get(prefix)
        await etcd.close()

    run(main)


def test_closing_while_a_connection_comes_up_ends_what_waits_for_it(one, prefix):
    """The member has answered, and the client is closed before whoever asked goes on."""

    async def main():
        asks = (
            lambda ledger: ledger.get(prefix),
            lambda ledger: ledger.transact(Txn((), (Put(prefix + "k", b"v"),))),
            lambda ledger: anext(ledger.watch(prefix, 1)),
        )
        for ask in asks:
            async with Etcd(one.endpoints) as etcd:
                (only,) = etcd._calls.members
                answer = only.status

                async def status(timeout_s, etcd=etcd, answer=answer):
                    found = await answer(timeout_s)
                    await etcd.close()
                    return found

                only.status = status
                with pytest.raises(LedgerUnavailable, match="closed"):
                    await ask(etcd.ledger)

    run(main)


# -- membership -----------------------------------------------------------------------------------


def test_members_come_and_go(one):
    async def main():
        async with Etcd(one.endpoints) as etcd:
            membership = etcd.membership
            first = await membership.open(member(), 5.0)
            living = await membership.living()
            assert living.members == {"n1": member()}
            assert living.session_revisions == {"n1": first.revision}
            assert await membership.keep(first)
            with pytest.raises(UsageError, match=r"n1.*held by store s1"):
                await membership.open(member(store_id="s2"), 5.0)
            second = await membership.open(member(session="y"), 5.0)
            assert second.revision > first.revision
            assert not await membership.keep(first)
            assert await membership.keep(second)
            own = Put("test_members/x", b"1", second)
            assert await etcd.ledger.transact(Txn((), (own,)))
            await membership.close(second)
            await membership.close(second)
            assert (await membership.living()).members == {}
            assert await etcd.ledger.get(own.key) is None
            assert await etcd.ledger.transact(Txn((), (own,))) is None
            with pytest.raises(UsageError, match="ttl_s"):
                await membership.open(member(), 0.0)

    run(main)


def test_an_expired_lease_is_seen_as_gone(one):
    async def main():
        async with Etcd(one.endpoints) as etcd:
            session = await etcd.membership.open(member("late", "s9"), 1.0)
            watch = etcd.ledger.watch(MEMBERS + "late", session.revision + 1)
            changes = await anext(watch)
            await watch.aclose()
            assert [(c.key, c.value) for c in changes] == [(MEMBERS + "late", None)]
            assert not await etcd.membership.keep(session)
            again = await etcd.membership.open(member("late", "s9", "new"), 5.0)
            assert again.revision > changes[-1].revision
            assert await etcd.membership.keep(again)
            await etcd.membership.close(again)

    run(main)
