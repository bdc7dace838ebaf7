"""Stories of an etcd that forgets, goes back, forgets its history, changes leader, or is away.

Three ranks on n0 to n2 and two more nodes; layout rs:2,1. An agent that has seen more than the
ledger says freezes: it serves reads and deletes nothing, until `ledger rebuild` or the end of time.
"""

import asyncio

import pytest
from stage import COMMIT, JOB, now, play, until

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.reading import hold, let_go
from p2pckpt.errors import (
    AgentUnreachable,
    CheckpointError,
    LedgerForgot,
    StaleGenerationError,
)
from p2pckpt.ports import Put, Txn

THREE = ("n0", "n1", "n2")


def everything(stage):
    """All files and manifests of all nodes, with their contents."""
    return {
        (name, file): bytes(held)
        for name in sorted(stage.agents)
        for file, held in stage.nodes[name].store.files.items()
    }


async def wiped(stage):
    stage.etcd.wipe()


async def rolled_back(stage, during_s=0.0):
    """To before step 3; then other jobs write, so that the revision is at once what it was."""
    lost = stage.etcd.revision - stage.rollback_to
    stage.etcd.rollback(stage.rollback_to)
    for i in range(lost):
        await asyncio.sleep(during_s / lost)
        stage.etcd.apply("other", Txn(puts=(Put(f"other/{i}", b""),)))


async def rolled_back_and_slowly_on(stage):
    """The same, but the revision is lower for 10 s, in which nobody saves."""
    await rolled_back(stage, 10.0)
    assert stage.events("note.frozen"), "whoever holds bytes of the newest step looks by itself"


async def forgotten(stage, forget):
    """Steps 1, 2, 3 were saved, then the ledger forgot; the launch, and all bytes before it."""
    launch = await stage.launch(*THREE)
    await launch.saved(1, 2)
    await asyncio.sleep(5)
    stage.rollback_to = stage.etcd.revision
    await launch.saved(3)
    await asyncio.sleep(5)
    before = everything(stage)
    await forget(stage)
    await asyncio.sleep(20)
    return launch, before


KEYS = r.JobKeys(JOB)
FORGETTING = pytest.mark.parametrize("forget", [wiped, rolled_back, rolled_back_and_slowly_on])


@FORGETTING
def test_agents_of_a_ledger_that_forgot_freeze_and_keep_every_byte(forget):
    """For ten minutes nothing is deleted or committed. A new launch is refused by name on each
    rank, a save ends without a commit and without an error in the trainer, and reads are served."""

    async def story(stage):
        launch, before = await forgotten(stage, forget)
        asked = await asyncio.gather(launch.begin(4), return_exceptions=True)
        assert not isinstance(asked[0], asyncio.CancelledError)
        launch.kill()
        with pytest.raises(LedgerForgot, match="rebuild"):
            await launch.again(timeout_s=30.0)
        await asyncio.sleep(600)
        after = everything(stage)
        held = [(n, h) for n, h in stage.held(step=3)]
        assert len(held) == 3 + 9
        assert {(n, h.file): after[n, h.file] for n, h in held} == {
            (n, h.file): before[n, h.file] for n, h in held
        }
        assert {step for _, step in stage.state().commits} <= {1, 2}
        peers, member = stage.agents["n1"].home.doors.peers, stage.agents["n0"].home.member
        reply = await peers.call(member.peers_address, w.HeldQuery(JOB), 2.0)
        assert 3 in {f.attempt.step for f in reply.files}

    play(story)


@FORGETTING
def test_a_rebuilt_ledger_restores_exactly(forget):
    """After `ledger rebuild` a new start restores step 3, bit by bit, and saves go on; nobody is
    frozen any more, and an older launch is stale."""

    async def story(stage):
        launch, _ = await forgotten(stage, forget)
        reply = await stage.rebuild("n1")
        assert reply.problem == ""
        assert 3 in reply.steps
        await asyncio.sleep(15)
        launch = await launch.again()
        assert launch.generation > 1
        assert await launch.restore() == 3
        await launch.saved(4, 5)
        launch = await launch.again("n4", "n3", "n1")
        assert await launch.restore() == 5
        assert not any(agent.jobs[JOB].ctx.frozen for agent in stage.agents.values())

    play(story)


