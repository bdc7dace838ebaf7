"""One decision a ballot: ask the ledger and every living agent, decide, write it down.

The agent of rank 0 does it at once; the others wait for its record, and take over only if it does
not come. What is decided is the pure `restore/locate.py`; here are its facts: a fresh listing, the
group records of the candidates, and what each living store says it holds.

Contract: create-if-absent, fenced by the generation; a decision that moves no bytes (nothing there,
or not provable) closes its ballot in the same transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.bucket import ask_bucket, offloaded_groups
from p2pckpt.agent.context import RETRY_S, JobContext, Roster
from p2pckpt.agent.holdings import copy_name
from p2pckpt.agent.polling import poll
from p2pckpt.errors import FormatError, LedgerUnavailable, SourcesAway, StaleGenerationError
from p2pckpt.ports import Put, Txn, absent
from p2pckpt.restore.locate import Facts, Finding, candidates, decide_restore, lineage_after
from p2pckpt.save.commit import read_groups
from p2pckpt.wire import pack, unpack


async def decision_of(
    ctx: JobContext, roster: Roster, number: int, step: int | None
) -> r.Decision | None:
    """A ballot's decision, made by this node if nobody else does. None if it closed."""
    generation = roster.generation.number
    config, started = ctx.home.config, ctx.home.now()
    key = (generation, number)

    def known() -> bool:
        return key in ctx.state.decisions or key in ctx.state.closed

    if not roster.leads(ctx.home.node):
        takeover_s = config.decide_wait_s + 2 * config.peer_timeout_s
        await ctx.until(known, takeover_s + ctx.turn_s())
    while not known():
        check_current(ctx, generation)
        patient = ctx.home.now() - started < config.decide_wait_s
        try:
            finding = await _find(ctx, step, roster, patient)
            if finding.choice is not None:
                await _put(ctx, roster, number, finding)
            else:
                ctx.note("restore_waits", why=finding.reason)
                await ctx.until(known, RETRY_S)
        except (LedgerUnavailable, FormatError) as e:
            ctx.note("restore_waits", why=str(e))
            await asyncio.sleep(RETRY_S)
    return ctx.state.decisions.get(key)


async def _find(ctx: JobContext, step: int | None, roster: Roster, patient: bool) -> Finding:
    state = await ctx.refresh()
    groups: dict[str, list[r.GroupRecord]] = {}
    for commit in candidates(state, step):
        try:
            groups[commit.attempt.key] = await groups_of(ctx, commit.attempt)
        except FormatError:
            groups[commit.attempt.key] = []  # the step cannot be proven; the note says why
    answers, silent = await ask_all(ctx, w.HeldQuery(job=ctx.job))
    facts = Facts(state, answers, silent, groups, patient, early=not ctx.home.steady)
    facts = await ask_bucket(ctx, facts, candidates(state, step))
    return decide_restore(facts, step, roster.generation.world_size)


def check_current(ctx: JobContext, generation: int) -> None:
    """Raises StaleGenerationError when a newer generation began."""
    current = ctx.state.generation
    if current is None or current.number != generation:
        raise StaleGenerationError(f"generation {generation} is over")


async def groups_of(ctx: JobContext, attempt: r.Attempt) -> list[r.GroupRecord]:
    """The group records of an attempt; where the ledger's are damaged, or gone with it, the copies
    kept beside the bytes, here or on another node. Raises FormatError if they are damaged and there
    are none."""
    asked_at = ctx.home.now()
    listing = await ctx.home.doors.ledger.list(ctx.keys.groups_of(attempt))
    try:
        groups = read_groups(listing.entries, attempt)
    except FormatError as e:
        ctx.note("group_damaged", attempt=attempt.key, why=str(e))
        if copies := copied_groups(ctx, attempt) or await _copies_elsewhere(ctx, attempt):
            return copies
        raise
    commit = ctx.state.committed(attempt)
    if commit is not None and len(groups) == commit.groups:
        ctx.proves(listing.revision, asked_at)  # an older ledger has no such records
        ctx.groups = (attempt, groups)
    elif commit is not None and ctx.frozen:
        known = ctx.groups[1] if ctx.groups is not None and ctx.groups[0] == attempt else []
        copies = known or copied_groups(ctx, attempt) or await _copies_elsewhere(ctx, attempt)
        return copies or groups
    return groups


