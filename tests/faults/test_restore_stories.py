"""Stories of a restore that meets trouble: the right bytes or a refusal by name, never wrong ones.

Three ranks on n0 to n2 and two spare nodes n3, n4, unless a story says otherwise; layout rs:2,1, so
a share is whole while its own copy or two of its three shards are left.
"""

import asyncio
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from stage import JOB, now, play

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.errors import CheckpointError, RestoreFailed, StaleGenerationError

THREE = ("n0", "n1", "n2")
KEYS = r.JobKeys(JOB)


async def two_steps(stage, *names, keep_last=2):
    """Steps 1 and 2 are committed and everybody has died."""
    launch = await stage.launch(*(names or THREE), keep_last=keep_last)
    await launch.saved(1, 2)
    launch.kill()
    return launch


# -- damage ----------------------------------------------------------------------------------------


def files_of(stage, kind, parts, step=2):
    return [
        (node, held)
        for node, held in stage.held(kind, step)
        if kind is r.FileKind.SLOT or held.part in parts
    ]


def flip_file(stage, rng, step, kind, parts=()):
    node, held = rng.choice(files_of(stage, kind, parts, step))
    stage.nodes[node].store.flip(held.file, rng.randrange(held.length), rng.randrange(8))


def flip_manifest(stage, rng, step):
    """A bit of a manifest beside some file; the chunk tables are most of it."""
    node, held = rng.choice(stage.held(step=step))
    documents, name = stage.nodes[node].store.documents, f"manifest-{held.manifest_digest}"
    documents[name] = flipped(documents[name], rng)


def flip_ledger(stage, rng, key):
    """A bit of a value in etcd, in place: no revision tells of it. How to undo it."""
    entries = stage.etcd._entries
    old = entries[key]
    entries[key] = replace(old, value=flipped(old.value, rng))

    def undo():
        if key in entries:
            entries[key] = old

    return undo


def flip_group(stage, rng, step):
    attempt = next(c for c in stage.state().commits.values() if c.attempt.step == step).attempt
    return flip_ledger(stage, rng, KEYS.group(attempt, 0))


def flip_commit(stage, rng, step):
    (lineage,) = (name for name, number in stage.state().commits if number == step)
    return flip_ledger(stage, rng, KEYS.commit(lineage, step))


def flipped(packed, rng):
    wrong = bytearray(packed)
    wrong[rng.randrange(len(wrong))] ^= 1 << rng.randrange(8)
    return bytes(wrong)


PLACES = {
    "data shard": lambda stage, rng, step: flip_file(stage, rng, step, r.FileKind.SHARD, (0, 1)),
    "parity shard": lambda stage, rng, step: flip_file(stage, rng, step, r.FileKind.SHARD, (2,)),
    "own slot": lambda stage, rng, step: flip_file(stage, rng, step, r.FileKind.SLOT),
    "manifest": flip_manifest,
    "group record": flip_group,
    "commit record": flip_commit,
}


async def restart_agents(stage):
    """Agents that start anew adopt their files and read what the ledger says now."""
    for name in list(stage.agents):
        stage.restart(name)
    await asyncio.sleep(1)


async def told(launch, step=None):
    """What a restore said: the step, or the error's name. Wrong data fails the story."""
    try:
        return await launch.restore(step)
    except CheckpointError as e:
        return type(e).__name__


@pytest.mark.parametrize("rounds", [8, pytest.param(34, marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_is_restored_right_or_refused_by_name(place, rounds, capsys):
    """One random bit changes in a kind of place, 34 times each, 204 in all (8 in a hurry); in half
    of the rounds a node is lost as well, and replaced. What comes back is the newest step, or the
    one before for a reason, or an error that names what is wrong; never wrong data, and never
    "nothing". (B105)"""
    counts = Counter()

    async def story(stage):
        rng, step = Random(f"{place} {stage.seed}"), 2
        launch = await two_steps(stage)
        for i in range(rounds):
            undo = PLACES[place](stage, rng, step)
            await restart_agents(stage)
            if i % 2:  # an own copy is lost as well, so that shards are needed
                stage.crash(rng.choice([rank.node for rank in launch.ranks]))
                stage.add(f"m{i}")
                await asyncio.sleep(1)
            launch = await launch.again(*rng.sample(sorted(stage.agents), 3))
            found = await told(launch)
            counts[{step: "right", step - 1: "the step before"}.get(found, found)] += 1
            if undo is not None:
                undo()
                await restart_agents(stage)
                launch = await launch.again()
                assert await launch.restore() in (step, step - 1)
            await launch.saved(step + 1, step + 2)
            step += 2
            await asyncio.sleep(5)
            launch.kill()

    play(story, limit_s=36000.0)
    with capsys.disabled():
        print(f"\n  {place}: " + ", ".join(f"{n} x {what}" for what, n in counts.items()))
    assert sum(counts.values()) == rounds
    assert set(counts) <= {"right", "the step before", "RestoreFailed"}
    if place not in ("group record", "commit record"):
        assert set(counts) == {"right"}, "one bad copy costs nothing while others are left"


def swap(stage, rng):
    """Two shards of one size change places."""
    (a, one), (b, two) = rng.sample(files_of(stage, r.FileKind.SHARD, (2,)), 2)
    exchange(stage.nodes[a].store.files[one.file], stage.nodes[b].store.files[two.file])


def exchange(first, second):
    size = min(len(first), len(second))
    first[:size], second[:size] = bytes(second[:size]), bytes(first[:size])


def swap_indices(stage, rng):
    """The two data shards of one owner change places."""
    owner = rng.choice(THREE)
    shards = {h.part: (n, h) for n, h in stage.held(r.FileKind.SHARD, 2) if h.owner == owner}
    (a, one), (b, two) = shards[0], shards[1]
    exchange(stage.nodes[a].store.files[one.file], stage.nodes[b].store.files[two.file])


def zero(stage, rng):
    """4 KiB of a data shard become zeros."""
    node, held = rng.choice(files_of(stage, r.FileKind.SHARD, (0,)))
    stage.nodes[node].store.files[held.file][:4096] = bytes(4096)


def truncate(stage, rng):
    """A shard loses its last byte, and the record beside it tells the old length."""
    node, held = rng.choice(files_of(stage, r.FileKind.SHARD, (0, 1, 2)))
    store = stage.nodes[node].store
    store.files[held.file] = bytearray(store.files[held.file][: held.length - 1])


@pytest.mark.parametrize("damage", [swap, swap_indices, zero, truncate])
def test_damaged_shards_never_give_wrong_data(damage):
    """Shards swapped, zeroed, cut, while the owner's copy is lost too; each of four seeds gives
    step 2 from what is left, or step 1, or an error. (B105)"""
    counts = Counter()

    async def story(stage):
        rng = Random(stage.seed)
        launch = await two_steps(stage)
        damage(stage, rng)
        stage.crash(rng.choice(THREE))
        await restart_agents(stage)
        launch = await launch.again(*sorted(stage.agents)[:3])
        counts[await told(launch)] += 1

    for seed in range(4):
        play(story, seed=seed)
    assert set(counts) <= {2, 1, "RestoreFailed"}, counts


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
        launch = await launch.again("n3" if first != "n3" else "n4", "n1")
        node = stage.nodes[first]
        stop = node.pause if how == "paused" else lambda: stage.cluster.isolate(first)
        stage.at("transfer.begin", stop, who=first)
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
