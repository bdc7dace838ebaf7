"""What trainers were told and given back, judged: rules 2, 4 and 8 of the simulated world.

Intuition. A trainer sees only answers: its generation, its bytes, lists of steps, outcomes. Each
is compared with what the ledger's history has, which the checkers follow, and with the bytes that
rank, step and launch determine.

Contract: (2) what is restored is one step of one launch for all ranks of a ballot, bit-exact; (4)
what is listed or told as committed is; (8) "nothing" is said only where nothing was committed, or
where no RAM, ledger or store has a trace of it any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import chain

from p2pckpt import records as r
from p2pckpt.backends.inproc.cluster import FakeCluster
from simulations.world.contents import content

Committed = tuple[str, str]
"""(ledger id, attempt key)."""


class Told:
    """Memory of what was told. ``saved``: every commit there ever was; ``object`` notes a wrong."""

    def __init__(
        self, cluster: FakeCluster, job: str, saved: set[Committed], object_: Callable[[str], None]
    ) -> None:
        self.cluster = cluster
        self.job = job
        self.saved = saved
        self.object = object_
        self.started: dict[tuple[str, int], tuple[str, int | None]] = {}
        """(launch, step that it asks for) by ledger id and generation."""
        self._restored: dict[str, tuple[int, str]] = {}

    def joined(self, ledger_id: str, generation: int, launch: str, asks: int | None) -> None:
        """A rank was told its generation; from then on it writes as this launch."""
        self.started.setdefault((ledger_id, generation), (launch, asks))

    def restored(self, which: str, rank: int, step: int, meta: str, image: bytes) -> None:
        """Rule 2: a rank has its bytes back. ``which``: launch and ballot."""
        said = json.loads(meta)
        writer = said["launch"]
        if said["step"] != step or image != content(rank, step, writer):
            self.object(f"{which}: rank {rank} has wrong bytes of step {step}, meta {meta}")
        first = self._restored.setdefault(which, (step, writer))
        if first != (step, writer):
            self.object(f"{which} restored {first} and {(step, writer)}: two steps or launches")
        ends = f"{step:020d}"
        if not any(key[1].endswith(ends) and self._writer(key) == writer for key in self.saved):
            self.object(f"{which}: step {step} of {writer} was restored, never committed")

    def _writer(self, key: Committed) -> str:
        return self.started.get((key[0], int(key[1].partition(".")[0])), ("", None))[0]

    def nothing(self, launch: str) -> None:
        """Rule 8: a restore found, so it says, provably nothing."""
        if self.saved and self._is_known():
            self.object(f"{launch}: restore said 'nothing' after {len(self.saved)} commits")

    def _is_known(self) -> bool:
        """Is a ledger id of a commit written anywhere, or an object of the job there? Else ledger
        and all memories were lost, and nobody can know of it."""
        ids = {ledger_id.encode() for ledger_id, _ in self.saved}
        stores = [node.store for node in self.cluster.nodes.values()]
        ram = (b for s in stores for b in (*s.records.values(), *s.documents.values()))
        written = chain(ram, (entry.value for entry in self.cluster.etcd.list("").entries))
        bucket = self.cluster.bucket.objects if self.cluster.bucket is not None else {}
        there = any(name.startswith(f"{self.job}/") for name in bucket)
        return there or any(one in text for text in written for one in ids)

    def listed(self, who: str, steps: Iterable[int], outcome: r.Outcome | None = None) -> None:
        """Rule 4: an agent lists committed steps, or tells a save's outcome."""
        committed = {int(key.rpartition(".")[2]) for _, key in self.saved}
        if wrong := sorted(set(steps) - committed):
            self.object(f"{who} lists steps {wrong} as committed, and they never were")
        if outcome is not None and outcome.verdict is r.Verdict.COMMIT:
            attempt = outcome.attempt
            if (attempt.ledger_id, attempt.key) not in self.saved:
                self.object(f"{who} says that {attempt.key} is committed, and it never was")
