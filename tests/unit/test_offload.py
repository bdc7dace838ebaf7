"""The pure parts of offload: what is due, what is given up, names, manifests, retention."""

import hashlib
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_world import KEYS, LEDGER, Book, attempt, commit_record, group_record, share
from msgspec.structs import replace

from p2pckpt import records as r
from p2pckpt.errors import FormatError, IntegrityError
from p2pckpt.ports import Pending, Stored
from p2pckpt.restore.locate import Bucket, Facts, candidates, decide_restore
from p2pckpt.save.encode import encode_rank, shard_bytes
from p2pckpt.save.offload import (
    KEPT_DUE,
    Ram,
    abandoned,
    checked_part,
    checkpoint_name,
    checkpoint_of,
    decide_drops,
    decide_retention,
    directory,
    drop_txn,
    due,
    encode_checkpoint,
    every_in_force,
    held_back,
    incomplete,
    lacking,
    manifest_name,
    names_to_delete,
    objects_of,
    offloaded_txn,
    rank_name,
    read_checkpoint,
    removal_txn,
    share_objects,
    share_txn,
)
from p2pckpt.wire import HeldFile, HeldReply, pack

ROOM = Ram({}, 1 << 40, 1)


class OffloadBook(Book):
    """A job's records with numbered commits, and offloads."""

    def __init__(self):
        super().__init__()
        self.close(1, 1, "L1")

    def commit(self, step, number=None, lineage="L1"):
        record = super().commit(step, lineage)
        record = replace(record, number=step if number is None else number)
        self.put(KEYS.commit(lineage, step), record)
        return record

    def offload(self, commit):
        data = encode_checkpoint(r.Checkpoint(r.CHECKPOINT_FORMAT, commit, (), ()))
        assert self.does(offloaded_txn(self.state(), commit, data, "n0"))

    def dues(self, every=2):
        return [c.attempt.step for c in due(self.state(), every)]


# -- due, given up --------------------------------------------------------------------------------


def test_every_nth_commit_is_due_until_it_is_offloaded_or_given_up():
    book = OffloadBook()
    commits = [book.commit(step) for step in range(1, 7)]
    assert book.dues() == [2, 4, 6]
    assert book.dues(every=3) == [3, 6]
    assert book.dues(every=0) == []
    book.offload(commits[1])
    assert book.dues() == [4, 6]
    assert book.does(drop_txn(book.state(), commits[3], "n0", "why"))
    assert book.dues() == [6]


def test_a_commit_counts_on_from_the_one_before_it():
    from p2pckpt.save.commit import commit_txn

    book = OffloadBook()
    book.commit(10, number=7)
    of = attempt(11, 11)
    entries = book.groups(of, group_record(of, 0, share("n0", range(4), ("s",))))
    outcome = r.Outcome(attempt=of, verdict=r.Verdict.COMMIT, by="n0", lineage="L1")
    assert book.does(commit_txn(book.state(), of, entries, outcome))
    assert book.state().commits["L1", 11].number == 8


def tune(book, every, generation=1):
    """The schedule says so; the commits of the generation name it from now on."""
    book.put(KEYS.schedule(generation), r.Schedule(generation, 1, ((0, 5),), offload_every=every))


def test_a_commit_names_the_n_of_its_time_and_is_judged_by_it_for_ever():
    """Commits 1 to 4 under the agents' 2, 5 to 9 under a tuned 3, 10 to 12 under 4: what a change
    finds in RAM, due or not, stays so."""
    from p2pckpt.save.commit import commit_txn

    book, named = OffloadBook(), []
    for step in range(1, 13):
        if step in (5, 10):
            before = book.dues()
            tune(book, 3 if step == 5 else 4)
            assert book.dues() == before
        of = attempt(step, step)
        entries = book.groups(of, group_record(of, 0, share("n0", range(4), ("s",))))
        outcome = r.Outcome(attempt=of, verdict=r.Verdict.COMMIT, by="n0", lineage="L1")
        assert book.does(commit_txn(book.state(), of, entries, outcome))
        named.append(book.state().commits["L1", step].offload_every)
    assert named == [0] * 4 + [3] * 5 + [4] * 3
    assert book.dues() == [2, 4, 6, 9, 12]
    assert book.dues(every=1) == [1, 2, 3, 4, 6, 9, 12], "an agent's setting is about the others"
    assert book.dues(every=0) == [], "off is off"
    held = held_back(book.state(), 2, 1)
    assert held == {attempt(step, step).key for step in (2, 4, 6, 9)}


