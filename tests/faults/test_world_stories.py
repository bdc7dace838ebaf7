"""Stories that seeds of the world told first: each is what a campaign found, and must hold now.

Three ranks on n0 to n2 and two more nodes; layout rs:2,1. The seed that found it stands with each;
what it draws may change, the story does not.
"""

import asyncio

import pytest
from stage import JOB, now, play, until

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent import daemon
from p2pckpt.agent.context import RETRY_S
from p2pckpt.errors import CheckpointError, GenerationHeld, LedgerUnavailable
from p2pckpt.ports import Put, Txn

THREE = ("n0", "n1", "n2")


def joins(stage):
    return [e.key for e in stage.etcd.list(r.JobKeys(JOB).root + "join/").entries]


def test_the_join_of_a_dead_rank_goes_with_it():
    """Seed 2. A rank dies while its launch waits for others: its agent, which was asking for it,
    must not announce it again. An hour later no join is left for a launch that will never be."""

    async def story(stage):
        half = stage.form(*THREE[:2], world=3)
        joining = asyncio.gather(*(k.join() for k in half.ranks), return_exceptions=True)
        await until(lambda: len(joins(stage)) == 2)
        await asyncio.sleep(0.3)
        half.kill()
        await joining
        await asyncio.sleep(30.0)
        assert joins(stage) == []

    for seed in range(1, 6):
        play(story, seed=seed)


def test_a_launch_that_is_refused_leaves_no_join():
    """Seed 4. A second launch finds the first alive, and is told so; its join is gone at once."""

    async def story(stage):
        first = await stage.launch(*THREE)
        second = stage.form(*THREE)
        with pytest.raises(GenerationHeld, match="takeover=True"):
            await second.join()
        second.kill()
        await asyncio.sleep(5.0)
        assert joins(stage) == []
        await first.saved(1)

    play(story)


def test_after_a_rebuild_what_was_open_takes_no_slot():
    """Seed 6. Rank 0 had a save open when the ledger was wiped. Its bytes are kept, since nobody
    can know its outcome; but the rank has its slots again, and saves commit."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1)
        await launch.ranks[0].write(launch.ordinal, 2)
        await asyncio.sleep(2.0)
        stage.etcd.wipe()
        await asyncio.sleep(20.0)
        assert (await stage.rebuild("n1")).problem == ""
        await asyncio.sleep(15.0)
        launch = await launch.again()
        assert await launch.restore() == 1
        await launch.saved(2, 3, 4)
        kept = [(n, h) for n, h in stage.held(r.FileKind.SLOT, 2) if h.attempt.generation == 1]
        assert [n for n, _ in kept] == ["n0"]

    play(story)


@pytest.mark.parametrize("later_s", [0.0, 0.001, 0.01, 0.1])
def test_a_ledger_that_is_lost_right_after_a_commit_is_remembered(later_s):
    """Seed 25. keep_last is 1: step 2 commits, step 1 is retired, and at that moment the ledger is
    wiped. Whoever lets step 1 go has a copy of step 2's record, so a rebuild finds one of both."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1)  # and at once the next one

        def lose():
            asyncio.get_running_loop().call_later(later_s, stage.etcd.wipe)

        stage.at("note.retired", lose)
        await launch.begin(2)
        await until(lambda: stage.events("fault.ledger.wipe"))
        launch.kill()
        await asyncio.sleep(20.0)
        reply = await stage.rebuild("n1")
        assert reply.problem == "", reply
        assert set(reply.steps) & {1, 2}
        await asyncio.sleep(15.0)
        launch = await launch.again()
        assert await launch.restore() in reply.steps

    play(story)


