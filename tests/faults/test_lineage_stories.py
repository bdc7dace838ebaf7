"""Stories of a job that goes back: old higher steps never come back, foreign ones never come in."""

import asyncio

from stage import ABORT, COMMIT, JOB, play, until

from p2pckpt import records as r

FOUR = ("n0", "n1", "n2", "n3")


def test_a_roll_back_from_5000_to_100_and_a_crash_give_300():
    """(B044) Run to 5000 with keep_last=2, of which 100 is retained by going back to it at once;
    save 200 and 300; crash. 300 comes back. What was just written is never what is removed, and the
    old higher steps go when the new lineage has two steps of its own."""

    async def story(stage):
        launch = await stage.launch(*FOUR, keep_last=2)
        await launch.saved(100, 5000)
        assert (await launch.steps()).committed == (100, 5000)
        assert await launch.restore(100) == 100
        await launch.saved(200)
        assert {step for _, step in stage.state().commits} >= {100, 200, 5000}
        assert (await launch.steps()).committed == (200,)
        await launch.saved(300)
        await until(lambda: {step for _, step in stage.state().commits} == {200, 300})
        await asyncio.sleep(2)
        assert not stage.held(step=5000)
        assert len(stage.held(r.FileKind.SLOT, 300)) == 4
        launch = await launch.again()
        assert await launch.restore() == 300
        await launch.saved(400, 500, 5000)
        launch = await launch.again()
        assert await launch.restore() == 5000

    play(story)


def test_a_crash_right_after_a_roll_back_stays_where_it_went_back_to():
    """Back at 100 and dead before the next save: the newest is 100 still, not 5000."""

    async def story(stage):
        launch = await stage.launch(*FOUR, keep_last=2)
        await launch.saved(100, 5000)
        assert await launch.restore(100) == 100
        launch = await launch.again()
        assert await launch.restore() == 100
        await launch.saved(101)
        launch = await launch.again()
        assert await launch.restore() == 101

    play(story)


def test_with_many_steps_kept_a_roll_back_does_not_stop_the_saves():
    """keep_last=3: the old lineage's three steps stay until the new one has three of its own; its
    slots do not stand in the way of the new saves."""

    async def story(stage):
        launch = await stage.launch(*FOUR, keep_last=3)
        await launch.saved(10, 20, 30)
        assert await launch.restore(10) == 10
        for step in (11, 12, 13, 14, 15):
            await launch.saved(step)
            await asyncio.sleep(3)
        assert {step for _, step in stage.state().commits} == {13, 14, 15}

    play(story)


def test_every_roll_back_in_a_row_is_a_lineage_of_its_own():
    """Ten times: two steps on, one step back, crash. The newest is always the one gone back to."""

    async def story(stage):
        launch = await stage.launch(*FOUR, keep_last=2)
        for base in range(0, 100, 10):
            await launch.saved(base + 5, base + 7)
            assert await launch.restore(base + 5) == base + 5
            launch = await launch.again()
            assert await launch.restore() == base + 5
        assert len({c.lineage for c in stage.state().closed.values() if c.lineage}) > 1

    play(story)


def test_two_jobs_of_one_name_on_the_same_hosts_never_meet():
    """Two users' jobs have the same name, ranks and steps and other values; each restores its own,
    also after both have crashed; a third user's fresh run of that name has nothing. (B041)"""

    async def story(stage):
        other = r.Job(owner_uid=2000, name="train").key
        mine, theirs = await asyncio.gather(
            stage.launch(*FOUR, token="same"), stage.launch(*FOUR, job=other, token="same")
        )
        for step in (1, 2):
            outcomes = await asyncio.gather(mine.save(step), theirs.save(step))
            assert [x.verdict for x in outcomes] == [COMMIT, COMMIT], outcomes
        stage.crash("n1")
        stage.add("m1")
        await asyncio.sleep(1)
        names = ("n0", "m1", "n2", "n3")
        mine, theirs = await asyncio.gather(mine.again(*names), theirs.again(*names))
        assert await asyncio.gather(mine.restore(), theirs.restore()) == [2, 2]
        third = await stage.launch(*FOUR[2:], job=r.Job(owner_uid=3000, name="train").key)
        assert await third.restore() is None
        await mine.saved(3)
        assert (stage.committed(other), stage.committed(JOB)) == ([1, 2], [1, 2, 3])

    play(story)


def test_a_lineage_without_a_commit_hides_nothing():
    """A launch saves before any restore, which opens a new lineage, and dies before that commits;
    the next one finds the older lineage's step."""

    async def story(stage):
        launch = await stage.launch(*FOUR)
        await launch.saved(7)
        launch = await launch.again()
        stage.fill(*stage.nodes)
        outcome = await launch.save(1)
        assert outcome.verdict is ABORT
        lineages = {c.lineage for c in stage.state().closed.values()}
        for node in stage.nodes.values():
            node.store.files.pop("ballast")
        launch = await launch.again()
        assert await launch.restore() == 7
        assert (await launch.steps()).committed == (7,)
        await launch.saved(8)
        assert len(lineages) >= 1
        launch = await launch.again()
        assert await launch.restore() == 8

    play(story)
