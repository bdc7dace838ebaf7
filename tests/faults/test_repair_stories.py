"""Stories of redundancy that was lost: it comes back by itself, as far as there are hosts for it.

Three ranks on n0 to n2; rs:2,1: a share has its own copy and three shards on three other nodes.
`full` is judged from the agents' tables: every shard on a node of its own, none beside the copy.
"""

import asyncio
from itertools import combinations

import pytest
from stage import COMMIT, JOB, play, until

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.holdings import document_name
from p2pckpt.agent.repair import Repairing
from p2pckpt.errors import PeerUnreachable, RestoreFailed

THREE = ("n0", "n1", "n2")
LATE_S = 60.0
"""Lease, grace and a repair take less than this."""


def lacking(stage, step, shards=3):
    """What is missing of a step, by share: own copies and shard indices."""
    gone = {}
    slots = stage.held(r.FileKind.SLOT, step)
    held = stage.held(r.FileKind.SHARD, step)
    for rank, owner in enumerate(THREE):
        copies = {node for node, h in slots if h.part == rank}
        places = [
            {n for n, h in held if h.owner == owner and h.part == i} - copies for i in range(shards)
        ]
        missing = [i for i, nodes in enumerate(places) if not nodes]
        if missing or not copies or len(set().union(*places)) < shards:
            gone[owner] = (sorted(copies), missing)
    return gone


async def step_one(stage, *names):
    """Step 1 is committed and full, and no trainer lives any more."""
    launch = await stage.launch(*(names or THREE))
    await launch.saved(1)
    assert not lacking(stage, 1)
    launch.kill()
    await asyncio.sleep(1)
    return launch


@pytest.mark.parametrize("lost", ["n0", "n2", "n4"])
def test_redundancy_comes_back_without_any_training(lost):
    """A node is lost and nobody trains: on the five that are left every share is full again, and
    then any one more node may be lost."""

    async def story(stage):
        launch = await step_one(stage)
        stage.crash(lost)
        assert lacking(stage, 1)
        await until(lambda: not lacking(stage, 1), LATE_S)
        stage.crash("n1")
        launch = await launch.again("n3", "n5", "n4" if lost != "n4" else "n2")
        assert await launch.restore() == 1

    play(story, nodes=6)


def test_a_commit_that_a_rebuild_kept_becomes_full_again_too():
    """etcd was wiped and rebuilt, under a new ledger id; then a node is lost. The step from before
    belongs to a ledger that is gone, and is repaired all the same."""

    async def story(stage):
        await step_one(stage)
        await asyncio.sleep(5)
        stage.etcd.wipe()
        await asyncio.sleep(20)
        assert (await stage.rebuild("n1")).problem == ""
        await asyncio.sleep(15)
        stage.crash("n3")
        assert lacking(stage, 1)
        await until(lambda: not lacking(stage, 1), LATE_S)

    play(story, nodes=6)


def test_what_a_repair_puts_somewhere_without_a_ledger_is_not_forgotten_there():
    """The ledger is wiped, and n9, which had nothing, gets a shard: it gets a copy of the commit,
    too, as whoever has one may be lost before the ledger is rebuilt."""

    async def story(stage):
        await step_one(stage)
        stage.add("n9")
        await asyncio.sleep(5)
        stage.etcd.wipe()
        await asyncio.sleep(5)
        stage.crash("n3")
        await until(lambda: not lacking(stage, 1), LATE_S)
        assert "n9" in {node for node, _ in stage.held(step=1)}
        ctx = stage.agents["n9"].jobs[JOB].ctx
        assert ctx.frozen
        await until(lambda: not ctx.uncopied(), LATE_S)

    play(story)


def test_with_too_few_hosts_repair_waits_for_a_node_that_joins():
    """Four nodes are just enough, one is lost: what can be placed is placed, status says what is
    missing, and when a node joins it is full."""

    async def story(stage):
        await step_one(stage)
        stage.crash("n3")
        await asyncio.sleep(LATE_S)
        assert lacking(stage, 1)
        redundancy = (await stage.status("n0"))["redundancy"]
        assert redundancy["survivable_node_losses"] < redundancy["full"]
        assert redundancy["missing"]
        stage.add("n9")
        await until(lambda: not lacking(stage, 1), LATE_S)
        redundancy = (await stage.status("n0"))["redundancy"]
        assert redundancy["survivable_node_losses"] == redundancy["full"] == 2
        assert not redundancy["missing"]

    play(story, nodes=4)


