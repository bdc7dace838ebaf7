"""Stories in which bytes of two steps could mix: slow stages, a stopped encoder, a reader that is
slower than retention.

A slot belongs to one attempt until that one has an end and nobody reads it. So whatever is held is
of one step, and what finds no slot within its bound is skipped, and said to be.
"""

import asyncio

from s3_rig import RANKS
from s3_rig import play as play_s3
from stage import ABORT, COMMIT, JOB, content, now, play, until

from p2pckpt import wire as w
from p2pckpt.errors import RestoreFailed, SourcesAway
from p2pckpt.save.offload import rank_name
from simulations.world.checkers import content as content_s3

FOUR = ("n0", "n1", "n2", "n3")


def test_every_step_that_peers_hold_is_one_step_although_sending_is_slower_than_saving():
    """Links are so slow that four ranks that save at every step find no slot most of the time.
    Each of the 20 saves commits or is skipped, for all ranks alike and within its bound; all that
    is held comes back right. (B006)"""

    async def story(stage):
        launch = await stage.launch(*FOUR, keep_last=3)
        attempts = []
        for step in range(1, 21):
            begun = now()
            attempts.append(await launch.begin(step))
            assert now() - begun < 2 * stage.config.skip_wait_s + 0.5
            await asyncio.sleep(0.2)
        verdicts = [(await launch.outcome(*attempt)).verdict for attempt in attempts]
        assert verdicts.count(COMMIT) >= 3
        assert verdicts.count(ABORT) >= 3
        await until(lambda: len(stage.state().commits) == 3)
        held = (await launch.steps()).committed
        launch = await launch.again()
        for step in reversed(held):  # the other way round each would leave the next ones behind
            assert await launch.restore(step) == step

    play(story, bytes_per_s=10e3, floor_bytes_per_s=1000)


def test_every_step_that_the_store_holds_is_one_step_although_it_is_slower_than_saving():
    """The store takes longer for a step than training for several; what it has is whole. (B006)"""

    async def story(rig):
        rig.bucket.slow(1500)
        seen = 0
        for step in range(1, 21):
            await rig.train(step)
            for there in rig.offloaded():
                attempt = rig.attempt(there)
                for rank in range(RANKS):
                    name = rank_name(attempt, f"n{rank}", rank)
                    assert bytes(rig.bucket.objects[name]) == content_s3(rank, there)
                    seen += 1
        assert seen >= 2 * RANKS
        assert rig.notes("offload_dropped"), "the store was fast enough for all"

    play_s3(story)


def test_slots_are_kept_for_their_saves_while_the_encoder_stands_still():
    """n0 encodes nothing while five saves are issued. The fifth finds no slot and is skipped; the
    others commit when encoding goes on, each with the bytes of its own call. (B007)"""

    async def story(stage):
        launch = await stage.launch(*FOUR, keep_last=3)
        stopped = stage.stop_encoder("n0")
        attempts = [await launch.begin(step) for step in range(1, 6)]
        stage.doors_of("n0", workers=stopped.workers)
        *written, skipped = attempts
        assert "still in flight" in (await launch.outcome(*skipped)).reason
        assert stage.committed() == []
        for attempt in written:
            stopped.gates[content(0, attempt[1])].set()
            assert (await launch.outcome(*attempt)).verdict is COMMIT
        for step in (4, 3, 2):
            assert await launch.restore(step) == step

    play(story)


async def brought(stage, node, step):
    """Rank 0's bytes of a step as another node brings them; None if it says that it cannot."""
    asker = stage.nodes[node].trainer()
    try:
        async with asyncio.timeout(60):
            found = await asker.call(w.StepQuery(JOB, step))
            if isinstance(found, w.RefusedReply):
                assert f"step {step}" in found.reason
                return None
            file = await asker.call(w.ExportCall(found.commit.attempt, 0))
            return bytes(asker.view(file.file, file.length))
    except (SourcesAway, RestoreFailed):
        return None
    finally:
        asker.kill()


def test_a_reader_of_a_step_gets_that_step_or_is_told_that_it_is_not_held():
    """Two nodes ask for step 7 in a loop, while 7 to 12 are committed and 7 is retired: they get
    all of 7 or a refusal that names it, never a blend and never a wait without end. (B009)"""

    async def story(stage):
        launch = await stage.launch("n0", "n1", "n2")
        found = []

        async def ask(node):
            while 12 not in stage.committed() or found[-1] is not None:
                found.append(await brought(stage, node, 7))
                await asyncio.sleep(1.0)

        asking = [asyncio.create_task(ask(node)) for node in ("n3", "n4")]
        for step in range(6, 13):
            while (
                await launch.save(step)
            ).verdict is ABORT:  # while 7 is read its slot is not free
                pass
            await asyncio.sleep(1.0)
        await asyncio.gather(*asking)
        assert set(found) == {None, content(0, 7)}
        first = found.index(content(0, 7))
        assert None in found[:first], "asked before it was committed"
        await until(lambda: not stage.held(step=7))

    play(story, bytes_per_s=20e3, floor_bytes_per_s=1000)
