"""The hook in a trainer's process: it keeps no state alive, and forked workers do it no harm.

Real agents and ranks; the workers are those of torch's DataLoader.
"""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from kill_rig import Cluster, Job

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
