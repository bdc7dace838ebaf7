"""What must hold, judged from outside: the checkers of the simulated world.

They know what every rank's snapshot of every step must be (`content`), look straight into the
nodes' memory and the ledger's history, and use none of the product's deciders: they code and
compare bytes themselves. An objection is an AssertionError whose text says what was seen.

The rules, numbered as in PROTOCOL.md, "What must hold": (1) a commit has its bytes, at the moment
it is written and at the quiet end; (2) what is restored is one committed step for all ranks of a
launch, and bit-exact; (3) no commit goes back within a lineage, none is written by an older
generation; (5) a WHOLE file is given up only when its attempt is aborted, retired or fenced off;
(8) a restore never says "nothing" where something was committed.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np

from p2pckpt import records as r
from p2pckpt.backends.inproc.cluster import FakeCluster
from p2pckpt.backends.inproc.ram import Store
from p2pckpt.coding.reed_solomon import Code
from p2pckpt.errors import FormatError
from p2pckpt.wire import unpack

CHUNK_BYTES = 1024
LOSSES = ("crash_lose", "rack_lost", "flip_memory", "flip_record")
"""Faults that take bytes: after one of them, since a commit, every step must be restorable."""


@lru_cache(maxsize=4096)
def content(rank: int, step: int) -> bytes:
    """The snapshot of a rank at a step: some kilobytes, of a length that fits no chunk."""
    rng = Random(f"content {rank} {step}")
    return rng.randbytes(9000 + 37 * rank + step % 13)


@lru_cache(maxsize=4096)
def shards(rank: int, step: int, layout: r.Layout) -> tuple[bytes, ...]:
    """What each stored shard of that snapshot must be, worked out from the format's definition."""
    image, k = content(rank, step), layout.k
    size = -(-len(image) // k)
    size = -(-size // CHUNK_BYTES) * CHUNK_BYTES
    padded = np.frombuffer(image.ljust(k * size, b"\0"), np.uint8).reshape(k, size)
    parity = [np.zeros(size, np.uint8) for _ in range(layout.m)]
    Code(k, layout.m).encode(list(padded), parity)
    data = [image[i * size : (i + 1) * size] for i in range(k)]
    return (*data, *(p.tobytes() for p in parity))


class Checkers:
    """Memory of what was committed and restored, and the rules."""

    def __init__(self, cluster: FakeCluster, job: str) -> None:
        self.cluster = cluster
        self.keys = r.JobKeys(job)
        self.restored_steps: dict[str, dict[int, int]] = {}
        self.objections: list[str] = []
        self._seen = 0
        self._commits: list[r.Commit] = []
        self._generation = 0
        self._ended: dict[str, str] = {}
        self._whole: dict[tuple[str, str], r.Attempt] = {}
        self._losses = 0
        cluster.log.listeners.append(self._on_event)

    # -- from the event log ----------------------------------------------------------------------

    def _on_event(self, who: str, what: str, facts: dict[str, Any]) -> None:
        """Follow every write of the ledger and every record beside a file."""
        if what == "ledger.write":
            self._read_ledger()
        elif what == "fault.ram.wipe":
            self._whole = {key: a for key, a in self._whole.items() if key[0] != who}
        elif what == "fault" and facts["what"] in LOSSES:
            self._losses += 1
        elif what == "ram.record":
            self._on_record(who, facts)
        elif what == "ram.remove":
            self._give_up(who, facts["name"], "removed")

    def _on_record(self, node: str, facts: dict[str, Any]) -> None:
        record = unpack(self.cluster.nodes[node].store.records[facts["file"]], r.FileRecord)
        if record.state is r.FileState.WHOLE:
            self._whole[node, facts["file"]] = record.attempt
        elif self._whole.get((node, facts["file"])) != record.attempt:
            self._give_up(node, facts["file"], f"taken for {record.attempt.key}")

    def _give_up(self, node: str, file: str, how: str) -> None:
        """Rule 5."""
        attempt = self._whole.pop((node, file), None)
        if attempt is None or attempt.key in self._ended:
            return
        committed = any(c.attempt == attempt for c in self._commits)
        if committed or attempt.generation >= self._generation:
            self._object(f"{node}: {file} of open or committed {attempt.key} was {how}")

    def _read_ledger(self) -> None:
        """Rules 1 and 3, at the moment of the write."""
        for change in self.cluster.etcd.changes(self.keys.state, self._seen + 1):
            self._seen = max(self._seen, change.revision)
            if change.value is None:
                continue
            try:
                self._on_state(change.key, change.value)
            except FormatError:
                continue  # a record that was damaged on purpose

    def _on_state(self, key: str, value: bytes) -> None:
        if key == self.keys.generation:
            self._generation = unpack(value, r.Generation).number
        elif key.startswith(self.keys.retirements):
            self._ended[unpack(value, r.Retired).attempt.key] = "retired"
        elif key.startswith(self.keys.outcomes):
            outcome = unpack(value, r.Outcome)
            if outcome.verdict is r.Verdict.ABORT:
                self._ended[outcome.attempt.key] = "aborted"
        elif key.startswith(self.keys.commits):
            self._on_commit(unpack(value, r.Commit))

    def _on_commit(self, commit: r.Commit) -> None:
        attempt = commit.attempt
        if any(c.attempt == attempt for c in self._commits):
            return  # written again by a rebuild
        if attempt.generation != self._generation:
            self._object(f"{attempt.key} committed in generation {self._generation}")
        before = [c.attempt.step for c in self._commits if c.lineage == commit.lineage]
        if before and attempt.step <= max(before):
            self._object(f"step {attempt.step} committed after {max(before)} of its lineage")
        self._commits.append(commit)
        self._losses = 0
        if lost := self.lost_ranks(commit):
            self._object(f"step {attempt.step} committed without the bytes of ranks {lost}")

    def _object(self, what: str) -> None:
        self.objections.append(f"at {asyncio.get_running_loop().time():.3f} s: {what}")

    # -- looking into memory ---------------------------------------------------------------------

    def lost_ranks(self, commit: r.Commit, without: Iterable[str] = ()) -> list[int]:
        """Ranks whose right bytes cannot be had from the stores, leaving out some nodes."""
        nodes = self.cluster.nodes
        stores = [nodes[name].store for name in nodes if name not in set(without)]
        return [r_ for r_ in range(commit.world_size) if not self._restorable(commit, r_, stores)]

    def _restorable(self, commit: r.Commit, rank: int, stores: list[Store]) -> bool:
        wanted = content(rank, commit.attempt.step)
        pieces = shards(rank, commit.attempt.step, commit.layout)
        found: set[int] = set()
        for store in stores:
            for record, image in _whole_files(store, commit.attempt):
                if record.kind is r.FileKind.SLOT and record.part == rank:
                    if image[: len(wanted)] == wanted:
                        return True
                elif record.kind is r.FileKind.SHARD and pieces[record.part] in image:
                    found.add(record.part)
        return len(found) >= commit.layout.k

    # -- what the trainers saw -------------------------------------------------------------------

    def commits_seen(self) -> int:
        """How many commits there were in all."""
        return len(self._commits)

    def restored(self, launch: str, rank: int, step: int, image: bytes) -> None:
        """Rule 2: a rank has its bytes back."""
        wanted = content(rank, step)
        assert image == wanted, (
            f"rank {rank} restored step {step}: {hashlib.sha256(image).hexdigest()[:12]}, "
            f"saved {hashlib.sha256(wanted).hexdigest()[:12]}"
        )
        steps = self.restored_steps.setdefault(launch, {})
        steps[rank] = step
        assert len(set(steps.values())) == 1, f"{launch} restored different steps: {steps}"
        assert any(c.attempt.step == step for c in self._commits), f"step {step} was not committed"

    def restored_nothing(self) -> None:
        """Rule 8: a restore found, so it says, provably nothing."""
        assert not self._commits, f"restore said 'nothing' after {len(self._commits)} commits"

    def refused_for_good(self) -> None:
        """Rule 1, the other way round: a restore that refuses does so only when bytes are gone, and
        one loss since the newest commit was not enough to take them."""
        assert self._commits, "restore refused, and nothing was ever committed"
        commit = self._commits[-1]
        lost = self.lost_ranks(commit)
        assert lost, f"restore refused step {commit.attempt.step}, and all its bytes are there"
        assert self._losses > 1, f"one loss took step {commit.attempt.step}: ranks {lost}"

    def at_end(self) -> None:
        """After a quiet end: nothing objected, and the newest commit has its bytes."""
        assert not self.objections, "; ".join(self.objections[:5])
        if self._commits and self._losses < 2:
            lost = self.lost_ranks(self._commits[-1])
            step = self._commits[-1].attempt.step
            assert not lost, f"step {step}, the newest: bytes of ranks {lost} are gone"


def _whole_files(store: Store, attempt: r.Attempt) -> Iterator[tuple[r.FileRecord, bytes]]:
    """Files of an attempt with a valid WHOLE record, and their bytes."""
    for file, packed in store.records.items():
        try:
            record = unpack(packed, r.FileRecord)
        except FormatError:
            continue
        if record.state is r.FileState.WHOLE and record.attempt == attempt:
            yield record, bytes(store.files[file][: record.length])
