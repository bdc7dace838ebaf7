"""What is looked at in a soak, and when it counts as growing.

A sample is one reading of every quantity: memory, descriptors and threads of the processes that
live from the first save to the last (trainer of rank 0, its node's agent and mover), the bytes in
all RAM directories, keys and size of etcd. Two windows of samples are compared, the second and the
last; what is lower, or higher by at most 1 % or the slack of its unit, has not grown.

Where time goes fast, memory is judged by its slope too: a straight line through all samples but
those of the first fifth, in MB for each 100 saves. And etcd's database must not grow beyond its
quota, with nobody but itself to compact it.

Contract: reading changes nothing.
"""

import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

SHARE = 0.01
MOST_SLOPE = 0.1
"""Of resident memory, in MB for each 100 saves."""
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
    """Keys, and the size of the database, which has free pages too."""
    return {"etcd keys": len(cluster.keys()), "etcd MB": status_of(cluster)["dbSize"] / 1e6}


def status_of(cluster) -> dict:
    """What etcd says of itself."""
    (answer,) = json.loads(cluster.etcdctl("endpoint", "status", "--write-out=json"))
    return answer["Status"]


@dataclass(frozen=True)
class Verdict:
    """One quantity in the second and in the last window; or a figure (``last``) and its bound."""

    name: str
    second: float
    last: float
    most: float | None = None

    @property
    def passed(self) -> bool:
        """Has it not grown?"""
        if self.most is not None:
            return self.last <= self.most
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


def slopes(samples: dict[int, Sample]) -> list[Verdict]:
    """Of resident memory, in MB for each 100 saves; the first fifth of the samples warms up."""
    counted = {at: s for at, s in samples.items() if at > max(samples) / 5}
    names = [name for name in samples[max(samples)] if name.endswith("RSS MB")]
    found = []
    for name in names:
        line = statistics.linear_regression(list(counted), [s[name] for s in counted.values()])
        found.append(Verdict(f"{name} in 100 saves", 0.0, 100 * line.slope, MOST_SLOPE))
    return found


def largest(samples: dict[int, Sample], name: str, most: float) -> Verdict:
    """The largest value ever seen, and what it may be at most."""
    return Verdict(f"{name}, most", 0.0, max(s[name] for s in samples.values()), most)