async def groups_anywhere(ctx: JobContext, commit: r.Commit) -> list[r.GroupRecord]:
    """All group records of a commit: where `groups_of` finds too few, those in the object store.

    Raises FormatError if they are damaged, and SourcesAway if some are gone, and the store has not
    the step; what the store raises, if it is asked.
    """
    attempt, damage = commit.attempt, None
    groups: list[r.GroupRecord] = []
    try:
        groups = await groups_of(ctx, attempt)
    except FormatError as e:
        damage = e
    if len(groups) == commit.groups:
        return groups
    if stored := await offloaded_groups(ctx, attempt):
        return stored
    if damage is not None:
        raise damage
    found = f"{len(groups)} of {commit.groups} group records are there"
    raise SourcesAway(f"step {attempt.step}: {found}, so nobody knows where all its bytes are")


def copied_groups(ctx: JobContext, attempt: r.Attempt) -> list[r.GroupRecord]:
    """An attempt's group records as they lie beside this node's bytes; [] if they do not."""
    packed = ctx.home.doors.arena.document(copy_name(attempt))
    if packed is None:
        return []
    try:
        copy = unpack(packed, r.CommitCopy)
    except FormatError:
        return []
    return list(copy.groups) if copy.commit.attempt == attempt else []


async def _copies_elsewhere(ctx: JobContext, attempt: r.Attempt) -> list[r.GroupRecord]:
    """The group records of a commit as others keep them beside their bytes; [] if nobody does."""
    commit, members = ctx.state.committed(attempt), (await ctx.home.living()).members
    replies = await poll(ctx, w.CopiesQuery(ctx.job), w.CopiesReply, members.values())
    for copy in (copy for node in sorted(replies) for copy in replies[node].copies):
        if copy.commit == commit:
            return list(copy.groups)
    return []


async def ask_all(ctx: JobContext, query: w.HeldQuery) -> tuple[dict[str, w.HeldReply], list[str]]:
    """What every living agent holds, and which of them did not answer."""
    return await ask(ctx, query, (await ctx.home.living()).members.values())


async def ask(
    ctx: JobContext, query: w.HeldQuery, members: Iterable[r.Member]
) -> tuple[dict[str, w.HeldReply], list[str]]:
    """What some agents hold, and which of them did not answer."""
    asked = {member.node: member for member in members}
    heard = await poll(ctx, query, w.HeldReply, asked.values())
    answers = {n: reply for n, reply in heard.items() if reply.store_id == asked[n].store_id}
    return answers, sorted(set(asked) - set(answers))


def recorded(share: r.SealedShare, members: Iterable[r.Member]) -> list[r.Member]:
    """Those members whose stores the share's record names: mostly all that have any of it."""
    stores = {share.store_id, *share.holders}
    return [member for member in members if member.store_id in stores]


async def _put(ctx: JobContext, roster: Roster, number: int, finding: Finding) -> None:
    """Record the decision; one that moves no bytes closes its ballot in the same breath."""
    generation = roster.generation.number
    assert finding.choice is not None
    lineage, base = ctx.home.doors.ids.new(), None
    if finding.commit is not None:
        lineage, base = lineage_after(ctx.state, finding.commit, lineage)
    decision = r.Decision(
        generation=generation,
        ballot=number,
        choice=finding.choice,
        by=ctx.home.node,
        reason=finding.reason[:500],
        commit=finding.commit,
        lineage=lineage,
        base=base,
        stored=finding.stored,
    )
    key = ctx.keys.decision(generation, number)
    puts = [Put(key, pack(decision))]
    if finding.choice is not r.Choice.RESTORE:
        ended = finding.choice is r.Choice.NOTHING
        closed = r.Closed(
            generation=generation,
            ballot=number,
            close=r.Close.OK if ended else r.Close.RETRY,
            by=ctx.home.node,
            reason=decision.reason,
            choice=decision.choice,
            lineage=lineage if ended else "",
        )
        puts.append(Put(ctx.keys.closed(generation, number), pack(closed)))
    fence = ctx.state.same_generation(generation)
    compares = (ctx.state.same_ledger(), fence, absent(key))
    if await ctx.transact(Txn(compares, tuple(puts))):
        ctx.note("decided", ballot=number, choice=decision.choice, reason=decision.reason)
    await ctx.refresh()
