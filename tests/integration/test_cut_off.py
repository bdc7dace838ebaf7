"""Nodes that are cut off while they save, hold and restore: each is a network namespace of its own.

Four agents, an etcd, all on one switch (`namespaces.py`); a job of two ranks on n0 and n1, in
rs:2,1, so that n2 and n3 only hold. Links go down, routes vanish, a line gets slow or bad, one
direction of it is cut. Whatever is done: no save is committed for one rank and not for the other,
none has no end, training goes on, and when the network is whole again saves commit, redundancy is
full, and every committed step is right, byte for byte.
"""

import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from kill_rig import LEASE_S, Job, moment, until
from namespaces import LanCluster, why_not

from p2pckpt.demo.leavings import troubles

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")

MIB = 8
FLOOR_BYTES_PER_S = 4 << 20
"""The slowest link that the agents' deadlines allow for."""
AGAIN_S = 30.0


@pytest.fixture(scope="module")
def cluster():
    place = Path(tempfile.mkdtemp(prefix="cut-"))
    try:
        deadlines = {"floor_bytes_per_s": FLOOR_BYTES_PER_S, "attempt_timeout_s": 4.0}
        with LanCluster(place, 4, 512, **deadlines) as cluster:
            yield cluster
    finally:
        shutil.rmtree(place)


@pytest.fixture(scope="module")
def bad_lines(cluster):
    """n1 reaches everybody, and everybody n1, through a relay; so last in this file."""
    for other in ("etcd", "n0", "n2", "n3"):
        cluster.lan.between("n1", other)
    return cluster


@pytest.fixture(scope="module")
def job(cluster):
    with Job(cluster, "cut", cluster.nodes[:2], MIB, "rs:2,1") as job:
        job.launch()
        job.commit()
        yield job


def redundancy(job):
    found = job.nodes[0].status()["jobs"][f"{os.getuid()}.{job.name}"]["redundancy"]
    return found and (found["step"], found["full"] - found["survivable_node_losses"])


def members(node):
    return node.status()["members"]


def told(found):
    """What a save came to, as one word; who did not commit was told why."""
    assert all(a["reason"] for a in found if a["status"] != "committed"), found
    return "/".join(sorted({a["status"] for a in found}))


def begin(job):
    """Every rank begins to save."""
    job.train()
    for seat in job.seats:
        seat.tell("save", step=job.step)


def go_on(job, seconds):
    """Train, and save again and again, and wait for no end; the steps."""
    begun, steps = time.monotonic(), []
    while time.monotonic() < begun + seconds:
        job.save()
        assert job.blocking_s < 5.0, job.cluster.story()
        steps.append(job.step)
    return steps


def whole_again(job, steps=()):
    """Everybody is back, each of the `steps` has one end, saves commit, nothing is missing."""
    cluster, names = job.cluster, ["n0", "n1", "n2", "n3"]
    for node in cluster.nodes:
        until(lambda node=node: members(node) == names, cluster.story, AGAIN_S)
    if steps:
        print("meanwhile:", Counter(told(job.ends(step)) for step in steps))
    job.commit_soon(AGAIN_S)
    until(lambda: redundancy(job) == (job.step, 0), cluster.story, AGAIN_S)
    assert job.verified() == job.step
    assert troubles(cluster.run) == []


# -- links ----------------------------------------------------------------------------------------


def test_nodes_meet_at_the_addresses_that_they_were_told(cluster, job):
    """B074: on every node there is 172.17.0.1 as well, and an interface that is down. Neither is
    used, and each says which it uses and how fast that is."""
    for node in cluster.nodes:
        own = cluster.lan.address(node.name)
        found = cluster.lan[node.name].run("ip -brief address")
        assert "172.17.0.1" in found
        assert any(line.split()[1] == "DOWN" for line in found.splitlines()), found
        last = node.status()["telemetry"]["last"]
        assert last["transport"]["address"].split(":")[0] == own
        assert last["ready"]["nic_bytes_s"] > 0
    job.commit()
    assert job.verified() == job.step


def test_a_holder_is_pulled_off_the_switch_while_it_is_written_to(cluster, job):
    """B052, B070: the save finds another way or is aborted; the next ones commit, degraded, and
    say so."""
    holder = cluster.nodes[3]
    begin(job)
    moment(0.1)
    with cluster.lan.unplugged(holder.name):
        cut_at = time.monotonic()
        job.hear()
        print("the save under way:", told(job.ends()))
        until(lambda: holder.name not in members(job.nodes[0]), cluster.story)
        assert time.monotonic() - cut_at < LEASE_S + 5.0
        job.commit_soon(AGAIN_S)
        assert redundancy(job) == (job.step, 1)
        assert holder.status()["cut_off"]
        assert holder.status()["ram"]["used_bytes"] > MIB << 20  # it keeps what it has
    whole_again(job)


@pytest.mark.slow
def test_the_link_of_a_node_with_a_rank_is_down(cluster, job):
    """Nothing can commit without its share; both ranks are told why and train on."""
    begin(job)
    moment(0.1)
    with cluster.lan.down("n1"):
        job.hear()
        steps = [job.step, *go_on(job, LEASE_S + 2.0)]
        assert job.nodes[1].status()["cut_off"]
        assert job.verified(by=job.nodes[0]) == max(job.committed()) < steps[-1]
    whole_again(job, steps)


# -- routes ---------------------------------------------------------------------------------------


def test_a_node_has_no_way_to_etcd_only(cluster, job):
    """B090: beyond its lease it is frozen: it keeps its bytes, gives them to who reads, and grants
    nothing; then it comes back as the store that it was."""
    node = cluster.nodes[1]
    store = node.store_id
    with cluster.lan.blackhole(node.name, "etcd"):
        steps = go_on(job, LEASE_S + 2.0)
        assert node.status()["cut_off"]
        assert node.name not in members(cluster.nodes[0])
        assert job.verified(by=cluster.nodes[0]) == max(job.committed()) < steps[-1]
    whole_again(job, steps)
    assert node.status()["store_id"] == store


