"""Kills, freezes and restarts of real processes, again and again, at moments that chance picks.

One cluster: three agents, an etcd, jobs of two ranks. Whatever is done to it, every step that is
restored is bit for bit what all ranks wrote down when they saved it, training goes on, and saves
work again afterwards.
"""

import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
from kill_rig import LOST_S, PATIENCE_S, Cluster, Job, alive, moment, until

SAVES_WORK_AGAIN_S = 30.0
MIB = 32


@pytest.fixture(scope="module")
def cluster():
    place = Path(tempfile.mkdtemp(prefix="kills-"))
    try:
        with Cluster(place, nodes=3, budget_mib=1024) as cluster:
            yield cluster
    finally:
        shutil.rmtree(place)


def job_of(cluster, name, mib=MIB):
    return Job(cluster, name, cluster.nodes[:2], mib)


# -- trainers --------------------------------------------------------------------------------------


def kill_in_saves(job, rounds):
    """Commit, then kill rank 0, rank 1 or both at 40 % of a save's blocking time, and restart."""
    in_save, found = 0, []
    job.launch()
    for number in range(rounds):
        job.commit()
        before, moment_s = job.step, 0.4 * job.blocking_s
        job.train()
        for seat in job.seats:
            seat.tell("save", step=job.step)
        time.sleep(moment_s)  # the moment under trial
        in_save += bool(job.kill([(0,), (1,), (0, 1)][number % 3]))
        restored = job.launch()
        assert restored in (before, before + 1), (before, restored)
        found.append(restored - before)
    assert in_save >= rounds * 3 // 4, (in_save, rounds)
    return found


def test_trainers_killed_while_they_save(cluster):
    """B023: and the tensors of both ranks have the same names, and each rank gets its own back."""
    with job_of(cluster, "trainers", 64) as job:
        found = kill_in_saves(job, 8)
        assert found.count(0) >= 4, found  # most were killed before the snapshot was whole


@pytest.mark.slow
def test_trainers_killed_while_they_save_100_times(cluster):
    with job_of(cluster, "trainers-long", 64) as job:
        kill_in_saves(job, 5)
        before = cluster.ram_bytes()
        kill_in_saves(job, 95)
        until(lambda: cluster.ram_bytes() <= before, lambda: (before, cluster.ram_bytes()))


# -- the agent of the committing node stands still -------------------------------------------------


def freeze_the_committer(job, rounds):
    """Rank 0's agent stands still for longer than it takes to be lost; rank 1 saves on."""
    cluster, node = job.cluster, job.nodes[0]
    job.launch()
    job.commit()
    for _ in range(rounds):
        job.train()
        begun = time.monotonic()
        for seat in job.seats:
            seat.tell("save", step=job.step)
        moment(0.4)
        os.kill(node.agent.pid, signal.SIGSTOP)
        try:
            job.seats[1].hear()
            other = job.seats[1]
            other.tell("prepare", step=job.step + 1)
            job.wrote[1, job.step + 1] = other.hear()["sha"]
            other.tell("save", step=job.step + 1)
            assert "raised" not in other.hear()
            time.sleep(LOST_S + 1.5 - (time.monotonic() - begun))  # it is taken for lost
            assert node.name not in job.nodes[1].status()["members"]
        finally:
            os.kill(node.agent.pid, signal.SIGCONT)
        assert "raised" not in job.seats[0].hear()
        job.step += 1
        job.seats[0].tell("prepare", step=job.step)
        job.wrote[0, job.step] = job.seats[0].hear()["sha"]
        job.seats[0].tell("save", step=job.step)
        assert "raised" not in job.seats[0].hear()
        job.ends(job.step - 1)
        job.ends()
        job.commit_soon(SAVES_WORK_AGAIN_S)
        for step in job.committed():
            assert job.verified(step) == step
        assert job.verified() == job.step
        until(lambda: node.name in job.nodes[1].status()["members"], cluster.story)
    step = job.step
    assert job.launch() == step


def test_the_committer_stands_still(cluster):
    """B082."""
    with job_of(cluster, "frozen") as job:
        freeze_the_committer(job, 1)


@pytest.mark.slow
def test_the_committer_stands_still_5_times(cluster):
    with job_of(cluster, "frozen-long") as job:
        freeze_the_committer(job, 5)


def test_an_agent_that_stands_still_holds_no_save(cluster):
    """Rank 1 waits for its agent as long as a save may wait, once; then it hardly waits at all. No
    save commits meanwhile, rank 0 is told of each, and as soon as the agent goes on saves work
    again, one after the other: no slot is kept for a rank that did not wait for it."""
    save_wait_s, copy_s = 3.0, 1.0
    with job_of(cluster, "frozen-hook") as job:
        job.launch()
        job.commit()
        step = job.step
        os.kill(job.nodes[1].agent.pid, signal.SIGSTOP)
        try:
            held = [[answer["blocking_s"] for answer in job.save()] for _ in range(4)]
        finally:
            os.kill(job.nodes[1].agent.pid, signal.SIGCONT)
        assert save_wait_s - 0.1 <= held[0][1] < save_wait_s + copy_s, held
        assert all(frozen < 0.5 for _, frozen in held[1:]), held
        assert all(other < save_wait_s + copy_s for other, _ in held), held
        for failed in range(step + 1, job.step + 1):
            told = job.ends(failed)
            assert told[1]["status"] == "failed", told
            assert told[0]["status"] in ("aborted", "skipped", "failed"), told
        job.commit_soon(SAVES_WORK_AGAIN_S)
        for _ in range(3):
            job.commit()
        step = job.step
        assert job.launch() == step


