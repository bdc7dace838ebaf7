"""Crashes and pauses of fake nodes; and that one seed gives one history."""

import asyncio
import os
import subprocess
import sys

import pytest
from inproc_world import SIZE, WHOLE, content, member, now, play, pong, prepare, transfer, write

from p2pckpt import wire
from p2pckpt.errors import AgentUnreachable, AmbiguousAnswer, PeerUnreachable, Refused, UsageError
from p2pckpt.ports import Put, Txn, absent


def test_a_crashed_agent_is_dead_at_every_door():
    async def story(cluster, a, b, c):
        old, other = a.doors(), b.doors()
        await prepare(old, other)
        session = await old.membership.open(member(a), 10.0)
        await other.peers.serve(pong)
        grant = await old.transport.expect(WHOLE)
        watch = old.ledger.watch("p/", 1)
        waiting = asyncio.create_task(anext(watch))
        sending, receiving, _ = await transfer(old, other)
        await asyncio.sleep(0.05)
        a.crash(keep_memory=True)
        revision = cluster.etcd.revision
        for use in (
            lambda: old.ledger.get("p/a"),
            lambda: old.ledger.transact(write("p/a")),
            lambda: anext(old.ledger.watch("p/", 1)),
            lambda: old.membership.keep(session),
            lambda: old.peers.call(other.peers.address, wire.Ping(), 1.0),
            lambda: old.peers.serve(pong),
            lambda: old.transport.expect(WHOLE),
            lambda: grant.received(1.0),
            lambda: old.arena.reserve("g", 4096),
            lambda: old.arena.put_document("d", b""),
            lambda: old.arena.view(WHOLE),
            lambda: old.workers.run(lambda: 1, 10),
            lambda: old.notes("step", {}),
        ):
            with pytest.raises(asyncio.CancelledError):
                await use()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with pytest.raises(PeerUnreachable, match="broke off"):
            await receiving
        assert content(other) == {1, 2}  # stopped in the middle
        await asyncio.sleep(9.5)
        await other.ledger.transact(write("p/x"))
        assert not waiting.done() or waiting.cancelled() or waiting.exception()
        waiting.cancel()
        assert "a" in (await other.membership.living()).members  # until its lease runs out
        await asyncio.sleep(1)
        assert (await other.membership.living()).members == {}
        assert cluster.etcd.revision == revision + 2  # p/x and the end of the lease

    play(story)


def test_memory_outlives_the_agent_but_not_the_machine():
    async def story(cluster, a, b, c):
        await prepare(a.doors())
        store_id = a.store.store_id
        with pytest.raises(UsageError, match="runs already"):
            a.doors()
        a.crash(keep_memory=True)
        assert bytes(a.doors().arena.view(WHOLE)) == b"\x01" * SIZE
        trainer = a.trainer()
        a.crash(keep_memory=False)
        arena = a.doors().arena
        assert arena.used_bytes == 0
        assert arena.store_id == a.store.store_id != store_id
        assert not trainer.alive

    play(story)


def test_a_new_start_does_not_revive_the_old_one():
    async def story(cluster, a, b, c):
        old = a.doors()
        await old.peers.serve(pong)
        a.crash(keep_memory=True)
        new, other = a.doors(), b.doors()
        with pytest.raises(asyncio.CancelledError):
            await old.ledger.get("p/a")
        with pytest.raises(PeerUnreachable, match="nobody serves"):
            await other.peers.call(new.peers.address, wire.Ping(), 5.0)
        await new.peers.serve(pong)
        await other.peers.call(new.peers.address, wire.Ping(), 5.0)
        assert await new.ledger.get("p/a") is None

    play(story)


def test_nothing_is_written_into_the_memory_of_a_receiver_that_crashed():
    async def story(cluster, a, b, c):
        sender, receiver = a.doors(), b.doors()
        await prepare(sender, receiver)
        sending, receiving, _ = await transfer(sender, receiver)
        await asyncio.sleep(0.05)
        b.crash(keep_memory=True)
        found = bytes(b.store.files["f"])
        with pytest.raises(PeerUnreachable, match="connection lost"):
            await sending
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert set(found) == {1, 2}
        assert bytes(b.store.files["f"]) == found

    play(story)


