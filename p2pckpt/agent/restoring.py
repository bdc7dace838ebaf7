"""One restore of the job on this node: a decision for all, bytes for local ranks, one closing.

    restore call -> decision (one for the generation) -> local rank files -> trainers load
                 -> node report -> group report -> closed, the same for all ranks

A call of the trainers is answered by ballots. A ballot that ends in RETRY or BAD lets the next one
begin, up to `max_ballots`; the n-th restore call of every rank belongs to the n-th ballot that ends
for good, so ranks that come early or late meet in the same one.

Contract: no rank returns before the closing says OK. An attempt is read only under a reader's
record, so that it cannot be retired meanwhile. Trouble with time, room or peers is RETRY; only
bytes that were read and were wrong quarantine a step.
"""

from __future__ import annotations

import asyncio

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.bringing import bring, fetching, give_back, staging
from p2pckpt.agent.closing import Ballot, over, see_closed
from p2pckpt.agent.context import JobContext, Roster
from p2pckpt.agent.deciding import check_current, decision_of, groups_anywhere
from p2pckpt.agent.gather import Gathering
from p2pckpt.agent.holdings import Held, document_name
from p2pckpt.agent.reading import hold, let_go, reads
from p2pckpt.errors import (
    CheckpointError,
    IntegrityError,
    RestoreFailed,
    SourcesAway,
    StaleGenerationError,
)
from p2pckpt.jobstate import JobState
from p2pckpt.ports import Region
from p2pckpt.restore.fetch import fetch_manifest, source_of
from p2pckpt.restore.pipeline import Fetched, Stage, failure, restore_rank
from p2pckpt.restore.verify import open_manifest, snapshot_table
from p2pckpt.traffic import Traffic
from p2pckpt.wire import pack

ANSWER_BEFORE = 0.9
"""Share of a trainer's patience after which it is told why there is no decision yet."""


def final(closed: r.Closed) -> bool:
    """Does this closing answer a restore call for good?"""
    return closed.ballot > 0 and (closed.close is r.Close.OK or closed.choice is r.Choice.UNPROVEN)


def where_is(state: JobState, generation: int, ordinal: int) -> tuple[int, r.Closed | None, int]:
    """(ballot, its final closing if it has one, ballots that failed before) of a restore call."""
    closings = [c for (g, _), c in sorted(state.closed.items()) if g == generation and c.ballot]
    ends = [c for c in closings if final(c)]
    if ordinal < len(ends):
        return ends[ordinal].ballot, ends[ordinal], 0
    after = ends[-1].ballot if ends else 0
    last = closings[-1].ballot if closings else 0
    return last + 1, None, last - after


