"""What is looked at in a soak, and when it counts as growing.

A sample is one reading of every quantity: memory, descriptors and threads of the processes that
live from the first save to the last (trainer of rank 0, its node's agent and mover), the bytes in
all RAM directories, keys and size of etcd. Two windows of samples are compared, the second and the
last; what is lower, or higher by at most 1 % or the slack of its unit, has not grown.

Contract: reading changes nothing but etcd's history, which is compacted to its last KEPT_REVISIONS
as a user's etcd does by itself; so its size is that of what is live.
"""

import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

KEPT_REVISIONS = 1000
SHARE = 0.01
SLACK = {"MB": 1.0, "": 2}
"""Growth that is none, by unit: 1 MB, or two descriptors, threads, files, keys."""

Sample = dict[str, float]


def unit(name: str) -> str:
    """Of a quantity, as its name ends."""
    return "MB" if name.endswith("MB") else ""


def process(pid: int, name: str) -> Sample:
    """Memory of its own, memory that it maps from RAM files (which may be deleted), descriptors and
    threads of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    status = dict(line.split(":", 1) for line in text.splitlines())
    return {
        f"{name} RSS MB": sum(int(status[k].split()[0]) for k in ("RssAnon", "RssFile")) / 1000,
        f"{name} mapped MB": int(status["RssShmem"].split()[0]) / 1000,
        f"{name} descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        f"{name} threads": int(status["Threads"]),
    }


def sample(cluster, trainer: int, node) -> Sample:
    """All quantities now."""
    found = process(trainer, "trainer")
    found |= process(node.agent.pid, "agent")
    found |= process(cluster.mover(node), "mover")
    _, held, files = cluster.ram_bytes()
    found |= {"tmpfs MB": held / 1e6, "tmpfs files": files}
    return found | ledger(cluster)


def ledger(cluster) -> Sample:
    """Keys, and the size of what is live."""
    revision = status_of(cluster)["header"]["revision"]
    if revision > KEPT_REVISIONS:
        cluster.etcdctl("compaction", "--physical", str(revision - KEPT_REVISIONS))
    status = status_of(cluster)
    keys = len(cluster.keys())
    return {"etcd keys": keys, "etcd in use MB": status["dbSizeInUse"] / 1e6}


def status_of(cluster) -> dict:
    """What etcd says of itself."""
    (answer,) = json.loads(cluster.etcdctl("endpoint", "status", "--write-out=json"))
    return answer["Status"]


@dataclass(frozen=True)
class Verdict:
    """One quantity in the second and in the last window."""

    name: str
    second: float
    last: float

    @property
    def passed(self) -> bool:
        """Has it not grown?"""
        return self.last - self.second <= max(SHARE * self.second, SLACK[unit(self.name)])


def judge(samples: dict[int, Sample], saves: int) -> list[Verdict]:
    """Medians of the second and of the last 100 saves (a third of the saves, if those are few)."""
    window = min(100, saves // 3)
    second = [s for at, s in samples.items() if window < at <= 2 * window]
    last = [s for at, s in samples.items() if saves - window < at]
    return [
        Verdict(
            name,
            statistics.median(s[name] for s in second),
            statistics.median(s[name] for s in last),
        )
        for name in last[0]
    ]
