"""The hook in a trainer's process: it keeps no state alive, and forked workers do it no harm.

Real agents and ranks; the workers are those of torch's DataLoader.
"""

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
from kill_rig import Cluster, Job

from p2pckpt import seat
from p2pckpt.checkpointer import Checkpointer
from p2pckpt.errors import AgentUnreachable
from p2pckpt.launch import Launch

WORKERS = 4


@pytest.fixture(scope="module")
def cluster():
    place = Path(tempfile.mkdtemp(prefix="hook-"))
    try:
        with Cluster(place, nodes=2, budget_mib=512) as cluster:
            yield cluster
    finally:
        shutil.rmtree(place)


def freed(job):
    return [answer["free"] for answer in job.ask("let_go")]


def test_the_hook_keeps_no_tensor_alive(cluster):
    """B064: what was saved, was skipped or failed, or was restored is the trainer's alone again
    when the call returns; a handle has no bytes, and nobody is called back."""
    with Job(cluster, "memory", cluster.nodes, 4) as job:
        job.launch()
        job.ask("mark")
        job.commit()
        assert freed(job) == [True, True]
        job.ask("mark")
        os.kill(job.nodes[1].agent.pid, signal.SIGSTOP)
        try:
            assert [answer["status"] for answer in job.save()][1] == "failed"
        finally:
            os.kill(job.nodes[1].agent.pid, signal.SIGCONT)
        assert freed(job) == [True, True]
        job.ends()
        job.commit_soon()
        step = job.step
        job.ask("mark")
        assert {answer["step"] for answer in job.ask("restore")} == {step}
        assert freed(job) == [True, True]


def forks(job, epochs):
    """Epochs with forked loader workers, and saves between."""
    job.launch()
    for _ in range(epochs):
        for answer in job.ask("epoch", workers=WORKERS):
            assert len(answer["told"]) == WORKERS
            for told in answer["told"]:
                assert told.startswith("UsageError"), told
                assert "fork" in told
        job.commit()
    step = job.step
    assert job.launch() == step


def test_loader_workers_that_call_save_are_told_and_change_nothing(cluster):
    """B071: three epochs of four forked workers, with saves between; a worker's save is an error
    that says why, the rank's own commit."""
    with Job(cluster, "forks", cluster.nodes, 4) as job:
        forks(job, 3)


@pytest.mark.slow
def test_a_hundred_forks(cluster):
    """B091."""
    with Job(cluster, "forks-long", cluster.nodes, 4) as job:
        forks(job, 100 // WORKERS)


def test_a_process_that_gave_up_joining_may_join_another_job(cluster, monkeypatch):
    """The agent stood still while it was asked: when it goes on nobody waits for that seat."""
    monkeypatch.setattr(seat, "JOIN_SLICE_S", 0.2)
    monkeypatch.setattr(seat, "CALL_TIMEOUT_S", 0.2)
    node = cluster.nodes[0]

    def join(job):
        alone = Launch(rank=0, world_size=1, run_token=job)
        return Checkpointer(job, layout="copies:2", agent=str(node.socket), launch=alone)

    os.kill(node.agent.pid, signal.SIGSTOP)
    try:
        with pytest.raises(AgentUnreachable):
            join("first")
    finally:
        os.kill(node.agent.pid, signal.SIGCONT)
    time.sleep(2.0)  # what lies in the agent's sockets is answered
    monkeypatch.setattr(seat, "CALL_TIMEOUT_S", 30.0)
    with join("second") as second:
        assert second.generation == 1