def test_a_peer_that_dies_while_it_answers_is_unreachable_at_once():
    async def story(cluster, a, b, c):
        ended = []

        async def slow(caller, request):
            try:
                await asyncio.sleep(100)
            finally:
                ended.append(now())

        asker, other = a.doors(), b.doors()
        await other.peers.serve(slow)
        call = asyncio.create_task(asker.peers.call(other.peers.address, wire.Ping(), 50.0))
        await asyncio.sleep(1)
        b.crash(keep_memory=True)
        with pytest.raises(PeerUnreachable, match="connection lost"):
            await call
        assert ended == [1.0]
        assert now() < 1.01

    play(story)


def test_a_paused_agent_hangs_loses_its_lease_and_goes_on_with_old_news():
    """B082: a holder that was stopped must find out that its lease is gone."""

    async def story(cluster, a, b, c):
        doors, other = a.doors(), b.doors()
        session = await doors.membership.open(member(a), 10.0)
        asked = []

        async def answer(caller, request):
            asked.append(now())
            return wire.Pong(store_id="s", session="x")

        await doors.peers.serve(answer)
        begun = now()
        a.pause()
        keep = asyncio.create_task(doors.membership.keep(session))
        create = asyncio.create_task(
            doors.ledger.transact(Txn(compares=(absent("p/a"),), puts=(Put("p/a", b""),)))
        )
        with pytest.raises(PeerUnreachable, match="no answer within 2 s"):
            await other.peers.call(doors.peers.address, wire.Ping(), 2.0)
        await asyncio.sleep(20)
        assert (await other.membership.living()).members == {}
        await other.ledger.transact(write("p/a"))
        assert not keep.done()
        assert not create.done()
        assert asked == []
        a.resume()
        assert await keep is False
        assert await create is None
        assert asked[0] >= begun + 22  # the message was in its socket

    play(story)


def test_an_answer_that_comes_during_a_pause_is_heard_after_it():
    async def story(cluster, a, b, c):
        ledger = a.doors().ledger
        task = asyncio.create_task(ledger.transact(write("p/a")))
        await asyncio.sleep(0.0001)
        a.pause()
        await asyncio.sleep(1)
        assert cluster.etcd.get("p/a") is not None  # the request was on its way
        assert not task.done()
        a.resume()
        assert await task == cluster.etcd.revision

    play(story)


def test_a_batch_that_comes_during_a_pause_is_kept():
    async def story(cluster, a, b, c):
        doors, other = a.doors(), b.doors()
        watch = doors.ledger.watch("p/", 1)
        waiting = asyncio.create_task(anext(watch))
        await asyncio.sleep(1)
        a.pause()
        await other.ledger.transact(write("p/a"))
        await asyncio.sleep(1)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait((waiting,))
        a.resume()
        assert [c.key for c in await anext(watch)] == ["p/a"]

    play(story)


@pytest.mark.parametrize("paused", ["sender", "receiver"])
def test_payload_stops_while_a_side_is_paused_and_goes_on_after(paused):
    async def story(cluster, a, b, c):
        sender, receiver = a.doors(), b.doors()
        await prepare(sender, receiver)
        sending, receiving, _ = await transfer(sender, receiver, timeout_s=500.0)
        await asyncio.sleep(0.05)
        node = a if paused == "sender" else b
        node.pause()
        await asyncio.sleep(100)
        assert set(b.store.files["f"]) == {1, 2}
        node.resume()
        await asyncio.gather(sending, receiving)
        assert content(receiver) == {1}

    play(story)


