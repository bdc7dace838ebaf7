"""The end of a ballot: one report a node, one record a group, one closing for all ranks.

Each node of the roster reports how its ranks fared; the reports of a group become one record, as
shares do (`gather`), and anybody who sees them all, or sees the time run out, puts the closing.
`restore()` returns on no rank before it stands.

Contract: create-if-absent, fenced by the ballot's own generation. A ballot that is overdue closes
as RETRY, which never quarantines; a newer generation or another ledger ends it without a closing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import structs

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.context import RETRY_S, JobContext, Roster
from p2pckpt.agent.deciding import groups_of
from p2pckpt.agent.gather import Gathering, hand_in, pause
from p2pckpt.agent.holdings import Held
from p2pckpt.errors import CheckpointError
from p2pckpt.ports import Put, Txn, absent
from p2pckpt.restore.locate import decide_close
from p2pckpt.restore.pipeline import Fetched
from p2pckpt.wire import pack

CEDE_S = 30.0
"""How long repair and making room cede to one ballot: longer than bytes that are there take."""

REASON_CHARS = 480
"""Of all failures of one node together: a group of 64 nodes of 16 ranks stays below 64 KB."""


@dataclass
class Ballot:
    """This node's side of a ballot: what its ranks reported, and until when it may take."""

    decision: r.Decision
    ranks: tuple[int, ...]
    ledger_id: str
    results: dict[int, w.RestoreDone] = field(default_factory=dict)
    files: dict[int, Held] = field(default_factory=dict)
    fetched: dict[int, Fetched] = field(default_factory=dict)
    decide_s: float = 0.0
    news: bool = False
    """This node wrote a group's report, so the ballot may be due."""
    ended: bool = False
    """This node saw its end: a rank that comes late gives back what it took."""


async def restore_first(ctx: JobContext) -> bool:
    """Before work that can wait: until no restore of the job is under way or to be expected, at
    most CEDE_S for one. Training stands still meanwhile; what repair brings back lacks a little
    longer. True: it took a while, so what was known before may be otherwise now."""

    def to_come() -> tuple[int, int] | None:
        state, number = ctx.state, ctx.state.generation.number if ctx.state.generation else 0
        decided = [k for k in state.decisions if k[0] == number and k not in state.closed]
        if decided or any(k[0] == number and c.ballot for k, c in state.closed.items()):
            return max(decided, default=None)
        newest = state.latest()
        return (number, 0) if newest and newest.attempt.generation < number else None

    key = to_come()
    if key is None or key == ctx.ceded:
        return False
    if not await ctx.until(lambda: to_come() != key, CEDE_S):
        ctx.ceded = key
    return True


def over(ctx: JobContext, ballot: Ballot) -> bool:
    """A newer generation ends every older ballot, and another ledger all of the one before."""
    state, generation = ctx.state, ctx.state.generation
    newer = generation is not None and generation.number > ballot.decision.generation
    return newer or state.ledger_id not in ("", ballot.ledger_id)


async def see_closed(ctx: JobContext, roster: Roster, ballot: Ballot, gathering: Gathering) -> None:
    """Hand in this node's report and see the ballot closed."""
    decision = ballot.decision
    key = (decision.generation, decision.ballot)
    timeout_s = await _timeout_s(ctx, decision)
    deadline = ctx.home.now() + timeout_s

    def ended() -> bool:
        return key in ctx.state.closed or over(ctx, ballot)

    def reported() -> bool:
        results = ballot.results
        return (
            ended() or set(results) == set(ballot.ranks) or any(d.failed for d in results.values())
        )

    if await ctx.until(reported, timeout_s) and not ended():
        handing = ctx.home.spawn(f"report {key}", _report(ctx, roster, ballot, gathering, ended))
    else:
        handing = None
    leads, looks = roster.leads(ctx.home.node), 0
    while not ended():
        await pause(ctx, leads, lambda: ended() or ballot.news, looks)
        if ended():
            break
        ballot.news, looks = False, looks + 1
        try:
            await _close(ctx, roster, decision, ctx.home.now() > deadline)
        except CheckpointError as e:  # while the ledger forgot, too: a rebuild may go on with it
            ctx.note("close_later", why=str(e))
            await ctx.until(ended, RETRY_S)
    if handing is not None:
        await asyncio.wait([handing], timeout=ctx.home.config.peer_timeout_s)


def report_of(node: str, ballot: Ballot) -> r.NodeReport:
    """How the ranks of a node fared."""
    failed = [(rank, done) for rank, done in sorted(ballot.results.items()) if done.failed]
    chars = REASON_CHARS // max(1, len(failed))
    return r.NodeReport(
        node=node,
        ranks=ballot.ranks,
        failed=tuple((rank, done.failed[:chars]) for rank, done in failed),
        retryable=all(done.retryable for _, done in failed),
    )


async def _timeout_s(ctx: JobContext, decision: r.Decision) -> float:
    """How long a ballot may take: longer for large shares, at the slowest link allowed for."""
    config, shares = ctx.home.config, [0]
    if decision.commit is not None:
        try:
            groups = await groups_of(ctx, decision.commit.attempt)
            shares += [s.snapshot_bytes for group in groups for s in group.shares]
        except CheckpointError as e:
            ctx.note("ballot_bound", why=str(e))
    return config.restore_timeout_s + max(shares) / config.floor_bytes_per_s


async def _report(
    ctx: JobContext,
    roster: Roster,
    ballot: Ballot,
    gathering: Gathering,
    ended: Callable[[], bool],
) -> None:
    decision, report = ballot.decision, report_of(ctx.home.node, ballot)

    async def write(group: int, pieces: list[w.HandIn]) -> bool:
        record = r.GroupReport(
            generation=decision.generation,
            ballot=decision.ballot,
            group=group,
            reports=tuple(p.report for p in pieces if p.report is not None),
        )
        key = ctx.keys.report(decision.generation, decision.ballot, group)
        fence = ctx.state.same_generation(decision.generation)
        compares = (ctx.state.same_ledger(), fence, absent(key))
        put = Txn(compares, (Put(key, pack(record)),))
        stands = await ctx.transact(put) or await ctx.home.doors.ledger.get(key) is not None
        ballot.news = ballot.news or stands
        ctx.wake()
        return stands

    piece = w.HandIn(
        job=ctx.job,
        ledger_id=ctx.state.ledger_id,
        node=ctx.home.node,
        generation=decision.generation,
        report=report,
        ballot=decision.ballot,
    )
    await hand_in(ctx, roster, piece, gathering, write, ended)


async def _close(ctx: JobContext, roster: Roster, decision: r.Decision, overdue: bool) -> None:
    prefix = ctx.keys.reports_of(decision.generation, decision.ballot)
    listing = await ctx.home.doors.ledger.list(prefix)
    groups = [w.unpack(e.value, r.GroupReport) for e in listing.entries]
    closed = decide_close(decision, groups, roster.generation.pieces, overdue)
    if closed is None:
        return
    closed = structs.replace(closed, by=ctx.home.node)
    key = ctx.keys.closed(decision.generation, decision.ballot)
    fence = ctx.state.same_generation(decision.generation)
    compares = (ctx.state.same_ledger(), fence, absent(key))
    if await ctx.transact(Txn(compares, (Put(key, pack(closed)),))):
        ctx.note("closed", ballot=decision.ballot, close=closed.close, reason=closed.reason)
    await ctx.refresh()