# -- agents are killed, their RAM stays ------------------------------------------------------------


def kill_agent(cluster, job, index):
    """SIGKILL one agent; a new one takes its place on the same directory."""
    node = job.nodes[index] if index < len(job.nodes) else cluster.nodes[index]
    mover = cluster.mover(node)
    assert mover
    node.agent.kill()
    node.agent.wait(PATIENCE_S)
    until(lambda: not alive(mover), lambda: "the mover outlived its agent")
    return node


def back(cluster, job, node):
    fresh = cluster.restart(node)
    job.nodes = [fresh if n is node else n for n in job.nodes]


def test_an_agent_is_killed_and_its_trainers_go_on(cluster):
    with job_of(cluster, "agents") as job:
        job.launch()
        job.commit()
        pids = [seat.pid for seat in job.seats]
        for index in (0, 1, 2):
            job.train()
            for seat in job.seats:
                seat.tell("save", step=job.step)
            moment(0.3)
            node = kill_agent(cluster, job, index)
            job.hear()
            job.save()  # with no agent there: told, not raised
            back(cluster, job, node)
            job.commit_soon(SAVES_WORK_AGAIN_S)
        files = 6 * len(cluster.nodes)  # two versions of a node's own share and of two others'
        assert steady(cluster)[0] <= files * (MIB + 3 << 20), steady(cluster)
        assert [seat.pid for seat in job.seats] == pids
        step = job.step
        assert job.launch() == step


def steady(cluster):
    """RAM in use, when it has not changed for a second."""
    found = [cluster.ram_bytes()]

    def same():
        found.append(cluster.ram_bytes())
        time.sleep(0.1)
        return len(found) > 10 and len(set(found[-10:])) == 1

    until(same, lambda: found[-10:])
    return found[-1]


@pytest.mark.slow
def test_agent_and_trainer_killed_together_leave_nothing_behind(cluster):
    with job_of(cluster, "both") as job:
        job.launch()
        job.commit()
        found = []
        for number in range(10):
            job.train()
            for seat in job.seats:
                seat.tell("save", step=job.step)
            moment(0.3)
            node = kill_agent(cluster, job, number % 2)
            job.kill()
            back(cluster, job, node)
            last = job.step
            assert job.launch() in (last - 1, last)
            job.commit_soon(SAVES_WORK_AGAIN_S)
            found.append(steady(cluster))
        assert max(f[:2] for f in found[6:]) <= max(f[:2] for f in found[:6]), found
        assert max(f[2] for f in found[6:]) <= max(f[2] for f in found[:6]) + 3, found


# -- movers ----------------------------------------------------------------------------------------


def test_a_mover_is_killed_while_it_moves(cluster):
    with job_of(cluster, "movers") as job:
        job.launch()
        job.commit()
        for node in cluster.nodes:
            job.save()
            moment(0.2)
            mover = cluster.mover(node)
            os.kill(mover, signal.SIGKILL)
            statuses = {a["status"] for a in job.ends()}
            assert statuses in ({"committed"}, {"aborted"}), statuses
            until(lambda node=node, old=mover: cluster.mover(node) not in (0, old), cluster.story)
            job.commit_soon(SAVES_WORK_AGAIN_S)
            assert job.verified() == job.step
        step = job.step
        assert job.launch() == step


# -- etcd ------------------------------------------------------------------------------------------


def saves_meanwhile(job, seconds):
    """Save again and again; no call may raise or block for long."""
    end = time.monotonic() + seconds
    slowest_s = 0.0
    while time.monotonic() < end:
        job.save()
        slowest_s = max(slowest_s, job.blocking_s)
    return slowest_s


def test_etcd_is_killed_and_started_again(cluster):
    with job_of(cluster, "etcd-killed") as job:
        job.launch()
        job.commit()
        job.save()
        moment(0.3)
        cluster.etcd.kill(0)
        slowest_s = saves_meanwhile(job, LOST_S)
        cluster.etcd.spawn(0)
        cluster.etcd.wait_healthy([0])
        job.commit_soon(SAVES_WORK_AGAIN_S)
        assert slowest_s < 5.0
        assert job.verified() == job.step
        step = job.step
        assert job.launch() == step


def test_etcd_stands_still(cluster):
    with job_of(cluster, "etcd-frozen") as job:
        job.launch()
        job.commit()
        job.save()
        moment(0.3)
        cluster.etcd.freeze(0)
        try:
            slowest_s = saves_meanwhile(job, 15.0)
        finally:
            cluster.etcd.thaw(0)
        job.commit_soon(SAVES_WORK_AGAIN_S)
        assert slowest_s < 5.0
        assert job.verified() == job.step
        step = job.step
        assert job.launch() == step


# -- two jobs --------------------------------------------------------------------------------------


def test_two_jobs_see_only_their_own(cluster):
    """B041."""
    with job_of(cluster, "one", 8) as one, job_of(cluster, "two", 12) as two:
        two.nodes = two.nodes[::-1]
        one.launch()
        two.launch()
        two.step = 100
        for _ in range(3):
            for job in random.sample((one, two), 2):
                job.save()
            for job in (one, two):
                assert {a["status"] for a in job.ends()} == {"committed"}
        until(lambda: one.ask("steps") == [{"steps": [3]}] * 2)
        until(lambda: two.ask("steps") == [{"steps": [103]}] * 2)
        one.kill()
        assert two.launch() == 103
        two.commit()
        assert one.launch() == 3
        one.commit()
        assert (one.committed()[-1], two.committed()[-1]) == (4, 104)