def test_trainers_outlive_their_agent_and_keep_their_descriptors():
    async def story(cluster, a, b, c):
        class Handler:
            async def on_call(self, trainer, request):
                if isinstance(request, wire.Leave):
                    await asyncio.sleep(100)
                await doors.arena.reserve("slot", 4096)
                return wire.Slot(file="slot", capacity=4096)

            async def on_gone(self, trainer):
                gone.append(trainer)

        gone = []
        doors = a.doors()
        await doors.trainers.serve(Handler())
        trainer, other = a.trainer(), a.trainer()
        with pytest.raises(UsageError, match="not handed over"):
            trainer.view("slot", 1)
        await trainer.call(wire.Ping())
        waiting = asyncio.create_task(other.call(wire.Leave()))
        await asyncio.sleep(1)
        a.crash(keep_memory=True)
        with pytest.raises(AgentUnreachable, match="died during the call"):
            await waiting
        with pytest.raises(AgentUnreachable):
            await trainer.call(wire.Ping())
        trainer.view("slot", 4)[:] = b"late"
        assert bytes(a.store.files["slot"][:4]) == b"late"
        doors = a.doors()
        await doors.trainers.serve(Handler())
        assert doors.arena.adopt() == ()  # FILLING is not believed
        trainer.view("slot", 4)[:] = b"lost"  # nobody sees it
        await trainer.call(wire.Ping())
        assert bytes(trainer.view("slot", 4)) == bytes(4)
        trainer.kill()
        other.kill()
        await asyncio.sleep(1)
        assert gone == [trainer.id]  # the other one never called this start of the agent
        with pytest.raises(asyncio.CancelledError):
            trainer.view("slot", 4)

    play(story)


# -- one seed, one history ------------------------------------------------------------------------


async def busy(cluster, *nodes):
    """Everything at once, with faults."""
    doors = [node.doors() for node in nodes]
    await prepare(*doors)
    cluster.net.weather.loss = cluster.net.weather.duplicate = cluster.net.weather.flip = 0.1

    async def one(node, mine, peer):
        session = await mine.membership.open(member(node, mine.ids.new()), 10.0)
        await mine.peers.serve(pong)
        for i in range(40):
            await asyncio.sleep(mine.ids.uniform(0, 0.1))
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(mine.ledger.transact(write(f"p/{i}", b"", session)))
                    group.create_task(mine.peers.call(peer.peers.address, wire.Ping(), 0.5))
                    for task in (await transfer(mine, peer, timeout_s=0.5))[:2]:
                        group.create_task(asyncio.wait_for(task, 1))
            except* (PeerUnreachable, AmbiguousAnswer, Refused, TimeoutError):
                pass
            mine.notes("round", {"i": i})

    tasks = [
        asyncio.create_task(one(node, mine, peer))
        for node, mine, peer in zip(nodes, doors, (doors[2], doors[0], doors[0]), strict=True)
    ]
    await asyncio.sleep(0.2)
    cluster.partition("a", "c", one_way=True)
    cluster.etcd.ambiguous_next("b")
    await asyncio.sleep(0.2)
    tasks[1].cancel()
    nodes[1].crash(keep_memory=False)
    nodes[2].pause()
    await asyncio.sleep(5)
    nodes[2].resume()
    cluster.heal()
    await asyncio.gather(tasks[0], tasks[2])


def test_the_same_seed_gives_the_same_event_log_in_every_process():
    def elsewhere(seed, hash_seed):
        code = f"from test_inproc_nodes import busy, play; print(play(busy, {seed}).digest())"
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=os.path.dirname(__file__),
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()

    cluster = play(busy, seed=5)
    kinds = {what.split(".")[0] for _, _, what, _ in cluster.log.events}
    assert kinds >= {"ledger", "message", "transfer", "ram", "fault", "note", "start"}
    assert len(cluster.log.text().splitlines()) == len(cluster.log.events) > 200
    assert play(busy, seed=5).log.text() == cluster.log.text()
    assert {elsewhere(5, "1"), elsewhere(5, "2")} == {cluster.digest()}
    assert play(busy, seed=6).digest() != cluster.digest()
