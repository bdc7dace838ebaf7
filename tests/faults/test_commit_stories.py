"""Stories of a save that meets trouble: one outcome for all, and the step before stays whole.

Four ranks on n0 to n3 and a spare node n4, unless a story says otherwise; layout rs:2,1, so a share
has three shards on other nodes, and a commit needs three sources of each share.
"""

import asyncio
from random import Random

import pytest
from stage import ABORT, COMMIT, JOB, content, now, play, until

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.errors import RestoreFailed

FOUR = ("n0", "n1", "n2", "n3")
OTHERS_ASLEEP = {"commit_delay_low_s": 40.0, "commit_delay_high_s": 50.0}
"""Nobody but rank 0's agent comes to commit before the attempt's deadline of 30 s."""


async def freed(stage, step):
    """No node keeps a byte of a step that was aborted."""
    await until(lambda: not stage.held(step=step))


async def whole(launch, step):
    """After a new start of everybody the step comes back, and training goes on."""
    launch = await launch.again()
    assert await launch.restore() == step
    return launch


# -- who may commit --------------------------------------------------------------------------------


def test_a_committer_that_slept_over_the_abort_changes_nothing():
    """n0 has read the group records and is stopped just before it writes COMMIT; at the deadline
    the others write ABORT and free the bytes. It wakes: no commit; the next save commits. (B082)"""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        await launch.saved(1)
        stage.before_commit("n0", stage.nodes["n0"].pause)
        attempt = await launch.begin(2)
        outcome = await launch.ranks[1].outcome(*attempt)
        assert outcome.verdict is ABORT
        assert outcome.reason.startswith("no outcome within 30 s; n")
        assert outcome.reason.endswith("could not hand its share to n0: it is no living member")
        await asyncio.sleep(15)
        assert not [h for h in stage.held(step=2) if h[0] != "n0"]
        stage.nodes["n0"].resume()
        assert (await launch.outcome(*attempt)).verdict is ABORT
        await freed(stage, 2)
        await asyncio.sleep(3)  # all have heard that n0 is back
        await launch.saved(3)
        assert stage.committed() == [1, 3]

    play(story, **OTHERS_ASLEEP)


def test_a_stopped_committer_finds_that_another_one_committed():
    """SIGSTOP of n0 for twice its lease as it commits 10; another commits 10. Awake again it is
    told so, and neither commits nor frees anything. (B082)"""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        stage.before_commit("n0", stage.nodes["n0"].pause)
        attempt = await launch.begin(10)
        assert (await launch.ranks[1].outcome(*attempt)).by in ("n1", "n2", "n3")
        await asyncio.sleep(20)
        stage.nodes["n0"].resume()
        assert (await launch.outcome(*attempt)).verdict is COMMIT
        await launch.saved(11)
        assert stage.committed() == [10, 11]
        await whole(launch, 11)

    play(story)


@pytest.mark.parametrize("seed", range(5))
def test_every_answer_of_the_ledger_is_lost_and_all_saves_commit_once(seed):
    """Each node's transactions happen or not, and nobody is told which, two a save."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        for step in range(1, 7):
            for name in stage.nodes:
                for _ in range(2):
                    stage.etcd.ambiguous_next(name)
            await launch.saved(step)
            await asyncio.sleep(15)  # the clean-up's and the sessions' answers are lost as well
        assert stage.committed() == [1, 2, 3, 4, 5, 6]
        await whole(launch, 6)

    play(story, seed=seed)


def test_a_commit_that_arrives_after_its_outcome_was_trimmed_is_refused():
    """n0's COMMIT of step 2 hangs in the network; it is aborted, and so are twelve more saves, then
    15 commits and the floor rises past them all. The old COMMIT arrives at last."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        await launch.saved(1)
        gate = stage.hold_commit("n0")
        assert (await launch.save(2)).verdict is ABORT
        for step in range(3, 15):
            ordinal, launch.ordinal = launch.ordinal, launch.ordinal + 1
            await launch.ranks[1].call(w.SlotFailed(ordinal, step, "no memory"))
        await launch.saved(15)
        old = f"{launch.generation:010d}.{1:010d}"
        await until(lambda: stage.state().floor > old and f"{old}.{2:020d}" not in str(
            stage.state().outcomes))  # fmt: skip
        gate.set()
        await asyncio.sleep(5)
        assert stage.committed() == [1, 15]
        await whole(launch, 15)

    play(story, **OTHERS_ASLEEP)


