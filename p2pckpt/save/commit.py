"""Receipts -> one outcome: who may write COMMIT or ABORT, and the transaction that does.

Two-phase commit with the ledger as the one judge: a node's share is sealed when its receipts are
in; the sealed shares of up to 64 nodes make one group record; when all group records are there,
anybody may put the outcome. The transaction itself carries every condition (same ledger, same
generation, no outcome yet, no step at or above, the very group records that were judged), so that
a committer that slept for an hour between reading and writing changes nothing.

Contract: `decide_*` are pure and say why; `*_txn` build transactions. An attempt gets exactly one
outcome, COMMIT only with all bytes in living stores, ABORT only while there is no COMMIT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2pckpt import records as r
from p2pckpt.errors import FormatError
from p2pckpt.jobstate import JobState
from p2pckpt.ports import Compare, Entry, Put, Txn, absent, present, unchanged
from p2pckpt.wire import pack, unpack


@dataclass(frozen=True)
class Ruling:
    """What a committer is to do: ``verdict`` None means wait for what ``reason`` names."""

    verdict: r.Verdict | None
    reason: str
    degraded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Demand:
    """What a commit must show: the layout, and how many node losses it must survive."""

    layout: r.Layout
    min_spare: int
    pieces: int
    world_size: int

    @classmethod
    def of(cls, generation: r.Generation, min_spare: int) -> Demand:
        """From a generation; ``min_spare`` -1 means max(1, m)."""
        spare = spare_of(generation.layout, min_spare)
        return cls(generation.layout, spare, generation.pieces, generation.world_size)


def spare_of(layout: r.Layout, min_spare: int) -> int:
    """Node losses that a commit must survive; ``min_spare`` -1 means max(1, m)."""
    return max(1, layout.m) if min_spare < 0 else min_spare


def decide_commit(
    groups: Sequence[r.GroupRecord], living_stores: Mapping[str, str], demand: Demand
) -> Ruling:
    """Judge an attempt by its group records and the stores that live.

    ``living_stores`` (node name by store_id) must come from a read not older than the last group
    record. Every share needs k + min_spare sources; its own slot on a living store counts as one.
    """
    have = {g.group for g in groups}
    missing = [g for g in range(demand.pieces) if g not in have]
    if missing:
        return Ruling(None, f"group records {missing[:5]} of {demand.pieces} are missing")
    shares = [s for g in groups for s in g.shares]
    ranks = sorted(rank for s in shares for rank in s.ranks)
    if ranks != list(range(demand.world_size)):
        absentees = sorted(set(range(demand.world_size)) - set(ranks))
        return Ruling(r.Verdict.ABORT, f"sealed shares lack ranks {absentees[:8]}")
    degraded = []
    for share in shares:
        own = share.store_id in living_stores
        held = len({store for store in share.holders if store in living_stores})
        if held == demand.layout.shards and own:
            continue
        if held + own < demand.layout.k + demand.min_spare:
            return Ruling(
                r.Verdict.ABORT,
                f"share of {share.node}: needs {demand.layout.k + demand.min_spare} living sources"
                f" (k={demand.layout.k} + min_spare={demand.min_spare}), has {held + own}",
            )
        degraded.append(
            f"{share.node}: {held} of {demand.layout.shards} shards"
            f"{'' if own else ', own copy lost'}"
        )
    return Ruling(r.Verdict.COMMIT, "every share has its sources", tuple(degraded))


def read_groups(entries: Sequence[Entry], attempt: r.Attempt) -> list[r.GroupRecord]:
    """Group records of an attempt. Raises FormatError for one that is damaged or another's."""
    groups = [unpack(e.value, r.GroupRecord) for e in entries]
    for entry, group in zip(entries, groups, strict=True):
        if group.attempt != attempt:
            raise FormatError(f"{entry.key}: is of attempt {group.attempt.key}")
    return groups


def commit_txn(
    state: JobState, attempt: r.Attempt, groups: Sequence[Entry], outcome: r.Outcome
) -> Txn:
    """COMMIT, if nothing of what was judged has changed.

    ``state`` gives ledger id and generation revision as the attempt's writer knows them. Raises
    StaleGenerationError if it knows of a newer generation than the attempt's. The commit says
    itself by which N it is due for the object store: so a changed schedule is about later commits
    only, and all agents agree on this one, whatever they know of the change.
    """
    assert state.generation is not None
    keys, before = state.keys, state.latest()
    schedule = state.schedules.get(attempt.generation)
    record = r.Commit(
        attempt=attempt,
        lineage=outcome.lineage,
        layout=state.generation.layout,
        world_size=state.generation.world_size,
        groups=len(groups),
        degraded=outcome.degraded,
        number=before.number + 1 if before else 1,
        offload_every=schedule.offload_every if schedule else 0,
    )
    return Txn(
        compares=(
            state.same_ledger(),
            state.same_generation(attempt.generation),
            state.undecided(attempt),
            state.no_step_from(outcome.lineage, attempt.step),
            state.above_floor(attempt),
            *_stands(state, before),
            *(unchanged(entry) for entry in groups),
        ),
        puts=(
            Put(keys.outcome(attempt), pack(outcome)),
            Put(keys.commit(outcome.lineage, attempt.step), pack(record)),
        ),
    )


def _stands(state: JobState, newest: r.Commit | None) -> tuple[Compare, ...]:
    """The newest commit is there, if it is in RAM: it goes only for a newer one, or with a ledger
    that went back, where nothing may be committed."""
    key = (newest.lineage, newest.attempt.step) if newest else ("", 0)
    return (present(state.keys.commit(*key)),) if key in state.commits else ()


def abort_txn(state: JobState, outcome: r.Outcome) -> Txn:
    """ABORT, unless there is an outcome. Needs no fence: it can only prevent."""
    return Txn(
        compares=(
            state.same_ledger(),
            state.undecided(outcome.attempt),
            state.above_floor(outcome.attempt),
        ),
        puts=(Put(state.keys.outcome(outcome.attempt), pack(outcome)),),
    )


def group_txn(state: JobState, record: r.GroupRecord) -> Txn:
    """The group's record, once, while the attempt is open and its generation stands."""
    key = state.keys.group(record.attempt, record.group)
    return Txn(
        compares=(
            state.same_ledger(),
            state.same_generation(record.attempt.generation),
            state.undecided(record.attempt),
            state.above_floor(record.attempt),
            absent(key),
        ),
        puts=(Put(key, pack(record)),),
    )
