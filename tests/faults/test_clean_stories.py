"""The end of a job, under faults: nothing of it is left, and nothing of anything else goes.

Each story ends with a new launch of the same name, which must find provably nothing, save, and be
able to restore: generations, ordinals and steps are then those of the old job again.
"""

import asyncio
import contextlib

import pytest
from stage import JOB, play, until

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.reading import hold, let_go
from p2pckpt.errors import AgentUnreachable, CheckpointError, LedgerForgot
from p2pckpt.ports import Put, Txn

FOUR = ("n0", "n1", "n2", "n3")
OTHER = r.Job(owner_uid=1000, name="other").key
KEYS = r.JobKeys(JOB)


async def clean(stage, node, dry_run=False):
    return await stage.nodes[node].trainer().call(w.CleanCall(JOB, dry_run))


async def cleaned(stage, node="n4"):
    """Clean until it is done, as a person would."""
    for _ in range(10):
        try:
            reply = await clean(stage, node)
        except CheckpointError:
            await asyncio.sleep(1)
            continue
        assert reply.problem == "", reply
        return reply
    raise AssertionError("could not clean")


def left(stage):
    """Keys of the job that are no tombstones, and bytes that some agent has."""
    keys = [e.key for e in stage.etcd.list(KEYS.root).entries]
    return [k for k in keys if not k.startswith(KEYS.cleanings)], stage.held()


async def ended(stage, *steps):
    """A job that saved and whose ranks are gone; and another job, which must not notice."""
    other = await stage.launch("n1", "n2", "n3", job=OTHER)
    await other.saved(7)
    launch = await stage.launch(*FOUR)
    assert await launch.restore() is None
    await launch.saved(*steps)
    launch.kill()
    await asyncio.sleep(2)
    return other


async def begins_anew(stage, other):
    assert await other.restore() == 7, "the other job lost something"
    launch = await stage.launch(*FOUR)
    assert launch.generation == 1
    assert await launch.restore() is None
    await launch.saved(1, 2)
    launch = await launch.again()
    assert await launch.restore() == 2


def test_a_clean_job_leaves_nothing_and_begins_anew():
    async def story(stage):
        other = await ended(stage, 1, 2)
        reply = await clean(stage, "n4", dry_run=True)
        assert (reply.problem, reply.steps) == ("", (2,))
        assert set(reply.held) >= set(FOUR)
        assert left(stage)[1]
        reply = await clean(stage, "n4")
        assert (reply.left, reply.away) == ((), ())
        assert left(stage) == ([], [])
        await begins_anew(stage, other)

    play(story)


@pytest.mark.parametrize("seed", range(4))
def test_repair_works_in_the_second_life_of_a_name(seed):
    """The same generation, ordinal and step as before, on the same members: a loss right after is
    repaired all the same."""

    async def story(stage):
        await ended(stage, 1)
        await cleaned(stage)
        launch = await stage.launch(*FOUR)
        assert await launch.restore() is None
        await launch.saved(1)
        stage.crash("n1")
        await until(lambda: stage.events("note.repaired"))
        await until(lambda: len(stage.held(r.FileKind.SLOT, 1)) == 4)
        launch = await launch.again("n0", "n4", "n2", "n3")
        assert await launch.restore() == 1

    play(story, seed=seed, nodes=6)


def test_the_second_life_of_a_name_is_swept_like_the_first():
    """Seed 19000009. Its first generation has the number that one before the clean had: rosters of
    launches that came to nothing go all the same."""

    async def story(stage):
        await ended(stage, 1)
        await cleaned(stage)
        stray = f"{KEYS.root}roster/stray/0000"
        stage.etcd.apply("other", Txn(puts=(Put(stray, b"-"),)))
        launch = await stage.launch(*FOUR)
        assert launch.generation == 1
        await until(lambda: stage.etcd.get(stray) is None)

    play(story)


def test_living_trainers_and_forming_launches_are_not_cleaned_away():
    async def story(stage):
        launch = await stage.launch(*FOUR)
        await launch.restore()
        await launch.saved(1)
        assert "live on n" in (await clean(stage, "n4")).problem
        launch.kill()
        await asyncio.sleep(2)
        half = stage.form(*FOUR[:2], world=4)
        joining = [asyncio.create_task(rank.join()) for rank in half.ranks]
        await asyncio.sleep(2)
        assert "forming" in (await clean(stage, "n4")).problem
        half.kill()
        await asyncio.gather(*joining, return_exceptions=True)
        assert stage.held(step=1)
        launch = await launch.again()
        assert await launch.restore() == 1

    play(story)