def test_a_member_that_cannot_reach_the_group_lead_hands_its_share_to_the_next():
    """n2 and n0, the lead of the group, do not hear each other: n1 writes the group record."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        await launch.saved(1)
        stage.cluster.partition("n0", "n2")
        await launch.saved(2)
        assert stage.events("note.group_record")[-1]["attempt"].endswith("2")
        writers = [by for _, by, what, _ in stage.heard if what == "note.group_record"]
        assert writers == ["n0", "n1"]
        stage.cluster.heal()
        await whole(launch, 2)

    play(story, nodes=7)


def test_a_group_lead_that_dies_with_all_pieces_ends_the_attempt_not_the_job():
    """n0 has everybody's piece and is lost before it writes the record. Its own piece is lost with
    it, so the attempt ends in ABORT at its deadline; the job starts without n0 and has step 1."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        await launch.saved(1)
        stage.before_commit("n0", lambda: stage.crash("n0"), prefix="group/")
        attempt = await launch.begin(2)
        assert (await launch.outcome(*attempt)).verdict is ABORT
        launch = await launch.again("n1", "n2", "n3", "n4")
        assert await launch.restore() == 1
        await freed(stage, 2)
        await launch.saved(2)

    play(story)


def test_the_agent_of_a_sealed_share_restarts_and_its_ranks_are_told_commit():
    """The group record stands when n1's agent is killed and started again; n0 commits. n1's rank
    takes its seat again and hears COMMIT; its slot is adopted, and the next save commits."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        await launch.saved(1)
        stage.at("note.group_record", lambda: stage.restart("n1"))
        assert (await launch.save(2)).verdict is COMMIT
        await launch.saved(3)
        launch = await launch.again()
        found = await launch.all(lambda rank: rank.restore())
        assert found == [(3, "local")] * 4

    play(story)


def test_an_agent_that_restarts_before_its_seal_aborts_the_attempt():
    """The slots of n1 are whole, the share is not encoded: no other session can finish it."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        await launch.saved(1)
        stage.at("note.process_safe", lambda: stage.restart("n1"), who="n1")
        begun = now()
        outcome = await launch.save(2)
        assert outcome.verdict is ABORT
        assert "n1 restarted before seal" in outcome.reason
        assert now() - begun < 5
        await freed(stage, 2)
        await launch.saved(3)
        await whole(launch, 3)

    play(story)


# -- a share that fails ----------------------------------------------------------------------------


def lose_three_holders(stage):
    stage.at("transfer.begin", lambda: stage.crash("n2", "n3", "n4"), who="n0")


def no_room_anywhere(stage):
    def fill():
        for agent in stage.agents.values():
            agent.home.holdings.drop_free(JOB)
        stage.fill(*stage.nodes)

    stage.at("note.encoded", fill, who="n0")


def every_piece_is_wrong(stage):
    stage.net.weather.flip = 1.0


def flip_in_stage(stage, kind, part):
    """One bit of n0's file changes between encoding and sending."""

    def flip():
        held = next(
            h
            for h in stage.agents["n0"].home.holdings
            if h.kind is kind and h.part == part and h.attempt and h.attempt.step == 2
        )
        stage.nodes["n0"].store.flip(held.file, 5, 0)

    stage.at("note.encoded", flip, who="n0")


