"""`p2pckpt simulate world` and `campaign`: the deterministic world, one seed or many.

A seed draws all options of its run (`simulations/world/campaign.py`), so `world --seed S` replays
what a campaign found; each option given on the command line takes the place of the drawn one.

Contract: the options are printed before the run. Exit codes tell the ends apart: 1 wrong, 5 crash,
6 stuck, 4 lost (one seed only: more than its layout survives), 7 a long campaign in which some
fault kind, legal move or restore source never happened.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import click

from p2pckpt.cli.output import EXIT_DONE, finish, json_option
from p2pckpt.errors import UsageError


@click.command()
@click.option("--seed", default=1, show_default=True, help="One seed is one run.")
@click.option("--nodes", type=int, default=None)
@click.option("--racks", type=int, default=None)
@click.option("--ranks", type=int, default=None)
@click.option("--jobs", type=int, default=None)
@click.option("--saves", type=int, default=None, help="Saves that are due at least.")
@click.option("--every", type=int, default=None, help="Steps between two saves.")
@click.option("--keep-last", type=int, default=None)
@click.option("--layout", default=None)
@click.option("--offload-every", type=int, default=None, help="0: no object store.")
@click.option("--fault", "faults", multiple=True, help="Strikes once; again as often as given.")
@click.option("--no-fault", is_flag=True, help="Nothing goes wrong.")
@click.option(
    "--trace",
    default=None,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Machines are lost and come as in this file, in place of faults.",
)
@click.option(
    "--trace-losses",
    default=12,
    show_default=True,
    type=click.IntRange(1),
    help="So many, the first of the file, in the time of the run.",
)
@click.option("--checkers/--no-checkers", default=True, show_default=True)
@click.option("--log", "log_file", default=None, help="Write the event log there.")
@json_option
def world(seed: int, log_file: str | None, json_file: str | None, **given: Any) -> None:
    """One run under virtual time: real agents, planned faults, checkers from outside.

    What is not given is drawn from the seed; --trace reads what `simulate trace` does.

    Exit codes: 0 ok, 4 lost (more than the layout survives), 1 wrong, 5 crash, 6 stuck.
    """
    from simulations.world.campaign import draw
    from simulations.world.story import EXIT_CODES, run

    trace, losses = given.pop("trace"), given.pop("trace_losses")
    chosen = replace(draw(seed), **_chosen(given))
    if trace is not None:
        from simulations.study import replays, traces

        taken = replays.absences(traces.load(trace), chosen.nodes, losses)
        chosen = replace(chosen, faults=(), absences=taken)
    click.echo(f"options: {asdict(chosen)}", err=True)
    result = run(chosen, keep_log=log_file is not None)
    if log_file:
        with open(log_file, "w") as f:
            f.write(result.log)
    document = {k: v for k, v in asdict(result).items() if k != "log"}
    text = (
        f"{result.end}: {result.commits} commits of {result.due} due saves, "
        f"{result.launches} launches, restores {result.restores}, faults {result.faults}, "
        f"{result.virtual_s:.1f} virtual seconds\nevent log sha256 {result.digest}"
    )
    if result.end != "ok":
        text += f"\n{result.end}: {result.why}"
    finish("simulate world", json_file, document, text, EXIT_CODES.get(result.end, EXIT_DONE))


def _chosen(given: dict[str, Any]) -> dict[str, Any]:
    """The options that were given; faults as they stand, none with --no-fault."""
    faults = given.pop("faults")
    if given.pop("no_fault"):
        faults = ()
        given["faults"] = faults
    elif faults:
        given["faults"] = faults
    if given["saves"] is not None:  # half of a short run is under faults
        given["quiet_saves"] = min(8, given["saves"] // 2)
    return {name: value for name, value in given.items() if value is not None}


@click.command()
@click.option("--seeds", default="1:", show_default=True, help="FIRST:END, END not included.")
@click.option("--minutes", default=10.0, show_default=True, help="No seed begins after that.")
@click.option("--processes", default=2, show_default=True)
@click.option("--checkers/--no-checkers", default=True, show_default=True)
@json_option
def campaign(
    seeds: str, minutes: float, processes: int, checkers: bool, json_file: str | None
) -> None:
    """Many worlds, each of options that its seed draws; what they add up to.

    Exit codes: 0 ok, 1 wrong, 5 crash, 6 stuck, 7 something that should happen never did.
    """
    from simulations.world.campaign import Campaign

    first, colon, end = seeds.partition(":")
    if not first.isdecimal() or not colon or not (end.isdecimal() or not end):
        raise UsageError(f"--seeds {seeds}: needs FIRST:END or FIRST:")
    numbers = iter(range(int(first), int(end))) if end else count(int(first))

    def tell(text: str) -> None:
        click.echo(text, err=True)

    running = Campaign(numbers, processes, minutes * 60, tell, os.environ, checkers=checkers)
    tally = running.run()
    code = tally.close()
    text = f"{running.told()}\nrestores {tally.restores}\nnever: {', '.join(tally.never) or 'none'}"
    for failure in tally.failures:
        text += f"\nseed {failure['seed']}: {failure['end']}: {failure['why'][:500]}"
    finish("simulate campaign", json_file, asdict(tally), text, code)
