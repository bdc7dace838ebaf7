"""One rank's snapshot from the others into a file of this node: for restore, repair and export.

    who holds it now -> fetch, verify, decode (restore/pipeline) -> a SLOT that stays, or a STAGE

Contract: a SLOT comes out WHOLE, with its manifest beside it: it is the rank's own copy on this
node from then on, and the only good one, though restore, repair and scrub may bring it at once: two
of them would take the place of a save. A STAGE is the caller's to give back. If anything fails, no
file is left behind.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.bucket import may_be_stored, offloaded_share, recall
from p2pckpt.agent.context import Home, JobContext
from p2pckpt.agent.deciding import ask, ask_all, groups_of, recorded
from p2pckpt.agent.holdings import Held, Want, document_name
from p2pckpt.ports import Region
from p2pckpt.restore.fetch import Fetching
from p2pckpt.restore.locate import Facts, Sources, sources_of
from p2pckpt.restore.pipeline import Fetched, Stage, restore_rank
from p2pckpt.traffic import Traffic
from p2pckpt.wire import pack


async def fetching(
    ctx: JobContext,
    attempt: r.Attempt,
    share: r.SealedShare,
    rank: int,
    traffic: Traffic = Traffic.REPAIR,
) -> Fetching:
    """The fetch of one rank from those who say that they hold it now: the nodes that its record
    names; all others too if these have not enough, or what they have is bad. RESTORE: a
    job stands still for it. Raises LedgerUnavailable."""
    query = w.HeldQuery(job=ctx.job, attempt=attempt)
    members = (await ctx.home.living(ctx.home.config.keepalive_s)).members
    answers, _ = await ask(ctx, query, recorded(share, members.values()))
    sources = sources_of(share, attempt, Facts(ctx.state, answers, (), {}, False))
    home = ctx.home
    job = Fetching(rank, share, attempt, sources, members, home.doors, home.config, traffic)
    commit = ctx.state.committed(attempt)
    k = commit.layout.k if commit is not None else len(share.holders)

    async def widen() -> Sources:
        everybody, _ = await ask_all(ctx, query)
        return sources_of(share, attempt, Facts(ctx.state, everybody, (), {}, False))

    if rank in sources.slots or len(sources.shards) >= k:
        job.widen = widen
    else:
        job.sources = await widen()
    job.stored = partial(_stored, ctx, attempt, share.node)
    return job


async def _stored(ctx: JobContext, attempt: r.Attempt, owner: str) -> r.ShareObjects | None:
    """Where a share lies in the object store, also if a rebuilt ledger does not know that it does:
    RAM seemed to have it, so nobody asked the store when this step was chosen."""
    commit = ctx.state.committed(attempt)
    if commit is not None and may_be_stored(ctx.state, attempt):
        await recall(ctx, commit, await groups_of(ctx, attempt))
    return await offloaded_share(ctx, attempt, owner)


async def bring(home: Home, job: Fetching, kind: r.FileKind) -> tuple[Held, Fetched]:
    """Fetch the rank into a new file of `kind`, SLOT or STAGE. Raises RestoreFailed, NoRoom."""
    holdings = home.holdings
    taken: list[Held] = []

    async def room(size: int) -> Region:
        want = Want(kind, job.attempt, home.node, job.rank, max(1, size))
        if not taken:
            taken.append(await holdings.take(want, object()))
        return holdings.region(taken[0], 0, size)

    try:
        with home.doors.telemetry.stage("bring"):
            async with staging(home, job) as scratch:
                fetched = await restore_rank(job, room, scratch)
        return _kept(home, job, taken[0], fetched), fetched
    except BaseException:
        for held in taken:
            give_back(home, held)
        raise


def _kept(home: Home, job: Fetching, held: Held, fetched: Fetched) -> Held:
    """The file with a rank's snapshot: WHOLE, if it is a slot, or the one that was there first."""
    holdings = home.holdings
    if held.kind is r.FileKind.SLOT:
        other = holdings.find(job.attempt, held.kind, job.rank)
        if other and not other.bad and other.manifest_digest == job.share.manifest_digest:
            give_back(home, held)  # somebody else brought it meanwhile
            return other
        name = document_name(job.share.manifest_digest)
        home.doors.arena.put_document(name, pack(fetched.manifest))
        holdings.seal(held, fetched.target.length, job.share.manifest_digest)
    else:
        held.length = fetched.target.length
        holdings.writer_done(held)
    return held


@asynccontextmanager
async def staging(home: Home, job: Fetching) -> AsyncIterator[Stage]:
    """Scratch space for one fetch; it goes when the block ends."""
    stages: list[Held] = []

    async def scratch(size: int) -> Region:
        want = Want(r.FileKind.STAGE, job.attempt, home.node, job.rank, max(1, size))
        stages.append(await home.holdings.take(want))
        return home.holdings.region(stages[-1], 0, size)

    try:
        yield scratch
    finally:
        for stage in stages:
            home.holdings.release(stage)


def give_back(home: Home, held: Held) -> None:
    """A file that nobody writes or reads any more."""
    home.holdings.release(held)
    home.holdings.writer_done(held)
