"""What is restored: decided from records and from what living stores say, never guessed.

Three answers, never mixed up: a step that is provable for every rank; provably nothing; and "cannot
know". An older step only after those who could prove the newer one had their time.
"""

from dataclasses import replace
from itertools import combinations

import pytest
from ledger_world import KEYS, Book, attempt, commit_record, group_record, share

from p2pckpt import records as r
from p2pckpt.restore.locate import (
    Facts,
    candidates,
    decide_close,
    decide_restore,
    lineage_after,
    sources_of,
)
from p2pckpt.wire import HeldFile, HeldReply

A = attempt(30, 30)
SLOT, SHARD = r.FileKind.SLOT, r.FileKind.SHARD


def held(of, kind, part, owner="n0", digest=None):
    return HeldFile(of, kind, owner, part, digest or f"digest-{owner}")


def answers(**files):
    return {node: HeldReply(f"store-{node}", tuple(fs), 1) for node, fs in files.items()}


def groups_of(*commits, ranks=range(4)):
    return {c.attempt.key: [group_record(c.attempt, 0, share("n0", ranks, "abc"))] for c in commits}


def facts(book, replies=None, silent=(), patient=False, groups=None):
    state = book.state()
    groups = groups_of(*state.commits.values()) if groups is None else groups
    return Facts(state, replies or {}, silent, groups, patient)


def shards(of, *parts):
    return {f"h{p}": HeldReply(f"s{p}", (held(of, SHARD, p),), 1) for p in parts}


def slots(of, ranks=range(4)):
    return answers(n0=[held(of, SLOT, rank) for rank in ranks])


def with_steps(*steps, lineage="L1"):
    book = Book()
    book.close(1, 0, lineage)
    return book, [book.commit(step, lineage) for step in steps]


# -- candidates ------------------------------------------------------------------------------------


def steps(state, step=None):
    return [(c.lineage, c.attempt.step) for c in candidates(state, step)]


def test_newest_first_then_base_after_base():
    book, _ = with_steps(9, 10, 20, 30)
    book.close(2, 1, "L2", base=("L1", 20))
    book.commit(25, "L2", generation=2)
    book.commit(28, "L2", generation=2)
    book.close(3, 1, "L3", base=("L2", 25))
    book.commit(26, "L3", generation=3)
    expected = [("L3", 26), ("L2", 25), ("L1", 20), ("L1", 10), ("L1", 9)]
    assert steps(book.state()) == expected
    assert steps(book.state(), 20) == [("L1", 20)]
    assert steps(book.state(), 30) == [], "an abandoned step is not asked for by number alone"
    assert steps(book.state(), 28) == []


def test_the_same_step_in_two_lineages_is_the_nearer_one_first():
    book, _ = with_steps(10, 20)
    book.close(2, 1, "L2", base=("L1", 10))
    book.commit(20, "L2", generation=2)
    assert steps(book.state(), 20) == [("L2", 20)]


def test_a_circle_of_bases_ends():
    book, _ = with_steps(10)
    book.commit(20, "L2", generation=2)
    book.close(2, 1, "L2", base=("L1", 10))
    book.close(1, 1, "L1", base=("L2", 20))
    assert steps(book.state()) == [("L2", 20), ("L1", 10)]


def test_a_continued_lineage_keeps_its_base():
    book, _ = with_steps(10, 20)
    book.close(2, 1, "L2", base=("L1", 10))
    book.commit(12, "L2", generation=2)
    book.close(3, 1, "L2", base=("L1", 10))
    assert steps(book.state()) == [("L2", 12), ("L1", 10)]


def test_quarantined_steps_are_no_candidates():
    book, (ten, _, thirty) = with_steps(10, 20, 30)
    book.close(2, 1, "Lx", close=r.Close.BAD, commit=thirty)
    assert steps(book.state()) == [("L1", 20), ("L1", 10)]
    book.close(2, 2, "Lx", close=r.Close.RETRY, commit=ten)
    assert steps(book.state()) == [("L1", 20), ("L1", 10)]


# -- provable --------------------------------------------------------------------------------------