def test_a_ballot_that_was_open_when_the_ledger_forgot_ends_with_the_rebuild():
    """The ranks have their files and load; the ledger is wiped, and the ballot is overdue while all
    are frozen. After the rebuild nobody reads on or is busy for ever, and others restore."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1, 2)
        launch = await launch.again()
        await launch.all(lambda rank: rank.call(w.RestoreCall(0)))
        assert all(stage.agents[name].jobs[JOB].restoring.reading for name in THREE)
        await wiped(stage)
        await asyncio.sleep(600)
        launch.kill()
        assert (await stage.rebuild("n1")).problem == ""
        await asyncio.sleep(60)
        assert not any(agent.jobs[JOB].restoring.reading for agent in stage.agents.values())
        assert not any(agent.jobs[JOB].busy() for agent in stage.agents.values())
        assert not stage.events("note.task_failed")
        assert await (await launch.again()).restore() == 2

    play(story)


def test_a_reader_that_a_ledger_set_back_has_again_keeps_nothing():
    """Seed 12000007. Only the end of a reading was lost, and the ledger is ahead again before
    anybody looks: the record stands, under a lease that lives. Who let it go takes it away; one
    that is held stays."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1)
        ctx, keep_last = stage.agents["n4"].jobs[JOB].ctx, stage.state().generation.keep_last

        def steps():
            return sorted(step for _, step in stage.state().commits)

        async def held():
            attempt = stage.state().latest().attempt
            await until(lambda: ctx.state.committed(attempt) is not None)
            await hold(ctx, attempt, ".77")
            await launch.saved(*range(attempt.step + 1, attempt.step + 1 + keep_last))
            return attempt

        attempt = await held()
        stage.rollback_to = stage.etcd.revision
        await let_go(ctx, attempt, ".77")
        await rolled_back(stage)
        assert stage.etcd.get(f"{ctx.keys.readers(attempt)}n4.77") is not None
        assert attempt.step in steps()
        await asyncio.sleep(60)
        assert attempt.step not in steps()
        assert not any(agent.jobs[JOB].ctx.frozen for agent in stage.agents.values())
        attempt = await held()
        await asyncio.sleep(60)
        assert attempt.step in steps()
        await let_go(ctx, attempt, ".77")
        await until(lambda: attempt.step not in steps())

    play(story)


@pytest.mark.parametrize("begun", [True, False])
def test_a_rank_whose_death_the_ledger_forgot_holds_up_nobody(begun):
    """Seed 14000113. The report of a death, or the end of a join, was lost unnoticed: the rank
    stands again under a lease that lives. The next launch asks, or a clean, and the node looks."""

    async def story(stage):
        if begun:
            launch = await stage.launch(*THREE)
            await launch.saved(1, 2)
            await asyncio.sleep(5)
        else:
            launch = stage.form("n0", "n1", world=3)
            joining = asyncio.gather(*(k.join() for k in launch.ranks), return_exceptions=True)
            await until(lambda: len(stage.etcd.list(KEYS.root + "join/").entries) == 2)
        stage.rollback_to = stage.etcd.revision
        launch.kill()
        await asyncio.sleep(2)
        assert stage.etcd.revision > stage.rollback_to
        await rolled_back(stage)
        if begun:
            assert await (await launch.again()).restore() == 2
            assert stage.events("note.death_told")
        else:
            await joining
            reply = await stage.nodes["n4"].trainer().call(w.CleanCall(JOB, False))
            assert reply.problem == ""
            assert stage.events("note.join_removed")

    play(story)


def test_a_launch_right_after_a_wipe_waits_for_those_with_bytes():
    """Seed 12000223. A new node opens a session before the agents that have the bytes notice that
    theirs is gone: what its launch is told is not "nothing"."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1, 2)
        launch.kill()
        await asyncio.sleep(20)
        before = {name: agent.home.kept_at for name, agent in stage.agents.items()}
        await until(lambda: any(a.home.kept_at > before[n] for n, a in stage.agents.items()))
        stage.etcd.wipe()
        stage.add("n9")
        with pytest.raises(CheckpointError, match="ledger rebuild"):
            await (await stage.launch("n9")).restore()

    play(story)


def test_a_rebuild_that_one_frozen_agent_needs_is_done_from_any():
    """Seed 13346259. One agent alone had seen what the ledger lost, and all others go on: whichever
    agent is asked for a rebuild does it, and the frozen one goes on."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1, 2)
        assert "nothing to rebuild" in (await stage.rebuild("n1")).problem
        stage.agents["n0"].jobs[JOB].ctx.freeze("revision 5, seen 9")
        launch.kill()
        await asyncio.sleep(5)  # it has a new session, so it is asked
        assert (await stage.rebuild("n1")).problem == ""
        await asyncio.sleep(15)
        assert not any(agent.jobs[JOB].ctx.frozen for agent in stage.agents.values())
        launch = await launch.again()
        assert await launch.restore() == 2
        await asyncio.sleep(0.5)  # rank 0's agent retires again what the rebuild brought back
        await launch.saved(3)

    play(story)


