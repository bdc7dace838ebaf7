"""Room for a restore, made before anybody asks for it.

Intuition: a node that takes a lost one's place needs a fresh file for each of its ranks. Clearing
fresh pages can take longer than bringing the bytes, and nothing has to wait for it: the agent runs
before the trainer has loaded its libraries. So the room is made when the agent starts with a new
store, for every job of which the ledger has a step; repair comes at the same time, so there is room
for the node's part of the shards as well. And it is made when a launch stands whose ranks have no
slots here.

Contract: what is made are free files of the job, within the budget, and given up as soon as
anything else needs the room. Nothing waits for this, and its failure costs time only.
"""

from __future__ import annotations

import asyncio

from p2pckpt import records as r
from p2pckpt.agent.closing import restore_first
from p2pckpt.agent.context import JobContext
from p2pckpt.agent.deciding import groups_of
from p2pckpt.errors import NoRoom


def slot_bytes(share: r.SealedShare, unit: int) -> int:
    """A slot for one rank of a share: a twentieth more than it took, as trainers ask for too."""
    rank_bytes = -(-share.snapshot_bytes // len(share.ranks))
    return max(1, -(-rank_bytes * 105 // (100 * unit))) * unit


def shard_bytes(share: r.SealedShare, k: int, chunk_bytes: int) -> int:
    """At least a shard of a share: of every rank a k-th, in whole chunks."""
    return -(-share.snapshot_bytes // k) + len(share.ranks) * chunk_bytes


async def prepare_files(ctx: JobContext, kind: r.FileKind, size: int, count: int) -> None:
    """Free files of the job, so that there are `count` of a kind and size; fewer without room."""
    try:
        await ctx.home.holdings.prepare(ctx.job, kind, size, count)
    except NoRoom as e:
        ctx.note("prepare_no_room", why=str(e))


async def make_ready(ctx: JobContext, ranks: int) -> None:
    """Free slots for so many ranks of the newest step. Raises LedgerUnavailable, FormatError."""
    if shares := await _newest(ctx):
        size = max(slot_bytes(share, ctx.home.config.slot_round_bytes) for share in shares)
        await _make(ctx, {r.FileKind.SLOT: (size, ranks)})


async def make_store_ready(ctx: JobContext) -> None:
    """Free files for what a node holds of the newest step: the slots of the node with the most
    ranks, and an equal part of the shards. Raises LedgerUnavailable, FormatError.
    """
    shares, commit, config = await _newest(ctx), ctx.state.latest(), ctx.home.config
    if commit is None or not shares:
        return
    layout, nodes = commit.layout, len((await ctx.home.living(config.keepalive_s)).members)
    slot = max(slot_bytes(share, config.slot_round_bytes) for share in shares)
    shard = max(shard_bytes(share, layout.k, config.chunk_bytes) for share in shares)
    slots = max(len(share.ranks) for share in shares)
    shards = -(-len(shares) * layout.shards // max(1, nodes))
    await _make(ctx, {r.FileKind.SLOT: (slot, slots), r.FileKind.SHARD: (shard, shards)})


async def _newest(ctx: JobContext) -> list[r.SealedShare]:
    """The shares of the newest committed step."""
    commit = ctx.state.latest()
    groups = await groups_of(ctx, commit.attempt) if commit is not None else []
    return [share for group in groups for share in group.shares if share.ranks]


async def _make(ctx: JobContext, wanted: dict[r.FileKind, tuple[int, int]]) -> None:
    """Free files of each kind: (bytes, how many); the slots first, which a restore waits for."""
    home = ctx.home
    begun, before = home.now(), sum(held.capacity for held in home.holdings)
    for kind, (size, count) in wanted.items():
        if kind is not r.FileKind.SLOT:
            await restore_first(ctx)
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(prepare_files(ctx, kind, size, count))
    made = sum(held.capacity for held in home.holdings) - before
    if made > 0:
        ctx.note("made_ready", bytes=made, seconds=round(home.now() - begun, 6))