def test_two_repairers_at_once_waste_work_and_break_nothing():
    """Two nodes have both brought rank 0's copy back and each thinks that it is the one to repair:
    what is held afterwards is right, and not one file is of another digest."""

    async def story(stage):
        launch = await step_one(stage)
        stage.crash("n0")
        await asyncio.sleep(12)
        jobs = [stage.agents[name].jobs[JOB] for name in ("n1", "n2", "n3") if name in stage.agents]
        for _ in range(3):
            await asyncio.gather(*(Repairing(job.ctx).look() for job in jobs))
            await asyncio.sleep(2)
        await until(lambda: not lacking(stage, 1), LATE_S)
        digests = {(h.owner, h.manifest_digest) for _, h in stage.held(r.FileKind.SHARD, 1)}
        assert len(digests) == 3
        launch = await launch.again("n3", "n1", "n4")
        assert await launch.restore() == 1

    play(story, nodes=6)


@pytest.mark.parametrize(("first", "second", "place"), [(1, 0, 1), (0, 1, 2), (2, 0, 0)])
def test_no_host_gets_two_shards_because_no_record_names_it(first, second, place):
    """n0 lost a shard and put it anew on X, which no record says. Then n0 and the holder of another
    shard are gone: who has rank 0 now mends the share, and X gets none of it."""

    async def story(stage):
        launch = await step_one(stage)
        holders = stage.holders("n0", 1)
        stage.crash(holders[first])
        await until(lambda: not lacking(stage, 1), LATE_S)
        (x,) = {n for n, h in stage.held(r.FileKind.SHARD, 1) if (h.owner, h.part) == ("n0", first)}
        others = sorted({f"n{i}" for i in range(8)} - {"n0", x, *holders.values()})
        launch = await launch.again(*others[place:], *others[:place])
        assert await launch.restore() == 1
        launch.kill()
        for gone in {"n0", holders[second]} & stage.agents.keys():
            stage.crash(gone)
        await until(lambda: "n0" not in lacking(stage, 1), LATE_S)
        await asyncio.sleep(LATE_S)
        parts = [n for n, h in stage.held(r.FileKind.SHARD, 1) if h.owner == "n0"]
        assert len(set(parts)) == len(parts)

    play(story, nodes=8)


def test_no_host_gets_two_shards_because_its_receipt_was_lost():
    """Two holders of n0's share are lost. Whom n0 gives the first shard to has it, and the answer
    is lost: it does not get the other one as well."""

    async def story(stage):
        await step_one(stage)
        peers, lost = stage.agents["n0"].home.doors.peers, []
        call = peers.call

        async def loses_one(address, request, timeout_s):
            reply = await call(address, request, timeout_s)
            if isinstance(request, w.PutSeal) and not lost:
                lost.append(address)
                raise PeerUnreachable(f"{address}: no answer")
            return reply

        peers.call = loses_one
        holders = stage.holders("n0", 1)
        stage.crash(holders[0], holders[1])
        await until(lambda: "n0" not in lacking(stage, 1), LATE_S)
        await asyncio.sleep(LATE_S)
        nodes = [n for n, h in stage.held(r.FileKind.SHARD, 1) if h.owner == "n0"]
        assert lost
        assert len(set(nodes)) == len(nodes), nodes

    play(story, nodes=8)


def test_a_node_that_has_nothing_of_the_step_and_is_silent_holds_up_no_repair():
    """n9 came later and holds nothing. It keeps its lease, and no peer reaches it: what was lost
    with n4 comes back all the same."""

    async def story(stage):
        await step_one(stage)
        stage.add("n9")
        await asyncio.sleep(3)
        stage.cluster.isolate("n9")
        stage.crash("n4")
        assert lacking(stage, 1)
        await until(lambda: not lacking(stage, 1), LATE_S)
        assert "n9" in (await stage.agents["n0"].home.living()).members

    play(story, nodes=6)


