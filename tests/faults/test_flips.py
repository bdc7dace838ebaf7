"""One bit changes, anywhere: the right bytes come back or a refusal by name, never wrong ones.

Real agents on the simulated cluster, rs:2,2, five nodes. In each round a single random bit flips in
one kind of place; in every other round nodes are lost as well, so that the damaged piece is needed.
Then all ranks restore, and every byte is compared. Places are what lies in RAM (shards, chunk
tables, manifests, own snapshots), in the ledger (group and commit records) and what is on its way
(frames between agents, payload; and the movers' own frames, as a mover decodes them).

The counts, place by outcome, are printed at the end, with the seed.
"""

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace

import pytest
from stage import JOB, play, until

from p2pckpt import records as r
from p2pckpt import wire
from p2pckpt.backends import ucx_flow as flow
from p2pckpt.backends.inproc import peers
from p2pckpt.backends.inproc.net import FakeNet
from p2pckpt.errors import CheckpointError, FormatError

SEED = 1
LAYOUT = "rs:2,2"
QUICK = {"lease_s": 3.0, "keepalive_s": 0.7, "lost_grace_s": 1.0, "decide_wait_s": 2.0}
RANKS = ("n0", "n1", "n2")
KEYS = r.JobKeys(JOB)
OUTCOMES = ("right", "the step before", "refused")
NAMED = re.compile(r"step \d+|unreadable records: .*commit/|ranks \[\d.*\]: .")
"""What a refusal says: the step, or the record that cannot be read, or which ranks lack what."""
ROUNDS = pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def table(request):
    """Place to counts; printed when the last test of this file has ended."""
    found = {}
    yield found
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n\n{f'damage (seed {SEED})':38}" + "".join(f"{name:>16}" for name in OUTCOMES))
        for place, counts in found.items():
            print(f"{place:38}" + "".join(f"{counts[name]:16}" for name in OUTCOMES))


# -- what lies still -------------------------------------------------------------------------------


def flipped(data, rng, start=0, stop=None):
    """The bytes with one bit changed."""
    wrong = bytearray(data)
    wrong[rng.randrange(start, stop or len(wrong))] ^= 1 << rng.randrange(8)
    return bytes(wrong)


def files_of(stage, kind, parts, step):
    return [
        (node, held)
        for node, held in stage.held(kind, step)
        if kind is r.FileKind.SLOT or held.part in parts
    ]


@dataclass
class Damage:
    """What was done. ``needs``: the nodes without which the damaged piece is asked for."""

    needs: tuple[str, ...] = ()
    undo: object = None


def flip_file(stage, rng, step, kind, parts=()):
    node, held = rng.choice(files_of(stage, kind, parts, step))
    stage.nodes[node].store.flip(held.file, rng.randrange(held.length), rng.randrange(8))
    return held


def flip_data_shard(stage, rng, step):
    return Damage((flip_file(stage, rng, step, r.FileKind.SHARD, (0, 1)).owner,))


def flip_parity_shard(stage, rng, step):
    """Needed when the owner and a holder of a data shard are lost."""
    owner = flip_file(stage, rng, step, r.FileKind.SHARD, (2, 3)).owner
    return Damage((owner, stage.holders(owner, step)[rng.randrange(2)]))


def flip_own_snapshot(stage, rng, step):
    flip_file(stage, rng, step, r.FileKind.SLOT)
    return Damage()


def flip_document(stage, rng, step, in_table):
    """A manifest beside some file: inside of its chunk tables, or anywhere else in it."""
    node, held = rng.choice(stage.held(step=step))
    documents, name = stage.nodes[node].store.documents, f"manifest-{held.manifest_digest}"
    packed = documents[name]
    spans = [found.span(1) for found in re.finditer(rb'"tables":\[(.*?)\]', packed)]
    inside = [at for start, stop in spans for at in range(start, stop)]
    assert len(inside) > 100
    at = rng.choice(inside if in_table else sorted(set(range(len(packed))) - set(inside)))
    documents[name] = flipped(packed, rng, at, at + 1)
    return Damage((held.owner,) if held.owner != node else ())


def flip_ledger(stage, rng, key):
    """A bit of a value in etcd, in place: no revision tells of it."""
    entries = stage.etcd._entries
    old = entries[key]
    entries[key] = replace(old, value=flipped(old.value, rng))

    def undo():
        if key in entries:
            entries[key] = old

    return Damage(undo=undo)


def flip_group(stage, rng, step):
    attempt = next(c for c in stage.state().commits.values() if c.attempt.step == step).attempt
    return flip_ledger(stage, rng, KEYS.group(attempt, 0))


def flip_commit(stage, rng, step):
    (lineage,) = (name for name, number in stage.state().commits if number == step)
    return flip_ledger(stage, rng, KEYS.commit(lineage, step))


PLACES = {
    "data shard": flip_data_shard,
    "parity shard": flip_parity_shard,
    "chunk table": lambda *of: flip_document(*of, in_table=True),
    "manifest": lambda *of: flip_document(*of, in_table=False),
    "own snapshot": flip_own_snapshot,
    "group record": flip_group,
    "commit record": flip_commit,
}


