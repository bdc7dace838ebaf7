"""Sealed shares -> one outcome: hand in, look at the group records, put COMMIT or ABORT.

Every node of the roster does this for every attempt that it sealed a share of: rank 0's agent at
once, the others after a random while, all by the same transaction. So the one outcome comes as long
as one of them lives and reaches the ledger.

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
from p2pckpt.errors import FormatError, LedgerUnavailable
from p2pckpt.ports import Put, Txn, absent
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
        return await ctx.home.doors.ledger.get(ctx.keys.group(attempt, group)) is not None

    piece = w.HandIn(
        job=ctx.job,
        node=ctx.home.node,
        generation=attempt.generation,
        attempt=attempt,
        share=sealed,
    )
    await hand_in(ctx, roster, piece, gathering, write, lambda: ctx.decided(attempt))
    asyncio.get_running_loop().call_soon(ctx.wake)  # whoever waits for this task to be done


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
    line = lineage or await _fresh_lineage(ctx, attempt.generation)
    demand = Demand.of(roster.generation, ctx.home.config.min_spare)
    looked = not leads  # rank 0's agent has mostly just written the last group record itself
    while not ctx.decided(attempt):
        if looked:
            eager = leads and handing.done()
            await pause(ctx, eager, lambda: ctx.decided(attempt))
        looked = True
        if ctx.decided(attempt):
            break
        try:
            await _decide(ctx, attempt, line, demand)
        except (LedgerUnavailable, FormatError) as e:
            ctx.note("decide_later", attempt=attempt.key, why=str(e))
            await ctx.until(lambda: ctx.decided(attempt), RETRY_S)


async def _decide(ctx: JobContext, attempt: r.Attempt, lineage: str, demand: Demand) -> None:
    entries = (await ctx.home.doors.ledger.list(ctx.keys.groups_of(attempt))).entries
    if len(entries) < demand.pieces:
        return
    stores = (await ctx.home.living()).stores
    ruling = decide_commit(read_groups(entries, attempt), stores, demand)
    if ruling.verdict is r.Verdict.ABORT:
        await ctx.abort(attempt, ruling.reason)
    elif ruling.verdict is r.Verdict.COMMIT:
        outcome = r.Outcome(
            attempt=attempt,
            verdict=r.Verdict.COMMIT,
            by=ctx.home.node,
            lineage=lineage,
            degraded=ruling.degraded[:16],
        )
        if await ctx.transact(commit_txn(ctx.state, attempt, entries, outcome)):
            ctx.note("commit", attempt=attempt.key, degraded=list(ruling.degraded))
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
