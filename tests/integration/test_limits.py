"""Agents at the limits that a machine sets: descriptors, locked memory, a small and a full tmpfs,
a memory cgroup.

Real agents and ranks. A limit that is met ends in an error that names the thing, what it needs and
what there is, or in a save that is aborted in such words; ranks train on, and saves commit as soon
as there is room again. Never SIGBUS, never a wait without end.
"""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kill_rig import PATIENCE_S, Cluster, Job, until
from namespaces import LanCluster, why_not

from p2pckpt.demo.leavings import troubles

MIB = 1 << 20
CGROUP_V1 = Path("/sys/fs/cgroup/memory")
CGROUP_V2 = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def run_directory():
    place = Path(tempfile.mkdtemp(prefix="limits-"))
    try:
        yield place
    finally:
        shutil.rmtree(place)


def limited(ulimit):
    """Goes before a command: `ulimit`, in the shell's words."""
    return ["/bin/sh", "-c", f'ulimit {ulimit} && exec "$@"', "sh"]


class Limited(Cluster):
    """n0's agent runs behind `before`, a command that runs a command."""

    def __init__(self, run, before, budget_mib=512):
        self._before = before
        super().__init__(run, 2, budget_mib)

    def _agent_command(self, name, rack):
        command = super()._agent_command(name, rack)
        return [*self._before, *command] if name == "n0" else command


def aborted_by_name(job, *words):
    """A save is aborted, in these words; the ranks live."""
    job.save()
    found = job.ends()
    assert not [a for a in found if a["status"] == "committed"], found
    for answer in found:
        assert any(word in answer["reason"] for word in words), (words, found)
    return found


# -- descriptors and locked memory ----------------------------------------------------------------


def test_too_few_descriptors_are_named_at_the_start(tmp_path):
    """gRPC would end the process without a word."""
    command = [sys.executable, "-m", "p2pckpt.cli.main", "agent", "--directory", tmp_path / "ram"]
    done = subprocess.run(
        [*limited("-n 64"), *command], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 1
    assert "NoRoom: open files: an agent needs 256, the limit is 64; raise it" in done.stderr
    assert not (tmp_path / "ram").exists()


@contextlib.contextmanager
def no_more_files(pid):
    """Only 0, 1 and 2 are below the limit, which are taken; the hard limit stays as it is.

    Not the least number that is free just now: the next file that is closed frees a lesser one.
    """
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert {"0", "1", "2"} <= set(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_an_agent_that_may_lock_no_memory_and_open_no_more_files():
    """64 KiB may be locked, as in containers: TCP needs none of it (B072). In mid-life the agent
    gets no descriptor any more: whatever needs one fails in these words, and nothing else does."""
    with run_directory() as run, Limited(run, limited("-l 64")) as cluster:
        n0 = cluster.nodes[0]
        with Job(cluster, "files", cluster.nodes, 4) as job:
            job.launch()
            job.commit()
            print("open files:", len(os.listdir(f"/proc/{n0.agent.pid}/fd")))
            ends = []
            with no_more_files(n0.agent.pid):
                for _ in range(3):
                    job.save()
                    ends.append(job.ends())
            print(ends)
            assert not any(answer["status"] == "committed" for end in ends for answer in end)
            reasons = {answer["reason"] for end in ends for answer in end}
            assert any("needs one more open file, the limit is" in reason for reason in reasons)
            job.commit_soon()
            step = job.step
            assert job.launch() == step
        assert troubles(run) == []


# -- the tmpfs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    """Two nodes with 64 MB of /dev/shm each, the default of containers, and a budget above it."""
    if why := why_not():
        pytest.skip(why)
    with run_directory() as run, LanCluster(run, 2, 512, shm_bytes=64 * MIB) as cluster:
        yield cluster


def test_a_snapshot_that_does_not_fit_into_dev_shm(small):
    """B059: a rank of 100 MiB and a /dev/shm of 64: NoRoom with need and have, not SIGBUS."""
    with Job(small, "large", small.nodes, 100) as job:
        job.launch()
        for _ in range(2):
            aborted_by_name(job, "No space left on device; needs 111149056 bytes, /dev/shm/")
        assert job.committed() == []
    with Job(small, "little", small.nodes, 4) as job:
        job.launch()
        job.commit()
        job.commit()
        step = job.step
        assert job.launch() == step
    assert all(node.alive for node in small.nodes)


def held(node, job):
    """Bytes that a node holds of a job: an own copy and one shard, of 8 MiB each, for a version."""
    return node.status()["jobs"][f"{os.getuid()}.{job.name}"]["held_bytes"]


def test_another_process_fills_the_tmpfs_in_the_middle_of_a_save(small):
    box = small.lan["n0"]
    with Job(small, "filled", small.nodes, 8) as job:
        job.launch()
        job.train()
        for seat in job.seats:
            seat.tell("save", step=job.step)
        box.run("head -c 100M /dev/zero > /dev/shm/filler 2>/dev/null || true")
        assert "Use%" in box.run("df /dev/shm")
        job.hear()
        ends = [job.ends()]
        for _ in range(3):
            job.save()
            ends.append(job.ends())
        print(ends)
        short = [a for end in ends for a in end if a["status"] != "committed"]
        assert short
        assert all("No space left on device; needs" in a["reason"] for a in short)
        box.run("rm /dev/shm/filler")
        job.commit_soon()
        until(lambda: all(held(node, job) <= 2 * 9 * MIB for node in small.nodes))
        job.commit()  # what was aborted is freed: there is room for two versions, not three
        step = job.step
        assert job.launch() == step
    assert all(node.alive for node in small.nodes)


# -- the memory cgroup ----------------------------------------------------------------------------


@contextlib.contextmanager
def memory_group(limit_bytes):
    """A memory cgroup, of whichever version this machine has."""
    v1 = (CGROUP_V1 / "memory.limit_in_bytes").exists()
    group = (CGROUP_V1 if v1 else CGROUP_V2) / f"p2pckpt-limits-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(limit_bytes))
    except OSError as e:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no memory cgroup: {e}")
    try:
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def inside(group):
    return ["/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]


@pytest.mark.slow
def test_an_agent_is_killed_by_its_cgroup_and_comes_back():
    """B062: a budget above what the cgroup leaves. The agent warns at the start; the kernel kills
    it, no rank dies, and the next one, which may choose, chooses less and is not killed."""
    with (
        run_directory() as run,
        memory_group(500 * MIB) as group,
        Limited(run, inside(group), 1024) as cluster,
    ):
        n0 = cluster.nodes[0]
        (warning,) = n0.notes("WARNING")
        assert warning["free_bytes"] < 500 * MIB < warning["ram_budget_bytes"]
        with Job(cluster, "greedy", cluster.nodes, 150) as job:
            job.launch()
            for _ in range(6):
                job.save()
                job.ask("wait", step=job.step, timeout_s=3.0)
                if not n0.alive:
                    break
            assert n0.agent.wait(PATIENCE_S) == -signal.SIGKILL
            job.train()
            settings = run / "agent.toml"
            text = settings.read_text()
            settings.write_text(text.replace(f"ram_budget_bytes = {1024 * MIB}\n", ""))
            n0 = cluster.restart(n0)
            job.nodes = cluster.nodes
            assert str(group) in n0.notes("budget")[0]["why"]
            for _ in range(3):
                job.save()
                job.ends()
            assert n0.alive
        with Job(cluster, "modest", cluster.nodes, 8) as job:
            job.launch()
            job.commit()
            job.commit()
        assert n0.alive
