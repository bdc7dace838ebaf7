"""The port Membership: who is here, by lease."""

import asyncio

import pytest

from p2pckpt.errors import UsageError
from p2pckpt.ports import Put, Txn
from p2pckpt.records import MEMBERS

from .harness import member

TTL_S = 2.0
"""The shortest that etcd grants with its default timing."""


async def until_gone(rig, node, revision):
    """Wait for the deletion of a member's key."""
    async with asyncio.timeout(20):
        async for batch in rig.other.watch(MEMBERS, revision):
            if any(c.key == MEMBERS + node and c.value is None for c in batch):
                return


def test_members_are_seen_with_all_they_announce(ledgers):
    async def story(rig):
        assert (await rig.membership.living()).members == {}
        a = await rig.membership.open(member("n1", "s1"), 10.0)
        b = await rig.other_membership.open(member("n2", "s2"), 10.0)
        living = await rig.membership.living()
        assert living.members == {"n1": member("n1", "s1"), "n2": member("n2", "s2")}
        assert living.session_revisions == {"n1": a.revision, "n2": b.revision}
        assert living.stores == {"s1": "n1", "s2": "n2"}
        assert living.revision >= b.revision > a.revision
        entry = await rig.ledger.get(MEMBERS + "n1")
        assert entry.create_revision == a.revision

    ledgers.run(story)


def test_close_takes_the_member_away_at_once_and_twice_is_fine(ledgers):
    async def story(rig):
        session = await rig.membership.open(member("n1"), 10.0)
        await rig.membership.close(session)
        assert (await rig.other_membership.living()).members == {}
        assert await rig.membership.keep(session) is False
        await rig.membership.close(session)

    ledgers.run(story)


def test_a_lease_that_is_kept_outlives_its_ttl_and_one_that_is_not_ends_for_good(ledgers):
    """B090: a lease that ran out is not renewed, and keep says so."""

    async def story(rig):
        kept = await rig.membership.open(member("n1", "s1"), TTL_S)
        left = await rig.other_membership.open(member("n2", "s2"), TTL_S)
        await rig.other.transact(Txn(puts=(Put("p/of-n2", b"", left),)))

        async def keep():
            while True:
                assert await rig.membership.keep(kept)
                await asyncio.sleep(TTL_S / 4)

        keeper = asyncio.create_task(keep())
        await until_gone(rig, "n2", left.revision + 1)
        assert list((await rig.membership.living()).members) == ["n1"]
        assert await rig.ledger.get("p/of-n2") is None
        assert await rig.other_membership.keep(left) is False
        assert not keeper.done()
        keeper.cancel()
        await until_gone(rig, "n1", kept.revision + 1)
        assert await rig.membership.keep(kept) is False

    ledgers.run(story)


def test_a_restart_on_the_same_store_replaces_the_old_session(ledgers):
    async def story(rig):
        old = await rig.membership.open(member("n1", "s1"), 10.0)
        await rig.ledger.transact(Txn(puts=(Put("p/of-old", b"", old),)))
        new = await rig.other_membership.open(member("n1", "s1"), 10.0)
        assert new.revision > old.revision
        assert await rig.ledger.get("p/of-old") is None
        assert await rig.membership.keep(old) is False
        await rig.membership.close(old)
        assert await rig.other_membership.keep(new) is True
        assert (await rig.membership.living()).session_revisions == {"n1": new.revision}

    ledgers.run(story)


def test_another_store_takes_a_name_only_when_its_lease_is_gone(ledgers):
    async def story(rig):
        held = await rig.membership.open(member("n1", "s1"), TTL_S)
        with pytest.raises(UsageError, match="n1"):
            await rig.other_membership.open(member("n1", "s2"), 10.0)
        assert (await rig.membership.living()).stores == {"s1": "n1"}
        await until_gone(rig, "n1", held.revision + 1)
        await rig.other_membership.open(member("n1", "s2"), 10.0)
        assert (await rig.membership.living()).stores == {"s2": "n1"}

    ledgers.run(story)
