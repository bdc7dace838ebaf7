"""The simulated world as a developer runs it: the command, its exit codes, one seed being one run.

The command runs in processes of its own, with different PYTHONHASHSEED: what depends on the order
of a set or on an address would show in the digest of the event log. Endings that no right product
shows (a crash, a wait without end) are brought about from the world's side of the doors.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from p2pckpt import records as r
from p2pckpt.agent.retire import decide_sweep
from p2pckpt.backends.inproc.cluster import FakeCluster
from p2pckpt.backends.inproc.ledger import LedgerDoor
from p2pckpt.errors import UsageError
from p2pckpt.jobstate import JobState
from p2pckpt.ports import Put, Txn
from p2pckpt.wire import pack
from simulations.world import clock, quiet
from simulations.world.campaign import draw
from simulations.world.checkers import Checkers
from simulations.world.story import EXIT_CODES, FAULTS, JOB, Options, World, run

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "p2pckpt.cli.main", "simulate", "world"]
SMALL = ("--nodes", "5", "--racks", "5", "--ranks", "3", "--jobs", "1", "--layout", "rs:2,1")
FOUND = {
    12000007: "a reader's record was back after a rollback, and kept its step for ever",
    12000038: "the checker counted damage of an open attempt that nobody can know of",
    12000223: "a launch right after a wipe was told nothing, before those with bytes were back",
    13346259: "no rebuild was done where the agent that was asked was not the frozen one",
    14000113: "a join was back after a rollback, and the job could never be cleaned",
    14000426: "the checker missed copies of what only the object store had",
    14000835: "a sweep that was not answered was not done again",
    14000863: "ranks of a ledger that was gone went on in the rebuilt one",
    14001849: "a rank that came late to a ballot put its reader's record after its end",
    14002446: "after an outage of the ledger, too, those with bytes are back a little later",
    15000278: "a rebuild gave up, and its first transaction came late: a ledger that seemed whole",
    16000056: "a repair did not ask a host that a repair before it had put a shard on",
    16000141: "a listing that was older than the mirror did not freeze the agent",
    17000756: "an object that was cut spoiled its whole step, though RAM had that rank",
    17001097: "a rebuilt ledger did not find a step in the store that rotted in RAM",
    17002347: "a rebuild began before all were back, and did not replace what the last one had",
    17002782: "a job went on in a ledger that was set back to before it was cleaned",
    17003467: "the checker held nodes for dead that nobody could know to be",
    17003001: "the fake told a death while the dead one's request went on",
    17004078: "a repair gave a shard to a host that had not said what it has",
    17003594: "who only watched did not notice that the ledger was wiped",
    18000200: "the checker held the abort of a commit that was set back for one that stands",
    19000009: "the first generation after a clean was not swept, as one of its number had been",
    20000485: "the world waited for a fault whose operator was lost with a machine",
    20000695: "the checker did not know which file a late write had hit",
    20001234: "joins of the dead were back under living sessions, and no clean was possible",
    21001021: "the checker took the key of a store before a reboot for the one after it",
    21001160: "a repair gave a host whose receipt was lost another shard of the share",
    22000587: "an operator looked for a node when there was none",
    22000938: "what a repair put somewhere without a ledger was forgotten with the others",
    22001210: "a repair that had waited for a restore went by what it knew before",
    4841297: "a job that had not committed yet was told that its commits are lost",
    25001768: "the checker knew of no rebuild whose last answer was lost",
}
"""Seeds that found a fault: what they draw may change, then they are just seeds."""

SHORT = (*SMALL, "--saves", "9", "--every", "5", "--keep-last", "1", "--offload-every", "0")


def begin(*options, hash_seed="0"):
    return subprocess.Popen(
        [*COMMAND, *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process, timeout_s=60):
    """(exit code, stdout, stderr) of a command, which is killed if it takes too long."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


