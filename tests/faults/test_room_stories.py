"""Stories of room and speed: nobody waits for room, nothing grows, a slow node costs only saves.

A rank's slot takes 12 KiB here, a shard about 5 KB, staging comes and goes.
"""

import asyncio

import pytest
from stage import ABORT, CHUNK, COMMIT, JOB, now, play, until

from p2pckpt import records as r
from p2pckpt.errors import NoRoom, PeerUnreachable, SaveAborted
from p2pckpt.wire import unpack

FOUR = ("n0", "n1", "n2", "n3")


def test_a_holder_without_room_is_passed_over():
    """n1 has no room for a shard of n0's: the next candidate takes it, and the commit is full."""

    async def story(stage):
        launch = await stage.launch("n0")
        stage.fill("n1")
        outcome = await launch.save(1)
        assert (outcome.verdict, outcome.degraded) == (COMMIT, ())
        assert sorted(stage.holders("n0", 1).values()) == ["n2", "n3", "n4"]
        assert any("needs" in e["why"] and "has 0" in e["why"] for e in no_room(stage))

    play(story)


def no_room(stage):
    return [e for e in stage.events("note.holder_failed") if "needs" in e["why"]]


class Mute:
    """A node's transport whose mover answers every other request for a grant, and not the rest."""

    def __init__(self, transport):
        self._transport, self.asked = transport, 0

    def __getattr__(self, name):
        return getattr(self._transport, name)

    async def expect(self, *what):
        self.asked += 1
        if self.asked % 2 == 0:
            raise PeerUnreachable("our own mover does not answer")
        return await self._transport.expect(*what)


def test_a_holder_whose_mover_does_not_answer_keeps_no_file_for_it():
    """n3 has taken files for a shard and cannot grant it. The saves commit without it, and when its
    mover is there again n3 holds the newest step's shards and nothing else."""

    async def story(stage):
        launch = await stage.launch("n0")
        right = stage.agents["n3"].home.doors.transport
        mute = Mute(right)
        stage.doors_of("n3", transport=mute)
        await launch.saved(1, 2, 3)
        assert mute.asked
        stage.doors_of("n3", transport=right)
        await launch.saved(4, 5)
        await asyncio.sleep(30)
        held = stage.agents["n3"].home.holdings.of_job(JOB)
        assert all(h.whole and h.attempt.step == 5 for h in held)

    play(story)


class Crowded:
    """A node's arena beside which no manifest, or document of another kind, finds room."""

    def __init__(self, arena, kind="manifest-"):
        self._arena, self._kind, self.refused = arena, kind, 0

    def __getattr__(self, name):
        return getattr(self._arena, name)

    def put_document(self, name, packed):
        if name.startswith(self._kind):
            self.refused += 1
            raise NoRoom(f"{name}: needs {len(packed)} bytes, has 0")
        self._arena.put_document(name, packed)


def test_a_holder_without_room_for_a_manifest_keeps_no_file_for_it():
    """Somebody else fills n3's RAM beyond what any budget counts: shards come and are whole, and
    their manifest finds no room. The saves commit without n3, and nothing stays there for good."""

    async def story(stage):
        launch = await stage.launch("n0")
        right = stage.agents["n3"].home.doors.arena
        crowded = Crowded(right)
        stage.doors_of("n3", arena=crowded)
        await launch.saved(1, 2, 3)
        assert crowded.refused
        stage.doors_of("n3", arena=right)
        await launch.saved(4, 5)
        await asyncio.sleep(30)
        held = stage.agents["n3"].home.holdings.of_job(JOB)
        assert all(h.whole and h.attempt.step == 5 for h in held)

    play(story)


