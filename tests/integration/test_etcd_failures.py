"""The etcd backend while real servers are dead, frozen, full, mute or of another cluster.

Servers are killed and frozen by signal. With an election timeout of 0.5 s and RPC deadlines of
1 s a lost leader must cost no more than a few seconds, and no watch may lose or double a change.
"""

import asyncio
import socket
import time
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from etcd_rig import FAST, THREE, etcdctl, free_port, leader_of, member, run

from p2pckpt.backends.etcd import Etcd, version_flaw
from p2pckpt.backends.etcd_server import EtcdOptions, EtcdServers
from p2pckpt.errors import (
    AmbiguousAnswer,
    ConfigError,
    LedgerForgot,
    LedgerUnavailable,
)
from p2pckpt.ports import Put, Txn, absent
from p2pckpt.wire import MAX_RECORD_BYTES


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    with EtcdServers.start(tmp_path_factory.mktemp("one"), 1, FAST) as servers:
        yield servers


@pytest.fixture(scope="module")
def three_members(tmp_path_factory):
    with EtcdServers.start(tmp_path_factory.mktemp("three"), 3, THREE) as servers:
        yield servers


@pytest.fixture
def three(three_members):
    """Three members, whole again after the test."""
    yield three_members
    for i in range(3):
        three_members.thaw(i)
    three_members.wait_healthy(range(3))


@pytest.fixture
def prefix(request):
    """Keys of this test only."""
    return f"{request.node.name}/"


# -- which failure means what ---------------------------------------------------------------------


def test_wrong_endpoints_are_named(one, prefix):
    nobody = f"http://127.0.0.1:{free_port()}"

    async def main():
        async with Etcd([nobody], rpc_deadline_s=0.3, operation_deadline_s=0.4) as etcd:
            with pytest.raises(LedgerUnavailable, match=rf"{nobody}.*UNAVAILABLE.*refused"):
                await etcd.ledger.get(prefix)
            with pytest.raises(LedgerUnavailable, match=nobody):
                await etcd.ledger.transact(Txn((), (Put(prefix, b""),)))
            with pytest.raises(LedgerUnavailable, match=nobody):
                await etcd.check_version()
        # With a right one beside it, nothing is felt.
        async with Etcd([nobody, *one.endpoints]) as etcd:
            assert await etcd.ledger.transact(Txn((), (Put(prefix + "a", b""),)))

    run(main)
    for wrong in ([], "http://a:1", ["ftp://a:1"], ["http://a"], ["http://a:x"], ["https://a:1"]):
        with pytest.raises(ConfigError, match="endpoint"):
            Etcd(wrong)
    with pytest.raises(ConfigError, match="deadlines"):
        Etcd(["a:1"], rpc_deadline_s=2.0, operation_deadline_s=1.0)


def test_an_endpoint_that_accepts_and_says_nothing_costs_one_deadline(one, prefix):
    async def main():
        with socket.socket() as mute:
            mute.bind(("127.0.0.1", 0))
            mute.listen()
            endpoint = f"http://127.0.0.1:{mute.getsockname()[1]}"
            async with Etcd([endpoint, *one.endpoints], rpc_deadline_s=0.3) as etcd:
                began = time.monotonic()
                # Nothing was sent on it, so this is not ambiguous.
                assert await etcd.ledger.transact(Txn((), (Put(prefix + "a", b""),)))
                assert 0.25 < time.monotonic() - began < 2.0

    run(main)


def test_a_frozen_server_makes_a_transaction_ambiguous_and_reading_back_settles_it(tmp_path):
    with EtcdServers.start(tmp_path, 1, FAST) as servers:

        async def main():
            deadlines = {"rpc_deadline_s": 0.3, "operation_deadline_s": 1.0}
            async with Etcd(servers.endpoints, **deadlines) as etcd:
                assert await etcd.ledger.get("k") is None
                servers.freeze(0)
                create = Txn((absent("k"),), (Put("k", b"1"),))
                with pytest.raises(AmbiguousAnswer, match="DEADLINE_EXCEEDED"):
                    await etcd.ledger.transact(create)
                began = time.monotonic()
                with pytest.raises(LedgerUnavailable, match=servers.endpoints[0]):
                    await etcd.ledger.get("k")
                assert time.monotonic() - began < 1.5
                servers.thaw(0)
            async with Etcd(servers.endpoints) as etcd:
                await write_settled(etcd.ledger, "k", b"1")
                entry = await etcd.ledger.get("k")
                assert (entry.value, entry.mod_revision) == (b"1", entry.create_revision)

        run(main)


