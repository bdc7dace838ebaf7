"""What the ledger has in this node's name, and is not so.

Intuition: only the node itself writes its joins, its reports of living ranks and its readers'
records, under its lease. A ledger that was set back a little, and by now is ahead again, may have
some back that were taken away; their lease lives, so nobody else can tell them from true ones. They
would hold up the next launch, or a clean, for ever. So whoever is held up asks the node to look.

Contract: a record goes, or is corrected, only if nobody wrote it since it was read, and it was read
before it was judged. What is true stays as it is. Nothing is taken away because it is unknown to a
job that is not followed yet.
"""

from __future__ import annotations

from p2pckpt import records as r
from p2pckpt.agent.context import JobContext, Roster
from p2pckpt.agent.launch import Launch, Launches
from p2pckpt.agent.reading import look
from p2pckpt.ports import Put, Txn, unchanged
from p2pckpt.wire import pack, unpack


async def look_at_own(ctx: JobContext, launches: Launches) -> None:
    """Take away or correct what is not so. Raises LedgerUnavailable, LedgerForgot, FormatError."""
    if not ctx.following:
        return
    await _joins(ctx, launches)
    await _living(ctx, launches)
    await look(ctx)


async def _joins(ctx: JobContext, launches: Launches) -> None:
    """A join is of a launch that forms with ranks of this node."""
    prefix = f"{ctx.keys.root}join/"
    for entry in (await ctx.home.doors.ledger.list(prefix)).entries:
        token, _, node = entry.key[len(prefix) :].partition("/")
        launch = launches.launches.get(token)
        forms = launch is not None and launch.generation is None and launch.trainers
        if node != ctx.home.node or forms:
            continue
        if await ctx.transact(Txn((unchanged(entry),), deletes=(entry.key,)), True):
            ctx.note("join_removed", token=token)


async def _living(ctx: JobContext, launches: Launches) -> None:
    """A report names ranks of the present generation that live."""
    roster, node, session = await ctx.load_roster(), ctx.home.node, ctx.home.session
    found = roster.find(node) if roster else None
    if roster is None or found is None or session is None:
        return
    key = ctx.keys.trainers(roster.generation.number, node)
    if (entry := await ctx.home.doors.ledger.get(key)) is None:
        return
    of_it = [one for one in launches.launches.values() if _is(one, roster, found[1].join_id)]
    ranks = {rank for launch in of_it for rank in launch.trainers}
    told = set(unpack(entry.value, r.LivingTrainers).ranks)
    if told <= ranks:
        return
    record = r.LivingTrainers(node=node, ranks=tuple(sorted(told & ranks)))
    compares = (ctx.state.same_ledger(), unchanged(entry))
    if await ctx.transact(Txn(compares, (Put(key, pack(record), session),)), True):
        ctx.note("death_told", ranks=sorted(told - ranks))


def _is(launch: Launch, roster: Roster, join_id: str) -> bool:
    """Is it the launch of this generation, or about to hear that it is?"""
    if launch.generation is None:
        return launch.join_id == join_id
    return launch.generation == roster.generation