@pytest.mark.parametrize("part", [0, 1])
def test_a_holder_that_is_silent_for_a_while_is_asked_again(part):
    """n0 and a holder of its share are lost, and of the two shards that are left one cannot be had
    for half a minute, while its node keeps its lease. Nobody comes or goes when it can be had
    again: it is noticed all the same, and the share is full."""

    async def story(stage):
        await step_one(stage)
        holders = stage.holders("n0", 1)
        stage.crash("n0", holders[2])
        await asyncio.sleep(10)
        stage.cluster.isolate(holders[part])
        await asyncio.sleep(30)
        stage.cluster.heal()
        await until(lambda: "n0" not in lacking(stage, 1), LATE_S)

    play(story, nodes=7)


def test_an_own_copy_that_is_lost_is_brought_back_and_the_shard_beside_it_moves():
    """n0 is lost; a holder of its shards brings the copy back, so that its shard there is no more
    than the copy is, and goes to another node."""

    async def story(stage):
        await step_one(stage)
        holders = stage.holders("n0", 1)
        stage.crash("n0")
        await until(lambda: not lacking(stage, 1), LATE_S)
        (copy,) = {n for n, h in stage.held(r.FileKind.SLOT, 1) if h.part == 0}
        assert copy in holders.values()
        shard = next(i for i, node in holders.items() if node == copy)
        places = [
            n for n, h in stage.held(r.FileKind.SHARD, 1) if (h.owner, h.part) == ("n0", shard)
        ]
        assert set(places) - {copy}

    play(story, nodes=6)


@pytest.mark.parametrize("place", [0, -1])
def test_a_repair_that_stumbles_over_a_bad_own_copy_has_it_mended_first(place):
    """A bit flips in the own copy of n0's rank, and a holder of n0's shards is lost: two erasures
    of one share. Repair cannot code that copy again, and the scrubber would not come by for an
    hour; it is told, the copy comes from the shards that are left, and the share is full again."""

    async def story(stage):
        await step_one(stage)
        (slot,) = [h for _, h in stage.held(r.FileKind.SLOT, 1) if h.part == 0]
        files = stage.nodes["n0"].store.files
        right = bytes(files[slot.file])[: slot.length]
        stage.nodes["n0"].store.flip(slot.file, place % slot.length, 3)
        spare = next(node for node in stage.holders("n0", 1).values() if node not in THREE)
        stage.crash(spare)
        await until(lambda: not lacking(stage, 1), 2 * LATE_S)
        assert len(stage.events("note.scrub_mended")) == 1
        (slot,) = [h for _, h in stage.held(r.FileKind.SLOT, 1) if h.part == 0]
        assert bytes(files[slot.file])[: slot.length] == right

    play(story, nodes=6)


def test_a_doubted_copy_whose_manifest_rots_as_well_does_not_stop_its_agent():
    """Repair stumbles over n0's own copy; before the scrubber looks, the manifest beside it rots,
    too. The copy stayed the next one to be read, at once, again and again, and nothing else of the
    agent ever ran. Both are mended, and the share is full again."""

    class Asked:
        """An arena that is asked for documents; whoever asks without end fails."""

        def __init__(self, arena):
            self._arena, self.asked = arena, 0

        def __getattr__(self, name):
            return getattr(self._arena, name)

        def document(self, name):
            self.asked += 1
            assert self.asked < 10_000, "asked without end"
            return self._arena.document(name)

    async def story(stage):
        await step_one(stage)
        (slot,) = [h for _, h in stage.held(r.FileKind.SLOT, 1) if h.part == 0]
        store = stage.nodes["n0"].store
        right = bytes(store.files[slot.file])[: slot.length]
        store.flip(slot.file, 100, 3)
        stage.doors_of("n0", arena=Asked(stage.agents["n0"].home.doors.arena))
        stage.crash(next(n for n in stage.holders("n0", 1).values() if n not in THREE))
        await until(lambda: slot.doubted)
        store.documents[document_name(slot.manifest_digest)] = b"rotten"
        await until(lambda: not lacking(stage, 1), 4 * LATE_S)
        (slot,) = [h for _, h in stage.held(r.FileKind.SLOT, 1) if h.part == 0]
        assert bytes(store.files[slot.file])[: slot.length] == right

    play(story, nodes=6)


