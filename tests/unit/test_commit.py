"""One outcome per attempt: the committer's judgement, and transactions that slept.

Who: committers that read, sleep and write. What breaks: anything in between. What must hold:
COMMIT only if nothing of what was judged changed, ABORT only while there is no COMMIT, and exactly
one of them.
"""

from itertools import combinations, permutations

import pytest
from ledger_world import KEYS, LEDGER, RS, Book, attempt, group_record, outcome_of, share

from p2pckpt import records as r
from p2pckpt.backends.inproc.ledger import MAX_TXN_COMPARES, MAX_TXN_OPERATIONS
from p2pckpt.errors import FormatError, StaleGenerationError, UsageError
from p2pckpt.ports import Txn
from p2pckpt.save.commit import (
    Demand,
    abort_txn,
    commit_txn,
    decide_commit,
    group_txn,
    read_groups,
)
from p2pckpt.wire import MAX_RECORD_BYTES, pack

DEMAND = Demand(RS, min_spare=1, pieces=1, world_size=1)
A = attempt(3, 30)


def judge(holders, living, demand=DEMAND):
    record = group_record(A, 0, share("n0", [0], holders))
    return decide_commit([record], {s: f"node of {s}" for s in living}, demand)


# -- decide_commit --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("holders", "living", "verdict", "degraded"),
    [
        (("a", "b", "c"), ("a", "b", "c", "store-n0"), "commit", 0),
        (("a", "b", "c"), ("a", "b", "c"), "commit", 1),
        (("a", "b", "c"), ("a", "b", "store-n0"), "commit", 1),
        (("a", "b", ""), ("a", "b", "store-n0"), "commit", 1),
        (("a", "b", "c"), ("a", "b"), "abort", 0),
        (("a", "b", "c"), ("a", "store-n0"), "abort", 0),
        (("a", "", ""), ("a", "", "store-n0"), "abort", 0),
        ((), ("store-n0",), "abort", 0),
        (("a", "b", "c"), (), "abort", 0),
    ],
)
def test_a_share_needs_k_plus_min_spare_living_sources(holders, living, verdict, degraded):
    if holders == ("a", "", ""):
        living = tuple(s for s in living if s)
    ruling = judge(holders, living)
    assert (ruling.verdict, len(ruling.degraded)) == (verdict, degraded)
    assert ruling.reason


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("m", [0, 1, 2])
@pytest.mark.parametrize("min_spare", [-1, 0, 1, 2])
def test_what_is_committed_survives_any_min_spare_losses(k, m, min_spare):
    generation = r.Generation(1, "", "", 1, "", 1, r.Layout(k, m), 1)
    demand = Demand.of(generation, min_spare)
    spare = max(1, m) if min_spare < 0 else min_spare
    stores = [f"h{i}" for i in range(k + m)]
    everybody = [*stores, "store-n0"]
    for size in range(len(everybody) + 1):
        for living in combinations(everybody, size):
            if judge(stores, living, demand).verdict is not r.Verdict.COMMIT:
                assert size < len(everybody), "everybody lives, and yet no commit"
                continue
            if size == len(everybody) and spare > m + 1:
                continue  # full is full, even if the layout cannot give what was asked for
            for lost in combinations(living, min(spare, size)):
                left = set(living) - set(lost)
                assert "store-n0" in left or len(left) >= k, (living, lost)


def test_two_shards_in_one_store_are_one_loss():
    # rs:2,1 without the own copy: one loss, of "a", leaves one shard of two
    assert judge(("a", "a", "b"), ("a", "b")).verdict is r.Verdict.ABORT


def test_min_spare_is_at_least_one_by_default():
    plain = r.Generation(1, "", "", 1, "", 1, r.Layout(4, 0), 1)
    assert Demand.of(plain, -1).min_spare == 1
    assert Demand.of(plain, 0).min_spare == 0


def test_waits_for_every_group_and_names_the_missing():
    demand = Demand(RS, 1, pieces=3, world_size=3)
    groups = [group_record(A, g, share(f"n{g}", [g], "abc")) for g in (0, 2)]
    ruling = decide_commit(groups, {}, demand)
    assert ruling.verdict is None
    assert "[1]" in ruling.reason


@pytest.mark.parametrize("ranks", [[[0], [2]], [[0, 1], [1, 2]], [[0, 1], []], [[0, 1], [2, 3]]])
def test_every_rank_is_sealed_exactly_once(ranks):
    living = {s: s for s in ("a", "b", "c", "store-n0", "store-n1")}
    shares = [share(f"n{i}", each, "abc") for i, each in enumerate(ranks)]
    demand = Demand(RS, 1, 1, world_size=3)
    assert decide_commit([group_record(A, 0, *shares)], living, demand).verdict is r.Verdict.ABORT