def test_a_job_that_was_cleaned_before_is_remembered_by_its_next_ledger():
    """After a clean nobody has any ledger in mind; the next launch makes one. When it is wiped, all
    freeze, also who has only watched."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1)
        launch.kill()
        await asyncio.sleep(15)
        reply = await stage.nodes["n3"].trainer().call(w.CleanCall(JOB, dry_run=False))
        assert (reply.problem, reply.left) == ("", ())
        await asyncio.sleep(15)
        await stage.launch(*THREE)
        await wiped(stage)
        await asyncio.sleep(5)
        frozen = {name: bool(agent.jobs[JOB].ctx.frozen) for name, agent in stage.agents.items()}
        assert frozen == dict.fromkeys(stage.agents, True)

    play(story)


def test_who_missed_two_rebuilds_goes_on_by_the_second():
    """n4 is down while etcd is wiped and rebuilt, twice. The second ledger replaces the first one,
    and all that the first one replaced."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1, 2)
        await asyncio.sleep(5)
        stage.crash("n4", keep_memory=True)
        for step in (3, 4):
            launch.kill()
            await wiped(stage)
            await asyncio.sleep(20)
            assert (await stage.rebuild("n1")).problem == ""
            await asyncio.sleep(15)
            launch = await launch.again()
            assert await launch.restore() == step - 1
            await launch.saved(step)
            await asyncio.sleep(5)
        stage.start("n4")
        await asyncio.sleep(15)
        assert stage.agents["n4"].jobs[JOB].ctx.frozen == ""

    play(story)


def test_a_rebuild_right_after_a_wipe_waits_until_all_are_back():
    """All that had a copy of step 1 are asked, though nobody had a session when it began."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1)
        await asyncio.sleep(5)
        launch.kill()
        await wiped(stage)
        reply = await stage.rebuild("n4")
        assert reply.problem == ""
        assert set(reply.answered) == set(stage.agents)
        await asyncio.sleep(15)
        assert await (await launch.again()).restore() == 1

    play(story)


@pytest.mark.parametrize("wait_s", [0.0, 0.3, 0.6])
def test_a_rebuild_right_after_a_commit_keeps_it(wait_s):
    """One agent is frozen, and the others save on. The rebuild comes when step 3 is committed and
    its record is copied nowhere, or not everywhere: the launch after it begins with step 3."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1, 2)
        stage.agents["n4"].jobs[JOB].ctx.freeze("revision 5, seen 9")
        await asyncio.sleep(5)
        await launch.saved(3)
        await asyncio.sleep(wait_s)
        reply = await stage.rebuild("n3")
        assert reply.problem == ""
        assert 3 in reply.steps
        await asyncio.sleep(10)
        assert await (await launch.again()).restore() == 3

    play(story)


@pytest.mark.parametrize("finished", [True, False])
def test_a_rebuild_that_comes_late_replaces_no_other_that_is_whole(finished):
    """Two agents are asked for a rebuild. The second has read the ledger when the first is in the
    middle, and its first transaction is on its way until the first is done: it is refused, and all
    go on by the first. If the first broke off, the second is the one."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1, 2)
        await asyncio.sleep(5)
        launch.kill()
        await wiped(stage)
        await asyncio.sleep(20)
        middle, late = asyncio.Event(), asyncio.Event()
        stage.before_commit("n1", lambda: middle)
        first = asyncio.ensure_future(stage.rebuild("n1"))
        await asyncio.sleep(5)
        stage.before_commit("n2", lambda: late, "state/rebuilt")
        second = asyncio.ensure_future(stage.rebuild("n2"))
        await asyncio.sleep(5)
        if finished:
            middle.set()
            await asyncio.sleep(5)
        late.set()
        if finished:
            assert (await first).problem == ""
            with pytest.raises(CheckpointError, match="run it again"):
                await second
        else:
            assert (await second).problem == ""
            middle.set()
            with pytest.raises(CheckpointError, match="another rebuild"):
                await first
        await asyncio.sleep(15)
        assert not any(agent.jobs[JOB].ctx.frozen for agent in stage.agents.values())
        assert await (await launch.again()).restore() == 2

    play(story)


def test_a_rebuild_that_breaks_off_in_the_middle_is_done_again():
    """Seed 15000278. The agent that rebuilds dies when the new id is written and the commits are
    not: nobody goes on by that ledger, or is told nothing or something old, until the next one."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1, 2)
        await asyncio.sleep(5)
        launch.kill()
        await wiped(stage)
        await asyncio.sleep(20)
        stage.before_commit("n1", lambda: gate)
        gate = asyncio.Event()
        rebuilding = asyncio.ensure_future(stage.rebuild("n1"))
        await asyncio.sleep(5)
        stage.crash("n1", keep_memory=True)
        await asyncio.sleep(20)
        await asyncio.gather(rebuilding, return_exceptions=True)
        assert stage.state().rebuilt.unfinished
        assert not stage.state().commits
        others = [agent for name, agent in stage.agents.items() if name != "n1"]
        assert all("being rebuilt" in agent.jobs[JOB].ctx.frozen for agent in others)
        with pytest.raises(CheckpointError, match="being rebuilt by n1"):
            await stage.launch("n3", "n4")
        stage.start("n1")
        await asyncio.sleep(5)
        assert (await stage.rebuild("n2")).problem == ""
        await asyncio.sleep(5)
        assert not stage.state().rebuilt.unfinished
        assert not any(agent.jobs[JOB].ctx.frozen for agent in stage.agents.values())
        assert await (await launch.again()).restore() == 2

    play(story)


