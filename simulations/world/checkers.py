"""What must hold, judged from outside: the checkers of the simulated world.

They know what every rank's snapshot of every step must be (`contents`), look straight into the
nodes' memory and the ledger's history, and use none of the product's deciders: they code and
compare bytes themselves. An objection is a sentence that says what was seen, and when.

The rules, numbered as in PROTOCOL.md, "What must hold": (1) a commit has its bytes when it is
written, and stays restorable while no more nodes were hit than it could lose when it last had most
redundancy, judged at every event that takes bytes; (2) what is restored is one step of one launch
for all ranks, bit-exact, and the newest of the present lineage unless that cannot be had; (3) no
commit goes back within a lineage, none is written by an older generation; (4) what is told as
committed is; (5) a WHOLE file is given up only when its attempt is aborted, retired or fenced off,
by a generation of any ledger that had it, as a later one of the job counts them anew;
(8) a restore never says "nothing" where something was committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from p2pckpt import records as r
from p2pckpt.backends.inproc.cluster import FakeCluster
from p2pckpt.backends.inproc.net import true_time
from p2pckpt.errors import FormatError
from p2pckpt.wire import unpack
from simulations.world.contents import (
    CHUNK_BYTES,
    Found,
    Kept,
    Shelf,
    Snapshots,
    content,
    find,
    gains,
    lost_ranks,
    unknown_losses,
    whole_files,
)
from simulations.world.lives import NOTES, Life, Lives
from simulations.world.promises import Promises
from simulations.world.told import Told

__all__ = ["CHUNK_BYTES", "Checkers", "Kept", "content"]

LEASE_S = 12.0
"""A store that is gone counts as living until its lease ends: a commit may rest on it so long."""


class Checkers:
    """Memory of what was committed and restored, and the rules, for one job."""

    def __init__(self, cluster: FakeCluster, job: str, spread: bool = True) -> None:
        self.cluster = cluster
        self.keys = r.JobKeys(job)
        self.spread = spread
        self.objections: list[str] = []
        self.lives = Lives()
        self.kept: dict[str, Kept] = {}
        """Commits that stand, by attempt key."""
        self.tip: Kept | None = None
        """Where training stands: the newest commit or restored step, whichever came last."""
        self.calm = False
        """No fault works, or has just worked: whoever is asked can be expected to answer."""
        self.living: list[str] = []
        """Nodes that are there; the world's own list."""
        self.commits = 0
        self.rebuilt_as = ""
        """Generation of the last rebuild: nobody knows of older attempts if they committed."""
        self.offloaded: dict[str, r.Offloaded] = {}
        self.saved: set[tuple[str, str]] = set()
        """(ledger id, attempt key) of every commit there ever was."""
        self.told = Told(cluster, self.keys.job, self.saved, self.object)
        self.promises = Promises(cluster, self.keys, self.object)
        self._shelf = Shelf()
        self._damaged: dict[tuple[str, str], r.FileRecord | None] = {}  # files, and what they were
        self._hits: list[tuple[float, str]] = []
        self._shares: dict[r.Attempt, dict[int, tuple[r.SealedShare, ...]]] = {}
        self._steps: dict[str, int] = {}
        self._ended: set[str] = set()
        self._cleaned: set[str] = set()
        self._seen = 0
        self._ledger_id = ""
        self._generation = 0
        self._began: dict[str, int] = {}
        self._keep_last = 1
        cluster.log.listeners.append(self._on_event)

    # -- from the event log ----------------------------------------------------------------------

    def _on_event(self, who: str, what: str, facts: dict[str, Any]) -> None:
        """Follow every write of the ledger, every record beside a file, every loss."""
        self.promises.saw(who, what, facts, self.offloaded.values())
        if what == "ledger.write":
            self._read_ledger()
        elif what == "ram.record":
            self._on_record(who, facts["file"])
        elif what == "ram.remove":
            self._give_up(who, facts["name"], "removed")
            self._shelf.take(who, facts["name"])
        elif what == "fault.ram.wipe":
            self._shelf.wipe(who, true_time())
            self._on_hit(who, None)
        elif what in ("fault.ram.flip", "fault.ram.flip_record"):
            self._on_damage(who, facts["file"], what)
        elif what == "fault.net.late_write":
            self._on_damage(facts["to"].rpartition("/")[0], facts["file"], what)
        elif what in ("fault.ledger.wipe", "fault.ledger.rollback"):
            self._seen = self.cluster.etcd.revision
        elif what in NOTES and facts["job"] == self.keys.job:
            self._on_note(facts["attempt"], NOTES[what])

    def _on_note(self, key: str, life: Life) -> None:
        for attempt in [a for a in self.lives.now if a.key == key][-1:]:
            self._saw(attempt, life)

    def _saw(self, attempt: r.Attempt, life: Life) -> None:
        if wrong := self.lives.saw(attempt, life):
            self.object(f"step {attempt.step}, attempt {attempt.key} {wrong}")

    def _on_record(self, node: str, file: str) -> None:
        store = self.cluster.nodes[node].store
        record = unpack(store.records[file], r.FileRecord)
        attempt, whole = record.attempt, record.state is r.FileState.WHOLE
        known = self._shelf.record(node, file)
        if known is not None and known.state is r.FileState.WHOLE and known.attempt != attempt:
            self._give_up(node, file, f"taken for {attempt.key}")
        self._damaged.pop((node, file), None)
        self._shelf.put(node, file, record, store.files[file])
        if not whole:
            self.promises.taken(node, file, attempt)
        if attempt.job != self.keys.job:
            return
        if record.kind is r.FileKind.SLOT and not whole:
            self._saw(attempt, Life.OPEN)
        elif record.kind is r.FileKind.SHARD and whole:
            self._saw(attempt, Life.SENT)
        kept = self._kept(attempt)
        if whole and kept is not None:  # a repair, or what a restore brought
            found = gains(kept, record, self._shelf)
            if found is not None and found.full and record.kind is r.FileKind.SHARD:
                self._check_place(attempt.step, found, node)

    def _give_up(self, node: str, file: str, how: str) -> None:
        """Rule 5."""
        record = self._shelf.record(node, file)
        if record is None or record.state is not r.FileState.WHOLE:
            return
        attempt = record.attempt
        over = attempt.key in self._ended or attempt.ledger_id in self._cleaned
        if attempt.job != self.keys.job or over:
            return
        newest = max(self._generation, self._began.get(attempt.ledger_id, 0))
        if (kept := self._kept(attempt)) is not None and kept.undone and node not in kept.members:
            kept.hit[node] = None
        elif self._kept(attempt) is not None or attempt.generation >= newest:
            self.object(f"{node}: {file} of open or committed {attempt.key} was {how}")

    def _on_damage(self, node: str, file: str, what: str) -> None:
        record = self._damaged[node, file] = self._shelf.record(node, file)
        if what == "fault.ram.flip_record":
            self._shelf.take(node, file)
        self._on_hit(node, record.attempt if record is not None else None)

    def _on_hit(self, node: str, attempt: r.Attempt | None) -> None:
        """Rule 1, at every loss: of one attempt's bytes, or of all that a node has."""
        self._hits.append((true_time(), node))
        for kept in self.kept.values():
            if attempt in (None, kept.commit.attempt):
                kept.hit[node] = None
                self._check(kept)

    def _check(self, kept: Kept) -> None:
        lost = self.lost_ranks(kept)
        if lost and not kept.gone and len(kept.hit) <= kept.survives:
            self.object(
                f"step {kept.commit.attempt.step}: ranks {lost} are gone after {list(kept.hit)} "
                f"were hit; it could lose any {kept.survives} nodes"
            )
        kept.gone = bool(lost)

    # -- the ledger ------------------------------------------------------------------------------

    def _read_ledger(self) -> None:
        for change in self.cluster.etcd.changes(self.keys.root, self._seen + 1):
            self._seen = max(self._seen, change.revision)
            if change.value is not None:
                try:
                    self._on_write(change.key, change.value)
                except FormatError:
                    continue  # a record that was damaged on purpose

    def _on_write(self, key: str, value: bytes) -> None:
        keys = self.keys
        self.promises.wrote(key, value)
        if key == keys.ledger_id:
            self._ledger_id = value.decode()
        elif key == keys.rebuilt:  # its last record: who wrote it may never hear that it stands
            if not unpack(value, r.Rebuilt).unfinished:
                self._on_rebuilt()
        elif key == keys.generation:
            generation = unpack(value, r.Generation)
            self._generation, self._keep_last = generation.number, generation.keep_last
            self._began[self._ledger_id] = self._generation
            self.lives.generation_began(self._generation)
        elif key.startswith(keys.groups):
            group = unpack(value, r.GroupRecord)
            self._shares.setdefault(group.attempt, {})[group.group] = group.shares
        elif key.startswith(keys.retirements):
            attempt = unpack(value, r.Retired).attempt
            self._ended.add(attempt.key)
            self.promises.retired(attempt, self.kept, self._keep_last)
            if self.kept.pop(attempt.key, None) is not None:
                self._saw(attempt, Life.RETIRED)
        elif key.startswith(keys.outcomes):
            outcome = unpack(value, r.Outcome)
            kept = self._kept(outcome.attempt)
            if kept is not None:  # no record of it stands, if the ledger was set back
                kept.undone = self.cluster.etcd.get(keys.commit(*kept.at)) is None
            if outcome.verdict is r.Verdict.ABORT and not (kept and kept.undone):
                self._ended.add(outcome.attempt.key)
                self._saw(outcome.attempt, Life.ABANDONED)
        elif key.startswith(keys.cleanings):
            self._cleaned.add(unpack(value, r.Cleaned).ledger_id)
            self.kept, self.tip = {}, None
            self.saved.clear()
        elif key.startswith(keys.commits):
            self._on_commit(unpack(value, r.Commit))
        elif key.startswith(keys.decisions):
            self._on_decision(unpack(value, r.Decision))
        elif key.startswith(keys.closings):
            self._on_closed(unpack(value, r.Closed))
        elif key.startswith(keys.offloads):
            self._on_offloaded(unpack(value, r.Offloaded))

    def _on_commit(self, commit: r.Commit) -> None:
        """Rules 1 and 3, at the moment of the write."""
        attempt = commit.attempt
        if (attempt.ledger_id, attempt.key) in self.saved:
            return  # written again by a rebuild
        self.commits += 1
        self.saved.add((attempt.ledger_id, attempt.key))
        if attempt.generation != self._generation:
            self.object(f"{attempt.key} committed in generation {self._generation}")
        if attempt.step <= self._steps.get(commit.lineage, -1):
            newest = self._steps[commit.lineage]
            self.object(f"step {attempt.step} committed after {newest} of its lineage")
        self._steps[commit.lineage] = attempt.step
        self._saw(attempt, Life.COMMITTED)
        shares = [s for _, part in sorted(self._shares.get(attempt, {}).items()) for s in part]
        writer = self.told.started.get((attempt.ledger_id, attempt.generation), ("", None))[0]
        snapshots = Snapshots(attempt, commit.layout, writer, tuple(shares))
        members = (e.key[len(r.MEMBERS) :] for e in self.cluster.etcd.list(r.MEMBERS).entries)
        kept = Kept(commit, snapshots, true_time(), members=frozenset(members))
        self.kept[attempt.key] = self.tip = kept
        self._check_commit(kept)
        for other in self.kept.values():
            self._check_bytes(other)

    def _check_commit(self, kept: Kept) -> None:
        commit, found, step = kept.commit, self.find(kept), kept.commit.attempt.step
        absent = set(range(commit.world_size)) - {rank for f in found for rank in f.share.ranks}
        if lost := absent.union(*(f.lost_ranks for f in found)):  # nobody knows of the last lease
            had = find(kept.snapshots, self._shelf.had(true_time() - LEASE_S))
            if never := sorted(absent.union(*(f.lost_ranks for f in had))):
                self.object(f"step {step} committed without the bytes of ranks {never}")
        kept.survives, kept.gone = min((f.survives for f in found), default=-1), bool(lost)
        recent = {node for at_s, node in self._hits if at_s > true_time() - LEASE_S}
        silent, spare = unknown_losses(self._damaged, commit.attempt), max(1, commit.layout.m)
        short = [f for f in found if f.survives + silent[f.share.node] < spare]
        if short and not recent and not lost:
            self.object(f"step {step} committed; it survives {kept.survives} losses, not {spare}")
        lacking = {f.share.node: f.missing for f in found if not (f.full or silent[f.share.node])}
        if lacking and not recent and not commit.degraded:
            self.object(f"step {step} committed as full, and lacks {lacking}")
        for f in found if not commit.degraded else ():
            self._check_place(step, f)

    def _check_place(self, step: int, found: Found, repaired: str = "") -> None:
        """No two shards on a host, and no rack has more than the parity can replace."""
        self.promises.placed(step, found, self.living if self.spread else (), repaired)

    def _check_bytes(self, kept: Kept) -> None:
        """Rule 7: what a committed file has, nobody writes any more."""
        for node, files in self._shelf.nodes.items():
            for name, (record, image) in files.items():
                of_it = record.attempt == kept.commit.attempt
                whole = record.state is r.FileState.WHOLE and record.kind is not r.FileKind.STAGE
                if not of_it or not whole or (node, name) in self._damaged or node in kept.hit:
                    continue
                if not kept.snapshots.is_right(record, image):
                    step = kept.commit.attempt.step
                    self.object(f"{node}: {record.kind} {record.part} of step {step} has changed")
                    self._damaged[node, name] = record

    def _on_decision(self, decision: r.Decision) -> None:
        """Rule 2: the newest step of the present lineage, unless it cannot be had."""
        _, asked = self.told.started.get((self._ledger_id, decision.generation), ("", None))
        if (tip := self.tip) is not None:
            there = not self.lost_ranks(tip)
            self.promises.decided(decision, asked, tip, there, self.calm)

    def _on_closed(self, closed: r.Closed) -> None:
        self.promises.closed(closed)
        commit = closed.commit
        if closed.close is r.Close.OK and closed.choice is r.Choice.RESTORE and commit is not None:
            self.tip = self.kept.get(commit.attempt.key)  # None: only the store has it

    def _on_offloaded(self, offloaded: r.Offloaded) -> None:
        attempt = offloaded.commit.attempt
        if attempt.key not in self.offloaded:
            self._saw(attempt, Life.OFFLOADED)
            if (kept := self._kept(attempt)) is not None:
                self.promises.offloaded(kept)
        self.offloaded[attempt.key] = offloaded

    def _on_rebuilt(self) -> None:
        """The ledger is what the agents remembered: nothing older than a moment may be missing."""
        entries = self.cluster.etcd.list(self.keys.commits).entries
        commits = [unpack(e.value, r.Commit) for e in entries]
        known = {c.attempt.key for c in commits}
        for key, kept in list(self.kept.items()):
            if key not in known:
                del self.kept[key]
                self._ended.discard(key)
                if self.tip is kept:
                    self.tip = None
        self.rebuilt_as = f"{self._generation:010d}"
        self._steps = {}
        for commit in commits:
            steps = (self._steps.get(commit.lineage, -1), commit.attempt.step)
            self._steps[commit.lineage] = max(steps)
        if self.tip is None:
            newest = max(commits, key=lambda c: c.attempt.key, default=None)
            self.tip = self.kept.get(newest.attempt.key) if newest is not None else None

    # -- looking into memory ---------------------------------------------------------------------

    def find(self, kept: Kept, without: Iterable[str] = ()) -> list[Found]:
        """Where the right bytes of a commit are now, share by share."""
        return find(kept.snapshots, self._shelf, without)

    def survives(self, kept: Kept) -> int:
        """How many more node losses a commit can take, -1 if it is gone."""
        return min((f.survives for f in self.find(kept)), default=-1)

    def lost_ranks(self, kept: Kept, without: Iterable[str] = ()) -> list[int]:
        """Ranks whose right bytes cannot be had from memory, nor from the object store."""
        bucket, stored = self.cluster.bucket, self.offloaded.get(kept.commit.attempt.key)
        return lost_ranks(kept, self.find(kept, without), stored, bucket.objects if bucket else {})

    def files_of(self, kept: Kept, owner: str) -> list[tuple[str, str, int]]:
        """Node, name and length of every WHOLE file that has a part of one share of a commit."""
        return whole_files(kept.snapshots, owner, self._shelf.nodes)

    def _kept(self, attempt: r.Attempt) -> Kept | None:
        kept = self.kept.get(attempt.key)
        return kept if kept is not None and kept.commit.attempt == attempt else None

    # -- the ends --------------------------------------------------------------------------------

    def joined(self, launch: str, generation: int, asks: int | None) -> None:
        """A rank was told its generation; from then on it writes as this launch."""
        entry = self.cluster.etcd.get(self.keys.ledger_id)
        ledger_id = entry.value.decode() if entry is not None else self._ledger_id
        self.told.joined(ledger_id, generation, launch, asks)

    def forgotten(self) -> None:
        """The ledger was lost, and nobody remembers any commit: then no memory has one whole."""
        if steps := [k.at[1] for k in self.kept.values() if self.survives(k) >= 0]:
            self.object(f"the ledger was lost, and nobody has a copy of steps {steps}")

    def refused_for_good(self) -> str:
        """Rule 1, the other way round: why restores rightly refuse, "" if they should not."""
        tip = self.tip
        if tip is None:
            return "" if self.kept else "nothing that could be restored is left"
        lost = self.lost_ranks(tip)
        if not lost or self.can_go_back():
            return ""
        return f"step {tip.commit.attempt.step}: ranks {lost} are gone, {list(tip.hit)} hit"

    def can_go_back(self) -> bool:
        """Is there an older step of the present lineage that can be had?"""
        if (tip := self.tip) is None:
            return False
        same = (k for k in self.kept.values() if k.commit.lineage == tip.commit.lineage)
        return any(k.at[1] < tip.at[1] and not self.lost_ranks(k) for k in same)

    def at_end(self) -> None:
        """Once more, all that stands."""
        for kept in self.kept.values():
            self._check_bytes(kept)
            self._check(kept)

    def object(self, what: str) -> None:
        """Note what must not be."""
        self.objections.append(f"at {true_time():.3f} s, {self.keys.job}: {what}")
