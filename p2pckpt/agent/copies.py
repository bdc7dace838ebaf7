"""Copies of the ledger's records beside the bytes, and a ledger rebuilt from them.

etcd may be wiped, or set back to an old backup. Then the bytes are still in RAM, but nobody would
know of them, and an empty ledger could even be taken for permission to begin anew. So each agent
keeps, beside its bytes, the ledger id and revision it has seen and a copy of every commit of which
it holds a part; it freezes when the ledger is another or older one (`context.forgot`).

`rebuild` asks all living agents for their copies and writes the records anew: a new ledger id, a
higher generation, the commits with their groups and lineages, and a record that names the ledgers
it replaces, by which frozen agents know that they may go on.

Contract: `decide_rebuild` is pure. The new ledger id is written first, so that every transaction of
the old one fails from then on; nothing is rebuilt over a ledger that changed since it was read. No
byte is deleted by a rebuild.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.context import RETRY_S, UNSURE_S, JobContext
from p2pckpt.agent.deciding import ask_all, groups_of
from p2pckpt.agent.holdings import copy_name
from p2pckpt.agent.polling import poll
from p2pckpt.errors import (
    AmbiguousAnswer,
    CheckpointError,
    FormatError,
    LedgerForgot,
    LedgerUnavailable,
)
from p2pckpt.jobstate import JobState, entry_of
from p2pckpt.ports import Listing, Put, Txn, absent, none_newer, unchanged, value_is
from p2pckpt.save.commit import read_groups
from p2pckpt.wire import pack, unpack

OPERATIONS = 100
"""Of one transaction; etcd allows 128."""

ASK_ALL_S = 0.05
"""A node, between two times that one without a ledger asks all for their copies: each is asked at
most 20 times a second, however many nodes need them."""

BACK_WITHIN_S = 20.0
"""After a wipe an agent has a session again, and has renewed it twice, in less than that."""


async def keep_copies(ctx: JobContext) -> None:
    """For ever: a copy of each commit of which this node holds bytes.

    The group records are read when what the commit retires is retired, so that this one read also
    shows (`JobContext.proves`) that the bytes of that may go. What a repair puts here when the
    ledger is gone is copied from those who keep copies: they may be lost before it is rebuilt.
    """
    while True:
        await ctx.until(lambda: bool(ctx.uncopied()), None)
        await ctx.until(lambda: not _retiring(ctx), RETRY_S + 2 * ctx.news_s())
        await asyncio.sleep(ctx.spread_s())
        for commit in ctx.uncopied():
            try:
                groups = await groups_of(ctx, commit.attempt)
                if len(groups) == commit.groups and commit in ctx.uncopied():  # still
                    copy = _copy(ctx.state, commit, groups)
                    ctx.home.doors.arena.put_document(copy_name(commit.attempt), pack(copy))
                    ctx.wake()
            except CheckpointError as e:
                ctx.note("copy_later", attempt=commit.attempt.key, why=str(e))
        if ctx.uncopied():
            nodes = len(ctx.roster.nodes) if ctx.frozen and ctx.roster is not None else 0
            await ctx.until(lambda: False, max(RETRY_S, nodes * ASK_ALL_S))


def _retiring(ctx: JobContext) -> bool:
    generation = ctx.state.generation
    return generation is not None and len(ctx.state.commits) > generation.keep_last


def _copy(state: JobState, commit: r.Commit, groups: Sequence[r.GroupRecord]) -> r.CommitCopy:
    """A commit with its group records and what began its lineage."""
    ok = (c for c in state.closed.values() if c.close is r.Close.OK)
    closings = (c for c in ok if c.lineage == commit.lineage)
    closed = min(closings, key=lambda c: (c.generation, c.ballot), default=None)
    return r.CommitCopy(commit, tuple(groups), closed)


def _listed(keys: r.JobKeys, listing: Listing) -> list[r.CommitCopy]:
    """The commits that the ledger has itself, from a listing of all of the job: one may be so new
    that nobody has a copy yet. What is unreadable, or of a cleaned job, is left out."""
    below = tuple(e for e in listing.entries if e.key.startswith(keys.state))
    state, copies = JobState.listed(keys, Listing(below, listing.revision)), []
    for commit in state.commits.values():
        prefix = keys.groups_of(commit.attempt)
        entries = [e for e in listing.entries if e.key.startswith(prefix)]
        with contextlib.suppress(FormatError):
            groups = read_groups(entries, commit.attempt)
            if len(groups) == commit.groups and commit.attempt.ledger_id not in state.cleaned:
                copies.append(_copy(state, commit, groups))
    return copies


def remembered(ctx: JobContext) -> w.CopiesReply:
    """What this node remembers of a job; damaged copies are left out, with a note."""
    prefix = copy_name(r.Attempt("", ctx.job, 0, 0, 0)).rsplit("-", 1)[0]
    copies = []
    for name in sorted(ctx.home.doors.arena.documents()):
        packed = ctx.home.doors.arena.document(name) if name.startswith(prefix) else None
        if packed is None:
            continue
        try:
            copies.append(unpack(packed, r.CommitCopy))
        except FormatError as e:
            ctx.note("copy_damaged", name=name, why=str(e))
    seen, state = ctx.seen, ctx.state
    if seen is not None and state.generation is not None and seen.ledger_id == state.ledger_id:
        number = max(seen.generation, state.generation.number)  # the watch may know a newer one
        seen = structs.replace(seen, generation=number)
    return w.CopiesReply(seen, tuple(copies))


@dataclass(frozen=True)
class Rebuild:
    """What a rebuilt ledger will say; ``problem`` "" if it can be."""

    problem: str
    replaces: tuple[str, ...] = ()
    generation: int = 0
    copies: tuple[r.CommitCopy, ...] = ()


def decide_rebuild(
    replies: Mapping[str, w.CopiesReply], listed: Sequence[r.CommitCopy] = ()
) -> Rebuild:
    """Put the agents' memories together, and what the ledger has beyond them (``listed``). Copies
    of one commit must be equal."""
    seen = [reply.seen for reply in replies.values() if reply.seen is not None]
    copies: dict[r.Attempt, r.CommitCopy] = {}
    for node in sorted(replies):
        for copy in replies[node].copies:
            known = copies.setdefault(copy.commit.attempt, copy)
            if (known.commit, known.groups) != (copy.commit, copy.groups):
                return Rebuild(f"copies of step {copy.commit.attempt.step} differ, on {node}")
    if not copies:
        return Rebuild("no living agent has a copy of a commit of this job")
    steps = {(c.commit.lineage, c.commit.attempt.step) for c in copies.values()}
    for copy in listed:
        if (copy.commit.lineage, copy.commit.attempt.step) not in steps:
            copies[copy.commit.attempt] = copy
    ids = {a.ledger_id for a in copies}
    ids |= {ledger_id for s in seen for ledger_id in (s.ledger_id, *s.replaces)}
    number = max([s.generation for s in seen] + [a.generation for a in copies]) + 1
    ordered = sorted(copies.values(), key=lambda c: c.commit.attempt.key)
    return Rebuild("", tuple(sorted(ids)), number, tuple(ordered))


async def rebuild(ctx: JobContext, dry_run: bool) -> w.RebuildReply:
    """Gather, decide, and unless `dry_run` write. Raises CheckpointError if the ledger changes."""
    home = ctx.home
    try:
        await ctx.truth()
    except LedgerForgot as e:
        ctx.note("rebuild_of", why=str(e))
    await _all_back(ctx)
    members = (await home.living()).members
    others = [m for name, m in members.items() if name != home.node]
    replies = await poll(ctx, w.CopiesQuery(ctx.job), w.CopiesReply, others)
    replies[home.node] = remembered(ctx)
    listing = await home.doors.ledger.list(ctx.keys.root)
    held, _ = await ask_all(ctx, w.HeldQuery(ctx.job))  # an older state has what was freed since
    there = {file.attempt for reply in held.values() for file in reply.files}
    listed = [c for c in _listed(ctx.keys, listing) if c.commit.attempt in there]
    plan, new_id = decide_rebuild(replies, listed), home.doors.ids.new()
    problem = _needless(ctx, listing, replies.values()) or plan.problem
    if not problem and not dry_run:
        await _write(ctx, plan, listing, new_id)
    return w.RebuildReply(
        problem=problem,
        asked=tuple(sorted(members)),
        answered=tuple(sorted(replies)),
        ledger_id=new_id,
        generation=plan.generation,
        steps=tuple(c.commit.attempt.step for c in plan.copies),
    )


async def _all_back(ctx: JobContext) -> None:
    """Until every agent that can reach the ledger has a session again: who is asked by its member
    key may be the only one with a copy. Raises LedgerUnavailable."""
    home = ctx.home
    until = home.now() + BACK_WITHIN_S
    while not (home.steady and home.node in (await home.living()).members):
        if home.now() > until:
            why = f"{home.node} does not reach the ledger without gaps, so others may not either"
            raise LedgerUnavailable(f"job {ctx.job}: {why}; run it again")
        await asyncio.sleep(RETRY_S)


def _needless(ctx: JobContext, listing: Listing, replies: Iterable[w.CopiesReply]) -> str:
    entry = entry_of(listing, ctx.keys.ledger_id)
    if entry is None or ctx.seen is None or ctx.frozen:
        return ""
    ledger_id = entry.value.decode()
    frozen = [s for s in (reply.seen for reply in replies) if s and s.back]  # another agent is
    if ledger_id == ctx.seen.ledger_id and all(s.ledger_id != ledger_id for s in frozen):
        return "the ledger is whole as far as any agent has seen it: nothing to rebuild"
    return ""


async def _write(ctx: JobContext, plan: Rebuild, listing: Listing, new_id: str) -> None:
    """The new id and generation first, then the old keys away, then the commits; until then nobody
    goes on (`Rebuilt.unfinished`), and a rebuild that breaks off is done again from the start."""
    keys, home = ctx.keys, ctx.home
    entry = entry_of(listing, keys.ledger_id)
    last = plan.copies[-1].commit
    generation = r.Generation(
        number=plan.generation,
        nonce=new_id,
        run_token="rebuilt",
        world_size=last.world_size,
        roster_digest="rebuilt",
        pieces=0,
        layout=last.layout,
        keep_last=min(len(plan.copies), r.MAX_KEEP_LAST),  # what goes, the job decides
    )
    whole = r.Rebuilt(plan.replaces, home.node, len(plan.copies))
    unfinished = structs.replace(whole, unfinished=True)
    first = Txn(
        (
            absent(keys.ledger_id) if entry is None else unchanged(entry),
            none_newer(keys.commits, listing.revision),  # nor did another rebuild get ready
        ),
        (
            Put(keys.ledger_id, new_id.encode()),
            Put(keys.rebuilt, pack(unfinished)),
            Put(keys.generation, pack(generation)),
            Put(keys.floor, f"{plan.generation:010d}.{0:010d}".encode()),
        ),
    )
    if not await _begun(ctx, first, new_id):
        why = "its ledger changed during the rebuild, or did not take it"
        raise CheckpointError(f"job {ctx.job}: {why}; run it again")
    fence = (value_is(keys.ledger_id, new_id.encode()),)
    kept = {put.key for put in first.puts}
    stale = [
        e.key for e in listing.entries if e.key not in kept and not e.key.startswith(keys.cleanings)
    ]
    for at in range(0, len(stale), OPERATIONS):
        await home.doors.ledger.transact(Txn(fence, (), tuple(stale[at : at + OPERATIONS])))
    for put_all in (*_records(ctx, plan.copies), [Put(keys.rebuilt, pack(whole))]):
        if await home.doors.ledger.transact(Txn(fence, tuple(put_all))) is None:
            raise CheckpointError(f"job {ctx.job}: another rebuild took over; look at `status`")
    ctx.note("rebuilt", generation=plan.generation, commits=len(plan.copies))


async def _begun(ctx: JobContext, first: Txn, new_id: str) -> bool:
    """Put the first records; when there is no answer, wait until they came or cannot come any more.

    A rebuild that gives up, and whose first transaction comes late, would leave a ledger that seems
    whole. Raises AmbiguousAnswer if the ledger cannot be read after that time, LedgerUnavailable.
    """
    ledger = ctx.home.doors.ledger
    try:
        return await ledger.transact(first) is not None
    except AmbiguousAnswer as e:
        unanswered, sure_at = e, ctx.home.now() + UNSURE_S
    while True:
        late = ctx.home.now() > sure_at
        try:
            entry = await ledger.get(ctx.keys.ledger_id)
            if entry is not None and entry.value.decode() == new_id:
                return True
            if late:
                return False
        except LedgerUnavailable:
            if late:
                raise unanswered from None
        await asyncio.sleep(RETRY_S)


def _records(ctx: JobContext, copies: Sequence[r.CommitCopy]) -> list[list[Put]]:
    """The puts of each commit, and of the lineage it belongs to."""
    keys, out = ctx.keys, []
    for copy in copies:
        commit, closed = copy.commit, copy.closed
        puts = [Put(keys.group(commit.attempt, g.group), pack(g)) for g in copy.groups]
        puts.append(Put(keys.commit(commit.lineage, commit.attempt.step), pack(commit)))
        if closed is None:
            closed = r.Closed(
                generation=commit.attempt.generation,
                ballot=0,
                close=r.Close.OK,
                by=ctx.home.node,
                reason="rebuilt",
                lineage=commit.lineage,
            )
        closed = structs.replace(closed, reason="rebuilt from agents' copies")
        puts.append(Put(keys.closed(closed.generation, closed.ballot), pack(closed)))
        out.append(puts)
    return out
