"""Trainers join -> one generation of the job, the fence for everything before it.

A launch is a set of processes with one run token. Each node's agent lists its ranks of the launch
in the ledger, under its lease, once; when all ranks are there, any agent installs number + 1 by one
compare-and-swap on the generation record. The agent of rank 0 looks for that again and again, the
others seldom; they see the generation in their mirror.

Contract: the swap compares the ledger id, the generation that was judged (`installing`), and that
no trainer report of it changed since; so two launches cannot both win, and a trainer that comes
back in between is seen. Roster pieces are written before the record that names them.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.context import RETRY_S, UNSURE_S, JobContext, Roster
from p2pckpt.agent.installing import (
    Installing,
    Waited,
    check_call,
    decide_install,
    roster_pieces,
)
from p2pckpt.agent.living import read_living, tell_living
from p2pckpt.agent.polling import poll
from p2pckpt.errors import (
    CheckpointError,
    GenerationHeld,
    LedgerUnavailable,
    NotJoined,
    UsageError,
)
from p2pckpt.ports import Compare, Put, Session, TrainerId, Txn, absent, none_newer, present
from p2pckpt.wire import pack, unpack

POLL_LEAD_S = 0.05
POLL_OTHERS_S = 0.5

AT_ONCE = 64
"""Nodes that look that often; more look more rarely: a look reads the joins of all nodes."""

LOOK_AT_LEAST_S = 60.0
"""Agents other than rank 0's look this often, however many there are."""


@dataclass
class Launch:
    """The ranks of one run token that joined on this node; ``joined`` ends with a generation."""

    call: w.TrainerJoin
    trainers: dict[int, TrainerId] = field(default_factory=dict)
    join_id: str = ""
    generation: r.Generation | None = None
    ledger_id: str = ""
    """Of the ledger that has the generation."""
    began_at: float = 0.0
    replaces: r.Generation | None = None
    """What stood at the last look; `absent_since` and `asked` are about its nodes."""
    absent_since: dict[str, float] = field(default_factory=dict)
    busy: bool = False
    """One of the ranks here acts for all of them."""
    announced: tuple[bytes, Session | None] | None = None
    """What the ledger knows of this node's ranks, and under which session."""
    unsure: bool = False
    """Something was announced without an answer: it may still come to stand."""
    look_at: float = 0.0
    looked_at: float = 0.0
    asked: bool = False
    """The nodes whose ranks are said to live were asked whether that is so."""
    reason: str = ""
    """What the launch waited for at the last look."""

    @property
    def nodes(self) -> float:
        """How many the launch has, if all have as many ranks as this one."""
        return self.call.world_size / max(1, len(self.trainers))