def test_every_subset_of_shards_and_slots():
    # rs:2,1, two ranks: provable iff two different shards, or both ranks' own slots
    book = Book()
    book.close(1, 0, "L1")
    commit = book.commit(30, world_size=2)
    pieces = [("s", 0), ("s", 1), ("s", 2), ("r", 0), ("r", 1)]
    for size in range(6):
        for chosen in combinations(pieces, size):
            replies = {
                f"{kind}{i}": HeldReply(
                    f"st{kind}{i}", (held(A, SHARD if kind == "s" else SLOT, i),), 1
                )
                for kind, i in chosen
            }
            found = decide_restore(
                facts(book, replies, groups=groups_of(commit, ranks=range(2))), None, 2
            )
            ranks = {i for kind, i in chosen if kind == "r"}
            provable = len([1 for kind, _ in chosen if kind == "s"]) >= 2 or ranks == {0, 1}
            assert (found.choice is r.Choice.RESTORE) == provable, chosen
            if not provable:
                assert found.choice is r.Choice.UNPROVEN
                assert "30" in found.reason


@pytest.mark.parametrize(
    "file",
    [
        held(A, SHARD, 1, digest="another manifest"),
        held(attempt(31, 30), SHARD, 1),
        held(attempt(30, 30, ledger="9" * 32), SHARD, 1),
        held(A, SHARD, 0),  # the same index twice is one shard
        held(A, SLOT, 9),  # a rank of nobody
    ],
)
def test_what_is_not_this_share_proves_nothing(file):
    book, _ = with_steps(30)
    replies = {**shards(A, 0), "x": HeldReply("sx", (file,), 1)}
    assert decide_restore(facts(book, replies), None, 4).choice is r.Choice.UNPROVEN


def test_a_missing_group_record_proves_nothing():
    book, _ = with_steps(30)
    for groups in ({}, {A.key: []}):
        found = decide_restore(facts(book, slots(A), groups=groups), None, 4)
        assert found.choice is r.Choice.UNPROVEN


def test_one_lost_share_of_two_makes_the_step_unprovable_for_all():
    book, (commit,) = with_steps(30)
    two = group_record(A, 0, share("n0", [0, 1], "abc"), share("n1", [2, 3], "abc"))
    replies = answers(n0=[held(A, SLOT, 0), held(A, SLOT, 1)])
    found = decide_restore(facts(book, replies, groups={A.key: [two]}), None, 4)
    assert found.choice is r.Choice.UNPROVEN
    assert "[2, 3] of n1" in found.reason
    sources = sources_of(two.shares[0], A, facts(book, replies))
    assert sources.slots == {0: ("n0",), 1: ("n0",)}
    assert commit.groups == 1


# -- which step ------------------------------------------------------------------------------------


def test_the_newest_provable_step():
    book, (ten, twenty) = with_steps(10, 20)
    both = {**slots(twenty.attempt), **shards(ten.attempt, 0, 1)}
    found = decide_restore(facts(book, both), None, 4)
    assert (found.choice, found.commit) == (r.Choice.RESTORE, twenty)


def test_an_older_step_waits_for_known_stores_and_says_what_it_passed_over():
    book, (ten, _) = with_steps(10, 20)
    waiting = decide_restore(facts(book, slots(ten.attempt), patient=True), None, 4)
    assert waiting.choice is None
    assert "step 20" in waiting.reason
    found = decide_restore(facts(book, slots(ten.attempt)), None, 4)
    assert (found.choice, found.commit) == (r.Choice.RESTORE, ten)
    assert "step 20" in found.reason


def test_the_newest_step_waits_for_nobody():
    book, (commit,) = with_steps(20)
    found = decide_restore(facts(book, slots(commit.attempt), silent=["x"], patient=True), None, 4)
    assert found.choice is r.Choice.RESTORE


def test_a_silent_agent_delays_an_older_step_only_for_its_time():
    book, (ten, _) = with_steps(10, 20)
    found = decide_restore(facts(book, slots(ten.attempt), silent=["x"], patient=False), None, 4)
    assert found.commit == ten


