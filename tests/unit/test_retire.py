"""Retirement: irrevocable, so every condition is in the transaction; and the ledger's clean-up.

What must hold: at any time, after whatever retirements, the newest keep_last steps of the current
lineage and everything that a reader or a young lineage rests on are still there.
"""

from random import Random

import pytest
from ledger_world import (
    KEYS,
    LEDGER,
    Book,
    attempt,
    commit_record,
    generation_record,
    group_record,
    outcome_of,
    share,
)

from p2pckpt import records as r
from p2pckpt.agent.retire import (
    OPERATIONS,
    RECENT_OUTCOMES,
    decide_retire,
    decide_sweep,
    decide_trim,
    retire_txn,
    sweep_txns,
    trim_txn,
)
from p2pckpt.backends.inproc.ledger import MAX_TXN_COMPARES, MAX_TXN_OPERATIONS
from p2pckpt.jobstate import JobState
from p2pckpt.save.commit import commit_txn


def with_steps(*steps, lineage="L1"):
    book = Book()
    book.close(1, 0, lineage)
    for step in steps:
        book.commit(step, lineage)
    return book


def due(state, keep_last):
    return [(x.commit.lineage, x.commit.attempt.step) for x in decide_retire(state, keep_last)]


# -- decide_retire ---------------------------------------------------------------------------------


def test_all_but_the_newest_keep_last_oldest_first():
    state = with_steps(9, 10, 100, 20).state()
    assert due(state, 1) == [("L1", 9), ("L1", 10), ("L1", 20)]
    assert due(state, 3) == [("L1", 9)]
    assert due(state, 4) == []
    assert due(state, 5) == []
    assert due(state, 0) == []


def test_older_lineages_go_only_after_keep_last_steps_of_the_new_one():
    book = with_steps(10, 20, 30)
    book.close(2, 1, "L2", base=("L1", 10))
    assert due(book.state(), 1) == []
    assert due(book.state(), 2) == []
    book.commit(12, "L2", generation=2)
    assert due(book.state(), 2) == []
    assert due(book.state(), 1) == [("L1", 10), ("L1", 20), ("L1", 30)]


def test_without_a_lineage_nothing_goes():
    book = Book()
    book.commit(10)
    book.commit(20)
    assert due(book.state(), 1) == []


def test_a_quarantined_step_does_not_count_as_kept():
    # 20 was read and is wrong for good; keep_last=1 would retire 10, the only good step.
    book = with_steps(10, 20)
    bad = book.state().commits["L1", 20]
    book.begin(2)
    book.close(2, 1, "L1", close=r.Close.BAD, commit=bad)
    assert ("L1", 10) not in due(book.state(), 1)


def test_what_a_rebuild_kept_counts_once_it_was_restored():
    """Seed 1381. A rebuilt ledger has 10 and 20; the one before it had retired 20, whose bytes may
    be gone. Then 10 is all there is, until a launch began with 20."""
    book = with_steps()
    for step in (10, 20):
        of = attempt(step, step, ledger="2" * 32)
        book.put(KEYS.commit("L1", step), commit_record(of, "L1"))
    assert due(book.state(), 1) == []
    book.begin(2)
    book.close(2, 1, "L1", commit=book.state().commits["L1", 20])
    assert due(book.state(), 1) == [("L1", 10)]


# -- retire_txn ------------------------------------------------------------------------------------


def retiring(book, keep_last=1, index=0):
    state = book.state()
    return retire_txn(state, decide_retire(state, keep_last)[index], "n0")


def test_a_retirement_takes_the_commit_and_its_groups_and_leaves_the_record():
    book = with_steps(10, 20)
    ten = attempt(10, 10)
    book.groups(ten, group_record(ten, 0, share("n0", range(4), "abc")))
    txn = retiring(book)
    assert book.does(txn)
    state = book.state()
    assert state.settled(ten) == "retired"
    assert not book.has(KEYS.group(ten, 0))
    assert state.latest().attempt.step == 20
    assert not book.does(txn)


READER = KEYS.readers(attempt(10, 10)) + "n3"
MEANWHILE = {
    "somebody reads it": lambda b: b.put(READER, b"1"),
    "a newer generation began": lambda b: b.begin(2),
    "the newer step is gone": lambda b: b.delete(KEYS.commit("L1", 20)),
    "it is retired already": lambda b: b.put(
        KEYS.retired(attempt(10, 10)), r.Retired(attempt(10, 10), "x", "y")
    ),
    "its commit is gone": lambda b: b.delete(KEYS.commit("L1", 10)),
    "another ledger": lambda b: b.put(KEYS.ledger_id, b"2" * 32),
}