def test_two_nodes_do_not_reach_each_other_but_all_else(cluster, job):
    """Both are members for everybody, so each save has to find out anew: it takes another holder,
    or commits degraded."""
    with cluster.lan.blackhole("n0", "n2"), cluster.lan.blackhole("n2", "n0"):
        begun = time.monotonic()
        job.commit_soon(AGAIN_S)
        print(f"committed after {time.monotonic() - begun:.1f} s, short of:", redundancy(job))
    whole_again(job)


@pytest.mark.slow
def test_the_nodes_of_both_ranks_do_not_reach_each_other(cluster, job):
    """A commit needs both shares in one hand: each save is aborted, and says who is not reached."""
    with cluster.lan.blackhole("n0", "n1"), cluster.lan.blackhole("n1", "n0"):
        for _ in range(2):
            job.save()
            (reason,) = {answer["reason"] for answer in job.ends()}
            print(reason)
            assert "no outcome within" in reason
            assert "could not hand its share to" in reason, cluster.story()
    whole_again(job)


# -- rates ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_slow_link_is_no_fault_down_to_the_promised_rate(cluster, job):
    """Twice the slowest rate that deadlines allow for: saves commit, at that rate."""
    mbit = 2 * 8 * FLOOR_BYTES_PER_S / 1e6
    with cluster.lan.slow("n3", mbit):
        begun = time.monotonic()
        job.commit()
        took_s = time.monotonic() - begun
        into_n3 = 2 * MIB / 2 * (1 << 20)  # a shard of each rank
        print(f"{took_s:.1f} s, {into_n3 / took_s / 1e6:.1f} MB/s of {mbit / 8:.1f}")
        until(lambda: redundancy(job) == (job.step, 0), cluster.story, AGAIN_S)
        assert 0.8 * into_n3 / (mbit / 8 * 1e6) < took_s < 3 * into_n3 / (mbit / 8 * 1e6) + 2
    whole_again(job)


@pytest.mark.slow
def test_a_link_that_is_far_too_slow_is_gone_around(cluster, job):
    """A twentieth of what deadlines allow for: as good as a holder that says nothing."""
    with cluster.lan.slow("n3", 8 * FLOOR_BYTES_PER_S / 20 / 1e6):
        begun = time.monotonic()
        tries = job.commit_soon(60.0)
        print(f"committed at try {tries}, {time.monotonic() - begun:.1f} s", redundancy(job))
    whole_again(job)


# -- restore --------------------------------------------------------------------------------------


def test_a_source_is_cut_off_while_ranks_restore_from_it(cluster, job):
    """B051: ranks start on n2 and n3, and read; n0, which has a whole copy, vanishes meanwhile."""
    step = job.step
    job.nodes = cluster.nodes[2:]
    job.join()
    with cluster.lan.slow("n0", 16 * MIB):  # so that it is in the middle of it
        for seat in job.seats:
            seat.tell("restore")
        time.sleep(0.3)
        with cluster.lan.unplugged("n0"):
            found = job.hear()
    print("read from:", [answer["bytes_from"] for answer in found])
    assert [answer["step"] for answer in found] == [step, step]
    assert [answer["sha"] for answer in found] == [job.wrote[r, step] for r in (0, 1)]
    job.nodes = cluster.nodes[:2]
    step = job.step
    assert job.launch() == step
    whole_again(job)


# -- bad lines ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_delay_and_loss_hold_nothing_up_for_long(bad_lines, job):
    """20 ms and 2 % of the packets to and from n1, on etcd's, gRPC's and UCX's connections."""
    lan = bad_lines.lan
    with lan.bad("n1", ("etcd", "n0", "n2", "n3"), delay_s=0.02, loss=0.02):
        begun, tries = time.monotonic(), job.commit_soon(AGAIN_S)
        print(f"committed at try {tries}, {time.monotonic() - begun:.1f} s")
        steps = go_on(job, LEASE_S + 2.0)
        assert "n1" in members(bad_lines.nodes[0])
    whole_again(job, steps)


def test_one_direction_of_a_line_is_cut(bad_lines, job):
    """What n1 sends to n2 does not arrive, what n2 sends to n1 does."""
    with bad_lines.lan.rule("n1", "n2", cut=True):
        begun = time.monotonic()
        tries = job.commit_soon(AGAIN_S)
        print(f"committed at try {tries}, {time.monotonic() - begun:.1f} s", redundancy(job))
    whole_again(job)


@pytest.mark.slow
@pytest.mark.parametrize("way", [("n1", "etcd"), ("etcd", "n1")])
def test_one_direction_of_the_line_to_etcd_is_cut(bad_lines, job, way):
    node = bad_lines.nodes[1]
    with bad_lines.lan.rule(*way, cut=True):
        steps = go_on(job, LEASE_S + 3.0)
        assert node.status()["cut_off"]
        assert job.verified(by=bad_lines.nodes[0]) == max(job.committed()) < steps[-1]
    whole_again(job, steps)


@pytest.mark.slow
def test_a_line_gets_worse_and_worse(bad_lines, job):
    """Whatever the line does, each save has one end, and the end of it all is a whole job."""
    lan = bad_lines.lan
    for delay_s, loss in ((0.05, 0.05), (0.2, 0.1), (0.5, 0.3)):
        with lan.bad("n1", ("etcd", "n0", "n2", "n3"), delay_s=delay_s, loss=loss):
            steps = go_on(job, 10.0)
        print(delay_s, loss)
        whole_again(job, steps)
