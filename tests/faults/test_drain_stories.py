"""Stories of a node that is to go: what it holds for others is elsewhere before it goes.

Three ranks on n0 to n2, rs:2,1. `drained` is judged from the agents' tables: no share has a shard
that only the drained node holds.
"""

import asyncio
import json
from itertools import combinations

import pytest
from stage import COMMIT, play, until

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.errors import RestoreFailed
from p2pckpt.wire import unpack

RANKS = ("n0", "n1", "n2")
LATE_S = 60.0


async def ask(stage, node, draining=None, by="n0"):
    return await stage.nodes[by].trainer().call(w.DrainCall(node, draining))


async def drain(stage, node, by="n0", timeout_s=LATE_S):
    """Drain a node; what it says when it is done or stuck."""
    told = await ask(stage, node, True, by)
    for _ in range(int(timeout_s / 0.5)):
        if told.done or told.stuck:
            return told
        await asyncio.sleep(0.5)
        told = await ask(stage, node, None, by)
    raise AssertionError(told)


def only_on(stage, node, step):
    """Shards of a step that nobody but this node has."""
    held = {}
    for name, h in stage.held(r.FileKind.SHARD, step):
        held.setdefault((h.owner, h.part), set()).add(name)
    return [piece for piece, names in held.items() if names == {node}]


def flags(stage):
    """Who is being drained, by the ledger."""
    entries = stage.etcd.list(r.MEMBERS).entries
    members = [unpack(entry.value, r.Member) for entry in entries]
    return {m.node for m in members if m.draining}


async def gauge(stage, by):
    found = (await stage.status(by))["redundancy"]
    return found["survivable_node_losses"]


@pytest.mark.parametrize("node", ["n0", "n1", "n4"])
def test_a_node_is_drained_while_saves_go_on_and_its_loss_changes_nothing(node):
    """Saves every second while it is drained, on it as well; then it is lost: the gauge says the
    same before and after, nothing is repaired, and the step comes back from peers."""

    async def story(stage):
        launch = await stage.launch(*RANKS)
        await launch.saved(1)
        by = "n2"

        async def train():
            for step in range(2, 9):
                assert (await launch.save(step)).verdict is COMMIT
                await asyncio.sleep(1)

        training = asyncio.create_task(train())
        told = await drain(stage, node, by)
        await training
        told = await drain(stage, node, by)
        assert told.done, told
        assert not told.left
        assert flags(stage) == {node}
        assert not [h for n, h in stage.held(r.FileKind.SHARD, 8) if n == node]
        (facts,) = json.loads(told.jobs).values()
        before = await gauge(stage, by)
        assert (facts["step"], facts["survivable_node_losses"]) == (8, before)
        assert before == (1 if node in RANKS else 2)
        stage.crash(node)
        assert await gauge(stage, by) == before
        await asyncio.sleep(11)  # the lease is over, the grace is not
        assert await gauge(stage, by) == before
        assert not stage.events("note.repaired")
        places = [n if n != node else "n5" for n in RANKS]
        launch = await launch.again(*places)
        assert await launch.restore() == 8
        assert (await launch.save(9)).verdict is COMMIT
        if node not in RANKS:
            assert not stage.events("note.repaired")

    play(story, nodes=7)


def without(node, losses):
    """Drain a node, lose it and these; what the drain had said, and whether the step comes back."""
    told = []

    async def story(stage):
        launch = await stage.launch(*RANKS)
        await launch.saved(1)
        launch.kill()
        (facts,) = json.loads((await drain(stage, node, "n5")).jobs).values()
        told.append(facts["survivable_node_losses"])
        stage.crash(node, *losses)
        for i in range(1 + len(losses)):
            stage.add(f"m{i}")
        await asyncio.sleep(0.5)
        launch = await stage.launch(*sorted(stage.agents)[:3])
        try:
            told.append(await launch.restore() == 1)
        except RestoreFailed:
            told.append(False)

    play(story, nodes=6, lost_grace_s=30.0, decide_wait_s=2.0, join_timeout_s=120.0)
    return told


