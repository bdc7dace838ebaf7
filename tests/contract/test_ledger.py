"""The port Ledger: linearizable keys, transactions with compares, watches."""

import asyncio

import pytest

from p2pckpt.errors import UsageError
from p2pckpt.ports import (
    Compare,
    Put,
    Txn,
    absent,
    none_in,
    none_newer,
    present,
    unchanged,
    value_below,
    value_is,
)

from .harness import member


def put(key, value=b"", **options):
    return Txn(puts=(Put(key, value, **options),))


async def collect(watch, count):
    """The next `count` changes at least, flat."""
    changes = []
    async with asyncio.timeout(20):
        while len(changes) < count:
            changes.extend(await anext(watch))
    return changes


def test_a_key_has_a_value_and_the_revisions_of_its_creation_and_last_write(ledgers):
    async def story(rig):
        assert await rig.ledger.get("p/a") is None
        first = await rig.ledger.transact(put("p/a", b"1"))
        second = await rig.ledger.transact(put("p/a", b"2"))
        assert first < second
        entry = await rig.ledger.get("p/a")
        assert (entry.key, entry.value) == ("p/a", b"2")
        assert (entry.create_revision, entry.mod_revision) == (first, second)

    ledgers.run(story)


def test_what_one_client_wrote_every_client_reads_at_once(ledgers):
    async def story(rig):
        for i in range(20):
            revision = await rig.ledger.transact(put("p/a", b"%d" % i))
            assert (await rig.other.get("p/a")).value == b"%d" % i
            assert (await rig.other.list("p/")).revision >= revision

    ledgers.run(story)


def test_a_listing_is_sorted_and_has_exactly_the_prefix(ledgers):
    async def story(rig):
        empty = await rig.ledger.list("p/")
        assert empty.entries == ()
        for key in ("p/b", "p/a/x", "p", "p0", "p/a", "q/a", "p/ä", "p/Z"):
            await rig.ledger.transact(put(key, key.encode()))
        listing = await rig.ledger.list("p/")
        assert [e.key for e in listing.entries] == ["p/Z", "p/a", "p/a/x", "p/b", "p/ä"]
        assert [e.value.decode() for e in listing.entries] == [e.key for e in listing.entries]
        assert listing.revision == empty.revision + 8

    ledgers.run(story)


def test_a_transaction_writes_all_at_one_revision_or_nothing(ledgers):
    async def story(rig):
        await rig.ledger.transact(put("p/old", b"x"))
        revision = await rig.ledger.transact(
            Txn(
                compares=(present("p/old"), absent("p/a"), value_is("p/old", b"x")),
                puts=(Put("p/a", b"1"), Put("p/b", b"2")),
                deletes=("p/old",),
            )
        )
        listing = await rig.ledger.list("p/")
        assert [(e.key, e.mod_revision) for e in listing.entries] == [
            ("p/a", revision),
            ("p/b", revision),
        ]
        assert listing.revision == revision
        refused = Txn(compares=(present("p/a"), absent("p/b")), puts=(Put("p/c", b""),))
        assert await rig.ledger.transact(refused) is None
        assert await rig.ledger.list("p/") == listing

    ledgers.run(story)


def test_a_key_that_is_deleted_and_made_again_has_a_new_creation(ledgers):
    async def story(rig):
        first = await rig.ledger.transact(put("p/a"))
        gone = await rig.ledger.transact(Txn(deletes=("p/a",)))
        assert await rig.ledger.get("p/a") is None
        assert await rig.ledger.transact(Txn(deletes=("p/a",))) == gone  # absent: no write
        again = await rig.ledger.transact(put("p/a"))
        assert first < gone < again
        assert (await rig.ledger.get("p/a")).create_revision == again

    ledgers.run(story)