def test_a_job_whose_rebuild_broke_off_is_cleaned_at_once():
    """Nobody wants it rebuilt any more. All agents free their bytes when they are asked, and not
    only when the records are gone: a clean that broke off too would leave them."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1, 2)
        await asyncio.sleep(5)
        launch.kill()
        await wiped(stage)
        await asyncio.sleep(20)
        gate = asyncio.Event()
        stage.before_commit("n1", lambda: gate)
        rebuilding = asyncio.ensure_future(stage.rebuild("n1"))
        await asyncio.sleep(5)
        stage.restart("n1")
        await asyncio.gather(rebuilding, return_exceptions=True)
        await asyncio.sleep(20)
        assert stage.state().rebuilt.unfinished
        reply = await stage.nodes["n4"].trainer().call(w.CleanCall(JOB, False))
        assert (reply.problem, reply.left) == ("", ())
        assert not stage.held()

    play(story)


def test_a_rank_of_a_ledger_that_is_gone_is_stale():
    """Seed 14000863. Those who were asked for a rebuild knew an older generation, so that its
    number was one that a launch had, and its ranks went on in the new ledger, without a roster."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1, 2)
        launch.kill()
        await asyncio.sleep(30)
        launch = await stage.launch("n4")
        assert launch.generation == 2
        await asyncio.sleep(1)
        peers = stage.agents["n4"].home.doors.peers
        for name in THREE:  # by the watch alone
            address = stage.agents[name].home.member.peers_address
            reply = await peers.call(address, w.CopiesQuery(JOB), 2.0)
            assert reply.seen.generation == 2, name
        seat = next(iter(stage.agents["n4"].jobs[JOB].seats.values()))
        seat.launch.ledger_id = "0" * 32
        with pytest.raises(StaleGenerationError, match="is gone"):
            await launch.all(lambda rank: rank.call(w.OpenSlot(0, 3, 4096)))

    play(story)


def test_frozen_agents_stay_members():
    """The ledger was wiped under living trainers. A minute later every agent has a session, so that
    a rebuild asks them all, and other jobs on these nodes go on."""

    async def story(stage):
        await forgotten(stage, wiped)
        await asyncio.sleep(60)
        assert sorted((await stage.agents["n0"].home.living()).members) == sorted(stage.agents)
        reply = await stage.rebuild("n1")
        assert list(reply.answered) == sorted(stage.agents)

    play(story)


def test_agents_that_restart_after_the_wipe_remember_too():
    """etcd is wiped while all agents are down: started again they know from their files what the
    ledger said, freeze, and rebuild."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1)
        await asyncio.sleep(5)
        launch.kill()
        await asyncio.sleep(1)
        names = list(stage.agents)
        stage.crash(*names, keep_memory=True)
        stage.etcd.wipe()
        for name in names:
            stage.start(name)
        await asyncio.sleep(5)
        with pytest.raises(CheckpointError, match="rebuild"):
            await (await launch.again(timeout_s=20.0)).restore()
        assert len(stage.held(step=1)) == 12
        assert (await stage.rebuild("n0")).problem == ""
        launch = await launch.again()
        assert await launch.restore() == 1

    play(story)


def test_a_ledger_without_commits_is_not_said_to_have_lost_them():
    """Seed 4841297. The job has not committed yet, or just did when all had answered. Who was told
    that nobody has a copy of a commit cleaned it, with the step that it had by then."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        assert "nothing to rebuild" in (await stage.rebuild("n0")).problem
        await launch.saved(1)

    play(story)


