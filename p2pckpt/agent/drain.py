"""A node that is to be evicted hands on what it holds for others, while it still lives.

    flag in the member record -> nobody places a shard here -> each shard that only this node has
    goes to another one, as a repair would put it -> the node may go, and nothing is less for it

The flag goes with the lease, and with this start of the agent. From its beginning offers are
refused here, and `status` and repair take the node for gone (repair only as a place to choose). Its
own ranks train and save on: their shares have all their shards elsewhere, so their own copies here
are the one thing that goes with the node.

Contract: `decide_moves` is pure. What is sent is the file as it lies here, to a node that the rules
of placement allow, and counts only when that node lists it. The drain is done when the flag stands,
no save in flight has a part here, and every shard here is held by a node that stays. It goes on,
and takes up what is new, until it is cancelled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import structs

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.context import Home, JobContext
from p2pckpt.agent.deciding import ask_all, groups_of
from p2pckpt.agent.holdings import Held, Want, document_name
from p2pckpt.agent.status import redundancy
from p2pckpt.errors import CheckpointError, IntegrityError, LedgerUnavailable
from p2pckpt.ports import Compare, Put, Region, Session, Txn
from p2pckpt.restore.locate import Facts, Sources, sources_of
from p2pckpt.restore.verify import open_manifest
from p2pckpt.save.send import Crew, EncodedShare, crew_of, send_shard, substitute
from p2pckpt.traffic import Traffic
from p2pckpt.wire import pack
from topology.cluster import TopologyError

LOOK_EVERY_S = 0.5
AGAIN_S = 30.0
"""All is looked at again: what others hold may be lost while nobody joins or leaves."""

SHARES_AT_ONCE = 4
"""Shards on their way at once: enough to fill a link while others begin and end."""


class HasContext(Protocol):
    """A job on this node."""

    ctx: JobContext


def decide_moves(
    share: r.SealedShare, sources: Sources, layout: r.Layout, here: str, staying: Set[str]
) -> tuple[int, ...]:
    """Shards of a share that are here and on no node that stays, but for that of the own copy."""
    owner = owner_of(share, sources, staying)
    return tuple(
        i
        for i in range(layout.shards)
        if here in sources.shards.get(i, ())
        and not any(n in staying and n != owner for n in sources.shards[i])
    )


def owner_of(share: r.SealedShare, sources: Sources, staying: Set[str]) -> str:
    """A node that stays and has the own copies of all ranks; "" if there is none."""
    slots = sources.slots
    return min((n for n in staying if all(n in slots.get(k, ()) for k in share.ranks)), default="")


@dataclass(frozen=True)
class Move:
    """One share's shards that are to leave: from which files, and who holds what of it now."""

    attempt: r.Attempt
    share: r.SealedShare
    files: tuple[Held, ...]
    sources: Sources


