"""The object store as a source for a restore: what it says, asked only when RAM does not suffice.

Ranks of a step whose Offloaded record stands are provable from the store if its `checkpoint.json`
has the recorded digest, and their objects are listed with the lengths that it names. A cut-off
object is so found before anything is decided; flipped bits are found by the reader's chunk CRCs.

Contract: an outage makes facts say "away", never "not there". Manifests are cached by digest: they
cannot change. One thing is written here: a rebuilt ledger does not know which of the commits that
it was given are in the store, so an offload is recorded again (`recall`) if the store's manifest
says just this commit and these groups, and all objects that it names are there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from p2pckpt import records as r
from p2pckpt.agent.context import JobContext
from p2pckpt.errors import FormatError, IntegrityError, ObjectAbsent, ObjectStoreUnavailable
from p2pckpt.jobstate import JobState
from p2pckpt.restore.locate import Bucket, Facts, unprovable
from p2pckpt.save.offload import (
    CHECKPOINT,
    checkpoint_name,
    checkpoint_of,
    directory,
    incomplete,
    job_directory,
    lacking,
    offloaded_txn,
    read_checkpoint,
)

WRONG = (FormatError, IntegrityError, ObjectAbsent)
"""What a store answers that is there but has not what it should."""

CACHED = 4


async def checkpoint(ctx: JobContext, kept: r.Offloaded) -> r.Checkpoint:
    """The job-level manifest of an offloaded step.

    Raises ObjectStoreUnavailable, or one of WRONG.
    """
    objects = ctx.home.doors.objects
    if objects is None:
        raise ObjectStoreUnavailable(
            f"step {kept.commit.attempt.step} is in an object store, but {ctx.home.node} has none "
            "configured (s3_url)"
        )
    found = ctx.checkpoints.get(kept.manifest_digest)
    if found is None:
        found = read_checkpoint(await objects.get(kept.manifest), kept.manifest_digest)
        while len(ctx.checkpoints) >= CACHED:
            del ctx.checkpoints[next(iter(ctx.checkpoints))]
        ctx.checkpoints[kept.manifest_digest] = found
    return found


async def offloaded_groups(ctx: JobContext, attempt: r.Attempt) -> list[r.GroupRecord]:
    """The group records of an attempt that may be gone from RAM; [] if it is not offloaded."""
    kept = ctx.state.offloaded.get(attempt.key)
    return [] if kept is None else list((await checkpoint(ctx, kept)).groups)


async def offloaded_share(ctx: JobContext, attempt: r.Attempt, owner: str) -> r.ShareObjects | None:
    """Where one share lies in the store; None if its step is not offloaded."""
    kept = ctx.state.offloaded.get(attempt.key)
    if kept is None:
        return None
    shares = (await checkpoint(ctx, kept)).shares
    return next((s for s in shares if s.owner == owner), None)


async def ask_bucket(ctx: JobContext, facts: Facts, tries: Sequence[r.Commit]) -> Facts:
    """The facts, with what the store says of the steps that RAM cannot prove."""
    objects = ctx.home.doors.objects
    if objects is None:
        return facts
    groups, steps, cut = dict(facts.groups), dict[str, str](), dict[str, dict[int, str]]()
    manifests: tuple[str, ...] = ()
    try:
        for commit in tries:
            attempt, key = commit.attempt, commit.attempt.key
            if not unprovable(commit, facts):
                break
            if may_be_stored(facts.state, attempt):
                facts = replace(facts, state=await recall(ctx, commit, groups.get(key, ())))
            if (kept := facts.state.offloaded.get(key)) is not None:
                try:
                    found = await checkpoint(ctx, kept)
                except WRONG as e:
                    steps[key] = f"{type(e).__name__}: {e}"
                else:
                    groups[key] = groups.get(key) or found.groups
                    cut[key] = lacking(found, await objects.list(directory(attempt)))
                    steps[key] = ""
        if not tries and not facts.state.known_commits():
            listing = await objects.list(job_directory(ctx.job))
            names = (s.name for s in listing if s.name.endswith("/" + CHECKPOINT))
            manifests = tuple(names)
    except ObjectStoreUnavailable as e:
        return replace(facts, groups=groups, bucket=Bucket(steps, cut, away=str(e)))
    return replace(facts, groups=groups, bucket=Bucket(steps, cut, manifests=manifests))


def may_be_stored(state: JobState, attempt: r.Attempt) -> bool:
    """Is the attempt of a ledger that is gone, and may so have been offloaded without a record?"""
    return attempt.key not in state.offloaded and attempt.ledger_id != state.ledger_id


async def recall(ctx: JobContext, commit: r.Commit, groups: Sequence[r.GroupRecord]) -> JobState:
    """Record an offload again that the ledger forgot, if there is one; what stands now. Raises
    ObjectStoreUnavailable, LedgerUnavailable."""
    objects = ctx.home.doors.objects
    assert objects is not None
    try:
        data = await objects.get(checkpoint_name(commit.attempt))
        found = read_checkpoint(data, hashlib.sha256(data).hexdigest())
        wrong = incomplete(found, await objects.list(directory(commit.attempt)))
    except WRONG:
        return ctx.state
    if found == checkpoint_of(commit, groups, found.shares) and not wrong:
        txn = offloaded_txn(ctx.state, commit, data, ctx.home.node)
        if await ctx.transact(txn):
            ctx.note("offload_recalled", step=commit.attempt.step)
    return await ctx.refresh()