FAILURES = {
    "holders die in mid transfer": lose_three_holders,
    "no room anywhere": no_room_anywhere,
    "every piece on the wire is wrong": every_piece_is_wrong,
    "the manifest is flipped": lambda stage: flip_in_stage(stage, r.FileKind.STAGE, 1),
    "the parity is flipped": lambda stage: flip_in_stage(stage, r.FileKind.STAGE, 0),
    "a data shard is flipped": lambda stage: flip_in_stage(stage, r.FileKind.SLOT, 0),
}
LOST_ONE = ("the parity is flipped", "a data shard is flipped")
"""One shard cannot be placed, the others can: a commit that is degraded."""

ALL_FAIL = ("holders die in mid transfer", "no room anywhere", "every piece on the wire is wrong")
"""n1's share fails alike: the ABORT names whichever was first."""


@pytest.mark.parametrize("failure", FAILURES)
def test_a_share_that_fails_aborts_the_save_and_the_step_before_is_loadable(failure):
    """n0's share cannot be sealed with its sources: no commit on any node, all ranks are told which
    node's share failed, step 1 comes back, and when the trouble is over a save commits. (B038,
    B037)"""

    async def story(stage):
        launch = await stage.launch("n0", "n1")
        await launch.saved(1)
        FAILURES[failure](stage)
        outcome = await launch.save(2)
        if failure in LOST_ONE:
            assert outcome.verdict is COMMIT
            assert outcome.degraded == ("n0: 2 of 3 shards",)
            await whole(launch, 2)
            return
        assert outcome.verdict is ABORT
        failed = ("n0", "n1") if failure in ALL_FAIL else ("n0",)
        assert any(f"share of {n}: needs 3 living sources" in outcome.reason for n in failed)
        assert stage.committed() == [1]
        await freed(stage, 2)
        stage.net.weather.flip = 0.0
        for node in stage.nodes.values():
            node.store.files.pop("ballast", None)
        launch = await whole(launch, 1)
        if failure.startswith("holders"):
            for name in ("m2", "m3", "m4"):
                stage.add(name)
            await asyncio.sleep(15)
        await launch.saved(2)

    play(story, bytes_per_s=1e6)


@pytest.mark.parametrize("keep_memory", [True, False])
def test_all_are_killed_before_a_peer_has_acknowledged_and_the_step_before_is_whole(keep_memory):
    """keep_last=1: save(2) has returned everywhere when all trainers and two nodes' agents are
    killed, or one of these nodes is lost with its RAM, before the first receipt. Step 1 comes back,
    as nothing goes before the newer commit stands. (B037)"""

    async def story(stage):
        launch = await stage.launch(*FOUR, keep_last=1)
        await launch.saved(1)
        killed = asyncio.Event()

        def kill():
            launch.kill()
            stage.crash("n0", keep_memory=True)
            stage.crash("n1", keep_memory=keep_memory)
            killed.set()

        stage.at("message.arrived", kill, kind="PutSeal")
        await launch.begin(2)
        await asyncio.wait_for(killed.wait(), 30)
        assert 2 not in stage.committed()
        stage.start("n0")
        if keep_memory:
            stage.start("n1")
        launch = await launch.again("n0", "n4", "n2", "n3")
        assert await launch.restore() == 1
        await launch.saved(2)

    play(story, bytes_per_s=1e6)


def test_a_holder_that_dies_in_mid_transfer_is_replaced():
    """rs:2,1 on five nodes: when a holder dies under n0's shard, the spare node takes it."""

    async def story(stage):
        launch = await stage.launch("n0", "n1")
        await launch.saved(1)
        lost = stage.holders("n0", 1)[0]
        stage.at("transfer.begin", lambda: stage.crash(lost), who="n0", to=f"{lost}/transport")
        outcome = await launch.save(2)
        assert (outcome.verdict, outcome.degraded) == (COMMIT, ())
        assert lost not in stage.holders("n0", 2).values()
        assert sorted(stage.holders("n0", 2)) == [0, 1, 2]
        await whole(launch, 2)

    play(story, bytes_per_s=1e6, nodes=6)