@pytest.mark.parametrize("event", ["note.cleaning", "note.freed"])
def test_the_cleaner_dies_in_the_middle(event):
    """Another one, or the same after its return, goes on where it was."""

    async def story(stage):
        other = await ended(stage, 1, 2)
        stage.at(event, lambda: stage.crash("n4", keep_memory=True))
        with pytest.raises(AgentUnreachable):
            await clean(stage, "n4")
        assert left(stage)[0]
        await asyncio.sleep(3)
        await cleaned(stage, "n2")
        await until(lambda: left(stage) == ([], []))
        stage.start("n4")
        await begins_anew(stage, other)

    play(story)


def test_a_launch_that_comes_while_a_job_is_cleaned_waits_and_is_a_new_job():
    async def story(stage):
        other = await ended(stage, 1, 2)
        gate = asyncio.Event()

        def hold(name, txn):
            return gate if name == "n4" and KEYS.ledger_id in txn.deletes else None

        stage.before_txn.append(hold)
        cleaning = asyncio.create_task(clean(stage, "n4"))
        await until(lambda: not stage.held())
        launch = stage.form(*FOUR)
        joining = asyncio.create_task(launch.join())
        await asyncio.sleep(5)
        assert not joining.done()
        gate.set()
        assert (await cleaning).problem == ""
        await joining
        assert launch.generation == 1
        assert await launch.restore() is None
        await launch.saved(1, 2)
        await asyncio.sleep(5)
        assert {h.attempt.step for _, h in stage.held()} == {2}
        assert await (await launch.again()).restore() == 2
        assert await other.restore() == 7

    play(story)


def test_a_node_that_was_cut_off_hears_of_it_when_it_is_back():
    async def story(stage):
        other = await ended(stage, 1, 2)
        stage.cut_off("n1")
        await asyncio.sleep(20)
        reply = await cleaned(stage, "n4")
        assert "n1" in reply.away
        assert {name for name, _ in stage.held()} == {"n1"}
        stage.cluster.heal()
        await until(lambda: not stage.held())
        await begins_anew(stage, other)

    play(story)


def test_a_node_that_was_down_hears_of_it_after_the_name_was_used_again():
    """Its old bytes neither stop the new job from beginning, nor does it keep them."""

    async def story(stage):
        other = await ended(stage, 1, 2)
        stage.crash("n3", keep_memory=True)
        await asyncio.sleep(20)
        assert "n3" in (await cleaned(stage, "n4")).away
        launch = await stage.launch("n0", "n1", "n2", "n4")
        stage.start("n3")
        assert await launch.restore() is None
        await launch.saved(1)
        ledger = stage.state().ledger_id
        await until(lambda: {h.attempt.ledger_id for _, h in stage.held()} == {ledger})
        assert await (await launch.again()).restore() == 1
        assert await other.restore() == 7

    play(story)


def test_after_a_wipe_of_etcd_a_clean_is_the_other_way_than_a_rebuild():
    async def story(stage):
        await ended(stage, 1, 2)
        before = stage.state().ledger_id
        stage.etcd.wipe()
        await asyncio.sleep(15)
        assert stage.held(step=2), "nothing goes because records are gone"
        reply = await cleaned(stage, "n0")
        assert before in reply.ledger_ids
        await until(lambda: left(stage) == ([], []))
        for name in (*FOUR, "n4"):  # their watches are of the etcd that was
            stage.restart(name)
        launch = await stage.launch(*FOUR)
        assert await launch.restore() is None
        await launch.saved(1)

    play(story)


def test_a_ledger_that_was_set_back_to_before_a_clean_goes_on_with_nothing():
    """Its generations and steps were given already, to bytes that somebody may still have: a launch
    is refused by name until the job is cleaned once more."""

    async def story(stage):
        await ended(stage, 1, 2)
        before, revision = stage.state().ledger_id, stage.etcd.revision
        await cleaned(stage)
        await asyncio.sleep(5)
        stage.etcd.rollback(revision)
        await asyncio.sleep(15)
        assert stage.state().ledger_id == before
        launch = stage.form(*FOUR)
        with pytest.raises(LedgerForgot, match="which was cleaned"):
            await launch.join()
        launch.kill()
        await asyncio.sleep(15)
        await cleaned(stage)
        launch = await stage.launch(*FOUR)
        assert stage.state().ledger_id != before
        assert await launch.restore() is None
        await launch.saved(1)

    play(story)