def test_the_n_in_force_is_the_present_generations_or_the_agents():
    book = OffloadBook()
    assert every_in_force(book.state(), 2) == 2
    tune(book, 0)
    assert every_in_force(book.state(), 2) == 2
    tune(book, 7)
    assert every_in_force(book.state(), 2) == 7
    assert every_in_force(book.state(), 0) == 0, "what is off is not turned on"
    book.begin(2)
    assert every_in_force(book.state(), 2) == 2


def test_a_quarantined_step_is_not_due():
    book = OffloadBook()
    commit = book.commit(2)
    book.close(1, 2, "L2", close=r.Close.BAD, commit=commit)
    assert book.dues() == []


def test_too_many_waiting_give_up_the_oldest_but_not_the_busy_one():
    book = OffloadBook()
    for step in range(1, 2 * (KEPT_DUE + 2) + 1):
        book.commit(step)
    state = book.state()
    assert [c.attempt.step for c, _ in decide_drops(state, 2, ROOM)] == [2, 4]
    oldest, busy, *others = [c.attempt.key for c in due(state, 2)]
    assert [c.attempt.step for c, _ in decide_drops(state, 2, ROOM, [oldest])] == [4, 6]
    assert [c.attempt.step for c, _ in decide_drops(state, 2, ROOM, [oldest, busy])] == [6, 8]
    everything = [oldest, busy, *others]
    assert [c.attempt.step for c, _ in decide_drops(state, 2, ROOM, everything)] == [2, 4]


def test_a_step_behind_an_offloaded_one_is_given_up():
    book = OffloadBook()
    commits = [book.commit(step) for step in range(1, 5)]
    book.offload(commits[3])
    ((dropped, why),) = decide_drops(book.state(), 2, ROOM)
    assert dropped.attempt.step == 2
    assert "step 4" in why


def test_held_back_are_only_those_that_the_job_would_not_retain():
    book = OffloadBook()
    for step in range(1, 7):
        book.commit(step)
    state = book.state()
    assert held_back(state, 2, 1) == {state.commits["L1", s].attempt.key for s in (2, 4)}
    assert held_back(state, 2, 3) == {state.commits["L1", 2].attempt.key}
    assert held_back(state, 0, 1) == set()


@pytest.mark.parametrize(("versions", "dropped"), [(5, []), (4, [2]), (3, [2, 4]), (1, [2, 4])])
def test_what_saves_need_is_given_up_oldest_first(versions, dropped):
    book = OffloadBook()
    for step in range(1, 7):
        book.commit(step)
    state = book.state()
    held = {state.commits["L1", s].attempt.key: 100 for s in (2, 4, 6)}
    drops = decide_drops(state, 2, Ram(held, versions * 100, 1))
    assert [c.attempt.step for c, _ in drops] == dropped


def test_two_agents_do_not_give_up_one_step_too_many():
    book = OffloadBook()
    commits = [book.commit(step) for step in range(1, 11)]
    seen = book.state()
    assert book.does(drop_txn(seen, commits[1], "n0", "five wait"))
    assert not book.does(drop_txn(seen, commits[3], "n1", "five wait"))
    assert book.does(drop_txn(book.state(), commits[3], "n1", "another reason"))


# -- bytes and names ------------------------------------------------------------------------------


