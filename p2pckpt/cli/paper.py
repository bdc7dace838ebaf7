"""`p2pckpt simulate paper-checks` and `trace`: the model against what is known.

`paper-checks` holds the simulator's formulas and engine against published values, a row each, and
ends with 1 if one is missed. `trace` says what a failure trace looks like, and lets it drive the
model. The work is done in ``simulations/``; here are options, tables and documents.
"""

from __future__ import annotations

import io
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from p2pckpt.cli.output import EXIT_DONE, EXIT_FAILED, finish, json_option, plural, progress
from p2pckpt.errors import UsageError

if TYPE_CHECKING:  # numpy and the model are loaded by who asks for them
    from simulations.papers.checks import Row
    from simulations.study.replays import Driven
    from simulations.study.traces import Statistics, Trace

WORDS = {
    "passed": "passed",
    "not reproduced, as documented": "documented",
    "failed": "FAILED",
    "needs data": "needs data",
}
COLOURS = {
    "passed": "green",
    "not reproduced, as documented": "yellow",
    "failed": "bold red",
    "needs data": "dim",
}
UNITS = ("s", "min", "h")
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("paper-checks", short_help="Closed forms and simulation against published values.")
@click.option("--seed", default=1, show_default=True, help="One seed is one result.")
@click.option("--only", multiple=True, metavar="ID", help="Rows whose id begins so; repeatable.")
@click.option("--lanl", type=FILE, default=None, help="LANL's failure records (USENIX CFDR), CSV.")
@click.option("--published", type=FILE, default=None, help="Published values; default: bundled.")
@json_option
def paper_checks(
    seed: int,
    only: tuple[str, ...],
    lanl: Path | None,
    published: Path | None,
    json_file: str | None,
) -> None:
    """Hold closed forms and simulation against published values, a row each.

    Rows that are known not to reproduce say by which factor; rows that need data that is not
    shipped are counted apart. Exit codes: 0 all within tolerance, 1 not.
    """
    from simulations.papers import checks
    from simulations.study import traces

    rows = checks.load(published or checks.PUBLISHED)
    chosen = [row for row in rows if not only or row.id.startswith(only)]
    if not chosen:
        raise UsageError(f"--only {', '.join(only)}: no row's id begins so")
    records = traces.load_incidents(lanl) if lanl else None
    with progress() as bar:
        task = bar.add_task("paper checks", total=len(chosen))
        results = []
        for row in chosen:
            bar.update(task, description=f"{row.id:24}")
            results.append(checks.judge(row, checks.find(row, seed, records)))
            bar.advance(task)
    counts = checks.summary(results)
    failed = [row for row in results if row.passed is False]
    document = {
        "seed": seed,
        "counts": counts,
        "rows": [{**asdict(row), "pass": row.passed} for row in results],
    }
    text = _rendered(_checks(results)) + ", ".join(
        f"{count} {checks.Outcome[name.upper()]}" for name, count in counts.items()
    )
    advice = ""
    if failed:
        lines = [f"{row.id}: {row.note}" for row in failed]
        lines.append(f"{plural(len(failed), 'check')} failed: {', '.join(r.id for r in failed)}")
        advice = "\n".join([*lines, "a constant, a formula or the engine is wrong"])
    code = EXIT_FAILED if failed else EXIT_DONE
    finish("simulate paper-checks", json_file, document, text, code, advice)