def test_a_node_without_room_for_what_it_saw_of_the_ledger_retires_when_there_is_room_again():
    """For a while n0, which has rank 0, cannot write down which revision it saw. Its retirement
    ended with that for good: from then on the others' took its place, five seconds late, and a save
    that came before that found no slot and was skipped."""

    async def story(stage):
        launch = await stage.launch("n0", "n1", "n2")
        await launch.saved(1)
        right = stage.agents["n0"].home.doors.arena
        crowded = Crowded(right, "seen-")
        stage.doors_of("n0", arena=crowded)
        await launch.saved(2)
        await asyncio.sleep(20)
        assert crowded.refused
        stage.doors_of("n0", arena=right)
        await asyncio.sleep(1)
        await launch.saved(3, 4, 5, 6)
        assert not stage.events("note.task_failed")

    play(story)


class Unwritten(Crowded):
    """The same of the records that say that a file of some kind is whole."""

    def put_record(self, file, record):
        if record.kind is r.FileKind.SLOT and record.state is r.FileState.WHOLE:
            self.refused += 1
            raise NoRoom(f"{file}: needs 300 bytes, has 0")
        self._arena.put_record(file, record)


def test_a_snapshot_without_room_for_its_record_ends_the_save_at_once():
    """n1's rank has written its snapshot, and the record beside it finds no room. Nobody put an end
    to the save then: all waited for its deadline, and had no slot for the next ones meanwhile."""

    async def story(stage):
        launch = await stage.launch("n0", "n1", "n2")
        await launch.saved(1)
        right = stage.agents["n1"].home.holdings._arena
        crowded = Unwritten(right)
        stage.agents["n1"].home.holdings._arena = crowded
        begun = now()
        with pytest.raises(SaveAborted, match=r"rank 1: .*needs 300 bytes"):
            await launch.begin(2)
        assert (await launch.outcome(launch.ordinal - 1, 2)).verdict is ABORT
        assert now() - begun < 5
        assert crowded.refused
        stage.agents["n1"].home.holdings._arena = right
        await launch.saved(3, 4, 5)

    play(story)


def test_a_save_without_room_for_what_was_seen_of_the_ledger_commits():
    """n0 opens the lineage of the first save and cannot write down which revision it saw then. It
    gave the save up for that, of which every share was sealed. When there is room, it is written
    down with nobody asking."""

    async def story(stage):
        launch = await stage.launch("n0", "n1", "n2")
        right = stage.agents["n0"].home.doors.arena
        crowded = Crowded(right, "seen-")
        stage.doors_of("n0", arena=crowded)
        await launch.saved(1)
        assert crowded.refused
        stage.doors_of("n0", arena=right)
        await asyncio.sleep(10)
        (name,) = (name for name in right.documents() if name.startswith("seen-"))
        assert unpack(right.document(name), r.LedgerSeen) == stage.agents["n0"].jobs[JOB].ctx.seen

    play(story)


def test_a_launch_without_room_for_what_was_seen_of_the_ledger_restores_and_saves():
    """The same on all nodes, for long. A rank was told NoRoom when its generation stood, others had
    joined one that lacked it; and no ballot of a restore found the bytes that every node had."""

    async def story(stage):
        launch = await stage.launch("n0", "n1", "n2")
        await launch.saved(1)
        for name, agent in stage.agents.items():
            stage.doors_of(name, arena=Crowded(agent.home.doors.arena, "seen-"))
        for step in (2, 3):
            launch = await launch.again()
            assert await launch.restore() == step - 1
            await launch.saved(step)
        assert all(agent.home.doors.arena.refused for agent in stage.agents.values())
        assert not stage.events("note.task_failed")

    play(story)


def test_a_restore_without_room_for_a_manifest_leaves_no_file_behind():
    """The same where a rank's snapshot is brought for a restore: it fails, and is repeated when
    there is room; the files of the tries before are used again, or go."""

    async def story(stage):
        launch = await stage.launch("n0")
        await launch.saved(1)
        launch.kill()
        away = next(n for n in FOUR[1:] + ("n4",) if n not in stage.holders("n0", 1).values())
        right = stage.agents[away].home.doors.arena
        crowded = Crowded(right)
        stage.doors_of(away, arena=crowded)
        launch = await launch.again(away)
        restoring = asyncio.ensure_future(launch.restore())
        await until(lambda: crowded.refused >= 2)
        stage.doors_of(away, arena=right)
        assert await restoring == 1
        slots = [h for h in stage.agents[away].home.holdings.of_job(JOB) if not h.whole]
        assert not slots

    play(story)