@pytest.mark.parametrize("node", ["n1", "n3"])
def test_what_is_survived_without_the_node_is_exact(node):
    """Brute force: the drained node is lost together with every set of so many others as the drain
    said, one world for each, and the step comes back; with one more some set kills it."""
    others = [f"n{i}" for i in range(6) if f"n{i}" != node]
    n, _ = without(node, ())
    assert n == (1 if node in RANKS else 2)
    assert all(without(node, losses)[1] for losses in combinations(others, n))
    assert any(not without(node, losses)[1] for losses in combinations(others, n + 1))


def test_what_was_held_before_is_moved_and_counted():
    """At rest, with two kept steps: each shard that the node has goes to one other node."""

    async def story(stage):
        launch = await stage.launch(*RANKS, keep_last=2)
        await launch.saved(1, 2)
        launch.kill()
        held = [h for n, h in stage.held(r.FileKind.SHARD) if n == "n3"]
        assert {h.attempt.step for h in held} == {1, 2}
        told = await drain(stage, "n3")
        assert told.done
        assert told.moved == len(held)
        assert told.moved_bytes == sum(h.length for h in held)
        assert not only_on(stage, "n3", 1) + only_on(stage, "n3", 2)
        for h in held:
            copies = [
                n
                for n, o in stage.held(r.FileKind.SHARD, h.attempt.step)
                if (o.owner, o.part) == (h.owner, h.part)
            ]
            assert len(copies) == 2
            assert h.owner not in copies
        stage.crash("n3")
        await asyncio.sleep(LATE_S)
        assert not stage.events("note.repaired")
        assert await gauge(stage, "n0") == 2

    play(story, nodes=6)


def test_with_too_few_hosts_it_says_what_is_missing_until_a_node_joins():
    """Four nodes are just enough: what n3 holds has no other place. Saves commit, degraded; a node
    joins, and the drain ends by itself."""

    async def story(stage):
        launch = await stage.launch(*RANKS)
        await launch.saved(1)
        told = await drain(stage, "n3")
        assert told.stuck
        assert not told.done
        assert told.left == len(told.lacking) == len(only_on(stage, "n3", 1)) > 0
        assert "is only here" in told.lacking[0]
        (facts,) = json.loads(told.jobs).values()
        assert facts["survivable_node_losses"] == 1 < facts["full"]
        outcome = await launch.save(2)
        assert outcome.verdict is COMMIT
        assert outcome.degraded
        assert not [h for n, h in stage.held(r.FileKind.SHARD, 2) if n == "n3"]
        await launch.saved(3)
        stage.add("n9")
        await launch.saved(4)
        await asyncio.sleep(5)
        assert (await ask(stage, "n3")).done
        stage.crash("n3")
        assert await gauge(stage, "n0") == 2

    play(story, nodes=4)


def test_a_drain_that_is_cancelled_leaves_the_node_as_it_was():
    async def story(stage):
        launch = await stage.launch(*RANKS)
        await launch.saved(1)
        await ask(stage, "n3", True)
        await until(lambda: flags(stage) == {"n3"})
        told = await ask(stage, "n3", False)
        assert not told.draining
        await until(lambda: flags(stage) == set())
        assert (await ask(stage, "n3")).done
        await asyncio.sleep(stage.config.keepalive_s)
        await launch.saved(2)
        assert [h for n, h in stage.held(r.FileKind.SHARD, 2) if n == "n3"]
        assert await gauge(stage, "n0") == 2

    play(story, nodes=4)


