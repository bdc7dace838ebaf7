"""Real training that repair slows, and that the governor spares: both use one slow link.

Two pairs of processes train by torch and gloo, on networks of namespaces (`namespaces.py`), at the
same time. The first of each pair has the hook, and beside it an agent with a large snapshot; n1 has
the copies of both. n1's agent is killed, and the copies go to n3, by the links that the gradients
need. The agent of n0 is told that its network is far faster than it is, so that it holds nothing
back; that of n2 is told what it is.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from kill_rig import HERE, ROOT, Seat, until
from namespaces import LanCluster, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "none"),
]

MBIT = 100
LINK_BYTES_S = MBIT * 10**6 // 8
BALLAST_BYTES = 112 << 20
GRADIENT_BYTES = 4 * (513 * 1024 + 1025 * 16 + 1)
FLOOR_BYTES_PER_S = 4 << 20
SETTLE_S, ALONE_S, BACKS_OFF_S, BESIDE_S, AFTER_S = 1.0, 6.0, 4.0, 8.0, 3.0
GOVERNED = "n2"


class Sharing(LanCluster):
    """Three nodes and ranks inside of their networks; n0 and n2 are in one rack, so neither holds
    anything for the other while n1, and later n3, is there."""

    def _hatch(self):
        env = {k: v for k, v in os.environ.items() if not k.startswith("P2PCKPT_")}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        with (self.run / "ranks.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-W", "error", str(HERE / "sharing_rank.py")],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=env,
            )  # fmt: skip

    def _agent_command(self, name, rack):
        nic = LINK_BYTES_S * (1 if name == GOVERNED else 1000)
        return [*super()._agent_command(name, rack), "--nic-bytes-s", str(nic)]

    def enter(self, name, **order):
        """A new rank in a node's network."""
        order |= {"box": self.lan[name].holder.pid, "socket": str(self.run / "ranks.sock")}
        self._nursery.stdin.write(json.dumps(order).encode() + b"\n")
        self._nursery.stdin.flush()
        return Seat(self._listener.accept()[0])


class Pair:
    """The two processes of one training, and what they and their node's agent have to say."""

    def __init__(self, cluster, node):
        self.cluster, self.node = cluster, node
        self.journal = cluster.run / f"{node.name}.steps"
        order = {"meet": str(cluster.run / f"{node.name}.meet"), "journal": str(self.journal)}
        order |= {"job": f"of-{node.name}", "agent": str(node.socket)}
        self.first = cluster.enter(node.name, rank=0, ballast_bytes=BALLAST_BYTES, **order)
        self.second = cluster.enter("n1", rank=1, ballast_bytes=4, **order)
        self.levels = []

    def hear(self, seat):
        told = seat.hear()
        assert "raised" not in told, (told, self.cluster.story())
        return told

    def median_s(self, begun, end):
        """Of the steps that ended in a time; and how many there were."""
        lines = [line.split() for line in self.journal.read_text().splitlines()]
        found = [float(took) for at, took in lines if begun < float(at) <= end]
        return statistics.median(found), len(found)

    def sent_bytes(self):
        """By the node, whatever for."""
        box = self.cluster.lan[self.node.name]
        return int(box.run("cat /sys/class/net/eth0/statistics/tx_bytes"))

    def repairs(self):
        return "repair" in self.node.status()["bandwidth"]["rates_bytes_s"]

    def repaired(self):
        return any(note["shards"] for note in self.node.notes("repaired"))

    def look(self):
        self.levels.append(self.node.status()["bandwidth"]["level"])

    def end(self):
        self.first.tell("end")
        assert self.hear(self.first)["steps"] == self.hear(self.second)["steps"] > 0

    def close(self):
        for seat in (self.first, self.second):
            seat.kill()
            seat.bury()


class Beside:
    """What repair did to a pair: how much longer its steps were, and bytes a second of repair."""

    def __init__(self, pair, alone, beside, sent):
        self.pair = pair
        self.alone_s, _ = pair.median_s(*alone)
        self.steps_s, count = pair.median_s(*beside)
        self.slower = self.steps_s / self.alone_s - 1
        self.bytes_s = (sent - count * GRADIENT_BYTES) / (beside[1] - beside[0])
        self.why = pair.node.status()["bandwidth"]["why"]

    def __str__(self):
        return (
            f"steps of {self.alone_s * 1e3:.0f} ms take {self.steps_s * 1e3:.0f} ms beside repair "
            f"at {self.bytes_s / 1e6:.1f} MB/s; lowest level {min(self.pair.levels)}; {self.why}"
        )


@pytest.fixture
def cluster():
    place = Path(tempfile.mkdtemp(prefix="spare-"))
    try:
        with Sharing(place, 3, 700, racks=2, floor_bytes_per_s=FLOOR_BYTES_PER_S) as cluster:
            yield cluster
    finally:
        shutil.rmtree(place)


def rest(seconds):
    """From now, and until so much later."""
    begun = time.monotonic()
    time.sleep(seconds)
    return begun, time.monotonic()


def watched(pairs, seconds):
    """The same, with a look at the governors now and then; bytes that each node sent meanwhile."""
    begun, before = time.monotonic(), [pair.sent_bytes() for pair in pairs]
    while time.monotonic() < begun + seconds:
        for pair in pairs:
            pair.look()
        time.sleep(0.5)
    after = [pair.sent_bytes() for pair in pairs]
    return (begun, time.monotonic()), [a - b for a, b in zip(after, before, strict=True)]


def test_repair_slows_real_training_and_the_governor_spares_it(cluster, capsys):
    """With nothing held back steps take half as long again at least; the governor takes more than
    half of that away, while repair gets on, and lets it go as soon as nobody trains."""
    n0, n1, n2 = cluster.nodes
    with ExitStack() as stack:
        pairs = [stack.enter_context(closing(Pair(cluster, node))) for node in (n0, n2)]
        for pair in pairs:
            assert pair.hear(pair.first)["saved"]
            stack.enter_context(cluster.lan.slow(pair.node.name, MBIT))
        cluster.start_node()
        cluster.await_ready()
        for pair in pairs:
            pair.first.tell("begin")
        until(lambda: all(pair.journal.exists() for pair in pairs), cluster.story)
        rest(SETTLE_S)
        alone = rest(ALONE_S)
        n1.agent.kill()
        until(lambda: all(pair.repairs() for pair in pairs), cluster.story)
        rest(BACKS_OFF_S)
        beside, sent = watched(pairs, BESIDE_S)
        assert not any(pair.repaired() for pair in pairs), "it took too little time to be judged"
        free, spared = (Beside(p, alone, beside, n) for p, n in zip(pairs, sent, strict=True))
        for pair in pairs:
            pair.end()
        (begun, end), (_, sent) = watched(pairs, AFTER_S)
        after_s = sent / (end - begun)
    with capsys.disabled():
        print(f"\n  nothing held back: {free}\n  governed: {spared}")
        print(f"  repair without training: {after_s / 1e6:.1f} MB/s")
    assert free.slower > 0.5
    assert spared.slower < free.slower / 2
    assert 0.8 * FLOOR_BYTES_PER_S / 8 < spared.bytes_s < 0.75 * free.bytes_s
    assert min(pairs[1].levels) <= 0.25
    assert "with transfers" in spared.why
    assert after_s > 1.5 * spared.bytes_s