# Keys p/a = b"5" and p/c = b"7" exist, p/b and all of q/ do not.
COMPARES = [
    (absent("p/a"), False),
    (absent("p/b"), True),
    (present("p/a"), True),
    (present("p/b"), False),
    (value_is("p/a", b"5"), True),
    (value_is("p/a", b"6"), False),
    (value_is("p/b", b""), False),
    (value_below("p/a", b"6"), True),
    (value_below("p/a", b"5"), False),
    (value_below("p/a", b"10"), False),  # as bytes, not as numbers
    (value_below("p/b", b"6"), False),
    (none_in("q/", "q0"), True),
    (none_in("p/", "p0"), False),
    (none_in("p/b", "p/c"), True),  # the end is outside
    (none_in("p/a", "p/b"), False),  # the start is inside
    (Compare("p/", "create", ">", 0, "p0"), True),
    (Compare("q/", "create", ">", 0, "q0"), False),  # no key counts as one of revision 0
    (Compare("p/", "value", "<", b"8", "p0"), True),
    (Compare("p/", "value", "<", b"7", "p0"), False),  # every key, not any
    (Compare("q/", "value", "<", b"8", "q0"), False),
    (Compare("p/b", "mod", "=", 0), True),
    (Compare("p/b", "mod", "<", 1), True),
]


@pytest.mark.parametrize(("compare", "holds"), COMPARES)
def test_compares(ledgers, compare, holds):
    async def story(rig):
        await rig.ledger.transact(put("p/a", b"5"))
        await rig.ledger.transact(put("p/c", b"7"))
        result = await rig.ledger.transact(Txn(compares=(compare,), puts=(Put("done", b""),)))
        assert (result is not None) == holds
        assert (await rig.ledger.get("done") is not None) == holds

    ledgers.run(story)


def test_compares_of_revisions_notice_every_later_write(ledgers):
    async def story(rig):
        await rig.ledger.transact(put("p/a", b"same"))
        entry = await rig.ledger.get("p/a")
        read = (await rig.ledger.list("p/")).revision
        for holds in (True, False):
            for compare in (unchanged(entry), none_newer("p/", read)):
                done = await rig.ledger.transact(Txn(compares=(compare,), puts=(Put("d", b""),)))
                assert (done is not None) == holds, compare
            await rig.other.transact(put("p/a", b"same"))  # the same value is a write too
        assert await rig.ledger.transact(Txn(compares=(none_newer("q/", 1),))) is not None

    ledgers.run(story)


def test_of_many_that_create_a_key_exactly_one_wins(ledgers):
    async def story(rig):
        async def create(i):
            client = (rig.ledger, rig.other)[i % 2]
            txn = Txn(compares=(absent("p/one"),), puts=(Put("p/one", b"%d" % i),))
            return await client.transact(txn)

        results = await asyncio.gather(*(create(i) for i in range(20)))
        (winner,) = (i for i, revision in enumerate(results) if revision is not None)
        entry = await rig.ledger.get("p/one")
        assert entry.value == b"%d" % winner
        assert entry.create_revision == results[winner]

    ledgers.run(story)


def test_limits_are_128_compares_128_operations_and_64_kilobytes(ledgers):
    """B086: the size is checked before anything is sent."""

    async def story(rig):
        puts = tuple(Put(f"p/{i}", b"") for i in range(128))
        compares = tuple(absent(f"q/{i}") for i in range(128))
        assert await rig.ledger.transact(Txn(compares=compares, puts=puts)) is not None
        assert await rig.ledger.transact(put("p/big", b"x" * 65536)) is not None
        before = await rig.ledger.list("")
        for txn in (
            Txn(puts=(*puts, Put("p/128", b""))),
            Txn(puts=puts, deletes=("q/0",)),
            Txn(compares=(*compares, absent("q/128"))),
            put("p/bigger", b"x" * 65537),
            Txn(puts=(Put("p/a", b"1"), Put("p/a", b"2"))),
            Txn(puts=(Put("p/a", b"1"),), deletes=("p/a",)),
        ):
            with pytest.raises(UsageError):
                await rig.ledger.transact(txn)
        assert (await rig.ledger.list("")).revision == before.revision

    ledgers.run(story)


