"""One start of an agent on a node (`Home`): its doors, session and holdings, and who lives.

An agent lists the members once and then watches them: a list of 1,250 members that each of 1,250
agents reads every few seconds is more than all else they ask of etcd. What a watch cannot tell is
that the ledger was set back to an older state, for then it waits in silence; so whoever relies on
it reads the ledger's revision now and then, which is one small answer.

Contract: `living()` is a linearizable read. `living(max_age_s)` may lag behind as a watch does, but
no longer than `max_age_s` behind a ledger that was set back, or is out of reach: then it raises.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from p2pckpt import records as r
from p2pckpt.agent.governing import Governed, Governing
from p2pckpt.agent.holdings import Holdings, seen_name
from p2pckpt.config import Config
from p2pckpt.errors import CheckpointError, FormatError
from p2pckpt.ports import Change, Doors, Living, Session
from p2pckpt.wire import pack, unpack

RETRY_S = 0.5
"""Pause after an unavailable ledger before the next try; each try has its own deadline."""

NO_KEY = r.ROOT + "none"
"""No key begins so: what a listing of it says is the ledger's revision."""


class Follower(Protocol):
    """A job on this node."""

    def ledger_is_at(self, revision: int, seen: int) -> None:
        """A read found a lower revision than one before."""
        ...

    def wake(self) -> None:
        """Somebody came or went."""
        ...


@dataclass
class Home:
    """One start of an agent on a node."""

    node: str
    config: Config
    doors: Doors
    holdings: Holdings
    spawn: Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]]
    member: r.Member
    session: Session | None = None
    kept_at: float = -1e9
    _steady_since: float = math.inf
    newest_revision: int = 0
    followers: list[Follower] = field(default_factory=list)
    governing: Governing = field(init=False)
    """How fast bytes may go; the doors' transport is the one that it governs."""
    _followed: Living | None = None
    """As the watch of the members has it; None: nobody watches now."""
    _read_at: float = -1e9
    _living: Living | None = None
    _living_at: float = -1e9
    _went_back: asyncio.Event = field(default_factory=asyncio.Event)
    _unwritten: dict[str, r.LedgerSeen] = field(default_factory=dict)
    """What was seen of jobs' ledgers, and found no room beside the bytes yet."""

    def __post_init__(self) -> None:
        self.governing = Governing(self.config, self.doors.transport)
        transport = Governed(self.doors.transport, self.governing)
        self.doors = replace(self.doors, transport=transport)

    def now(self) -> float:
        """The loop's clock: monotonic seconds, virtual in the simulator."""
        return asyncio.get_running_loop().time()

    @property
    def cut_off(self) -> bool:
        """No renewal for a whole lease: this agent may be taken for lost."""
        return self.session is None or self.now() - self.kept_at > self.config.lease_s

    def last_seen(self, job: str) -> r.LedgerSeen | None:
        """What the agents of this store have seen of a job's ledger; None if nobody can tell."""
        packed = self.doors.arena.document(seen_name(job))
        try:
            return None if packed is None else unpack(packed, r.LedgerSeen)
        except FormatError as e:  # then the ledger that is there now is the one that was seen
            self.doors.notes("seen_damaged", {"job": job, "why": str(e)})
            return None

    def remember(self, job: str, seen: r.LedgerSeen | None) -> None:
        """Write it beside the bytes, or take it away; what finds no room, when there is some."""
        self._unwritten.pop(job, None)
        if seen is None:
            self.doors.arena.remove(seen_name(job))
        else:
            self._unwritten[job] = seen
            self._write_down()

    def _write_down(self) -> None:
        for job, seen in list(self._unwritten.items()):
            try:
                self.doors.arena.put_document(seen_name(job), pack(seen))
                del self._unwritten[job]
            except CheckpointError as e:
                self.doors.notes("seen_later", {"job": job, "why": str(e)})

    def kept(self, asked_at: float, anew: bool = False) -> None:
        """The session was opened ``anew`` or renewed, which was asked for at `asked_at`."""
        self._write_down()
        if anew or asked_at - self.kept_at > self._gap_s:
            self._steady_since = asked_at
        self.kept_at = asked_at

    @property
    def steady(self) -> bool:
        """The ledger was reached for two `keepalive_s` without a gap as long: were it wiped or away
        before, every agent that can reach it has a session again."""
        if self.session is None:
            return False
        return self.now() - self.kept_at <= self._gap_s <= self.now() - self._steady_since

    @property
    def _gap_s(self) -> float:
        return 2 * self.config.keepalive_s

    async def living(self, max_age_s: float = 0.0) -> Living:
        """Who lives. Raises LedgerUnavailable.

        0: read now. Else from the watch of the members, if the ledger was read at most `max_age_s`
        ago and has not gone back; without a watch, at most so old.
        """
        if max_age_s > 0 and self._followed is not None:
            if self.now() - self._read_at > max_age_s:
                asked_at, newest = self.now(), self.newest_revision
                listing = await self.doors.ledger.list(NO_KEY)
                self._saw(listing.revision, newest, asked_at)
            if self._followed is not None:
                return self._followed
        if self._living is None or self.now() - self._living_at > max_age_s:
            asked_at, newest = self.now(), self.newest_revision
            living = await self.doors.membership.living()
            self._saw(living.revision, newest, asked_at)
            self._living, self._living_at = living, asked_at
        return self._living

    def _saw(self, revision: int, newest: int, asked_at: float) -> None:
        """A linearizable read had this revision; ``newest`` is what was known when it began."""
        if revision < newest:
            for follower in self.followers:
                follower.ledger_is_at(revision, newest)
            self.newest_revision, self._followed = revision, None
            self._went_back.set()
        self.newest_revision = max(self.newest_revision, revision)
        self._read_at = max(self._read_at, asked_at)

    async def follow_members(self) -> None:
        """For ever: know who lives by one watch. Not from the very beginning: when a cluster
        starts, all come at once."""
        while True:
            await asyncio.sleep(self.config.keepalive_s)
            self._went_back.clear()
            watching = asyncio.ensure_future(self._watch_members())
            back = asyncio.ensure_future(self._went_back.wait())
            try:
                await asyncio.wait((watching, back), return_when=asyncio.FIRST_COMPLETED)
                if watching.done():
                    watching.result()
            except CheckpointError as e:
                self.doors.notes("members_again", {"node": self.node, "why": str(e)})
            finally:
                self._followed = None
                for task in (watching, back):
                    task.cancel()
                await asyncio.gather(watching, back, return_exceptions=True)

    async def _watch_members(self) -> None:
        self._followed = living = await self.living()
        watch = self.doors.ledger.watch(r.MEMBERS, living.revision + 1)
        async for changes in watch:
            if not changes:
                return  # a new connection: list again
            self._followed = living = _with_changes(living, changes)
            for follower in self.followers:
                follower.wake()


def _with_changes(living: Living, changes: Sequence[Change]) -> Living:
    """Who lives after some changes. Raises FormatError for a key that is no member."""
    members, revisions = dict(living.members), dict(living.session_revisions)
    for change in changes:
        name = change.key[len(r.MEMBERS) :]
        members.pop(name, None)
        revisions.pop(name, None)
        if change.value is not None:
            members[name] = unpack(change.value, r.Member)
            revisions[name] = change.create_revision
    return Living(members, revisions, changes[-1].revision)
