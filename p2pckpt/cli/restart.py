"""`p2pckpt plan-restart`: on which hosts to start the ranks, so that they find their bytes there.

Before a job is launched anew it asks the local agent who lives and who holds what of the step, and
numbers the hosts so that as many ranks as can be start on their own copy (restore/place_ranks.py).
The answer is for people, for scripts (`--format json`), for Slurm's arbitrary distribution
(`slurm-hostfile`: the host of each rank, one a line) or for torchrun (the command of each host).

Contract: nothing is changed, and nothing has to be followed: a rank restores wherever it starts.
Exit codes: 0 every rank's bytes are in RAM; 4 some have to come from the object store, or an agent
did not answer; 1 some rank cannot be had, or there are too few hosts; 3 there is no such step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from p2pckpt import records as r
from p2pckpt.cli.output import (
    EXIT_DEGRADED,
    EXIT_DONE,
    EXIT_FAILED,
    STDOUT,
    agent_option,
    amount,
    connect,
    finish,
    job_option,
    json_option,
    plural,
    table,
)
from p2pckpt.cli.step import Step, ask_records, step_number
from p2pckpt.errors import UsageError
from p2pckpt.restore.place_ranks import RankSources, RestartPlan, decide_restart
from p2pckpt.save.send import levels_of
from topology.cluster import Cluster, Node, TopologyError
from topology.hostlist import expand

FORMATS = ("text", "json", "slurm-hostfile", "torchrun")
MASTER_PORT = 29500
"""torchrun's own default."""


@dataclass(frozen=True)
class Planned:
    """A plan, and what it was made from."""

    step: Step
    plan: RestartPlan
    ranks: tuple[RankSources, ...]
    gone: tuple[str, ...]
    unknown: tuple[str, ...]
    per_host: int

    @property
    def lost(self) -> list[str]:
        """Why some ranks cannot be had, a sentence each."""
        return [one.lacks for one in self.ranks if one.lacks]

    @property
    def stored(self) -> list[int]:
        """Ranks that only the object store has."""
        return [one.rank for one in self.ranks if one.stored and not one.in_ram]

    @property
    def network_bytes(self) -> int:
        """Of ranks that start away from their own copy; ranks of a node count alike."""
        each = {k: s.snapshot_bytes / len(s.ranks) for s in self.step.shares() for k in s.ranks}
        return round(sum(each[place.rank] for place in self.plan.places if not place.own))


@click.command("plan-restart", short_help="On which hosts to start ranks, near their bytes.")
@job_option
@click.option(
    "--step",
    default="latest",
    metavar="STEP",
    help="A number, or latest (default).",
    callback=lambda *got: step_number(got[-1]),
)
@click.option(
    "--hosts",
    default="",
    metavar="LIST",
    help="Hosts to use, as a,b or n[1-8]; default: all whose agents live.",
)
@click.option("--exclude", default="", metavar="LIST", help="Hosts not to use.")
@click.option(
    "--ranks-per-host",
    type=click.IntRange(1),
    default=None,
    help="Default: as when the step was saved.",
)
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
@agent_option
@json_option
def plan_restart(
    job: str | None, step: str, form: str, agent: str | None, json_file: str | None, **which: Any
) -> None:
    """Say on which hosts to start the ranks, so that they find their bytes there.

    Hosts are called as their agents are (`--node`). Those whose agents do not live are left out,
    and those that are drained; spares take their places, in the rack of the bytes if there is one.
    Ranks restore wherever they start: a plan only spares the network.
    """
    wanted, excluded = _names("--hosts", which["hosts"]), _names("--exclude", which["exclude"])
    with connect(agent) as link:
        found = Step(ask_records(link, "plan-restart", step, job, json_file), {})
    try:
        blocks = form != "slurm-hostfile"
        planned = plan_of(found, wanted, excluded, which["ranks_per_host"], blocks)
    except UsageError as e:
        following = "start the agents of more nodes, or name hosts without an agent with --hosts"
        finish("plan-restart", json_file, {}, "", EXIT_FAILED, f"{e}\n{following}")
    if form == "json" and json_file is None:
        json_file = STDOUT
    document = describe(planned)
    if form == "torchrun":
        document["commands"] = commands(planned)
    words = {"slurm-hostfile": _hostfile, "torchrun": _torchrun}.get(form, _text)
    code, advice = _verdict(planned)
    finish("plan-restart", json_file, document, words(planned), code, advice)


# -- the plan --------------------------------------------------------------------------------------


def plan_of(
    step: Step,
    wanted: Sequence[str],
    excluded: Sequence[str],
    per_host: int | None,
    blocks: bool,
) -> Planned:
    """Which ranks go where. Raises UsageError for too few hosts."""
    members = {m.node: m for m in step.told.members}
    usable = list(wanted) or [node for node, m in members.items() if not m.draining]
    hosts = [host for host in dict.fromkeys(usable) if host not in excluded]
    ranks = tuple(sorted(sources_of_ranks(step), key=lambda one: one.rank))
    per_host = per_host or max(len(share.ranks) for share in step.shares())
    plan = decide_restart(ranks, cluster_of(members.values()), hosts, per_host, blocks)
    gone = tuple(share.node for share in step.shares() if share.node not in members)
    unknown = tuple(host for host in hosts if host not in members)
    return Planned(step, plan, ranks, gone, unknown, per_host)