def test_an_agent_that_froze_by_what_it_read_of_members_notices_the_rebuild():
    """Seed 25. The ledger was wiped while nothing went on, so agents noticed by the revision of a
    listing of members alone. A rebuild ends their freeze within a moment, with nobody asking."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1, 2, 3)
        await asyncio.sleep(30.0)
        stage.etcd.wipe()
        await asyncio.sleep(20.0)
        assert all(agent.jobs[JOB].ctx.frozen for agent in stage.agents.values())
        assert (await stage.rebuild("n3")).problem == ""
        await asyncio.sleep(10 * RETRY_S)
        frozen = {n: agent.jobs[JOB].ctx.frozen for n, agent in stage.agents.items()}
        assert not any(frozen.values()), frozen
        with pytest.raises(CheckpointError):
            await launch.begin(4)  # of a generation that is over

    play(story)


def test_what_a_repair_brought_goes_with_a_step_that_was_retired_meanwhile():
    """Seed 51. n3 had an own copy to bring for a repair, and while it did the next step committed
    and the old one was retired and freed. What came after that was followed by nobody: a slot of
    the rank was gone for good, and with keep_last 1 no save had one any more."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1)
        await asyncio.sleep(5.0)
        launch.kill()
        stage.crash("n1")
        slow = dict.fromkeys(stage.agents, 20000.0)
        for name, bytes_per_s in slow.items():
            stage.net.slow(name, bytes_per_s)
        await until(lambda: stage.events("message.sent") and begun(stage))
        for name in slow:
            stage.net.slow(name, 50e6)
        launch = await stage.launch("n0", "n3", "n2")
        assert await launch.restore() == 1
        await launch.saved(2, 3, 4)
        await asyncio.sleep(60.0)
        assert {h.attempt.step for _, h in stage.held()} == {4}
        tracked = [len(agent.jobs[JOB].ctx.tracked) for agent in stage.agents.values()]
        assert max(tracked) <= 1

    def begun(stage):
        return [
            1
            for agent in stage.agents.values()
            for h in agent.home.holdings.of_job(JOB)
            if h.kind is r.FileKind.SLOT and not h.whole
        ]

    play(story)


def test_a_save_that_no_agent_saw_does_not_hold_the_floor():
    """Seed 210. The agent of the only rank was away when a save was due, so the attempt was never
    opened and has no outcome. A hundred saves later the ledger has not grown."""

    async def story(stage):
        launch = await stage.launch("n0")
        await launch.saved(1, 2)
        launch.ordinal += 1  # step 3: nobody answered
        for step in range(4, 104):
            await launch.saved(step)
        await asyncio.sleep(10.0)
        assert len(stage.state().outcomes) < 90
        assert stage.state().floor > "0000000001.0000000003"

    play(story)


@pytest.mark.parametrize("after_s", [0.0, 0.2, 0.6, 1.1, 2.3])
def test_who_learns_of_wipe_and_rebuild_at_once_does_not_freeze_for_it(after_s):
    """Seed 223. The ledger was wiped and rebuilt before some agents had read anything: they accept
    the new one, and then read of members at a lower revision than ever. That is no second loss."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(*range(1, 9))
        await asyncio.sleep(20.0)
        launch.kill()
        await asyncio.sleep(5.0)
        stage.etcd.wipe()
        await asyncio.sleep(after_s)
        while (await stage.rebuild("n1")).problem:
            await asyncio.sleep(0.05)
        await asyncio.sleep(60.0)
        frozen = {n: agent.jobs[JOB].ctx.frozen for n, agent in stage.agents.items()}
        assert not any(frozen.values()), frozen
        launch = await launch.again()
        assert await launch.restore() == 8
        await launch.saved(9)

    play(story)


def test_a_rank_that_dies_when_its_launch_stands_is_not_told_as_living():
    """Found by `takeover`. All ranks die while their agents tell the ledger that they live; the
    next launch must not be held up by what these said."""

    async def story(stage):
        first = stage.form(*THREE)
        stage.before_commit("n1", first.kill, prefix="trainers/")
        await asyncio.gather(*(k.join() for k in first.ranks), return_exceptions=True)
        await asyncio.sleep(1.0)
        assert stage.state().generation.number == 1
        async with asyncio.timeout(10.0):
            await stage.launch(*THREE)

    play(story)


def test_a_reader_whose_leave_was_not_answered_leaves_all_the_same():
    """Found by `takeover` with late transactions: a reader's record that stays keeps its step for
    ever, and as many of those as a job retains keep it from saving."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1)
        launch.kill()
        launch = await launch.again()

        def leaves(name, txn):
            if any("/readers/" in key for key in txn.deletes):
                stage.before_txn.remove(leaves)
                stage.etcd.ambiguous_next(name)

        stage.before_txn.append(leaves)
        assert await launch.restore() == 1
        await asyncio.sleep(30.0)
        assert stage.etcd.list(r.JobKeys(JOB).root + "readers/").entries == ()

    for seed in range(1, 5):
        play(story, seed=seed)