async def committed(stage):
    """Steps 1 and 2 are committed, with copies of their records beside the bytes, and everybody
    has died."""
    launch = await stage.launch(*RANKS, keep_last=2)
    await launch.saved(1, 2)
    await asyncio.sleep(1)
    launch.kill()
    return launch


async def restart_agents(stage):
    """Agents that start anew adopt their files and read what the ledger says now."""
    for name in list(stage.agents):
        stage.restart(name)
    await asyncio.sleep(1)


async def lose(stage, names):
    """Nodes are lost with all they hold; others come in their place."""
    stage.crash(*names)
    for _ in names:
        stage.add(f"n{len(stage.nodes)}")
    await asyncio.sleep(1)


async def told(launch, step):
    """What a restore came to, in a word of OUTCOMES. Wrong data fails the story."""
    try:
        found = await launch.restore()
    except CheckpointError as e:
        if NAMED.search(str(e)) is None:
            raise
        return "refused"
    assert found in (step, step - 1), f"restored step {found}"
    return "right" if found == step else "the step before"


async def go_on(launch, step):
    """Two more steps, everything whole again, and everybody dies."""
    await launch.saved(step + 1, step + 2)
    shards = len(RANKS) * r.Layout.parse(LAYOUT).shards
    await until(lambda: len(launch.stage.held(r.FileKind.SHARD, step + 2)) == shards)
    await asyncio.sleep(1)
    launch.kill()


def test_a_bit_flips_in_what_an_agent_saw_of_the_ledger():
    """n1's agent is started again and cannot read which ledger it knew. It ended with that, at
    every start; and no save of the job had n1's share any more."""

    async def story(stage):
        launch = await stage.launch(*RANKS)
        await launch.saved(1)
        documents = stage.nodes["n1"].store.documents
        (name,) = (name for name in documents if name.startswith("seen-"))
        documents[name] = flipped(documents[name], Random(SEED))
        stage.restart("n1")
        await launch.saved(2)
        assert stage.events("note.seen_damaged", "n1")
        assert wire.unpack(documents[name], r.LedgerSeen).ledger_id == stage.state().ledger_id
        launch = await launch.again()
        assert await launch.restore() == 2

    play(story)


@ROUNDS
@pytest.mark.parametrize("place", PLACES)
def test_a_bit_flips_where_it_lies(place, rounds, table):
    """What comes back is the newest step, or the one before for a reason, or an error that says
    what is wrong; never wrong data, and never "nothing". (B105)"""
    counts = table.setdefault(place, Counter())
    counts.clear()

    async def story(stage):
        rng = Random(f"{place} {stage.seed}")
        launch = await committed(stage)
        for step in range(2, 2 * rounds + 2, 2):
            damage = PLACES[place](stage, rng, step)
            await restart_agents(stage)
            places = ()  # the same ones
            if step % 4:
                await lose(stage, damage.needs or [rng.choice(launch.ranks).node])
                places = rng.sample(sorted(stage.agents), 3)
            launch = await launch.again(*places)
            counts[await told(launch, step)] += 1
            if damage.undo is not None:
                damage.undo()
                await restart_agents(stage)
                launch = await launch.again()
                assert await launch.restore() in (step, step - 1)
            await go_on(launch, step)

    play(story, seed=SEED, layout=LAYOUT, limit_s=36e4, **QUICK)
    assert counts.total() == rounds
    if place != "commit record":  # of which nobody can tell what it was
        assert set(counts) == {"right"}, "one bad copy costs nothing while others are left"


# -- what is on its way ----------------------------------------------------------------------------


class Traffic:
    """All that passes between agents; one bit of it arrives as another one.

    A message that cannot be read is answered as by the agents' gRPC: FormatError at the caller.
    """

    def __init__(self, monkeypatch, part):
        self.part, self.seen, self.at, self.struck = part, 0, None, False
        self.rng = Random(f"{part} {SEED}")
        carried = SimpleNamespace(pack=wire.pack, unpack_any=self._message)
        monkeypatch.setattr(peers, "wire", carried)
        deliver = peers.PeersDoor._deliver

        async def answered(door, address, packed):
            try:
                return await deliver(door, address, packed)
            except FormatError as e:
                return FormatError(str(e))

        monkeypatch.setattr(peers.PeersDoor, "_deliver", answered)
        monkeypatch.setattr(FakeNet, "flipped", lambda _, piece: self._piece(piece))

    def arm(self, among):
        """Strike one of so many that come from now on."""
        self.seen, self.at, self.struck = 0, self.rng.randrange(among), False

    def disarm(self):
        self.at = None
        return self.struck

    def _due(self):
        self.seen += 1
        self.struck |= self.at == self.seen - 1
        return self.at == self.seen - 1

    def _message(self, packed):
        if self.part != "payload" and self._due():
            body = packed.index(b"\n") + 1
            span = (0, body) if self.part == "header" else (body, len(packed))
            packed = flipped(packed, self.rng, *span)
        return wire.unpack_any(packed)

    def _piece(self, piece):
        return flipped(piece, self.rng) if self.part == "payload" and self._due() else piece