def test_a_watch_tells_all_changes_below_its_prefix_from_its_revision_on(ledgers):
    async def story(rig):
        await rig.ledger.transact(put("p/early", b"not told"))
        first = await rig.ledger.transact(put("p/a", b"1"))
        await rig.ledger.transact(put("q/a", b"elsewhere"))
        await rig.ledger.transact(put("p/a", b"2"))
        watch = rig.other.watch("p/", first)
        told = await collect(watch, 2)
        later = asyncio.create_task(collect(watch, 3))
        both = await rig.ledger.transact(Txn(puts=(Put("p/b", b"3"),), deletes=("p/a",)))
        again = await rig.ledger.transact(put("p/a", b"4"))
        told += await later
        assert [(c.key, c.value, c.revision) for c in told] == [
            ("p/a", b"1", first),
            ("p/a", b"2", first + 2),
            ("p/b", b"3", both),
            ("p/a", None, both),
            ("p/a", b"4", again),
        ]
        assert [c.create_revision for c in told] == [first, first, both, 0, again]

    ledgers.run(story)


def test_a_watch_gives_the_changes_of_one_transaction_together(ledgers):
    async def story(rig):
        start = (await rig.ledger.list("p/")).revision + 1
        watch = rig.other.watch("p/", start)
        for i in range(10):
            await rig.ledger.transact(Txn(puts=tuple(Put(f"p/{j}", b"%d" % i) for j in range(20))))
        seen = []
        async with asyncio.timeout(20):
            while len(seen) < 200:
                batch = await anext(watch)
                assert len(batch) % 20 == 0
                seen.extend(batch)
        assert [c.revision for c in seen] == sorted(c.revision for c in seen)

    ledgers.run(story)


def test_a_watch_loses_and_doubles_nothing_when_waiting_for_it_is_given_up(ledgers):
    async def story(rig):
        start = (await rig.ledger.list("p/")).revision + 1
        watch = rig.other.watch("p/", start)

        async def write():
            for i in range(60):
                await rig.ledger.transact(put("p/a", b"%d" % i))

        writer = asyncio.create_task(write())
        seen = []
        async with asyncio.timeout(30):
            while len(seen) < 60:
                try:
                    seen.extend(await asyncio.wait_for(anext(watch), 0.001))
                except TimeoutError:
                    pass
        await writer
        assert [c.value for c in seen] == [b"%d" % i for i in range(60)]

    ledgers.run(story)


def test_two_watches_of_one_client_are_independent(ledgers):
    async def story(rig):
        start = (await rig.ledger.list("p/")).revision + 1
        a, b = rig.ledger.watch("p/", start), rig.ledger.watch("p/x", start)
        await rig.ledger.transact(put("p/x", b"1"))
        await rig.ledger.transact(put("p/y", b"2"))
        assert [c.key for c in await collect(a, 2)] == ["p/x", "p/y"]
        assert [c.key for c in await collect(b, 1)] == ["p/x"]

    ledgers.run(story)


def test_what_is_put_under_a_session_vanishes_with_it(ledgers):
    async def story(rig):
        session = await rig.membership.open(member("n1"), 10.0)
        await rig.ledger.transact(put("p/leased", b"1", session=session))
        await rig.ledger.transact(put("p/freed", b"1", session=session))
        await rig.ledger.transact(put("p/freed", b"2"))  # a put without a session detaches
        revision = await rig.ledger.transact(put("p/plain", b"1"))
        watch = rig.other.watch("p/", revision + 1)
        await rig.membership.close(session)
        assert [(c.key, c.value) for c in await collect(watch, 1)] == [("p/leased", None)]
        assert [e.key for e in (await rig.other.list("p/")).entries] == ["p/freed", "p/plain"]

    ledgers.run(story)


def test_a_put_under_a_session_that_is_gone_is_a_compare_that_does_not_hold(ledgers):
    async def story(rig):
        session = await rig.membership.open(member("n1"), 10.0)
        await rig.membership.close(session)
        txn = Txn(puts=(Put("p/a", b"1"), Put("p/b", b"1", session)))
        assert await rig.ledger.transact(txn) is None
        assert (await rig.ledger.list("p/")).entries == ()

    ledgers.run(story)