def test_joins_of_a_launch_from_before_a_clean_do_not_outlive_a_set_back():
    """They stand again under sessions that live, of trainers that were dead before the clean."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        await launch.restore()
        await launch.saved(1)
        assert "live on n" in (await clean(stage, "n4")).problem
        revision = stage.etcd.revision
        launch.kill()
        await asyncio.sleep(2)
        await cleaned(stage)
        lost = stage.etcd.revision - revision
        stage.etcd.rollback(revision)
        for i in range(lost + 1):  # others write as much, before anybody looks
            stage.etcd.apply("other", Txn(puts=(Put(f"other/{i}", b""),)))
        await asyncio.sleep(30)
        await cleaned(stage)
        launch = await stage.launch(*FOUR)
        assert await launch.restore() is None
        await launch.saved(1)

    play(story)


@pytest.mark.parametrize("seed", range(3))
def test_cleaning_under_lost_answers(seed):
    """Every agent's answers of the ledger get lost now and then; a person tries again."""

    async def story(stage):
        other = await ended(stage, 1, 2)
        for _ in range(2 + seed):
            for name in (*FOUR, "n4"):
                stage.etcd.ambiguous_next(name)
        await cleaned(stage, "n4")
        await until(lambda: left(stage) == ([], []))
        await begins_anew(stage, other)

    play(story, seed=seed)


def test_a_cleaned_job_holds_up_no_death_of_another():
    """Nodes that served a job that was cleaned serve another one. A rank of that dies between its
    slot and its word that it is done: its job hears of it, ends the attempt and begins anew."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        await launch.saved(1)
        launch.kill()
        await asyncio.sleep(2)
        await cleaned(stage)
        other = await stage.launch("n1", "n2", "n3", job=OTHER)
        await other.saved(7)
        await other.ranks[0].call(w.OpenSlot(1, 8, 9000))
        other.ranks[0].trainer.kill()
        await until(lambda: stage.events("note.abort"), timeout_s=30.0)
        other = await asyncio.wait_for(other.again(), 60.0)
        assert await other.restore() == 7
        await other.saved(8)

    play(story)


def test_who_dies_while_it_asks_for_a_step_leaves_no_reader():
    """A command is killed between its question and the answer: at whatever moment that is, its
    reader's record goes, and the job can be cleaned."""

    async def story(stage):
        other = await ended(stage, 3)
        for wait_s in (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006):
            trainer = stage.nodes["n4"].trainer()
            asking = asyncio.ensure_future(trainer.call(w.StepQuery(JOB)))
            await asyncio.sleep(wait_s)
            trainer.kill()
            await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(30)
        assert not stage.etcd.list(f"{KEYS.root}readers/").entries
        await cleaned(stage, "n1")
        await begins_anew(stage, other)

    play(story)


def test_a_reader_of_a_cleaned_job_is_not_mistaken_for_one_of_the_next():
    """A reader's record of n4 got no answer, so that n4 takes it away once more, later. Meanwhile
    the job is cleaned and begins anew, and n4 reads a step that has the same name: that record
    stays as long as it is held."""

    async def story(stage):
        await ended(stage, 3)
        ctx, attempt = stage.agents["n4"].jobs[JOB].ctx, stage.state().latest().attempt
        stage.etcd.ambiguous_next("n4")
        with contextlib.suppress(CheckpointError):
            await hold(ctx, attempt, ".77")
        letting = asyncio.ensure_future(let_go(ctx, attempt, ".77"))
        await asyncio.sleep(1)
        await cleaned(stage, "n1")
        launch = await stage.launch(*FOUR)
        assert await launch.restore() is None
        await launch.saved(3)
        anew = stage.state().latest().attempt
        assert anew.key == attempt.key
        await until(lambda: ctx.state.committed(anew) is not None)
        await hold(ctx, anew, ".77")
        assert not letting.done()
        await letting
        assert stage.etcd.get(f"{ctx.keys.readers(anew)}n4.77") is not None
        await let_go(ctx, anew, ".77")
        assert stage.etcd.get(f"{ctx.keys.readers(anew)}n4.77") is None

    play(story)


def test_who_dies_while_a_rank_is_brought_for_it_leaves_no_file():
    """An export is killed at some moment while its snapshot comes from others to n4: what was
    brought is given back, as soon as it is there."""

    async def story(stage):
        await ended(stage, 3)
        begun = 0
        for wait_s in (0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015):
            trainer = stage.nodes["n4"].trainer()
            step = await trainer.call(w.StepQuery(JOB))
            asking = asyncio.ensure_future(trainer.call(w.ExportCall(step.commit.attempt, 0)))
            await asyncio.sleep(wait_s)
            begun += not asking.done()
            trainer.kill()
            await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(30)
        assert begun
        held = stage.agents["n4"].home.holdings.of_job(JOB)
        assert not [h for h in held if h.kind is r.FileKind.STAGE]

    play(story)