def test_a_silent_agent_makes_nothing_unproven_after_its_time():
    found = decide_restore(facts(Book(), silent=["x"], patient=False), None, 4)
    assert found.choice is r.Choice.UNPROVEN


def test_a_silent_agent_never_makes_nothing():
    for patient in (True, False):
        found = decide_restore(facts(Book(), silent=["x"], patient=patient), None, 4)
        assert found.choice is not r.Choice.NOTHING


def test_unreadable_records_that_could_tell_a_newer_step_are_cannot_know():
    for key in (KEYS.commit("L1", 99), KEYS.closed(1, 9), KEYS.generation):
        book, (commit,) = with_steps(20)
        book.put(key, b"damaged")
        found = decide_restore(facts(book, slots(commit.attempt)), None, 4)
        assert found.choice is r.Choice.UNPROVEN
        assert key in found.reason


def test_other_unreadable_records_do_not_keep_a_job_from_its_newest_step():
    for key in (KEYS.outcome(A), KEYS.retired(A), KEYS.decision(1, 9), KEYS.floor):
        book, (commit,) = with_steps(20)
        book.put(key, b"damaged")
        assert key in book.state().unreadable
        assert decide_restore(facts(book, slots(commit.attempt)), None, 4).commit == commit


def test_a_step_that_was_asked_for_is_that_step_or_an_error():
    book, (ten, _) = with_steps(10, 20)
    assert decide_restore(facts(book, slots(ten.attempt)), 10, 4).commit == ten
    for step in (20, 15, 99):
        found = decide_restore(facts(book, slots(ten.attempt)), step, 4)
        assert found.choice is r.Choice.UNPROVEN, step
        assert str(step) in found.reason


def test_another_world_size_is_refused_with_both_numbers():
    """B030, the default."""
    book, (commit,) = with_steps(20)
    found = decide_restore(facts(book, slots(commit.attempt)), None, 8)
    assert found.choice is r.Choice.UNPROVEN
    assert "4 ranks" in found.reason
    assert "has 8" in found.reason


def test_an_intact_newest_step_of_another_world_size_is_not_passed_over():
    # 4 ranks saved step 10, then 8 ranks saved step 20, intact. A launch of 4 must be told, not be
    # sent back to 10: its new lineage would retire step 20 for good.
    book = Book()
    book.close(1, 0, "L1")
    ten = book.commit(10, world_size=4)
    twenty = book.commit(20, world_size=8)
    groups = {**groups_of(ten), **groups_of(twenty, ranks=range(8))}
    replies = {**slots(twenty.attempt, range(8)), **shards(ten.attempt, 0, 1)}
    found = decide_restore(facts(book, replies, groups=groups), None, 4)
    assert found.choice is r.Choice.UNPROVEN


def test_all_candidates_in_quarantine_is_never_nothing():
    book, (commit,) = with_steps(20)
    book.close(2, 1, "Lx", close=r.Close.BAD, commit=commit)
    for step, why in ((None, "no current lineage"), (20, "quarantined"), (21, "not committed")):
        found = decide_restore(facts(book, slots(commit.attempt)), step, 4)
        assert found.choice is r.Choice.UNPROVEN
        assert why in found.reason, found


# -- nothing ---------------------------------------------------------------------------------------


def test_nothing_needs_no_commit_no_silence_no_stranger():
    assert decide_restore(facts(Book(), answers(n0=[], n1=[])), None, 4).choice is r.Choice.NOTHING
    assert decide_restore(facts(Book(), answers(n0=[])), 7, 4).choice is r.Choice.NOTHING


def test_nothing_waits_until_agents_had_time_to_come():
    early = replace(facts(Book(), answers(n0=[])), early=True, patient=False)
    found = decide_restore(early, None, 4)
    assert found.choice is None, "whoever waits longer than it is early for is told nothing"
    assert "about to come" in found.reason


def test_bytes_of_another_ledger_are_cannot_know():
    stranger = attempt(30, 30, ledger="9" * 32)
    found = decide_restore(facts(Book(), slots(stranger)), None, 4)
    assert found.choice is r.Choice.UNPROVEN
    assert "rebuild" in found.reason


