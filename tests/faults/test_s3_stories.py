"""Stories of the object store, with real agents under virtual time: what breaks, what must hold."""

import asyncio
import json
from dataclasses import replace

import pytest
from s3_rig import CONFIG, JOB, KEYS, RANKS, play

import p2pckpt.agent.offloading as offloading
from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.status import redundancy
from p2pckpt.backends.inproc.objects import ObjectsDoor
from p2pckpt.errors import LedgerUnavailable, RestoreFailed
from p2pckpt.ports import Put, Txn
from p2pckpt.save.offload import checkpoint_name, directory, rank_name
from simulations.world.checkers import content


def test_every_second_step_is_offloaded_and_comes_back_after_all_ram_is_lost():
    async def story(rig):
        assert (await rig.restore())[0] is None
        await rig.train(1, 2, 3)
        await rig.until(lambda: rig.offloaded() == [2])
        attempt = rig.attempt(2)
        assert bytes(rig.bucket.objects[rank_name(attempt, "n1", 1)]) == content(1, 2)
        await rig.until(lambda: 2 not in rig.state().steps(lineage(rig)))
        await rig.lose_all()
        await rig.launch()
        assert await rig.restore() == (2, ["s3"] * RANKS)
        # and training goes on from there, in a lineage of its own
        await rig.train(3, 4, 5)
        await rig.launch()
        assert await rig.restore() == (5, ["local"] * RANKS)

    play(story)


def test_a_step_that_only_the_store_has_can_be_mended_and_leaves_no_file_behind():
    async def story(rig):
        await rig.train(1, 2, 3)
        await rig.until(lambda: rig.offloaded() == [2])
        await rig.until(lambda: 2 not in rig.state().steps(lineage(rig)))
        await rig.lose_all()
        await rig.launch()
        (trainer, *_), ballot = rig.ranks, None

        async def begin(rank):
            return await rig.ranks[rank].call(w.RestoreCall(0))

        reply = (await rig.all(begin))[0]
        ballot, image = reply.ballot, trainer.view(reply.file, reply.length)
        image[1500] ^= 1
        await trainer.call(w.MendChunk(ballot, 1024, 1024))
        assert bytes(image) == content(0, 2)

        async def end(rank):
            return await rig.ranks[rank].call(w.RestoreDone(ballot))

        assert {reply.closed.close for reply in await rig.all(end)} == {r.Close.OK}
        await asyncio.sleep(10.0)
        for agent in rig.agents.values():
            assert agent.home.holdings.of_job(JOB) == []
        readers = KEYS.readers(rig.attempt(2))
        assert rig.cluster.etcd.list(readers).entries == ()

    play(story)


def lineage(rig):
    return rig.state().current_lineage().lineage


def test_a_rank_that_asks_again_while_its_bytes_come_leaves_no_file_behind():
    """As after it lost patience: both calls bring a file of the same ballot."""

    async def story(rig):
        await rig.train(1, 2, 3)
        await rig.until(lambda: rig.offloaded() == [2])
        await rig.until(lambda: 2 not in rig.state().steps(lineage(rig)))
        await rig.lose_all()
        await rig.launch()

        async def begin(rank):
            calls = [rig.ranks[rank].call(w.RestoreCall(0)) for _ in range(2)]
            return (await asyncio.gather(*calls))[0]

        ballot = (await rig.all(begin))[0].ballot

        async def end(rank):
            return await rig.ranks[rank].call(w.RestoreDone(ballot))

        assert {reply.closed.close for reply in await rig.all(end)} == {r.Close.OK}
        await asyncio.sleep(10.0)
        kinds = [h.kind for a in rig.agents.values() for h in a.home.holdings if h.attempt]
        assert r.FileKind.STAGE not in kinds

    play(story)


def test_the_newest_step_lives_on_in_ram_after_it_came_from_the_store():
    async def story(rig):
        await rig.train(1, 2)
        await rig.until(lambda: rig.offloaded() == [2])
        await rig.lose_all()
        await rig.launch()
        assert await rig.restore() == (2, ["s3"] * RANKS)
        await rig.launch()
        assert await rig.restore() == (2, ["local"] * RANKS)

    play(story)