@pytest.mark.parametrize("what", list(MEANWHILE))
def test_a_retirer_that_slept_changes_nothing(what):
    book = with_steps(10, 20)
    txn = retiring(book)
    MEANWHILE[what](book)
    before = book.etcd.list("")
    assert not book.does(txn)
    assert book.etcd.list("") == before


def test_only_its_own_readers_protect_a_step():
    book = with_steps(10, 20)
    book.put(KEYS.readers(attempt(20, 20)) + "n3", b"1")
    book.put(KEYS.readers(attempt(10, 10, generation=2)) + "n3", b"1")
    assert book.does(retiring(book))


def test_a_reader_that_left_protects_nothing():
    book = with_steps(10, 20)
    book.put(READER, b"1")
    assert not book.does(retiring(book))
    book.delete(READER)
    assert book.does(retiring(book))


def test_a_retirer_that_slept_does_not_take_the_base_of_a_new_lineage():
    # The retirer read "10 goes, 20 is newer". Then, in the same generation, a restore of step 10
    # was closed OK: lineage L2, base (L1, 10), no step of its own yet. Its readers have left.
    book = with_steps(10, 20)
    txn = retiring(book)
    book.close(1, 1, "L2", base=("L1", 10))
    assert book.state().latest().attempt.step == 10
    book.does(txn)
    assert book.state().latest() is not None
    assert book.state().latest().attempt.step == 10


@pytest.mark.parametrize("keep_last", [1, 5, r.MAX_KEEP_LAST])
def test_a_retirement_fits_one_transaction(keep_last):
    book = with_steps(*range(keep_last + 1))
    txn = retiring(book, keep_last)
    assert len(txn.compares) <= MAX_TXN_COMPARES
    assert len(txn.puts) + len(txn.deletes) <= MAX_TXN_OPERATIONS


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_retired_latest_and_its_keepers_stay(seed):
    # Retirers with states of different age, commits and restores in between, no quarantine; a
    # retirer re-reads after each restore (the case above shows why that matters).
    rng, book, step, lineages = Random(seed), with_steps(), 0, 1
    for _ in range(60):
        state = book.state()
        current = state.current_lineage()
        name = f"L{lineages}"
        latest = state.latest()
        match rng.randrange(3):
            case 0:
                step += rng.randrange(1, 5)
                book.commit(step, name, ordinal=step)
            case 1 if state.commits:
                old = rng.choice(sorted(state.commits))
                lineages += 1
                book.close(1, lineages, f"L{lineages}", base=old)
                latest = book.state().latest()
            case 2 if current:
                for what in decide_retire(state, keep_last=2):
                    book.does(retire_txn(state, what, "n0"))
                after = book.state()
                assert after.latest() == latest
                kept = after.steps(current.lineage)
                assert kept == state.steps(current.lineage)[-2:]
        if latest:
            assert book.state().latest() is not None


# -- decide_trim -----------------------------------------------------------------------------------


def settle(book):
    """Trim until there is nothing to trim."""
    for _ in range(20):
        if (trim := decide_trim(book.state())) is None:
            return
        assert book.does(trim_txn(book.state(), trim))
    raise AssertionError("trimming does not come to rest")


def test_the_floor_follows_decided_attempts_and_keeps_the_recent_ones():
    book = with_steps()
    for ordinal in range(20):
        book.decide(attempt(ordinal, ordinal), r.Verdict.ABORT)
    settle(book)
    state = book.state()
    assert state.floor == f"0000000001.{20 - RECENT_OUTCOMES:010d}"
    assert len(state.outcomes) == RECENT_OUTCOMES
    assert all(state.settled(attempt(i, i)) for i in range(20))
    assert state.settled(attempt(20, 20)) == ""


def test_the_floor_stops_at_the_first_open_attempt():
    book = with_steps()
    for ordinal in (*range(12), *range(13, 40)):
        book.decide(attempt(ordinal, ordinal), r.Verdict.ABORT)
    settle(book)
    assert book.state().floor == f"0000000001.{12 - RECENT_OUTCOMES:010d}"
    assert book.state().settled(attempt(12, 12)) == ""


def test_a_new_generation_lifts_the_floor_over_all_older_ones():
    book = with_steps(5)
    for ordinal in range(30):
        book.decide(attempt(ordinal, ordinal), r.Verdict.ABORT)
    book.begin(2)
    settle(book)
    assert book.state().floor == "0000000002.0000000000"
    assert book.state().settled(attempt(99, 99))
    assert book.state().latest().attempt.step == 5


def test_trimming_never_frees_a_commit():
    book = with_steps(*range(0, 300, 10))
    book.begin(2)
    settle(book)
    state = book.state()
    assert len(state.commits) == 30
    assert all(state.settled(c.attempt) == "" for c in state.commits.values())
    assert state.latest().attempt.step == 290


