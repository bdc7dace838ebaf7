"""`p2pckpt simulate run|compare|recommend`: what failures cost, from a scenario file.

A scenario is a TOML file, or the name of one that comes with the package. Every command can change
inputs (`--set recovery.init_s=5`) and replay a trace in place of the scenario's failures. `run`
writes a JSON document, a CSV table and figures into a folder; figures need matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from p2pckpt.cli.output import EXIT_DEGRADED, EXIT_DONE, emit, finish, json_option, progress
from p2pckpt.errors import UsageError
from topology import Cluster, TopologyError
from topology.discover import FORMATS, read_cluster

if TYPE_CHECKING:  # numpy and the model are loaded by who asks for them
    from simulations.study.scenario import Scenario
    from simulations.study.story import Progress

NO_FIGURES = "no figure was drawn: matplotlib is not installed\npip install 'p2pckpt[study]'"

F = TypeVar("F", bound=Callable[..., Any])


def _inputs(command: F) -> F:
    """Add the scenario, `--set` and `--trace`."""
    changed = click.option(
        "--set", "changes", multiple=True, metavar="KEY=NUMBER", help="Change one input."
    )
    traced = click.option("--trace", default=None, metavar="FILE", help="Replay these losses.")
    return click.argument("scenario", metavar="SCENARIO")(changed(traced(command)))


def _effort(command: F) -> F:
    """Add `--runs` and `--seed`."""
    runs = click.option(
        "--runs", default=200, show_default=True, type=click.IntRange(2), help="Histories."
    )
    seed = click.option("--seed", default=1, show_default=True, help="One seed is one study.")
    return runs(seed(command))


def _scenario(
    name: str,
    changes: tuple[str, ...],
    trace: str | None,
    cluster: tuple[Cluster, str, float] | None = None,
) -> Scenario:
    """Raises UsageError, ConfigError, FormatError."""
    from simulations.study.relocate import on_cluster
    from simulations.study.scenario import load
    from simulations.study.traces import load as load_trace

    found = load(name)
    if cluster is not None:
        found = on_cluster(found, *cluster)
    for change in changes:
        key, _, value = change.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise UsageError(f"--set {change}: needs KEY=NUMBER, as recovery.init_s=5") from None
        whole = key in ("fleet.nodes", "fleet.spares", "recovery.evict_group")
        found = found.varied(key, int(number) if whole else number)
    if trace is None:
        return found
    replayed = load_trace(Path(trace))
    losses = tuple(replayed.losses())
    if not losses:
        raise UsageError(f"--trace {trace}: no node was lost in it")
    hazards = replace(found.hazards, mtbf_s=replayed.duration_s / len(losses), mtbf_counts="node")
    return replace(
        found, hazards=hazards, losses=losses, horizon_s=replayed.duration_s, mtbf_sweep_s=()
    )


@contextmanager
def _bar() -> Iterator[Progress]:
    """Progress on stderr, a bar for each part of the work."""
    with progress() as shown:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=total)
            shown.update(tasks[what], completed=done)

        yield tell


@click.command()
@_inputs
@_effort
@click.option(
    "--out", default="simulation-results", show_default=True, metavar="DIR", help="Where to write."
)
@click.option("--figures/--no-figures", default=True, help="Draw figures (needs matplotlib).")
@json_option
def run(scenario: str, out: str, figures: bool, json_file: str | None, **options: Any) -> None:
    """The whole study of SCENARIO: tables, curves, figures.

    Exit codes: 0 done, 4 done, but matplotlib is missing.
    """
    from simulations.study import report, story

    chosen = _scenario(scenario, options["changes"], options["trace"])
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"--out {out}: {e.strerror}") from e
    with _bar() as tell:
        found = story.study(chosen, options["runs"], options["seed"], tell)
    document = report.document(found)
    emit(str(folder / f"{chosen.name}.json"), document)
    (folder / f"{chosen.name}.csv").write_text(report.csv_text(found.rows))
    files, missing = [f"{chosen.name}.json", f"{chosen.name}.csv"], False
    if figures:
        try:
            from simulations.study import figures as drawing
        except ImportError:
            missing = True
        else:
            files += drawing.draw(found, folder)
    text = report.text(found) + f"\n\nwritten to {folder}: {', '.join(files)}"
    code, advice = (EXIT_DEGRADED, NO_FIGURES) if missing else (EXIT_DONE, "")
    finish("simulate run", json_file, {**document, "files": files}, text, code, advice)


@click.command()
@_inputs
@click.argument("schemes", nargs=-1)
@_effort
@json_option
def compare(scenario: str, schemes: tuple[str, ...], json_file: str | None, **options: Any) -> None:
    """SCHEMES (default: the scenario's) on the same failures; differences are to the first.

    A scheme is s3, local, copies:R, rs:K,M, xor:G or parity:G,F, with @POLICY behind it.
    """
    from simulations.study import report, story

    chosen = _scenario(scenario, options["changes"], options["trace"])
    runs, seed = options["runs"], options["seed"]
    with _bar() as tell:
        rows = story.compare(chosen, schemes or chosen.schemes, runs, seed, tell)
    document = {
        **report.origin(chosen, runs, seed), "rows": [report.row_document(row) for row in rows]
    }  # fmt: skip
    text = f"{chosen.about}\n\n{report.table(rows)}\n\n{report.effort(rows, runs)}"
    finish("simulate compare", json_file, document, text)


@click.command()
@_inputs
@click.option(
    "--cluster",
    default=None,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The nodes: any file that `topology show` reads, in place of the scenario's.",
)
@click.option(
    "--format",
    "form",
    default="",
    type=click.Choice(("", *FORMATS)),
    help="What the cluster's FILE is; default: told from its name and text.",
)
@click.option(
    "--pattern", default="", metavar="REGEX", help="For host lists: r(?P<rack>\\d+)n(?P<host>\\d+)."
)
@click.option(
    "--state-bytes",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    help="Of the whole job, with --cluster; default: the scenario's.",
)
@json_option
def recommend(scenario: str, json_file: str | None, **options: Any) -> None:
    """Layout, placement, intervals, spares and RAM for the cluster of SCENARIO, and why.

    With --cluster: on the nodes of FILE, which fail and save as those of SCENARIO; --state-bytes
    and `--set fleet.spares=4` say what FILE cannot. Exit codes: 0 done, 4 done, with warnings.
    """
    from simulations.study import recommend as advise
    from simulations.study import report

    chosen = _scenario(scenario, options["changes"], options["trace"], _cluster_of(options))
    advice = advise.recommend(chosen)
    document = {**report.origin(chosen, 0, 0), **advise.document(advice)}
    code = EXIT_DEGRADED if advice.warnings else EXIT_DONE
    said = "\n".join((*advice.warnings[:1], "change the cluster, or accept what it cannot keep"))
    finish("simulate recommend", json_file, document, advise.text(advice), code, said)


def _cluster_of(options: dict[str, Any]) -> tuple[Cluster, str, float] | None:
    """The cluster that was named, the name of its file, and the state. Raises UsageError."""
    if options["cluster"] is None:
        if options["state_bytes"]:
            raise UsageError("--state-bytes goes with --cluster; else --set state_bytes=")
        return None
    try:
        found = read_cluster(options["cluster"], options["form"], options["pattern"])
    except TopologyError as e:
        raise UsageError(str(e)) from e
    return found, options["cluster"].name, options["state_bytes"] or 0.0