def test_what_ram_still_has_comes_from_ram_and_the_rest_from_the_store():
    async def story(rig):
        await rig.train(1, 2)
        await rig.until(lambda: rig.offloaded() == [2])
        for name in ("n1", "n2", "n3"):
            await rig.lose(name)
            rig.start(name)
        await asyncio.sleep(30.0)
        await rig.launch()
        step, sources = await rig.restore()
        assert step == 2
        assert sources[0] == "local"
        assert "mixed" in sources
        assert set(sources[1:]) <= {"mixed", "s3"}

    play(story)


async def due(rig):
    """The steps that n0 says are due."""
    told = await rig.cluster.nodes["n0"].trainer().call(w.StatusQuery())
    return json.loads(told.document)["jobs"][JOB]["offload_due"]


def test_an_outage_neither_delays_nor_fails_saves_and_the_newest_due_steps_go_out_after_it():
    """B103: due steps wait, up to a limit; the status tells which, and a note what is dropped."""

    async def story(rig):
        rig.bucket.outage()
        began = asyncio.get_running_loop().time()
        await rig.train(*range(1, 41))
        took_s = asyncio.get_running_loop().time() - began
        assert took_s < 40 * 2.0 + 8.0
        assert rig.offloaded() == []
        await rig.until(lambda: len(rig.notes("offload_dropped")) == 20 - 4)
        async with asyncio.timeout(10.0):  # until n0 has heard of the last one that was dropped
            while await due(rig) != [34, 36, 38, 40]:
                await asyncio.sleep(0.1)
        rig.bucket.outage(0)
        await rig.until(lambda: rig.offloaded()[-1:] == [40], 120.0)
        await rig.lose_all()
        await rig.launch()
        assert await rig.restore() == (40, ["s3"] * RANKS)

    play(story, budget_bytes=1 << 22)


def test_due_steps_are_given_up_before_saves_lack_room():
    async def story(rig):
        rig.bucket.outage()
        await rig.train(*range(1, 21))
        reasons = {facts["reason"] for facts in rig.notes("offload_dropped")}
        assert "saves need its room in RAM" in reasons

    play(story, budget_bytes=170_000)


def test_an_outage_at_restore_is_neither_nothing_nor_a_bad_step():
    async def story(rig):
        await rig.train(1, 2)
        await rig.until(lambda: rig.offloaded() == [2])
        await rig.lose_all()
        rig.bucket.outage()
        await rig.launch()
        with pytest.raises(BaseExceptionGroup) as failed:
            await rig.restore()
        assert failed.group_contains(RestoreFailed, match="object store: away")
        assert rig.state().quarantined() == set()
        rig.bucket.outage(0)
        await rig.launch()
        assert await rig.restore() == (2, ["s3"] * RANKS)

    play(story)


def test_an_outage_at_the_first_start_is_not_taken_for_nothing():
    async def story(rig):
        rig.bucket.outage()
        with pytest.raises(BaseExceptionGroup) as failed:
            await rig.restore()
        assert failed.group_contains(RestoreFailed, match="cannot be asked")

    play(story)


def test_a_bucket_with_manifests_that_the_ledger_does_not_know_is_not_nothing():
    async def story(rig):
        name = f"{JOB}/{'0' * 32}/0000000001.0000000000.00000000000000000007/checkpoint.json"
        rig.bucket.objects[name] = b"{}"
        with pytest.raises(BaseExceptionGroup) as failed:
            await rig.restore()
        assert failed.group_contains(RestoreFailed, match="object store has")

    play(story)


@pytest.mark.parametrize("whole", [True, False])
def test_a_rebuilt_ledger_finds_what_the_store_has(whole):
    """Three of four machines lose their RAM, and etcd is wiped. The fourth remembers the commit,
    not that it went out; it comes back from the store if all of it is there."""

    async def story(rig):
        await rig.train(1, 2)
        await rig.until(lambda: rig.offloaded() == [2])
        await asyncio.sleep(5.0)
        name = rank_name(rig.attempt(2), "n1", 1)
        rig.cluster.etcd.wipe()
        for node in ("n0", "n1", "n2"):
            await rig.lose(node)
            rig.start(node)
        await asyncio.sleep(30.0)
        reply = await rig.cluster.nodes["n3"].trainer().call(w.RebuildCall(JOB))
        assert (reply.problem, reply.steps[-1]) == ("", 2)
        await asyncio.sleep(15.0)
        if not whole:
            rig.bucket.truncate(name, 5000)
        await rig.launch()
        if whole:
            step, sources = await rig.restore()
            assert (step, "s3" in sources) == (2, True)  # n3's shards are of use as well
            assert rig.notes("offload_recalled")
        else:
            with pytest.raises(BaseExceptionGroup) as failed:
                await rig.restore()
            assert failed.group_contains(RestoreFailed, match="never offloaded")

    play(story)