@click.command(short_help="What a failure trace looks like; let it drive the model.")
@click.argument("file", type=FILE)
@click.option(
    "--time-unit",
    type=click.Choice(UNITS),
    default="s",
    show_default=True,
    help="Of a step curve's first column.",
)
@click.option("--gpus-per-node", default=1, show_default=True, help="Divides counts of GPUs.")
@click.option("--scenario", "name", default=None, help="Drive this scenario with the losses.")
@click.option("--scheme", "schemes", multiple=True, help="Schemes to drive; default: its own.")
@click.option("--runs", default=20, show_default=True, help="Runs, each with other nodes lost.")
@click.option("--seed", default=1, show_default=True)
@json_option
def trace(file: Path, json_file: str | None, **options: object) -> None:
    """Statistics of a failure trace: how often, in bursts or alone, for how long.

    Forms: rows `seconds,count` (two at each change); the header `index,Time,GPUs`; LANL's records.
    """
    from simulations.study import replays, scenario, traces

    what = traces.load(file, str(options["time_unit"]), int(str(options["gpus_per_node"])))
    facts = traces.describe(what)
    document: dict[str, object] = {
        "trace": {"name": what.name, "form": what.form, "most": what.most,
                  "duration_s": what.duration_s, "events": len(what.events)},
        "statistics": _nested(facts),
    }  # fmt: skip
    text = _rendered(_facts(what, facts))
    if options["name"]:
        job = scenario.load(str(options["name"]))
        names = tuple(options["schemes"]) or job.schemes  # type: ignore[arg-type]
        runs, seed = int(str(options["runs"])), int(str(options["seed"]))
        driven = replays.drive(job, what, names, runs, seed)
        document["driven"] = {
            "scenario": job.name, "runs": runs, "seed": seed, "rows": [asdict(r) for r in driven],
        }  # fmt: skip
        text += _rendered(_driven(job.name, driven))
    finish("simulate trace", json_file, document, text.rstrip("\n"))


# -- tables ----------------------------------------------------------------------------------------


def _rendered(table: Table) -> str:
    """As wide as the terminal, in colours only there."""
    out = io.StringIO()
    tty = sys.stdout.isatty()
    Console(file=out, force_terminal=tty, width=None if tty else 160).print(table)
    return out.getvalue()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _checks(rows: list[Row]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="Published, computed, simulated")
    table.add_column("check", no_wrap=True)
    table.add_column("what", ratio=1)
    for name in ("published", "computed", "simulated"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tolerance", max_width=24)
    table.add_column("result", no_wrap=True)
    for row in rows:
        simulated = _number(row.simulated)
        if row.expected is not None and row.expected != row.computed:
            simulated += f" (for {_number(row.expected)})"
        table.add_row(
            row.id, escape(f"{row.what} [{row.unit}]" if row.unit else row.what),
            f"{_number(row.published)} {row.mark}", _number(row.computed), simulated,
            row.tolerance, f"[{COLOURS[row.outcome]}]{WORDS[row.outcome]}[/]",
        )  # fmt: skip
    return table


def _nested(facts: Statistics) -> dict[str, object]:
    """As a document: named tuples become objects."""
    found = vars(facts).items()
    return {k: v._asdict() if hasattr(v, "_asdict") else v for k, v in found}


def _facts(what: Trace, facts: Statistics) -> Table:
    table = Table("what", "value", title=f"{what.name}: {what.form}")
    shape, repair, bursts = facts.shape, facts.repair, facts.bursts
    unknown = "too few events to tell"
    rows = {
        "nodes at most": f"{what.most}",
        "duration": f"{what.duration_s / 3600:.4g} h",
        "losses": f"{facts.losses} times, {facts.nodes_lost} nodes",
        "returned": f"{facts.nodes_returned} nodes (first ones included)",
        "MTBF (any loss)": f"{facts.mtbf_s / 3600:.4g} h" if facts.mtbf_s else unknown,
        "node rate": f"{_number(facts.node_rate_per_1000_days) or '-'} per 1000 node-days",
        "Weibull shape of gaps": (
            f"{shape.shape:.3f} ({shape.low:.3f} to {shape.high:.3f}), {shape.gaps} gaps"
            if shape
            else unknown
        ),
        "node losses in bursts (120 s)": f"{100 * bursts.share:.1f} %, up to {bursts.largest}",
        "time to return": (
            f"lognormal, median {_number(repair.median_min)} min, sigma {repair.sigma:.3f}, "
            f"{repair.returns} returns"
            if repair
            else unknown
        ),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    if facts.mtbf_s and facts.mtbf_s < 60:
        table.caption = "A loss every few seconds: is the unit right? (--time-unit)"
    return table


def _driven(name: str, rows: list[Driven]) -> Table:
    table = Table(title=f"Scenario {name}, driven by the trace")
    for head in ("scheme", "interval s", "ETTR", "lost work s", "incidents", "from the store"):
        table.add_column(head, justify="right" if head != "scheme" else "left")
    for row in rows:
        table.add_row(
            row.scheme, _number(row.interval_s),
            f"{row.ettr.value:.4f} ({row.ettr.low:.4f} to {row.ettr.high:.4f})",
            _number(row.lost_work_s), str(row.incidents), str(row.fallbacks),
        )  # fmt: skip
    return table
