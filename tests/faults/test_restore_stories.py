"""Stories of a restore that meets trouble: the right bytes or a refusal by name, never wrong ones.

Three ranks on n0 to n2 and two spare nodes n3, n4, unless a story says otherwise; layout rs:2,1, so
a share is whole while its own copy or two of its three shards are left.
"""

import asyncio

import pytest
from stage import JOB, now, play, until

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.errors import CheckpointError, RestoreFailed, SourcesAway, StaleGenerationError
from p2pckpt.ports import Put, Txn

THREE = ("n0", "n1", "n2")


async def two_steps(stage, *names, keep_last=2):
    """Steps 1 and 2 are committed and everybody has died."""
    launch = await stage.launch(*(names or THREE), keep_last=keep_last)
    await launch.saved(1, 2)
    launch.kill()
    return launch


def test_a_step_that_is_bad_beyond_repair_is_quarantined_and_the_older_one_restored():
    """Every copy of rank 0's bytes of step 2 is wrong: the ballot is closed BAD for step 2 and the
    next one takes step 1, for all ranks; there is no loop into the same state. (B105)"""

    async def story(stage):
        launch = await two_steps(stage)
        for node, held in stage.held(step=2):
            if held.owner == "n0":
                stage.nodes[node].store.flip(held.file, 100, 1)
        launch = await launch.again()
        assert await launch.restore() == 1
        state = stage.state()
        assert [c.close for c in state.closed.values() if c.generation == 2 and c.ballot] == [
            r.Close.BAD,
            r.Close.OK,
        ]
        launch = await launch.again()
        assert await launch.restore() == 1
        await launch.saved(2, 3)

    play(story)


# -- losses ----------------------------------------------------------------------------------------


def test_the_owner_and_m_holders_are_lost_and_the_step_comes_back_exact():
    """rs:2,2 on seven nodes: the owner n0 and two of its four holders are lost at once."""

    async def story(stage):
        launch = await two_steps(stage, keep_last=1)
        holders = stage.holders("n0", 2)
        stage.crash("n0", *[holders[i] for i in (0, 2)])
        launch = await launch.again(*sorted(stage.agents)[:3])
        assert await launch.restore() == 2

    play(story, nodes=7, layout="rs:2,2")


def test_one_loss_more_is_refused_and_the_ranks_are_named():
    """The owner n0 and m+1 = 3 of its holders: rank 0 cannot be had. restore() raises on every
    rank, names rank 0 and what is left, and does not say "nothing"."""

    async def story(stage):
        launch = await two_steps(stage, keep_last=1)
        holders = stage.holders("n0", 2)
        stage.crash("n0", *[holders[i] for i in (0, 1, 2)])
        for i in range(2):
            stage.add(f"m{i}")
        await asyncio.sleep(1)
        launch = await launch.again(*sorted(stage.agents)[:3])
        results = await asyncio.gather(
            *(rank.restore() for rank in launch.ranks), return_exceptions=True
        )
        assert all(isinstance(x, RestoreFailed) for x in results), results
        assert "ranks [0] of n0: own copy gone, 1 of 4 shards left, needs 2" in str(results[0])

    play(story, nodes=7, layout="rs:2,2", lost_grace_s=1.0)


def test_a_store_that_returns_in_time_is_waited_for_instead_of_an_older_step():
    """n0 is lost, and the agents with its shards of step 2 are away for 20 s; step 1 could be had
    at once. The decision waits, and takes 2 on all ranks. (B046 a)"""

    async def story(stage):
        launch, begun = await older_step_at_hand(stage, 20.0)
        assert await launch.restore() == 2
        assert 10 < now() - begun < 45

    play(story)


def test_a_store_that_stays_away_costs_the_step_and_all_ranks_take_the_older_one():
    """The same, but they never return: after 30 s one decision takes step 1 for all. (B046 b)"""

    async def story(stage):
        launch, begun = await older_step_at_hand(stage, None)
        assert await launch.restore() == 1
        assert now() - begun < 60
        assert "step 2, ranks [0]" in stage.events("note.decided")[-1]["reason"]

    play(story)


