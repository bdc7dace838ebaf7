"""The ledger as a value: what is settled, which lineage is current, what 'latest' means.

The mirror (changes, in order) and the truth (a listing) must be the same value; no bytes in the
ledger may raise; and nothing is proven settled that a record could still contradict.
"""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_world import KEYS, LEDGER, Book, attempt, commit_record, outcome_of

from p2pckpt import records as r
from p2pckpt.jobstate import JobState
from p2pckpt.ports import Change
from p2pckpt.save.commit import commit_txn
from p2pckpt.wire import pack

A = attempt(3, 30)


def facts(state):
    """All of a state but its bookkeeping."""
    names = "ledger_id floor generation generation_revision commits outcomes retired"
    names += " decisions closed unreadable"
    return {name: getattr(state, name) for name in names.split()}


# -- mirror and truth ------------------------------------------------------------------------------


def deed(book, rng):
    """One random write to the job's records, some of them damaged or deleted."""
    step, number = rng.randrange(20), rng.randrange(3)
    of, lineage = attempt(step, step, number), f"L{rng.randrange(3)}"
    match rng.randrange(9):
        case 0:
            book.commit(step, lineage, ordinal=step, generation=number)
        case 1:
            book.decide(of, r.Verdict.ABORT)
        case 2:
            book.close(number, rng.randrange(4), lineage, (f"L{rng.randrange(3)}", step))
        case 3:
            book.begin(number + 1)
        case 4:
            book.put(KEYS.retired(of), r.Retired(attempt=of, by="x", reason="y"))
        case 5:
            keys = [e.key for e in book.etcd.list(KEYS.state).entries]
            book.delete(rng.choice(keys))
        case 6:
            keys = [e.key for e in book.etcd.list(KEYS.state).entries]
            book.put(rng.choice(keys), b"damaged")
        case 7:
            decision = r.Decision(number, 1, r.Choice.RESTORE, "n", "why")
            book.put(KEYS.decision(number, rng.randrange(4)), decision)
        case 8:
            book.put(KEYS.floor, of.floor_key.encode())


@pytest.mark.parametrize("seed", range(40))
def test_the_mirror_equals_the_listing_whatever_happens(seed):
    book, rng = Book(), Random(seed)
    mirror, at = book.state(), book.etcd.revision
    for _ in range(60):
        deed(book, rng)
        changes = book.etcd.changes(KEYS.state, at + 1)
        mirror.apply_all(changes)
        at = book.etcd.revision
        truth = book.state()
        if truth.generation is None and KEYS.generation not in truth.unreadable:
            mirror.generation_revision = 0  # of a deleted key: the deletion's, which never compares
        assert facts(mirror) == facts(truth)
        assert mirror.revision == truth.revision


def test_an_old_start_plus_all_changes_is_the_truth():
    book, rng = Book(), Random("from nothing")
    for _ in range(50):
        deed(book, rng)
    book.begin(3)
    mirror = JobState(KEYS)
    mirror.apply_all(book.etcd.changes(KEYS.state, 1))
    assert facts(mirror) == facts(book.state())


KEY_FAMILIES = [
    KEYS.ledger_id, KEYS.floor, KEYS.generation, KEYS.outcomes, KEYS.retirements,
    KEYS.decisions, KEYS.closings, KEYS.commits,
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(KEY_FAMILIES),
    st.one_of(st.text(max_size=30), st.just(A.key), st.just("L1/7"), st.just("1/1")),
    st.one_of(st.none(), st.binary(max_size=80), st.just(pack(outcome_of(A)))),
)
def test_apply_is_total(family, tail, value):
    state = Book().state()
    state.apply(Change(family + tail, value, 99, 99))
    assert state.revision == 99
    assert state.latest() is None
    assert isinstance(state.settled(A), str)


def test_a_damaged_record_is_unreadable_until_it_is_written_again():
    book = Book()
    book.commit(30)
    key = KEYS.commit("L1", 30)
    good = book.etcd.get(key).value
    book.put(key, good[:-1])
    assert list(book.state().unreadable) == [key]
    assert not book.state().commits
    book.put(key, good)
    assert not book.state().unreadable


def test_a_key_of_a_later_release_is_not_passed_over_in_silence():
    book, key = Book(), KEYS.state + "of a later release/1"
    book.put(key, b"anything")
    state = book.state()
    assert state.unreadable == {key: "unknown key"}
    assert not state.doubtful()
    book.delete(key)
    state.apply_all(book.etcd.changes(KEYS.state, state.revision + 1))
    assert not state.unreadable