@dataclass
class Draining:
    """The drain of this agent's node."""

    home: Home
    jobs: Mapping[str, HasContext]
    moved: int = 0
    moved_bytes: int = 0
    left: int = 0
    waiting: int = 0
    lacking: list[str] = field(default_factory=list)
    _number: int = 0
    """Of the newest command: a look for one before it says nothing."""
    _looked: bool = False
    _seen: tuple[object, ...] = ()
    _looked_at: float = 0.0
    _told: tuple[Session, bool] | None = None
    _asked: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def on(self) -> bool:
        """Is this node being drained?"""
        return self.home.member.draining

    async def call(self, call: w.DrainCall) -> r.Record:
        """A person's command, for this node or another one; see DrainCall."""
        if call.node in ("", self.home.node):
            return await self.answer(call)
        members = (await self.home.living()).members
        if call.node not in members:
            known = ", ".join(sorted(members)[:16])
            return w.RefusedReply(reason=f"no agent of {call.node!r} lives; there are: {known}")
        timeout_s = self.home.config.ledger_timeout_s + self.home.config.peer_timeout_s
        return await self.home.doors.peers.call(members[call.node].peers_address, call, timeout_s)

    async def answer(self, call: w.DrainCall) -> r.Record:
        """Of this node: begin, end, or only tell."""
        home = self.home
        if call.node not in ("", home.node):
            return w.RefusedReply(reason=f"this is {home.node}, not {call.node}")
        if call.draining is not None and call.draining != self.on:
            home.member = structs.replace(home.member, draining=call.draining)
            self.moved, self.moved_bytes, self.left, self.waiting = 0, 0, 0, 0
            self._looked, self.lacking = False, []
            self._number += 1
            home.doors.notes("drain", {"node": home.node, "begins": call.draining})
            self._asked.set()
        if not self._is_told():  # by a session that is over: nobody else would tell of it again
            self._asked.set()
        settled = self._looked and self._is_told() and not self.waiting
        return w.DrainReply(
            node=home.node,
            draining=self.on,
            done=settled and not self.lacking if self.on else self._is_told(),
            stuck=settled and bool(self.lacking),
            moved=self.moved,
            moved_bytes=self.moved_bytes,
            left=self.left,
            waiting=self.waiting,
            lacking=tuple(self.lacking[:64]),
            jobs=json.dumps(await self._jobs() if settled and self.on else {}),
        )

    def _is_told(self) -> bool:
        return self._told == (self.home.session, self.on) or (self._told is None and not self.on)

    async def loop(self) -> None:
        """For ever: while there is a drain, tell of it and move what is to be moved."""
        while True:
            await self._asked.wait()
            try:
                await self._tell()
                if not self.on:
                    if self._is_told():  # else it was cancelled while its beginning was told
                        self._asked.clear()
                    continue
                await self._look()
            except CheckpointError as e:
                self._looked, self.lacking = False, [f"{type(e).__name__}: {e}"]
                self.home.doors.notes("drain_later", {"why": str(e)})
            await asyncio.sleep(LOOK_EVERY_S)

    async def _tell(self) -> None:
        """The flag into the member record of the present session. Raises LedgerUnavailable."""
        home, session, on = self.home, self.home.session, self.on
        if session is None:
            raise LedgerUnavailable(f"{home.node}: no session with the ledger now")
        if self._told == (session, on):
            return
        key = r.MEMBERS + home.node
        mine = Compare(key, "create", "=", session.revision)
        put = Put(key, pack(home.member), session)
        if await home.doors.ledger.transact(Txn((mine,), (put,))) is None:
            raise LedgerUnavailable(f"{home.node}: its session ended, or its answer was lost")
        self._told = (session, on)

    # -- moving -----------------------------------------------------------------------------------

    async def _look(self) -> None:
        """One look at everything that is held: move what can be moved. Cheap, for a while, if all
        is done and nothing has changed."""
        begun, number = self.home.now(), self._number
        members = (await self.home.living(self.home.config.keepalive_s)).members
        picture = (
            tuple((n, m.store_id, m.draining) for n, m in sorted(members.items())),
            tuple(sorted((h.file, str(h.attempt), h.whole) for h in self.home.holdings)),
        )
        young = begun - self._looked_at < AGAIN_S
        if young and picture == self._seen and self._looked and not (self.waiting or self.lacking):
            return
        waiting, left, lacking = 0, 0, list[str]()
        for job in list(self.jobs.values()):
            held = [h for h in self.home.holdings.of_job(job.ctx.job) if h.attempt is not None]
            shards = [h for h in held if h.kind is r.FileKind.SHARD]
            for attempt in sorted({h.attempt for h in held if h.attempt}, key=lambda a: a.key):
                if self._number != number:
                    return
                commit = job.ctx.state.committed(attempt)
                mine = [h for h in shards if h.attempt == attempt]
                if commit is None:
                    waiting += bool(mine) and not job.ctx.decided(attempt)
                    continue
                if any(not h.whole for h in mine):
                    waiting += 1
                told = await self._move_step(job.ctx, commit, [h for h in mine if h.whole])
                left += told[0]
                lacking += told[1]
        if self._number != number:
            return
        self.waiting, self.left, self.lacking, self._looked = waiting, left, lacking, True
        self._seen, self._looked_at = picture, begun

    async def _move_step(
        self, ctx: JobContext, commit: r.Commit, files: list[Held]
    ) -> tuple[int, list[str]]:
        """Shards of one step that found no place, and what lacks in sentences."""
        home, attempt = self.home, commit.attempt
        groups = await groups_of(ctx, attempt)
        answers, silent = await ask_all(ctx, w.HeldQuery(ctx.job, attempt))
        members = (await home.living(home.config.keepalive_s)).members
        staying = {n for n, m in members.items() if not m.draining and n not in silent}
        facts = Facts(ctx.state, answers, (), {}, False)
        moves, lacking = list[Move](), list[str]()
        for share in (share for group in groups for share in group.shares):
            sources = sources_of(share, attempt, facts)
            to_move = decide_moves(share, sources, commit.layout, home.node, staying)
            mine = tuple(
                h for h in files if h.manifest_digest == share.manifest_digest and h.part in to_move
            )
            if mine:
                moves.append(Move(attempt, share, mine, sources))
            lacking += _own_copy_alone(share, sources, commit, home.node, staying)
        crew = crew_of(dict(members), home.member, commit.layout, self._spread())
        limit = asyncio.Semaphore(SHARES_AT_ONCE)

        async def one(move: Move) -> list[str]:
            async with limit:
                return await self._move(move, crew, staying)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(move)) for move in moves]
        failed = [why for task in tasks for why in task.result()]
        if failed and (await ctx.refresh()).committed(attempt) is None:
            return 0, []  # retired meanwhile, which who should have taken it may have seen first
        said = [f"job {ctx.job}, step {attempt.step}: {why}" for why in (*failed, *lacking)]
        return len(failed), said

    def _spread(self) -> tuple[tuple[str, bool], ...]:
        return tuple((level, False) for level, _ in self.home.config.spread_levels)

    async def _move(self, move: Move, crew: Crew, staying: Set[str]) -> list[str]:
        """The shards of one share, each to a node that has none of it; why not, for each other."""
        sources = move.sources
        owner = owner_of(move.share, sources, staying)
        used = {n for nodes in sources.shards.values() for n in nodes if n in staying}
        used |= {owner} if owner else set()
        failed, lacking = set[str](), list[str]()
        for held in move.files:
            why = "no other host may hold it"
            asked = owner or (move.share.node if move.share.node in crew.members else "")
            while node := substitute(crew, asked or self.home.node, used, failed):
                try:
                    await self._send(held, move.share, crew.members[node])
                    await self._say_where(
                        move.attempt, node, [crew.members[n] for n in sorted(used)]
                    )
                    used.add(node)
                    self.moved, self.moved_bytes = self.moved + 1, self.moved_bytes + held.length
                    break
                except CheckpointError as e:
                    failed.add(node)
                    why = f"{node}: {e}"
            else:
                lacking.append(f"shard {held.part} of {move.share.node} is only here: {why}")
        return lacking

    async def _send(self, held: Held, share: r.SealedShare, holder: r.Member) -> None:
        """One shard file, as it lies here, with the manifest beside it."""
        home, attempt = self.home, held.attempt
        packed = home.doors.arena.document(document_name(share.manifest_digest))
        if packed is None or attempt is None:
            raise IntegrityError(f"manifest {share.manifest_digest[:12]} is not beside its shard")
        manifest = open_manifest(packed, share.manifest_digest)
        want = Want(r.FileKind.STAGE, attempt, home.node, -1, len(packed))
        stage = await home.holdings.take(want)
        try:
            home.holdings.view(stage, 0, len(packed))[:] = packed
            shards: list[tuple[Region, ...]] = [()] * manifest.layout.shards
            shards[held.part] = tuple(
                home.holdings.region(
                    held,
                    manifest.shard_offset(e.rank, held.part),
                    e.stored_bytes(held.part, manifest.layout.k),
                )
                for e in manifest.ranks
            )
            region = home.holdings.region(stage, 0, len(packed))
            whole = EncodedShare(manifest, share.manifest_digest, tuple(shards), region)
            await send_shard(whole, held.part, holder, home.doors, home.config, Traffic.DRAIN)
        finally:
            home.holdings.release(stage)

    async def _say_where(self, attempt: r.Attempt, node: str, others: Sequence[r.Member]) -> None:
        """To who might repair the share one day: without it the shard would be made once more."""
        for member in others:
            try:
                timeout_s = self.home.config.peer_timeout_s
                told = w.LookAgain(attempt, (node,))
                await self.home.doors.peers.call(member.peers_address, told, timeout_s)
            except CheckpointError as e:
                self.home.doors.notes("drain_not_told", {"node": member.node, "why": str(e)})

    async def _jobs(self) -> dict[str, Any]:
        """What each job's newest step survives without this node."""
        out: dict[str, Any] = {}
        for name, job in sorted(self.jobs.items()):
            commit = job.ctx.state.latest()
            if commit is None or job.ctx.state.committed(commit.attempt) is None:
                continue
            try:
                found = await redundancy(job.ctx, commit)
                keys = ("step", "survivable_node_losses", "full")
                out[name] = {key: found[key] for key in keys}
            except (CheckpointError, TopologyError) as e:
                out[name] = {"step": commit.attempt.step, "why": str(e)}
        return out


def _own_copy_alone(
    share: r.SealedShare, sources: Sources, commit: r.Commit, here: str, staying: Set[str]
) -> list[str]:
    """A share of which only this node has the own copy, and others not all shards."""
    mine = any(here in sources.slots.get(rank, ()) for rank in share.ranks)
    if not mine or owner_of(share, sources, staying):
        return []
    held = sum(1 for nodes in sources.shards.values() if staying & set(nodes))
    if held == commit.layout.shards:
        return []
    return [
        f"the own copy of {share.node} is here, and {held} of {commit.layout.shards} shards of it "
        f"are elsewhere, {commit.layout.k} are needed"
    ]
