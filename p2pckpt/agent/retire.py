"""Old steps go, by record only; and the ledger forgets what is settled.

After a commit, whatever is beyond the newest `keep_last` steps of the current lineage is retired:
one fenced transaction puts `retired/<attempt>` and takes the commit away. Each holder then frees
its own bytes after its own read (`JobContext._track`). There is no remote delete.

Outcomes and retirements would pile up, so the floor follows: everything below it is settled, and a
commit or abort of such an attempt is refused by its own transaction. So a committer that slept
through the clean-up can do no harm. What lies outside of the mirror (groups, reports, rosters) and
belongs to earlier generations is swept once a generation.

Contract: `decide_*` are pure. Never retired: one of the newest keep_last steps of the lineage, the
base while the lineage has fewer than keep_last steps of its own, anything with a reader. A commit
that a rebuild kept counts as one of the newest only once it or a newer one was restored: the ledger
that was lost may have said that its bytes go. Never swept: the groups of a step that is committed
or offloaded.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from p2pckpt import records as r
from p2pckpt.agent.context import RETRY_S, JobContext, Roster
from p2pckpt.errors import CheckpointError
from p2pckpt.jobstate import JobState
from p2pckpt.ports import (
    Listing,
    Put,
    Txn,
    absent,
    none_in,
    none_newer,
    prefix_end,
    present,
    value_is,
)
from p2pckpt.wire import pack

RECENT_OUTCOMES = 8
"""Outcomes kept above the floor, for trainers that ask a little late."""

NEVER_OPENED = 64
"""An attempt that lies so far behind a decided one is over: no agent was there when it was due, so
that nobody puts an outcome; or it is slower than any deadline, and its commit will be refused."""

OPERATIONS = 100
"""Of one clean-up transaction; etcd allows 128."""

OTHERS_AFTER_S = 5.0
"""Agents other than that of rank 0 retire what is still due after this."""


@dataclass(frozen=True)
class Retirement:
    """One commit that may go, because of the newer ones at `because`."""

    commit: r.Commit
    because: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Trim:
    """The new floor and the keys that it makes needless."""

    floor: str
    deletes: tuple[str, ...]


def decide_retire(state: JobState, keep_last: int) -> list[Retirement]:
    """Commits that keep_last newer ones of the current lineage make needless, oldest first."""
    if not 1 <= keep_last < len(state.commits) or (current := state.current_lineage()) is None:
        return []
    bad, read = state.quarantined(), state.restored_step(current.lineage)
    good = [
        step
        for step in state.steps(current.lineage)
        if (attempt := state.commits[current.lineage, step].attempt).key not in bad
        and (attempt.ledger_id == state.ledger_id or step <= read)
    ]
    newest = good[-keep_last:]
    if len(newest) < keep_last:
        return []
    because = tuple(state.keys.commit(current.lineage, step) for step in newest)
    out = []
    for (lineage, step), commit in sorted(state.commits.items()):
        if lineage == current.lineage and step < newest[0]:
            out.append(Retirement(commit, because, f"{keep_last} newer steps in its lineage"))
        elif lineage != current.lineage:
            out.append(Retirement(commit, because, f"{keep_last} steps in a later lineage"))
    return out


def retire_txn(state: JobState, due: Retirement, by: str) -> Txn:
    """Irrevocable, and only if nobody reads it and nothing of the reason changed."""
    attempt, keys = due.commit.attempt, state.keys
    commit_key = keys.commit(due.commit.lineage, attempt.step)
    readers = keys.readers(attempt)
    record = r.Retired(attempt=attempt, by=by, reason=due.reason)
    return Txn(
        compares=(
            state.same_ledger(),
            state.same_generation(_number(state)),
            none_newer(keys.closings, state.revision),  # no lineage was opened on it meanwhile
            absent(keys.retired(attempt)),
            present(commit_key),
            none_in(readers, prefix_end(readers)),
            *(present(key) for key in due.because),
        ),
        puts=(Put(keys.retired(attempt), pack(record)),),
        deletes=(commit_key, *(keys.group(attempt, g) for g in range(due.commit.groups))),
    )


def decide_trim(state: JobState) -> Trim | None:
    """How far the floor may rise: past decided attempts, but for the most recent ones."""
    if state.generation is None or not state.floor:
        return None
    number, keys = state.generation.number, state.keys
    floor_generation, floor_ordinal = (int(part) for part in state.floor.split("."))
    ordinal = floor_ordinal if floor_generation == number else 0
    decided = {o.attempt.ordinal for o in state.outcomes.values() if o.attempt.generation == number}
    first = ordinal
    newest = max(decided, default=0)
    ordinal = max(ordinal, newest - NEVER_OPENED)
    while ordinal in decided:
        ordinal += 1
    floor = f"{number:010d}.{max(first, ordinal - RECENT_OUTCOMES):010d}"
    deletes = []
    for _, outcome in sorted(state.outcomes.items()):
        if outcome.attempt.floor_key < floor:
            deletes.append(keys.outcome(outcome.attempt))
            if outcome.verdict is r.Verdict.ABORT and outcome.attempt.generation == number:
                groups = range(state.generation.pieces)  # of earlier generations: `decide_sweep`
                deletes += [keys.group(outcome.attempt, g) for g in groups]
    deletes += [keys.retirements + key for key in sorted(state.retired) if key < floor]
    current = state.current_lineage()
    for (generation, ballot), closed in sorted(state.closed.items()):
        quarantines = closed.close is r.Close.BAD and closed.commit is not None
        if quarantines and closed.commit and state.committed(closed.commit.attempt):
            continue
        if generation < number and closed not in (current, *_ends(state, closed.lineage)):
            deletes.append(keys.closed(generation, ballot))
    deletes += [keys.decision(g, b) for g, b in sorted(state.decisions) if g < number]
    deletes += [keys.schedule(g) for g in sorted(state.schedules) if g < number]
    return Trim(floor, tuple(deletes)) if floor != state.floor or deletes else None


def _ends(state: JobState, lineage: str) -> tuple[r.Closed, ...]:
    """A living lineage's first closing, which tells its base, and its last."""
    if not state.known_steps(lineage):
        return ()
    found = [c for _, c in sorted(state.closed.items()) if c.lineage == lineage]
    found = [c for c in found if c.close is r.Close.OK]
    return (found[0], found[-1]) if found else ()


