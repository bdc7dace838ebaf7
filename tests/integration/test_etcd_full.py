"""An etcd that takes nothing more: its space alarm is raised by what somebody else put there.

Two real agents, a job of two ranks. While the alarm stands no record can be written, so no save
commits, nothing is restored and nobody joins; each says why, in words that tell an operator what to
do. The bytes in RAM stay, training is held up no longer than a save may be, and when there is room
again everything goes on, without a restart of anything.
"""

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest
from kill_rig import PATIENCE_S, ROOT, Cluster, Job, until

from p2pckpt.backends.etcd import Etcd
from p2pckpt.backends.etcd_server import EtcdOptions, find_etcd
from tests.soak.watch import status_of

QUOTA_BYTES = 8 << 20
FULL = "database space exceeded"
OPERATOR = ("etcdctl compaction", "etcdctl defrag", "etcdctl alarm disarm")


@pytest.fixture(scope="module")
def cluster():
    place = Path(tempfile.mkdtemp(prefix="full-"))
    options = EtcdOptions(durable=False, flags=(f"--quota-backend-bytes={QUOTA_BYTES}",))
    try:
        with Cluster(place, nodes=2, budget_mib=256, etcd=options) as cluster:
            yield cluster
    finally:
        shutil.rmtree(place)


def put_foreign(cluster, name):
    """A megabyte of somebody else's; does etcd take it?"""
    tool = [find_etcd().with_name("etcdctl"), f"--endpoints={cluster.etcd.endpoints[0]}"]
    done = subprocess.run(
        [*tool, "put", f"foreign/{name}"],
        input="x" * (1 << 20), capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert done.returncode == 0 or FULL in done.stderr, done.stderr
    return done.returncode == 0


def make_room(cluster):
    """As the message says."""
    cluster.etcdctl("del", "--prefix", "foreign/")
    cluster.etcdctl("compaction", str(status_of(cluster)["header"]["revision"]))
    cluster.etcdctl("defrag", "--cluster")
    cluster.etcdctl("alarm", "disarm")


def requests(cluster):
    """Answered by etcd so far."""
    with urllib.request.urlopen(f"{cluster.etcd.endpoints[0]}/metrics", timeout=5) as page:
        lines = page.read().decode().splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith("grpc_server_handled_total"))


async def room(cluster):
    """What `doctor` asks for; and is a revision gone once it is compacted?"""
    async with Etcd(cluster.etcd.endpoints) as etcd:
        found = await etcd.room()
        revision = status_of(cluster)["header"]["revision"]
        assert not await etcd.ledger.forgot(revision)
        cluster.etcdctl("compaction", str(revision))
        assert await etcd.ledger.forgot(revision - 1)
        return found.alarms, found.forgets


def told(cluster, *arguments):
    """A command of ours, and what it exits with."""
    done = subprocess.run(
        [sys.executable, "-m", "p2pckpt.cli.main", *arguments, "--agent", cluster.nodes[0].socket],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_full_etcd_stops_saves_and_loses_nothing(cluster):
    """B087."""
    agents = [node.agent.pid for node in cluster.nodes]
    with Job(cluster, "full", cluster.nodes, 1) as job:
        job.launch()
        job.commit()
        kept, held = job.step, cluster.ram_bytes()[0]
        while put_foreign(cluster, f"{time.monotonic_ns()}"):
            pass
        assert "NOSPACE" in cluster.etcdctl("alarm", "list")

        waiting = {answer["status"] for answer in job.save()}
        assert waiting == {"in flight"}
        pending = job.step
        for answer in job.save():
            assert answer["status"] == "skipped", answer
            assert FULL in answer["reason"], answer
            assert all(command in answer["reason"] for command in OPERATOR), answer
        assert job.blocking_s < 3.5, job.blocking_s
        skipped = job.step

        facts = cluster.nodes[0].status()
        (shown,) = facts["jobs"].values()
        assert FULL in shown["ledger_trouble"]
        assert not facts["cut_off"]
        assert shown["redundancy"]["step"] == kept
        code, text = told(cluster, "status", "--job", "full")
        assert (code, FULL in text) == (4, True), text
        assert cluster.ram_bytes()[0] >= held
        alarms, forgets = asyncio.run(room(cluster))
        assert (alarms, forgets) == (("NOSPACE",), True)

        before, begun = requests(cluster), time.monotonic()
        for seat in job.seats:
            seat.tell("restore", timeout_s=3.0)
        for seat in job.seats:
            raised = seat.hear()["raised"]
            assert "SourcesAway" in raised, raised
        rate = (requests(cluster) - before) / (time.monotonic() - begun)
        assert rate < 60, f"{rate:.0f} requests a second to a full etcd"
        code, text = told(cluster, "verify", str(kept), "--job", "full", "--json")
        assert code != 0, text
        assert FULL in json.dumps(text), text

        make_room(cluster)
        assert {a["status"] for a in job.ends(pending)} == {"committed"}
        assert {a["status"] for a in job.ends(skipped)} <= {"aborted", "skipped"}
        job.commit()
        assert job.committed() == [job.step]
        until(lambda: not cluster.nodes[0].status()["jobs"][shown_name(cluster)]["ledger_trouble"])
        last = job.step
        assert job.launch() == last  # and what is restored is what was saved
    assert [node.agent.pid for node in cluster.nodes] == agents
    assert all(node.alive for node in cluster.nodes)


def shown_name(cluster):
    """Of the only job."""
    (name,) = cluster.nodes[0].status()["jobs"]
    return name