def test_a_node_that_is_lost_while_it_is_drained_is_repaired():
    """At the first byte that leaves it: what it still had alone is coded anew elsewhere."""

    async def story(stage):
        launch = await stage.launch(*RANKS)
        await launch.saved(1)
        launch.kill()
        await asyncio.sleep(1)
        stage.at("transfer.begin", lambda: stage.crash("n3"), who="n3")
        await ask(stage, "n3", True)
        await until(lambda: "n3" not in stage.agents, LATE_S)
        await until(lambda: stage.events("note.repaired"), LATE_S)
        await asyncio.sleep(LATE_S)
        assert await gauge(stage, "n0") == 2
        launch = await launch.again("n4", "n1", "n5")
        assert await launch.restore() == 1

    play(story, nodes=6)


def test_the_flag_outlives_the_lease_but_not_the_agent():
    """Cut off for longer than a lease the node says it again in its next session; its next agent
    knows nothing of it."""

    async def story(stage):
        launch = await stage.launch(*RANKS)
        await launch.saved(1)
        assert (await drain(stage, "n3")).done
        stage.cut_off("n3")
        await asyncio.sleep(20)
        assert flags(stage) == set()
        stage.cluster.heal()
        await until(lambda: flags(stage) == {"n3"}, LATE_S)
        assert (await drain(stage, "n3")).done
        stage.restart("n3")
        await until(lambda: flags(stage) == set(), LATE_S)
        assert not (await ask(stage, "n3")).draining

    play(story, nodes=6)


def test_a_drain_asked_for_while_a_session_opens_is_not_forgotten():
    """Else it would say that it is done, and nobody would know of the drain."""

    async def story(stage):
        launch = await stage.launch(*RANKS)
        await launch.saved(1)
        membership = stage.agents["n3"].home.doors.membership
        opens = membership.open

        async def late(member, ttl_s):
            session = await opens(member, ttl_s)
            assert (await ask(stage, "n3", True, "n3")).draining
            return session

        membership.open = late
        stage.cut_off("n3")
        await asyncio.sleep(20)
        stage.cluster.heal()
        await until(lambda: flags(stage) == {"n3"}, LATE_S)
        assert (await ask(stage, "n3")).draining
        assert (await drain(stage, "n3")).done
        assert not only_on(stage, "n3", 1)

    play(story, nodes=6)


def test_a_cancel_is_done_in_the_next_session_as_well():
    async def story(stage):
        await (await stage.launch(*RANKS)).saved(1)
        await ask(stage, "n3", True)
        await until(lambda: flags(stage) == {"n3"})
        await ask(stage, "n3", False)
        await until(lambda: flags(stage) == set())
        stage.cut_off("n3")
        await asyncio.sleep(20)
        stage.cluster.heal()
        await asyncio.sleep(LATE_S)
        await ask(stage, "n3", False)
        await asyncio.sleep(5)
        assert (await ask(stage, "n3")).done

    play(story, nodes=6)


def test_a_cancel_while_the_beginning_is_told_is_told_as_well():
    """Else the node would be shunned for ever, and nobody asks after a drain that was cancelled."""

    async def story(stage):
        await (await stage.launch(*RANKS)).saved(1)
        cancels = []

        def cancel(name, txn):
            if name == "n3" and not cancels and any(p.key == r.MEMBERS + name for p in txn.puts):
                cancels.append(asyncio.create_task(ask(stage, "n3", False, "n3")))
                cancels.append(asyncio.Event())
                asyncio.get_running_loop().call_later(0.2, cancels[1].set)
                return cancels[1]
            return None

        stage.before_txn.append(cancel)
        await ask(stage, "n3", True, "n3")
        await until(lambda: cancels and cancels[0].done() and cancels[1].is_set())
        await asyncio.sleep(LATE_S)
        assert flags(stage) == set()

    play(story, nodes=5)