def sources_of_ranks(step: Step) -> list[RankSources]:
    """Who has each rank's bytes now."""
    k, stored = step.told.commit.layout.k, "s3" in step.tiers
    found = []
    for share in step.shares():
        sources = step.sources(share)
        for rank in share.ranks:
            own = sources.slots.get(rank, ())
            found.append(RankSources(rank, own, dict(sources.shards), k, stored, share.node))
    return found


def cluster_of(members: Iterable[r.Member]) -> Cluster:
    """The living nodes with their labels. Raises UsageError where these contradict each other."""
    nodes = tuple(Node(m.node, m.host, tuple(sorted(m.domains.items()))) for m in members)
    labelled = {level for node in nodes for level, _ in node.domains}
    try:
        return Cluster(nodes, levels_of((), labelled))
    except TopologyError as e:
        raise UsageError(f"labels of the living nodes: {e}") from e


def _names(option: str, text: str) -> tuple[str, ...]:
    try:
        return expand(text) if text else ()
    except TopologyError as e:
        raise UsageError(f"{option}: {e}") from e


# -- saying so -------------------------------------------------------------------------------------


def describe(planned: Planned) -> dict[str, Any]:
    """The document."""
    plan, commit = planned.plan, planned.step.told.commit
    hosts = [
        {
            "node_rank": number,
            "host": host,
            "ranks": [place.rank for place in plan.of_host(host)],
            "own_copies": sum(place.own for place in plan.of_host(host)),
        }
        for number, host in enumerate(plan.order)
    ]
    return {
        "job": planned.step.told.job,
        "step": commit.attempt.step,
        "layout": str(commit.layout),
        "world_size": commit.world_size,
        "ranks_per_host": planned.per_host,
        "on_own_copy": sum(place.own for place in plan.places),
        "network_bytes": planned.network_bytes,
        "hosts": hosts,
        "ranks": [asdict(place) for place in plan.places],
        "spares": list(plan.spares),
        "gone": list(planned.gone),
        "without_agent": list(planned.unknown),
        "silent": list(planned.step.told.silent),
        "from_object_store": planned.stored,
        "lost": planned.lost,
    }


def commands(planned: Planned) -> list[dict[str, Any]]:
    """What to start on each host, for torchrun's static rendezvous."""
    order = planned.plan.order
    return [
        {
            "host": host,
            "command": f"torchrun --nnodes={len(order)} "
            f"--nproc-per-node={len(planned.plan.of_host(host))} --node-rank={number} "
            f"--master-addr={order[0]} --master-port={MASTER_PORT} TRAIN.py",
        }
        for number, host in enumerate(order)
    ]


def _hostfile(planned: Planned) -> str:
    return "\n".join(place.host for place in planned.plan.places)


def _torchrun(planned: Planned) -> str:
    rows = [("HOST", "COMMAND")]
    rows += [(found["host"], found["command"]) for found in commands(planned)]
    return f"{_summary(planned)}\n\n{table(rows)}"


def _text(planned: Planned) -> str:
    rows: list[tuple[str, ...]] = [("NODE RANK", "HOST", "RANKS", "OWN COPY", "OTHERS FROM")]
    for number, host in enumerate(planned.plan.order):
        places = planned.plan.of_host(host)
        away = [place for place in places if not place.own]
        others = dict.fromkeys(holder.node for place in away for holder in place.holders)
        own = ",".join(str(place.rank) for place in places if place.own)
        ranks = ",".join(str(place.rank) for place in places)
        known = " ".join(list(others)[:4]) + (" ..." if len(others) > 4 else "")
        rows.append((str(number), host, ranks, own or "-", known or "-"))
    return f"{_summary(planned)}\n\n{table(rows)}"


def _summary(planned: Planned) -> str:
    commit, plan = planned.step.told.commit, planned.plan
    own, all_ranks = sum(place.own for place in plan.places), len(plan.places)
    lines = [
        f"job {planned.step.told.job}  step {commit.attempt.step}  {commit.layout}  "
        f"{plural(all_ranks, 'rank')} on {plural(len(plan.order), 'host')}",
        f"{own} of {plural(all_ranks, 'rank')} find their own copy; about "
        f"{amount(planned.network_bytes)} come over the network",
    ]
    for what, names in (
        ("no agent lives", planned.gone),
        ("no agent yet", planned.unknown),
        ("did not answer", planned.step.told.silent),
        ("spare", plan.spares),
    ):
        if names:
            lines.append(f"{what}: {', '.join(names)}")
    return "\n".join(lines)


def _verdict(planned: Planned) -> tuple[int, str]:
    """Exit code and advice."""
    if planned.lost:
        what = f"{plural(len(planned.lost), 'rank')} cannot be had now: {planned.lost[0]}"
        return EXIT_FAILED, f"{what}\nstart the agents that are away, or plan for an older --step"
    if planned.stored:
        what = f"{plural(len(planned.stored), 'rank')} only the object store has"
        return EXIT_DEGRADED, f"{what}\nthat is slower than RAM, and restores as well"
    if planned.step.told.silent:
        names = ", ".join(planned.step.told.silent)
        return EXIT_DEGRADED, f"agents that did not answer: {names}\nwhat they hold is left out"
    return EXIT_DONE, ""
