"""`plan-restart` against real agents: with its map no byte crosses the network, without it all do.

Six nodes in three racks, one rank each, an etcd, UCX. What is counted is what each restore says of
its bytes: those that came from other nodes, over the transport, by node.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from kill_rig import PATIENCE_S, ROOT, Cluster, Job, until

NODES, RACKS, MIB = 6, 3, 4


@pytest.fixture(scope="module")
def cluster():
    place = Path(tempfile.mkdtemp(prefix="plan-"))
    try:
        with Cluster(place, NODES, budget_mib=128, racks=RACKS) as cluster:
            yield cluster
    finally:
        shutil.rmtree(place)


def plan(job, *options, code=0):
    """What the command prints, asked of the last node that lives."""
    asked = job.cluster.nodes[-1].socket
    told = [sys.executable, "-m", "p2pckpt.cli.main", "plan-restart", "--job", job.name]
    done = subprocess.run(
        [*told, *options, "--agent", str(asked)],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == code, (done.stdout, done.stderr, job.cluster.story())
    return done.stdout


def relaunch(job, hosts):
    """Start rank i on host i, and restore; by rank the bytes of it, and what the network brought.

    Whatever the map, all ranks are at the newest step, bit for bit.
    """
    named = {node.name: node for node in job.cluster.nodes}
    job.nodes = [named[host] for host in hosts]
    job.join()
    found = job.ask("restore")
    assert {answer["step"] for answer in found} == {job.step}, found
    assert [a["sha"] for a in found] == [job.wrote[rank, job.step] for rank in range(len(found))]
    return [(a["bytes"], sum(a["bytes_from"].values())) for a in found]


def other_map(hosts, chance):
    """The same hosts in another order: a random cycle, so no rank stays where it was."""
    cycle = chance.sample(range(len(hosts)), len(hosts))
    found = list(hosts)
    for one, after in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        found[one] = hosts[after]
    return found


def test_all_bytes_against_none(cluster):
    chance = Random(4)
    names = chance.sample([node.name for node in cluster.nodes], NODES)
    with Job(cluster, "maps", cluster.nodes[:], MIB, "rs:2,1") as job:
        job.nodes = [next(n for n in cluster.nodes if n.name == name) for name in names]
        job.launch()
        job.commit()
        job.kill()
        shuffled = relaunch(job, other_map(names, chance))
        assert all(came == size > MIB << 20 for size, came in shuffled), shuffled
        names = [node.name for node in job.nodes]
        job.commit()
        job.kill()
        hosts = plan(job, "--format", "slurm-hostfile").split()
        assert hosts == names
        planned = relaunch(job, hosts)
        assert [came for _, came in planned] == [0] * NODES, planned
        print(f"over the network: {sum(c for _, c in shuffled)} bytes against 0")


def test_the_spare_in_the_rack_of_the_bytes_takes_the_place_of_a_host_that_is_gone(cluster):
    with Job(cluster, "spares", cluster.nodes[:], MIB) as job:
        job.launch()
        job.commit()
        before = [node.name for node in job.nodes]
        job.kill()
        dead = job.nodes[2]
        cluster.destroy([dead])
        assert cluster.take_dead() == [dead]
        spares = [cluster.start_node(f"r{i}") for i in range(RACKS)]
        until(cluster.settled, cluster.story)
        told = json.loads(plan(job, "--json"))
        assert told["gone"] == [dead.name]
        (host,) = {h["host"] for h in told["hosts"]} - {*before}
        moved = told["ranks"][2]
        assert [rank["rank"] for rank in told["ranks"] if not rank["own"]] == [2]
        racks = {node.name: node.rack for node in cluster.nodes}
        shards = Counter(racks[holder["node"]] for holder in moved["holders"])
        assert host in [node.name for node in spares]
        assert shards[racks[host]] == max(shards.values()), (host, racks, moved)
        assert racks[moved["holders"][0]["node"]] == racks[host]
        hosts = [rank["host"] for rank in told["ranks"]]
        found = relaunch(job, hosts)
        assert [came for _, came in found] == [0, 0, found[2][0], 0, 0, 0], found
        assert told["network_bytes"] == found[2][0] > MIB << 20


def test_what_the_launcher_gets(cluster):
    with Job(cluster, "words", cluster.nodes[:NODES], MIB) as job:
        job.launch()
        job.commit()
        names = [node.name for node in job.nodes]
        text = plan(job)
        assert f"{NODES} of {NODES} ranks find their own copy" in text
        commands = json.loads(plan(job, "--format", "torchrun", "--json"))["commands"]
        assert [c["host"] for c in commands] == names
        assert (
            f"--nnodes=6 --nproc-per-node=1 --node-rank=3 --master-addr={names[0]}"
            in (commands[3]["command"])
        )
        assert json.loads(plan(job, "--format", "json")) == json.loads(plan(job, "--json"))
        two = json.loads(plan(job, "--json", "--ranks-per-host", "2"))
        assert [h["ranks"] for h in two["hosts"]] == [[0, 1], [2, 3], [4, 5]]
        assert two["on_own_copy"] == 3
        few = json.loads(plan(job, "--json", "--hosts", f"{names[0]},{names[1]}", code=1))
        assert "6 ranks, 1 on a host: needs 6 hosts, 2 can be had" in few["error"]["message"]
        assert json.loads(plan(job, "--json", "--step", "77", code=3))["error"]["kind"] == (
            "NothingFound"
        )
        without = json.loads(plan(job, "--json", "--exclude", names[0]))
        assert names[0] not in [h["host"] for h in without["hosts"]]
