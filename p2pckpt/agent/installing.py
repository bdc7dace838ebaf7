"""May a launch take the job over? Judged from its joins and the reports on the one it replaces.

A launch is whole when its nodes' joins hold every rank of the world exactly once and agree on
everything. It takes the place of an older one only if that one's trainers are dead by their agents'
word, or their agents are gone for longer than their grace; else it waits for as long as a report of
a node that is cut off can last, and then it is refused and told who lives.

Contract: pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.agent.context import Roster
from p2pckpt.errors import UsageError


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
    if twice := {rank for rank, following in pairwise(ranks) if rank == following}:
        nodes = sorted(j.node for j in joins if twice & set(j.ranks))
        raise UsageError(f"launch: ranks {sorted(twice)[:8]} joined twice, on {nodes}")
    if strange := [rank for rank in ranks if not 0 <= rank < first.world_size]:
        raise UsageError(f"launch: ranks {strange[:8]}, needs 0 to {first.world_size - 1}")
    if missing := sorted(set(range(first.world_size)) - set(ranks)):
        return Installing(False, reason=f"ranks {missing[:16]} have not joined")
    takeover = any(join.takeover for join in joins)
    number = roster.generation.number if roster else 0
    for node in roster.nodes if roster else ():
        report = reports.get(node.node)
        if report is not None and report.ranks:
            if takeover:
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
