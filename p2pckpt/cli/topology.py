"""`p2pckpt topology`: where nodes stand, what is weak about it, who would hold whose shards.

`show` draws the cluster as a tree, `check` says before training starts what is wrong with the
labels and what the layout would lose, `plan` places every owner as the agents will and says what
survives, surely (worst case) and probably (rates). All read the same file: TOML, Slurm, Kubernetes
or a host list (topology/README.md); none asks an agent or changes anything.

Contract: exit codes 0 all is as asked for, 4 something is weaker, 2 the file or an option is wrong.
`--svg` and `--png` write a picture besides; PNG needs matplotlib.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType
from rich.table import Table
from rich.tree import Tree

from p2pckpt.cli.output import EXIT_DEGRADED, EXIT_DONE, finish, json_option, plural
from p2pckpt.cli.picture import picture_of, write
from p2pckpt.errors import UsageError
from p2pckpt.records import Layout
from topology import Cluster, Level, Odds, Policy, Rules, TopologyError, WorstCase, draw
from topology.cluster import HOST, NODE
from topology.discover import FORMATS, read_cluster
from topology.hostlist import fold
from topology.plan import Plan, make_plan

F = TypeVar("F", bound=Callable[..., Any])

HOURS = {"s": 1 / 3600, "min": 1 / 60, "h": 1.0, "d": 24.0, "y": 8766.0}
RATES_H = {
    NODE: (264 * 24.0, "Llama 3: 419 interruptions in 54 days on 2,048 nodes"),
    "rack": (10.2 * 8766, "Ford et al., OSDI'10"),
    "leaf": (20 * 8766, "a guess"),
    "switch": (20 * 8766, "a guess"),
    "power": (10 * 8766, "a guess"),
}
"""Mean hours between losses of one domain, and whence; other levels: OTHER_H."""
OTHER_H = (20 * 8766.0, "a guess")
CHILDREN_SHOWN = 12


@dataclass(frozen=True)
class Source:
    """The file, and how to read it; where to draw it."""

    file: Path
    format: str
    pattern: str
    labels: tuple[str, ...]
    svg: Path | None
    png: Path | None

    def read(self) -> Cluster:
        """Raises UsageError."""
        pairs = [label.partition("=") for label in self.labels]
        if wrong := [pair for pair in pairs if not all(pair)]:
            raise UsageError(f"--label {''.join(wrong[0])!r}: needs LEVEL=KEY")
        try:
            labels = {level: key for level, _, key in pairs}
            return read_cluster(self.file, self.format, self.pattern, labels)
        except TopologyError as e:
            raise UsageError(str(e)) from e

    def draw(self, picture: Callable[[], draw.Picture]) -> None:
        """Write the picture where it was asked for. Raises UsageError, MissingDependency."""
        if self.svg or self.png:
            write(picture(), self.svg, self.png)


def source_options(command: F) -> F:
    """Add FILE and how to read it, `--svg`, `--png` and `--json`."""
    path = click.Path(path_type=Path)
    for option in (
        click.argument("file", type=path),
        click.option("--format", default="", type=click.Choice(("", *FORMATS)),
                     help="What FILE is; default: told from its name and text."),
        click.option("--pattern", default="", metavar="REGEX",
                     help="For host lists: r(?P<rack>\\d+)n(?P<host>\\d+)."),
        click.option("--label", "labels", multiple=True, metavar="LEVEL=KEY",
                     help="For kubernetes: one more label to read; repeatable."),
        click.option("--svg", type=path, default=None, help="Draw it into this file."),
        click.option("--png", type=path, default=None, help="The same (needs matplotlib)."),
        json_option,
    )[::-1]:  # fmt: skip
        command = option(command)
    return command


def plan_options(command: F) -> F:
    """Add what is to be placed, and how."""
    for option in (
        click.option("--layout", default="rs:4,2", show_default=True, metavar="LAYOUT"),
        click.option("--spread", default=None, metavar="LEVELS",
                     help="As rack,power! (! = required); default: every level with two domains."),
        click.option("--policy", default="domain-aware", show_default=True,
                     help="domain-aware, group, ring, random[:SEED], rendezvous or "
                     "copysets[:WIDTH]."),
    )[::-1]:  # fmt: skip
        command = option(command)
    return command


@click.group()
def topology() -> None:
    """Look at a cluster, and at what would be placed where, before training starts."""


@topology.command()
@source_options
def show(json_file: str | None, **source: Any) -> None:
    """Show the cluster in FILE as a tree, with counts."""
    where = Source(**source)
    cluster = where.read()
    boxed, foot = draw.levels_drawn(cluster)
    rows = _level_rows(cluster)
    title = f"{where.file.name}: {plural(len(cluster), 'node')}"
    facts = [(str(count), f"{level} domains") for level, count, *_ in rows if level != HOST]
    story = draw.Story(title, "where the nodes stand", facts)
    where.draw(lambda: draw.draw(cluster, story, {}))
    tree = Tree(f"[bold]{title}[/]")
    _grow(tree, cluster, list(cluster.nodes), boxed[::-1])
    counts = Table("level", "domains", "smallest", "largest", "no label", box=None)
    for row in rows:
        counts.add_row(*map(str, row))
    document = {
        "nodes": {
            node.name: {"host": node.host, "domains": dict(node.domains)} for node in cluster.nodes
        },
        "levels": [
            dict(zip(("level", "domains", "smallest", "largest", "unlabelled"), row, strict=True))
            for row in rows
        ],
    }
    note = f"{foot} does not nest with the levels above" if foot else ""
    finish("topology show", json_file, document, _text(tree, "", counts, note))


@topology.command()
@source_options
@plan_options
def check(
    json_file: str | None, layout: str, spread: str | None, policy: str, **source: Any
) -> None:
    """Say what is wrong or weak: labels, spread, what a loss would take.

    Exit codes: 0 nothing weak, 4 something is.
    """
    where = Source(**source)
    plan = _plan(where.read(), layout, spread, policy)
    findings = plan.findings()
    weak = [finding.text for finding in findings if finding.weak]
    where.draw(lambda: picture_of(plan, layout))
    lines = [f"[{'yellow' if f.weak else 'dim'}]{'!' if f.weak else '-'}[/] " for f in findings]
    body = Table("", "", box=None, show_header=False, padding=(0, 1, 0, 0))
    for mark, finding in zip(lines, findings, strict=True):
        body.add_row(mark, finding.text)
    good = "" if weak else f"[green]any one domain of each level asked for may go[/] ({layout})"
    document = {"findings": [asdict(f) for f in findings], "weak": len(weak), **_asked(plan)}
    advice = f"{plural(len(weak), 'weak point')}, the first: {weak[0]}\n" if weak else ""
    advice += "more labels, more domains, more parity or --spread with less; see topology plan"
    code = EXIT_DEGRADED if weak else EXIT_DONE
    finish("topology check", json_file, document, _text(body, good), code, advice)


@topology.command("plan")
@source_options
@plan_options
@click.option("--owner", default=None, metavar="NODE", help="Only this owner's shards.")
@click.option("--rows", default=16, show_default=True, help="Owners in the table; 0: all.")
@click.option(
    "--rate",
    "rates",
    multiple=True,
    metavar="LEVEL=TIME",
    help="Mean time between losses of one domain, as rack=10.2y; repeatable.",
)
@click.option("--within", default="90d", show_default=True, help="Time the training takes.")
@click.option(
    "--window",
    default="10min",
    show_default=True,
    help="Until shards of a lost node are placed anew.",
)
def plan_command(
    json_file: str | None, owner: str | None, rows: int, rates: tuple[str, ...], **options: Any
) -> None:  # fmt: skip
    """Say who would hold whose shards, the loads, the worst case and the odds.

    Exit codes: 0 all placements are as asked for, 4 some are weaker.
    """
    within, window = _hours("--within", options.pop("within")), options.pop("window")
    window_h = _hours("--window", window)
    asked = [options.pop(name) for name in ("layout", "spread", "policy")]
    where = Source(**options)
    cluster = where.read()
    if owner is not None and owner not in cluster:
        raise UsageError(f"--owner {owner}: is not one of the {plural(len(cluster), 'node')}")
    plan = _plan(cluster, *asked)
    per_loss = _rates(cluster, rates)
    odds = plan.odds({level: 1 / hours for level, (hours, _) in per_loss.items()}, window_h)
    chance = f"{odds.loss_within(within):.2g}"
    fact = chance, f"chance of a loss in {within / 24:g} days"
    where.draw(lambda: picture_of(plan, asked[0], owner, [fact]))
    parts: list[RenderableType] = [_owners(plan, owner, rows), ""]
    if owner is None:
        parts += [_survival(plan.worst, odds, per_loss, cluster), ""]
        low, high = min(plan.loads.values()), max(plan.loads.values())
        parts.append(f"loads: {low if low == high else f'{low} to {high}'} shards on each node")
        parts.append(
            f"chance of losing a checkpoint in {within / 24:g} days: [bold]{chance}[/]; "
            f"of all node and domain losses, {1 - odds.from_peers:.2g} take a checkpoint along"
        )
    document = {**_asked(plan), **_plan_document(plan, odds, within)}
    weak = plan.degraded
    advice = f"{plural(len(weak), 'placement')} weaker than asked for: "
    advice += f"{next(iter(weak.values()))[0]}\n`p2pckpt topology check` says why" if weak else ""
    code = EXIT_DEGRADED if weak else EXIT_DONE
    finish("topology plan", json_file, document, _text(*parts), code, advice)


# -- what was asked ------------------------------------------------------------------------------


def _plan(cluster: Cluster, layout: str, spread: str | None, policy: str) -> Plan:
    """Raises UsageError."""
    coded = Layout.parse(layout)
    if spread is None:
        names = [f for f in cluster.levels if len(set(cluster.members(f)) - {None}) > 1]
    else:
        names = [name.strip() for name in spread.split(",") if name.strip()]
    levels = tuple(Level(name.removesuffix("!"), name.endswith("!")) for name in names)
    try:
        return make_plan(cluster, Rules(coded.k, coded.m, levels), Policy.parse(policy))
    except TopologyError as e:
        raise UsageError(str(e)) from e


def _asked(plan: Plan) -> dict[str, Any]:
    return {
        "layout": str(Layout(plan.rules.k, plan.rules.m)),
        "spread": [asdict(level) for level in plan.rules.spread],
        "policy": str(plan.policy),
    }


def _hours(what: str, text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(s|min|h|d|y)", text)
    if not found or not float(found[1]):
        raise UsageError(f"{what} {text!r}: needs a time above 0 as 90s, 10min, 12h, 90d or 10.2y")
    return float(found[1]) * HOURS[found[2]]


def _rates(cluster: Cluster, given: tuple[str, ...]) -> dict[str, tuple[float, str]]:
    """Mean hours between losses of one domain, and whence, by level."""
    levels = (NODE, *cluster.levels)
    rates = {level: RATES_H.get(level, OTHER_H) for level in levels}
    for text in given:
        level, _, time = text.partition("=")
        if level not in (*levels, HOST):
            raise UsageError(f"--rate {text!r}: needs LEVEL=TIME, of {', '.join(levels)} or host")
        rates[level] = _hours("--rate", time), "given"
    return rates


# -- words and tables ------------------------------------------------------------------------------


def _text(*parts: RenderableType) -> str:
    """The parts as text, in colour where stdout is a terminal."""
    terminal = sys.stdout.isatty()
    width = None if terminal else 100
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, highlight=False)
    with console.capture() as captured:
        for part in parts:
            if part != "" or part is parts[0]:
                console.print(part)
            else:
                console.print()
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def _level_rows(cluster: Cluster) -> list[tuple[str, int, int, int, int]]:
    rows = []
    for level in (HOST, *cluster.levels):
        members = dict(cluster.members(level))
        blind = len(members.pop(None, ()))
        sizes = [len(names) for names in members.values()] or [0]
        rows.append((level, len(members), min(sizes), max(sizes), blind))
    return rows


def _grow(tree: Tree, cluster: Cluster, nodes: list[Any], levels: tuple[str, ...]) -> None:
    """Branches of ``tree``: the domains of the widest level, each with those below."""
    if not levels:
        tree.add(f"[dim]{fold(node.name for node in nodes)}[/]")
        return
    groups: dict[str, list[Any]] = {}
    for node in nodes:
        groups.setdefault(node.domain(levels[0]) or "", []).append(node)
    shown = sorted(groups)[:CHILDREN_SHOWN]
    for label in shown:
        name = f"{levels[0]} [bold]{label}[/]" if label else f"[yellow]no {levels[0]}[/]"
        line = f"{name} [dim]{plural(len(groups[label]), 'node')}[/]"
        if len(levels) == 1:
            tree.add(f"{line}  {fold(node.name for node in groups[label])}")
        else:
            _grow(tree.add(line), cluster, groups[label], levels[1:])
    if len(groups) > len(shown):
        tree.add(f"[dim]… {len(groups) - len(shown)} more of {levels[0]}[/]")


def _owners(plan: Plan, owner: str | None, rows: int) -> RenderableType:
    table = Table("owner", "shards on", "", box=None)
    chosen = [owner] if owner else list(plan.placements)
    for name in chosen[: rows or None]:
        placement = plan.placements[name]
        weak = f"[yellow]{'; '.join(placement.degraded)}[/]" if placement.degraded else ""
        table.add_row(f"[bold]{name}[/]", " ".join(placement.nodes) or "nobody", weak)
    if rows and len(chosen) > rows:
        table.add_row("[dim]…[/]", f"[dim]{len(chosen) - rows} owners more: --rows 0[/]", "")
    if owner:
        table.caption = plan.placements[owner].reason
    return table


def _survival(
    worst: dict[str, WorstCase], odds: Odds, rates: dict[str, tuple[float, str]], cluster: Cluster
) -> Table:
    table = Table(
        "level", "domains", "any … may go", "one is lost every", "loss, given one", box=None
    )
    hazards = {hazard.level: hazard for hazard in odds.hazards}
    for level, case in worst.items():
        hazard = hazards.get(level)
        row = [level, str(len(cluster.members(level))), str(len(case.domains) - 1)]
        if hazard:
            hours, whence = rates[level]
            row += [f"{hours / 8766:.3g} years ({whence})", f"{hazard.chance:.2g}"]
        table.add_row(*row)
    return table


def _plan_document(plan: Plan, odds: Odds, within_h: float) -> dict[str, Any]:
    return {
        "placements": {owner: asdict(p) for owner, p in plan.placements.items()},
        "loads": plan.loads,
        "survives": {level: len(case.domains) - 1 for level, case in plan.worst.items()},
        "worst_case": {
            level: {"domains": case.domains, "nodes": sorted(case.nodes), "reason": case.reason}
            for level, case in plan.worst.items()
        },
        "odds": {
            "hazards": [asdict(hazard) for hazard in odds.hazards],
            "within_h": within_h,
            "loss": odds.loss_within(within_h),
            "from_peers": odds.from_peers,
        },
    }
