"""Which ranks of a generation live on a node: told by its agent, read by who would replace them.

    agent --report, under its lease--> trainers/GENERATION/NODE --> who would replace them

A report that stays too long holds up the next launch; one that is wrong lets two launches run. It
goes with the lease, and a newer one takes its place as soon as a rank dies.

Contract: a report is written over exactly what was there. A transaction that was not answered may
be carried out seconds later, and must not bring back the living whose death was told meanwhile. It
is fenced by the ledger that its launch is of, as a job that was cleaned counts generations anew. A
frozen agent tells too: this is no news of the job, and clean-up waits for the death of its ranks.
"""

from __future__ import annotations

from collections.abc import Collection

from p2pckpt import records as r
from p2pckpt.agent.context import JobContext, Roster
from p2pckpt.errors import LedgerUnavailable
from p2pckpt.ports import Compare, Put, Txn, absent, unchanged
from p2pckpt.wire import pack, unpack


async def tell_living(
    ctx: JobContext, ledger_id: str, generation: int, ranks: Collection[int]
) -> None:
    """Tell the ledger which ranks of a generation live here, under this agent's lease; nothing, if
    the job was cleaned since.

    ``ranks`` is the caller's own, and looked at anew for each try: some may die meanwhile, and be
    told as dead already. Raises LedgerUnavailable if it is not certain that the ledger knows.
    """
    home, key = ctx.home, ctx.keys.trainers(generation, ctx.home.node)
    state = ctx.state
    if ledger_id not in (state.ledger_id, *(state.rebuilt.replaces if state.rebuilt else ())):
        return
    if home.session is None:
        raise LedgerUnavailable(f"{home.node}: no session with the ledger")
    session = home.session

    async def write(over: Compare) -> bool:
        record = r.LivingTrainers(node=home.node, ranks=tuple(sorted(ranks)))
        txn = Txn((state.same_ledger(), over), (Put(key, pack(record), session),))
        return await ctx.transact(txn, though_frozen=True)

    done = await write(absent(key))
    if not done and (entry := await home.doors.ledger.get(key)) is not None:
        done = await write(unchanged(entry))
    if not done:
        raise LedgerUnavailable(f"{key}: the report was not written")


async def read_living(
    ctx: JobContext, roster: Roster | None
) -> tuple[dict[str, r.LivingTrainers], int]:
    """The reports on a generation by node, and the revision at which they were read."""
    if roster is None:
        return {}, 0
    prefix = ctx.keys.trainers(roster.generation.number, "")
    listing = await ctx.home.doors.ledger.list(prefix)
    reports = [unpack(e.value, r.LivingTrainers) for e in listing.entries]
    return {report.node: report for report in reports}, listing.revision