def encoded(data, chunk=512, owner="n0", rank=3):
    layout = r.Layout(2, 1)
    parity = [memoryview(bytearray(shard_bytes(len(data), layout, chunk)))]
    entry = encode_rank(rank, memoryview(data), parity, layout, chunk)
    of = attempt(1, 2)
    return r.Manifest(of, owner, "store", layout, chunk, "crc32c/1", (entry,))


@given(st.integers(0, 9000), st.sampled_from([512, 700, 4096]), st.integers(1, 9))
def test_parts_at_multiples_of_a_chunk_are_copies_proven_by_the_manifest(length, chunk, units):
    data = bytearray(random.Random(length).randbytes(length))
    part = checked_part(encoded(data, chunk), 3, memoryview(data))
    step = units * chunk
    parts = [part(at, min(step, length - at)) for at in range(0, length, step)]
    assert b"".join(parts) == bytes(data)


@given(st.integers(1, 9000), st.data())
def test_a_flipped_bit_is_found_in_its_part(length, draw):
    data = bytearray(random.Random(length).randbytes(length))
    part = checked_part(encoded(data), 3, memoryview(data))
    at = draw.draw(st.integers(0, length - 1))
    data[at] ^= 1 << draw.draw(st.integers(0, 7))
    with pytest.raises(IntegrityError, match=f"chunks \\[{at // 512}\\]"):
        part(0, length)


def test_names_tell_job_ledger_attempt_and_owner_apart():
    a, b = attempt(1, 2), attempt(1, 2, ledger="2" * 32)
    names = {
        rank_name(of, node, rank) for of in (a, b) for node in ("n/1", "n") for rank in (1, 11)
    }
    assert len(names) == 8
    assert rank_name(a, "n/1", 1) == f"1000.job/{LEDGER}/{a.key}/n%2F1/rank-1.safetensors"
    assert all(n.startswith((directory(a), directory(b))) for n in names)
    assert manifest_name(a, "checkpoint.json") != checkpoint_name(a)


# -- the job-level manifest -----------------------------------------------------------------------


def whole_checkpoint(step=2, holders=("s1", "s2", "s3")):
    commit = replace(commit_record(attempt(1, step), "L1"), number=2)
    parts = [share("n0", (0, 1), holders), share("n1", (2, 3), holders)]
    groups = [group_record(commit.attempt, 0, *parts)]
    stored = []
    for each in parts:
        entries = [encoded(b"x" * (100 + k), rank=k).ranks[0] for k in each.ranks]
        manifest = replace(encoded(b""), attempt=commit.attempt, ranks=tuple(entries))
        stored.append(share_objects(each, commit.attempt, manifest, 77))
    return commit, groups, stored


def listing_of(checkpoint):
    return [Stored(name, length) for name, length in objects_of(checkpoint).items()]


def test_the_manifest_waits_for_every_share_and_is_the_same_for_all_writers():
    commit, groups, stored = whole_checkpoint()
    assert checkpoint_of(commit, groups, stored[:1]) is None
    assert checkpoint_of(commit, [], stored) is None
    other = replace(stored[1], manifest_digest="another")
    assert checkpoint_of(commit, groups, [stored[0], other]) is None
    first = checkpoint_of(commit, groups, stored)
    _, repaired, _ = whole_checkpoint(holders=("s9", "s2", "s3"))
    second = checkpoint_of(commit, repaired, stored[::-1])
    assert encode_checkpoint(first) == encode_checkpoint(second)
    assert json.loads(encode_checkpoint(first))["format"] == "p2pckpt-checkpoint/1"