def test_trimming_keeps_every_closing_that_latest_and_bases_need():
    book = with_steps(10, 20)
    book.begin(2)
    book.close(2, 1, "L2", base=("L1", 10))
    book.begin(3)
    latest = book.state().latest()
    settle(book)
    assert book.state().latest() == latest
    book.begin(4)
    settle(book)
    assert book.state().latest() == latest


def test_a_slept_commit_of_a_trimmed_attempt_is_refused():
    book = with_steps()
    slept = attempt(0, 1000)
    txn = commit_txn(book.state(), slept, (), outcome_of(slept))
    for ordinal in range(20):
        book.decide(attempt(ordinal, 1000 if ordinal == 0 else ordinal), r.Verdict.ABORT)
    settle(book)
    assert not book.has(KEYS.outcome(slept))
    assert not book.does(txn)


def test_a_trimmer_that_slept_does_not_lower_the_floor():
    # Outcomes between the two floors are deleted by then: the attempts would be open again, their
    # bytes are never freed, and the floor can never pass them again in this generation.
    book = with_steps()
    for ordinal in range(12):
        book.decide(attempt(ordinal, ordinal), r.Verdict.ABORT)
    state = book.state()
    slept = trim_txn(state, decide_trim(state))
    for ordinal in range(12, 30):
        book.decide(attempt(ordinal, ordinal), r.Verdict.ABORT)
    settle(book)
    floor = book.state().floor
    book.does(slept)
    assert book.state().floor >= floor
    assert all(book.state().settled(attempt(i, i)) for i in range(30))


def test_quarantine_outlives_the_generation_that_found_it():
    # Generation 2: step 30 of L1 is away; ballot 2 takes 20 as base of L2, reads it, finds it
    # wrong: BAD(20). Generation 3 trims the ledger, and would take 20 again.
    book = with_steps(10, 20, 30)
    twenty = book.state().commits["L1", 20]
    book.begin(2)
    book.close(2, 2, "L2", base=("L1", 20), close=r.Close.BAD, commit=twenty)
    book.begin(3)
    settle(book)
    assert book.state().quarantined() == {twenty.attempt.key}


def test_quarantine_goes_with_its_commit():
    book = with_steps(10, 20, 30)
    twenty = book.state().commits["L1", 20]
    book.begin(2)
    book.close(2, 2, "L2", base=("L1", 20), close=r.Close.BAD, commit=twenty)
    book.does(retire_txn(book.state(), decide_retire(book.state(), 1)[1], "n0"))
    book.begin(3)
    settle(book)
    assert book.state().quarantined() == set()


def test_much_to_trim_is_trimmed_in_pieces_that_fit():
    book = with_steps()
    for ordinal in range(3 * OPERATIONS):
        book.decide(attempt(ordinal, ordinal), r.Verdict.ABORT)
    trim = decide_trim(book.state())
    txn = trim_txn(book.state(), trim)
    assert len(txn.puts) + len(txn.deletes) <= MAX_TXN_OPERATIONS
    settle(book)
    assert len(book.state().outcomes) == RECENT_OUTCOMES


def test_nothing_to_trim_is_nothing_to_do():
    assert decide_trim(JobState(KEYS)) is None
    book = with_steps(10)
    settle(book)
    assert decide_trim(book.state()) is None


@pytest.mark.parametrize("floor", [None, b"damaged"])
def test_without_a_floor_there_is_no_trim(floor):
    book = with_steps(10)
    book.delete(KEYS.floor) if floor is None else book.put(KEYS.floor, floor)
    assert decide_trim(book.state()) is None


# -- decide_sweep ----------------------------------------------------------------------------------


def sweep(book):
    """Sweep as the agent of rank 0 does when a generation begins."""
    state = book.state()
    needless = decide_sweep(state, book.etcd.list(KEYS.root))
    assert all(book.does(txn) for txn in sweep_txns(state, needless))
    return needless


def test_no_group_record_outlives_its_attempt():
    book = with_steps()
    open_one = attempt(4, 4)
    book.groups(open_one, group_record(open_one, 0))
    assert sweep(book) == (), "it may still commit"
    book.begin(2)
    settle(book)
    assert sweep(book) == (KEYS.group(open_one, 0),)
    assert not book.has(KEYS.group(open_one, 0))


def test_all_groups_of_a_larger_older_generation_go():
    book = Book()
    book.begin(1, pieces=3)
    gone = attempt(0, 0)
    book.groups(gone, *(group_record(gone, g) for g in range(3)))
    book.decide(gone, r.Verdict.ABORT)
    book.begin(2, pieces=1)
    settle(book)
    sweep(book)
    assert not book.etcd.list(KEYS.groups_of(gone)).entries


