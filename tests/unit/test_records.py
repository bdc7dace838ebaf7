"""The nouns know their own validity, their names sort, and no two of them share a name."""

from itertools import product

import pytest
from ledger_world import attempt

from p2pckpt import records as r
from p2pckpt.errors import UsageError
from p2pckpt.ports import prefix_end

KEYS = r.JobKeys("1000.job")


@pytest.mark.parametrize("name", ["a", "A9", "run_7-b", "0", "x" * 100])
def test_job_names(name):
    assert r.Job(1000, name).key == f"1000.{name}"


@pytest.mark.parametrize(
    "name", ["", "-a", "_a", "a b", "a/b", "a.b", "ä", "a\n", "x" * 101, "../a"]
)
def test_job_names_that_are_none(name):
    with pytest.raises(UsageError, match="job name"):
        r.Job(1000, name)


def test_two_owners_never_share_a_key():
    keys = [r.Job(uid, name).key for uid, name in product((1, 11, 111), ("1", "11", "1-1"))]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("text", "k", "m"),
    [("rs:4,2", 4, 2), ("rs(4,2)", 4, 2), (" rs: 4, 2 ", 4, 2), ("copies:1", 1, 0),
     ("copies(3)", 1, 2), ("rs:1,0", 1, 0), ("rs:20,0", 20, 0), ("rs:1,19", 1, 19),
     ("rs:18,2", 18, 2), ("copies(20)", 1, 19)],
)  # fmt: skip
def test_layouts_and_back(text, k, m):
    layout = r.Layout.parse(text)
    assert (layout.k, layout.m, layout.shards) == (k, m, k + m)
    assert r.Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    "text",
    ["", "rs", "rs:4", "rs:0,1", "rs:4,-1", "rs:200,56", "rs:18,3", "rs:21,0", "rs:1,20",
     "copies:0", "copies:", "copies:21", "copies:256",
     "xor:2,1", "rs:4,2,1", "RS:4,2", "rs:1000,1", "4,2", "rs:4;2"],
)  # fmt: skip
def test_layouts_that_are_none(text):
    with pytest.raises(UsageError):
        r.Layout.parse(text)


@pytest.mark.parametrize("text", ["rs(4,2", "rs:4,2)", "copies(3", "copies:3)"])
def test_half_brackets_are_no_layout(text):
    with pytest.raises(UsageError):
        r.Layout.parse(text)


@pytest.mark.parametrize("wrong", [{"generation": -1}, {"ordinal": -1}, {"step": -1}])
def test_negative_attempts_are_none(wrong):
    with pytest.raises(UsageError, match="not be negative"):
        attempt(**{"ordinal": 1, "step": 1, **wrong})


def test_attempt_keys_sort_as_numbers_do():
    numbers = [0, 1, 9, 10, 99, 100, 10**9]
    attempts = [attempt(o, s, g) for g, o, s in product(numbers, numbers, (0, 9, 10, 2**63 - 1))]
    assert [a.key for a in attempts] == sorted(a.key for a in attempts)
    assert len({a.key for a in attempts}) == len(attempts)
    for a in attempts:
        assert a.key.startswith(a.floor_key)


def test_commit_keys_sort_as_steps_do():
    steps = [0, 1, 2, 9, 10, 11, 99, 100, 2**63 - 1]
    keys = [KEYS.commit("L", step) for step in steps]
    assert keys == sorted(keys)
    assert all(key < prefix_end(KEYS.commits + "L/") for key in keys)


def test_no_key_of_one_kind_lies_below_another_kind():
    a, b = attempt(1, 2), attempt(10, 2)
    keys = {
        "ledger": KEYS.ledger_id, "floor": KEYS.floor, "generation": KEYS.generation,
        "outcome": KEYS.outcome(a), "retired": KEYS.retired(a), "group": KEYS.group(a, 0),
        "commit": KEYS.commit("L", 1), "decision": KEYS.decision(1, 1),
        "closed": KEYS.closed(1, 1), "report": KEYS.report(1, 1, 0), "join": KEYS.join("t", "n"),
        "trainers": KEYS.trainers(1, "n"), "roster": KEYS.roster("d", 0),
        "reader": KEYS.readers(a) + "n",
    }  # fmt: skip
    prefixes = {
        "outcome": KEYS.outcomes, "retired": KEYS.retirements, "group": KEYS.groups_of(a),
        "commit": KEYS.commits, "decision": KEYS.decisions, "closed": KEYS.closings,
        "report": KEYS.reports_of(1, 1), "join": KEYS.join("t", ""),
        "trainers": KEYS.trainers(1, ""), "roster": KEYS.roster_pieces("d"),
        "reader": KEYS.readers(a),
    }  # fmt: skip
    for kind, prefix in prefixes.items():
        assert [k for k, key in keys.items() if key.startswith(prefix)] == [kind]
    assert not KEYS.groups_of(b).startswith(KEYS.groups_of(a))
    watched = {k for k, key in keys.items() if key.startswith(KEYS.state)}
    assert watched == {
        "ledger", "floor", "generation", "outcome", "retired", "commit", "decision", "closed"
    }  # fmt: skip


def test_jobs_do_not_see_each_other():
    one, other = r.JobKeys(r.Job(1, "a").key), r.JobKeys(r.Job(1, "a-b").key)
    assert not other.root.startswith(one.root)
    assert not one.root.startswith(r.MEMBERS)


def test_stored_bytes_of_shards():
    entry = r.RankSnapshot(rank=0, length=1000, shard_bytes=512, tables=())
    assert [entry.stored_bytes(i, 4) for i in range(6)] == [512, 488, 0, 0, 512, 512]
    empty = r.RankSnapshot(rank=0, length=0, shard_bytes=0, tables=())
    assert [empty.stored_bytes(i, 2) for i in range(3)] == [0, 0, 0]


def test_a_manifest_names_the_ranks_that_it_has():
    entry = r.RankSnapshot(rank=3, length=0, shard_bytes=0, tables=(b"",))
    manifest = r.Manifest(attempt(1, 1), "n0", "s", r.Layout(1, 0), 512, "crc32c/1", (entry,))
    assert manifest.of_rank(3) is entry
    with pytest.raises(UsageError, match=r"no rank 4, has \[3\]"):
        manifest.of_rank(4)


def test_records_do_not_change():
    with pytest.raises(AttributeError):
        attempt(1, 1).step = 2
    assert attempt(1, 1) == attempt(1, 1)
    assert hash(attempt(1, 1)) == hash(attempt(1, 1))
    assert r.json_value(r.Layout(2, 1)) == {"k": 2, "m": 1}
