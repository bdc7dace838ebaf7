"""Questions of people's commands, over the same socket as the trainers, without a join.

    jobs -> all jobs of the ledger      step -> all of one committed step, and who holds what now
    verify -> one file, read again      export -> one rank's snapshot as a file of this node

Whoever asked for a step is a visitor: a reader's record under this agent's lease keeps the step
from retirement until the visitor's process is gone, and what was brought for it is given back then
(or when it says that it is done). So an interrupted command leaves nothing behind.

Contract: nothing here changes what is stored, but for the reader's record. A step that RAM retired
and the object store has is read from there, as a restore does. An export prefers the node's own
slot, after it was read and was right; else the restore pipeline brings the rank into a staging file
that is never taken for a copy. Every wait has the deadlines of its bytes.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.bringing import bring, fetching, give_back
from p2pckpt.agent.cleaning import clean, known_jobs
from p2pckpt.agent.context import Home, JobContext
from p2pckpt.agent.deciding import ask_all, groups_anywhere
from p2pckpt.agent.holdings import Held, document_name
from p2pckpt.agent.reading import hold, let_go
from p2pckpt.agent.rereading import bad_in_file, bad_in_object
from p2pckpt.agent.status import redundancy
from p2pckpt.errors import (
    CheckpointError,
    IntegrityError,
    ObjectAbsent,
    ObjectStoreUnavailable,
    UsageError,
)
from p2pckpt.jobstate import JobState
from p2pckpt.ports import TrainerId
from p2pckpt.restore.fetch import OBJECT_STORE, Fetching, fetch_manifest, source_of
from p2pckpt.restore.locate import candidates
from p2pckpt.restore.verify import open_manifest, snapshot_table
from topology.cluster import TopologyError

Question = (
    w.JobsQuery
    | w.StepQuery
    | w.GetManifest
    | w.VerifyCall
    | w.ExportCall
    | w.ExportDone
    | w.CleanCall
)


@dataclass
class Visit:
    """What one asking process has: its step, the reader's record, files brought for it."""

    steps: dict[r.Attempt, w.StepReply] = field(default_factory=dict)
    readers: dict[r.Attempt, JobContext] = field(default_factory=dict)
    files: dict[str, Held] = field(default_factory=dict)


def choose_job(given: str, known: Iterable[str]) -> str:
    """The job that is meant: "uid.name", or "" where there is only one. "": there is none.

    Raises UsageError where one has to be named.
    """
    found = sorted({job for job in known if given in (job, "")})
    if len(found) > 1:
        raise UsageError(f"which job? --job was not given; there are: {', '.join(found[:16])}")
    return found[0] if found else ""


def find_commit(state: JobState, step: int | None) -> r.Commit | str:
    """The commit of a step (None: the latest), in RAM or in the object store only; else why there
    is none. A restore of the step would take the same, if it may take any."""
    if step is None:
        latest = state.latest()
        step = latest.attempt.step if latest is not None else None
    known = [c for _, c in sorted(state.known_commits().items())]
    tries = [*candidates(state, step), *(c for c in known if c.attempt.step == step)]
    if step is not None and tries:
        return tries[0]
    steps = sorted({c.attempt.step for c in known})
    held = f"committed: {steps[-16:]}" if steps else "no step is committed"
    return f"job {state.keys.job}, step {'latest' if step is None else step}: {held}"


def tiers_of(state: JobState, attempt: r.Attempt) -> list[str]:
    """Where the records say that a step lies: "ram", "s3" or both."""
    ram = ["ram"] if state.committed(attempt) is not None else []
    return ram + (["s3"] if attempt.key in state.offloaded else [])