def test_the_manifest_reads_back_only_with_its_digest_and_its_format():
    checkpoint = checkpoint_of(*whole_checkpoint())
    data = encode_checkpoint(checkpoint)

    def sha(data):
        return hashlib.sha256(data).hexdigest()

    assert read_checkpoint(data, sha(data)) == checkpoint
    with pytest.raises(IntegrityError, match="digest"):
        read_checkpoint(data[:-1] + b" ", sha(data))
    for wrong in (
        data.replace(b"checkpoint/1", b"checkpoint/2"),
        data.replace(b'"shares"', b'"parts"'),
        b"[]",
        b"{}",
        data[:-9],
        b"\xff\xfe",
    ):
        with pytest.raises(FormatError, match=r"checkpoint\.json"):
            read_checkpoint(wrong, sha(wrong))


@pytest.mark.parametrize("change", ["gone", "short", "long"])
def test_objects_that_are_not_there_in_their_length_are_named(change):
    checkpoint = checkpoint_of(*whole_checkpoint())
    listing = listing_of(checkpoint)
    assert incomplete(checkpoint, [*listing, Stored("other", 1)]) == {}
    victim = listing.pop(2)
    if change != "gone":
        listing.append(Stored(victim.name, victim.length + (1 if change == "long" else -1)))
    assert list(incomplete(checkpoint, listing)) == [victim.name]


def test_a_rank_lacks_its_object_or_the_manifest_of_its_share():
    checkpoint = checkpoint_of(*whole_checkpoint())
    whole = listing_of(checkpoint)
    assert lacking(checkpoint, whole) == {}
    share = checkpoint.shares[-1]
    for name, ranks in (
        (share.manifest, {e.rank for e in share.ranks}),
        (share.ranks[0].name, {share.ranks[0].rank}),
    ):
        wrong = lacking(checkpoint, [s for s in whole if s.name != name])
        assert set(wrong) == ranks
        assert all(name in why for why in wrong.values())


# -- records --------------------------------------------------------------------------------------


def test_an_offload_is_recorded_once_and_only_while_its_commit_is_there():
    book = OffloadBook()
    commit = book.commit(2)
    data = encode_checkpoint(r.Checkpoint(r.CHECKPOINT_FORMAT, commit, (), ()))
    early = book.state()
    assert book.does(offloaded_txn(early, commit, data, "n0"))
    assert not book.does(offloaded_txn(early, commit, data, "n1"))
    found = book.state().offloaded[commit.attempt.key]
    assert found.commit == commit
    assert found.manifest_digest == hashlib.sha256(data).hexdigest()

    late = book.commit(4)
    seen = book.state()
    book.delete(KEYS.commit("L1", 4))
    assert not book.does(offloaded_txn(seen, late, data, "n1"))
    dropped = book.commit(6)
    seen = book.state()
    assert book.does(drop_txn(seen, dropped, "n0", "why"))
    assert not book.does(offloaded_txn(seen, dropped, data, "n1"))


def test_a_share_is_reported_once_and_not_after_the_end():
    book = OffloadBook()
    commit, _, stored = whole_checkpoint()
    assert book.does(share_txn(book.state(), stored[0]))
    assert not book.does(share_txn(book.state(), stored[0]))
    assert book.does(drop_txn(book.state(), commit, "n0", "why"))
    assert not book.does(share_txn(book.state(), stored[1]))


def test_the_newest_steps_of_the_lineage_stay_and_older_ones_go_unless_read():
    book = OffloadBook()
    for step in (2, 4, 6):
        book.offload(book.commit(step))
    (removal,) = decide_retention(book.state(), 2)
    assert removal.offloaded.commit.attempt.step == 2
    assert decide_retention(book.state(), 3) == []
    seen = book.state()
    book.put(KEYS.readers(removal.offloaded.commit.attempt) + "n1", b"1")
    assert not book.does(removal_txn(seen, removal, "n0"))
    book.delete(KEYS.readers(removal.offloaded.commit.attempt) + "n1")
    assert book.does(removal_txn(seen, removal, "n0"))
    assert not book.does(removal_txn(seen, removal, "n1"))
    state = book.state()
    assert sorted(o.commit.attempt.step for o in state.offloaded.values()) == [4, 6]
    assert [g.offloaded.commit.attempt.step for g in state.offload_retired.values()] == [2]
    assert book.dues() == []  # a retired step is never due again, though its commit is there