def test_an_offer_that_comes_twice_at_once_leaves_nothing():
    """Seed 97. The network doubled an offer; the files of the first were forgotten by the second,
    and stayed for ever."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1)
        state, agent = stage.state(), stage.agents["n4"]
        attempt = r.Attempt(state.ledger_id, JOB, state.generation.number, 7, 99)
        offer = w.PutOffer(attempt, "n0", 0, (5000,), 100, "d" * 64)
        replies = await asyncio.gather(*(agent.on_peer("n0/peers", offer) for _ in range(2)))
        assert [type(reply) for reply in replies] == [w.PutGrant, w.PutGrant]
        assert len(agent.home.holdings.of_attempt(attempt)) == 2
        await asyncio.sleep(120.0)
        assert agent.home.holdings.of_attempt(attempt) == []
        assert agent.serving.incoming == {}

    play(story)


def test_a_report_that_is_carried_out_late_does_not_bring_the_dead_back():
    """Seed 64. A report of living ranks had no answer and came to stand seconds later, when their
    death was told already: for the next launches they lived for ever."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1)
        late = []

        def goes_late(client, txn):
            if late or client != "n0" or not any("/trainers/" in put.key for put in txn.puts):
                return False
            late.append(txn)
            loop = asyncio.get_running_loop()
            loop.call_later(4.0, lambda: stage.etcd.apply(client, txn))
            return True

        stage.etcd.goes_late = goes_late
        stage.etcd.revoke(stage.agents["n0"].home.session.lease, "operator")
        await until(lambda: late)
        await asyncio.sleep(3.0)  # the report was made again meanwhile
        launch.kill()
        await asyncio.sleep(20.0)
        async with asyncio.timeout(60.0):
            assert await (await launch.again()).restore() == 1

    play(story)


def test_who_reads_nothing_while_the_ledger_is_set_back_and_rebuilt_learns_of_it():
    """Seed 276. Its watch went on from a revision that the ledger of another life had reached by
    then: it never saw the new ledger id, and no reader's record of this node came to stand."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(*range(1, 6))
        await asyncio.sleep(2.0)
        launch.kill()
        await asyncio.sleep(1.0)
        stage.etcd.rollback(stage.etcd.revision - 4)
        reply = await stage.rebuild("n0")
        assert reply.problem == ""
        await asyncio.sleep(10.0)
        ids = {name: agent.jobs[JOB].ctx.state.ledger_id for name, agent in stage.agents.items()}
        assert ids == dict.fromkeys(ids, reply.ledger_id)

    for seed in range(1, 4):
        play(story, seed=seed)


def test_a_rank_that_dies_while_a_new_session_tells_of_the_living_ends_no_agent():
    """Seed 475. The agent's lease had expired; while it told the ledger anew which ranks live, one
    of them died, and the loop over the launches ended the agent."""

    async def story(stage):
        first, second = await stage.launch("n0", "n1"), stage.form("n0", token="other")
        joining = asyncio.gather(*(k.join() for k in second.ranks), return_exceptions=True)
        await asyncio.sleep(1.0)

        def dies(name, txn):
            if name == "n0" and any("/trainers/" in put.key for put in txn.puts):
                stage.before_txn.remove(dies)
                second.kill()

        stage.before_txn.append(dies)
        stage.etcd.revoke(stage.agents["n0"].home.session.lease, "operator")
        await until(lambda: dies not in stage.before_txn)
        await asyncio.sleep(10.0)
        joining.cancel()
        await first.saved(1)

    play(story)


def test_a_restore_and_a_repair_bring_one_copy_of_a_rank():
    """Seed 329. A rank's slot was brought by a repair and, before that had it, by its restore on
    the same node. A second slot of one step is the place of a save, and no save ever committed."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1)
        node = stage.holders("n1", 1)[0]
        assert node not in THREE
        stage.crash("n1")
        stage.net.slow(node, 20e3)  # the repair begins when the launch forms, and takes longer
        launch = await launch.again("n0", node, "n2")
        assert await launch.restore() == 1
        await until(lambda: stage.events("note.repaired", node))
        assert stage.events("note.fetched", node)
        assert [n for n, h in stage.held(r.FileKind.SLOT, 1) if h.part == 1] == [node]
        await launch.saved(2)

    play(story)