def world(*options):
    return end(begin(*options))


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_seed_is_one_run_in_every_process(seed, tmp_path):
    faults = (*SHORT, "--fault", "crash_lose", "--fault", "partition", "--fault", "clock_skew")
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    both = [
        begin("--seed", seed, *faults, "--log", str(log), "--json", hash_seed=hash_seed)
        for log, hash_seed in zip(logs, ("1", "4242"), strict=True)
    ]
    documents = []
    for process in both:
        code, out, err = end(process)
        assert code == 0, err
        documents.append(json.loads(out))
    one, two = documents
    assert one["ok"]
    assert one["end"] == "ok"
    assert one["due"] >= 9
    assert one["commits"] >= 7
    assert one["faults"] == {"crash_lose": 1, "partition": 1, "clock_skew": 1}
    assert re.fullmatch(r"[0-9a-f]{64}", one["digest"])
    assert one == two
    assert logs[0].read_bytes() == logs[1].read_bytes()
    events = [json.loads(line) for line in logs[0].read_text().splitlines()]
    assert len(events) > 100


def test_another_seed_is_another_run():
    ends = [run(Options(seed, saves=2, quiet_saves=1)) for seed in (1, 2, 1)]
    assert {result.end for result in ends} == {"ok"}
    assert ends[0].digest == ends[2].digest != ends[1].digest


def test_what_is_told_without_json():
    code, out, err = world("--seed", "7", *SMALL, "--saves", "1", "--no-fault")
    assert code == 0, err
    found = re.match(r"ok: (\d+) commits of (\d+) due saves, ", out)
    assert found
    assert found[1] == found[2]
    assert re.search(r"^event log sha256 [0-9a-f]{64}$", out, re.MULTILINE)
    assert err.startswith("options: {'seed': 7, 'nodes': 5, ")


def test_what_is_not_given_is_drawn_from_the_seed():
    drawn = draw(7)
    code, _, err = world("--seed", "7", "--saves", "1", "--no-fault")
    assert code == 0, err
    assert f"'layout': '{drawn.layout}'" in err
    assert f"'every': {drawn.every}" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--fault", "nosuch"), "nosuch"),
        (("--nodes", "0"), "nodes 0"),
        (("--saves", "0"), "saves 0"),
        (("--layout", "rs:99,99"), "k=99"),
        (("--seed", "x"), "--seed"),
        (("--nosuch",), "--nosuch"),
    ],
    ids=str,
)
def test_a_wrong_option_is_exit_code_2(options, message):
    code, out, err = world(*options)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_more_lost_than_the_layout_survives_is_exit_code_4(tmp_path):
    # All machines are in one rack, behind one switch, and its power goes.
    file = tmp_path / "world.json"
    storm = ("--saves", "16", "--fault", "power_lost")
    code, _, err = world("--seed", "3", *SHORT, "--racks", "1", *storm, "--json", str(file))
    document = json.loads(file.read_text())
    assert (code, document["end"]) == (4, "lost"), err
    assert document["why"]


def test_every_end_has_an_exit_code_of_its_own():
    assert EXIT_CODES == {"ok": 0, "wrong": 1, "lost": 4, "crash": 5, "stuck": 6}
    told = end(begin("--help"))[1]
    assert all(f"{code} {name}" in told for name, code in EXIT_CODES.items())


def test_beyond_the_bound_of_virtual_time_is_stuck():
    result = run(Options(1, limit_s=10.0))
    assert result.end == "stuck"
    assert "10.0 virtual seconds" in result.why


def test_an_exception_in_an_agent_is_a_crash(monkeypatch):
    right, broken = LedgerDoor.list, []

    async def listing(self, prefix):
        """A door that breaks its promise: no foreign exception comes out."""
        return 1 // 0 if broken else await right(self, prefix)

    async def breaks(_world, node, _fault):
        broken.append(node)

    monkeypatch.setattr(LedgerDoor, "list", listing)
    monkeypatch.setitem(FAULTS, "pause", breaks)
    result = run(Options(1, saves=2, quiet_saves=1, faults=("pause",), limit_s=600.0))
    assert result.end == "crash"
    assert "ZeroDivisionError" in result.why


