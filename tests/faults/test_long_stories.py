"""What long lives cost: after many saves and replaced nodes an agent remembers no more than before.

The stories count everything that an agent's own objects refer to, so that a table which somebody
adds and nobody empties is found without being named here.
"""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Mapping, Set

import pytest
from msgspec import Struct
from stage import ABORT, COMMIT, JOB, content, play, until

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent import reading, saving
from p2pckpt.errors import SaveAborted
from p2pckpt.ports import Doors

FOUR = ("n0", "n1", "n2", "n3")


def tables(agent):
    """Entries of every table that an agent's objects hold, by the way to it; entries of tables in
    tables are added up. The doors are not gone through: behind them is the stage."""
    found, seen, ways = {}, {id(agent.home.doors)}, deque([("", agent)])
    while ways:
        way, thing = ways.popleft()
        behind = isinstance(thing, Doors) or type(thing).__module__.startswith("p2pckpt.backends.")
        if id(thing) in seen or behind:
            continue
        seen.add(id(thing))
        if isinstance(thing, Mapping | Set | list | tuple | deque):
            found[way] = found.get(way, 0) + len(thing)
            inside = thing.values() if isinstance(thing, Mapping) else thing
            ways += [(f"{way}[]", x) for x in inside]
        elif isinstance(thing, Struct):
            continue  # a record: it is of a size that the protocol bounds
        elif type(thing).__module__.startswith("p2pckpt."):
            if dataclasses.is_dataclass(thing):
                names = [f.name for f in dataclasses.fields(thing)]
            else:
                names = list(vars(thing))
            ways += [(f"{way}.{name}", getattr(thing, name)) for name in names]
    return found


async def measured(stage, launch, first, saves):
    """Save; at every agent the largest that each table was, and the most tasks that lived."""
    most, tasks = {}, 0
    for step in range(first, first + saves):
        await launch.saved(step)
        await asyncio.sleep(3)
        tasks = max(tasks, len(asyncio.all_tasks()))
        for name, agent in stage.agents.items():
            for way, size in tables(agent).items():
                most[name, way] = max(size, most.get((name, way), 0))
    return most, tasks


def test_what_an_agent_remembers_does_not_grow_with_saves_and_lost_nodes(monkeypatch):
    """Three times: a node is lost with all it holds and another takes its place, the job starts
    again, restores, and saves on. What n0 remembers and the number of tasks are afterwards what
    they were before, but for what a single save more or less in flight makes."""
    monkeypatch.setattr(saving, "REMEMBERED", 8)
    monkeypatch.setattr(reading, "REMEMBERED", 1)

    async def story(stage):
        launch, names = await stage.launch(*FOUR, keep_last=1), list(FOUR)
        stage.add("spare0")
        await launch.saved(*range(100, 120))
        seen = []
        for number in range(4):
            step = 200 + 100 * number
            launch.kill()
            lost = [names[-1], f"spare{number}"]
            stage.crash(*lost)
            names[-1] = f"m{number}"
            stage.add(names[-1])
            stage.add(f"spare{number + 1}")
            await asyncio.sleep(20)
            launch = await launch.again(*names)
            assert await launch.restore() == step - 100 + (19 if number == 0 else 14)
            seen.append(await measured(stage, launch, step, 15))
        (before, tasks), (after, tasks_after) = seen[1], seen[3]
        grown = {
            way: (before.get(way, 0), size)
            for way, size in after.items()
            if way[0] == "n0" and size > before.get(way, 0) + 1
        }
        assert not grown
        assert len([way for way in after if way[0] == "n0"]) > 20  # it did look
        assert tasks_after <= tasks + 3

    play(story, nodes=4, limit_s=36000.0)


# -- a trainer whose patience ended before the agent answered --------------------------------------


def slowly(agent):
    """From now on a slot is there only when `made` is set; (waiting, made)."""
    take, waiting, made = agent.home.holdings.take, asyncio.Event(), asyncio.Event()

    async def slow(want, writer=None):
        if want.kind is r.FileKind.SLOT:
            waiting.set()
            await made.wait()
        return await take(want, writer)

    agent.home.holdings.take = slow
    return waiting, made


async def impatient(stage, rank, ordinal, step, heard_first):
    """Ask for a slot, give up before the answer, as the hook does, and say so, which is heard
    before or after the slot was taken."""
    holdings = stage.agents[rank.node].home.holdings
    waiting, made = slowly(stage.agents[rank.node])
    ask = w.OpenSlot(ordinal, step, len(content(rank.rank, step)))
    asking = asyncio.create_task(rank.call(ask))
    await waiting.wait()
    asking.cancel()
    await asyncio.wait([asking])
    if not heard_first:
        made.set()
        await asyncio.sleep(1)
    await rank.call(w.SlotFailed(ordinal, step, "no reply in time"))
    made.set()
    del holdings.take


