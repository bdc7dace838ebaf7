"""Stories of a start: one launch wins, the dead are replaced, the living are not, zombies are told.

A launch is a rank on each of the named nodes; layout rs:2,1 on five nodes.
"""

import asyncio

import pytest
from stage import COMMIT, JOB, Rank, now, play, until

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.errors import (
    GenerationHeld,
    LedgerUnavailable,
    NotJoined,
    StaleGenerationError,
    UsageError,
)

OTHER = r.Job(owner_uid=1000, name="other").key
FOUR = ("n0", "n1", "n2", "n3")


@pytest.mark.parametrize("seed", range(6))
def test_of_two_launches_at_once_one_wins_and_the_other_is_told_who_lives(seed):
    """Two launchers start the job at the same time on the same nodes: one generation stands, the
    other launch is refused on all ranks, and the winner saves."""

    async def story(stage):
        first, second = stage.form(*FOUR), stage.form(*reversed(FOUR))
        results = await asyncio.gather(first.join(), second.join(), return_exceptions=True)
        refused = [x for x in results if isinstance(x, GenerationHeld)]
        assert len(refused) == 1, results
        assert results.count(None) == 1, results
        winner = first if results[0] is None else second
        assert winner.generation == stage.state().generation.number == 1
        assert "live on n" in str(refused[0])
        await winner.saved(1)

    play(story, seed=seed)


def test_a_second_launch_is_refused_naming_the_holder_and_takeover_replaces_it():
    """The first launch lives and is not disturbed by the refused one; with takeover=True it is
    replaced, and its ranks are told that they are stale."""

    async def story(stage):
        first = await stage.launch(*FOUR)
        await first.saved(1)
        with pytest.raises(GenerationHeld, match=r"ranks \[0\] of generation 1 live on n0"):
            await stage.launch(*FOUR)
        await first.saved(2)
        second = await stage.launch(*FOUR, takeover=True)
        assert second.generation == 2
        assert await second.restore() == 2
        for rank in first.ranks:
            with pytest.raises(StaleGenerationError, match="generation 2 began"):
                await rank.call(w.OpenSlot(2, 3, 100))
        await second.saved(3)

    play(story)


def test_a_launch_over_a_dead_one_does_not_wait():
    """All ranks were killed and their agents say so: the next launch stands within a second."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        launch.kill()
        begun = now()
        await stage.launch(*FOUR)
        assert now() - begun < 1.0

    play(story)


@pytest.mark.parametrize("seed", range(6))
def test_a_death_is_told_even_if_the_ledgers_answer_is_lost(seed):
    """n1's rank dies as n1's next write to the ledger gets no answer; it happened or not, and the
    next launch is not refused for a rank that is dead."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        for name in FOUR:
            stage.etcd.ambiguous_next(name)
        launch = await launch.again()
        assert launch.generation == 2

    play(story, seed=seed)


def test_an_agent_that_is_gone_holds_the_launch_for_its_grace_only():
    """n1 is lost with its rank: the next launch on the others waits until its lease and grace are
    over, and no longer."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        await launch.saved(1)
        stage.crash("n1")
        begun = now()
        launch = await launch.again("n0", "n2", "n3", "n4")
        assert 5 < now() - begun < 20
        assert await launch.restore() == 1

    play(story)


def test_a_zombie_rank_of_an_older_generation_is_refused_by_agents_and_holders():
    """n3 is cut off with its living rank, and the job goes on without it. Back again, its rank gets
    StaleGenerationError, and a put of its agent for the old attempt is refused by holders."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        await launch.saved(1)
        zombie, agent = launch.ranks[3], stage.agents["n3"]
        stage.cut_off("n3")
        for rank in launch.ranks[:3]:
            rank.trainer.kill()
        await asyncio.sleep(20)
        second = stage.form("n0", "n1", "n2", "n4", token="second")
        await second.join()
        assert await second.restore() == 1
        stage.cluster.heal()
        await until(lambda: agent.jobs[JOB].ctx.state.generation.number == 2)
        with pytest.raises(StaleGenerationError, match="generation 2 began"):
            await zombie.call(w.OpenSlot(1, 2, 100))
        old = r.Attempt(stage.state().ledger_id, JOB, 1, 1, 2)
        offer = w.PutOffer(old, "n3", 0, (10,), 10, "0" * 64)
        member = stage.agents["n0"].home.member
        reply = await agent.home.doors.peers.call(member.peers_address, offer, 5.0)
        assert isinstance(reply, w.RefusedReply)
        assert "generation 1 is over, 2 began" in reply.reason
        await second.saved(2)

    play(story)


