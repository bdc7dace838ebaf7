"""The demo as a user runs it: real etcd, agents, ranks; and that its verdict can be a failure."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from p2pckpt.demo.journal import Journal, losses_identical, wrong_digests
from p2pckpt.demo.report import Kill, Summary
from p2pckpt.demo.story import Options
from p2pckpt.errors import UsageError

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "p2pckpt.cli.main", "demo"]


def leftovers(pid, tmp_path):
    """What a demo that ran as `pid` left: RAM, and processes that inherited its TMPDIR."""
    left = [str(p) for p in Path("/dev/shm").glob(f"p2pckpt-demo-{pid}*")]
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={tmp_path}".encode() in (proc / "environ").read_bytes().split(b"\0"):
                left.append(f"{proc.name}: {(proc / 'cmdline').read_bytes()!r}")
        except OSError:
            continue
    return left


def demo(tmp_path, *options, timeout_s=240):
    file = tmp_path / "demo.json"
    process = subprocess.Popen(
        [*COMMAND, *options, "--json", str(file)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        process.terminate()
        process.wait(30)
    assert file.exists(), output
    assert leftovers(process.pid, tmp_path) == []
    assert list(tmp_path.glob("p2pckpt-demo-*")) == []
    return process.returncode, json.loads(file.read_text()), output


def check_good(code, document, output):
    assert code == 0, output
    assert document["ok"] is True
    assert document["losses_bit_identical"] is True
    assert document["state_digests_equal"] is True
    assert document["losses_compared"] >= document["ranks"] * document["steps"]
    assert document["states_compared"] == document["ranks"] * len(document["kills"])
    assert document["committed"] >= 2
    assert document["blocking_median_s"] < 5
    assert document["snapshot_bytes"] > 8 << 20
    for kill in document["kills"]:
        size = document["snapshot_bytes"] / document["ranks"] * len(kill["ranks"])
        assert sum(kill["bytes_from"].values()) == pytest.approx(size, rel=0.02)
        assert not set(kill["nodes"]) & set(kill["bytes_from"]) or kill["what"] == "trainer"
        assert 0 <= kill["steps_lost"] <= 2 * 5
        assert 0 < kill["detect_s"] < kill["back_s"]
        assert kill["load_s"] > 0
        assert kill["load_s"] < kill["restore_s"] < kill["back_s"] - kill["launch_s"]
        assert sorted(map(int, kill["sources"])) == kill["ranks"]
    assert list(document["stages"])[:2] == ["detect", "launch"]
    assert output.count("launch: new processes, until Python, torch") == 1


def test_a_lost_node_is_recovered_from_peers(tmp_path):
    code, document, output = demo(
        tmp_path, "--nodes", "3", "--racks", "3", "--layout", "copies:1", "--kill", "1",
        "--steps", "20",
    )  # fmt: skip
    check_good(code, document, output)
    (kill,) = document["kills"]
    assert (kill["source"], len(kill["nodes"]), len(kill["replaced_by"])) == ("peers", 1, 1)


def test_without_the_peers_shards_it_fails_and_names_ranks_and_reason(tmp_path):
    code, document, output = demo(
        tmp_path, "--nodes", "3", "--racks", "3", "--layout", "copies:1", "--self-test",
        "--steps", "20",
    )  # fmt: skip
    assert code == 1, output
    assert document["ok"] is False
    first, second = document["kills"]
    assert (first["what"], first["source"]) == ("trainer", "local")
    assert (second["source"], second["back_s"]) == (None, None)
    (why,) = document["why"]
    assert why.startswith("ranks [0, 1]: RestoreFailed: step ")
    assert "own copy gone, 0 of 1 shards left, needs 1" in why


def test_interrupt_leaves_nothing_behind(tmp_path):
    """Also where the tests run in the background of a shell, which has their children ignore it."""
    log = tmp_path / "log"
    heeding = ["env", "--default-signal=INT", *COMMAND]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*heeding, "--nodes", "2", "--racks", "1", "--layout", "copies:1"],
            cwd=ROOT,
            stdout=out,
            stderr=out,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
    try:
        end = time.monotonic() + 60
        while "launch 0" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        assert len(leftovers(process.pid, tmp_path)) > 7, (
            "the look for what is left must find what runs"
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130, log.read_text()
    finally:
        process.kill()
        process.wait(10)
    assert leftovers(process.pid, tmp_path) == []
    assert list(tmp_path.glob("p2pckpt-demo-*")) == []


@pytest.mark.slow
def test_the_default_demo_survives_rank_node_nodes_and_rack(tmp_path):
    code, document, output = demo(tmp_path, timeout_s=900)
    check_good(code, document, output)
    whats = [kill["what"] for kill in document["kills"]]
    assert whats == ["trainer", "node", "nodes", "rack"]
    assert [kill["source"] for kill in document["kills"]] == ["local", "peers", "peers", "peers"]
    assert document["left_out"] == []


@pytest.mark.slow
def test_more_than_the_layout_allows_is_lost_and_said(tmp_path):
    options = ("--nodes", "9", "--racks", "3", "--layout", "rs:4,2", "--steps", "40", "--kill")
    check_good(*demo(tmp_path, *options, "3", timeout_s=900))
    code, document, output = demo(tmp_path, *options, "4", timeout_s=900)
    assert code == 1, output
    (why,) = document["why"]
    assert "RestoreFailed" in why
    assert "3 of 6 shards left, needs 4" in why


@pytest.mark.slow
def test_what_peers_have_no_longer_comes_from_the_object_store(tmp_path):
    options = ("--nodes", "9", "--racks", "3", "--layout", "rs:4,2", "--steps", "40")
    code, document, output = demo(tmp_path, *options, "--kill", "4", "--s3", timeout_s=900)
    check_good(code, document, output)
    (kill,) = document["kills"]
    assert kill["source"] == "s3"
    assert kill["bytes_from"]["s3"] > 0
    assert set(kill["sources"].values()) <= {"peers", "mixed", "s3"}
    assert set(kill["sources"].values()) & {"mixed", "s3"}


# -- the verdict ----------------------------------------------------------------------------------


def journal(place, *events):
    place.mkdir(exist_ok=True)
    lines = [json.dumps({"launch": 0, "time": 0.0, "rank": 0, **e}) for e in events]
    (place / "rank0.jsonl").write_text("\n".join(lines) + "\n")
    out = Journal(place)
    out.read()
    return out


def step(number, loss):
    return {"event": "step", "step": number, "loss": loss}


def test_one_other_loss_is_seen_also_in_a_step_that_was_taken_twice(tmp_path):
    reference = journal(tmp_path / "reference", step(1, "0x1"), step(2, "0x2"))
    same = journal(tmp_path / "same", step(1, "0x1"), step(2, "0x2"), step(2, "0x2"))
    other = journal(tmp_path / "other", step(1, "0x1"), step(2, "0x2"), step(2, "0x3"))
    short = journal(tmp_path / "short", step(1, "0x1"))
    assert losses_identical(same, reference)
    assert not losses_identical(other, reference)
    assert not losses_identical(short, reference)
    assert not losses_identical(Journal(tmp_path / "none"), Journal(tmp_path / "none"))


def test_a_restored_state_must_be_one_that_was_saved(tmp_path):
    saved = {"event": "save", "step": 5, "sha256": "aa"}
    back = {"event": "restored", "step": 5, "sha256": "aa"}
    assert wrong_digests(journal(tmp_path, saved, back)) == []
    assert wrong_digests(journal(tmp_path, saved, {**back, "sha256": "bb"}))
    assert wrong_digests(journal(tmp_path, saved, {**back, "rank": 1}))
    assert wrong_digests(journal(tmp_path, saved, {**back, "step": 10}))


def test_a_line_that_was_cut_short_is_not_read_before_it_is_whole(tmp_path):
    out = journal(tmp_path, step(1, "0x1"))
    with (tmp_path / "rank0.jsonl").open("a") as f:
        f.write('{"event": "st')
        f.flush()
        assert out.read() == []
        f.write('ep", "launch": 0, "step": 2}\n')
    assert [e["step"] for e in out.read()] == [2]
    assert out.newest() == 2


def restored(rank, source, **bytes_from):
    size = sum(bytes_from.values()) or 7
    return {
        "rank": rank, "step": 5, "source": source, "node": f"n{rank}", "snapshot_bytes": size,
        "bytes_from": bytes_from, "seconds": {"decide": 1.0, "load": 0.5},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("events", "source", "sources"),
    [
        ([restored(0, "local")], "local", {0: "local"}),
        ([restored(0, "local"), restored(1, "peers", n2=7)], "peers", {0: "local", 1: "peers"}),
        ([restored(0, "mixed", n2=3, s3=4), restored(1, "peers", n2=7)], "s3",
         {0: "mixed", 1: "peers"}),
        ([restored(0, "s3", s3=7)], "s3", {0: "s3"}),
        ([restored(0, "peers", n2=7), restored(3, "s3", s3=7)], "peers", {0: "peers"}),
    ],
)  # fmt: skip
def test_a_kill_names_the_farthest_place_that_its_ranks_needed(events, source, sources):
    kill = Kill("node", ["n0", "n1"], [0, 1])
    kill.tell(events, [{"rank": e["rank"], "step": 5, "node": e["node"]} for e in events])
    assert (kill.source, kill.sources) == (source, sources)
    mine = [e for e in events if e["rank"] < 2]
    assert sum(kill.bytes_from.values()) == sum(e["snapshot_bytes"] for e in mine)
    assert kill.restore_s == 1.5


def test_bytes_that_the_repair_brought_are_the_peers():
    kill = Kill("node", ["n0"], [0])
    kill.tell([restored(0, "local")], [{"rank": 0, "step": 5, "node": "n9"}])
    assert (kill.source, kill.repaired) == ("peers", [0])


def good():
    kill = Kill("node", ["n0"], [0], source="peers", back_s=1.0)
    return Summary(
        4, 2, "rs:2,1", 2, 1, losses_bit_identical=True, state_digests_equal=True, kills=[kill]
    )


def test_a_summary_is_good_only_if_everything_is_known_and_right():
    assert good().ok
    for name, value in [
        ("losses_bit_identical", None),
        ("losses_bit_identical", False),
        ("state_digests_equal", None),
        ("kills", []),
        ("kills", [Kill("node", ["n0"], [0])]),
        ("why", ["something"]),
    ]:
        summary = good()
        setattr(summary, name, value)
        assert not summary.ok, name


@pytest.mark.parametrize(
    "options",
    [
        Options(nodes=3),
        Options(racks=0),
        Options(racks=7),
        Options(kill=5),
        Options(steps=10),
        Options(ranks_per_node=0),
        Options(layout="rs:0,1"),
    ],
)
def test_what_cannot_be_played_is_refused(options):
    with pytest.raises(UsageError):
        options.check()