@pytest.mark.parametrize(("dead", "min_spare", "verdict"), [
    (("n3",), -1, COMMIT), (("n2", "n3"), -1, ABORT), (("n2", "n3"), 0, COMMIT),
    (("n3",), 2, ABORT),
])  # fmt: skip
def test_a_commit_is_degraded_by_a_dead_holder_and_refused_below_min_spare(
    dead, min_spare, verdict
):
    """Four nodes, so no replacement: each share needs 2 + min_spare (by default 1) sources."""

    async def story(stage):
        launch = await stage.launch("n0", "n1")
        await launch.saved(1)
        stage.crash(*dead)
        outcome = await launch.save(2)
        assert outcome.verdict is verdict, outcome.reason
        if verdict is COMMIT:
            assert [text.split(":")[0] for text in outcome.degraded] == ["n0", "n1"]
            await whole(launch, 2)
        else:
            assert "min_spare" in outcome.reason
            await whole(launch, 1)

    play(story, nodes=4, min_spare=min_spare)


# -- steps and labels ------------------------------------------------------------------------------


def test_a_step_is_saved_once_and_never_below_the_newest():
    """Twice the same step, then a lower one in the same lineage: both ABORT with the reason, and
    the newest is what it was."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        await launch.saved(5)
        outcome = await launch.save(5)
        assert (outcome.verdict, "already committed" in outcome.reason) == (ABORT, True)
        outcome = await launch.save(4)
        assert (outcome.verdict, "never goes back" in outcome.reason) == (ABORT, True)
        await launch.saved(6)
        await whole(launch, 6)

    play(story)


def test_the_label_is_that_of_the_call_whenever_the_commit_comes():
    """The COMMIT of step 10 is 3 s late and the trainers are at 13 by then: record, files and bytes
    say 10. (B003)"""

    async def story(stage):
        launch = await stage.launch(*FOUR, keep_last=2)
        gate = stage.hold_commit("n0")
        ten = await launch.begin(10)
        asyncio.get_running_loop().call_later(3.0, gate.set)
        assert (await launch.outcome(*ten)).verdict is COMMIT
        await launch.saved(13)
        commits = stage.state().commits
        assert [(step, c.attempt.step, c.attempt.ordinal) for (_, step), c in commits.items()] == [
            (10, 10, 0),
            (13, 13, 1),
        ]
        launch = await launch.again()
        assert await launch.restore(10) == 10

    play(story, **OTHERS_ASLEEP)


def test_a_step_in_flight_is_told_from_a_committed_one():
    """Right after save(2), which hangs in its commit: steps() lists 1 and, apart, 2 in flight;
    restore(2) raises; restore() gives 1, as a restart would. (B010)"""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        await launch.saved(1)
        gate = stage.hold_commit("n0")
        attempt = await launch.begin(2)
        await until(lambda: stage.events("note.group_record")[-1]["attempt"].endswith("2"))
        steps = await launch.steps()
        assert (steps.committed, steps.in_flight) == ((1,), (2,))
        with pytest.raises(RestoreFailed, match="step 2 is not committed"):
            await launch.restore(2)
        assert await launch.restore() == 1
        gate.set()
        assert (await launch.outcome(*attempt)).verdict is COMMIT
        await asyncio.sleep(5)
        steps = await launch.steps()
        assert (steps.committed, steps.in_flight) == ((2,), ())
        assert await launch.restore() == 2

    play(story, **OTHERS_ASLEEP)


def test_an_outcome_is_true_however_late_it_is_asked_for():
    """A handle is looked at twenty saves later, when its outcome was trimmed and its step retired;
    another one of a step that is kept. Neither is told ABORT, and neither waits for ever."""

    async def story(stage):
        launch = await stage.launch(*FOUR, keep_last=12)
        for step in range(1, 25):
            await launch.saved(step)
        await asyncio.sleep(10)
        kept = await launch.ranks[0].outcome(14, 15, timeout_s=30.0)
        assert kept.verdict is COMMIT
        gone = await launch.ranks[0].outcome(0, 1, timeout_s=30.0)
        assert gone.verdict is COMMIT

    play(story)


# -- death of a trainer ----------------------------------------------------------------------------


async def killed_in_mid_save(stage, rounds):
    """Each round: a step commits, the next one is 40 % written when a rank is killed."""
    rng, step = Random(stage.seed), 0
    launch = await stage.launch(*FOUR)
    for _ in range(rounds):
        step += 2
        await launch.saved(step)
        ordinal, victim = launch.ordinal, rng.choice(launch.ranks)

        async def write(rank, ordinal=ordinal, victim=victim, step=step + 1):
            if rank is not victim:
                await asyncio.sleep(rng.uniform(0, 0.02))
                return await rank.write(ordinal, step)
            image = content(rank.rank, step)
            slot = await rank.call(w.OpenSlot(ordinal, step, len(image)))
            part = len(image) * 2 // 5
            rank.trainer.view(slot.file, len(image))[:part] = image[:part]
            await asyncio.sleep(rng.uniform(0, 0.02))
            return rank.trainer.kill()

        await launch.all(write)
        launch.ordinal += 1
        launch = await launch.again()
        assert await launch.restore() == step
    assert stage.committed() == list(range(2, step + 1, 2))
    assert not [h for h in stage.held() if h[1].attempt.step % 2]


@pytest.mark.parametrize("seed", range(4))
def test_a_trainer_killed_at_40_percent_of_a_save_costs_that_save_only(seed):
    """SIGKILL in the middle of a snapshot, 100 times in all with other ranks and moments: the step
    before is whole, 100 of 100."""

    async def story(stage):
        await killed_in_mid_save(stage, 25)

    play(story, seed=seed, limit_s=36000.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_a_trainer_killed_a_thousand_times(seed):
    """The same, 1,000 times."""

    async def story(stage):
        await killed_in_mid_save(stage, 25)

    play(story, seed=seed, limit_s=36000.0)


class Counted:
    """A node's ledger; ``lists``: the prefixes that it listed."""

    def __init__(self, door):
        self._door, self.lists = door, []

    def __getattr__(self, name):
        return getattr(self._door, name)

    async def list(self, prefix):
        self.lists.append(prefix)
        return await self._door.list(prefix)


