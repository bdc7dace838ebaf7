"""The campaign of faults: its plan and what may strike as pure functions, its hands, a real run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pckpt.cli.main import run
from p2pckpt.demo.campaign import KINDS, OF_S3, Options, Standing, draw, may_strike, standing_of
from p2pckpt.demo.journal import Journal
from p2pckpt.demo.strikes import Strikes, flip, whole_files
from p2pckpt.demo.verdict import Fired, Recovery, Verdict
from p2pckpt.errors import UsageError
from p2pckpt.records import Attempt, FileKind, FileRecord, FileState
from p2pckpt.wire import pack
from topology.survive import Share, survives

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "p2pckpt.cli.main", "chaos"]


# -- the plan -------------------------------------------------------------------------------------


def test_one_seed_is_one_plan_and_another_seed_another():
    assert draw(7, 5) == draw(7, 5)
    assert draw(7, 5) != draw(8, 5)
    assert draw(7, 2) == draw(7, 5)[: len(draw(7, 2))]


def test_five_minutes_are_at_least_thirty_faults_of_every_kind():
    for seed in range(300):
        plan = draw(seed, 5)
        assert len(plan) >= 30, seed
        assert {fault.kind for fault in plan} == set(KINDS) - OF_S3
        assert {fault.kind for fault in draw(seed, 5, s3=True)} == set(KINDS)
        assert [fault.number for fault in plan] == list(range(1, len(plan) + 1))
        times = [fault.at_s for fault in plan]
        assert times == sorted(times)
        assert times[-1] < 300
        for fault in plan:
            low, high = KINDS[fault.kind].lasts_s
            assert low <= fault.lasts_s <= high
            assert 0 <= fault.victim < 1


def test_the_plan_is_what_it_was():
    """A seed that somebody reports must stay the same campaign."""
    assert [(f.at_s, f.kind) for f in draw(7, 5)[:4]] == [
        (0.0, "mover_kill"), (3.8, "agent_kill"), (5.7, "mover_pause"), (7.9, "trainer_term"),
    ]  # fmt: skip


def test_every_kind_has_a_hand():
    assert set(Strikes(None, None)._aims) == set(KINDS)


@pytest.mark.parametrize(
    "options",
    [
        Options(nodes=3),
        Options(racks=0),
        Options(racks=7),
        Options(minutes=0),
        Options(every=0),
        Options(layout="rs:0,1"),
        Options(keep="/"),
    ],
)
def test_what_cannot_be_played_is_refused(options):
    with pytest.raises(UsageError):
        options.check()


# -- may it strike? -------------------------------------------------------------------------------

SHARES = (Share("a", ("c", "d", "e"), 2), Share("b", ("d", "e", "f"), 2))
KNOWN = Standing(40, survivable=2, full=2, shares=SHARES)


@pytest.mark.parametrize(
    ("standing", "wounded", "takes", "allowed"),
    [
        (None, set(), set(), True),  # takes nothing
        (None, set(), {"a"}, False),  # nothing is known
        (KNOWN, set(), {"a", "c"}, True),
        (KNOWN, {"a"}, {"c", "d"}, False),  # the owner and two of three shards
        (KNOWN, {"a", "f"}, {"c"}, True),  # three nodes, but not of one share
        (Standing(40, 2, 2), {"a", "f"}, {"c"}, False),  # where shares lie is not known
        (Standing(40, 0, 2, SHARES), set(), {"c"}, True),
        (Standing(40, -1, 2), set(), {"c"}, False),
    ],
)
def test_a_fault_strikes_only_where_the_promise_covers_it(standing, wounded, takes, allowed):
    why = may_strike(standing, wounded, takes)
    assert (why == "") is allowed, why
    if not allowed and standing is KNOWN:
        assert why.startswith("share of a: its own copy is lost, needs 2 shards, has 1 of 3")


NAMES = st.sets(st.sampled_from("abcdefgh"))


@given(NAMES, NAMES, st.integers(-1, 4))
def test_what_may_strike_leaves_every_share_restorable(wounded, takes, survivable):
    """By one of two proofs: the count that is promised for any nodes, or each share."""
    standing = Standing(40, survivable, 2, SHARES)
    allowed = may_strike(standing, wounded, takes) == ""
    by_count = len(wounded | takes) <= survivable
    by_share = all(survives(share, wounded | takes) for share in SHARES)
    assert allowed == (not takes or by_count or by_share)


def test_what_the_status_document_misses_is_missing():
    redundancy = {
        "step": 40, "survivable_node_losses": 1, "full": 2,
        "missing": [{"share": "a", "shards": [1], "own_copy": False}],
    }  # fmt: skip
    sealed = {"a": ("c", "d", "e"), "b": ("d", None, "f")}
    standing = standing_of({"redundancy": redundancy}, sealed, 2)
    assert standing.shares == (
        Share("a", ("c", None, "e"), 2, own_copy=False), Share("b", ("d", None, "f"), 2),
    )  # fmt: skip
    assert not standing.is_full
    assert standing_of({"redundancy": redundancy}, {}, 2).shares is None
    assert standing_of({"redundancy": None}, sealed, 2) is None


# -- its hands ------------------------------------------------------------------------------------


def put(directory, name, state, step, kind=FileKind.SLOT):
    attempt = Attempt("1" * 32, "0.demo", 1, 8, step)
    record = FileRecord(state, kind, attempt, "n0", 0, 64)
    (directory / f"{name}.ram").write_bytes(bytes(64))
    (directory / f"{name}.rec").write_bytes(pack(record))
    return record


def test_one_bit_of_a_whole_file_of_the_step_is_flipped_and_no_other(tmp_path):
    record = put(tmp_path, "whole", FileState.WHOLE, 40)
    put(tmp_path, "older", FileState.WHOLE, 35)
    put(tmp_path, "filling", FileState.FILLING, 40)
    (tmp_path / "torn.rec").write_bytes(b"{")
    ((path, found),) = whole_files(tmp_path, 40)
    assert (path.name, found) == ("whole.rec", record)
    assert flip(path, record, 13)
    data = (tmp_path / "whole.ram").read_bytes()
    assert sum(byte.bit_count() for byte in data) == 1
    assert data[13]
    for name in ("older", "filling"):
        assert (tmp_path / f"{name}.ram").read_bytes() == bytes(64)


def test_a_flip_that_may_have_hit_something_else_is_told(tmp_path):
    record = put(tmp_path, "whole", FileState.WHOLE, 40)
    put(tmp_path, "whole", FileState.FILLING, 45)
    assert not flip(tmp_path / "whole.rec", record, 13)
    assert not flip(tmp_path / "gone.rec", record, 13)


ROOM = """
import os, sys
from pathlib import Path
from p2pckpt.demo.room import Room
room = Room(Path(sys.argv[1]) / "ram", 1 << 20)
(room.place / "a").write_bytes(bytes(100_000))
room.fill()
for count in range(2):
    try:
        (room.place / f"b{count}").write_bytes(b"x")
        sys.exit("it was not full")
    except OSError as e:
        assert e.errno == 28, e