def test_nobody_has_room_for_shards_and_training_goes_on():
    """All nodes but the owners' are full: ABORT that says need and have in bytes; save() returned
    at once, and when room is made the next save commits."""

    async def story(stage):
        launch = await stage.launch("n0")
        stage.fill("n1", "n2", "n3", "n4")
        begun = now()
        attempt = await launch.begin(1)
        assert now() - begun < 0.1
        outcome = await launch.outcome(*attempt)
        assert outcome.verdict is ABORT
        assert "bytes, has 0" in outcome.reason
        assert now() - begun < 10
        for name in FOUR[1:]:
            del stage.nodes[name].store.files["ballast"]
        await launch.saved(2)

    play(story)


def test_a_rank_without_room_for_its_own_slot_skips_the_save_for_all():
    """n2's RAM is full before its first slot: the save is skipped on every rank, with need and
    have, and training goes on."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        stage.fill("n2")
        outcome = await launch.save(1)
        assert outcome.verdict is ABORT
        assert "skipped by rank 2" in outcome.reason
        assert "needs 12288 bytes, has 0 of 16777216" in outcome.reason
        del stage.nodes["n2"].store.files["ballast"]
        await launch.saved(2)

    play(story)


def test_a_snapshot_that_grows_gets_larger_slots_and_the_old_ones_go():
    """The state doubles twice. Each step commits, and RAM is not held for sizes that are over."""

    async def story(stage):
        launch = await stage.launch("n0", "n1")
        for step, size in enumerate((9_000, 9_000, 20_000, 20_000, 45_000, 45_000, 45_000)):
            for rank in launch.ranks:
                await rank.write(launch.ordinal, step, bytes([step]) * size)
            launch.ordinal += 1
            assert (await launch.outcome(launch.ordinal - 1, step)).verdict is COMMIT
            await asyncio.sleep(5)
        for name in stage.nodes:
            assert used(stage, name) <= 2 * (49152 + 3 * 25_000) + 50_000, name

    play(story, budget_bytes=300_000)


# -- steady state ----------------------------------------------------------------------------------


def used(stage, name):
    return sum(len(held) for held in stage.nodes[name].store.files.values())


def footprint(stage, name):
    """Files, bytes and documents of a node."""
    store = stage.nodes[name].store
    return len(store.files), used(stage, name), len(store.documents)


async def twenty(stage, launch, first):
    """Twenty saves, and what every node and the ledger held after each: the largest of each."""
    nodes, keys = {}, []
    for step in range(first, first + 20):
        await launch.saved(step)
        await asyncio.sleep(3)
        for name in stage.agents:
            nodes.setdefault(name, []).append(footprint(stage, name))
        keys.append(len(stage.etcd.list("p2pckpt/").entries))
    return {name: tuple(map(max, zip(*seen, strict=True))) for name, seen in nodes.items()}, max(
        keys
    )


@pytest.mark.parametrize("keep_last", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_hundred_saves_take_no_more_than_twenty(keep_last):
    """100 saves, with one node lost and replaced on the way and the job started again: files, bytes
    and documents of every node, and keys in etcd, are in the last twenty what they were in the
    twenty before, long after the replacement, and about what they were before it."""

    async def story(stage):
        launch = await stage.launch(*FOUR, keep_last=keep_last)
        assert await launch.restore() is None
        await twenty(stage, launch, 1001)
        before, keys_before = await twenty(stage, launch, 1021)
        launch.kill()
        stage.crash("n3")
        stage.add("m3")
        await asyncio.sleep(20)
        launch = await launch.again("n0", "n1", "n2", "m3")
        assert await launch.restore() == 1040
        await twenty(stage, launch, 1041)
        after, keys_after = await twenty(stage, launch, 1061)
        last, keys = await twenty(stage, launch, 1081)
        if keep_last == 1:
            assert last == after
        for name in last:  # with more steps retained, the pool of free files is longer in filling
            files, held_bytes, documents = after[name]
            bounds = (files + 2, 1.05 * held_bytes, documents + 1)
            assert all(a <= b for a, b in zip(last[name], bounds, strict=True)), name
        assert keys <= keys_after <= keys_before + 10
        most = [sum(seen[1] for seen in world.values()) for world in (before, last)]
        assert most[1] <= 1.3 * most[0]

    play(story, limit_s=36000.0)


def test_longer_numbers_make_no_new_files():
    """The step's number grows from two digits to seven, one by one: no node has more files."""

    async def story(stage):
        launch, counts = await stage.launch(*FOUR), []
        for digits in range(2, 8):
            for step in range(10**digits, 10**digits + 4):
                await launch.saved(step)
                await asyncio.sleep(3)
            counts.append(sum(len(stage.nodes[name].store.files) for name in stage.agents))
        assert counts[-1] <= counts[0]

    play(story)