def test_a_save_that_no_agent_saw_does_not_make_one_ask_the_ledger_again_and_again():
    """One ordinal is missing, so the floor stays there for long and outcomes pile up behind it.
    The node of rank 0 listed the job twice a second, with nothing to do."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        await launch.saved(1)
        launch.ordinal += 1
        await launch.saved(*range(2, 22))
        await asyncio.sleep(5)
        counted = Counted(stage.agents["n0"].home.doors.ledger)
        stage.doors_of("n0", ledger=counted)
        await asyncio.sleep(60)
        assert counted.lists.count(r.JobKeys(JOB).state) <= 2
        await launch.saved(*range(22, 90))
        await asyncio.sleep(5)
        assert len(stage.state().outcomes) < 20

    play(story)


def test_the_keys_of_saves_that_all_abort_do_not_pile_up():
    """Forty saves in a row that fail on one rank leave no more keys in the ledger than ten do."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        await launch.saved(1)
        counts = []
        for step in range(2, 42):
            ordinal, launch.ordinal = launch.ordinal, launch.ordinal + 1
            await launch.ranks[1].call(w.SlotFailed(ordinal, step, "no memory"))
            await asyncio.sleep(10)
            counts.append(len(stage.etcd.list(r.JobKeys(JOB).root).entries))
        assert max(counts[20:]) <= max(counts[:20])

    play(story)