def test_a_commit_without_bytes_is_wrong(monkeypatch):
    async def forge(world, _node, _fault):
        keys, etcd = r.JobKeys(JOB), world.cluster.etcd
        state = JobState.listed(keys, etcd.list(keys.state))
        number = state.generation.number
        attempt = r.Attempt(state.ledger_id, JOB, number, 900, 9000)
        commit = r.Commit(attempt, "forged", state.generation.layout, 4, 1)
        assert etcd.apply("nobody", Txn(puts=(Put(keys.commit("forged", 9000), pack(commit)),)))

    monkeypatch.setitem(FAULTS, "pause", forge)
    result = run(Options(1, saves=2, quiet_saves=1, faults=("pause",)))
    assert result.end == "wrong"
    assert "step 9000 committed without the bytes of ranks [0, 1, 2, 3]" in result.why


@pytest.mark.parametrize("seed", FOUND)
def test_what_a_seed_found_is_mended(seed):
    result = run(draw(seed), keep_log=False)
    assert result.end in ("ok", "lost"), result.why


def test_of_older_generations_nothing_is_left():
    world = World(Options(1, saves=8, quiet_saves=3, faults=("trainer_dies",)))
    clock.run(world.main(), limit_s=3600.0)
    keys, etcd = r.JobKeys(JOB), world.cluster.etcd
    state = JobState.listed(keys, etcd.list(keys.state))
    assert state.generation.number > 1
    assert decide_sweep(state, etcd.list(keys.root)) == ()
    assert etcd.list(keys.roster_pieces(state.generation.roster_digest)).entries


def test_a_save_dies_before_it_is_encoded_where_somebody_else_has_all_cores():
    result = run(Options(3, saves=30, quiet_saves=6, faults=("busy_cores",) * 4), keep_log=False)
    assert result.end == "ok", result.why
    assert result.moves["snapped->abandoned"] > 0


def test_the_checkers_know_of_a_rebuild_from_its_last_record():
    """Who wrote it may never hear that it stands, and so not tell."""
    cluster = FakeCluster(1)
    checkers, keys = Checkers(cluster, JOB, spread=False), r.JobKeys(JOB)

    async def write(key, value):
        assert await LedgerDoor(cluster.etcd, "n0").transact(Txn((), (Put(key, value),)))

    async def main():
        begun = r.Rebuilt(("older",), "n0", 1, unfinished=True)
        generation = r.Generation(3, "nonce", "rebuilt", 1, "rebuilt", 0, r.Layout(2, 1), 1)
        await write(keys.ledger_id, b"newer")
        await write(keys.generation, pack(generation))
        await write(keys.rebuilt, pack(begun))
        assert checkers.rebuilt_as == ""
        await write(keys.rebuilt, pack(structs.replace(begun, unfinished=False)))
        assert checkers.rebuilt_as == f"{3:010d}"

    cluster.node("n0", budget_bytes=1 << 20)
    clock.run(main(), limit_s=60.0)


def test_options_know_their_own_validity():
    with pytest.raises(UsageError, match=r"\['storm'\]: known are ambiguous, bad_weather, "):
        Options(1, faults=("storm", "pause"))
    with pytest.raises(UsageError, match="jobs 3: needs 1 or 2"):
        Options(1, jobs=3)


def test_only_an_attempt_without_outcome_explains_more_outcomes_than_the_recent_ones():
    keys = [
        f"root/state/outcome/{2:010d}.{n:010d}.{n:020d}" for n in (*range(5, 9), *range(10, 40))
    ]
    assert quiet._held_up(f"{2:010d}.{5:010d}", keys) == 39 - 9
    assert quiet._held_up(f"{2:010d}.{10:010d}", keys[4:]) == 0
    assert quiet._held_up(f"{2:010d}.{0:010d}", keys[4:]) == 39
    assert quiet._held_up(f"{1:010d}.{0:010d}", keys) == 0