class Restoring:
    """The restores of one job on this node."""

    def __init__(self, ctx: JobContext, gathering: Gathering) -> None:
        self.ctx = ctx
        self.gathering = gathering
        self.ballots: dict[int, Ballot] = {}

    @property
    def reading(self) -> list[int]:
        """Ballots whose step this node reads now."""
        return [n for n, ballot in self.ballots.items() if reads(self.ctx, *_reader(ballot))]

    # -- the trainers' calls ----------------------------------------------------------------------

    async def restore(self, rank: int, call: w.RestoreCall) -> r.Record:
        """The rank's file, RestoreNothing, or RestoreAgain. Raises RestoreFailed."""
        ctx = self.ctx
        roster = await self._roster()
        generation, config = roster.generation, ctx.home.config
        number, closed, failures = where_is(ctx.state, generation.number, call.ordinal)
        if closed is not None:
            return self._answer(closed)
        if failures >= config.max_ballots:
            raise RestoreFailed(f"{failures} ballots failed; the last: {self._last(generation)}")
        asked_at = ctx.home.now()
        decision = await self._decision(roster, number, call)
        check_current(ctx, generation.number)  # a rebuilt ledger has closings of such numbers too
        if (ended := ctx.state.closed.get((generation.number, number))) is not None:
            return self._answer(ended) if final(ended) else w.RestoreAgain(reason=ended.reason)
        assert decision is not None
        assert decision.commit is not None
        ballot = self._ballot(roster, decision)
        ballot.decide_s = max(ballot.decide_s, ctx.home.now() - asked_at)
        if call.step is not None and decision.commit.attempt.step != call.step:
            reason = f"rank {rank} asked for step {call.step}, others for another"
            failed = w.RestoreDone(ballot=number, failed=reason, retryable=True)
            await self._result(ballot, rank, failed)
            return w.RestoreAgain(reason=reason)
        try:
            file = await self._file(ballot, rank)
            if ballot.ended:
                raise SourcesAway(f"ballot {number} ended before rank {rank} had its file")
            return file
        except (CheckpointError, TimeoutError) as e:
            retryable = not (isinstance(e, RestoreFailed) and not e.retryable)
            failed = w.RestoreDone(ballot=number, failed=str(e), retryable=retryable)
            reply = await self._result(ballot, rank, failed)
            return w.RestoreAgain(reason=reply.reason or str(e))
        finally:
            if ballot.ended:
                ctx.home.spawn(f"reader of ballot {number}", self._give_back(ballot))

    async def _decision(
        self, roster: Roster, number: int, call: w.RestoreCall
    ) -> r.Decision | None:
        """Of a ballot; SourcesAway, which says why, a little before the trainer asks no more."""
        within_s = ANSWER_BEFORE * call.timeout_s
        try:
            async with asyncio.timeout(within_s):
                return await decision_of(self.ctx, roster, number, call.step)
        except TimeoutError:
            why = self.ctx.because(f"ballot {number}: no decision within {within_s:.0f} s")
            raise SourcesAway(why) from None

    async def done(self, rank: int, call: w.RestoreDone) -> r.Record:
        """The rank loaded its state, or could not; answered with the closing for all."""
        roster = await self._roster()
        ballot = self.ballots.get(call.ballot)
        if ballot is None or ballot.decision.generation != roster.generation.number:
            raise RestoreFailed(f"ballot {call.ballot} is not open on {self.ctx.home.node}")
        return w.RestoreClosed(closed=await self._result(ballot, rank, call))

    async def mend(self, rank: int, call: w.MendChunk) -> r.Record:
        """Bytes of the rank's file are wrong: bring them anew from other nodes, in place."""
        ballot = self.ballots.get(call.ballot)
        held = ballot.files.get(rank) if ballot else None
        commit = ballot.decision.commit if ballot else None
        if ballot is None or held is None or commit is None or held.attempt != commit.attempt:
            raise RestoreFailed(f"rank {rank} has no restore file in ballot {call.ballot}")
        self.ctx.note("mend", rank=rank, offset=call.offset, length=call.length)
        length, digest, writer = held.length, held.manifest_digest, object()

        async def in_place(size: int) -> Region:
            return self.ctx.home.holdings.region(held, 0, size)

        self.ctx.home.holdings.reopen(held, writer)
        try:
            await self._again(ballot, rank, in_place)
        except BaseException as e:
            self._written(held, length, digest)
            held.doubted = True  # what was right in it still is: a read checks it
            if isinstance(e, RestoreFailed) and not e.retryable:
                raise IntegrityError(str(e)) from e  # wrong here and elsewhere: BAD, not RETRY
            raise
        self._written(held, length, digest)
        return w.Accepted()

    def _written(self, held: Held, length: int, digest: str) -> None:
        """A file that was mended in place has no writer any more, and is what it was before; but if
        the scrubber brought the own copy meanwhile, it is read to the end of the ballot only."""
        holdings = self.ctx.home.holdings
        assert held.attempt is not None, "it has a writer"
        other = holdings.find(held.attempt, r.FileKind.SLOT, held.part)
        if other and not other.bad and other.manifest_digest == digest:
            held.kind = r.FileKind.STAGE
        if held.kind is r.FileKind.STAGE:
            holdings.writer_done(held)
        else:
            holdings.seal(held, length, digest)

    # -- bytes ------------------------------------------------------------------------------------

    async def _file(self, ballot: Ballot, rank: int) -> w.RestoreFile:
        """The rank's snapshot as a file of this node: its own slot, or fetched from peers."""
        holdings = self.ctx.home.holdings
        commit = ballot.decision.commit
        assert commit is not None
        attempt = commit.attempt
        await hold(self.ctx, *_reader(ballot))
        share = await self._share(commit, rank)
        held = holdings.find(attempt, r.FileKind.SLOT, rank)
        source = "local"
        if held is None or held.manifest_digest != share.manifest_digest:
            held, manifest = await self._bring(ballot, rank)
            first = ballot.files.get(rank)
            if first is not None and first is not held and held.kind is r.FileKind.STAGE:
                give_back(self.ctx.home, held)  # the rank had lost patience, and asked again
                held = first
            source = source_of(ballot.fetched[rank].bytes_from)
        else:
            manifest = await self._manifest(attempt, share, rank)
        ballot.files[rank] = held
        fetched = ballot.fetched.get(rank)
        return w.RestoreFile(
            ballot=ballot.decision.ballot,
            step=attempt.step,
            file=held.file,
            length=manifest.of_rank(rank).length,
            chunk_bytes=manifest.chunk_bytes,
            table=snapshot_table(manifest, rank),
            source=source,
            meta=manifest.of_rank(rank).meta,
            bytes_from=fetched.bytes_from if fetched else {},
            seconds={"decide": ballot.decide_s, **(fetched.seconds if fetched else {})},
        )

    async def _manifest(self, attempt: r.Attempt, share: r.SealedShare, rank: int) -> r.Manifest:
        """Of an own slot: the copy beside it, or another one if this one is gone or damaged."""
        arena, name = self.ctx.home.doors.arena, document_name(share.manifest_digest)
        if (packed := arena.document(name)) is not None:
            try:
                return open_manifest(packed, share.manifest_digest)
            except IntegrityError as e:
                self.ctx.note("manifest_damaged", attempt=attempt.key, rank=rank, why=str(e))
        job = await fetching(self.ctx, attempt, share, rank, Traffic.RESTORE)
        try:
            manifest = await fetch_manifest(job)
        except IntegrityError as e:
            raise failure(job, str(e)) from e
        arena.put_document(name, pack(manifest))
        return manifest

    async def _bring(self, ballot: Ballot, rank: int) -> tuple[Held, r.Manifest]:
        """Fetch a rank into a new slot; it is the rank's own slot from then on.

        A step that RAM has retired and only the object store has is not taken up again: its file
        is a stage that goes when the ballot ends.
        """
        ctx = self.ctx
        commit = ballot.decision.commit
        assert commit is not None
        attempt = commit.attempt
        lives = ctx.state.committed(attempt) is not None
        if lives:
            ctx.track(attempt)
        share = await self._share(commit, rank)
        job = await fetching(ctx, attempt, share, rank, Traffic.RESTORE)
        held, fetched = await bring(ctx.home, job, r.FileKind.SLOT if lives else r.FileKind.STAGE)
        ballot.fetched[rank] = fetched
        self._note_fetched(rank, fetched)
        return held, fetched.manifest

    async def _again(self, ballot: Ballot, rank: int, room: Stage) -> None:
        """Fetch what is bad in the file that a rank has, into it."""
        commit = ballot.decision.commit
        assert commit is not None
        share = await self._share(commit, rank)
        job = await fetching(self.ctx, commit.attempt, share, rank, Traffic.RESTORE)
        job.in_place = True
        async with staging(self.ctx.home, job) as scratch:
            self._note_fetched(rank, await restore_rank(job, room, scratch))

    def _note_fetched(self, rank: int, fetched: Fetched) -> None:
        self.ctx.note(
            "fetched",
            rank=rank,
            attempt=fetched.manifest.attempt.key,
            bytes_from=fetched.bytes_from,
            decoded=list(fetched.decoded),
        )

    async def _share(self, commit: r.Commit, rank: int) -> r.SealedShare:
        for group in await groups_anywhere(self.ctx, commit):
            for share in group.shares:
                if rank in share.ranks:
                    return share
        # They were there when it was decided; no byte was read, so the step is not bad.
        raise SourcesAway(f"step {commit.attempt.step}: no group record has rank {rank}")

    # -- closing ----------------------------------------------------------------------------------

    def _ballot(self, roster: Roster, decision: r.Decision) -> Ballot:
        known = self.ballots.get(decision.ballot)
        if known is None or known.decision != decision:
            found = roster.find(self.ctx.home.node)
            assert found is not None
            known = self.ballots[decision.ballot] = Ballot(
                decision, found[1].ranks, self.ctx.state.ledger_id
            )
            self.ctx.home.spawn(
                f"ballot {decision.generation}/{decision.ballot}", self._see_closed(roster, known)
            )
        return known

    async def _result(self, ballot: Ballot, rank: int, done: w.RestoreDone) -> r.Closed:
        """Note a rank's result and wait for the closing; StaleGenerationError if fenced."""
        ctx, key = self.ctx, (ballot.decision.generation, ballot.decision.ballot)
        ballot.results[rank] = done
        ctx.wake()
        await ctx.until(lambda: key in ctx.state.closed or over(ctx, ballot), None)
        await self._roster()
        if key not in ctx.state.closed:
            raise StaleGenerationError(
                f"generation {key[0]} is over, and so is its ballot {key[1]}"
            )
        return ctx.state.closed[key]

    async def _see_closed(self, roster: Roster, ballot: Ballot) -> None:
        """Until the ballot is closed; then this node's staging and reader's record go."""
        await see_closed(self.ctx, roster, ballot, self.gathering)
        ballot.ended = True
        await self._give_back(ballot)

    async def _give_back(self, ballot: Ballot) -> None:
        for held in ballot.files.values():
            if held.kind is r.FileKind.STAGE:
                self.ctx.home.holdings.release(held)
        await let_go(self.ctx, *_reader(ballot))

    # -- small things -----------------------------------------------------------------------------

    async def _roster(self) -> Roster:
        roster = await self.ctx.load_roster()
        if roster is None or roster.find(self.ctx.home.node) is None:
            raise RestoreFailed(f"{self.ctx.home.node} has no rank in the current generation")
        return roster

    def _answer(self, closed: r.Closed) -> r.Record:
        if closed.choice is r.Choice.NOTHING:
            return w.RestoreNothing(ballot=closed.ballot, reason=closed.reason)
        if closed.choice is r.Choice.UNPROVEN:
            raise RestoreFailed(closed.reason)
        raise RestoreFailed(f"ballot {closed.ballot} was closed without this rank")

    def _last(self, generation: r.Generation) -> str:
        closings = [
            c for (g, _), c in sorted(self.ctx.state.closed.items()) if g == generation.number
        ]
        return closings[-1].reason if closings else "none"


def _reader(ballot: Ballot) -> tuple[r.Attempt, str]:
    """What a ballot reads, and as whom."""
    decision = ballot.decision
    assert decision.commit is not None
    return decision.commit.attempt, f".{decision.generation}.{decision.ballot}"