def test_ranks_on_other_nodes_and_a_new_name_restore_exactly():
    """(B033) Eight ranks on four nodes; the next start has them shuffled, and one node replaced by
    one of another name: every rank has its own bytes."""

    async def story(stage):
        places = ("n0", "n0", "n1", "n1", "n2", "n2", "n3", "n3")
        launch = await stage.launch(*places)
        await launch.saved(1, 2)
        launch.kill()
        stage.crash("n2")
        stage.add("another")
        shuffled = ("n3", "another", "n0", "n1", "n1", "n3", "another", "n0")
        launch = await launch.again(*shuffled)
        assert await launch.restore() == 2
        await launch.saved(3)
        launch = await launch.again(*reversed(shuffled))
        assert await launch.restore() == 3

    play(story)


def test_a_rank_that_does_not_come_is_named():
    """Rank 2 of 4 never joins: the others hear its number when their time is up, and a launch of
    all four works afterwards."""

    async def story(stage):
        launch = stage.form("n0", "n1", "n3", world=4, ranks=[0, 1, 3], timeout_s=20.0)
        begun = now()
        with pytest.raises(NotJoined, match=r"ranks \[2\] have not joined"):
            await launch.join()
        assert 19 < now() - begun < 25
        launch.kill()
        await asyncio.sleep(1)
        await (await stage.launch(*FOUR)).saved(1)

    play(story)


@pytest.mark.parametrize("which", [("n0",), ("n2",), FOUR])
def test_agents_restart_under_living_trainers_and_the_next_save_commits(which):
    """The trainers take their seats again and nobody starts a new generation."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        await launch.saved(1)
        for name in which:
            stage.restart(name)
        await asyncio.sleep(1)
        await launch.saved(2)
        assert stage.state().generation.number == 1
        await until(lambda: stage.state().steps(stage.state().latest().lineage) == [2])
        for name in which:
            stage.restart(name)
        await asyncio.sleep(1)
        launch = await launch.again()
        assert await launch.restore() == 2

    play(story)


def test_a_member_that_dies_before_the_first_save_is_dropped():
    """(B052) n4 joins the cluster and is killed before anything was saved. Within its lease and a
    second it is a member no more; a save before that replaces it or is degraded; none waits."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        stage.crash("n4")
        begun = now()
        outcome = await launch.save(1)
        assert outcome.verdict is COMMIT
        assert now() - begun < 10
        await asyncio.sleep(11 - (now() - begun))
        assert "n4" not in (await stage.agents["n0"].home.living()).members
        await launch.saved(2)
        assert "n4" not in stage.holders("n0", 2).values()

    play(story)


def test_a_rank_that_dies_while_the_launch_forms_does_not_count():
    """Rank 1 joins and dies before the others come; they wait for it, and a new process of the same
    rank completes the launch."""

    async def story(stage):
        early = stage.form("n1", world=4, ranks=[1], token="t")
        joining = asyncio.create_task(early.join())
        await asyncio.sleep(2)
        early.kill()
        await asyncio.gather(joining, return_exceptions=True)
        rest = stage.form("n0", "n2", "n3", world=4, ranks=[0, 2, 3], token="t")
        waiting = asyncio.create_task(rest.join())
        await asyncio.sleep(5)
        assert not waiting.done()
        late = stage.form("n1", world=4, ranks=[1], token="t")
        await late.join()
        await waiting
        rest.ranks.insert(1, Rank(rest, late.ranks[0].trainer, 1, "n1"))
        assert rest.generation == late.generation == 1
        await rest.saved(1)

    play(story)


def test_a_zombie_of_a_job_that_was_cleaned_gets_no_seat_in_the_job_that_counts_anew():
    """n0's agent is gone for long, its rank lives; the others end, and the job is cleaned. The next
    launch is generation 1 again, with rank 0 on n0: the zombie, which was rank 0 of a generation 1,
    is told that this is over, and the saves of the launch have the bytes of its own ranks."""

    async def story(stage):
        old = await stage.launch(*FOUR)
        zombie = old.ranks[0]
        stage.crash("n0", keep_memory=True)
        for rank in old.ranks[1:]:
            rank.trainer.kill()
        await asyncio.sleep(20)
        assert (await stage.nodes["n4"].trainer().call(w.CleanCall(JOB, False))).problem == ""
        stage.start("n0")
        launch = await stage.launch(*FOUR)
        assert launch.generation == old.generation == 1
        with pytest.raises(StaleGenerationError, match="generation 1"):
            await zombie.call(w.OpenSlot(0, 1, 100))
        await launch.saved(1)

    play(story)