@pytest.mark.parametrize("heard_first", [False, True])
def test_a_slot_that_came_too_late_is_used_again(heard_first):
    """n1's rank gives up waiting for its slot, five times in a row; the slot is taken all the same,
    by an agent that did not know. With one retained version a rank has two slots, so that the
    sixth save commits only if none of those that nobody wrote is kept."""

    async def story(stage):
        launch = await stage.launch("n0", "n1", "n2")
        await launch.saved(1)
        late = launch.ranks[1]
        for step in range(2, 7):
            ordinal, launch.ordinal = launch.ordinal, launch.ordinal + 1
            await impatient(stage, late, ordinal, step, heard_first)
            for rank in (launch.ranks[0], launch.ranks[2]):
                await rank.write(ordinal, step)
            assert (await launch.outcome(ordinal, step)).verdict is ABORT
            await asyncio.sleep(3)
        slots = [
            held
            for held in stage.agents["n1"].home.holdings
            if (held.job, held.kind) == (JOB, r.FileKind.SLOT) and held.attempt is not None
        ]
        assert len(slots) <= 2
        outcome = await launch.save(7)
        assert outcome.verdict is COMMIT, outcome

    play(story)


def test_a_slot_that_was_made_while_its_attempt_ended_is_freed():
    """The ABORT of another rank stands, and this node has freed what it held, when the file for the
    slot is there at last: it is freed as well, and the next save commits."""

    async def story(stage):
        launch = await stage.launch("n0", "n1", "n2")
        await launch.saved(1)
        agent = stage.agents["n1"]
        waiting, made = slowly(agent)
        ordinal, launch.ordinal = launch.ordinal, launch.ordinal + 1
        asking = asyncio.create_task(launch.ranks[1].write(ordinal, 2))
        await waiting.wait()
        await launch.ranks[0].call(w.SlotFailed(ordinal, 2, "out of order"))
        assert (await launch.ranks[0].outcome(ordinal, 2)).verdict is ABORT
        await asyncio.sleep(5)
        made.set()
        await asking
        del agent.home.holdings.take
        await asyncio.sleep(5)
        assert not [h for h in agent.home.holdings if h.attempt and h.attempt.step == 2]
        await launch.saved(3, 4)

    play(story)


# -- writers and owners of before a restart --------------------------------------------------------


def test_a_file_that_a_rank_still_writes_is_not_used_after_its_agent_restarted():
    """n1's agent dies while its rank writes and the next one does not know by whom: it uses no file
    of which the record says FILLING. The rank writes on, into a file that is nobody's any more; its
    save is aborted, and what is restored of the next ones is right."""

    async def story(stage):
        launch = await stage.launch("n0", "n1", "n2")
        await launch.saved(1)
        rank, image = launch.ranks[1], content(1, 2)
        ordinal, launch.ordinal = launch.ordinal, launch.ordinal + 1
        slot = await rank.call(w.OpenSlot(ordinal, 2, len(image)))
        memory = rank.trainer.view(slot.file, len(image))
        assert slot.file in stage.nodes["n1"].store.files
        stage.restart("n1")
        await until(lambda: stage.agents["n1"].home.session is not None)
        assert slot.file not in stage.nodes["n1"].store.files
        for other in (launch.ranks[0], launch.ranks[2]):
            await other.write(ordinal, 2)
        with pytest.raises(SaveAborted):
            await rank.call(w.SlotDone(ordinal, 2, len(image), '{"step":2}'))
        assert (await launch.outcome(ordinal, 2)).verdict is ABORT
        ordinal, step = await launch.begin(3)
        memory[:] = bytes(len(memory))  # the last of it
        assert (await launch.outcome(ordinal, step)).verdict is COMMIT
        launch = await launch.again()
        assert await launch.restore() == 3

    play(story)


def test_an_offer_of_a_session_that_ended_keeps_nothing():
    """An offer of n1's agent arrives at n2 when that agent has died and another session has begun.
    No holder looks at sessions: the next agent of the store ends the attempt by an ABORT, with
    which the file goes back; the saves after it commit."""

    async def story(stage):
        launch = await stage.launch("n0", "n1", "n2")
        await launch.saved(1)
        ordinal, launch.ordinal = launch.ordinal, launch.ordinal + 1
        image = content(1, 2)
        await launch.ranks[1].call(w.OpenSlot(ordinal, 2, len(image)))
        agent = stage.agents["n1"]
        (own,) = (a for a in agent.jobs[JOB].saving.open.values() if a.attempt.ordinal == ordinal)
        late = w.PutOffer(own.attempt, "n1", 0, (5000,), 100, "0" * 64)
        stage.restart("n1")
        n2 = stage.agents["n2"]
        peers = stage.agents["n1"].home.doors.peers
        reply = await peers.call(n2.home.doors.peers.address, late, 5.0)
        assert isinstance(reply, w.PutGrant | w.RefusedReply)
        await launch.ranks[1].call(w.SlotFailed(ordinal, 2, "the agent restarted"))
        assert (await launch.outcome(ordinal, 2)).verdict is ABORT
        await asyncio.sleep(5)
        assert not n2.serving.incoming
        assert not n2.home.holdings.of_attempt(own.attempt)
        await launch.saved(3, 4)

    play(story)