def test_a_rebuilt_ledger_finds_what_the_store_has_also_where_ram_only_seemed_to_have_it():
    """n1 is lost, and what others hold of its share rotted, which nobody knows until it is read:
    its rank comes from the store, though the rebuilt ledger does not know that it is there."""

    async def story(rig):
        await rig.train(1, 2)
        await rig.until(lambda: rig.offloaded() == [2])
        await asyncio.sleep(5.0)
        attempt = rig.attempt(2)
        rig.cluster.etcd.wipe()
        await asyncio.sleep(20.0)
        reply = await rig.cluster.nodes["n3"].trainer().call(w.RebuildCall(JOB))
        assert (reply.problem, reply.steps[-1]) == ("", 2)
        await rig.lose("n1")
        for name in ("n0", "n2", "n3"):
            for held in rig.agents[name].home.holdings.of_attempt(attempt):
                if held.kind is r.FileKind.SHARD and held.owner == "n1":
                    rig.cluster.nodes[name].store.flip(held.file, 100, 2)
        await asyncio.sleep(20.0)
        await rig.launch(("n0", "n3", "n2"))
        step, sources = await rig.restore()
        assert (step, sources[0], sources[2]) == (2, "local", "local")
        assert rig.notes("offload_recalled")
        assert rig.state().quarantined() == set()

    play(story)


def test_a_cut_object_does_not_matter_where_ram_has_its_rank():
    async def story(rig):
        await rig.train(1, 2)
        await rig.until(lambda: rig.offloaded() == [2])
        rig.bucket.truncate(rank_name(rig.attempt(2), "n0", 0), 5000)
        for name in ("n1", "n2", "n3"):
            await rig.lose(name)
            rig.start(name)
        await asyncio.sleep(30.0)
        await rig.launch()
        step, sources = await rig.restore()
        assert (step, sources[0]) == (2, "local")
        assert "mixed" in sources

    play(story)


@pytest.mark.parametrize("damage", ["flip", "truncate", "manifest", "manifest object"])
def test_a_damaged_object_is_found_and_the_previous_step_comes_back(damage):
    """B107."""

    async def story(rig):
        await rig.train(1, 2, 3, 4)
        await rig.until(lambda: rig.offloaded() == [2, 4])
        attempt = rig.attempt(4)
        name = rank_name(attempt, "n1", 1)
        if damage == "flip":
            rig.bucket.flip(name, 5000)
        elif damage == "truncate":
            rig.bucket.truncate(name, 5000)
        elif damage == "manifest":
            rig.bucket.flip(checkpoint_name(attempt), 40)
        else:
            rig.bucket.flip(directory(attempt) + "n1/manifest", 400)
        await rig.lose_all()
        await rig.launch()
        assert await rig.restore() == (2, ["s3"] * RANKS)
        if damage == "flip":
            why = [facts["why"] for facts in rig.notes("source_failed")]
            assert any(name in reason for reason in why)
            assert rig.state().quarantined() == {attempt.key}
        elif damage != "manifest object":  # found before anything was decided
            assert rig.notes("source_failed") == []
            assert rig.state().quarantined() == set()

    play(story)


def test_a_damaged_object_does_not_matter_while_ram_has_the_step():
    async def story(rig):
        await rig.train(1, 2)
        await rig.until(lambda: rig.offloaded() == [2])
        rig.bucket.flip(rank_name(rig.attempt(2), "n1", 1), 5000)
        await rig.lose("n1")
        rig.start("n1")
        await asyncio.sleep(20.0)
        await rig.launch()
        assert await rig.restore() == (2, ["local", "peers", "local"])

    play(story)


