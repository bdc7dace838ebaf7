"""The end of a job: who keeps it alive, what goes, and that nothing slips in between.

The decision is pure; its transactions run in a real transaction engine, against writers that act
between the look and the deed.
"""

import pytest
from ledger_world import KEYS, LEDGER, Book, attempt, generation_record, group_record, share

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.cleaning import announce_txn, decide_clean
from p2pckpt.jobstate import JobState, forgot
from p2pckpt.ports import Put, Txn
from p2pckpt.restore.locate import Facts, decide_restore
from p2pckpt.wire import pack

OTHER = "2" * 32


def book():
    """A job with a committed step, its group record, and reports of trainers that have left."""
    made = Book()
    made.close(1, 1, "L1")
    of = made.commit(10).attempt
    made.groups(of, group_record(of, 0, share("n0", (0, 1, 2, 3), ("s1", "s2", "s3"))))
    report(made, "n0", ())
    return made


def report(made, node, ranks):
    made.put(KEYS.trainers(1, node), r.LivingTrainers(node=node, ranks=ranks))


def held(*ledgers, step=10):
    files = tuple(
        w.HeldFile(attempt(step, step, ledger=ledger), r.FileKind.SLOT, "n0", 0, "d")
        for ledger in ledgers
    )
    return w.HeldReply(store_id="s", files=files, bytes_held=100 * len(files))


def decide(made, replies=None, seen=None):
    return decide_clean(KEYS, made.etcd.list(KEYS.root), replies or {}, seen or {})


def test_what_is_to_go():
    plan = decide(book(), {"n0": held(LEDGER), "n1": held(OTHER, step=7)}, {"n2": "3" * 32})
    assert plan.problem == ""
    assert plan.found
    assert plan.ledger_ids == (LEDGER, OTHER, "3" * 32)
    assert plan.steps == (7, 10)
    # ledger, floor, generation, outcome, commit, closed, group; not the report
    assert plan.records == 7


def test_a_ledger_that_agents_only_remember_is_something():
    """Seed 1610. They wait for it, frozen, with nothing held; until it was cleaned."""
    empty = Book()
    empty.delete(*(e.key for e in empty.etcd.list(KEYS.root).entries))
    plan = decide(empty, seen={"n2": OTHER})
    assert (plan.found, plan.problem, plan.ledger_ids) == (True, "", (OTHER,))
    empty.put(KEYS.cleaned(OTHER), r.Cleaned(ledger_id=OTHER, by="n0"))
    assert not decide(empty, seen={"n2": OTHER}).found


def test_nothing_there():
    empty = Book()
    empty.delete(*(e.key for e in empty.etcd.list(KEYS.root).entries))
    assert not decide(empty).found
    assert decide(empty, {"n1": held(OTHER)}).found
    empty.put(KEYS.cleaned(LEDGER), r.Cleaned(LEDGER, "n0"))
    assert not decide(empty).found


def living(made):
    report(made, "n3", (2, 5))


def forming(made):
    made.put(KEYS.join("token", "n4"), b"anything")


def reading(made):
    made.put(KEYS.readers(attempt(10, 10)) + "n5.77", b"1")


def damaged(made):
    made.put(KEYS.trainers(1, "n6"), b"damaged")


ALIVE = [
    (living, "ranks [2, 5] live on n3"),
    (forming, "a launch is forming on n4"),
    (reading, "n5.77 is reading step 10"),
    (damaged, "unreadable"),
]


@pytest.mark.parametrize(("deed", "says"), ALIVE)
def test_who_keeps_a_job_alive(deed, says):
    made = book()
    deed(made)
    assert says in decide(made).problem


def begins(made):
    made.begin(2)


def founded_anew(made):
    made.put(KEYS.ledger_id, OTHER.encode())


def leaves(made):
    report(made, "n0", ())


@pytest.mark.parametrize("deed", [living, forming, reading, begins, founded_anew, leaves])
def test_announcing_is_refused_if_anybody_came_or_went(deed):
    made = book()
    listing = made.etcd.list(KEYS.root)
    txn = announce_txn(KEYS, listing, (LEDGER,), "n0")
    deed(made)
    assert not made.does(txn)
    assert not made.has(KEYS.cleaned(LEDGER))


def test_announced_it_fences_launches_and_settles_everything():
    made = book()
    txn = announce_txn(KEYS, made.etcd.list(KEYS.root), (LEDGER, OTHER), "n0")
    before = made.state()
    assert before.settled(attempt(10, 10)) == ""
    assert made.does(txn)
    state = made.state()
    assert state.cleaned == {LEDGER, OTHER}
    for ledger in (LEDGER, OTHER):
        assert state.settled(attempt(10, 10, ledger=ledger)) == "its job was cleaned"
    assert state.settled(attempt(10, 10, ledger="3" * 32)) == ""

    # a launch that looked before
    swap = Put(KEYS.generation, pack(generation_record(2)))
    assert not made.does(Txn((before.same_ledger(), before.not_cleaned()), (swap,)))
    assert made.state().generation.number == 1


def test_an_unreadable_cleaning_frees_nothing():
    made = book()
    made.put(KEYS.cleaned(LEDGER), b"damaged")
    state = made.state()
    assert state.settled(attempt(10, 10)) == ""
    assert KEYS.cleaned(LEDGER) in state.unreadable


def test_a_cleaned_ledger_is_not_one_that_forgot():
    seen = r.LedgerSeen(KEYS.job, LEDGER, 5, 1)
    gone = JobState(KEYS, revision=9)
    assert "forgot" in forgot(seen, gone)
    gone.cleaned.add(LEDGER)
    assert forgot(seen, gone) == ""
    gone.ledger_id = OTHER
    assert forgot(seen, gone) == ""


def test_bytes_of_a_cleaned_ledger_do_not_stop_a_new_job():
    state = JobState(KEYS, ledger_id=OTHER)
    facts = Facts(state, {"n1": held(LEDGER)}, (), {}, False)
    assert decide_restore(facts, None, 4).choice is r.Choice.UNPROVEN
    state.cleaned.add(LEDGER)
    assert decide_restore(facts, None, 4).choice is r.Choice.NOTHING