def test_retention_counts_good_steps_only_and_needs_the_newer_ones_to_stand():
    book = OffloadBook()
    commits = {step: book.commit(step) for step in (2, 4, 6)}
    for commit in commits.values():
        book.offload(commit)
    (removal,) = decide_retention(book.state(), 2)
    seen = book.state()
    book.delete(KEYS.offloaded(commits[6].attempt))
    assert not book.does(removal_txn(seen, removal, "n0"))
    book.offload(commits[6])
    book.close(1, 2, "L2", close=r.Close.BAD, commit=commits[6])
    assert decide_retention(book.state(), 2) == []


def test_steps_of_an_older_lineage_go_when_the_current_one_has_enough():
    book = OffloadBook()
    book.offload(book.commit(2))
    book.begin(2)
    book.close(2, 1, "L2", base=("L1", 2))
    book.offload(book.commit(4, lineage="L2"))
    assert decide_retention(book.state(), 2) == []
    book.offload(book.commit(6, lineage="L2"))
    assert [x.offloaded.commit.lineage for x in decide_retention(book.state(), 2)] == ["L1"]


def test_only_names_in_the_steps_own_directory_are_deleted():
    commit, groups, stored = whole_checkpoint()
    foreign = replace(stored[0], manifest="1000.job/somebody-elses/file")
    checkpoint = checkpoint_of(commit, groups, [foreign, stored[1]])
    gone = r.OffloadRetired(
        r.Offloaded(commit, checkpoint_name(commit.attempt), "d", 1, "n0"), "n", "w"
    )
    names = names_to_delete(gone, checkpoint)
    assert "1000.job/somebody-elses/file" not in names
    assert len(names) == 5
    assert checkpoint_name(commit.attempt) not in names


def test_only_uploads_of_our_own_settled_attempts_are_abandoned():
    book = OffloadBook()
    waits, over = book.commit(2), book.commit(4)
    book.offload(over)
    names = {
        "waits": rank_name(waits.attempt, "n0", 0),
        "over": rank_name(over.attempt, "n0", 0),
        "old ledger": rank_name(attempt(1, 9, ledger="3" * 32), "n0", 0),
        "other job": rank_name(over.attempt, "n0", 0).replace("1000.job", "1000.other"),
        "strange": "1000.job/file",
    }
    begun = [Pending(name, what, 60.0) for what, name in names.items()]
    assert [p.upload_id for p in abandoned(begun, book.state(), 2)] == ["over"]
    old = [Pending(p.name, p.upload_id, 1e6) for p in begun]
    assert [p.upload_id for p in abandoned(old, book.state(), 2)] == ["waits", "over"]


# -- restore decides ------------------------------------------------------------------------------


def facts_with(book, bucket, groups=None, patient=False):
    return Facts(book.state(), {}, (), groups or {}, patient, bucket)


def decided(book, bucket, groups=None, patient=False, step=None):
    finding = decide_restore(facts_with(book, bucket, groups, patient), step, 4)
    return finding.choice, finding.commit.attempt.step if finding.commit else finding.reason


def two_steps():
    """Step 2 only in the store, step 4 in both, by the records; RAM has nothing."""
    book = OffloadBook()
    groups = {}
    for step in (2, 4):
        commit = book.commit(step)
        book.offload(commit)
        parts = [share("n0", range(4), ("s1", "s2", "s3"))]
        groups[commit.attempt.key] = [group_record(commit.attempt, 0, *parts)]
    book.delete(KEYS.commit("L1", 2))
    two, four = sorted(groups)
    return book, groups, two, four


