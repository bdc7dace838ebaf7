"""`p2pckpt simulate world`: one seed of the deterministic world, replayed."""

from __future__ import annotations

from dataclasses import asdict

import click

from p2pckpt.cli.output import EXIT_DONE, finish, json_option


@click.group()
def simulate() -> None:
    """Run the product's own agents in a simulated world."""


@simulate.command()
@click.option("--seed", default=1, show_default=True, help="One seed is one run.")
@click.option("--nodes", default=5, show_default=True)
@click.option("--saves", default=20, show_default=True)
@click.option("--layout", default="rs:2,1", show_default=True)
@click.option(
    "--fault", "faults", multiple=True, default=("crash_lose", "partition"), show_default=True
)
@click.option("--log", "log_file", default=None, help="Write the event log there.")
@json_option
def world(log_file: str | None, json_file: str | None, **options: object) -> None:
    """One run under virtual time: real agents, planned faults, checkers from outside.

    Exit codes: 0 ok, 4 lost (more than the layout survives), 1 wrong, 5 crash, 6 stuck.
    """
    from simulations.world import EXIT_CODES, Options, run

    chosen = Options(**options)  # type: ignore[arg-type]
    click.echo(f"options: {asdict(chosen)}", err=True)
    result = run(chosen)
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
