"""What the parts of an agent share of one job on its node (`JobContext`), and the roster.

A JobContext follows one job's records in the ledger: a mirror that wakes whoever waits for a
change, and `truth`, a fresh linearizable listing, for decisions that free or promise something.
What is the node's and not the job's is in its `Home`.

Contract: the mirror may lag, so it only wakes and hints; what must be true comes from `truth`, from
the compares of a transaction, or, of what is irrevocable, from the mirror and a linearizable read
that is not older. `abort` never overrides an outcome. Nothing here blocks longer than the deadlines
in `Config`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from p2pckpt import records as r
from p2pckpt.agent.holdings import copy_name
from p2pckpt.agent.home import RETRY_S, Home
from p2pckpt.agent.roster import Roster
from p2pckpt.agent.waiting import Waiting
from p2pckpt.errors import (
    AmbiguousAnswer,
    CheckpointError,
    Compacted,
    LedgerForgot,
    LedgerUnavailable,
    NoRoom,
)
from p2pckpt.jobstate import FLOOR_START, JobState, forgot
from p2pckpt.ports import Put, Session, Txn, absent
from p2pckpt.save.commit import abort_txn
from p2pckpt.wire import unpack

__all__ = ["RETRY_S", "Home", "JobContext", "Roster"]

SPACING_S = 0.004
"""Between requests that all nodes of a job make because of one event: etcd takes some at a time."""

NEWS_S = 0.001
"""For each node of a job: how long the news of an outcome may take until all have it."""

TAKERS = 8
"""Nodes that step in for rank 0's within `commit_delay_high_s`, however many there are."""

UNSURE_S = 15.0
"""For so long an unanswered transaction may be carried out; etcd gives one up after some 7 s."""


