"""A finished job goes: its bytes in every agent's RAM, then its records in the ledger.

    decide -> cleaned/<ledger id>, fenced -> every agent frees its own bytes -> the records go

Bytes are freed by nobody but their own agent, after its own read of the irrevocable record
`Cleaned`; that a record is absent is no reason for anything. That record fences as well: no launch
can be installed over a job that is being cleaned. It stays, alone, when all else is gone, so that
an agent that was away learns of it when it returns, and frees what it has.

Contract: `decide_clean` is pure. Nothing goes while a trainer, a forming launch or a reader of the
job lives, by a transaction that compares exactly this. Cleaning may be interrupted anywhere and
done again. Bytes of other ledgers of the job (of an etcd that was wiped) go along, named before.
Checkpoints in the object store stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from msgspec import structs

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.context import RETRY_S, Home, JobContext
from p2pckpt.agent.deciding import ask_all
from p2pckpt.agent.holdings import copy_name
from p2pckpt.agent.polling import poll
from p2pckpt.errors import CheckpointError, FormatError, LedgerUnavailable
from p2pckpt.jobstate import JobState, entry_of
from p2pckpt.ports import (
    Compare,
    Entry,
    Listing,
    Put,
    Txn,
    absent,
    none_in,
    none_newer,
    prefix_end,
    unchanged,
    value_is,
)
from p2pckpt.wire import pack, unpack

OPERATIONS = 100
"""Of one transaction; etcd allows 128."""

CONFIRM_S = 10.0
"""For living agents to free their bytes; who takes longer does it later, by the same record."""

REMOVE_TRIES = 20
"""Rounds of list and delete until nothing was written in between."""


@dataclass(frozen=True)
class Cleaning:
    """What is to go. ``problem``: why it may not; ``found``: there is something at all."""

    problem: str
    found: bool
    ledger_ids: tuple[str, ...]
    steps: tuple[int, ...]
    records: int
    objects: tuple[str, ...]


def _split(keys: r.JobKeys, listing: Listing) -> tuple[list[Entry], dict[str, list[Entry]]]:
    """The job's own records, and those that others own: joins, reports, readers, cleanings."""
    alive = {name: f"{keys.root}{name}/" for name in ("join", "trainers", "readers")}
    alive["cleaned"] = keys.cleanings
    found: dict[str, list[Entry]] = {name: [] for name in alive}
    own = []
    for entry in listing.entries:
        for name, prefix in alive.items():
            if entry.key.startswith(prefix):
                found[name].append(entry)
                break
        else:
            own.append(entry)
    return own, found


def decide_clean(
    keys: r.JobKeys, listing: Listing, held: Mapping[str, w.HeldReply], seen: Mapping[str, str]
) -> Cleaning:
    """Judge a job from a listing of `keys.root`, from what all agents hold, and ``seen``: the
    ledger id that each agent (by node) remembers."""
    own, alive = _split(keys, listing)
    below = tuple(e for e in listing.entries if e.key.startswith(keys.state))
    state = JobState.listed(keys, Listing(below, listing.revision))
    ids = {state.ledger_id, *seen.values()}
    ids |= {c.attempt.ledger_id for c in state.commits.values()}
    ids |= set(state.rebuilt.replaces) if state.rebuilt else set()
    ids |= {f.attempt.ledger_id for reply in held.values() for f in reply.files}
    steps = {c.attempt.step for c in state.commits.values()}
    steps |= {f.attempt.step for reply in held.values() for f in reply.files}
    known = set(seen.values()) - state.cleaned  # an agent waits, frozen, for a ledger that is gone
    found = bool(own or known) or any(reply.files for reply in held.values())
    return Cleaning(
        _problem(alive),
        found,
        tuple(sorted(ids - {""})),
        tuple(sorted(steps)),
        len(own),
        tuple(o.manifest for _, o in sorted(state.offloaded.items())),
    )


def _problem(alive: Mapping[str, list[Entry]]) -> str:
    """Who still needs the job; "" if nobody."""
    for entry in alive["trainers"]:
        try:
            report = unpack(entry.value, r.LivingTrainers)
        except FormatError as e:
            return f"a report of living trainers is unreadable ({entry.key}: {e})"
        if report.ranks:
            return f"ranks {list(report.ranks)[:8]} live on {report.node}; end them first"
    for entry in alive["join"]:
        return f"a launch is forming on {entry.key.rsplit('/', 1)[1]}; end it first"
    for entry in alive["readers"]:
        attempt, reader = entry.key.rsplit("/", 2)[1:]
        return f"{reader} is reading step {int(attempt.rsplit('.', 1)[1])}; wait for its end"
    return ""