def test_one_poor_share_aborts_all():
    living = {s: s for s in ("a", "b", "c", "store-n0", "store-n1")}
    shares = (share("n0", [0], "abc"), share("n1", [1], ("a", "", "")))
    ruling = decide_commit([group_record(A, 0, *shares)], living, Demand(RS, 1, 1, 2))
    assert ruling.verdict is r.Verdict.ABORT
    assert "n1" in ruling.reason


def test_read_groups_refuses_another_attempts_record():
    book = Book()
    entries = book.groups(A, group_record(attempt(4, 30), 0))
    with pytest.raises(FormatError, match="is of attempt"):
        read_groups(entries, A)
    book.put(KEYS.group(A, 0), b"rubbish")
    with pytest.raises(FormatError):
        read_groups(book.etcd.list(KEYS.groups_of(A)).entries, A)


# -- commit_txn: a committer that slept ----------------------------------------------------------


def ready(lineage="L1"):
    """A book with a judged attempt, and the committer's transaction built from what it read."""
    book = Book()
    book.close(1, 0, lineage)
    entries = book.groups(A, group_record(A, 0, share("n0", range(4), "abc")))
    return book, entries, commit_txn(book.state(), A, entries, outcome_of(A, lineage=lineage))


def test_commit_puts_outcome_and_step_together():
    book, _, txn = ready()
    assert book.does(txn)
    state = book.state()
    assert state.outcomes[A.key].verdict is r.Verdict.COMMIT
    assert state.latest().attempt == A
    assert state.settled(A) == ""
    assert not book.does(txn), "an attempt commits once"


def abort(book):
    assert book.does(abort_txn(book.state(), outcome_of(A, r.Verdict.ABORT)))


def rewrite_group(book):
    book.put(KEYS.group(A, 0), book.etcd.get(KEYS.group(A, 0)).value)


MEANWHILE = {
    "the attempt was aborted": abort,
    "a newer generation began": lambda book: book.begin(2),
    "the same generation was written anew": lambda book: book.begin(1),
    "the generation is gone": lambda book: book.delete(KEYS.generation),
    "the step is committed": lambda book: book.commit(30, ordinal=9),
    "a higher step is committed": lambda book: book.commit(31, ordinal=9),
    "a much higher step is committed": lambda book: book.commit(10**15, ordinal=9),
    "the floor rose above it": lambda book: book.put(KEYS.floor, b"0000000001.0000000004"),
    "the floor rose to a newer generation": lambda book: book.put(
        KEYS.floor, b"0000000002.0000000000"
    ),
    "the floor is gone": lambda book: book.delete(KEYS.floor),
    "a group record was written again": rewrite_group,
    "a group record is gone": lambda book: book.delete(KEYS.group(A, 0)),
    "another ledger stands there": lambda book: book.put(KEYS.ledger_id, b"2" * 32),
}


@pytest.mark.parametrize("what", list(MEANWHILE))
def test_a_committer_that_slept_changes_nothing(what):
    book, _, txn = ready()
    MEANWHILE[what](book)
    before = book.etcd.list("")
    assert not book.does(txn), what
    assert book.etcd.list("") == before


def test_harmless_changes_do_not_stop_a_commit():
    book, _, txn = ready()
    book.commit(29, ordinal=2)
    book.commit(31, lineage="L0", ordinal=8, generation=0)
    book.commit(31, lineage="L11", ordinal=8, generation=0)  # begins like L1, is another
    book.decide(attempt(4, 40), r.Verdict.ABORT)
    book.put(KEYS.floor, b"0000000001.0000000003")
    assert book.does(txn)


def test_nothing_is_committed_when_the_step_before_is_gone():
    book, entries, _ = ready()
    before = book.commit(29, ordinal=2)
    txn = commit_txn(book.state(), A, entries, outcome_of(A))
    book.delete(KEYS.commit("L1", before.attempt.step))  # as in a ledger that went back
    assert not book.does(txn)


def test_a_committer_whose_mirror_saw_the_next_generation_commits_nothing():
    # Judged in generation 1; while `living()` was awaited the mirror moved on to generation 2,
    # whose agents have already freed the bytes of the attempt.
    book, entries, _ = ready()
    book.begin(2)
    state = book.state()
    assert "generation 2" in state.settled(A)
    try:
        happened = book.does(commit_txn(state, A, entries, outcome_of(A)))
    except StaleGenerationError:
        happened = False
    assert not happened