class Asking:
    """The questions of one agent. ``context`` finds or makes the context of a job."""

    def __init__(self, home: Home, context: Callable[[str], Awaitable[JobContext]]) -> None:
        self.home = home
        self.context = context
        self.visits: dict[TrainerId, Visit] = {}

    async def answer(self, who: TrainerId, question: Question) -> r.Record:
        """One question. Raises CheckpointError."""
        visit = self.visits.setdefault(who, Visit())
        match question:
            case w.JobsQuery():
                return w.JobsReply(json.dumps(await self._jobs()))
            case w.StepQuery():
                return await self._step(who, visit, question)
            case w.GetManifest():
                return await self._manifest(visit, question)
            case w.VerifyCall():
                return await self._verify(question)
            case w.ExportCall():
                return await self._export(who, visit, question)
            case w.CleanCall():
                return await clean(await self.context(question.job), question.dry_run)
            case w.ExportDone():
                self._give_back(visit, question.file)
                return w.Accepted()

    async def gone(self, who: TrainerId) -> None:
        """The process is gone: what it had is given back, its readers' records for certain."""
        visit = self.visits.pop(who, Visit())
        for file in list(visit.files):
            self._give_back(visit, file)
        for attempt, ctx in visit.readers.items():
            self.home.spawn(f"reader {who.pid}", let_go(ctx, attempt, f".{who.pid}"))

    # -- what there is ----------------------------------------------------------------------------

    async def _known(self, given: str) -> set[str]:
        """Jobs to choose from: those with bytes here if that will do, else all."""
        held = set(self._held())
        if given in held or (not given and len(held) == 1):
            return held
        return {*held, *await known_jobs(self.home)}

    def _held(self) -> dict[str, int]:
        out: dict[str, int] = {}
        for held in self.home.holdings:
            if held.attempt is not None:
                out[held.job] = out.get(held.job, 0) + held.length
        return out

    async def _jobs(self) -> dict[str, object]:
        states, held = await known_jobs(self.home), self._held()
        out: dict[str, object] = {}
        for job in sorted({*states, *held}):
            state = states.get(job)
            generation = state.generation if state else None
            latest = state.latest() if state else None
            out[job] = {
                "generation": generation.number if generation else None,
                "world_size": generation.world_size if generation else None,
                "layout": str(generation.layout) if generation else None,
                "latest": latest.attempt.step if latest else None,
                "steps": _steps(state) if state else [],
                "held_bytes": held.get(job, 0),
                "in_ledger": state is not None,
            }
        return out

    async def _step(self, who: TrainerId, visit: Visit, query: w.StepQuery) -> r.Record:
        known = await self._known(query.job)
        if not (job := choose_job(query.job, known)):
            names = ", ".join(sorted(known)[:16]) or "none"
            return w.RefusedReply(reason=f"job {query.job!r} is not known; there are: {names}")
        ctx = await self.context(job)
        commit = find_commit(await ctx.refresh(), query.step)
        if isinstance(commit, str):
            return w.RefusedReply(reason=commit)
        visit.readers[commit.attempt] = ctx
        try:
            await hold(ctx, commit.attempt, f".{who.pid}")
        finally:
            if self.visits.get(who) is not visit:  # it died meanwhile, before there was a record
                self.home.spawn(f"reader {who.pid}", let_go(ctx, commit.attempt, f".{who.pid}"))
        held, silent = await ask_all(ctx, w.HeldQuery(ctx.job, commit.attempt))
        groups = await groups_anywhere(ctx, commit)
        losses = json.dumps(await _losses(ctx, commit))
        living = (await self.home.living(self.home.config.keepalive_s)).members
        members = tuple(living[node] for node in sorted(living))
        reply = w.StepReply(ctx.job, commit, tuple(groups), held, tuple(silent), losses, members)
        visit.steps[commit.attempt] = reply
        return reply

    async def _manifest(self, visit: Visit, query: w.GetManifest) -> r.Record:
        """A share's manifest, from here or from whoever has a right copy."""
        reply = _visited(visit, query.attempt)
        packed = self.home.doors.arena.document(document_name(query.manifest_digest))
        if packed is not None:
            try:
                open_manifest(packed, query.manifest_digest)
                return w.ManifestReply(len(packed), packed)
            except CheckpointError as e:
                self.home.doors.notes("manifest_wrong", {"why": str(e)})
        share = _share(reply, lambda s: s.node == query.owner)
        job = await self._fetching(reply, share, share.ranks[0])
        try:
            manifest = await fetch_manifest(job)
        except IntegrityError as e:
            if job.away:
                raise ObjectStoreUnavailable(str(e)) from e
            return w.RefusedReply(reason=str(e))
        packed = w.pack(manifest)
        return w.ManifestReply(len(packed), packed)

    # -- verify -----------------------------------------------------------------------------------

    async def _verify(self, call: w.VerifyCall) -> r.Record:
        """Have the node look that holds the file; an object is read from here."""
        if call.node == OBJECT_STORE:
            try:
                ctx = await self.context(call.query.attempt.job)
                return w.VerifyReply(await bad_in_object(ctx, call.query))
            except ObjectAbsent as e:
                return w.RefusedReply(reason=str(e))
        members = (await self.home.living(self.home.config.keepalive_s)).members
        if call.node not in members:
            return w.RefusedReply(reason=f"the agent of {call.node} does not live")
        config, address = self.home.config, members[call.node].peers_address
        timeout_s = config.silent_holder_s + call.query.length / config.floor_bytes_per_s
        return await self.home.doors.peers.call(address, call.query, timeout_s)

    async def check(self, query: w.VerifyQuery) -> r.Record:
        """A peer's question: read one file of this node again, piece by piece, on the workers."""
        owner = query.owner if query.kind is r.FileKind.SHARD else None
        held = self.home.holdings.find(query.attempt, query.kind, query.part, owner)
        if held is None or held.manifest_digest != query.manifest_digest:
            return w.RefusedReply(reason=f"{query.kind} {query.part} is not held")
        packed = self.home.doors.arena.document(document_name(query.manifest_digest))
        if packed is None:
            raise IntegrityError(f"manifest {query.manifest_digest[:12]} is not beside its bytes")
        manifest = open_manifest(packed, query.manifest_digest)
        return w.VerifyReply(await bad_in_file(self.home, held, manifest))

    # -- export -----------------------------------------------------------------------------------

    async def _export(self, who: TrainerId, visit: Visit, call: w.ExportCall) -> r.Record:
        """One rank's snapshot as a file here. Raises RestoreFailed naming what is lacking."""
        reply, rank = _visited(visit, call.attempt), call.rank
        share = _share(reply, lambda s: rank in s.ranks)
        held = self.home.holdings.find(call.attempt, r.FileKind.SLOT, rank)
        packed = self.home.doors.arena.document(document_name(share.manifest_digest))
        bytes_from: dict[str, int] = {}
        manifest = None
        if held is not None and packed and held.manifest_digest == share.manifest_digest:
            try:
                own = open_manifest(packed, share.manifest_digest)
                manifest = None if await bad_in_file(self.home, held, own) else own
            except CheckpointError as e:
                self.home.doors.notes("manifest_wrong", {"why": str(e)})
        source = "local"
        if manifest is None:
            job = await self._fetching(reply, share, rank)
            held, fetched = await bring(self.home, job, r.FileKind.STAGE)
            visit.files[held.file] = held
            if self.visits.get(who) is not visit:  # it died meanwhile
                self._give_back(visit, held.file)
            manifest, bytes_from = fetched.manifest, fetched.bytes_from
            source = source_of(bytes_from)
        assert held is not None
        return w.RestoreFile(
            ballot=0,
            step=call.attempt.step,
            file=held.file,
            length=manifest.of_rank(rank).length,
            chunk_bytes=manifest.chunk_bytes,
            table=snapshot_table(manifest, rank),
            source=source,
            meta=manifest.of_rank(rank).meta,
            bytes_from=bytes_from,
        )

    async def _fetching(self, reply: w.StepReply, share: r.SealedShare, rank: int) -> Fetching:
        """The fetch of one rank from those who hold it *now*."""
        return await fetching(await self.context(reply.job), reply.commit.attempt, share, rank)

    def _give_back(self, visit: Visit, file: str) -> None:
        if (held := visit.files.pop(file, None)) is not None:
            give_back(self.home, held)