def test_wrong_bytes_in_ram_are_made_good_from_the_store_and_quarantine_nothing_while_it_is_away(
    monkeypatch,
):
    async def story(rig):
        await rig.train(1, 2)
        await rig.until(lambda: rig.offloaded() == [2])
        attempt = rig.attempt(2)
        await rig.lose("n1")  # for good: its share is left as shards on other nodes, and they rot
        for name in ("n0", "n2", "n3"):
            for held in rig.agents[name].home.holdings.of_attempt(attempt):
                if held.kind is r.FileKind.SHARD and held.owner == "n1":
                    rig.cluster.nodes[name].store.flip(held.file, 100, 2)
        rig.bucket.outage()
        await asyncio.sleep(20.0)
        nodes = ("n0", "n3", "n2")
        await rig.launch(nodes)
        with pytest.raises(BaseExceptionGroup) as failed:
            await rig.restore()
        assert failed.group_contains(RestoreFailed, match="ballots failed")
        assert rig.state().quarantined() == set()
        brought = []

        async def get_into(door, name, *where):
            brought.append(name)
            await get(door, name, *where)

        get = ObjectsDoor.get_into
        monkeypatch.setattr(ObjectsDoor, "get_into", get_into)
        rig.bucket.outage(0)
        await rig.launch(nodes)
        step, sources = await rig.restore()
        assert (step, sources[0], sources[2]) == (2, "local", "local")
        assert sources[1] in ("s3", "mixed", "peers"), "peers: a repair had them from there before"
        assert rank_name(attempt, "n1", 1) in brought

    play(story)


def test_a_slot_that_rotted_in_ram_is_not_uploaded():
    async def story(rig):
        rig.bucket.outage()
        await rig.train(1, 2)
        slots = rig.agents["n1"].home.holdings.of_attempt(rig.attempt(2))
        slot = next(h for h in slots if h.kind is r.FileKind.SLOT)
        rig.cluster.nodes["n1"].store.flip(slot.file, 3000, 1)
        rig.bucket.outage(0)
        await rig.until(lambda: bool(rig.notes("offload_failed")))
        assert "chunks [2]" in rig.notes("offload_failed")[0]["why"]
        await asyncio.sleep(60.0)
        assert rig.offloaded() == []
        assert checkpoint_name(rig.attempt(2)) not in rig.bucket.objects
        # a later step goes out, and the one that cannot is given up
        rig.bucket.outage(0)
        await rig.train(3, 4)
        await rig.until(lambda: rig.offloaded() == [4])
        await rig.until(lambda: bool(rig.notes("offload_dropped")))

    play(story)


def test_answers_that_get_lost_change_nothing():
    async def story(rig):
        rig.bucket.error_after_the_fact(4)
        await rig.train(1, 2)
        await rig.until(lambda: rig.offloaded() == [2])
        rig.bucket.error_after_the_fact(6)
        await rig.train(3, 4)
        await rig.until(lambda: rig.offloaded() == [2, 4])
        await rig.lose_all()
        await rig.launch()
        assert await rig.restore() == (4, ["s3"] * RANKS)

    play(story)


