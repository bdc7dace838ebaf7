"""A node of real processes is drained while its job saves, and then killed with all that it holds.

Five nodes, each with an agent and its UCX mover; three have a rank; layout rs:2,1; an etcd.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kill_rig import PATIENCE_S, ROOT, Cluster, Job, until


@pytest.fixture(scope="module")
def cluster():
    place = Path(tempfile.mkdtemp(prefix="drain-"))
    try:
        with Cluster(place, nodes=5, budget_mib=128) as cluster:
            yield cluster
    finally:
        shutil.rmtree(place)


def drain(node, *more):
    """`p2pckpt drain`, begun; asked of another node's agent."""
    command = [sys.executable, "-m", "p2pckpt.cli.main", "drain", *more, "--json"]
    return subprocess.Popen(
        [*command, "--agent", str(node.socket)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def told(process):
    """Exit code and document."""
    out, err = process.communicate(timeout=PATIENCE_S)
    assert out, err
    return process.returncode, json.loads(out)


def losses(node, job):
    found = node.status()["jobs"][f"{os.getuid()}.{job.name}"]["redundancy"]
    return found and (found["step"], found["survivable_node_losses"])


def test_a_drained_node_is_killed_and_nothing_is_less_for_it(cluster):
    nodes = list(cluster.nodes)
    with Job(cluster, "drained", nodes[:3], 4, "rs:2,1") as job:
        job.launch()
        job.commit()
        leaving, by = nodes[1], nodes[4]
        draining = drain(by, leaving.name, "--timeout-s", "50")
        job.commit()
        while draining.poll() is None:
            job.commit()
        code, document = told(draining)
        assert (code, document["ok"], document["done"]) == (0, True, True), document
        assert document["left"] == document["waiting"] == 0
        assert by.status()["draining"] == [leaving.name]
        job.commit()
        until(lambda: losses(by, job) == (job.step, 1), cluster.story)
        # it goes, with its rank
        before, mine = job.step, job.nodes.index(leaving)
        job.seats[mine].kill()
        cluster.destroy([leaving])
        job.kill([mine])
        assert cluster.take_dead() == [leaving]
        assert losses(by, job) == (before, 1)
        job.nodes = [nodes[0], nodes[3], nodes[2]]
        assert job.launch() == before
        assert job.commit_soon() >= 1
        until(lambda: losses(by, job) == (job.step, 2), cluster.story)
        # four hosts are just enough
        code, document = told(drain(by, nodes[3].name))
        assert (code, document["done"], document["stuck"]) == (4, False, True), document
        assert document["error"]["kind"] == "Degraded"
        assert f"step {job.step}" in document["lacking"][0]
        code, document = told(drain(by, nodes[3].name, "--cancel"))
        assert (code, document["draining"]) == (0, False)
        assert told(drain(by, "n77"))[0] == 3
        until(lambda: losses(by, job) == (job.step, 2), cluster.story)