def trim_txn(state: JobState, trim: Trim) -> Txn:
    """The floor first; then, at most OPERATIONS at a time, what lies below it."""
    compares = (
        state.same_ledger(),
        state.same_generation(_number(state)),
        value_is(state.keys.floor, state.floor.encode()),  # it never goes down
    )
    return Txn(compares, (Put(state.keys.floor, trim.floor.encode()),), trim.deletes[:OPERATIONS])


def decide_sweep(state: JobState, listing: Listing) -> tuple[str, ...]:
    """Keys outside of ``keys.state`` that only generations before the present one could need.

    ``listing``: of ``keys.root``, read after `state`. Groups, reports of ballots and of trainers go
    by the generation in their name; rosters if they are not the present one's.
    """
    if state.generation is None:
        return ()
    keys, present_one = state.keys, f"{state.generation.number:010d}"
    kept = {c.attempt.key for c in state.commits.values()} | set(state.offloaded)
    unread = "\n".join(state.unreadable)
    needless = []
    for entry in listing.entries:
        kind, name = (*entry.key[len(keys.root) :].split("/"), "")[:2]
        match kind:
            case "group":
                known = name in kept or name in unread or state.commit_unreadable()
                gone = name < present_one and not known
            case "report" | "trainers":
                gone = name < present_one
            case "roster":
                gone = name != state.generation.roster_digest
            case _:
                gone = False
        if gone:
            needless.append(entry.key)
    return tuple(needless)


def sweep_txns(state: JobState, needless: tuple[str, ...]) -> list[Txn]:
    """At most OPERATIONS at a time, while the generation that was judged by stands.

    A launch that forms meanwhile may lose its roster; its own transaction notices that.
    """
    fence = (state.same_ledger(), state.same_generation(_number(state)))
    starts = range(0, len(needless), OPERATIONS)
    return [Txn(fence, (), needless[at : at + OPERATIONS]) for at in starts]


NOBODY = ("", 0)
"""No generation that this node leads, or has swept."""


