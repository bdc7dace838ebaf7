"""Stories of bytes that rot where they lie: found within the period, mended before anybody asks.

Three ranks on n0 to n2, rs:2,1, nobody trains and nobody restores. What is right is judged from the
stores themselves: every file against the manifest beside it, every manifest against its digest.
"""

import asyncio
import json
from random import Random

import pytest
from stage import COMMIT, play, until
from test_flips import flipped

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.rereading import pieces_of
from p2pckpt.restore.verify import bad_chunks, open_manifest

RANKS = ("n0", "n1", "n2")
PERIOD_S = 60.0
LATE_S = 60.0
"""What was found is mended within this: a look, a message, a repair."""


def wrong(stage, step):
    """Nodes and files whose bytes or manifest are not right."""
    out = []
    for node, held in stage.held(step=step):
        store = stage.nodes[node].store
        try:
            packed = store.documents[f"manifest-{held.manifest_digest}"]
            manifest = open_manifest(packed, held.manifest_digest)
        except Exception as e:
            out.append((node, held.kind, held.part, str(e)))
            continue
        for rank, shard, offset, length in pieces_of(manifest, held.kind, held.part):
            piece = memoryview(store.files[held.file])[offset : offset + length]
            if bad := bad_chunks(manifest, rank, shard, piece):
                out.append((node, held.kind, held.part, bad))
    return out


def whole(stage, step):
    """Every slot, and three shards of every share, each once and on nodes without the copy."""
    slots = {held.part: node for node, held in stage.held(r.FileKind.SLOT, step)}
    shards = {(h.owner, h.part): n for n, h in stage.held(r.FileKind.SHARD, step)}
    apart = all(slots.get(RANKS.index(owner)) != node for (owner, _), node in shards.items())
    return len(slots) == 3 and len(shards) == 9 and apart


def places(stage, step):
    """Which node has which file of a step."""
    return sorted((n, h.kind, h.owner, h.part) for n, h in stage.held(step=step))


async def scrub(stage):
    """What all nodes tell of their scrubbers, added up."""
    told = []
    for name in sorted(stage.agents):
        reply = await stage.nodes[name].trainer().call(w.StatusQuery())
        told.append(json.loads(reply.document)["scrub"])
    return {key: sum(t[key] or 0 for t in told) for key in told[0]}


async def one_step(stage):
    launch = await stage.launch(*RANKS)
    await launch.saved(1)
    launch.kill()
    await asyncio.sleep(1)
    assert whole(stage, 1)
    assert not wrong(stage, 1)
    return launch


def flip_file(stage, rng, kind, parts):
    node, held = rng.choice([x for x in stage.held(kind, 1) if x[1].part in parts])
    stage.nodes[node].store.flip(held.file, rng.randrange(held.length), rng.randrange(8))


def flip_manifest(stage, rng):
    node, held = rng.choice(stage.held(step=1))
    documents, name = stage.nodes[node].store.documents, f"manifest-{held.manifest_digest}"
    documents[name] = flipped(documents[name], rng)


def drop_manifest(stage, rng):
    node, held = rng.choice(stage.held(step=1))
    del stage.nodes[node].store.documents[f"manifest-{held.manifest_digest}"]