def test_a_repair_waits_while_saves_go_on():
    """A pure holder is lost while the job saves every 2 s: the next commits place everything anew,
    and nothing of the old steps is repaired meanwhile."""

    async def story(stage):
        launch = await stage.launch(*THREE)
        await launch.saved(1)
        stage.crash("n5")
        for step in range(2, 22):
            await launch.saved(step)
            await asyncio.sleep(2)
        assert not lacking(stage, 21)
        repaired = {facts["attempt"] for facts in stage.events("note.repaired")}
        assert len(repaired) <= 2, "repair is not to compete with saves"

    play(story, nodes=6)


def test_a_repair_survives_the_loss_of_the_repairer():
    """The node that begins to repair is lost too, at its first offer: another one takes over."""

    async def story(stage):
        launch = await step_one(stage)
        stage.crash("n2")
        repairer = []

        def hit(who):
            repairer.append(who)
            stage.crash(who)

        for name in ("n0", "n1", "n3", "n4", "n5", "n6"):
            stage.at("transfer.begin", lambda name=name: repairer or hit(name), who=name)
        await until(lambda: repairer, LATE_S)
        await until(lambda: not lacking(stage, 1), LATE_S)
        names = sorted(stage.agents)
        launch = await launch.again(*names[:3])
        assert await launch.restore() == 1

    play(story, nodes=7)


# -- the gauge -------------------------------------------------------------------------------------


async def degrade(stage, how):
    launch = await stage.launch(*THREE)
    await launch.saved(1)
    launch.kill()
    match how:
        case "a node lost":
            stage.crash("n3")
        case "an owner lost":
            stage.crash("n0")
        case "two nodes lost":
            stage.crash("n1", "n3")
        case "a slot lost":
            node, held = next(x for x in stage.held(r.FileKind.SLOT, 1) if x[0] == "n1")
            stage.crash("n1", keep_memory=True)
            stage.nodes[node].store.remove(held.file)
            stage.start("n1")
    await asyncio.sleep(11.5)  # the lease is over, the grace is not: nothing is repaired yet


def killed(how, losses, seed=1):
    """Really lose these nodes after `how`; does the step come back? And what the gauge had said."""
    told = []

    async def story(stage):
        await degrade(stage, how)
        living = sorted(stage.agents)
        told.append((living, (await stage.status(living[0]))["redundancy"]))
        if losses is None:
            return
        stage.crash(*losses)
        for i in range(len(losses)):
            stage.add(f"m{i}")
        await asyncio.sleep(0.5)
        launch = await stage.launch(*sorted(stage.agents)[:3])
        try:
            told.append(await launch.restore() == 1)
        except RestoreFailed:
            told.append(False)

    play(story, seed=seed, lost_grace_s=30.0, decide_wait_s=2.0, join_timeout_s=120.0)
    return told


@pytest.mark.parametrize(
    "how", ["all well", "a node lost", "an owner lost", "two nodes lost", "a slot lost"]
)
def test_the_gauge_tells_exactly_how_many_losses_kill(how):
    """Small cluster, brute force: after trouble of some kind the gauge says that any n nodes may be
    lost. Then every set of n nodes is really lost, one world for each, and the step comes back; and
    some set of n + 1 nodes kills it."""
    (living, gauge), *_ = killed(how, None)
    n = gauge["survivable_node_losses"]
    assert gauge["step"] == 1
    assert 0 <= n <= gauge["full"] == 2
    assert all(killed(how, losses)[1] for losses in combinations(living, n))
    deadly = any(not killed(how, losses)[1] for losses in combinations(living, n + 1))
    assert deadly, f"the gauge says {n}, and no {n + 1} losses kill: {gauge}"


def test_a_repair_of_a_step_that_is_retired_meanwhile_leaves_nothing_behind():
    """While n0's lost share is rebuilt a newer step commits and the old one is retired: in the end
    no node holds a file of it."""

    async def story(stage):
        launch = await stage.launch("n1", "n2", "n0")
        await launch.saved(1)
        launch.kill()
        stage.crash("n0")
        await asyncio.sleep(16)
        launch = await launch.again("n1", "n2", "n3")
        await launch.restore()
        outcome = await launch.save(2)
        assert outcome.verdict is COMMIT
        await until(lambda: not stage.held(step=1), LATE_S)
        await asyncio.sleep(20)
        assert not stage.held(step=1)

    play(story, nodes=6, bytes_per_s=1e5)
