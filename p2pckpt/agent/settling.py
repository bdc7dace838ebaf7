"""Sealed shares -> one outcome: hand in, look at the group records, put COMMIT or ABORT.

Every node of the roster does this for every attempt that it sealed a share of: rank 0's agent at
once, as it watches the group records come, the others after a random while, all by the same
transaction. So the one outcome comes as long as one of them lives and reaches the ledger.

Contract: what is judged is `save/commit.py`; what it is judged by was read in this order: group
records, then who lives. The transaction carries all of it.
"""

from __future__ import annotations

import asyncio

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.context import RETRY_S, JobContext, Roster
from p2pckpt.agent.deciding import check_current
from p2pckpt.agent.gather import Gathering, hand_in, pause
from p2pckpt.errors import Compacted, FormatError, LedgerUnavailable
from p2pckpt.ports import Entry, Put, Txn, absent
from p2pckpt.save.commit import Demand, commit_txn, decide_commit, group_txn, read_groups
from p2pckpt.wire import pack


async def hand_in_share(
    ctx: JobContext,
    gathering: Gathering,
    roster: Roster,
    attempt: r.Attempt,
    sealed: r.SealedShare,
) -> None:
    """Hand this node's share in until its group's record stands or the attempt is decided."""

    async def write(group: int, pieces: list[w.HandIn]) -> bool:
        shares = tuple(p.share for p in pieces if p.share is not None)
        record = r.GroupRecord(attempt=attempt, group=group, shares=shares)
        if await ctx.transact(group_txn(ctx.state, record)):
            ctx.note("group_record", attempt=attempt.key, group=group)
            return True
        return await ctx.home.doors.ledger.get(ctx.keys.group(attempt, group)) is not None

    piece = w.HandIn(
        job=ctx.job,
        ledger_id=attempt.ledger_id,
        node=ctx.home.node,
        generation=attempt.generation,
        attempt=attempt,
        share=sealed,
    )
    await hand_in(ctx, roster, piece, gathering, write, lambda: ctx.decided(attempt))
    if not ctx.decided(attempt):
        ctx.wake()  # for who waits until this task is done; the outcome woke them itself


async def settle(
    ctx: JobContext,
    roster: Roster,
    attempt: r.Attempt,
    lineage: str | None,
    handing: asyncio.Task[None],
) -> None:
    """Look at the group records until the attempt has its outcome; put it if we may.

    ``lineage``: None opens a fresh one. ``handing``: the one to whom this node hands its share may
    have written the record and then stopped.
    """
    leads = roster.leads(ctx.home.node)
    demand = Demand.of(roster.generation, ctx.home.config.min_spare)
    looked = not leads  # rank 0's agent has mostly just written the last group record itself
    while not ctx.decided(attempt):
        eager = leads and handing.done()
        if looked:
            await pause(ctx, eager, lambda: ctx.decided(attempt))
        looked = True
        if ctx.decided(attempt):
            break
        try:
            records = await _records(ctx, attempt, demand.pieces if eager else 0)
            if len(records) < demand.pieces or ctx.decided(attempt):
                continue
            # Rank 0's agent sees them as well, and needs a moment for what follows.
            patience_s = 0.0 if leads else ctx.home.config.commit_delay_low_s
            if not await ctx.until(lambda: ctx.decided(attempt), patience_s):
                await _decide(ctx, attempt, lineage, demand, records)
        except (Compacted, LedgerUnavailable, FormatError) as e:
            ctx.note("decide_later", attempt=attempt.key, why=str(e))
            await ctx.until(lambda: ctx.decided(attempt), RETRY_S)


async def _records(ctx: JobContext, attempt: r.Attempt, wanted: int) -> tuple[Entry, ...]:
    """The group records that there are; not before there are so many, or an outcome."""
    ledger, prefix = ctx.home.doors.ledger, ctx.keys.groups_of(attempt)
    listing = await ledger.list(prefix)
    found = {entry.key: entry for entry in listing.entries}

    async def come() -> None:
        async for changes in ledger.watch(prefix, listing.revision + 1):
            for c in changes:
                found.pop(c.key, None)
                if c.value is not None:
                    found[c.key] = Entry(c.key, c.value, c.create_revision, c.revision)
            if len(found) >= wanted:
                return

    if len(found) < wanted:
        coming = asyncio.ensure_future(come())
        ended = asyncio.ensure_future(ctx.until(lambda: ctx.decided(attempt), None))
        try:
            await asyncio.wait((coming, ended), return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                coming.result()
        finally:
            for task in (coming, ended):
                task.cancel()
            await asyncio.gather(coming, ended, return_exceptions=True)
    return tuple(entry for _, entry in sorted(found.items()))


async def _decide(
    ctx: JobContext,
    attempt: r.Attempt,
    line: str | None,
    demand: Demand,
    entries: tuple[Entry, ...],
) -> None:
    stores = (await ctx.home.living()).stores
    ruling = decide_commit(read_groups(entries, attempt), stores, demand)
    if ctx.decided(attempt):
        return
    if ruling.verdict is r.Verdict.ABORT:
        await ctx.abort(attempt, ruling.reason)
    elif ruling.verdict is r.Verdict.COMMIT:
        lineage = line or await _fresh_lineage(ctx, attempt.generation)
        outcome = r.Outcome(
            attempt=attempt,
            verdict=r.Verdict.COMMIT,
            by=ctx.home.node,
            lineage=lineage,
            degraded=ruling.degraded[:16],
        )
        if await ctx.transact(commit_txn(ctx.state, attempt, entries, outcome)):
            ctx.note("commit", attempt=attempt.key, degraded=list(ruling.degraded))
        if await ctx.until(lambda: ctx.decided(attempt), RETRY_S):
            return  # by the watch: whoever lost the race need not read
        await ctx.refresh()
        if attempt.step in ctx.state.steps(lineage) and not ctx.decided(attempt):
            reason = f"step {attempt.step} is already committed in this lineage"
            await ctx.abort(attempt, reason)
        elif not ctx.decided(attempt) and ctx.state.steps(lineage)[-1:] > [attempt.step]:
            newest = ctx.state.steps(lineage)[-1]
            await ctx.abort(attempt, f"step {newest} is committed: a lineage never goes back")


async def _fresh_lineage(ctx: JobContext, generation: int) -> str:
    """The lineage of a generation that saves before it restored: its ballot 0."""
    while (closed := ctx.state.closed.get((generation, 0))) is None:
        record = r.Closed(
            generation=generation,
            ballot=0,
            close=r.Close.OK,
            by=ctx.home.node,
            reason="saved before any restore",
            choice=r.Choice.FRESH,
            lineage=ctx.home.doors.ids.new(),
        )
        key = ctx.keys.closed(generation, 0)
        fence = ctx.state.same_generation(generation)
        compares = (ctx.state.same_ledger(), fence, absent(key))
        await ctx.transact(Txn(compares, (Put(key, pack(record)),)))
        await ctx.refresh()
        check_current(ctx, generation)
    return closed.lineage