async def older_step_at_hand(stage, away_s):
    """Step 1 of n0 lies on n1 to n4; step 2 on n5 to n7, as the others were away; then n0 is lost,
    n5 to n7 are away and the others are back."""
    near, far = ("n2", "n3", "n4"), ("n5", "n6", "n7")
    launch = await stage.launch("n0", "n1", keep_last=2)
    await launch.saved(1)
    stage.crash(*near, keep_memory=True)
    for name in far:
        stage.add(name)
    await asyncio.sleep(12)
    stage.cluster.partition("n0", "n1", one_way=True)
    await launch.saved(2)
    stage.cluster.heal()
    assert set(stage.holders("n0", 2).values()) == set(far)
    assert len(set(stage.holders("n0", 1).values()) - set(far)) >= 1
    for name in near:
        stage.start(name)
    launch.kill()
    await asyncio.sleep(1)
    stage.crash("n0")
    stage.crash(*far, keep_memory=True)
    await asyncio.sleep(16)  # nobody takes them for living any more
    launch = await launch.again("n1", "n2")
    if away_s is not None:
        for name in far:
            asyncio.get_running_loop().call_later(away_s, stage.start, name)
    return launch, now()


# -- a restore under way ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["paused", "cut off"])
def test_a_holder_that_falls_silent_in_mid_restore_is_passed_over(how):
    """n0 is lost, so rank 0 comes from holders; one of them is stopped, or all of its packets are
    dropped, as it sends. The others are used, within seconds. (B051)"""

    async def story(stage):
        launch = await two_steps(stage, "n0", "n1", keep_last=1)
        first = stage.holders("n0", 2)[0]
        stage.crash("n0")
        restorer = "n3" if first != "n3" else "n4"
        launch = await launch.again(restorer, "n1")
        node = stage.nodes[first]
        stop = node.pause if how == "paused" else lambda: stage.cluster.isolate(first)
        asked = {"who": restorer, "to": f"{first}/peers", "kind": "GetRange"}  # so it is no repair
        stage.at("message.arrived", stop, **asked)
        begun = now()
        assert await launch.restore() == 2
        assert now() - begun < 20
        assert stage.events("note.source_failed"), "the story's fault did not happen"

    play(story, bytes_per_s=1e6, nodes=6)


def test_a_ballot_without_all_reports_is_tried_again_and_again_then_raises():
    """One rank never calls restore. Each ballot is RETRY at its deadline, and after max_ballots
    restore() raises on the others, naming the last reason. Nothing is quarantined."""

    async def story(stage):
        launch = await two_steps(stage, keep_last=1)
        launch = await launch.again()
        others = launch.ranks[:2]
        results = await asyncio.gather(*(x.restore() for x in others), return_exceptions=True)
        assert all(isinstance(x, RestoreFailed) for x in results), results
        assert "3 ballots failed; the last: not all ranks reported in time" in str(results[0])
        closings = [c for c in stage.state().closed.values() if c.generation == 2]
        assert [c.close for c in closings] == [r.Close.RETRY] * 3
        assert not stage.state().quarantined()

    play(story, max_ballots=3)


def test_a_rank_that_fails_to_load_makes_all_ranks_try_again():
    """Rank 1 has no memory at its first try: RETRY for all, and the second ballot is OK."""

    async def story(stage):
        launch = await two_steps(stage, keep_last=1)
        launch = await launch.again()

        async def restore(rank):
            if rank.rank == 1:
                reply = await rank.call(w.RestoreCall(0))
                done = w.RestoreDone(reply.ballot, failed="no memory", retryable=True)
                closed = (await rank.call(done)).closed
                assert closed.close is r.Close.RETRY
                assert "no memory" in closed.reason
            return await rank.restore()

        assert await launch.all(restore) == [(2, "local")] * 3

    play(story)


def test_a_rank_that_dies_in_a_restore_is_answered_by_a_new_generation():
    """Rank 1 dies before it reports. The launcher starts everybody again: the ballot of the older
    generation ends at once for who still waits in it, by name, and the new one restores."""

    async def story(stage):
        launch = await two_steps(stage, keep_last=1)
        launch = await launch.again()
        reply = await launch.ranks[0].call(w.RestoreCall(0))
        waiting = asyncio.create_task(launch.ranks[0].call(w.RestoreDone(reply.ballot)))
        await launch.ranks[1].call(w.RestoreCall(0))
        launch.ranks[1].trainer.kill()
        launch.ranks[2].trainer.kill()
        again = stage.form(*THREE, takeover=True)
        await again.join()
        with pytest.raises((StaleGenerationError, RestoreFailed)):
            await waiting
        assert await again.restore() == 2

    play(story)


