"""Trainers join -> one generation of the job, the fence for everything before it.

A launch is a set of processes with one run token. Each node's agent lists its ranks of the launch
in the ledger, under its lease; when all ranks are there, any agent (that of rank 0 first) installs
number + 1 by one compare-and-swap on the generation record. A launch takes the place of an older
one only if that one's trainers are dead by their agents' word, or the agents are gone for longer
than their grace; else it is refused and told who lives.

Contract: `decide_install` is pure. The swap compares the ledger id, the generation that was read,
and that no trainer report of it changed since; so two launches cannot both win, and a trainer that
comes back in between is seen. Roster pieces are written before the record that names them.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.context import RETRY_S, JobContext, Roster
from p2pckpt.errors import (
    CheckpointError,
    GenerationHeld,
    LedgerUnavailable,
    NotJoined,
    UsageError,
)
from p2pckpt.ports import Compare, Put, TrainerId, Txn, absent, none_newer, present
from p2pckpt.wire import pack, unpack

POLL_LEAD_S = 0.05
POLL_OTHERS_S = 0.5


@dataclass(frozen=True)
class Installing:
    """What to do about a launch: install it, wait for something, or refuse it."""

    install: bool
    refuse: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Waited:
    """How long this launch has waited, and how long each roster node has had no report.

    ``grace_s``: an absent agent may return within it. ``holder_s``: ranks that are reported alive
    may be dead on a node that is cut off, so the launch waits for as long as their report's lease
    can last before it is refused.
    """

    launch_s: float
    absent_s: Mapping[str, float]
    grace_s: float
    holder_s: float


@dataclass
class Launch:
    """The ranks of one run token that joined on this node; ``joined`` ends with a generation."""

    call: w.TrainerJoin
    trainers: dict[int, TrainerId] = field(default_factory=dict)
    join_id: str = ""
    generation: r.Generation | None = None
    began_at: float = 0.0
    absent_since: dict[str, float] = field(default_factory=dict)


def decide_install(
    joins: Sequence[r.Join],
    roster: Roster | None,
    reports: Mapping[str, r.LivingTrainers],
    waited: Waited,
) -> Installing:
    """Judge a launch from all joins of its run token and the reports on the generation it replaces.

    Raises UsageError for a launch that disagrees with itself, naming the nodes.
    """
    first = joins[0]
    for join in joins[1:]:
        if (join.world_size, join.layout, join.keep_last) != (
            first.world_size,
            first.layout,
            first.keep_last,
        ):
            raise UsageError(
                f"launch: {first.node} has world size {first.world_size}, layout {first.layout}, "
                f"keep_last {first.keep_last}; {join.node} has {join.world_size}, {join.layout}, "
                f"{join.keep_last}: all ranks must agree"
            )
    ranks = sorted(rank for join in joins for rank in join.ranks)
    twice = {rank for rank in ranks if ranks.count(rank) > 1}
    if twice:
        nodes = sorted(j.node for j in joins if twice & set(j.ranks))
        raise UsageError(f"launch: ranks {sorted(twice)[:8]} joined twice, on {nodes}")
    if strange := [rank for rank in ranks if not 0 <= rank < first.world_size]:
        raise UsageError(f"launch: ranks {strange[:8]}, needs 0 to {first.world_size - 1}")
    if missing := sorted(set(range(first.world_size)) - set(ranks)):
        return Installing(False, reason=f"ranks {missing[:16]} have not joined")
    number = roster.generation.number if roster else 0
    for node in roster.nodes if roster else ():
        report = reports.get(node.node)
        if report is not None and report.ranks:
            if any(join.takeover for join in joins):
                continue
            alive = f"ranks {list(report.ranks)[:8]} of generation {number} live on {node.node}"
            if waited.launch_s < waited.holder_s:
                return Installing(False, reason=alive)
            return Installing(False, True, f"{alive}; end them, or pass takeover=True")
        if report is None and waited.absent_s.get(node.node, 0.0) < waited.grace_s:
            return Installing(False, reason=f"the agent of {node.node} is gone, within its grace")
    return Installing(True, reason="all ranks joined")


def roster_pieces(joins: Sequence[r.Join]) -> list[r.RosterPiece]:
    """The roster of a launch: nodes by lowest rank, in pieces of 64."""
    nodes = [
        r.RosterNode(
            node=j.node,
            store_id=j.store_id,
            session=j.session,
            join_id=j.join_id,
            ranks=tuple(sorted(j.ranks)),
        )
        for j in sorted(joins, key=lambda j: min(j.ranks))
    ]
    n = r.GROUP_NODES
    return [r.RosterPiece(nodes=tuple(nodes[i : i + n])) for i in range(0, len(nodes), n)]


class Launches:
    """The launches that form on this node, for one job."""

    def __init__(self, ctx: JobContext) -> None:
        self.ctx = ctx
        self.launches: dict[str, Launch] = {}

    async def join(self, trainer: TrainerId, call: w.TrainerJoin) -> Launch:
        """A rank joins; returns when its generation stands.

        Raises NotJoined naming the missing ranks, GenerationHeld naming the holder, UsageError.
        """
        ctx, home = self.ctx, self.ctx.home
        launch = self.launches.get(call.run_token)
        stands = launch is not None and launch.generation is not None
        if launch is not None and stands and launch.trainers.get(call.rank) == trainer:
            return launch  # it stood up between two asks
        if launch is None or stands:
            launch = self.launches[call.run_token] = Launch(call, began_at=home.now())
        known = (launch.call.world_size, launch.call.layout, launch.call.keep_last)
        if (call.world_size, call.layout, call.keep_last) != known:
            raise UsageError(
                f"rank {call.rank}: world size, layout, keep_last {call.world_size}, {call.layout},"
                f" {call.keep_last} differ from {known} of its launch"
            )
        check_call(call)
        if launch.trainers.get(call.rank, trainer) != trainer:
            raise UsageError(f"rank {call.rank} joined twice, as pid {launch.trainers[call.rank]}")
        if call.rank not in launch.trainers:  # else it asks again, after a bounded wait
            launch.trainers[call.rank] = trainer
            launch.join_id = home.doors.ids.new()
        deadline = home.now() + min(call.timeout_s, home.config.join_timeout_s)
        waiting_for = "the ledger"
        while launch.generation is None:
            if home.now() >= deadline:
                raise NotJoined(f"job {ctx.job}, rank {call.rank}: waited for {waiting_for}")
            try:
                waiting_for = await self._advance(call, launch)
            except LedgerUnavailable as e:
                waiting_for = str(e)
                await asyncio.sleep(RETRY_S)
        return launch

    def resume(
        self, generation: r.Generation, entry: r.RosterNode, rank: int, trainer: TrainerId
    ) -> Launch:
        """The standing launch of a generation, after a restart of this agent."""
        launch = self.launches.get(generation.run_token)
        if launch is None or launch.generation != generation:
            call = w.TrainerJoin(
                job=self.ctx.job,
                rank=rank,
                world_size=generation.world_size,
                run_token=generation.run_token,
                layout=generation.layout,
                keep_last=generation.keep_last,
            )
            launch = Launch(call, join_id=entry.join_id, generation=generation)
            self.launches[generation.run_token] = launch
        launch.trainers[rank] = trainer
        return launch

    async def _advance(self, call: w.TrainerJoin, launch: Launch) -> str:
        """One look at a forming launch; what it waits for."""
        ctx = self.ctx
        await ctx.found()
        if await self._adopted(launch):
            return ""
        await self._announce(call, launch)
        joins = await self._joins(call.run_token)
        roster = await ctx.load_roster()
        fence = self._fence(roster)  # of the very generation that is judged
        reports, reports_revision = await self._reports(roster)
        now = ctx.home.now()
        for node in roster.nodes if roster else ():
            if node.node in reports:
                launch.absent_since.pop(node.node, None)
            else:
                launch.absent_since.setdefault(node.node, now)
        config = ctx.home.config
        waited = Waited(
            now - launch.began_at,
            {n: now - since for n, since in launch.absent_since.items()},
            config.lost_grace_s,
            config.lease_s + config.lost_grace_s,
        )
        ruling = decide_install(joins, roster, reports, waited)
        if ruling.refuse:
            launch.trainers.pop(call.rank, None)
            raise GenerationHeld(f"job {ctx.job}: {ruling.reason}")
        leads = 0 in launch.trainers
        seen = ctx.state.generation_revision

        def moved() -> bool:
            return ctx.state.generation_revision != seen

        def since(read_at: int) -> tuple[Compare, ...]:
            """No trainer of the judged generation came back after the reports were read."""
            if roster is None:
                return ()
            return (none_newer(ctx.keys.trainers(roster.generation.number, ""), read_at),)

        if ruling.install and (leads or min(launch.trainers) == call.rank):
            low, high = config.commit_delay_low_s, config.commit_delay_high_s
            if leads or not await ctx.until(moved, ctx.home.doors.ids.uniform(low, high)):
                await self._install(call, joins, roster, (*fence, *since(reports_revision)))
                await ctx.refresh()
        else:
            await ctx.until(moved, POLL_LEAD_S if leads else POLL_OTHERS_S)
        return ruling.reason

    async def _announce(self, call: w.TrainerJoin, launch: Launch) -> None:
        home = self.ctx.home
        if home.session is None:
            raise LedgerUnavailable(f"{home.node}: no session with the ledger yet")
        join = r.Join(
            node=home.node,
            store_id=home.member.store_id,
            session=home.member.session,
            join_id=launch.join_id,
            world_size=call.world_size,
            ranks=tuple(sorted(launch.trainers)),
            layout=call.layout,
            keep_last=call.keep_last,
            takeover=call.takeover,
        )
        key = self.ctx.keys.join(call.run_token, home.node)
        entry = await home.doors.ledger.get(key)
        if entry is None or entry.value != pack(join):
            await self.ctx.transact(Txn(puts=(Put(key, pack(join), home.session),)))

    async def _joins(self, run_token: str) -> list[r.Join]:
        prefix = self.ctx.keys.join(run_token, "")
        listing = await self.ctx.home.doors.ledger.list(prefix)
        joins = [unpack(e.value, r.Join) for e in listing.entries]
        if not joins:
            raise LedgerUnavailable(f"{prefix}: this node's own join is not there yet")
        return joins

    def _fence(self, roster: Roster | None) -> tuple[Compare, ...]:
        state = self.ctx.state
        if roster is None:
            return state.same_ledger(), state.not_cleaned(), absent(self.ctx.keys.generation)
        standing = state.same_generation(roster.generation.number)
        return state.same_ledger(), state.not_cleaned(), standing

    async def _reports(self, roster: Roster | None) -> tuple[dict[str, r.LivingTrainers], int]:
        if roster is None:
            return {}, 0
        prefix = self.ctx.keys.trainers(roster.generation.number, "")
        listing = await self.ctx.home.doors.ledger.list(prefix)
        reports = [unpack(e.value, r.LivingTrainers) for e in listing.entries]
        return {report.node: report for report in reports}, listing.revision

    async def _install(
        self,
        call: w.TrainerJoin,
        joins: Sequence[r.Join],
        old: Roster | None,
        compares: tuple[Compare, ...],
    ) -> None:
        """Write the roster, then swap the generation if nothing that was judged has changed."""
        ctx = self.ctx
        pieces = roster_pieces(joins)
        digest = hashlib.sha256(b"".join(pack(p) for p in pieces)).hexdigest()[:32]
        keys = [ctx.keys.roster(digest, i) for i in range(len(pieces))]
        for key, piece in zip(keys, pieces, strict=True):
            await ctx.transact(Txn((absent(key),), (Put(key, pack(piece)),)))
        whole = tuple(present(key) for key in keys)  # a sweep may have taken one meanwhile
        generation = r.Generation(
            number=old.generation.number + 1 if old else 1,
            nonce=ctx.home.doors.ids.new(),
            run_token=call.run_token,
            world_size=call.world_size,
            roster_digest=digest,
            pieces=len(pieces),
            layout=call.layout,
            keep_last=call.keep_last,
        )
        put = Put(ctx.keys.generation, pack(generation))
        if await ctx.transact(Txn((*compares, *whole), (put,))):
            ctx.note("generation", number=generation.number, nodes=len(joins))

    async def _adopted(self, launch: Launch) -> bool:
        """Is the installed generation this launch? Then say so to its ranks and the ledger."""
        ctx, home = self.ctx, self.ctx.home
        roster = await ctx.load_roster()
        mine = roster.find(home.node) if roster else None
        if roster is None or mine is None or mine[1].join_id != launch.join_id:
            return False
        await self.report(roster.generation.number, launch.trainers)
        launch.generation = roster.generation
        await ctx.transact(Txn(deletes=(ctx.keys.join(launch.call.run_token, home.node),)))
        ctx.wake()
        return True

    async def report(self, generation: int, trainers: Mapping[int, TrainerId]) -> None:
        """Tell the ledger which ranks of a generation live here, under this agent's lease.

        Raises LedgerUnavailable if it is not certain that the ledger knows.
        """
        home = self.ctx.home
        record = pack(r.LivingTrainers(node=home.node, ranks=tuple(sorted(trainers))))
        key = self.ctx.keys.trainers(generation, home.node)
        if home.session is None:
            raise LedgerUnavailable(f"{home.node}: no session with the ledger")
        if not await self.ctx.transact(Txn(puts=(Put(key, record, home.session),))):
            entry = await home.doors.ledger.get(key)
            if entry is None or entry.value != record:
                raise LedgerUnavailable(f"{key}: the report was not written")

    async def trainer_gone(self, trainer: TrainerId) -> None:
        """A process died: take its ranks out of forming and standing launches."""
        for token, launch in list(self.launches.items()):
            lost = [rank for rank, who in launch.trainers.items() if who == trainer]
            for rank in lost:
                del launch.trainers[rank]
            if lost:
                self.ctx.home.spawn("tell a death", self._tell(token, launch))
            if not launch.trainers:
                self.launches.pop(token, None)

    async def _tell(self, token: str, launch: Launch) -> None:
        """Until the ledger knows: the report of a standing launch, the join of a forming one."""
        while True:
            try:
                if launch.generation is not None:
                    await self.report(launch.generation.number, launch.trainers)
                elif launch.trainers:
                    launch.join_id = self.ctx.home.doors.ids.new()
                    await self._announce(launch.call, launch)
                else:
                    key = self.ctx.keys.join(token, self.ctx.home.node)
                    await self.ctx.transact(Txn(deletes=(key,)))
                return
            except CheckpointError as e:
                self.ctx.note("tell_later", why=str(e))
                await asyncio.sleep(RETRY_S)


def check_call(call: w.TrainerJoin) -> None:
    """Raises UsageError for a join that cannot be meant."""
    if not 0 <= call.rank < call.world_size:
        raise UsageError(f"rank {call.rank}: needs 0 to {call.world_size - 1}")
    if not 1 <= call.keep_last <= r.MAX_KEEP_LAST:
        raise UsageError(f"keep_last {call.keep_last}: needs 1 to {r.MAX_KEEP_LAST}")
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", call.run_token):
        raise UsageError(
            f"run token {call.run_token!r}: needs 1 to 64 letters, digits, '_', '.' or '-'"
        )