def offloaded(commit):
    return r.Offloaded(commit, f"{commit.attempt.key}/checkpoint.json", "d" * 64, 100, "n0")


def test_groups_of_committed_and_offloaded_steps_stay():
    book = with_steps(10, 20)
    steps = [commit.attempt for commit in book.state().commits.values()]
    for each in steps:
        book.groups(each, group_record(each, 0))
    book.put(KEYS.offloaded(steps[0]), offloaded(book.state().commits["L1", 10]))
    book.delete(KEYS.commit("L1", 10))
    book.begin(2)
    assert sweep(book) == ()
    book.delete(KEYS.offloaded(steps[0]))
    assert sweep(book) == (KEYS.group(steps[0], 0),)


UNREADABLE = {
    "its commit": (KEYS.commit("L1", 10), True),
    "any commit": (KEYS.commit("L9", 99), True),
    "its outcome": (KEYS.outcome(attempt(10, 10)), True),
    "its offload": (KEYS.offloaded(attempt(10, 10)), True),
    "another's outcome": (KEYS.outcome(attempt(11, 11)), False),
    "another's offload": (KEYS.offloaded(attempt(11, 11)), False),
}


@pytest.mark.parametrize("what", list(UNREADABLE))
def test_groups_that_an_unreadable_record_may_be_about_stay(what):
    key, stays = UNREADABLE[what]
    book, ten = with_steps(), attempt(10, 10)
    book.groups(ten, group_record(ten, 0))
    book.begin(2)
    book.put(key, b"damaged")
    sweep(book)
    assert book.has(KEYS.group(ten, 0)) is stays


def test_the_sweep_takes_what_only_older_generations_needed_and_nothing_else():
    book = with_steps(10)
    book.begin(2)
    digest = book.state().generation.roster_digest
    old = {
        KEYS.group(attempt(7, 7), 2), KEYS.report(1, 3, 0), KEYS.trainers(1, "n0"),
        KEYS.roster("e" * 32, 0), KEYS.roster("e" * 32, 1),
    }  # fmt: skip
    new = {
        KEYS.group(attempt(7, 7, generation=2), 0), KEYS.group(attempt(7, 7, generation=3), 0),
        KEYS.report(2, 1, 0), KEYS.report(10, 1, 0), KEYS.trainers(2, "n0"),
        KEYS.trainers(3, "n0"), KEYS.roster(digest, 0), KEYS.join("0000000001", "n0"),
        KEYS.readers(attempt(10, 10)) + "n3.1.0", KEYS.share(attempt(7, 7), "n0"),
    }  # fmt: skip
    for key in old | new:
        book.put(key, b"anything")
    before = {entry.key for entry in book.etcd.list("").entries}
    assert sweep(book) == tuple(sorted(old))
    assert {entry.key for entry in book.etcd.list("").entries} == before - old
    assert sweep(book) == ()


def test_without_a_readable_generation_nothing_is_swept():
    book = with_steps()
    book.put(KEYS.report(0, 0, 0), b"anything")
    assert decide_sweep(book.state(), book.etcd.list(KEYS.root))
    for spoil in (lambda: book.put(KEYS.generation, b"x"), lambda: book.delete(KEYS.generation)):
        spoil()
        assert decide_sweep(book.state(), book.etcd.list(KEYS.root)) == ()


@pytest.mark.parametrize("what", ["a newer generation began", "another ledger"])
def test_a_sweeper_that_slept_changes_nothing(what):
    book = with_steps()
    book.begin(2)
    book.put(KEYS.report(1, 0, 0), b"anything")
    state = book.state()
    (slept,) = sweep_txns(state, decide_sweep(state, book.etcd.list(KEYS.root)))
    if what == "another ledger":
        book.put(KEYS.ledger_id, b"2" * 32)
    else:
        book.begin(3)
    assert not book.does(slept)


def test_much_to_sweep_is_swept_in_pieces_that_fit():
    book = with_steps()
    for ballot in range(3 * OPERATIONS + 1):
        book.put(KEYS.report(1, ballot, 0), b"anything")
    book.begin(2)
    state = book.state()
    txns = sweep_txns(state, decide_sweep(state, book.etcd.list(KEYS.root)))
    assert [len(txn.deletes) for txn in txns] == [OPERATIONS] * 3 + [1]
    assert OPERATIONS <= MAX_TXN_OPERATIONS
    assert all(book.does(txn) for txn in txns)
    assert not book.etcd.list(KEYS.root + "report/").entries


def test_the_world_of_these_tests_is_one_job():
    assert Book().state().ledger_id == LEDGER
    assert generation_record(1).number == 1