def announce_txn(keys: r.JobKeys, listing: Listing, ids: tuple[str, ...], by: str) -> Txn:
    """The irrevocable records, only if nobody came or went since `listing` was read."""
    compares = [none_newer(f"{keys.root}trainers/", listing.revision)]
    for name in ("join", "readers"):
        prefix = f"{keys.root}{name}/"
        compares.append(none_in(prefix, prefix_end(prefix)))
    for key in (keys.ledger_id, keys.generation):
        entry = entry_of(listing, key)
        compares.append(absent(key) if entry is None else unchanged(entry))
    puts = (Put(keys.cleaned(i), pack(r.Cleaned(i, by))) for i in ids)
    return Txn(tuple(compares), tuple(puts))


# -- who cleans ------------------------------------------------------------------------------------


async def clean(ctx: JobContext, dry_run: bool) -> w.CleanReply:
    """Decide and, unless `dry_run`, do. Raises CheckpointError if the job changes meanwhile."""
    home, keys = ctx.home, ctx.keys
    held, silent = await ask_all(ctx, w.HeldQuery(ctx.job))
    members = (await home.living()).members.values()
    await poll(ctx, w.LookAtOwn(ctx.job), w.Accepted, members)
    memories = await poll(ctx, w.CopiesQuery(ctx.job), w.CopiesReply, members)
    seen = {n: m.seen.ledger_id for n, m in memories.items() if m.seen is not None}
    listing = await home.doors.ledger.list(keys.root)
    plan = decide_clean(keys, listing, held, seen)
    problem = plan.problem
    if not plan.found:
        problem = f"nothing is known of job {ctx.job}"
    reply = w.CleanReply(
        job=ctx.job,
        problem=problem,
        ledger_ids=plan.ledger_ids,
        steps=plan.steps,
        records=plan.records,
        held={node: h.bytes_held for node, h in sorted(held.items()) if h.bytes_held},
        away=tuple(sorted({*silent, *await _away(ctx, listing, set(held))})),
        objects=plan.objects,
    )
    if problem or dry_run:
        return reply
    if await home.doors.ledger.transact(announce_txn(keys, listing, plan.ledger_ids, home.node)):
        ctx.note("cleaning", ledger_ids=list(plan.ledger_ids))
    else:
        raise CheckpointError(f"job {ctx.job}: it changed while it was looked at; try again")
    left = await _confirmed(ctx, set(plan.ledger_ids))
    await _remove(ctx, plan.ledger_ids)
    ctx.note("cleaned", ledger_ids=list(plan.ledger_ids), left=left)
    return structs.replace(reply, left=tuple(left))


async def _away(ctx: JobContext, listing: Listing, answered: set[str]) -> list[str]:
    """Nodes of the last generation whose agents do not answer."""
    entry = entry_of(listing, ctx.keys.generation)
    if entry is None:
        return []
    try:
        digest = unpack(entry.value, r.Generation).roster_digest
        prefix = ctx.keys.roster_pieces(digest)
        pieces = [unpack(e.value, r.RosterPiece) for e in listing.entries if _in(e, prefix)]
    except FormatError as e:
        ctx.note("roster_unreadable", why=str(e))
        return []
    return [n.node for piece in pieces for n in piece.nodes if n.node not in answered]


def _in(entry: Entry, prefix: str) -> bool:
    return entry.key.startswith(prefix)


async def _confirmed(ctx: JobContext, ids: set[str]) -> list[str]:
    """Wait, at most CONFIRM_S, until no living agent holds bytes; the nodes that still do."""
    deadline = ctx.home.now() + CONFIRM_S
    while True:
        members = (await ctx.home.living()).members
        held = await poll(ctx, w.FreeCleaned(ctx.job), w.HeldReply, members.values())
        done = {n for n, h in held.items() if not any(f.attempt.ledger_id in ids for f in h.files)}
        if members.keys() <= done or ctx.home.now() >= deadline:
            return sorted(members.keys() - done)
        await asyncio.sleep(RETRY_S / 2)