# -- settled ---------------------------------------------------------------------------------------


def test_an_open_attempt_is_not_settled():
    assert Book().state().settled(A) == ""
    assert Book().state().settled(attempt(3, 30, generation=2)) == ""


def test_each_way_to_be_settled():
    book = Book()
    book.decide(A, r.Verdict.ABORT, reason="rank 3 died")
    assert "rank 3 died" in book.state().settled(A)
    book = Book()
    book.begin(2)
    assert "generation 2" in book.state().settled(A)
    book = Book()
    book.put(KEYS.floor, b"0000000001.0000000004")
    assert "floor" in book.state().settled(A)
    book = Book()
    book.put(KEYS.retired(A), r.Retired(attempt=A, by="x", reason="y"))
    assert book.state().settled(A) == "retired"


def test_at_the_floor_is_not_below_it():
    book = Book()
    book.put(KEYS.floor, A.floor_key.encode())
    assert book.state().settled(A) == ""


@pytest.mark.parametrize("later", ["generation", "floor", "both"])
def test_a_commit_is_never_settled_by_time(later):
    book = Book()
    book.commit(30, ordinal=3)
    if later in ("generation", "both"):
        book.begin(7)
    if later in ("floor", "both"):
        book.put(KEYS.floor, b"0000000007.0000000000")
        book.delete(KEYS.outcome(A))
    assert book.state().settled(A) == ""


def test_a_commit_outcome_whose_commit_key_is_not_seen_frees_nothing():
    book = Book()
    book.decide(A, r.Verdict.COMMIT)
    book.begin(2)
    assert book.state().settled(A) == ""


def test_another_ledger_proves_nothing_about_our_bytes():
    book = Book(generation=5)
    stranger = attempt(3, 30, ledger="9" * 32)
    book.put(KEYS.floor, b"0000000005.0000000000")
    assert book.state().settled(stranger) == ""
    book.delete(KEYS.ledger_id)
    assert book.state().settled(A) == ""
    assert JobState(KEYS).settled(A) == ""


def damage(key):
    def do(book):
        book.begin(2)
        book.put(key, b"damaged")

    return do


@pytest.mark.parametrize(
    "key",
    [KEYS.outcome(A), KEYS.commit("L1", 30), KEYS.commit("L9", 1), KEYS.generation,
     KEYS.commits + "L1/not-a-step", KEYS.ledger_id],
)  # fmt: skip
def test_what_cannot_be_read_settles_nothing(key):
    book = Book()
    damage(key)(book)
    assert book.state().settled(A) == ""


@pytest.mark.parametrize("floor", [b"damaged", b"~", b"1.4", b"0000000001-0000000004"])
def test_a_damaged_floor_settles_nothing(floor):
    book = Book()
    book.put(KEYS.floor, floor)
    state = book.state()
    assert state.settled(A) == ""
    assert KEYS.floor in state.unreadable


def test_settled_never_goes_back_while_the_commit_is_possible():
    # What is settled cannot be committed any more by a transaction built before.
    ways = {
        "abort": lambda b: b.decide(A, r.Verdict.ABORT),
        "generation": lambda b: b.begin(2),
        "floor": lambda b: b.put(KEYS.floor, b"0000000001.0000000004"),
    }
    for way in ways.values():
        book = Book()
        txn = commit_txn(book.state(), A, (), outcome_of(A))
        way(book)
        assert book.state().settled(A)
        assert not book.does(txn)
        assert book.state().settled(A)


def test_the_mirror_does_not_grow_with_every_step():
    book = Book()
    mirror = book.state()
    for step in range(50):
        book.commit(step)
        book.delete(KEYS.commit("L1", step), KEYS.outcome(attempt(step, step)))
    mirror.apply_all(book.etcd.changes(KEYS.state, 1))
    sizes = [len(v) for v in vars(mirror).values() if isinstance(v, dict | set)]
    assert max(sizes) < 50


# -- lineages --------------------------------------------------------------------------------------


def test_latest_is_the_highest_step_as_a_number():
    book = Book()
    book.close(1, 0, "L1")
    for step in (9, 10, 100, 99):
        book.commit(step)
    assert book.state().latest().attempt.step == 100
    assert book.state().steps("L1") == [9, 10, 99, 100]


