"""A job's records in a real transaction engine, without agents: the ground of the pure tests.

`Book` is one job in a `FakeEtcd` (compares, revisions and ranges as etcd has them). Tests put
records, build transactions with the product's functions from a state that was read *then*, and
apply them *now*: that is what a committer does that slept in between.
"""

from random import Random

from p2pckpt import records as r
from p2pckpt.backends.inproc.etcd import FakeEtcd
from p2pckpt.jobstate import FLOOR_START, JobState
from p2pckpt.ports import Put, Txn
from p2pckpt.wire import pack

KEYS = r.JobKeys("1000.job")
LEDGER = "1" * 32
RS = r.Layout(2, 1)


def attempt(ordinal, step, generation=1, ledger=LEDGER):
    return r.Attempt(
        ledger_id=ledger, job="1000.job", generation=generation, ordinal=ordinal, step=step
    )


def generation_record(number, layout=RS, world_size=4, pieces=1, keep_last=1):
    return r.Generation(
        number=number,
        nonce=f"nonce{number}",
        run_token=f"token{number}",
        world_size=world_size,
        roster_digest="d" * 32,
        pieces=pieces,
        layout=layout,
        keep_last=keep_last,
    )


def share(node, ranks, holders, store=None, digest=None):
    return r.SealedShare(
        node=node,
        store_id=store or f"store-{node}",
        ranks=tuple(ranks),
        manifest_digest=digest or f"digest-{node}",
        snapshot_bytes=100,
        holders=tuple(holders),
    )


def commit_record(of, lineage, layout=RS, world_size=4, groups=1):
    return r.Commit(
        attempt=of, lineage=lineage, layout=layout, world_size=world_size, groups=groups
    )


def outcome_of(of, verdict=r.Verdict.COMMIT, lineage="L1", reason=""):
    return r.Outcome(attempt=of, verdict=verdict, by="n0", reason=reason, lineage=lineage)


class Book:
    """One job's records; `state()` is a linearizable listing, as agents read it."""

    def __init__(self, generation=1):
        self.etcd = FakeEtcd(Random(1), lambda *_: None)
        self.put(KEYS.ledger_id, LEDGER.encode())
        self.put(KEYS.floor, FLOOR_START)
        self.begin(generation)

    def put(self, key, value):
        value = value if isinstance(value, bytes) else pack(value)
        assert self.etcd.apply("test", Txn(puts=(Put(key, value),)))

    def delete(self, *keys):
        self.etcd.apply("test", Txn(deletes=keys))

    def begin(self, number, **facts):
        self.put(KEYS.generation, generation_record(number, **facts))

    def decide(self, of, verdict, lineage="L1", reason="because"):
        self.put(KEYS.outcome(of), outcome_of(of, verdict, lineage, reason))

    def commit(self, step, lineage="L1", ordinal=None, generation=1, world_size=4):
        of = attempt(step if ordinal is None else ordinal, step, generation)
        self.decide(of, r.Verdict.COMMIT, lineage)
        record = commit_record(of, lineage, world_size=world_size)
        self.put(KEYS.commit(lineage, step), record)
        return record

    def close(self, generation, ballot, lineage, base=None, close=r.Close.OK, commit=None):
        record = r.Closed(
            generation=generation,
            ballot=ballot,
            close=close,
            by="n0",
            choice=r.Choice.RESTORE,
            lineage=lineage,
            base=None if base is None else r.Base(lineage=base[0], step=base[1]),
            commit=commit,
        )
        self.put(KEYS.closed(generation, ballot), record)
        return record

    def state(self):
        return JobState.listed(KEYS, self.etcd.list(KEYS.state))

    def does(self, txn):
        """Apply a transaction now; did it happen?"""
        return self.etcd.apply("test", txn) is not None

    def has(self, key):
        return self.etcd.get(key) is not None

    def groups(self, of, *records):
        """Put group records and read them back as a committer does."""
        for record in records:
            self.put(KEYS.group(of, record.group), record)
        return self.etcd.list(KEYS.groups_of(of)).entries


def group_record(of, number, *shares):
    return r.GroupRecord(attempt=of, group=number, shares=tuple(shares))
