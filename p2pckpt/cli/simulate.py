"""`p2pckpt simulate`: the group, and `world`, one seed of the deterministic world, replayed."""

from __future__ import annotations

import click

from p2pckpt.cli.paper import paper_checks, trace
from p2pckpt.cli.study import compare, recommend, run
from p2pckpt.cli.world import campaign, world


@click.group()
def simulate() -> None:
    """Run the product's own agents in a simulated world, and its model against what is known."""


simulate.add_command(paper_checks)
simulate.add_command(trace)
for command in (run, compare, recommend, world, campaign):
    simulate.add_command(command)
