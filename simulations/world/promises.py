"""What ledger, object store and files show to who watches every write: rules 2, 4, 7, 9 and 11.

Intuition. Most promises of the protocol are about one write: a record that is there once is never
another one; a step is retired for newer ones, and not under a reader's hands; a step counts as
offloaded when its bytes lie in the store; a file goes to a new attempt when its writer is done.
Each is judged at that write, by what is true at that moment, whoever wrote it.

Contract: knows of no decider of the product. A ledger that was lost or rebuilt begins with nothing
known. What was damaged on purpose in the object store is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from p2pckpt import records as r
from p2pckpt.backends.inproc.cluster import FakeCluster
from p2pckpt.backends.inproc.net import true_time
from p2pckpt.wire import unpack
from simulations.world.contents import Found, Kept, content

GONE: tuple[str, ...] = (
    "crash_lose", "reboot", "rack_lost", "power_lost", "node_leaves", "node_joins",
    "trainer_dies", "roll_back", "flip_memory", "flip_record", "share_rots",
)  # fmt: skip
"""Faults under which whoever is there can be reached, and has room."""

CLEAR_AFTER_S = 15.0
PATIENCE_S = 20.0
"""Before an older step is taken, those who may have the newer one get longer to come back."""

DAMAGE = ("fault.bucket.flip", "fault.bucket.truncate", "fault.bucket.lose")


class Writer(Protocol):
    """A process that writes into files."""

    alive: bool


class Promises:
    """Memory of what was written, for one job. ``object`` notes what must not be."""

    def __init__(
        self, cluster: FakeCluster, keys: r.JobKeys, object_: Callable[[str], None]
    ) -> None:
        self.cluster, self.keys, self.object = cluster, keys, object_
        self.final = (keys.outcomes, keys.decisions, keys.closings, keys.groups)
        """Records that are written once."""
        self._records: dict[str, bytes] = {}
        self._closed: set[tuple[int, int]] = set()
        self._damaged: list[str] = []
        self._writers: dict[tuple[str, str], tuple[str, Writer]] = {}
        self._disturbed, self._clear_at = 0, 0.0
        self._ballot_at = 0.0
        self._forgot_at = -1.0
        """When the ledger last forgot: what it rests on then is not what training stood on."""
        self._bad: set[str] = set()
        self._restored: dict[str, r.Commit] = {}
        self._retired: set[str] = set()
        """Offloads that were ever retired: the ledger may be set back while their objects go."""

    # -- the ledger -------------------------------------------------------------------------------

    def forget(self) -> None:
        """The ledger was lost, set back or rebuilt: what it has now is what counts."""
        self._records = {}

    def wrote(self, key: str, value: bytes) -> None:
        """Rule 4: a record that decides something is never replaced by another."""
        if key == self.keys.ledger_id:
            self.forget()
        if key == self.keys.generation:
            self._ballot_at = true_time()
        if key.startswith(f"{self.keys.root}state/offload_retired/"):
            self._retired.add(key)
        if key.startswith(self.final) and self._records.setdefault(key, value) != value:
            self.object(f"{key} was written, and is another one now")

    def retired(self, attempt: r.Attempt, kept: Mapping[str, Kept], keep_last: int) -> None:
        """Rule 9: nobody reads it, and keep_last steps of one lineage were committed after it."""
        if readers := self.cluster.etcd.list(self.keys.readers(attempt)).entries:
            who = readers[0].key.rpartition(f"{attempt.key}/")[2]
            self.object(f"step {attempt.step} was retired while {who} reads it")
        if attempt.key not in kept:
            return
        names = list(kept)
        later = [kept[n].commit.lineage for n in names[names.index(attempt.key) + 1 :]]
        later += [c.lineage for c in self._came_back(kept) if c.attempt.key > attempt.key]
        newer = max((later.count(lineage) for lineage in later), default=0)
        if newer < keep_last:
            self.object(f"step {attempt.step} was retired for {newer} newer ones, not {keep_last}")

    def _came_back(self, kept: Mapping[str, Kept]) -> list[r.Commit]:
        """Commits that were retired, that a rebuilt ledger has again, and that were restored."""
        there = self.cluster.etcd.get
        gone = (c for key, c in self._restored.items() if key not in kept)
        return [c for c in gone if there(self.keys.commit(c.lineage, c.attempt.step)) is not None]

    def closed(self, closed: r.Closed) -> None:
        """A ballot has its end."""
        if closed.close is r.Close.OK:
            self._closed.add((closed.generation, closed.ballot))
            if closed.commit is not None:
                self._restored[closed.commit.attempt.key] = closed.commit
        if closed.close is r.Close.BAD and closed.commit is not None:
            self._bad.add(closed.commit.attempt.key)
        self._ballot_at = true_time()

    def decided(
        self, decision: r.Decision, asked: int | None, tip: Kept, there: bool, calm: bool
    ) -> None:
        """Rules 2 and 10: the step that was asked for, else the newest one if it is ``there``; who
        passes it over or refuses must have waited for those who were away."""
        step = decision.commit.attempt.step if decision.commit is not None else -1
        newest = tip.commit
        hasty = tip.at_s > self._forgot_at and self._is_early(newest)
        what = f"step {newest.attempt.step}"
        if decision.choice is r.Choice.UNPROVEN and asked is None and hasty and there:
            self.object(f"a restore was refused at once, and {what} is there")
        if decision.choice is not r.Choice.RESTORE:
            return
        if asked is not None and step != asked:
            self.object(f"step {asked} was asked for, {step} decided")
        passed = decision.commit is not None and decision.commit.attempt != newest.attempt
        if asked is None and passed and there and (calm or hasty):
            self.object(f"step {step} decided, and {what} is there and newer")

    def _is_early(self, newest: r.Commit) -> bool:
        """Is it too early to pass over a step that no ballot found bad?"""
        known = self.cluster.etcd.get(self.keys.commit(newest.lineage, newest.attempt.step))
        early = true_time() - self._ballot_at < PATIENCE_S
        return known is not None and early and newest.attempt.key not in self._bad

    def returned(self, who: str, generation: int, ballot: int) -> None:
        """Rule 2: a rank's restore returned. That is for all ranks together, after the closing."""
        if (generation, ballot) not in self._closed:
            self.object(f"{who} goes on from ballot {ballot}, which is not closed for all ranks")

    # -- places -----------------------------------------------------------------------------------

    def placed(self, step: int, found: Found, living: Sequence[str], repaired: str) -> None:
        """Rule 1: no two shards on a host, and, if the racks of those who are ``living`` (and have
        joined: a new store waits for the lease of its name's last one) suffice for it and all of
        them can be reached, none has more than the parity can replace.
        ``repaired``: the node that just got a shard, "" if all were just saved; only its place is
        judged then, and only if who repairs could reach all that hold something."""
        nodes = self.cluster.nodes
        owner = (found.owners or [found.share.node])[0]
        holders = [next((n for n in names if n != owner), owner) for names in found.shards.values()]
        if any(len(names) > 1 for names in found.shards.values()):
            return  # somebody came back with what was repaired or sent elsewhere meanwhile
        clear = self._disturbed == 0 and true_time() >= self._clear_at
        hosts = [nodes[n].host for n in (owner, *holders)]
        if len(set(hosts)) < len(hosts) and (clear or not repaired):
            self.object(f"step {step}: share of {found.share.node} lies on hosts {hosts}")
        racks = [self._rack(n) for n in holders]
        judged = [self._rack(repaired)] if repaired else racks
        most, allowed = max(map(racks.count, judged), default=0), max(1, found.layout.m)
        if not clear or most <= allowed:
            return
        there = [n for n in living if self._has_joined(n)]
        room = [self._rack(n) for n in there if self._rack(n) != self._rack(owner)]
        suffice = sum(min(room.count(rack), allowed) for rack in set(room))
        if suffice >= found.layout.shards:
            self.object(f"step {step}: {most} shards of {found.share.node} in one rack: {racks}")

    def _has_joined(self, node: str) -> bool:
        """Is the store that the node has now a member?"""
        entry = self.cluster.etcd.get(f"{r.MEMBERS}{node}")
        store_id = self.cluster.nodes[node].store.store_id
        return entry is not None and unpack(entry.value, r.Member).store_id == store_id

    def _rack(self, node: str) -> str:
        return self.cluster.nodes[node].domains.get("rack", node)

    # -- the object store -------------------------------------------------------------------------

    def offloaded(self, kept: Kept) -> None:
        """Rule 1, of the object store: a step that is said to lie there does, and was due."""
        attempt, bucket = kept.commit.attempt, self.cluster.bucket
        if kept.commit.number % (kept.commit.offload_every or 1):
            self.object(f"step {attempt.step} is offloaded, and was not due: {kept.commit}")
        if bucket is None or any(f"/{attempt.key}/" in name for name in self._damaged):
            return
        there, writer = set(bucket.objects.values()), kept.snapshots.writer
        ranks = range(kept.commit.world_size)
        if lacking := [k for k in ranks if content(k, attempt.step, writer) not in there]:
            what = f"step {attempt.step} counts as offloaded"
            self.object(f"{what}; the store has no bytes of ranks {lacking}")

    def saw(
        self, who: str, what: str, facts: Mapping[str, Any], known: Iterable[r.Offloaded]
    ) -> None:
        """An event of the object store or the ledger. ``known``: offloads that there ever were."""
        if what in ("fault", "fault.over") and facts["what"] not in GONE:
            self._disturbed += 1 if what == "fault" else -1
            self._clear_at = true_time() + CLEAR_AFTER_S
        elif what in DAMAGE:
            self._damaged.append(facts["name"])
        elif what in ("fault.ledger.wipe", "fault.ledger.rollback"):
            self._forgot_at = true_time()
            self.forget()
        elif what == "bucket.delete":
            for attempt in (offloaded.commit.attempt for offloaded in known):
                named = f"/{attempt.ledger_id}/{attempt.key}/" in facts["name"]
                offered = self.cluster.etcd.get(self.keys.offloaded(attempt)) is not None
                if named and offered and self.keys.offload_retired(attempt) not in self._retired:
                    where = f"of step {attempt.step}, which the ledger offers"
                    self.object(f"{who} deleted {facts['name'].rpartition('/')[2]} {where}")

    # -- files ------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, node: str, file: str, who: str, process: Writer) -> Iterator[None]:
        """A process writes into a file of a node for as long as this lasts, or it lives."""
        self._writers[node, file] = (who, process)
        try:
            yield
        finally:
            if self._writers.get((node, file), (None, None))[1] is process:
                del self._writers[node, file]

    def taken(self, node: str, file: str, attempt: r.Attempt) -> None:
        """Rule 7: a file was given to an attempt."""
        who, process = self._writers.get((node, file), ("", None))
        if process is not None and process.alive:
            self.object(f"{node}: {file} was taken for {attempt.key} while {who} writes into it")