def _visited(visit: Visit, attempt: r.Attempt) -> w.StepReply:
    if (reply := visit.steps.get(attempt)) is None:
        raise UsageError(f"step {attempt.step}: ask for the step first, on the same agent")
    return reply


def _share(reply: w.StepReply, fits: Callable[[r.SealedShare], bool]) -> r.SealedShare:
    for share in (s for group in reply.groups for s in group.shares):
        if fits(share):
            return share
    raise UsageError(f"step {reply.commit.attempt.step}: its group records have no such share")


def _steps(state: JobState) -> list[dict[str, Any]]:
    """What a restore may take, ascending, and where it lies."""
    return [
        {"step": c.attempt.step, "tiers": tiers_of(state, c.attempt), "layout": str(c.layout)}
        for c in reversed(candidates(state, None))
    ]


async def _losses(ctx: JobContext, commit: r.Commit) -> dict[str, Any]:
    """As in status, and where the step lies; ``why``: node losses have no meaning for it."""
    tiers = tiers_of(ctx.state, commit.attempt)
    if "ram" not in tiers:
        return {"tiers": tiers, "why": "it lies in the object store only"}
    try:
        return {"tiers": tiers, **await redundancy(ctx, commit)}
    except (CheckpointError, TopologyError) as e:
        return {"tiers": tiers, "why": str(e)}