def test_a_moved_shard_that_is_lost_again_is_moved_again():
    """Its new holder comes back at once, in the same store, without the file."""

    async def story(stage):
        launch = await stage.launch(*RANKS)
        await launch.saved(1)
        launch.kill()
        before = stage.held(r.FileKind.SHARD, 1)
        assert (await drain(stage, "n3")).done
        node, held = next(x for x in stage.held(r.FileKind.SHARD, 1) if x not in before)
        del stage.nodes[node].store.files[held.file]
        stage.restart(node)
        await asyncio.sleep(2)
        assert only_on(stage, "n3", 1)
        await asyncio.sleep(LATE_S)
        assert (await ask(stage, "n3")).done
        assert not only_on(stage, "n3", 1)

    play(story, nodes=7)


def test_a_look_for_a_drain_that_was_cancelled_says_nothing_of_the_next_one():
    """Peers answer late; meanwhile the drain is cancelled, in a new session the node takes shards,
    and it is drained again."""

    async def story(stage):
        launch = await stage.launch(*RANKS)
        await launch.saved(1)
        peers, gates = stage.agents["n3"].home.doors.peers, []

        class Late:
            def __getattr__(self, name):
                return getattr(peers, name)

            async def call(self, address, request, timeout_s):
                if isinstance(request, w.HeldQuery):
                    await gates[-1].wait()
                return await peers.call(address, request, timeout_s)

        stage.doors_of("n3", peers=Late())
        gates.append(asyncio.Event())
        await ask(stage, "n3", True, "n3")
        await until(lambda: flags(stage) == {"n3"})
        await asyncio.sleep(1)
        await ask(stage, "n3", False, "n3")
        stage.cut_off("n3")
        await asyncio.sleep(20)
        stage.cluster.heal()
        await asyncio.sleep(20)
        assert flags(stage) == set()
        await launch.saved(2)
        assert only_on(stage, "n3", 2)
        await ask(stage, "n3", True, "n3")
        gates.append(asyncio.Event())
        gates[0].set()
        await until(lambda: flags(stage) == {"n3"})
        telling = asyncio.create_task(ask(stage, "n3", None, "n3"))
        await asyncio.sleep(0.1)
        gates[1].set()
        assert not (await telling).done
        assert (await drain(stage, "n3", "n3")).done
        assert not only_on(stage, "n3", 2)

    play(story, nodes=5)


def test_an_offer_that_waits_for_its_file_is_refused_when_the_drain_begins():
    """Else a shard comes after it was said that all is done."""

    async def story(stage):
        launch = await stage.launch(*RANKS)
        await launch.saved(1)
        serving, gate, waits = stage.agents["n3"].serving, asyncio.Event(), []
        prepare = serving._prepare

        async def slow(offer):
            waits.append(offer)
            await gate.wait()
            return await prepare(offer)

        serving._prepare = slow
        saving = asyncio.create_task(launch.save(2))
        await until(lambda: waits)
        assert (await drain(stage, "n3")).done
        gate.set()
        assert (await saving).verdict is COMMIT
        assert not [h for n, h in stage.held(r.FileKind.SHARD, 2) if n == "n3"]

    play(story, nodes=6)


def test_two_nodes_at_once_do_not_hand_each_other_their_shards():
    async def story(stage):
        launch = await stage.launch(*RANKS)
        await launch.saved(1)
        await ask(stage, "n3", True)
        await ask(stage, "n4", True)
        for node in ("n3", "n4"):
            assert (await drain(stage, node)).done
        assert not [x for x in stage.held(r.FileKind.SHARD, 1) if only_on(stage, x[0], 1) and x[0]
                    in ("n3", "n4")]  # fmt: skip
        stage.crash("n3", "n4")
        assert await gauge(stage, "n0") == 2

    play(story, nodes=8)


def test_a_node_that_is_not_there_is_named():
    async def story(stage):
        await asyncio.sleep(1)
        told = await ask(stage, "n77", True)
        assert isinstance(told, w.RefusedReply)
        assert "n77" in told.reason
        assert "n0, n1" in told.reason

    play(story, nodes=3)