def test_a_group_writer_whose_mirror_saw_the_next_generation_writes_nothing():
    book = Book()
    book.begin(2)
    try:
        happened = book.does(group_txn(book.state(), group_record(A, 0)))
    except StaleGenerationError:
        happened = False
    assert not happened


def test_whatever_the_order_there_is_one_outcome():
    for order in permutations(range(4)):
        book, entries, first = ready()
        state = book.state()
        txns = [
            first,
            commit_txn(state, A, entries, outcome_of(A)),
            abort_txn(state, outcome_of(A, r.Verdict.ABORT, reason="one")),
            abort_txn(state, outcome_of(A, r.Verdict.ABORT, reason="two")),
        ]
        happened = [i for i in order if book.does(txns[i])]
        assert happened == [order[0]]
        committed = book.has(KEYS.commit("L1", 30))
        assert committed == (happened[0] < 2)


# -- abort_txn, group_txn --------------------------------------------------------------------------


def test_abort_needs_no_fence_but_never_overrides():
    book, _, _ = ready()
    slept = abort_txn(book.state(), outcome_of(A, r.Verdict.ABORT))
    book.begin(2)
    assert book.does(slept)
    assert not book.does(slept)


def test_nothing_is_put_below_the_floor():
    book, _, _ = ready()
    state = book.state()
    book.put(KEYS.floor, A.floor_key.encode())
    at_floor = abort_txn(state, outcome_of(A, r.Verdict.ABORT))
    below = abort_txn(state, outcome_of(attempt(2, 20), r.Verdict.ABORT))
    old = abort_txn(state, outcome_of(attempt(99, 20, generation=0), r.Verdict.ABORT))
    assert not book.does(below)
    assert not book.does(old)
    assert book.does(at_floor)


def test_a_group_record_is_written_once_and_never_changed():
    book = Book()
    one = group_txn(book.state(), group_record(A, 0, share("n0", [0], "abc")))
    two = group_txn(book.state(), group_record(A, 0, share("n0", [0], "abd")))
    assert book.does(one)
    assert not book.does(two)


@pytest.mark.parametrize("what", ["abort", "generation", "floor", "ledger"])
def test_no_group_record_for_an_attempt_that_is_over(what):
    book = Book()
    txn = group_txn(book.state(), group_record(A, 0))
    {
        "abort": lambda: abort(book),
        "generation": lambda: book.begin(2),
        "floor": lambda: book.put(KEYS.floor, b"0000000001.0000000004"),
        "ledger": lambda: book.put(KEYS.ledger_id, b"2" * 32),
    }[what]()
    assert not book.does(txn)


# -- bounds ----------------------------------------------------------------------------------------


def test_a_commit_of_7680_nodes_fits_one_transaction():
    """B086."""
    book = Book()
    entries = book.groups(A, *[group_record(A, g) for g in range(120)])
    txn = commit_txn(book.state(), A, entries, outcome_of(A))
    assert isinstance(txn, Txn)
    assert len(txn.compares) <= MAX_TXN_COMPARES
    assert len(txn.puts) + len(txn.deletes) <= MAX_TXN_OPERATIONS
    assert [e.key for e in entries] == sorted(e.key for e in entries)


def full_group(layout, ranks=8):
    """A group record as production writes it: 64 nodes with host names, eight ranks each."""
    shares = [
        r.SealedShare(
            node=f"gpu-node-{i:04d}.cluster.example.com",
            store_id=f"{i:032x}",
            ranks=tuple(range(10_000 + i * ranks, 10_000 + (i + 1) * ranks)),
            manifest_digest="f" * 64,
            snapshot_bytes=640 * 10**9,
            holders=tuple(f"{j:032x}" for j in range(layout.shards)),
        )
        for i in range(r.GROUP_NODES)
    ]
    job = attempt(1000, 1_000_000, generation=12)
    return r.GroupRecord(attempt=job, group=0, shares=tuple(shares))


@pytest.mark.parametrize(
    "layout", ["copies:2", "rs:2,1", "rs:4,2", "rs:8,3", "rs:16,4", "copies:20"]
)
def test_a_full_group_record_fits_the_ledger(layout):
    """B086."""
    assert len(pack(full_group(r.Layout.parse(layout)))) <= MAX_RECORD_BYTES


@pytest.mark.parametrize("layout", ["rs:17,4", "rs:20,5", "rs:24,8", "copies:21"])
def test_a_layout_whose_full_group_could_not_fit_is_no_layout(layout):
    with pytest.raises(UsageError, match="k \\+ m <= 20"):
        r.Layout.parse(layout)


def test_the_ledger_id_is_the_one_that_was_read():
    assert Book().state().ledger_id == LEDGER