def test_candidates_reach_steps_that_only_the_store_has():
    book, *_ = two_steps()
    assert [c.attempt.step for c in candidates(book.state(), None)] == [4, 2]
    assert [c.attempt.step for c in candidates(book.state(), 2)] == [2]


def test_the_newest_step_that_the_store_has_is_taken():
    book, groups, two, four = two_steps()
    assert decided(book, Bucket({two: "", four: ""}), groups) == (r.Choice.RESTORE, 4)
    truncated = Bucket({two: "", four: "rank-1: 5 bytes, needs 9"})
    assert decided(book, truncated, groups) == (r.Choice.RESTORE, 2)
    assert decided(book, truncated, groups, patient=True)[0] is None
    cut = Bucket({two: "", four: ""}, {four: {1: "rank-1: 5 bytes, needs 9"}})
    assert decided(book, cut, groups) == (r.Choice.RESTORE, 2)


def test_ranks_whose_objects_are_cut_may_be_had_from_ram():
    book, groups, two, four = two_steps()
    cut = Bucket({two: "", four: ""}, {four: {1: "rank-1: 5 bytes, needs 9"}})
    (share_,) = groups[four][0].shares

    def found(*ranks):
        held = [
            HeldFile(groups[four][0].attempt, r.FileKind.SLOT, "n0", k, share_.manifest_digest)
            for k in ranks
        ]
        answers = {"n0": HeldReply("s0", tuple(held), 0)}
        facts = Facts(book.state(), answers, (), groups, False, bucket=cut)
        return decide_restore(facts, None, 4).commit.attempt.step

    assert found(1) == 4
    assert found(0, 2, 3) == 2


def test_a_decision_says_whether_ram_alone_can_prove_the_step():
    book, groups, two, four = two_steps()
    of = Facts(book.state(), {}, (), groups, False, bucket=Bucket({two: "", four: ""}))
    assert decide_restore(of, None, 4).stored


def test_a_store_that_is_away_is_waited_for_and_then_not_known():
    book, groups, *_ = two_steps()
    away = Bucket({}, away="no answer")
    choice, reason = decided(book, away, groups, patient=True)
    assert choice is None
    choice, reason = decided(book, away, groups)
    assert choice is r.Choice.UNPROVEN
    assert "away: no answer" in reason
    assert decided(book, None, groups)[0] is r.Choice.UNPROVEN


def test_nothing_is_only_said_when_the_store_has_nothing_either():
    book = OffloadBook()
    assert decided(book, Bucket())[0] is r.Choice.NOTHING
    assert decided(book, None)[0] is r.Choice.NOTHING
    assert decided(book, Bucket(away="no answer"), patient=True)[0] is None
    assert decided(book, Bucket(away="no answer"))[0] is r.Choice.UNPROVEN
    choice, reason = decided(book, Bucket(manifests=("1000.job/x/checkpoint.json",)))
    assert choice is r.Choice.UNPROVEN
    assert "1000.job/x/checkpoint.json" in reason


def test_the_base_of_a_lineage_is_known_when_only_the_store_has_it():
    book = OffloadBook()
    commit = book.commit(2)
    book.offload(commit)
    book.delete(KEYS.commit("L1", 2))
    book.begin(2)
    book.close(2, 1, "L2", base=("L1", 2))
    assert book.state().latest() == commit
    assert book.state().steps("L1") == []
    assert book.state().committed(commit.attempt) is None


def test_offload_records_stay_small():
    commit = book_commit = OffloadBook().commit(2)
    record = r.Offloaded(book_commit, checkpoint_name(commit.attempt), "d" * 64, 1 << 50, "n0")
    assert len(pack(record)) < 4096
    ranks = tuple(
        r.RankObject(k, rank_name(commit.attempt, "node-0123456789", k), 1 << 40) for k in range(16)
    )
    stored = r.ShareObjects(commit.attempt, "node-0123456789", "m" * 200, "d" * 64, 1 << 20, ranks)
    assert len(pack(stored)) < 16 * 1024