PLACES = {
    "data shard": lambda stage, rng: flip_file(stage, rng, r.FileKind.SHARD, (0, 1)),
    "parity shard": lambda stage, rng: flip_file(stage, rng, r.FileKind.SHARD, (2,)),
    "own copy": lambda stage, rng: flip_file(stage, rng, r.FileKind.SLOT, (0, 1, 2)),
    "manifest": flip_manifest,
    "manifest gone": drop_manifest,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_is_found_within_the_period_and_mended(place, seed):
    """One bit of a step at rest: found in a period, counted once, and all is full and right."""

    async def story(stage):
        await one_step(stage)
        PLACES[place](stage, Random(f"{place} {seed}"))
        assert wrong(stage, 1)
        await until(lambda: stage.events("note.scrub_found"), PERIOD_S)
        await until(lambda: stage.events("note.scrub_mended"), LATE_S)
        assert not wrong(stage, 1)
        assert whole(stage, 1)
        told = await scrub(stage)
        assert (told["found"], told["mended"], told["open"]) == (1, 1, 0)
        redundancy = (await stage.status("n0"))["redundancy"]
        assert redundancy["survivable_node_losses"] == redundancy["full"] == 2
        assert not stage.events("note.decided"), "nobody restored"

    play(story, seed=seed, scrub_period_s=PERIOD_S)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("place", PLACES)
def test_an_older_step_that_is_kept_is_mended_too(place, seed):
    """The newest step but one rots: what was bad is right again, in the place where it was, and no
    repair moved anything."""

    async def story(stage):
        launch = await stage.launch(*RANKS, keep_last=2)
        await launch.saved(1)
        await launch.saved(2)
        launch.kill()
        await asyncio.sleep(1)
        assert whole(stage, 1)
        where = places(stage, 1)
        PLACES[place](stage, Random(f"{place} {seed}"))
        assert wrong(stage, 1)
        await until(lambda: stage.events("note.scrub_mended"), PERIOD_S + LATE_S)
        assert not wrong(stage, 1)
        assert whole(stage, 1)
        assert places(stage, 1) == where
        told = await scrub(stage)
        assert (told["found"], told["mended"], told["open"]) == (1, 1, 0)
        assert not stage.events("note.repaired")

    play(story, seed=seed, scrub_period_s=PERIOD_S)


@pytest.mark.parametrize("parts", [(0, 1), (2,)])
def test_a_shard_of_many_ranks_is_made_anew_piece_by_piece(parts):
    """Three ranks on n0 are one share, of unlike lengths: each has its piece in the file."""

    async def story(stage):
        launch = await stage.launch("n0", "n0", "n0", keep_last=2)
        await launch.saved(1)
        await launch.saved(2)
        where = places(stage, 1)
        flip_file(stage, Random(2), r.FileKind.SHARD, parts)
        await until(lambda: stage.events("note.scrub_mended"), PERIOD_S + LATE_S)
        assert not wrong(stage, 1)
        assert places(stage, 1) == where

    play(story, scrub_period_s=PERIOD_S)


def test_a_shard_of_an_older_step_that_went_while_it_was_made_anew_leaves_nothing():
    """The next save retires the step at the moment at which its shard is found: no file of it is
    left anywhere, and no wound."""

    async def story(stage):
        launch = await stage.launch(*RANKS, keep_last=2)
        await launch.saved(1)
        await launch.saved(2)
        flip_file(stage, Random(5), r.FileKind.SHARD, (2,))
        saving = []
        stage.at("note.scrub_found", lambda: saving.append(asyncio.create_task(launch.saved(3))))
        await until(lambda: saving, PERIOD_S + LATE_S)
        await saving[0]
        await asyncio.sleep(3 * LATE_S)
        assert not stage.held(step=1)
        assert whole(stage, 3)
        told = await scrub(stage)
        assert (told["found"], told["open"]) == (1, 0)

    play(story, scrub_period_s=PERIOD_S)


def test_a_bad_file_is_not_told_as_held():
    """At the moment that it is found nobody is told any more that it is here. With too few hosts
    for all shards its place is taken by one of those that lacked before."""

    async def story(stage):
        await one_step(stage)
        stage.crash("n3")  # four nodes were just enough
        await asyncio.sleep(20)
        before = (await stage.status("n0"))["redundancy"]["missing"]
        held = next(h for n, h in stage.held(r.FileKind.SHARD, 1) if n == "n0" and h.owner == "n1")
        stage.nodes["n0"].store.flip(held.file, 5, 0)
        told = []

        def look():
            files = stage.agents["n0"].serving.held(w.HeldQuery(held.job)).files
            told.append([f.part for f in files if f.owner == "n1"])

        assert len(before) == 3
        stage.at("note.scrub_found", look)
        await until(lambda: told, PERIOD_S)
        assert told == [[]]
        await until(lambda: stage.events("note.scrub_mended"), LATE_S)
        assert not wrong(stage, 1)
        missing = (await stage.status("n0"))["redundancy"]["missing"]
        assert [len(gap["shards"]) for gap in missing] == [1, 1, 1]

    play(story, nodes=4, scrub_period_s=PERIOD_S)


def test_pieces_of_a_bad_copy_are_used_where_nobody_else_has_them():
    """The own copy is wrong in its first half, and of its shards only that half's is left: the
    second half comes from the bad file itself, and the copy is right again."""

    async def story(stage):
        await one_step(stage)
        places = stage.holders("n0", 1)
        (slot,) = [h for n, h in stage.held(r.FileKind.SLOT, 1) if h.part == 0]
        for part in (1, 2):
            (held,) = [
                h
                for n, h in stage.held(r.FileKind.SHARD, 1)
                if n == places[part] and (h.owner, h.part) == ("n0", part)
            ]
            stage.nodes[places[part]].store.flip(held.file, 9, 1)
        stage.nodes["n0"].store.flip(slot.file, 3, 7)
        await until(lambda: len(stage.events("note.scrub_mended")) == 3, 3 * LATE_S)
        assert not wrong(stage, 1)
        assert whole(stage, 1)

    play(story, scrub_period_s=PERIOD_S)


def test_a_copy_that_is_gone_after_a_restart_is_fetched_anew():
    """The agent of n1 comes back without its rank's copy, then n3 without its shards: what is not
    here is one more erasure, noticed without any scrubbing, and full again."""

    async def story(stage):
        await one_step(stage)
        for node, kind in (("n1", r.FileKind.SLOT), ("n3", r.FileKind.SHARD)):
            lost = [h for n, h in stage.held(kind, 1) if n == node]
            assert lost
            stage.crash(node, keep_memory=True)
            for held in lost:
                stage.nodes[node].store.remove(held.file)
            stage.start(node)
            await until(lambda: stage.events("note.scrub_found"), LATE_S)
            await until(lambda: whole(stage, 1), LATE_S)
            assert not wrong(stage, 1)
        assert [n for n, h in stage.held(r.FileKind.SLOT, 1) if h.part == 1] == ["n1"]

    play(story, scrub_period_s=0.0)


def test_a_job_that_saves_often_is_not_read_again():
    """Saves every 2 s, a period of an hour: no byte is read; what a save wrote was just read."""

    async def story(stage):
        launch = await stage.launch(*RANKS)
        for step in range(1, 40):
            await launch.saved(step)
            await asyncio.sleep(2)
        told = await scrub(stage)
        assert (told["bytes"], told["found"]) == (0, 0)

    play(story)


def test_reading_waits_for_a_save_in_flight_but_not_beyond_the_period():
    """A commit that hangs: nothing is read when it is due, and all of it before the period ends."""

    async def story(stage):
        launch = await stage.launch(*RANKS)
        await launch.saved(1)
        begun = asyncio.get_running_loop().time()
        gates = [stage.hold_commit(name) for name in RANKS]
        saving = await launch.begin(2)
        agents = list(stage.agents.values())
        await asyncio.sleep(PERIOD_S * 0.7)
        assert sum(a.scrubbing.bytes for a in agents if a.home.node in RANKS) == 0
        await asyncio.sleep(begun + PERIOD_S - asyncio.get_running_loop().time())
        assert all(
            a.scrubbing.bytes >= sum(h.length for _, h in stage.held(step=1) if _ == a.home.node)
            for a in agents
        )
        for gate in gates:
            gate.set()
        assert (await launch.outcome(*saving)).verdict is COMMIT

    play(story, scrub_period_s=PERIOD_S, attempt_timeout_s=600.0)


def test_nothing_is_read_when_it_is_switched_off():
    async def story(stage):
        await one_step(stage)
        flip_file(stage, Random(1), r.FileKind.SHARD, (0, 1, 2))
        await asyncio.sleep(3000)
        assert wrong(stage, 1)
        assert (await scrub(stage))["bytes"] == 0

    play(story, scrub_period_s=0.0)
