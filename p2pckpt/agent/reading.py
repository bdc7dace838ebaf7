"""A reader's record: the step that this node reads, or is to upload, is not retired meanwhile.

    hold (before the first byte) -> read -> let_go (until it is certain) -> look_again, if it blocks

The record is under the node's lease, so it ends with the node. A new session of a living agent has
to put it anew: who holds for long asks `holds` now and then.

Contract: after `hold` the record stood, put by a transaction that compares what the step is read
from. After `let_go` it is gone for good, also if the put was not answered and is carried out late.
A ledger that was set back a little, and by now is ahead again, may have records back that were let
go; their lease lives, so they would keep their steps for ever. Whoever let a record of a step go
that is due and stays looks for it, and takes it away if nobody put it again since it was read.
"""

from __future__ import annotations

from collections.abc import Container

from p2pckpt import records as r
from p2pckpt.agent.context import RETRY_S, UNSURE_S, JobContext, Reading
from p2pckpt.agent.retire import decide_retire
from p2pckpt.errors import CheckpointError, LedgerUnavailable, SourcesAway
from p2pckpt.ports import Put, Txn, absent, present, unchanged
from p2pckpt.save.offload import decide_retention

LOOK_EVERY_S = 30.0
"""Between two looks for records that were let go and block a step that is due to be retired."""

REMEMBERED = 256
"""Records that were let go, of one job: newer ones push older ones out."""


def reads(ctx: JobContext, attempt: r.Attempt, who: str) -> bool:
    """Was a record put, and not let go since?"""
    reading = ctx.readings.get(_key(ctx, attempt, who))
    return reading is not None and reading.session is not None


def holds(ctx: JobContext, attempt: r.Attempt, who: str) -> bool:
    """Does the record stand, under this node's present session? Not while it is put."""
    reading = ctx.readings.get(_key(ctx, attempt, who))
    if reading is None or reading.session is None or reading.turn.locked():
        return False
    return _current(ctx, reading)


async def hold(ctx: JobContext, attempt: r.Attempt, who: str) -> None:
    """Put the record of one reader of this node. ``who``: what follows the node's name in its key.

    Raises SourcesAway if the step was retired or the record cannot be put, LedgerUnavailable,
    LedgerForgot. Whatever it raises, the reader lets go in the end.
    """
    key, state = _key(ctx, attempt, who), ctx.state
    reading = ctx.readings.pop(key, None) or Reading(attempt)
    ctx.readings[key] = reading  # the newest
    async with reading.turn:
        if (session := ctx.home.session) is None:
            raise LedgerUnavailable(f"{ctx.home.node}: no session with the ledger now")
        if reading.session is not None and _current(ctx, reading):
            return
        there = present(ctx.keys.offloaded(attempt))
        if state.committed(attempt) is not None:
            there = absent(ctx.keys.retired(attempt))
        compares = (state.same_ledger(), state.not_cleaned(), there)
        reading.session = session
        stands = False
        try:
            stands = await ctx.transact(Txn(compares, (Put(key, b"1", session),)))
            if not stands:
                reading.unsure_until = ctx.home.now() + UNSURE_S
                entry = await ctx.home.doors.ledger.get(key)  # and not of a session before
                stands = entry is not None and entry.mod_revision > session.revision
        finally:
            if not stands:
                reading.session = None
    if not stands:
        why = f"step {attempt.step} was retired, or no reader's record of it could be put"
        raise SourcesAway(ctx.because(why))


async def let_go(ctx: JobContext, attempt: r.Attempt, who: str) -> None:
    """Take the record away, again and again until it is certain; not one that is put anew."""
    key = _key(ctx, attempt, who)
    if (reading := ctx.readings.get(key)) is None:
        return
    reading.session = None
    unsure = reading.unsure_until > ctx.home.now()
    await _remove(ctx, key, reading)
    if unsure:
        await ctx.until(lambda: False, UNSURE_S)
        await _remove(ctx, key, reading)
    left = [k for k, one in ctx.readings.items() if one.session is None]
    for old in left[: max(0, len(left) - REMEMBERED)]:
        del ctx.readings[old]


async def _remove(ctx: JobContext, key: str, reading: Reading) -> None:
    while reading.session is None and ctx.readings.get(key, reading) is reading:
        try:
            async with reading.turn:
                if reading.session is not None or await ctx.transact(Txn(deletes=(key,))):
                    return
        except CheckpointError as e:
            ctx.note("reader_stays", why=str(e))
        await ctx.until(lambda: False, RETRY_S)


async def look_again(ctx: JobContext) -> None:
    """For ever: records that were let go do not block what is due."""
    while True:
        await ctx.until(lambda: False, LOOK_EVERY_S)
        try:
            await look(ctx, _due(ctx))
        except CheckpointError as e:
            ctx.note("reader_stays", why=str(e))


async def look(ctx: JobContext, among: Container[r.Attempt] | None = None) -> None:
    """Take away records, of some attempts or all, that were let go and are there. Raises
    LedgerUnavailable, LedgerForgot."""
    for key, reading in list(ctx.readings.items()):
        if reading.session is None and (among is None or reading.attempt in among):
            await _look(ctx, key, reading)


def _due(ctx: JobContext) -> set[r.Attempt]:
    """Attempts that nothing but a reader keeps, in RAM or in the object store."""
    state, generation = ctx.state, ctx.state.generation
    gone = decide_retire(state, generation.keep_last) if generation else []
    stored = decide_retention(state, ctx.home.config.offload_keep)
    found = {due.commit.attempt for due in gone}
    return found | {removal.offloaded.commit.attempt for removal in stored}


async def _look(ctx: JobContext, key: str, reading: Reading) -> None:
    async with reading.turn:
        entry = await ctx.home.doors.ledger.get(key)
        if entry is None or reading.session is not None or ctx.readings.get(key) is not reading:
            return
        if await ctx.transact(Txn((unchanged(entry),), deletes=(key,))):
            ctx.note("reader_removed", step=reading.attempt.step, key=key)


def _key(ctx: JobContext, attempt: r.Attempt, who: str) -> str:
    return f"{ctx.keys.readers(attempt)}{ctx.home.node}{who}"


def _current(ctx: JobContext, reading: Reading) -> bool:
    return reading.session == ctx.home.session