async def retire(ctx: JobContext) -> None:
    """For ever: retire what is due, then trim; rank 0's agent at once, others if it does not.

    The sweep is rank 0's agent's alone: it reads all of the job, and the next generation's sweep
    finds what this one left.
    """
    swept, judged = NOBODY, _Judged(ctx)

    def wanted() -> bool:
        if (led := _led(ctx)) == NOBODY:
            return judged.perhaps()
        return judged.crowded() or bool(judged.due()) or led != swept

    while True:
        await ctx.until(wanted, None)
        led = _led(ctx)
        if led != NOBODY:
            await asyncio.sleep(ctx.news_s())  # the outcome goes before what follows from it
        elif await _somebody_did(ctx, judged):
            continue
        try:
            if led not in (NOBODY, swept) and await _sweep(ctx):
                swept = led
            await _retire_due(ctx)
        except CheckpointError as e:  # without room for what it has seen, too: it goes on
            ctx.note("retire_later", why=str(e))
        await ctx.until(lambda: not wanted(), RETRY_S)  # the mirror shows what was done


async def _somebody_did(ctx: JobContext, judged: _Judged) -> bool:
    """Is nothing due any more, within the time that others give rank 0's agent?"""
    half_s = (OTHERS_AFTER_S + ctx.turn_s()) / 2
    if await ctx.until(lambda: not judged.perhaps(), half_s):
        return True
    return await ctx.until(lambda: not judged.due(), half_s)


async def _retire_due(ctx: JobContext) -> None:
    """Judge and act on one listing: the mirror moves while transactions are under way."""
    truth = await ctx.truth()
    generation = truth.generation
    for due in decide_retire(truth, generation.keep_last) if generation else []:
        if await ctx.transact(retire_txn(truth, due, ctx.home.node)):
            ctx.note("retired", attempt=due.commit.attempt.key, reason=due.reason)
    if trim := decide_trim(truth):
        await ctx.transact(trim_txn(truth, trim))


async def _sweep(ctx: JobContext) -> bool:
    """Is all gone, as far as is known? Who got no answer looks again."""
    truth = await ctx.truth()
    needless = decide_sweep(truth, await ctx.home.doors.ledger.list(ctx.keys.root))
    for txn in sweep_txns(truth, needless):
        if not await ctx.transact(txn):
            return False
    if needless:
        ctx.note("swept", keys=len(needless))
    return True


@dataclass
class _Judged:
    """What the mirror says is due: judged once for each of its revisions, however often asked."""

    ctx: JobContext
    _state: JobState | None = None
    _revision: int = -1
    _roster: Roster | None = None
    _found: list[Retirement] = field(default_factory=list)
    _crowded: bool = False

    def perhaps(self) -> bool:
        """Is there more than is kept? Cheap, for those who leave it to rank 0's agent anyway; so
        not before it is known here who that is."""
        generation, roster = self.ctx.state.generation, self.ctx.roster
        if generation is None or roster is None or roster.generation != generation:
            return False
        ours = roster.find(self.ctx.home.node) is not None
        return ours and len(self.ctx.state.commits) > generation.keep_last

    def crowded(self) -> bool:
        """Are there many outcomes, and may some go? One that is missing may hold the floor."""
        self.due()
        return self._crowded

    def due(self) -> list[Retirement]:
        """Nothing on a node that is not of the generation."""
        state, roster = self.ctx.state, self.ctx.roster
        same = state is self._state and roster is self._roster
        if not same or state.revision != self._revision:
            self._state, self._revision, self._roster = state, state.revision, roster
            generation, node = state.generation, self.ctx.home.node
            ours = roster is not None and roster.find(node) is not None
            self._found = decide_retire(state, generation.keep_last) if generation and ours else []
            many = len(state.outcomes) > 2 * RECENT_OUTCOMES
            self._crowded = many and decide_trim(state) is not None
        return self._found


def _led(ctx: JobContext) -> tuple[str, int]:
    """The present generation, which another ledger of the job may have the number of, if this node
    has its rank 0; else NOBODY."""
    roster, number = ctx.roster, _number(ctx.state)
    current = roster is not None and roster.generation.number == number
    led = current and roster and roster.leads(ctx.home.node)
    return (ctx.state.ledger_id, number) if led else NOBODY


def _number(state: JobState) -> int:
    return state.generation.number if state.generation else 0