def test_who_cleaned_a_job_begins_anew_though_the_ledger_forgot_the_clean():
    """Seed 269. The ledger went back to before the record of a clean that all had obeyed. The next
    job of the name has the same attempt keys; nothing of the old one may stand in their place."""

    async def story(stage):
        began = stage.etcd.revision
        launch = await stage.launch(*THREE)
        await launch.saved(1, 2)
        launch.kill()
        await asyncio.sleep(2.0)
        await stage.nodes["n0"].trainer().call(w.CleanCall(JOB, dry_run=False))
        assert stage.held() == []
        stage.etcd.rollback(began)
        await asyncio.sleep(20.0)
        launch, begun = await launch.again(), now()
        assert await launch.restore() is None
        await launch.saved(*range(1, 6))
        assert now() - begun < 5.0, "mirrors wait for revisions that the ledger had before"
        await until(lambda: {h.attempt.step for _, h in stage.held()} == {5})

    play(story)


def test_a_death_that_is_told_late_is_of_no_generation_of_another_ledger():
    """Seed 269. Ranks died when their agents could not tell, as the ledger had forgotten their job.
    It was cleaned, and the next one counts generations anew: its living ranks are known as such."""

    async def story(stage):
        began = stage.etcd.revision
        first = await stage.launch(*THREE)
        await first.saved(1)
        stage.etcd.rollback(began)
        await asyncio.sleep(20.0)
        first.kill()
        await asyncio.sleep(2.0)
        await stage.nodes["n1"].trainer().call(w.CleanCall(JOB, dry_run=False))
        await stage.launch(*THREE)
        await asyncio.sleep(5.0)
        with pytest.raises(GenerationHeld):
            await stage.launch(*THREE)

    play(story)


def test_frozen_agents_tell_that_their_ranks_are_dead():
    """Found with seed 195. The ledger lost the last writes of a job, which freezes it, but not the
    reports of its living ranks. They end, and the job is cleaned: nobody is told to live."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.restore()
        stands = stage.etcd.revision
        await launch.saved(1, 2, 3)
        stage.etcd.rollback(stands)
        await asyncio.sleep(20.0)
        assert all(stage.agents[name].jobs[JOB].ctx.frozen for name in THREE)
        launch.kill()
        await asyncio.sleep(20.0)
        reply = await stage.nodes["n3"].trainer().call(w.CleanCall(JOB, dry_run=False))
        assert reply.problem == ""
        launch = await launch.again()
        assert await launch.restore() is None
        await launch.saved(1)

    play(story)


def test_deaths_are_told_though_a_save_in_flight_has_no_end():
    """Seed 838. A rank died while it wrote, of a job whose ledger had gone back: nobody can put an
    outcome, which its agent waited for before it told the death. So nobody could clean the job."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.restore()
        stands = stage.etcd.revision
        await launch.saved(1, 2, 3)
        await launch.ranks[0].trainer.call(w.OpenSlot(launch.ordinal, 4, 2000))
        stage.etcd.rollback(stands)
        await asyncio.sleep(20.0)
        assert all(stage.agents[name].jobs[JOB].ctx.frozen for name in THREE)
        launch.kill()
        await asyncio.sleep(20.0)
        reply = await stage.nodes["n3"].trainer().call(w.CleanCall(JOB, dry_run=False))
        assert reply.problem == ""

    play(story)


def test_what_a_ledger_forgot_of_joins_and_deaths_does_not_stand_again():
    """Seed 426. A ledger that went back had the join of a launch that was no more, and the lease
    under which it stood was kept: the job could never be cleaned. So could reports of the dead."""

    async def story(stage, joining):
        launch = stage.form(*THREE)
        begun = asyncio.gather(*(k.join() for k in launch.ranks), return_exceptions=True)
        await until(lambda: joins(stage) if joining else stage.state().generation, every_s=0.001)
        stands = stage.etcd.revision
        await begun
        await launch.restore()
        await launch.saved(1, 2, 3)
        launch.kill()
        await asyncio.sleep(5.0)
        stage.etcd.rollback(stands)
        assert joins(stage)
        await asyncio.sleep(40.0)
        assert joins(stage) == []
        reply = await stage.nodes["n3"].trainer().call(w.CleanCall(JOB, dry_run=False))
        assert reply.problem == ""
        launch = await launch.again()
        assert await launch.restore() is None
        await launch.saved(1)

    for joining in (True, False):
        play(lambda stage, joining=joining: story(stage, joining))