async def _remove(ctx: JobContext, ids: Collection[str]) -> None:
    """All records but the cleanings: the many first; the ledger id last, if nothing is new.

    Reports of living trainers are empty by now, and nobody can make another one. Where the ledger
    had forgotten the job, the next one of its name may have begun: that has its records.
    """
    keys, ledger = ctx.keys, ctx.home.doors.ledger
    last = {keys.ledger_id, keys.floor, keys.generation, keys.rebuilt}
    for _ in range(REMOVE_TRIES):
        listing = await ledger.list(keys.root)
        own, alive = _split(keys, listing)
        entry = entry_of(listing, keys.ledger_id)
        if (entry is None and not own) or (entry and entry.value.decode() not in ids):
            return
        fence: tuple[Compare, ...] = (absent(keys.ledger_id),)
        if entry is not None:
            fence = (value_is(keys.ledger_id, entry.value),)
        rest = [e.key for e in (*own, *alive["trainers"]) if e.key not in last]
        for at in range(0, len(rest), OPERATIONS):
            await ledger.transact(Txn(fence, (), tuple(rest[at : at + OPERATIONS])))
        if not rest:
            families = ("state/", "group/", "report/", "roster/", "offload/")
            quiet = (none_newer(keys.root + name, listing.revision) for name in families)
            deletes = tuple(sorted(e.key for e in own))
            if await ledger.transact(Txn((*fence, *quiet), (), deletes)) is not None:
                return
    raise LedgerUnavailable(
        f"job {ctx.job}: its bytes are gone, its records not yet: they keep changing; clean again"
    )


# -- every agent -----------------------------------------------------------------------------------


async def begin_anew(ctx: JobContext, forget: Callable[[], None]) -> None:
    """For ever: `forget` all of a ledger id as soon as it is gone because it was cleaned.

    A later job of the name counts generations and attempts anew, so nothing old may be left.
    """
    known = ""

    def another() -> bool:
        return ctx.state.ledger_id != known

    while True:
        await ctx.until(another, None)
        if known in ctx.state.cleaned:
            forget()
            _remove_copies(ctx, {known})  # one may have been written meanwhile
        known = ctx.state.ledger_id


async def obey(ctx: JobContext) -> None:
    """For ever: free what belongs to a ledger id that was cleaned."""
    while True:
        await ctx.until(lambda: _condemned(ctx, ctx.state), None)
        try:
            await free_cleaned(ctx)
        except CheckpointError as e:
            ctx.note("free_later", why=str(e))
        await asyncio.sleep(RETRY_S)


async def free_cleaned(ctx: JobContext) -> None:
    """One look at the ledger itself, not the mirror; frees what it says was cleaned."""
    truth = await ctx.truth()
    if _condemned(ctx, truth):
        freed = _free(ctx, truth.cleaned)
        ctx.note("freed", reason="its job was cleaned", files=freed)
        ctx.wake()


def _condemned(ctx: JobContext, state: JobState) -> bool:
    """Is anything here, bytes or a memory, of a ledger id that was cleaned?"""
    if not state.cleaned:
        return False
    if ctx.seen is not None and ctx.seen.ledger_id in state.cleaned:
        return state.ledger_id != ctx.seen.ledger_id or _holds(ctx, state.cleaned)
    return _holds(ctx, state.cleaned)


def _holds(ctx: JobContext, ids: set[str]) -> bool:
    held = ctx.home.holdings.of_job(ctx.job)
    return any(h.attempt is not None and h.attempt.ledger_id in ids for h in held)


def _free(ctx: JobContext, ids: set[str]) -> int:
    """Release files, give them back to the node, and remove what stands beside them."""
    holdings = ctx.home.holdings
    gone = [h for h in holdings.of_job(ctx.job) if h.attempt and h.attempt.ledger_id in ids]
    for held in gone:
        holdings.release(held)
    holdings.drop_free(ctx.job)
    holdings.sweep_documents()
    _remove_copies(ctx, ids)
    if ctx.seen is not None and ctx.seen.ledger_id in ids:
        ctx.seen = None
        ctx.home.remember(ctx.job, None)
    return len(gone)


def _remove_copies(ctx: JobContext, ids: set[str]) -> None:
    """Copies of commits of these ledger ids."""
    arena = ctx.home.doors.arena
    prefix = copy_name(r.Attempt("", ctx.job, 0, 0, 0)).rsplit("-", 1)[0]
    for name in sorted(arena.documents()):
        packed = arena.document(name) if name.startswith(prefix) else None
        try:
            copy = unpack(packed, r.CommitCopy) if packed is not None else None
        except FormatError:
            continue
        if copy is not None and copy.commit.attempt.ledger_id in ids:
            arena.remove(name)


async def known_jobs(home: Home) -> dict[str, JobState]:
    """Every job of the ledger. One listing; jobs whose records are gone are left out."""
    listing = await home.doors.ledger.list(r.ROOT + "jobs/")
    families: dict[str, list[Entry]] = {}
    for entry in listing.entries:
        job, _, rest = entry.key[len(r.ROOT + "jobs/") :].partition("/")
        if rest.startswith("state/"):
            families.setdefault(job, []).append(entry)
    states = {
        job: JobState.listed(r.JobKeys(job), Listing(tuple(entries), listing.revision))
        for job, entries in families.items()
    }
    return {job: state for job, state in states.items() if state.ledger_id}