def test_a_process_that_is_a_rank_of_one_job_is_no_rank_of_another_until_it_leaves():
    """What it asks for names no job: were it seated twice, it would save the state of one job as a
    step of the other. The second job is refused by name, after a restart of the agent as well, and
    the first saves on; when that is closed, the second has the process."""

    async def story(stage):
        first = await stage.launch("n0", "n1")
        second = stage.form("n0", "n1", job=OTHER)
        for rank, same in zip(second.ranks, first.ranks, strict=True):
            rank.trainer = same.trainer
        with pytest.raises(UsageError, match=f"is a rank of job {JOB}"):
            await second.join()
        await first.saved(1)
        for rank in first.ranks:
            await rank.call(w.Leave())
        await second.join()
        assert await second.restore() is None
        await second.saved(7)
        with pytest.raises(UsageError, match=f"is a rank of job {OTHER}"):
            await first.ranks[0].trainer.call(w.TrainerRejoin(JOB, 0, 1))
        assert stage.committed() == [1]
        assert stage.committed(OTHER) == [7]

    play(story)


def test_a_rank_whose_agent_restarts_without_a_ledger_is_not_told_that_its_generation_is_over():
    """n0's agent restarts while etcd does not answer it: it cannot know what stands, so its rank is
    told that, and to ask again; with the ledger back it takes its seat, and saves commit."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        await launch.saved(1)
        stage.crash("n0", keep_memory=True)
        stage.cluster.cut_from_ledger("n0")
        stage.start("n0")
        rank = launch.ranks[0]
        for _ in range(2):
            with pytest.raises(LedgerUnavailable):
                await rank.call(w.SaveStatus(0, 1, 0.0))
        stage.cluster.heal()
        await asyncio.sleep(5)
        await launch.saved(2)

    play(story)


def test_ranks_of_a_launch_that_is_begun_again_under_its_token_are_told_dead_too():
    """A launcher starts rank 0 again, by the same token, while rank 1 on the same node still lives.
    When the others are dead as well, and come again, nobody waits for the dead."""

    async def story(stage):
        old = await stage.launch("n0", "n0", "n1", token="t")
        old.ranks[0].trainer.kill()
        await asyncio.sleep(1)
        joining = asyncio.create_task(stage.form("n0", token="t", world=3, ranks=[0]).join())
        await asyncio.sleep(1)
        for rank in old.ranks[1:]:
            rank.trainer.kill()
        await asyncio.sleep(1)
        begun = now()
        await stage.form("n0", "n1", token="t", world=3, ranks=[1, 2]).join()
        await joining
        assert now() - begun < 1.0

    play(story)


def test_a_rank_that_takes_its_seat_again_leaves_a_launch_of_its_token_that_forms_as_it_is():
    """The agent of n0 restarts, and a launcher starts rank 0 again by the same token; then rank 1,
    which lives, takes its seat. When the others are dead and come again, the launch forms: rank 0
    is still in it."""

    async def story(stage):
        old = await stage.launch("n0", "n0", "n1", token="t")
        stage.restart("n0")
        await asyncio.sleep(3)
        old.ranks[0].trainer.kill()
        joining = asyncio.create_task(stage.form("n0", token="t", world=3, ranks=[0]).join())
        await asyncio.sleep(1)
        await old.ranks[1].call(w.SaveStatus(0, 1, 0.0))
        for rank in old.ranks[1:]:
            rank.trainer.kill()
        await asyncio.sleep(1)
        begun = now()
        await stage.form("n0", "n1", token="t", world=3, ranks=[1, 2]).join()
        await joining
        assert now() - begun < 1.0

    play(story)


@pytest.mark.parametrize("seed", range(4))
def test_who_was_away_in_the_old_generation_is_not_away_in_the_new_one(seed):
    """Two nodes restarted without their ranks, and the reports of these are gone for long. Each has
    a launch that waited for that; the one that wins needs a second until it has reported its rank.
    Its grace begins with its own generation: the other launch is refused, and the winner saves."""

    async def story(stage):
        launch = await stage.launch("n0", "n1")
        stage.crash("n0", "n1", keep_memory=True)
        launch.kill()
        for name in ("n0", "n1"):
            stage.start(name)

            def late():
                gate = asyncio.Event()
                asyncio.get_running_loop().call_later(1.0, gate.set)
                return gate

            stage.before_commit(name, late, prefix="trainers/")
        first, second = stage.form("n0"), stage.form("n1")
        results = await asyncio.gather(first.join(), second.join(), return_exceptions=True)
        assert len([x for x in results if isinstance(x, GenerationHeld)]) == 1, results
        winner = first if results[0] is None else second
        assert winner.generation == stage.state().generation.number == 2
        await winner.saved(1)

    play(story, seed=seed)
