"""What must hold, judged from outside: the checkers of the simulated world.

They know what every rank's snapshot of every step must be (`content`), look straight into the
nodes' memory and the ledger's history, and use none of the product's deciders. An objection is an
AssertionError whose text says what was seen.

The rules, numbered as in PROTOCOL.md, "What must hold": (1) a commit has its bytes; (2) what is
restored is one step for all ranks of a launch, and bit-exact; (3) no commit goes back within a
lineage; (8) a restore never says "nothing" where something was committed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from random import Random

from p2pckpt import records as r
from p2pckpt.backends.inproc.cluster import FakeCluster
from p2pckpt.wire import unpack


def content(rank: int, step: int) -> bytes:
    """The snapshot of a rank at a step: some kilobytes, of a length that fits no chunk."""
    rng = Random(f"content {rank} {step}")
    return rng.randbytes(9000 + 37 * rank + step % 13)


class Checkers:
    """Memory of what was committed and restored, and the rules."""

    def __init__(self, cluster: FakeCluster, job: str) -> None:
        self.cluster = cluster
        self.keys = r.JobKeys(job)
        self.restored_steps: dict[str, dict[int, int]] = {}
        self._seen = 0
        self._commits: list[r.Commit] = []

    def commits_seen(self) -> int:
        """How many commits there were in all."""
        self._read_history()
        return len(self._commits)

    def restored(self, launch: str, rank: int, step: int, image: bytes) -> None:
        """A rank has its bytes back."""
        wanted = content(rank, step)
        assert image == wanted, (
            f"rank {rank} restored step {step}: {hashlib.sha256(image).hexdigest()[:12]}, "
            f"saved {hashlib.sha256(wanted).hexdigest()[:12]}"
        )
        steps = self.restored_steps.setdefault(launch, {})
        steps[rank] = step
        assert len(set(steps.values())) == 1, f"{launch} restored different steps: {steps}"
        self._read_history()
        assert any(c.attempt.step == step for c in self._commits), f"step {step} was not committed"

    def restored_nothing(self) -> None:
        """A restore found, so it says, provably nothing."""
        self._read_history()
        assert not self._commits, f"restore said 'nothing' after {len(self._commits)} commits"

    def at_end(self) -> None:
        """After the run: order of commits within lineages."""
        self._read_history()
        newest: dict[str, int] = {}
        for commit in self._commits:
            before = newest.get(commit.lineage, -1)
            assert commit.attempt.step > before, (
                f"lineage {commit.lineage[:8]}: step {commit.attempt.step} after {before}"
            )
            newest[commit.lineage] = commit.attempt.step

    def _read_history(self) -> None:
        for commit in self._new_commits():
            self._commits.append(commit)

    def _new_commits(self) -> Iterator[r.Commit]:
        """Commits written to the ledger since the last look, in order."""
        for change in self.cluster.etcd.changes(self.keys.commits, self._seen + 1):
            self._seen = max(self._seen, change.revision)
            if change.value is not None:
                yield unpack(change.value, r.Commit)
