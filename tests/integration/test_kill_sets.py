"""What `topology.survives` says of a loss, done to real processes: are the bytes there, or not?

Nine nodes in three racks, each with an agent, its UCX mover and a rank; layout rs:4,2; an etcd. For
a set of nodes, chosen by a seed: a job saves a step; when its redundancy is full, all processes of
these nodes are killed at once and their RAM is removed. Others come in their place, all ranks start
again and restore. If the placement survives the loss, every rank has what it saved, bit for bit;
if not, every rank is refused, with the step and the ranks that cannot be had.
"""

import os
import re
import shutil
import tempfile
import time
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from kill_rig import Cluster, Job, until

from topology.survive import Share, survives

NODES, RACKS, LAYOUT, K, M = 9, 3, "rs:4,2", 4, 2
SEED = 1


@pytest.fixture(scope="module")
def cluster():
    place = Path(tempfile.mkdtemp(prefix="sets-"))
    try:
        with Cluster(place, NODES, budget_mib=64, racks=RACKS) as cluster:
            yield cluster
    finally:
        shutil.rmtree(place)


def key_of(job):
    return f"{os.getuid()}.{job.name}"


def is_full(job):
    """Does the newest step survive as many lost nodes as the layout can give?"""
    found = job.nodes[0].status()["jobs"][key_of(job)]["redundancy"]
    return found and (found["step"], found["survivable_node_losses"]) == (job.step, M + 1)


def placed(job):
    """Where the step lies, as the agents told when they sealed it."""
    names = {node.store_id: node.name for node in job.cluster.nodes}
    shares = []
    for node in job.nodes:
        (sealed,) = (n for n in node.notes("sealed") if n["job"] == key_of(job))
        assert sealed["attempt"].endswith(f".{job.step:020d}")
        shares.append(Share(node.name, tuple(names[h] for h in sealed["holders"]), K))
    return shares


def kill(job, names):
    """These nodes with all that runs on them; then others come in their place, under new names."""
    cluster, dead = job.cluster, [n for n in job.nodes if n.name in names]
    mine = [rank for rank, node in enumerate(job.nodes) if node in dead]
    for rank in mine:
        job.seats[rank].kill()
    cluster.destroy(dead)
    assert job.kill(mine) == mine, "ranks that died had something to say"
    assert cluster.take_dead() == dead
    fresh = {node.name: cluster.start_node(node.rack) for node in dead}
    job.nodes = [fresh.get(node.name, node) for node in job.nodes]
    until(cluster.settled, cluster.story)


def try_set(cluster, number, count, wanted, chance):
    """Lose `count` nodes, a set that the placement survives or does not."""
    begun = time.monotonic()
    with Job(cluster, f"set-{number}", list(cluster.nodes), 1, LAYOUT) as job:
        job.launch()
        job.commit()
        until(lambda: is_full(job), cluster.story)
        shares = placed(job)
        sets = list(combinations(sorted(n.name for n in job.nodes), count))
        good = [s for s in sets if all(survives(share, {*s}) for share in shares)]
        assert len(good) == len(sets) or (count > M + 1 and good)
        names = chance.choice(good if wanted else sorted({*sets} - {*good}))
        doomed = [i for i, share in enumerate(shares) if not survives(share, {*names})]
        kill(job, names)
        if wanted:
            assert job.launch() == 1
        else:
            check_refusal(job.refused(), shares, doomed)
    told = "restored bit for bit" if wanted else f"refused, naming ranks {doomed}"
    seconds = time.monotonic() - begun
    print(f"\n  {len(good)} of {len(sets)} survive; {names}: {told}; {seconds:.1f} s", end="")


def check_refusal(answers, shares, doomed):
    """Every rank was told the step, and exactly the ranks that cannot be had, and why."""
    for answer in answers:
        assert answer.startswith("RestoreFailed: "), answer
        named = re.findall(r"step 1, ranks \[(\d+)\] of (\w+): own copy gone, (\d) of 6", answer)
        assert {(int(rank), owner) for rank, owner, _ in named} == {
            (rank, shares[rank].owner) for rank in doomed
        }, answer
        assert all(int(left) < K for _, _, left in named)
        assert f"needs {K}" in answer


@pytest.mark.parametrize("each", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_sets_of_nodes_are_killed(cluster, each, capsys):
    """Triples, which all survive, and as many quadruples, of which every other one does not."""
    chance = Random(f"{SEED} {each}")
    with capsys.disabled():
        print(f"\n  seed {SEED}: {each} triples, {each} quadruples", end="")
        for i in range(each):
            try_set(cluster, f"{each}-3-{i}", 3, True, chance)
        for i in range(each):
            try_set(cluster, f"{each}-4-{i}", 4, i % 2 == 0, chance)
