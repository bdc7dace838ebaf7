"""How things stand, for people and monitors: one JSON document, asked for over the local socket.

What is shown per job: the generation, the lineage with its committed steps, and for the newest
committed step how many more node losses it survives *now*, worked out exactly from what every
living agent says it holds, with what is missing if that is less than the layout promises.

Contract: never changes anything; bounded by the peers' deadline; a part that cannot be read now is
given as null with the reason beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.context import Home, JobContext
from p2pckpt.agent.deciding import ask_all, groups_anywhere
from p2pckpt.errors import CheckpointError
from p2pckpt.restore.locate import Facts, sources_of
from p2pckpt.save.offload import due
from p2pckpt.save.send import levels_of
from topology.cluster import Cluster, Node, TopologyError
from topology.survive import Share, worst_case

SCHEMA_VERSION = 1


class HasFacts(Protocol):
    """A part that says how it stands."""

    def facts(self) -> dict[str, Any] | None:
        """JSON, or None where there is nothing to say."""
        ...


class HasContext(Protocol):
    """A job on this node."""

    ctx: JobContext

    @property
    def scheduling(self) -> HasFacts:
        """Its save schedule."""
        ...


async def status(home: Home, jobs: Mapping[str, HasContext]) -> dict[str, Any]:
    """The document."""
    arena = home.doors.arena
    members = await _members(home)
    return {
        "schema_version": SCHEMA_VERSION,
        "node": home.node,
        "host": home.member.host,
        "domains": dict(home.member.domains),
        "store_id": arena.store_id,
        "cut_off": home.cut_off,
        "ram": {"budget_bytes": arena.budget_bytes, "used_bytes": arena.used_bytes},
        "members": None if members is None else sorted(members),
        "draining": sorted(n for n, m in (members or {}).items() if m.draining),
        "config": home.config.shown(),
        "jobs": {
            name: {
                **await _job(job.ctx, members is not None),
                "schedule": job.scheduling.facts(),
            }
            for name, job in sorted(jobs.items())
            if _is_here(job.ctx)
        },
        "telemetry": home.doors.telemetry.as_dict(),
    }


def _is_here(ctx: JobContext) -> bool:
    """Not so of a job that was cleaned: followed still, but there is nothing of it."""
    there = ctx.state.ledger_id or not ctx.following
    return bool(there or ctx.home.holdings.of_job(ctx.job))


async def _members(home: Home) -> Mapping[str, r.Member] | None:
    try:
        return (await home.living(home.config.keepalive_s)).members
    except CheckpointError:
        return None


def _last_abort(ctx: JobContext) -> dict[str, Any] | None:
    """The newest attempt of the present generation, if it was aborted: when, and why."""
    number = ctx.state.generation.number if ctx.state.generation else 0
    known = [o for o in ctx.state.outcomes.values() if o.attempt.generation == number]
    newest = max(known, key=lambda o: o.attempt.ordinal, default=None)
    if newest is None or newest.verdict is not r.Verdict.ABORT:
        return None
    return {"step": newest.attempt.step, "by": newest.by, "reason": newest.reason}


def _trouble(ctx: JobContext) -> str:
    """What the ledger has against the records of a save that is in flight here."""
    held = ctx.home.holdings.of_job(ctx.job)
    waits = any(h.attempt is not None and not ctx.decided(h.attempt) for h in held)
    return ctx.trouble if waits else ""


async def _job(ctx: JobContext, reachable: bool) -> dict[str, Any]:
    state = ctx.state
    closed, latest = state.current_lineage(), state.latest()
    document: dict[str, Any] = {
        "generation": state.generation.number if state.generation else None,
        "world_size": state.generation.world_size if state.generation else None,
        "layout": str(state.generation.layout) if state.generation else None,
        "lineage": closed.lineage if closed else None,
        "steps": state.steps(closed.lineage) if closed else [],
        "latest": latest.attempt.step if latest else None,
        "offloaded": sorted(o.commit.attempt.step for o in state.offloaded.values()),
        "offload_due": [c.attempt.step for c in due(state, ctx.home.config.offload_every)],
        "held_bytes": sum(h.length for h in ctx.home.holdings.of_job(ctx.job)),
        "unreadable": dict(state.unreadable),
        "last_abort": _last_abort(ctx),
        "ledger_trouble": _trouble(ctx),
        "redundancy": None,
    }
    if not reachable:
        document["redundancy_why"] = "etcd does not answer"
    elif latest is not None and state.committed(latest.attempt) is None:
        document["redundancy_why"] = f"step {latest.attempt.step} is in the object store only"
    elif latest is not None:
        try:
            document["redundancy"] = await redundancy(ctx, latest)
        except (CheckpointError, TopologyError) as e:
            document["redundancy_why"] = str(e)
    return document


async def redundancy(ctx: JobContext, commit: r.Commit) -> dict[str, Any]:
    """What a committed step survives now: node losses, and which shares lack what.

    A node that is being drained counts as gone, so what is said holds without it.
    """
    answers, silent = await ask_all(ctx, w.HeldQuery(ctx.job, commit.attempt))
    groups = await groups_anywhere(ctx, commit)
    facts = Facts(ctx.state, answers, silent, {commit.attempt.key: groups}, False)
    living = (await ctx.home.living(ctx.home.config.keepalive_s)).members
    members = {n: m for n, m in living.items() if not m.draining}
    nodes = [Node(m.node, m.host, tuple(m.domains.items())) for m in members.values()]
    labelled = {level for m in members.values() for level in m.domains}
    cluster = Cluster(tuple(nodes), levels_of((), labelled))
    shares, missing = [], []
    for share in (s for group in groups for s in group.shares):
        found = sources_of(share, commit.attempt, facts)
        owners = [set(found.slots.get(rank, ())) & set(members) for rank in share.ranks]
        whole = sorted(set.intersection(*owners)) if owners else []
        owner = whole[0] if whole else share.node
        holders = tuple(  # a shard beside the own copy is no further source
            next((n for n in found.shards.get(i, ()) if n in members and n != owner), None)
            for i in range(commit.layout.shards)
        )
        shares.append(Share(owner, holders, commit.layout.k, own_copy=bool(whole)))
        gone = [i for i, holder in enumerate(holders) if holder is None]
        if gone or not whole:
            missing.append({"share": share.node, "shards": gone, "own_copy": bool(whole)})
    worst = worst_case(shares, cluster)
    survivable = len(worst.domains) - 1
    ctx.home.doors.telemetry.gauge("survivable_losses", survivable, ctx.job)
    return {
        "step": commit.attempt.step,
        "survivable_node_losses": survivable,
        "full": commit.layout.m + 1,
        "worst_case": worst.reason,
        "missing": missing,
        "silent": list(silent),
    }