def test_a_frozen_agent_takes_the_join_of_a_dead_launch_back():
    """Seed 346. A launch forms when the ledger is found to have forgotten; its ranks end, and their
    joins with them, though the job is frozen on their nodes."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1)
        launch.kill()
        await asyncio.sleep(2.0)
        half = stage.form("n0", world=2)
        joining = asyncio.gather(*(k.join() for k in half.ranks), return_exceptions=True)
        await until(lambda: joins(stage))
        ctx = stage.agents["n0"].jobs[JOB].ctx
        entry = stage.etcd.get(ctx.keys.ledger_id)
        stage.etcd.apply("vandal", Txn(puts=(Put(entry.key, b"0" * 32),)))
        await until(lambda: ctx.frozen)
        half.kill()
        await joining
        await until(lambda: joins(stage) == [])

    play(story)


def test_a_report_of_the_living_that_was_begun_does_not_go_over_their_death():
    """Seed 332. A new session reports the living; the first try has no answer, their death is told
    meanwhile, and the second try went over that: for the next launches they lived for ever."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1)

        lost = []

        def gets_lost(client, txn):
            if lost or client != "n0" or not any("/trainers/" in put.key for put in txn.puts):
                return False
            lost.append(txn)
            return True

        stage.etcd.goes_late = gets_lost
        stage.etcd.revoke(stage.agents["n0"].home.session.lease, "operator")
        await until(lambda: lost)
        launch.kill()
        await asyncio.sleep(20.0)
        async with asyncio.timeout(60.0):
            assert await (await launch.again()).restore() == 1

    play(story)


def test_a_job_may_come_while_a_new_session_tells_of_the_others():
    """Seed 475. The agent of a node died of a job that began there in this moment."""

    async def story(stage):
        launch = await stage.launch("n0")
        other = stage.form("n0", job=r.Job(owner_uid=1000, name="other").key)
        joined = []

        def begins():
            joined.append(asyncio.create_task(other.join()))
            gate = asyncio.Event()
            asyncio.get_running_loop().call_later(0.5, gate.set)
            return gate

        stage.before_commit("n0", begins, prefix="trainers/")
        stage.etcd.revoke(stage.agents["n0"].home.session.lease, "operator")
        await until(lambda: joined)
        await joined[0]
        await launch.saved(1)
        await other.saved(1)
        await asyncio.sleep(5.0)  # the telling goes on

    play(story)


def test_nothing_is_retired_because_a_ledger_was_rebuilt():
    """Seed 475. The rebuilt ledger kept one step of three, and the bytes of that one were wrong."""

    async def story(stage):
        launch = await stage.launch(*THREE, keep_last=3)
        await launch.saved(*range(1, 5))
        await asyncio.sleep(20.0)
        stage.etcd.wipe()
        await asyncio.sleep(20.0)
        launch.kill()
        while (await stage.rebuild("n1")).problem:
            await asyncio.sleep(1.0)
        await asyncio.sleep(60.0)
        assert sorted(c.attempt.step for c in stage.state().commits.values()) == [2, 3, 4]

    play(story)


def test_a_clean_takes_no_record_of_the_job_that_began_meanwhile():
    """Seed 5034. The ledger had forgotten a job. While its clean waited for a node that was gone,
    the next job of the name began; the clean went on and took the records of that one."""

    async def story(stage):
        began = stage.etcd.revision
        launch = await stage.launch(*THREE)
        await launch.saved(1)
        stage.etcd.rollback(began)
        await asyncio.sleep(20.0)
        launch.kill()
        await asyncio.sleep(2.0)
        stage.crash("n4")
        cleaning = asyncio.create_task(
            stage.nodes["n3"].trainer().call(w.CleanCall(JOB, dry_run=False))
        )
        await until(lambda: stage.events("note.cleaning"))
        launch = await stage.launch(*THREE)
        assert not cleaning.done()
        await launch.saved(1)
        await cleaning
        await launch.saved(2)
        assert await (await launch.again()).restore() == 2

    play(story)


def test_a_job_that_cannot_be_told_of_does_not_keep_another_from_it(monkeypatch):
    """The lease of a node with ranks of two jobs expired, and nothing can be written of the first
    one. Who is not told of seems to be dead, so the second one is told of all the same."""
    tell = daemon.tell_living

    async def telling(ctx, *of):
        if ctx.job == "1000.lost":
            raise LedgerUnavailable("its report was not written")
        await tell(ctx, *of)

    async def story(stage):
        for job in ("1000.lost", "1000.well"):
            await stage.launch(*THREE, job=job)
        monkeypatch.setattr(daemon, "tell_living", telling)
        stage.etcd.revoke(stage.agents["n0"].home.session.lease, "operator")
        report = r.JobKeys("1000.well").trainers(1, "n0")
        assert stage.etcd.get(report) is None
        await until(lambda: stage.etcd.get(report) is not None)

    play(story)