def test_a_second_restore_in_one_generation_and_one_of_a_named_step():
    """restore(), save 3, restore() again, restore(step=2): each agrees on all ranks."""

    async def story(stage):
        launch = await two_steps(stage)
        launch = await launch.again()
        assert await launch.restore() == 2
        await launch.saved(3)
        assert await launch.restore() == 3
        assert await launch.restore(2) == 2
        with pytest.raises(RestoreFailed, match="step 7 is not committed"):
            await launch.restore(7)
        with pytest.raises(RestoreFailed, match="step 3 is of a lineage that was left"):
            await launch.restore(3)
        await launch.saved(3, 4, 5)
        launch = await launch.again()
        assert await launch.restore() == 5

    play(story)


# -- nothing, lost, wiped --------------------------------------------------------------------------


def test_nothing_lost_and_wiped_are_three_answers():
    """(B047) A job that never saved has provably nothing. When only the trainers restart, the copy
    in memory is found. When every agent restarts with its memory, too. When all memory is lost,
    restore raises, and never says "nothing"."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        assert await launch.restore() is None
        await launch.saved(1)
        launch = await launch.again()
        assert await launch.restore() == 1
        launch.kill()
        for name in list(stage.agents):
            stage.restart(name)
        launch = await launch.again()
        assert await launch.restore() == 1
        launch.kill()
        stage.crash(*THREE, "n3", "n4")
        for name in ("m0", "m1", "m2"):
            stage.add(name)
        launch = await launch.again("m0", "m1", "m2")
        with pytest.raises(RestoreFailed, match="own copy gone, 0 of 3 shards left"):
            await launch.restore()

    play(story)


async def started(launch):
    await launch.join()
    return await launch.restore()


def test_a_wiped_ledger_is_not_nothing():
    """etcd is empty, the agents are new starts that remember: joining is refused, or restore is;
    nobody hears "nothing", and no byte goes. (B047)"""

    async def story(stage):
        launch = await two_steps(stage, keep_last=1)
        held = stage.held()
        stage.etcd.wipe()
        await asyncio.sleep(15)
        launch.kill()
        new = stage.form(*THREE, timeout_s=20.0)
        with pytest.raises(CheckpointError, match="rebuild"):
            await started(new)
        assert [(n, h.file) for n, h in stage.held()] == [(n, h.file) for n, h in held]

    play(story)


# -- room that is made before ----------------------------------------------------------------------


def test_a_new_node_has_room_before_its_rank_asks():
    """The node of rank 2 is lost. Its successor makes a slot and its part of the shards at its
    start; the restore takes the slot, and nothing is made while it waits."""

    async def story(stage):
        launch = await two_steps(stage, keep_last=1)
        stage.crash("n2")
        stage.add("m2")
        await asyncio.sleep(20)
        (made,) = stage.events("note.made_ready", "m2")
        assert made["bytes"] > 0
        launch = await launch.again("n0", "n1", "m2")
        before = len(stage.events("ram.reserve", "m2"))
        assert await launch.restore() == 2
        later = [facts["file"] for facts in stage.events("ram.reserve", "m2")[before:]]
        assert not [file for file in later if file.startswith("slot")]

    play(story)


def test_copies_that_are_bad_in_different_chunks_make_a_good_one():
    """A node is lost, and both copies of its rank have rotted, each in another chunk. Every chunk
    is right in one of them, so the step is restored and not given up."""

    async def story(stage):
        launch = await two_steps(stage, keep_last=1)
        holders = [(n, h) for n, h in stage.held(r.FileKind.SHARD, 2) if h.owner == "n1"]
        assert len(holders) == 2
        chunk = stage.config.chunk_bytes
        for i, (node, held) in enumerate(holders):
            assert held.length > (i + 1) * chunk
            stage.nodes[node].store.flip(held.file, i * chunk + 7, 3)
        stage.crash("n1")
        launch = await launch.again("n0", "n3", "n2")
        assert await launch.restore() == 2
        assert stage.state().quarantined() == set()

    for seed in range(1, 4):
        play(story, seed=seed, layout="copies:2")


def test_what_is_bad_in_the_own_copy_alone_is_brought_from_others():
    """Seed 91020. A chunk of the own copy has rotted, and another one of the only other copy. The
    whole rank was fetched over the own copy, so its good chunk was lost, and the step with it."""

    async def story(stage):
        launch = await two_steps(stage, keep_last=1)
        chunk = stage.config.chunk_bytes
        ((node, shard),) = [(n, h) for n, h in stage.held(r.FileKind.SHARD, 2) if h.owner == "n1"]
        (slot,) = [h for n, h in stage.held(r.FileKind.SLOT, 2) if n == "n1"]
        stage.nodes["n1"].store.flip(slot.file, 7, 3)
        stage.nodes[node].store.flip(shard.file, chunk + 7, 3)
        launch = await launch.again()
        assert await launch.restore() == 2

    play(story, layout="copies:1")


def test_an_own_copy_that_could_not_be_mended_stays_and_takes_no_second_slot():
    """A chunk of the own copy has rotted, and n0 reaches nobody when it is to be brought anew. The
    copy was given up but kept its place, and that of the next try took another: with keep_last=1
    no slot was left, and every save from then on was skipped."""

    async def story(stage):
        launch = await two_steps(stage, keep_last=1)
        launch = await launch.again()
        (slot,) = [h for n, h in stage.held(r.FileKind.SLOT, 2) if n == "n0"]
        stage.nodes["n0"].store.flip(slot.file, 100, 1)
        stage.at("note.mend", lambda: stage.cluster.isolate("n0"))

        async def restore(rank):
            if rank.rank == 0:
                with pytest.raises(SourcesAway):
                    await rank.restore()
                rank.restores = 0  # the same call, in the next ballot
                stage.cluster.heal()
            return await rank.restore()

        assert await launch.all(restore) == [(2, "local")] * 3
        assert len([h for n, h in stage.held(r.FileKind.SLOT, 2) if n == "n0"]) == 1
        await asyncio.sleep(5)  # until nobody reads step 2 for the first ballot any more
        await launch.saved(3, 4)

    play(story)


def test_group_records_that_are_gone_after_the_decision_quarantine_no_step():
    """Somebody takes the group records of step 2 away, between the decision for it and the reading,
    and puts them back. No byte was wrong, so step 2 is not given up: it is restored."""

    async def story(stage):
        launch = await two_steps(stage)
        launch = await launch.again()
        attempt = stage.state().latest().attempt
        groups = stage.etcd.list(r.JobKeys(JOB).groups_of(attempt)).entries
        ledger, back = stage.agents["n4"].home.doors.ledger, []

        def put_back():
            txn = Txn(puts=tuple(Put(e.key, e.value) for e in groups))
            back.append(asyncio.ensure_future(ledger.transact(txn)))

        def take_away():
            txn = Txn(deletes=tuple(e.key for e in groups))
            back.append(asyncio.ensure_future(ledger.transact(txn)))
            stage.at("note.closed", put_back)

        stage.at("note.decided", take_away)
        assert await launch.restore() == 2
        assert len(back) == 2
        assert stage.state().quarantined() == set()

    play(story)


def test_an_own_copy_that_is_mended_by_scrub_and_by_a_restore_takes_one_slot():
    """The scrubber has found a wrong chunk in the own copy and brings it anew, which takes a while;
    a restore begins, and brings that chunk in place. Two copies were kept: with keep_last=1 no slot
    was left, and every save from then on was skipped."""

    async def story(stage):
        launch = await two_steps(stage, keep_last=1)
        launch = await launch.again()
        await asyncio.sleep(3)
        (slot,) = [h for n, h in stage.held(r.FileKind.SLOT, 2) if n == "n0"]
        stage.nodes["n0"].store.flip(slot.file, 100, 1)
        await until(lambda: stage.events("note.scrub_found"), every_s=0.001)
        assert await launch.restore() == 2
        assert stage.events("note.mend")
        await asyncio.sleep(5)
        assert len([h for n, h in stage.held(r.FileKind.SLOT, 2) if n == "n0"]) == 1
        left = stage.agents["n0"].home.holdings.of_job(JOB)
        assert not [h for h in left if h.kind is r.FileKind.STAGE]
        await launch.saved(3)
        await asyncio.sleep(5)
        await launch.saved(4)

    play(story, scrub_period_s=60.0, bytes_per_s=20e3)