def test_commits_without_a_lineage_are_cannot_know():
    book = Book()
    book.commit(10)
    assert decide_restore(facts(book), None, 4).choice is r.Choice.UNPROVEN


def test_bytes_of_a_generation_that_the_ledger_forgot_are_cannot_know():
    # etcd was restored from a backup of generation 1; a holder has whole shards of generation 5.
    forgotten = attempt(30, 30, generation=5)
    found = decide_restore(facts(Book(), slots(forgotten)), None, 4)
    assert found.choice is r.Choice.UNPROVEN


def test_leftovers_of_a_first_save_that_never_committed_are_nothing():
    book = Book(generation=2)
    found = decide_restore(facts(book, slots(attempt(0, 5, generation=1))), None, 4)
    assert found.choice is r.Choice.NOTHING


# -- lineage_after ---------------------------------------------------------------------------------


def test_the_newest_goes_on_anything_else_opens_a_lineage():
    book, (ten, twenty) = with_steps(10, 20)
    assert lineage_after(book.state(), twenty, "new") == ("L1", None)
    assert lineage_after(book.state(), ten, "new") == ("new", r.Base("L1", 10))
    book.close(2, 1, "L2", base=("L1", 10))
    assert lineage_after(book.state(), ten, "new") == ("new", r.Base("L1", 10))
    twelve = book.commit(12, "L2", generation=2)
    assert lineage_after(book.state(), twelve, "new") == ("L2", r.Base("L1", 10))


def test_after_a_quarantine_the_lineage_is_a_new_one():
    # The bad step stays committed at 20: going on in L1 could never commit 15 again.
    book, (ten, twenty) = with_steps(10, 20)
    book.close(2, 1, "L1", close=r.Close.BAD, commit=twenty)
    assert lineage_after(book.state(), ten, "new") == ("new", r.Base("L1", 10))


# -- decide_close ----------------------------------------------------------------------------------

DECISION = r.Decision(
    generation=2,
    ballot=1,
    choice=r.Choice.RESTORE,
    by="n0",
    reason="",
    commit=commit_record(A, "L1"),
    lineage="L2",
    base=r.Base("L1", 30),
)


def report(group, failed=None, retryable=True):
    return r.GroupReport(
        2,
        1,
        group,
        (r.NodeReport(f"n{group}", (group,), tuple((failed or {}).items()), retryable),),
    )


def test_ok_needs_every_group():
    assert decide_close(DECISION, [], 2, False) is None
    assert decide_close(DECISION, [report(0)], 2, False) is None
    assert decide_close(DECISION, [report(1), report(1)], 2, False) is None
    closed = decide_close(DECISION, [report(1), report(0)], 2, True)
    assert closed.close is r.Close.OK
    assert (closed.lineage, closed.base, closed.commit) == ("L2", DECISION.base, DECISION.commit)


def test_time_is_retry_and_never_bad():
    closed = decide_close(DECISION, [report(0)], 2, True)
    assert closed.close is r.Close.RETRY
    failed = report(1, {1: "peer not back"}, retryable=True)
    for groups in ([failed], [report(0), failed]):
        assert decide_close(DECISION, groups, 2, False).close is r.Close.RETRY


def test_wrong_bytes_are_bad_and_beat_retry():
    bad, slow = report(1, {1: "chunks"}, retryable=False), report(0, {0: "away"})
    for groups in ([bad], [slow, bad], [bad, slow]):
        closed = decide_close(DECISION, groups, 3, False)
        assert closed.close is r.Close.BAD
        assert closed.commit == DECISION.commit
        assert "1" in closed.reason


def test_a_node_without_failures_is_never_bad():
    assert decide_close(DECISION, [report(0, {}, retryable=False)], 1, False).close is r.Close.OK


def test_bad_gives_the_reason_of_the_rank_whose_bytes_were_wrong():
    away, bad = report(0, {0: "peer away"}), report(1, {1: "chunks [3] differ"}, retryable=False)
    assert "chunks" in decide_close(DECISION, [away, bad], 2, False).reason


def test_reasons_are_bounded():
    closed = decide_close(DECISION, [report(0, {0: "x" * 100_000})], 1, False)
    assert len(closed.reason) <= 500