@dataclass(frozen=True)
class Judged:
    """A ruling, what it rests on, and the compares that hold as long as that does."""

    ruling: Installing
    joins: Sequence[r.Join]
    roster: Roster | None
    fence: tuple[Compare, ...]


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
            if launch is not None:  # ranks of it may live, and their death is to be told
                self.launches[launch.join_id] = launch
            launch = Launch(call, began_at=home.now(), looked_at=home.now())
            self.launches[call.run_token] = launch
            launch.look_at = self._next_look(launch)
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
        ctx.wake()
        try:
            while launch.generation is None:
                if home.now() >= deadline or launch.trainers.get(call.rank) != trainer:
                    why = ctx.because(await self._why(call, launch))
                    raise NotJoined(f"job {ctx.job}, rank {call.rank}: waited for {why}")
                try:
                    await self._advance(call, launch)
                except LedgerUnavailable as e:
                    launch.reason = str(e)
                    await asyncio.sleep(RETRY_S)
        except CheckpointError:
            if launch.trainers.get(call.rank) != trainer:  # refused or dead: so is its join
                home.spawn("tell a death", self._tell(call.run_token, launch))
            raise
        if launch.trainers.get(call.rank) != trainer:
            raise NotJoined(f"job {ctx.job}, rank {call.rank}: it died when its launch stood")
        return launch

    def resume(
        self, generation: r.Generation, entry: r.RosterNode, rank: int, trainer: TrainerId
    ) -> Launch:
        """The standing launch of a generation, after a restart of this agent."""
        launch = next((x for x in self.launches.values() if x.generation == generation), None)
        if launch is None:
            call = w.TrainerJoin(
                job=self.ctx.job,
                rank=rank,
                world_size=generation.world_size,
                run_token=generation.run_token,
                layout=generation.layout,
                keep_last=generation.keep_last,
            )
            launch = Launch(call, {}, entry.join_id, generation, self.ctx.state.ledger_id)
            token = generation.run_token  # by which another launch may form already
            self.launches[entry.join_id if token in self.launches else token] = launch
        launch.trainers[rank] = trainer
        return launch

    async def _advance(self, call: w.TrainerJoin, launch: Launch) -> None:
        """One turn of a rank whose launch forms. The ranks of a node have one eye: while one of
        them acts the others wait."""
        ctx, known = self.ctx, set(launch.trainers)
        if launch.busy:
            ready = lambda: not launch.busy or launch.generation is not None  # noqa: E731
            await ctx.until(ready, POLL_OTHERS_S)
            return
        launch.busy = True
        try:
            if not ctx.following or not ctx.state.ledger_id:
                await ctx.found()
            if await self._adopted(launch):
                return
            await self._announce(call, launch)
            seen, now = ctx.state.generation_revision, ctx.home.now()
            leads = 0 in launch.trainers
            if leads or now >= launch.look_at:
                await self._look(call, launch)
            pause_s = POLL_OTHERS_S
            if leads:
                pause_s = min(POLL_OTHERS_S * 2, POLL_LEAD_S * max(1.0, launch.nodes / AT_ONCE))

            def news() -> bool:
                return ctx.state.generation_revision != seen or set(launch.trainers) != known

            await ctx.until(news, pause_s)
        finally:
            launch.busy = False
            ctx.wake()

    async def _look(self, call: w.TrainerJoin, launch: Launch) -> None:
        """Judge the launch and act on it: install it, or raise GenerationHeld or UsageError.

        Every rank that is refused is told by a look of its own.
        """
        ctx, config = self.ctx, self.ctx.home.config
        launch.look_at = -math.inf
        seen = ctx.state.generation_revision
        judged = await self._judge(call, launch)
        if judged.ruling.refuse:
            launch.trainers.pop(call.rank, None)
            raise GenerationHeld(f"job {ctx.job}: {judged.ruling.reason}")
        launch.look_at = self._next_look(launch)
        if not judged.ruling.install:
            return
        low, high = config.commit_delay_low_s, config.commit_delay_high_s
        late_s = 0.0
        if 0 not in launch.trainers:
            spread = (high - low) * max(1.0, launch.nodes / AT_ONCE)
            late_s = ctx.home.doors.ids.uniform(low, low + spread)
        if not await ctx.until(lambda: ctx.state.generation_revision != seen, late_s):
            await self._install(call, judged)
            await ctx.refresh()

    def _next_look(self, launch: Launch) -> float:
        """Of an agent that has not rank 0."""
        pause_s = min(LOOK_AT_LEAST_S, POLL_OTHERS_S * max(1.0, launch.nodes / AT_ONCE) ** 2)
        return self.ctx.home.now() + self.ctx.home.doors.ids.uniform(0.5, 1.0) * pause_s

    async def _judge(self, call: w.TrainerJoin, launch: Launch) -> Judged:
        """What all joins and reports say now. Raises UsageError."""
        ctx = self.ctx
        await ctx.found()
        joins = await self._joins(call.run_token)
        roster = await ctx.load_roster()
        fence = self._fence(roster)  # of the very generation that is judged
        reports, reports_revision = await read_living(ctx, roster)
        now, config = ctx.home.now(), ctx.home.config
        if roster is not None and launch.replaces != roster.generation:  # a grace of its own
            launch.replaces, launch.absent_since, launch.asked = roster.generation, {}, False
        for node in roster.nodes if roster else ():
            if node.node in reports:
                launch.absent_since.pop(node.node, None)
            else:
                launch.absent_since.setdefault(node.node, now)
        waited = Waited(
            now - launch.began_at,
            {n: now - since for n, since in launch.absent_since.items()},
            config.lost_grace_s,
            config.lease_s + config.lost_grace_s,
        )
        if waited.launch_s >= config.lease_s and not launch.asked:
            living = (await ctx.home.living()).members
            named = [
                living[node] for node in sorted(reports) if node in living and reports[node].ranks
            ]
            heard = await poll(ctx, w.LookAtOwn(ctx.job), w.Accepted, named)
            launch.asked = len(heard) == len(named)
        ruling = decide_install(joins, roster, reports, waited)
        launch.reason, launch.looked_at = ruling.reason, now
        if roster is not None:  # and no trainer of it came back after the reports were read
            prefix = ctx.keys.trainers(roster.generation.number, "")
            fence = (*fence, none_newer(prefix, reports_revision))
        return Judged(ruling, joins, roster, fence)

    async def _why(self, call: w.TrainerJoin, launch: Launch) -> str:
        """What the launch waits for, not older than LOOK_AT_LEAST_S."""
        old = not launch.reason and launch.nodes <= AT_ONCE
        old = old or self.ctx.home.now() - launch.looked_at > LOOK_AT_LEAST_S
        if old and launch.announced:
            try:
                await self._judge(call, launch)
            except LedgerUnavailable as e:
                return str(e)
        return launch.reason or "other ranks; rank 0 is told which"

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
        key, said = self.ctx.keys.join(call.run_token, home.node), (pack(join), home.session)
        if launch.announced == said:
            return
        entry = await home.doors.ledger.get(key)
        there = entry is not None and entry.value == said[0]
        if there or await self.ctx.transact(Txn(puts=(Put(key, *said),))):
            launch.announced = said  # else the next turn shows whether it is there
        else:
            launch.unsure = True

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

    async def _install(self, call: w.TrainerJoin, judged: Judged) -> None:
        """Write the roster, then swap the generation if nothing that was judged has changed."""
        ctx, joins, old = self.ctx, judged.joins, judged.roster
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
        if await ctx.transact(Txn((*judged.fence, *whole), (put,))):
            ctx.note("generation", number=generation.number, nodes=len(joins))

    async def _adopted(self, launch: Launch) -> bool:
        """Is the installed generation this launch? Then say so to its ranks and the ledger."""
        ctx, home = self.ctx, self.ctx.home
        ledger_id = ctx.state.ledger_id
        roster = await ctx.load_roster()
        mine = roster.find(home.node) if roster else None
        if roster is None or mine is None or mine[1].join_id != launch.join_id:
            return False
        told = dict(launch.trainers)
        await tell_living(ctx, ledger_id, roster.generation.number, launch.trainers)
        launch.generation, launch.ledger_id = roster.generation, ledger_id
        if told != launch.trainers:  # who died meanwhile was told as living
            await tell_living(ctx, ledger_id, roster.generation.number, launch.trainers)
        home.spawn("forget a join", self._forget(launch.call.run_token, launch))
        ctx.wake()
        return True

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

    async def _forget(self, token: str, launch: Launch) -> None:
        """The join of a launch that stands, or is no more, goes; and again when one that was not
        answered may have come after all. Not that of a later launch."""
        key = self.ctx.keys.join(token, self.ctx.home.node)
        for pause_s in (0.0, UNSURE_S) if launch.unsure else (0.0,):
            await self.ctx.until(lambda: False, pause_s)
            while self.launches.get(token) in (None, launch):
                try:
                    if await self.ctx.transact(Txn(deletes=(key,)), though_frozen=True):
                        break
                except LedgerUnavailable as e:
                    self.ctx.note("tell_later", why=str(e))
                await asyncio.sleep(RETRY_S)

    async def _tell(self, token: str, launch: Launch) -> None:
        """Until the ledger knows: the report of a standing launch, the join of a forming one."""
        while True:
            try:
                if launch.generation is not None:
                    of = launch.ledger_id, launch.generation.number
                    await tell_living(self.ctx, *of, launch.trainers)
                elif launch.trainers:
                    launch.join_id = self.ctx.home.doors.ids.new()
                    await self._announce(launch.call, launch)
                    if not launch.trainers:  # they died meanwhile: what was just said goes, too
                        continue
                else:
                    await self._forget(token, launch)
                return
            except CheckpointError as e:
                self.ctx.note("tell_later", why=str(e))
                await asyncio.sleep(RETRY_S)
