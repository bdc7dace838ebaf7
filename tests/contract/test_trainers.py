"""The port Trainers: requests of training processes, their files, and their deaths."""

import asyncio

import pytest

from p2pckpt import errors, wire
from p2pckpt.errors import AgentUnreachable
from p2pckpt.ports import Region

from .harness import fill, read


class Handler:
    """Answers pings with the caller's identity; what it is told is in `gone`."""

    def __init__(self, answer=None):
        self._answer = answer
        self.calls = []
        self.gone = asyncio.Queue()

    async def on_call(self, trainer, request):
        self.calls.append((trainer, request))
        if self._answer is not None:
            return await self._answer(trainer, request)
        return wire.Joined(generation=trainer.pid, node=request.reason)

    async def on_gone(self, trainer):
        await self.gone.put(trainer)


def ask(reason="n"):
    return wire.Skipped(reason=reason)


def test_a_trainer_is_answered_and_known_by_pid_and_start_time(trainers):
    async def story(rig):
        handler = Handler()
        await rig.door.serve(handler)
        a, b = await rig.launch(), await rig.launch()
        for trainer in (a, b, a):
            reply = await trainer.call(ask("hello"))
            assert reply == wire.Joined(generation=trainer.id.pid, node="hello")
        callers = [trainer for trainer, _ in handler.calls]
        assert callers[0] == callers[2] != callers[1]
        assert [c.pid for c in callers] == [a.id.pid, b.id.pid, a.id.pid]

    trainers.run(story)


@pytest.mark.parametrize("name", ["NoRoom", "StaleGenerationError", "UsageError", "NotJoined"])
def test_an_error_of_the_handler_is_raised_in_the_trainer(trainers, name):
    async def story(rig):
        async def fail(trainer, request):
            raise getattr(errors, name)("needs 5, has 3")

        await rig.door.serve(Handler(fail))
        trainer = await rig.launch()
        with pytest.raises(errors.CheckpointError, match="needs 5, has 3") as raised:
            await trainer.call(ask())
        assert type(raised.value) is getattr(errors, name)

    trainers.run(story)


def test_a_reply_that_says_failed_is_raised_too(trainers):
    async def story(rig):
        async def fail(trainer, request):
            return wire.Failed(error="SaveAborted", message="why")

        await rig.door.serve(Handler(fail))
        trainer = await rig.launch()
        with pytest.raises(errors.SaveAborted, match="why"):
            await trainer.call(ask())

    trainers.run(story)


def test_the_slot_named_in_a_reply_is_the_agents_own_memory(trainers):
    async def story(rig):
        async def slot(trainer, request):
            await rig.arena.reserve("slot-1", 8192)
            return wire.Slot(file="slot-1", capacity=8192)

        await rig.door.serve(Handler(slot))
        trainer = await rig.launch()
        reply = await trainer.call(ask())
        await trainer.write(reply.file, b"snapshot")
        assert read(rig.arena, "slot-1", 9) == b"snapshot\0"

    trainers.run(story)


def test_the_restore_file_named_in_a_reply_can_be_read(trainers):
    async def story(rig):
        async def file(trainer, request):
            return wire.RestoreFile(
                ballot=1, step=5, file="r-1", length=5, chunk_bytes=4096, table=b"", source="x"
            )

        await fill(rig.arena, "r-1", b"bytes")
        await rig.door.serve(Handler(file))
        trainer = await rig.launch()
        assert await trainer.read((await trainer.call(ask())).file, 5) == b"bytes"

    trainers.run(story)


def test_a_slot_that_was_removed_no_longer_reaches_the_file_of_that_name(trainers):
    """An old writer must not reach memory that was given to another."""

    async def story(rig):
        async def slot(trainer, request):
            await rig.arena.reserve("slot-1", 4096)
            return wire.Slot(file="slot-1", capacity=4096)

        await rig.door.serve(Handler(slot))
        old, new = await rig.launch(), await rig.launch()
        await old.call(ask())
        rig.arena.remove("slot-1")
        await new.call(ask())
        await new.write("slot-1", b"new")
        await old.write("slot-1", b"old")
        assert read(rig.arena, "slot-1", 3) == b"new"

    trainers.run(story)


def test_a_waiting_call_does_not_hold_up_other_trainers(trainers):
    async def story(rig):
        release = asyncio.Event()

        async def wait(trainer, request):
            if request.reason == "slow":
                await release.wait()
            return ask(request.reason)

        await rig.door.serve(Handler(wait))
        a, b = await rig.launch(), await rig.launch()
        slow = asyncio.create_task(a.call(ask("slow")))
        for _ in range(5):
            assert (await asyncio.wait_for(b.call(ask("fast")), 20)).reason == "fast"
        assert not slow.done()
        release.set()
        assert (await asyncio.wait_for(slow, 20)).reason == "slow"

    trainers.run(story)


def test_a_death_is_told_once_and_only_of_the_dead(trainers):
    async def story(rig):
        handler = Handler()
        await rig.door.serve(handler)
        a, b = await rig.launch(), await rig.launch()
        for trainer in (a, b):
            await trainer.call(ask())
        assert handler.gone.empty()
        await a.kill()
        assert await asyncio.wait_for(handler.gone.get(), 20) == handler.calls[0][0]
        await b.call(ask())
        assert handler.gone.empty()
        await b.kill()
        assert await asyncio.wait_for(handler.gone.get(), 20) == handler.calls[1][0]
        assert handler.gone.empty()

    trainers.run(story)


def test_a_death_is_told_when_what_the_dead_had_asked_is_ended(trainers):
    async def story(rig):
        arrived, ended = asyncio.Event(), asyncio.Event()

        async def wait(trainer, request):
            arrived.set()
            try:
                await asyncio.sleep(5)
            finally:
                ended.set()
            return ask()

        handler = Handler(wait)
        await rig.door.serve(handler)
        trainer = await rig.launch()
        call = asyncio.create_task(trainer.call(ask()))
        await asyncio.wait_for(arrived.wait(), 20)
        await trainer.kill()
        assert (await asyncio.wait_for(handler.gone.get(), 4)).pid == trainer.id.pid
        assert ended.is_set()
        call.cancel()
        await asyncio.wait((call,))

    trainers.run(story)


def test_after_close_no_agent_answers(trainers):
    async def story(rig):
        await rig.door.serve(Handler())
        trainer = await rig.launch()
        await trainer.call(ask())
        await rig.door.close()
        with pytest.raises(AgentUnreachable):
            await trainer.call(ask())

    trainers.run(story)


def test_the_board_that_comes_with_a_seat_is_memory_that_both_write(trainers):
    async def story(rig):
        async def seat(trainer, request):
            await rig.arena.reserve("board-1", 4096)
            return wire.Joined(generation=1, node="n", board="board-1")

        await rig.door.serve(Handler(seat))
        trainer = await rig.launch()
        reply = await trainer.call(ask())
        await trainer.write(reply.board, b"progress")
        assert read(rig.arena, "board-1", 8) == b"progress"
        rig.arena.view(Region("board-1", 0, 8))[:] = b"schedule"
        assert await trainer.read(reply.board, 8) == b"schedule"

    trainers.run(story)