def test_a_full_etcd_is_said_in_clear_words(tmp_path):
    flags = ("--quota-backend-bytes=2000000",)
    options = EtcdOptions(durable=False, flags=flags)
    with EtcdServers.start(tmp_path, 1, options) as servers:

        async def main():
            async with Etcd(servers.endpoints) as etcd:

                async def fill():
                    for i in range(10_000):  # etcd looks at its size ten times a second
                        key = f"k{i:03d}"
                        txn = Txn((absent(key),), (Put(key, b"x" * MAX_RECORD_BYTES),))
                        await etcd.ledger.transact(txn)

                with pytest.raises(AmbiguousAnswer, match=r"is full.*compaction.*defrag.*disarm"):
                    await fill()
                with pytest.raises(LedgerUnavailable, match="is full"):
                    await etcd.membership.open(member(), 5.0)
                listing = await etcd.ledger.list("k")
                assert listing.entries
                etcdctl(servers.endpoints[0], "del", "--prefix", "k")
                etcdctl(servers.endpoints[0], "compact", str(listing.revision + 1))
                etcdctl(servers.endpoints[0], "defrag")
                etcdctl(servers.endpoints[0], "alarm", "disarm")
                assert await etcd.ledger.transact(Txn((absent("k000"),), (Put("k000", b"1"),)))

        run(main)


def test_members_of_two_clusters_are_not_mixed(one, three, prefix):
    async def main():
        async with Etcd([*one.endpoints, *three.endpoints]) as etcd:
            await etcd.ledger.get(prefix)
            with pytest.raises(LedgerForgot, match="cluster"):
                await etcd.check_version(trial=True)

    run(main)


# -- losing servers -------------------------------------------------------------------------------


async def write_settled(ledger, key, value):
    """Create a key exactly once, as every user of the ledger has to: settle by reading back."""
    while True:
        try:
            if await ledger.transact(Txn((absent(key),), (Put(key, value),))):
                return
            entry = await ledger.get(key)
            assert entry is not None
            assert entry.value == value
            return
        except (AmbiguousAnswer, LedgerUnavailable):
            continue


@asynccontextmanager
async def writing_and_watching(servers, prefix, watchers=3):
    """Write until the block ends; then every watcher must have seen every key once, in order.

    Yields a list of (start, end) of the writes, by the loop's clock.
    """
    spans, stop, loop = [], asyncio.Event(), asyncio.get_running_loop()
    last = prefix + "last"
    clients = [Etcd(servers.endpoints) for _ in range(watchers + 1)]
    start = (await clients[0].ledger.list(prefix)).revision + 1

    async def write():
        while not stop.is_set():
            began = loop.time()
            key = f"{prefix}{len(spans):06d}"
            await write_settled(clients[0].ledger, key, key.encode())
            spans.append((began, loop.time()))

    async def see(etcd):
        seen = []
        watch = etcd.ledger.watch(prefix, start)
        while not seen or seen[-1].key != last:
            seen += await anext(watch)
        await watch.aclose()
        return seen

    writer = asyncio.create_task(write())
    readers = [asyncio.create_task(see(etcd)) for etcd in clients[1:]]
    while len(spans) < 20:
        await asyncio.sleep(0.01)
    yield spans
    stop.set()
    await writer
    await write_settled(clients[0].ledger, last, b"")
    keys = [f"{prefix}{i:06d}" for i in range(len(spans))]
    for seen in await asyncio.gather(*readers):
        assert [c.key for c in seen] == [*keys, last]
        assert all(c.revision == c.create_revision for c in seen)
    for etcd in clients:
        await etcd.close()


def longest_gap(spans):
    ends = [end for _, end in spans]
    return max(b - a for a, b in pairwise(ends))


async def more_writes(spans, count):
    """Wait until `count` further writes have ended."""
    goal = len(spans) + count
    while len(spans) < goal:
        await asyncio.sleep(0.01)


def test_a_frozen_leader_stops_nothing_for_long(three, prefix):
    """B089."""

    async def main():
        async with Etcd(three.endpoints) as other:
            session = await other.membership.open(member("n-freeze"), 10.0)
            async with writing_and_watching(three, prefix) as spans:
                leader = leader_of(three)
                three.freeze(leader)
                await more_writes(spans, 100)
                assert await other.membership.keep(session)
                three.thaw(leader)
                await more_writes(spans, 100)
            print(f"longest gap {longest_gap(spans):.2f} s in {len(spans)} writes")
            assert longest_gap(spans) < 6.0
            await other.membership.close(session)

    run(main)