room.free()
(room.place / "c").write_bytes(bytes(500_000))
room.close()
assert not room.place.exists()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_a_tmpfs_of_our_own_is_full_and_free_again_and_nobody_else_sees_it(tmp_path):
    mounts = Path("/proc/self/mounts").read_text()
    done = subprocess.run(
        [sys.executable, "-c", ROOM, str(tmp_path)], cwd=ROOT, capture_output=True, timeout=30
    )
    assert done.returncode == 0, done.stderr.decode()
    assert Path("/proc/self/mounts").read_text() == mounts


# -- the verdict ----------------------------------------------------------------------------------


def good():
    verdict = Verdict(7, 5, 6, 3, "rs:2,1", 4, {"flip": 1})
    verdict.faults = [Fired(1, "flip", 0.5, 3, "a bit", survived=True)]
    verdict.losses_bit_identical = verdict.state_digests_equal = True
    verdict.left_behind = []
    return verdict


def test_a_verdict_is_good_only_if_everything_is_known_and_right():
    assert good().ok
    for name, value in [
        ("losses_bit_identical", None),
        ("losses_bit_identical", False),
        ("state_digests_equal", False),
        ("faults", []),
        ("faults", [Fired(1, "flip", 0.5, 3, "a bit")]),
        ("left_behind", None),
        ("left_behind", ["process 7"]),
        ("why", ["something"]),
    ]:
        verdict = good()
        setattr(verdict, name, value)
        assert not verdict.ok, name


def test_a_fault_is_survived_if_training_went_further(tmp_path):
    lines = [{"event": "step", "step": n, "rank": 0, "launch": 0, "time": n} for n in (1, 2, 3)]
    (tmp_path / "rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdict = good()
    verdict.faults = [Fired(1, "flip", 0.5, 2, ""), Fired(2, "flip", 0.9, 3, "")]
    verdict.tell(Journal(tmp_path))
    assert [fault.survived for fault in verdict.faults] == [True, False]
    verdict.recoveries = [
        Recovery([1], 1, 1, back_s, 1, {"local": 1}) for back_s in (2.0, 9.0, 4.0)
    ]
    d = verdict.document()
    assert (d["recovery_median_s"], d["recovery_max_s"], d["steps_lost"]) == (4.0, 9.0, 3)
    assert (d["faults_fired"], d["faults_survived"]) == (2, 1)


# -- the command ----------------------------------------------------------------------------------


def test_a_dry_run_prints_the_plan_and_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told = ["chaos", "--seed", "7", "--dry-run"]
    assert run(told) == 0
    text = capsys.readouterr().out.splitlines()
    assert text == [f"plan of seed 7: {len(draw(7, 5))} faults", *map(str, draw(7, 5))]
    assert run([*told, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [fault["kind"] for fault in document["plan"]] == [fault.kind for fault in draw(7, 5)]
    assert sum(document["planned"].values()) == len(document["plan"])
    assert run([*told, "--fault", "rack"]) == 0
    assert {line.split()[3] for line in capsys.readouterr().out.splitlines()[1:]} == {"rack"}
    assert run([*told, "--fault", "s3_kill"]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_short_campaign_on_real_processes(tmp_path):
    file = tmp_path / "chaos.json"
    process = subprocess.Popen(
        [*COMMAND, "--minutes", "0.6", "--seed", "7", "--nodes", "4", "--racks", "4",
         "--layout", "copies:1", "--json", str(file)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=480)
    finally:
        process.terminate()
        process.wait(30)
    assert process.returncode == 0, output
    assert "plan of seed 7" in output.splitlines()[0]
    document = json.loads(file.read_text())
    assert document["ok"] is True
    assert document["faults_fired"] == document["faults_survived"] >= 4
    assert document["fired"]["trainer_term"] == 1
    assert document["losses_bit_identical"] is True
    assert document["losses_compared"] >= document["ranks"] * document["steps"]
    assert document["states_compared"] >= document["ranks"]
    assert document["left_behind"] == []
    assert list(tmp_path.glob("p2pckpt-chaos-*")) == []
    assert list(Path("/dev/shm").glob(f"p2pckpt-demo-{process.pid}-*")) == []
    left = [
        proc.name
        for proc in Path("/proc").glob("[0-9]*")
        if f"TMPDIR={tmp_path}".encode() in environ(proc)
    ]
    assert left == []


def environ(proc):
    try:
        return (proc / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
