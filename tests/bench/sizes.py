"""What `scale` says: how long agreeing takes at each number of agents, and what it asks of etcd.

A checkpoint counts from the last receipt to the last agent that knows its outcome. Requests that go
by the clock are not its own: they are a rate.

Contract: pure. `broken` names every bound that does not hold.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST_REQUESTS, MOST_BYTES, MOST_OPERATIONS = 2, 64 * 1024, 128
MOST_S, MOST_GROWTH = 3.0, 10.0


@dataclass
class Checkpoint:
    """One checkpoint: seconds of each part, and requests of each node but those by the clock."""

    seal_s: float
    decide_s: float
    notify_s: float
    cpu_share: float
    requests: list[int]

    @property
    def total_s(self) -> float:
        """From the last receipt to the last agent that knows."""
        return self.seal_s + self.decide_s + self.notify_s


@dataclass
class Size:
    """All checkpoints of one number of agents."""

    agents: int
    checkpoints: list[Checkpoint]
    largest: dict[str, int]
    by_clock_per_s: float
    start_s: float

    def median(self, part: str) -> float:
        """Of one part of all checkpoints."""
        return statistics.median(float(getattr(c, part)) for c in self.checkpoints)

    @property
    def mean_requests(self) -> float:
        """Of a node and checkpoint."""
        return statistics.mean(n for c in self.checkpoints for n in c.requests)

    @property
    def most_requests(self) -> int:
        """Of any node but that of rank 0, which decides for all."""
        return max(n for c in self.checkpoints for n in c.requests[1:])

    @property
    def deciders_requests(self) -> float:
        """Of the node of rank 0."""
        return statistics.median(c.requests[0] for c in self.checkpoints)

    def record(self) -> dict[str, Any]:
        """As it stands in the JSON."""
        parts = ("total_s", "seal_s", "decide_s", "notify_s", "cpu_share")
        return {
            "agents": self.agents,
            "checkpoints": len(self.checkpoints),
            **{part: round(self.median(part), 4) for part in parts},
            "worst_total_s": round(max(c.total_s for c in self.checkpoints), 4),
            "requests_mean": round(self.mean_requests, 3),
            "requests_most": self.most_requests,
            "requests_rank0": self.deciders_requests,
            "largest_request_bytes": self.largest["bytes"],
            "largest_txn_operations": self.largest["operations"],
            "by_clock_per_node_and_s": round(self.by_clock_per_s, 3),
            "start_s": round(self.start_s, 1),
        }


def table(sizes: list[Size]) -> str:
    """The figures as lines of text."""
    rows: list[tuple[str, Callable[[Size], str]]] = [
        ("from the last receipt to the last agent that knows, median", lambda s: _ms(s, "total_s")),
        ("  seal: shares handed in, group records written", lambda s: _ms(s, "seal_s")),
        ("  decide: who lives, the commit's transaction", lambda s: _ms(s, "decide_s")),
        ("  notify: by the watches of all agents", lambda s: _ms(s, "notify_s")),
        (
            "  share of that in which this process computes",
            lambda s: f"{s.median('cpu_share'):.2f}",
        ),
        ("etcd requests of a node and checkpoint, mean", lambda s: f"{s.mean_requests:.2f}"),
        ("  the most of any node but rank 0's", lambda s: f"{s.most_requests}"),
        ("  of rank 0's, which decides for all", lambda s: f"{s.deciders_requests:.0f}"),
        ("by the clock, of a node and second", lambda s: f"{s.by_clock_per_s:.2f}"),
        ("largest request, bytes", lambda s: f"{s.largest['bytes']}"),
        ("largest transaction, operations", lambda s: f"{s.largest['operations']}"),
    ]
    head = f"{'agents':60}" + "".join(f"{s.agents:>12}" for s in sizes)
    lines = [head, "-" * len(head)]
    lines += [f"{name:60}" + "".join(f"{of(s):>12}" for s in sizes) for name, of in rows]
    return "\n".join(lines)


def _ms(size: Size, part: str) -> str:
    return f"{1000 * size.median(part):.0f} ms"


def broken(sizes: list[Size]) -> list[str]:
    """Bounds that do not hold."""
    out = []
    for s in sizes:
        if s.mean_requests > MOST_REQUESTS:
            out.append(f"{s.agents} agents: {s.mean_requests:.2f} requests, at most 2")
        if s.most_requests > MOST_REQUESTS:
            out.append(f"{s.agents} agents: {s.most_requests} requests of one node, at most 2")
        if s.largest["bytes"] > MOST_BYTES:
            out.append(f"{s.agents} agents: a request of {s.largest['bytes']} bytes")
        if s.largest["operations"] > MOST_OPERATIONS:
            out.append(f"{s.agents} agents: {s.largest['operations']} operations at once")
        if s.median("total_s") > MOST_S:
            out.append(f"{s.agents} agents: {s.median('total_s'):.2f} s, at most {MOST_S} s")
    if len(sizes) == 2:
        growth = sizes[1].median("total_s") / sizes[0].median("total_s")
        if growth > MOST_GROWTH:
            out.append(f"{growth:.1f} times as long, at most {MOST_GROWTH:.0f}")
    return out