def test_a_killed_leader_stops_nothing_for_long(tmp_path, prefix):
    """Servers of its own: etcd 3.5.1 does not survive being killed and started again unharmed."""
    with EtcdServers.start(tmp_path, 3, THREE) as servers:

        async def main():
            async with Etcd(servers.endpoints) as other:
                session = await other.membership.open(member("n-kill"), 10.0)
                async with writing_and_watching(servers, prefix) as spans:
                    servers.kill(leader_of(servers))
                    await more_writes(spans, 200)
                    assert await other.membership.keep(session)
                print(f"longest gap {longest_gap(spans):.2f} s in {len(spans)} writes")
                assert longest_gap(spans) < 6.0

        run(main)


@pytest.mark.slow
def test_a_watch_leaves_a_member_that_fell_silent(three, prefix):
    async def main():
        async with Etcd(three.endpoints) as etcd, Etcd(three.endpoints[::-1]) as other:
            first = await other.ledger.transact(Txn((), (Put(prefix + "k", b"0"),)))
            watch = etcd.ledger.watch(prefix, first)
            assert len(await anext(watch)) == 1
            waiting = asyncio.create_task(anext(watch))
            # Quiet for a moment, so that no ping of gRPC's own is under way to notice it sooner.
            await asyncio.sleep(1.5)
            three.freeze(0)
            began = time.monotonic()
            await write_settled(other.ledger, prefix + "l", b"1")
            assert await waiting == (), "another connection"
            assert [c.key for c in await anext(watch)] == [prefix + "l"]
            assert time.monotonic() - began < 7.0
            await watch.aclose()

    run(main)


def test_without_a_quorum_nothing_is_read_and_nothing_pretends(three, prefix):
    async def main():
        async with Etcd(three.endpoints, operation_deadline_s=2.0) as etcd:
            await etcd.ledger.transact(Txn((), (Put(prefix + "a", b"1"),)))
            leader = leader_of(three)
            three.freeze(leader)
            three.freeze((leader + 1) % 3)
            began = time.monotonic()
            with pytest.raises(LedgerUnavailable):
                await etcd.ledger.get(prefix + "a")
            assert time.monotonic() - began < 3.0
            three.thaw(leader)
            three.thaw((leader + 1) % 3)
            three.wait_healthy(range(3))
            assert (await etcd.ledger.get(prefix + "a")).value == b"1"

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_every_member_is_lost_in_turn_and_no_watch_notices(tmp_path, prefix, how):
    with EtcdServers.start(tmp_path, 3, THREE) as servers:

        async def main():
            async with Etcd(servers.endpoints) as etcd:
                releases = (await etcd.check_version(trial=True)).values()
            if how == "kill" and any(version_flaw(release) for release in releases):
                pytest.skip(f"etcd {set(releases)} loses transactions of killed members")
            async with writing_and_watching(servers, prefix, watchers=6) as spans:
                for lost in (0, 1, 2, 0, 1, 2):
                    await asyncio.to_thread(getattr(servers, how), lost)
                    await more_writes(spans, 100)
                    servers.spawn(lost)
                    await asyncio.to_thread(servers.wait_healthy, [lost])
                    servers.freeze(lost)
                    await more_writes(spans, 100)
                    servers.thaw(lost)
                    await asyncio.to_thread(servers.wait_healthy, [lost])
            print(f"longest gap {longest_gap(spans):.2f} s in {len(spans)} writes")

        run(main, within_s=180.0)


@pytest.mark.slow
def test_a_frozen_leader_for_a_minute(three, prefix):
    """B089."""

    async def main():
        async with Etcd(three.endpoints) as other:
            session = await other.membership.open(member("n-minute"), 10.0)
            async with writing_and_watching(three, prefix) as spans:
                leader = leader_of(three)
                three.freeze(leader)
                began = time.monotonic()
                while time.monotonic() - began < 60.0:
                    assert await other.membership.keep(session)
                    await more_writes(spans, 100)
                three.thaw(leader)
                await more_writes(spans, 100)
            assert longest_gap(spans) < 6.0

    run(main, within_s=120.0)