def test_old_higher_steps_never_come_back_as_latest():
    book = Book()
    book.close(1, 0, "L1")
    for step in (10, 20, 30):
        book.commit(step)
    book.begin(2)
    book.close(2, 1, "L2", base=("L1", 10))
    assert book.state().latest().attempt.step == 10
    book.commit(15, "L2", generation=2)
    assert book.state().latest().attempt.step == 15
    book.begin(3)
    assert book.state().latest().attempt.step == 15


def test_a_lineage_without_commit_or_base_hides_nothing():
    book = Book()
    book.close(1, 0, "L1")
    book.commit(10)
    book.begin(2)
    book.close(2, 0, "L2")
    assert book.state().latest().attempt.step == 10
    book.commit(3, "L2", generation=2)
    assert book.state().latest().attempt.step == 3


def test_only_ok_opens_a_lineage():
    book = Book()
    book.close(1, 0, "L1")
    book.commit(10)
    for ballot, close in ((1, r.Close.BAD), (2, r.Close.RETRY)):
        book.close(2, ballot, "L2", base=("L1", 5), close=close)
    state = book.state()
    assert state.current_lineage().lineage == "L1"
    assert state.lineage(2) is None
    assert state.lineage(1).lineage == "L1"


def test_newest_generation_wins_then_newest_ballot():
    book = Book()
    book.commit(10)
    book.close(10, 1, "L10", base=("L1", 10))
    book.close(9, 3, "L9", base=("L1", 10))
    book.close(10, 2, "L102", base=("L1", 10))
    assert book.state().current_lineage().lineage == "L102"
    assert book.state().lineage(10).lineage == "L102"


def test_quarantine_is_by_bad_only():
    book = Book()
    a, b = (commit_record(attempt(i, i), "L1") for i in (1, 2))
    book.close(1, 1, "L1", close=r.Close.BAD, commit=a)
    book.close(1, 2, "L1", close=r.Close.RETRY, commit=b)
    assert book.state().quarantined() == {a.attempt.key}


def test_no_state_at_all_has_no_latest():
    state = JobState(KEYS)
    assert (state.latest(), state.current_lineage(), state.generation) == (None, None, None)
    assert state.ledger_id == "" != LEDGER


def test_a_watch_that_lags_does_not_take_the_mirror_back():
    book = Book()
    book.begin(1)
    book.begin(2)
    old = book.etcd.changes(KEYS.generation, 1)[-2]
    state = book.state()
    state.apply_all([old])
    assert state.generation.number == 2
    book.begin(3)
    state.apply_all(book.etcd.changes(KEYS.generation, old.revision))
    assert state.generation.number == 3


# -- a ledger that went back -----------------------------------------------------------------------


def retired(book, of):
    book.put(KEYS.retired(of), r.Retired(attempt=of, by="x", reason="y"))
    book.delete(KEYS.commit("L1", of.step))


def floor_above(book, of):
    book.delete(KEYS.commit("L1", of.step))
    book.put(KEYS.floor, b"0000000001.0000000009")


def damaged(book, of):
    book.put(KEYS.commit("L1", of.step), b"damaged")


def cleaned(book, of):
    book.put(KEYS.cleaned(LEDGER), r.Cleaned(LEDGER, "n0"))
    book.delete(KEYS.commit("L1", of.step), KEYS.generation)


@pytest.mark.parametrize("deed", [None, retired, floor_above, damaged, cleaned])
def test_a_commit_that_went_by_the_rules_is_no_ledger_that_went_back(deed):
    book = Book()
    of = book.commit(3).attempt
    seen = r.LedgerSeen(KEYS.job, LEDGER, book.state().revision, 1)
    known = book.state().commits.values()
    if deed is not None:
        deed(book, of)
    assert book.state().went_back(seen, known) == ""


def test_a_ledger_that_went_back_is_known_when_its_revision_has_caught_up():
    book = Book()
    book.commit(2)
    old = book.state().revision
    book.begin(2)
    book.commit(3, generation=2)
    state = book.state()
    seen = r.LedgerSeen(KEYS.job, LEDGER, state.revision, 2)
    book.etcd.rollback(old)
    assert f"revision {old}" in book.state().went_back(seen, ())
    while book.state().revision < seen.revision:
        book.put("other", b"")
    assert book.state().went_back(seen, ()) == "generation 1, seen 2"
    book.begin(2)
    assert book.state().went_back(seen, ()) == ""
    assert "step 3" in book.state().went_back(seen, state.commits.values())
    others = [commit_record(attempt(7, 7, ledger="2" * 32), "L1")]  # kept by a rebuild
    assert book.state().went_back(seen, others) == ""