@dataclass
class Reading:
    """A reader's record of this node; ``session`` None: let go. Certain after `unsure_until`."""

    attempt: r.Attempt
    session: Session | None = None
    unsure_until: float = -1e9
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class JobContext:
    """One job on this node: its mirror, its roster, and the deeds all parts need."""

    home: Home
    job: str
    state: JobState = field(init=False)
    roster: Roster | None = None
    following: bool = False
    tracked: set[r.Attempt] = field(default_factory=set)
    frozen: str = ""
    seen: r.LedgerSeen | None = None
    checkpoints: dict[str, r.Checkpoint] = field(default_factory=dict)
    groups: tuple[r.Attempt, list[r.GroupRecord]] | None = None  # of a commit, as read last
    losses: int = 0  # how often files of the newest step were told to be lost
    elsewhere: set[tuple[r.Attempt, str]] = field(default_factory=set)  # holders not recorded
    ceded: tuple[int, int] | None = None  # the ballot that other work has waited for long enough
    hindered: dict[r.Attempt, str] = field(default_factory=dict)  # attempts not handed in, and why
    readings: dict[str, Reading] = field(default_factory=dict)  # by key
    proven_revision: int = 0  # of the newest linearizable read that found nothing gone back
    proven_at: float = -1e9
    trouble: str = ""  # why the ledger took no transaction the last time; "" if it answered
    waiting: Waiting = field(default_factory=Waiting)
    _moved: asyncio.Event = field(default_factory=asyncio.Event)
    _proving: asyncio.Lock = field(default_factory=asyncio.Lock)
    _aborting: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.keys = r.JobKeys(self.job)
        self.state = JobState(self.keys)
        self.home.followers.append(self)
        self.seen = self.home.last_seen(self.job)

    def ledger_is_at(self, revision: int, seen: int) -> None:
        """The ledger has a lower revision than one before: freeze, unless all that is known of the
        job is of a ledger that was rebuilt since. The watch is of no use in either case."""
        self._moved.set()
        same = self.seen is not None and self.seen.ledger_id == self.state.ledger_id
        knows = max(self.seen.revision if self.seen else 0, self.state.revision if same else 0)
        if knows > revision:
            self.freeze(f"revision {revision}, seen {seen}")

    def note(self, what: str, **facts: Any) -> None:
        """Tell telemetry and the event log."""
        self.home.doors.notes(what, {"job": self.job, **facts})

    # -- the mirror -------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Keep the mirror current for ever: list, watch, list again after a compaction."""
        while True:
            try:
                await self.refresh()
                await self._watch()
            except (Compacted, LedgerForgot, LedgerUnavailable, NoRoom) as e:
                self.note("follow_again", why=str(e))
                await asyncio.sleep(RETRY_S)

    async def _watch(self) -> None:
        """Apply changes until the watch fails, or the ledger is another one, or an older state."""
        self._moved.clear()
        following = asyncio.ensure_future(self._apply_changes())
        moved = asyncio.ensure_future(self._moved.wait())
        try:
            await asyncio.wait((following, moved), return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            for task in (following, moved):
                task.cancel()
            await asyncio.gather(following, moved, return_exceptions=True)

    async def _apply_changes(self) -> None:
        watch = self.home.doors.ledger.watch(self.keys.state, self.state.revision + 1)
        async for changes in watch:
            if changes:
                self.state.apply_all(changes)
                if self.seen is None and self.state.ledger_id not in {"", *self.state.cleaned}:
                    self._remember(self.state.as_seen())  # who only watches freezes, too
                if self.state.being_rebuilt:
                    await self.refresh()  # freezes until it is whole
                self.waiting.look()
            else:  # a new connection, perhaps to a ledger that was set back and rebuilt meanwhile
                await self.refresh()

    async def refresh(self) -> JobState:
        """Re-list now; the mirror is then at least as new as this call."""
        known = self.state.revision
        truth = await self.truth()
        another = truth.ledger_id != self.state.ledger_id
        back = truth.revision < known
        if back and truth.ledger_id and not another:
            self.ledger_is_at(truth.revision, known)  # freezes
            return await self.truth()
        if back or (another and self.state.ledger_id):
            self._moved.set()
        if back or another or truth.revision >= self.state.revision:
            self.state = truth
            self.following = True
            self.wake()
        return truth

    async def truth(self) -> JobState:
        """A linearizable listing. Raises LedgerUnavailable, or LedgerForgot and freezes."""
        seen = self.seen  # as of now: listings that overlap may be answered in another order
        known, asked_at = list(self.state.commits.values()), self.home.now()
        cleaned = frozenset(self.state.cleaned)
        truth = JobState.listed(self.keys, await self.home.doors.ledger.list(self.keys.state))
        undone = truth.undoes(cleaned)
        truth.keep_cleaned(self.state)
        same = seen is not None and seen.ledger_id == truth.ledger_id
        if same and seen is not None and (why := truth.went_back(seen, known)):
            self.freeze(why)
        if self.seen is not None and self.seen.back:  # by this, or by what was read meanwhile
            seen = self.seen
        was, self.frozen = self.frozen, undone or forgot(seen, truth)
        if self.frozen:
            if not was:
                self._froze(older=not truth.being_rebuilt)
            raise LedgerForgot(f"job {self.job}: {self.frozen}; see `p2pckpt ledger rebuild`")
        same = self.seen is not None and self.seen.ledger_id == truth.ledger_id
        at = self.seen.revision if self.seen is not None and same else -1
        if truth.ledger_id and at < truth.revision:
            self._remember(truth.as_seen())
        self.proves(truth.revision, asked_at)
        return truth

    def proves(self, revision: int, asked_at: float) -> None:
        """A linearizable read of records of this job, begun at `asked_at`, had this revision."""
        if revision > self.proven_revision or asked_at - self.proven_at > self.home.config.lease_s:
            self.proven_revision, self.proven_at = revision, asked_at
        seen, generation = self.seen, self.state.generation
        same = seen is not None and seen.ledger_id == self.state.ledger_id and not seen.back
        if seen is not None and same and seen.revision < revision:
            number = max(seen.generation, generation.number if generation else 0)
            self._remember(structs.replace(seen, revision=revision, generation=number))

    def freeze(self, why: str) -> None:
        """The ledger is older than before: freeze, beyond a restart."""
        if self.seen is not None and not self.seen.back:
            self.frozen = f"the ledger went back: {why}"
            self._froze(older=True)
            self._remember(structs.replace(self.seen, back=self.frozen))

    def _froze(self, older: bool) -> None:
        """In an ``older`` ledger joins and reports of the dead may stand again under the session's
        lease, so that ends."""
        if older:
            self.home.session = None
        self._moved.set()  # the watch waits for revisions that may never come again
        self.note("frozen", why=self.frozen)

    def _remember(self, seen: r.LedgerSeen) -> None:
        """Beside the bytes, for the next agent of this store."""
        self.seen = seen
        self.home.remember(self.job, seen)

    def wake(self) -> None:
        """Let everybody who waits look again: soon, and once for all that happens until then."""
        self.waiting.wake()

    def until(self, ready: Callable[[], bool], timeout_s: float | None) -> Awaitable[bool]:
        """Wait until `ready()`, looking after every change; False after `timeout_s`."""
        return self.waiting.until(ready, timeout_s)

    def tell_lost(self) -> None:
        """Files of the newest step are lost or were: repair looks again at what it has of it."""
        self.losses += 1
        self.wake()

    # -- deeds ------------------------------------------------------------------------------------

    async def found(self) -> None:
        """Make the job's records if there are none: ledger id and floor."""
        if (await self.refresh()).ledger_id:
            return
        born = Put(self.keys.ledger_id, self.home.doors.ids.new().encode())
        floor = Put(self.keys.floor, FLOOR_START)
        await self.transact(Txn((absent(self.keys.ledger_id),), (born, floor)))
        await self.refresh()

    async def transact(self, txn: Txn, though_frozen: bool = False) -> bool:
        """One transaction; False if a compare failed *or* the answer is not known.

        Every transaction of this protocol creates something or compares a revision, so the caller
        settles an ambiguous answer by reading back, as it does when it lost the race. Raises
        LedgerForgot while this node is frozen, unless it is about who lives here.
        """
        if self.frozen and not though_frozen:
            raise LedgerForgot(f"job {self.job}: {self.frozen}; see `p2pckpt ledger rebuild`")
        try:
            held = await self.home.doors.ledger.transact(txn) is not None
        except AmbiguousAnswer as e:
            self.note("ambiguous", why=str(e))
            self.trouble = str(e)
            await asyncio.sleep(RETRY_S)  # a full etcd says no at once, and is asked again
            return False
        except LedgerUnavailable as e:
            self.trouble = str(e)
            raise
        self.trouble = ""
        return held

    def because(self, reason: str) -> str:
        """A reason why a save failed, with what the ledger has against it, if anything."""
        return f"{reason}; etcd: {self.trouble}" if self.trouble else reason

    async def abort(self, attempt: r.Attempt, reason: str) -> None:
        """Put ABORT unless there is an outcome; returns when some outcome is known to stand.

        One try at a time, and a pause after one that failed: while the ledger refuses, saves that
        are skipped pile up, and each has such an ABORT to put.
        """
        outcome = r.Outcome(
            attempt=attempt, verdict=r.Verdict.ABORT, by=self.home.node, reason=reason[:500]
        )
        while not self.decided(attempt):
            async with self._aborting:
                if self.decided(attempt):
                    return
                try:
                    if await self.transact(abort_txn(self.state, outcome)):
                        self.note("abort", attempt=attempt.key, reason=reason)
                    await self.refresh()
                except (LedgerForgot, LedgerUnavailable, NoRoom):
                    pass
                if not self.decided(attempt):
                    await asyncio.sleep(RETRY_S)

    def decided(self, attempt: r.Attempt) -> bool:
        """Has the attempt an end, as far as the mirror knows? (Monotonic, so it may be trusted.)"""
        state = self.state
        return (
            attempt.key in state.outcomes
            or state.committed(attempt) is not None
            or state.settled(attempt) != ""
            or (state.ledger_id != "" and state.ledger_id != attempt.ledger_id)
        )

    def track(self, attempt: r.Attempt, sent_bytes: int = 0) -> None:
        """Follow an attempt of which this node holds bytes to its end, and then free them.

        ``sent_bytes``: what one node sends for it; the deadline allows for the slowest link.
        """
        if attempt not in self.tracked:  # of a job that was cleaned one may have the same key
            self.tracked.add(attempt)
            config = self.home.config
            timeout_s = config.attempt_timeout_s + sent_bytes / config.floor_bytes_per_s
            self.home.spawn(f"track {attempt.key}", self._track(attempt, timeout_s))

    async def _track(self, attempt: r.Attempt, timeout_s: float) -> None:
        ended = False

        def settled() -> bool:
            nonlocal ended
            ended = ended or self.decided(attempt)  # for good, whatever a ledger shows later
            return self.state.settled(attempt) != ""

        if not (await self.until(settled, timeout_s + self.spread_s()) or ended):
            known, late_s = self.hindered, self.home.config.takeover_s
            await self.until(lambda: self.decided(attempt) or attempt in known, late_s)
            why = known.get(attempt, "")  # who knows it was first to say so
            await self.abort(
                attempt, self.because(f"no outcome within {timeout_s:.0f} s{why and '; '}{why}")
            )
        while True:
            await self.until(settled, None)
            shown = self.state.revision
            # Were the ledger lost right now, what this goes for must be remembered somewhere.
            await self.until(lambda: not self.uncopied(), self.home.config.ledger_timeout_s)
            try:
                if reason := await self._proven(attempt, shown):
                    break
            except CheckpointError as e:
                self.note("free_later", attempt=attempt.key, why=str(e))
            await asyncio.sleep(RETRY_S)
        held = self.home.holdings.of_attempt(attempt)
        for file in held:
            self.home.holdings.release(file)
        self.home.holdings.sweep_documents()
        self.home.doors.arena.remove(copy_name(attempt))
        self.tracked.discard(attempt)
        self.note("freed", attempt=attempt.key, reason=reason, files=len(held))
        self.wake()

    async def _proven(self, attempt: r.Attempt, shown: int) -> str:
        """Why an attempt may be freed now, "" if it may not: the mirror says so as of `shown`, and
        a linearizable read not older than that found the ledger not gone back. One read serves all
        who wait. Raises LedgerUnavailable, LedgerForgot."""
        async with self._proving:
            young = self.home.now() - self.proven_at <= self.home.config.lease_s
            if not self.frozen and young and self.proven_revision >= shown:
                return self.state.settled(attempt)
            return (await self.truth()).settled(attempt)

    def spread_s(self) -> float:
        """A random while, so that not all nodes of the roster ask for the same at once."""
        return self.home.doors.ids.uniform(0.0, self._nodes * SPACING_S)

    def news_s(self) -> float:
        """So long nothing is written that all nodes would have to hear of besides an outcome."""
        return self._nodes * NEWS_S

    def turn_s(self) -> float:
        """When this node steps in for rank 0's: at random, some nodes in `commit_delay_high_s`."""
        low, high = self.home.config.commit_delay_low_s, self.home.config.commit_delay_high_s
        spread = (high - low) * max(1.0, self._nodes / TAKERS)
        return self.home.doors.ids.uniform(low, low + spread)

    @property
    def _nodes(self) -> int:
        return len(self.roster.nodes) if self.roster is not None else 0

    def uncopied(self) -> list[r.Commit]:
        """Commits of which this node holds bytes, and no copy of the record beside them yet."""
        documents, holdings = self.home.doors.arena.documents(), self.home.holdings
        new = (c for c in self.state.commits.values() if copy_name(c.attempt) not in documents)
        return [commit for commit in new if holdings.of_attempt(commit.attempt)]

    async def load_roster(self) -> Roster | None:
        """The current generation's roster, read once. None while there is no generation."""
        generation = self.state.generation
        if generation is None:
            return None
        if self.roster is None or self.roster.generation != generation:
            prefix = self.keys.roster_pieces(generation.roster_digest)
            listing = await self.home.doors.ledger.list(prefix)
            pieces = [unpack(e.value, r.RosterPiece) for e in listing.entries]
            if len(pieces) == generation.pieces:
                nodes = tuple(n for piece in pieces for n in piece.nodes)
                self.roster = Roster(generation, nodes)
        return self.roster