def test_starting_again_and_again_leaves_no_keys_behind():
    """Thirty starts, each with a restore and a save: etcd holds no more keys after the last ten
    than after the ten before."""

    async def story(stage):
        launch, counts = await stage.launch(*FOUR), []
        await launch.saved(1)
        for step in range(2, 32):
            launch = await launch.again()
            assert await launch.restore() == step - 1
            await launch.saved(step)
            await asyncio.sleep(15)
            counts.append(len(stage.etcd.list("p2pckpt/").entries))
        assert max(counts[20:]) <= max(counts[10:20])

    play(story)


# -- a slow node -----------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", ["n0", "n2", "n4"])
def test_with_one_node_at_a_third_of_the_speed_every_third_due_save_commits(slow):
    """Links are such that a save takes just about as long as the time between two; one node has a
    third of it. At least one in three due saves commits, and no rank waits longer than
    its bound."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        stage.net.slow(slow, speed / 3)
        attempts, waits = [], []
        for step in range(1, 31):
            due = now()
            attempts.append(await launch.begin(step))
            waits.append(now() - due)
            await asyncio.sleep(max(0.0, every_s - waits[-1]))
        outcomes = [(await launch.outcome(*attempt)).verdict for attempt in attempts]
        assert outcomes.count(COMMIT) >= 10, outcomes
        assert max(waits) < 1.5

    speed, every_s = 10e3, 3.0
    play(story, bytes_per_s=speed, floor_bytes_per_s=1000)


@pytest.mark.parametrize("seed", range(3))
def test_with_skewed_ranks_at_least_every_second_due_save_commits(seed):
    """No fault, but every rank comes to save up to 2 s apart from the others."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        rng, committed = stage.cluster.rng, 0
        for step in range(1, 21):
            ordinal, launch.ordinal = launch.ordinal, launch.ordinal + 1

            async def late(rank, ordinal=ordinal, step=step):
                await asyncio.sleep(rng.uniform(0, 2))
                return await rank.write(ordinal, step)

            await launch.all(late)
            await asyncio.sleep(1)
        for ordinal in range(20):
            outcome = await launch.outcome(ordinal, ordinal + 1)
            committed += outcome.verdict is COMMIT
        assert committed >= 10
        assert stage.committed(JOB)[-1] >= 19

    play(story, seed=seed)


def test_an_empty_shard_leaves_no_grant_behind():
    """A snapshot of less than a chunk has a data shard of no bytes, which nobody sends. A grant
    that stays keeps its file's memory mapped, whatever the budget says."""

    async def story(stage):
        launch = await stage.launch("n0", "n1")
        for step in range(1, 6):
            ordinal, launch.ordinal = launch.ordinal, launch.ordinal + 1
            await launch.all(
                lambda rank, at=ordinal, step=step: rank.write(at, step, b"x" * (CHUNK - 24))
            )
            assert (await launch.outcome(ordinal, step)).verdict is COMMIT
        await asyncio.sleep(60)
        doors = [door for name, door in stage.net.doors.items() if name.endswith("/transport")]
        assert len(doors) == 4
        assert not [grant for door in doors for grant in door.grants.values()]

    play(story, nodes=4)