def test_a_rebuild_over_a_whole_ledger_is_refused():
    """Somebody runs it by mistake: nothing is written, and the job goes on."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1)
        await asyncio.sleep(2)
        before = stage.etcd.list(r.JobKeys(JOB).state).entries
        assert "nothing to rebuild" in (await stage.rebuild("n0")).problem
        assert stage.etcd.list(r.JobKeys(JOB).state).entries == before
        await launch.saved(2)

    play(story)


def test_a_compaction_under_broken_watches_is_only_a_new_listing():
    """The history is compacted to the newest revision again and again, and every node's connection
    breaks after it: the mirrors list anew and all saves commit."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        for step in range(1, 11):
            for name in stage.nodes:
                stage.etcd.unavailable(name, 0.5)
            attempt = await launch.begin(step)
            if stage.etcd.revision > stage.etcd.compacted:
                stage.etcd.compact(stage.etcd.revision)
            assert (await launch.outcome(*attempt)).verdict is COMMIT
            await asyncio.sleep(2)
        assert stage.events("note.follow_again"), "no watch was broken by the compaction"
        launch = await launch.again()
        assert await launch.restore() == 10

    play(story)


def test_a_new_leader_that_resets_all_leases_changes_nothing():
    """Leases begin anew every 3 s for a while: no session is lost; a node that died lives longer in
    the ledger, and goes in the end."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        stage.crash("n4")
        for step in range(1, 7):
            stage.etcd.expire_all_ttl_reset()
            await launch.saved(step)
            await asyncio.sleep(3)
        assert not stage.events("note.session_lost")
        assert "n4" in (await stage.agents["n0"].home.living()).members
        await asyncio.sleep(12)
        assert "n4" not in (await stage.agents["n0"].home.living()).members
        launch = await launch.again()
        assert await launch.restore() == 6

    play(story)


def test_a_minute_without_a_ledger_ends_the_saves_and_not_the_training():
    """etcd is away for 60 s for everybody while the job calls save every 5 s. No call of a trainer
    raises or takes longer than its bound; saves in flight end, in ABORT if they cannot commit; when
    etcd is back the next due saves commit, and a restart finds the newest."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1)
        for name in stage.nodes:
            stage.etcd.unavailable(name, 60.0)
        attempts, begun = [], now()
        for step in range(2, 14):
            saving = asyncio.create_task(launch.begin(step))
            attempts.append(saving)
            await asyncio.sleep(5)
        await asyncio.sleep(90)
        assert all(task.done() for task in attempts)
        outcomes = [await launch.outcome(*task.result()) for task in attempts]
        assert now() - begun < 200
        committed = [o.attempt.step for o in outcomes if o.verdict is COMMIT]
        assert stage.committed() == [1, *committed]
        await launch.saved(14, 15)
        launch = await launch.again()
        assert await launch.restore() == 15

    play(story)


def test_a_call_of_the_trainer_is_answered_within_its_bound_while_the_ledger_is_away():
    """save() without etcd: the agent says that the save is skipped after its short wait; it does
    not hold the training loop until etcd is back."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1)
        for name in stage.nodes:
            stage.etcd.unavailable(name, 60.0)
        for step in range(2, 6):
            begun = now()
            try:
                await launch.begin(step)
            except (AgentUnreachable, CheckpointError) as e:
                pytest.fail(f"save() raised {e!r}")
            assert now() - begun < 5, f"save({step}) took {now() - begun:.0f} s"
            await asyncio.sleep(1)

    play(story)


def test_a_node_cut_from_the_ledger_grants_nothing_and_gives_back_everything():
    """n3 hears its peers and not etcd, for longer than a lease: it refuses new shards, so saves go
    elsewhere, and serves what it holds."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1)
        stage.cluster.cut_from_ledger("n3")
        await asyncio.sleep(12)
        await launch.saved(2)
        assert "n3" not in stage.holders("n0", 2).values()
        peers, member = stage.agents["n1"].home.doors.peers, stage.agents["n3"].home.member
        reply = await peers.call(member.peers_address, w.HeldQuery(JOB), 2.0)
        assert {f.attempt.step for f in reply.files} == {1}, "it frees nothing without a read"
        stage.cluster.heal()
        await until(lambda: not [h for n, h in stage.held(step=1) if n == "n3"])
        await launch.saved(3)

    play(story, nodes=6)