@ROUNDS
@pytest.mark.parametrize("part", ["header", "body", "payload"])
def test_a_bit_flips_on_its_way(part, rounds, table, monkeypatch):
    """One bit of one frame, of all that agents send each other during a restore."""
    counts = table.setdefault(f"frame {part}" if part != "payload" else "payload", Counter())
    counts.clear()
    traffic = Traffic(monkeypatch, part)

    async def story(stage):
        rng, among = Random(f"{part} {stage.seed}"), {0: 20, 2: 20}
        launch, step = await committed(stage), 2
        while counts.total() < rounds:
            if step % 4 or part == "payload":
                await lose(stage, [rng.choice(launch.ranks).node])
            launch = await launch.again(*rng.sample(sorted(stage.agents), 3))
            traffic.arm(among[step % 4])
            found = await told(launch, step)
            if traffic.disarm():
                counts[found] += 1
            among[step % 4] = max(1, traffic.seen)
            if found == "refused":
                launch = await launch.again()
                assert await told(launch, step) != "refused", "a frame is gone, and what it left"
            await go_on(launch, step)
            step += 2

    play(story, seed=SEED, layout=LAYOUT, limit_s=36e4, **QUICK)
    assert counts.total() == rounds


@ROUNDS
@pytest.mark.parametrize("part", ["header", "body"])
def test_a_bit_flips_in_a_frame_of_a_mover(part, rounds, table):
    """Frames of every kind as they come in at `Line.hear`: none is taken for another one."""
    counts = table.setdefault(f"mover frame {part}", Counter())
    counts.clear()
    rng, head = Random(f"mover {part} {SEED}"), flow._HEAD.size
    for i in range(rounds):
        kind = list(flow.Kind)[i % len(flow.Kind)]
        numbers = [rng.randrange(1 << 40) for _ in range(3)]
        frame = flow.Frame(kind, rng.randbytes(16).hex(), *numbers, text="why" * (i % 60))
        packed = frame.pack()
        assert flow.Frame.unpack(packed) == frame
        span = (0, head) if part == "header" else (head, len(packed))
        with pytest.raises(FormatError, match="mover frame: "):
            flow.Frame.unpack(flipped(packed, rng, *span))
        counts["refused"] += 1


# -- more than a bit -------------------------------------------------------------------------------


def swap(stage, rng):
    """Two shards of one size change places."""
    (a, one), (b, two) = rng.sample(files_of(stage, r.FileKind.SHARD, (2,), 2), 2)
    exchange(stage.nodes[a].store.files[one.file], stage.nodes[b].store.files[two.file])
    return one.owner


def exchange(first, second):
    size = min(len(first), len(second))
    first[:size], second[:size] = bytes(second[:size]), bytes(first[:size])


def swap_indices(stage, rng):
    """The two data shards of one owner change places."""
    owner = rng.choice(RANKS)
    shards = {h.part: (n, h) for n, h in stage.held(r.FileKind.SHARD, 2) if h.owner == owner}
    (a, one), (b, two) = shards[0], shards[1]
    exchange(stage.nodes[a].store.files[one.file], stage.nodes[b].store.files[two.file])
    return owner


def zero(stage, rng):
    """4 KiB of a data shard become zeros."""
    node, held = rng.choice(files_of(stage, r.FileKind.SHARD, (0,), 2))
    assert held.length > 4096
    stage.nodes[node].store.files[held.file][:4096] = bytes(4096)
    return held.owner


def truncate(stage, rng):
    """A shard loses its last byte, and the record beside it tells the old length."""
    node, held = rng.choice(files_of(stage, r.FileKind.SHARD, (0, 1, 2), 2))
    store = stage.nodes[node].store
    store.files[held.file] = bytearray(store.files[held.file][: held.length - 1])
    return held.owner


DAMAGES = {
    "two shards swapped": swap,
    "two shards of one owner swapped": swap_indices,
    "4 KiB of a shard zeroed": zero,
    "a shard one byte shorter": truncate,
}


@pytest.mark.parametrize("layout", ["rs:2,1", "rs:2,2"])
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_shards_never_give_wrong_data(name, layout, table):
    """Shards swapped, zeroed, cut, while the owner's own copy is lost too; each of four seeds gives
    step 2 from what is left, or step 1, or an error. (B105)"""
    counts = table.setdefault(f"{name}, {layout}", Counter())

    async def story(stage):
        rng = Random(stage.seed)
        launch = await committed(stage)
        owner = DAMAGES[name](stage, rng)
        stage.crash(owner)
        await restart_agents(stage)
        launch = await launch.again(*sorted(stage.agents)[:3])
        counts[await told(launch, 2)] += 1

    for seed in range(4):
        play(story, seed=seed, layout=layout, **QUICK)
    assert counts.total() == 4
