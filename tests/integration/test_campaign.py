"""Campaigns: what a seed draws, what many add up to, and that a worker's end is a finding."""

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import count
from pathlib import Path

import pytest

from p2pckpt import records as r
from simulations.world import campaign
from simulations.world.campaign import LONG, Campaign, Tally, draw
from simulations.world.lives import ALL_MOVES, MOVES, Life, Lives
from simulations.world.story import FAULTS

ROOT = Path(__file__).parents[2]


def test_every_seed_is_a_job_under_faults_with_a_quiet_end():
    drawn = [draw(seed) for seed in range(400)]
    for options in drawn:
        assert 4 <= options.nodes <= 16
        assert r.Layout.parse(options.layout).shards < options.nodes
        assert options.saves >= 30
        assert len(options.faults) == 10
        assert len(set(options.faults)) >= 4
        assert options.quiet_saves >= 8
    assert {kind for options in drawn for kind in options.faults} == set(FAULTS)
    assert drawn == [draw(seed) for seed in range(400)]
    assert {options.jobs for options in drawn} == {1, 2}
    assert {options.offload_every > 0 for options in drawn} == {True, False}


def found(seed, end="ok", **more):
    return {
        "seed": seed, "end": end, "why": end, "commits": 30, "due": 33, "virtual_s": 180.0,
        "faults": {}, "moves": {}, "restores": {}, **more,
    }  # fmt: skip


def test_what_never_happened_is_told_and_ends_a_long_campaign():
    tally = Tally()
    everything = {
        "faults": dict.fromkeys(FAULTS, 1),
        "moves": dict.fromkeys(ALL_MOVES, 1),
        "restores": {"local": 2, "peers": 1, "s3": 1, "nothing": 1},
    }
    for seed in range(LONG):
        tally.add(found(seed, **(everything if seed == 7 else {})))
    assert tally.close() == 0
    assert tally.never == []
    tally.faults_fired["pause"] = 0
    tally.moves_taken["open->snapped"] = 0
    tally.restores["s3"] = 0
    assert tally.close() == campaign.EXIT_NEVER
    assert tally.never == ["fault pause", "move open->snapped", "restore s3"]
    assert tally.virtual_h == pytest.approx(LONG * 180 / 3600)


@pytest.mark.parametrize(
    ("ends", "code"),
    [(["ok", "lost"], 0), (["crash"], 5), (["stuck", "ok"], 6), (["stuck", "crash", "wrong"], 1)],
)
def test_the_ends_are_told_apart(ends, code):
    tally = Tally()
    for seed, end in enumerate(ends):
        tally.add(found(seed, end))
    assert tally.close() == code
    counted = Counter(ends)
    assert (tally.crash, tally.stuck, tally.wrong, tally.lost) == (
        counted["crash"], counted["stuck"], counted["wrong"], counted["lost"],
    )  # fmt: skip
    failed = [(f["seed"], f["end"]) for f in tally.failures]
    assert failed == [(i, e) for i, e in enumerate(ends) if e not in ("ok", "lost")]


SMALL = {
    "nodes": 4, "racks": 4, "layout": "copies:1", "ranks": 1, "jobs": 1, "saves": 2,
    "quiet_saves": 1, "faults": (), "offload_every": 0,
}  # fmt: skip


def test_seeds_run_in_processes_and_every_hundredth_twice():
    told = []
    running = Campaign(iter((99, 100, 101)), 2, 60.0, told.append, os.environ, **SMALL)
    tally = running.run()
    assert (tally.seeds, tally.twice, tally.failures) == (3, 1, [])
    assert tally.commits == tally.due >= 6
    assert tally.restores["nothing"] == 3
    assert all(w.process.returncode is not None for w in running._workers)


def test_two_runs_that_differ_are_wrong(monkeypatch):
    running = Campaign(iter(()), 2, 0.0, lambda _text: None, os.environ)
    try:
        running._take({**found(100), "digest": "a" * 64})
        running._take({**found(100), "digest": "b" * 64})
    finally:
        running.run()
    assert running.tally.close() == 1
    assert "two processes, two runs" in running.tally.failures[0]["why"]
    assert running.tally.seeds == 1


def test_a_worker_that_dies_is_a_crash_and_others_go_on():
    running = Campaign(iter((1, 2, 3)), 2, 60.0, lambda _text: None, os.environ, **SMALL)
    running._workers[0].process.kill()
    tally = running.run()
    assert tally.crash == 1
    assert tally.seeds == 3
    assert "died" in tally.failures[0]["why"]


def test_a_worker_that_hangs_is_stuck(monkeypatch):
    monkeypatch.setattr(campaign, "SILENT_S", -1.0)
    running = Campaign(iter((1,)), 2, 60.0, lambda _text: None, os.environ, **SMALL)
    os.kill(running._workers[0].process.pid, 19)  # it stands still, and says nothing
    tally = running.run()
    assert tally.stuck == 1


def test_the_command_tells_how_it_went(tmp_path):
    file = tmp_path / "campaign.json"
    command = [sys.executable, "-m", "p2pckpt.cli.main", "simulate", "campaign"]
    done = subprocess.run(
        [*command, "--seeds", "3:3", "--json", str(file)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["seeds"] == 0
    assert {"crash", "stuck", "wrong", "lost", "faults_fired", "moves_taken", "restores"} <= {
        *document
    }
    bad = subprocess.run(
        [*command, "--seeds", "x"], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert bad.returncode == 2
    assert "FIRST:END" in bad.stderr


def attempt(generation=1, ordinal=0):
    return r.Attempt("ledger", "1000.world", generation, ordinal, 5)


def test_a_life_moves_by_the_table():
    lives = Lives()
    way = [Life.OPEN, Life.SNAPPED, Life.ENCODED, Life.SENT, Life.SEALED, Life.COMMITTED]
    for life in [*way, Life.OFFLOADED, Life.RETIRED]:
        assert lives.saw(attempt(), life) == ""
        assert lives.saw(attempt(), Life.OPEN) == ""  # another node is not so far
    assert sum(lives.taken.values()) == 7
    assert lives.saw(attempt(), Life.ABANDONED) == ""
    assert lives.now[attempt()] is Life.RETIRED
    assert set(lives.taken) <= set(ALL_MOVES)


@pytest.mark.parametrize("life", [Life.SEALED, Life.COMMITTED, Life.RETIRED])
def test_an_illegal_move_is_told(life):
    lives = Lives()
    lives.saw(attempt(), Life.OPEN)
    assert lives.saw(attempt(), life) == f"went from open to {life}"


def test_a_newer_generation_abandons_what_is_open():
    lives = Lives()
    for generation in count(1):
        if generation == 4:
            break
        lives.saw(attempt(generation), Life.OPEN)
    lives.generation_began(3)
    assert [lives.now[attempt(g)] for g in (1, 2, 3)] == [
        Life.ABANDONED, Life.ABANDONED, Life.OPEN,
    ]  # fmt: skip
    assert MOVES[Life.ABANDONED] == ()