def test_a_ledger_that_is_away_for_a_moment_does_not_give_up_the_upload_that_gets_on():
    """The store is slower than steps fall due; one answer of the ledger is lacking."""

    async def story(rig):
        rig.bucket.slow(300)
        failed = []

        def break_once(home):
            ledger = home.doors.ledger

            class Once:
                def __getattr__(self, name):
                    return getattr(ledger, name)

                async def get(self, key):
                    if home.node not in failed and key.startswith(KEYS.shares):
                        failed.append(home.node)
                        raise LedgerUnavailable("away for a moment")
                    return await ledger.get(key)

            home.doors = replace(home.doors, ledger=Once())

        for agent in rig.agents.values():
            break_once(agent.home)
        await rig.train(1, 2)
        await asyncio.sleep(8)
        assert failed
        uploading = rig.attempt(2).key
        await rig.train(3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
        await rig.until(lambda: rig.state().offload_dropped)
        assert uploading not in rig.state().offload_dropped

    play(story)


def test_a_slot_that_goes_while_the_report_of_its_share_is_looked_for_ends_no_upload():
    """As a bad one does that scrub has no room to bring another for."""

    async def story(rig):
        home, gone = rig.agents["n1"].home, []
        ledger = home.doors.ledger

        class Slow:
            def __getattr__(self, name):
                return getattr(ledger, name)

            async def get(self, key):
                entry = await ledger.get(key)
                if not gone and key.startswith(KEYS.shares):
                    gone.append(home.holdings.find(rig.attempt(2), r.FileKind.SLOT, 1))
                    gone[0].bad = True
                    home.holdings.discard(gone[0])
                return entry

        home.doors = replace(home.doors, ledger=Slow())
        await rig.train(1, 2)
        await rig.until(lambda: rig.offloaded() == [2], 120.0)
        assert gone

    play(story)


async def spoil_groups(rig, step, spoil):
    """The group records of a step, as ``spoil`` makes them anew; None: gone."""
    ledger = rig.agents["n0"].home.doors.ledger
    for entry in rig.cluster.etcd.list(KEYS.groups_of(rig.attempt(step))).entries:
        new = spoil(entry.value)
        change = Txn(deletes=(entry.key,)) if new is None else Txn((), (Put(entry.key, new),))
        assert await ledger.transact(change)


@pytest.mark.parametrize("spoil", [lambda value: value[:-7], lambda _: None])
def test_a_step_whose_group_records_are_spoilt_is_looked_at_in_the_store(spoil):
    """A restore takes it from there, too."""

    async def story(rig):
        await rig.train(1, 2)
        await rig.until(lambda: rig.offloaded() == [2])
        await rig.lose_all()
        await spoil_groups(rig, 2, spoil)
        await rig.launch()
        asker = rig.cluster.nodes["n3"].trainer()
        told = await asker.call(w.StepQuery(JOB, 2))
        assert sorted(s.node for g in told.groups for s in g.shares) == ["n0", "n1", "n2"]
        for rank in range(RANKS):
            file = await asker.call(w.ExportCall(told.commit.attempt, rank))
            assert bytes(asker.view(file.file, file.length)) == content(rank, 2)
        asker.kill()
        assert (await rig.restore())[0] == 2

    play(story)


def test_a_step_whose_group_records_are_gone_is_not_told_as_one_without_ranks():
    """`verify` would find nothing wrong with it, `export` write no rank of it, and `status` count
    no loss that it does not survive."""

    async def story(rig):
        await rig.train(1)
        await spoil_groups(rig, 1, lambda _: None)
        with pytest.raises(RestoreFailed, match="0 of 1 group records"):
            await rig.cluster.nodes["n3"].trainer().call(w.StepQuery(JOB, 1))
        ctx = rig.agents["n0"].jobs[JOB].ctx
        with pytest.raises(RestoreFailed, match="0 of 1 group records"):
            await redundancy(ctx, ctx.state.latest())

    play(story)


def test_two_agents_that_believe_to_lead_offload_one_checkpoint(monkeypatch):
    """B048: names are those of the attempt, both write the same bytes, and one manifest and one
    record of it come to stand."""
    monkeypatch.setattr(offloading.Offloading, "_leads", lambda self: True)

    async def story(rig):
        rig.bucket.slow(200_000)
        await rig.train(1, 2)
        await rig.until(lambda: rig.offloaded() == [2])
        await asyncio.sleep(10.0)
        manifests = [
            facts
            for _, who, what, facts in rig.cluster.log.events
            if what == "bucket.put" and facts["name"].endswith("checkpoint.json")
        ]
        assert len(manifests) == 1
        assert len(rig.notes("offloaded")) == 1
        await rig.lose_all()
        await rig.launch()
        assert await rig.restore() == (2, ["s3"] * RANKS)

    play(story)


def test_the_newest_offloaded_steps_are_kept_and_older_ones_go_by_record():
    """B042: what is not proven to be an abandoned attempt of this job is never deleted, a copy
    without its manifest neither."""

    async def story(rig):
        foreign = {
            f"{JOB}/{'0' * 32}/0000000001.0000000000.00000000000000000002/n0/rank-0.safetensors",
            "other/file",
        }
        for name in foreign:
            rig.bucket.objects[name] = b"not proven to be ours"
        await rig.train(*range(1, 9))
        await rig.until(lambda: rig.offloaded() == [6, 8])
        await rig.until(lambda: len(rig.notes("objects_deleted")) == 2)
        assert foreign <= set(rig.bucket.objects)
        # a checkpoint without its manifest, as somebody copied it (google/orbax#394), stays
        copied = {
            n.replace(JOB, "copy"): data
            for n, data in rig.bucket.objects.items()
            if n.startswith(directory(rig.attempt(6))) and not n.endswith("checkpoint.json")
        }
        rig.bucket.objects.update(copied)
        await rig.train(9, 10, 11)
        await rig.until(lambda: rig.offloaded() == [8, 10])
        await rig.until(lambda: len(rig.notes("objects_deleted")) == 3)
        assert foreign | set(copied) <= set(rig.bucket.objects)
        ours = {n.split("/")[2] for n in rig.bucket.objects if n.startswith(f"{JOB}/")}
        kept = {rig.attempt(8).key, rig.attempt(10).key}
        assert ours - kept == {"0000000001.0000000000.00000000000000000002"}
        # the records follow: no reports, and no ends of steps whose commits are gone
        await rig.train(12)
        await rig.until(lambda: rig.offloaded() == [10, 12])
        await asyncio.sleep(10.0)
        await rig.train(13, 14)
        await rig.until(lambda: rig.offloaded() == [12, 14])
        assert len(rig.state().offload_retired) <= 2

    play(story)


def test_after_a_clean_old_steps_go_from_the_store_although_they_have_the_numbers_of_before():
    """A job is cleaned and run again, by the same agents: its attempts count from the start."""

    async def story(rig):
        await rig.train(*range(1, 9))
        await rig.until(lambda: len(rig.notes("objects_deleted")) == 2)
        for trainer in rig.ranks:
            trainer.kill()
        await asyncio.sleep(10.0)
        first = rig.state().ledger_id
        reply = await rig.cluster.nodes["n3"].trainer().call(w.CleanCall(JOB, dry_run=False))
        assert reply.problem == ""
        await rig.launch()
        await rig.train(*range(1, 9))
        await rig.until(lambda: rig.offloaded() == [6, 8])
        await rig.until(lambda: len(rig.notes("objects_deleted")) == 4)
        ours = {tuple(n.split("/")[1:3]) for n in rig.bucket.objects}
        new = {(rig.state().ledger_id, rig.attempt(step).key) for step in (6, 8)}
        assert {one for one in ours if one[0] != first} == new

    play(story)


def test_the_agent_of_rank_0_is_lost_in_mid_offload():
    async def story(rig):
        rig.bucket.slow(3000)
        await rig.train(1, 2)
        await rig.until(lambda: any("rank-" in n for n, _ in rig.bucket.begun.values()))
        await rig.lose("n0", keep_memory=True)
        await asyncio.sleep(5.0)
        rig.start("n0")
        rig.bucket.slow(1e6)
        await rig.until(lambda: rig.offloaded() == [2], 300.0)
        await rig.lose_all()
        await rig.launch()
        assert await rig.restore() == (2, ["s3"] * RANKS)

    play(story)


def test_uploads_that_a_dead_agent_left_are_aborted_and_foreign_ones_stay():
    """B095: by age, below the own prefix, and counted."""

    async def story(rig):
        rig.bucket.slow(3000)
        await rig.train(1, 2)
        await rig.until(lambda: len(rig.bucket.begun) >= RANKS)
        old = f"{JOB}/{'0' * 32}/{rig.attempt(2).key}/n0/rank-0.safetensors"
        foreign = {rig.bucket.begin("other/prefix/file"), rig.bucket.begin(old)}
        await rig.lose("n1", keep_memory=True)
        left = [i for i, (n, _) in rig.bucket.begun.items() if "/n1/" in n]
        assert left
        rig.start("n1")
        rig.bucket.slow(1e6)
        await rig.launch()
        await rig.restore()
        await rig.until(lambda: rig.offloaded() == [2], 300.0)
        for step in range(3, 9):
            await asyncio.sleep(120.0)
            await rig.train(step)
        await rig.until(lambda: not set(left) & set(rig.bucket.begun), 1300.0)
        assert foreign <= set(rig.bucket.begun)

    play(story)


def test_off_means_off():
    async def story(rig):
        assert (await rig.restore())[0] is None
        await rig.train(1, 2, 3)
        await asyncio.sleep(60.0)
        assert rig.bucket.objects == {}

    play(story, config=replace(CONFIG, offload_every=0))


def test_the_same_seed_is_the_same_run():
    async def story(rig):
        await rig.train(1, 2, 3)
        await rig.until(lambda: rig.offloaded() == [2])

    assert play(story, seed=7).cluster.digest() == play(story, seed=7).cluster.digest()
