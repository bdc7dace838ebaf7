"""SIGTERM to real training processes: one agreed last step, and loops that end by themselves.

Three nodes with an agent each, an etcd, three ranks that train in step by gloo and save every few
steps. At a random moment of the loop SIGTERM goes to all ranks, up to 300 ms apart. Within a grace
of 10 s all have ended by themselves at one step, which is committed, though its trainers are gone,
or has ABORT for an outcome. The next launch restores the newest commit, bit for bit.
"""

import contextlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from kill_rig import HERE, ROOT, Cluster, until

GRACE_S = 10.0
SKEW_S = 0.3
RANKS = 3


class Trainers(Cluster):
    """A cluster whose ranks train by themselves."""

    def _hatch(self):
        env = {k: v for k, v in os.environ.items() if not k.startswith("P2PCKPT_")}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (self.run / "ranks.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-W", "error", str(HERE / "preempt_rank.py")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env,
            )  # fmt: skip

    def close(self):
        super().close()
        self._nursery.stdout.close()

    def train(self, job, place, every=4, pace_s=0.03):
        """One launch: (pidfd, result file) of each rank."""
        token, out = uuid.uuid4().hex, []
        for rank, node in enumerate(self.nodes):
            order = {
                "rank": rank, "size": len(self.nodes), "token": token, "job": job,
                "agent": str(node.socket), "every": every, "pace_s": pace_s, "values": 1 << 18,
                "meet": str(place / f"{token}.meet"), "result": str(place / f"{token}.{rank}.json"),
            }  # fmt: skip
            self._nursery.stdin.write(json.dumps(order).encode() + b"\n")
            self._nursery.stdin.flush()
            pid = int(self._nursery.stdout.readline())
            out.append((os.pidfd_open(pid), Path(order["result"])))
        return out

    def outcomes(self, job):
        """Verdict by step of what the ledger still tells."""
        prefix = f"p2pckpt/jobs/{os.getuid()}.{job}/state/outcome/"
        lines = self.etcdctl("get", prefix, "--prefix", "--print-value-only").splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return {o["attempt"]["step"]: o["verdict"] for o in found}


@pytest.fixture(scope="module")
def cluster():
    place = Path(tempfile.mkdtemp(prefix="preempt-"))
    try:
        with Trainers(place, RANKS, budget_mib=64) as cluster:
            yield cluster
    finally:
        shutil.rmtree(place)


def gone(pidfd, within_s):
    return bool(select.select([pidfd], [], [], max(0.0, within_s))[0])


def ended(cluster, ranks, chance):
    """SIGTERM to all, skewed; seconds until all were gone by themselves, and what they told."""
    begun = time.monotonic()
    for at, (pidfd, _) in sorted((chance.uniform(0, SKEW_S), rank) for rank in ranks):
        time.sleep(max(0.0, begun + at - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):  # it ended by another rank's notice
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    stuck = [r.name for pidfd, r in ranks if not gone(pidfd, begun + GRACE_S - time.monotonic())]
    seconds = time.monotonic() - begun
    for pidfd, _ in ranks:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert gone(pidfd, GRACE_S)
        os.close(pidfd)
    assert not stuck, (stuck, cluster.story())
    return seconds, [json.loads(result.read_text()) for _, result in ranks]


def interrupt(cluster, job, place, chance, newest):
    """A launch, a notice at a random moment, an end; (last step, is it committed, seconds)."""
    ranks = cluster.train(job, place)
    for _, result in ranks:
        until(result.with_suffix(".began").exists, cluster.story)
    time.sleep(chance.uniform(0.0, 1.0))
    seconds, told = ended(cluster, ranks, chance)
    assert all("ended" in t for t in told), (told, cluster.story())
    assert {(t["begin"], t["right"]) for t in told} == {(newest, True)}, told
    (last,) = {t["ended"] for t in told}
    assert {max(map(int, t["saves"])) for t in told} == {last}, told

    def settled():
        return cluster.outcomes(job).get(last)

    verdict = until(settled, cluster.story)
    if verdict != "commit":
        print(f"\n  step {last}: {verdict}: {[t['saves'][str(last)] for t in told]}")
    return last, verdict == "commit", seconds


@pytest.mark.parametrize("moments", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_sigterm_at_random_moments_of_the_loop(cluster, moments, tmp_path, capsys):
    """B056."""
    seed = random.randrange(10**6)
    chance, newest, committed, longest_s = random.Random(seed), 0, 0, 0.0
    for _ in range(moments):
        last, good, seconds = interrupt(cluster, f"pre-{moments}", tmp_path, chance, newest)
        committed, longest_s = committed + good, max(longest_s, seconds)
        key = f"pre-{moments}"
        newest = last if good else max(s for s, v in cluster.outcomes(key).items() if v == "commit")
    with capsys.disabled():
        print(
            f"\n  seed {seed}: {moments} of {moments} ended by themselves at one step, "
            f"{committed} committed it; longest {longest_s:.1f} s of {GRACE_S:g}"
        )
    assert committed * 10 >= moments * 8


def ask(cluster, *words):
    """A command's document."""
    done = subprocess.run(
        [sys.executable, "-m", "p2pckpt.cli.main", *words, "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert document["ok"], (document, cluster.story())
    return document


def test_the_commands_agree_on_a_step_also_through_an_agent_that_restarted(cluster, tmp_path):
    """`save-now` has one step more saved, `preempt` ends the job, without any signal. In between an
    agent is killed and started again: its rank takes its seat there though it has nothing to save.
    """
    ranks = cluster.train("asked", tmp_path, every=100_000)
    for _, result in ranks:
        until(result.with_suffix(".began").exists, cluster.story)
    node = cluster.nodes[1]
    agent = ("--agent", str(node.socket))
    (extra,) = ask(cluster, "save-now", "--job", "asked", *agent)["steps"].values()
    until(lambda: cluster.outcomes("asked").get(extra) == "commit", cluster.story)
    node.agent.kill()
    node.agent.wait(GRACE_S)
    cluster.restart(node)

    def schedule():
        (job,) = ask(cluster, "status", "--job", "asked", *agent)["jobs"].values()
        return job["schedule"]

    found = until(lambda: (s := schedule()) and s["step_s"] and s, cluster.story)
    assert (found["every"], found["extra"], found["last"]) == (100_000, extra, None)
    reply = ask(cluster, "preempt", "--node", "--reason", "spot", *agent)
    (last,) = reply["steps"].values()
    assert all(gone(pidfd, GRACE_S) for pidfd, _ in ranks), cluster.story()
    told = [json.loads(result.read_text()) for _, result in ranks]
    assert [t.get("ended") for t in told] == [last] * RANKS, told
    assert [sorted(map(int, t["saves"])) for t in told] == [[extra, last]] * RANKS
    until(lambda: cluster.outcomes("asked").get(last) == "commit", cluster.story)
    assert max(t["ask_us"] for t in told) < 2000
    print(f"should_save takes {min(t['ask_us'] for t in told):.0f} us")
    for pidfd, _ in ranks:
        os.close(pidfd)
