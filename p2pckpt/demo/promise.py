"""What is promised of the newest committed step now, as those see it who are not struck.

The number of node losses comes from the status document of an agent. Where the shards lie comes
from what the agents with ranks noted when they sealed that step; what has been repaired since is
then unknown here and counts as missing.

Contract: asks agents that answer, each bounded; `now` is at most STANDING_S old. None: not known.
"""

from __future__ import annotations

import time
from collections.abc import Set
from typing import Any

from p2pckpt.demo.campaign import Standing, standing_of
from p2pckpt.demo.cluster import Machine
from p2pckpt.errors import CheckpointError

STANDING_S = 1.0
NOBODY: frozenset[str] = frozenset()


class Promise:
    """Of the one job of a machine, with a layout of ``k``."""

    def __init__(self, machine: Machine, k: int) -> None:
        self._machine, self._k = machine, k
        self._known: tuple[float, Standing | None] = (-STANDING_S, None)

    def now(self, busy: Set[str] = NOBODY) -> Standing | None:
        """What is promised. ``busy``: names of nodes and services that are struck."""
        if "etcd" in busy:  # agents would wait for it, and so would we
            return None
        if time.monotonic() - self._known[0] > STANDING_S:
            job, standing = self.job(busy), None
            if job is not None and job["redundancy"] is not None:
                sealed = self._sealed(job["redundancy"]["step"])
                standing = standing_of(job, sealed, self._k)
            self._known = (time.monotonic(), standing)
        return self._known[1]

    def job(self, busy: Set[str] = NOBODY) -> dict[str, Any] | None:
        """The job by the status document of a node that is not struck."""
        for node in dict.fromkeys((*self._machine.seats, *self._machine.nodes)):
            if node.name in busy or node.ready_at is None or not node.alive:
                continue
            try:
                jobs: dict[str, dict[str, Any]] = node.status()["jobs"]
            except CheckpointError:
                continue
            if jobs:
                return next(iter(jobs.values()))
        return None

    def _sealed(self, step: int) -> dict[str, tuple[str | None, ...]]:
        """Where the shards of a step lie, if all nodes with ranks have told."""
        stores = {node.store_id: node.name for node in self._machine.nodes}
        out = {}
        for node in self._machine.seats:
            sealed = [e for e in node.notes("sealed") if e["attempt"].endswith(f".{step:020d}")]
            if not sealed:
                return {}
            out[node.name] = tuple(stores.get(holder) for holder in sealed[-1]["holders"])
        return out
