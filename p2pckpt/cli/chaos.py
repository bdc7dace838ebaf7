"""`p2pckpt chaos`: training on this machine under a campaign of faults that a seed draws.

All of it is real: three etcd members, one agent and mover a node, torch ranks, and signals to them.
The plan is a function of the seed and is printed first; `--dry-run` prints nothing else. What the
processes do meanwhile is up to the machine, so a seed does not repeat a run exactly.

Contract: exit code 0 only if every fault that struck was survived, every restored state equals the
saved one, every loss equals that of the same training without faults, and nothing is left behind.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import asdict
from typing import Any

import click

from p2pckpt.cli.output import EXIT_FAILED, finish, json_option
from p2pckpt.demo.campaign import KINDS, Options, count


@click.command(short_help="Train under a campaign of faults, and compare every bit.")
@click.option("--minutes", default=5.0, show_default=True, help="No fault strikes after that.")
@click.option("--seed", default=1, show_default=True, help="One seed is one plan.")
@click.option("--nodes", default=6, show_default=True, help="Nodes, each with its own agent.")
@click.option("--racks", default=3, show_default=True, help="Failure domains of the nodes.")
@click.option("--layout", default="rs:2,1", show_default=True, help="rs:k,m or copies:r.")
@click.option("--every", default=5, show_default=True, help="Steps between saves.")
@click.option("--s3", is_flag=True, help="Offload to a SeaweedFS too, and strike it as well.")
@click.option(
    "--fault", "only", multiple=True, type=click.Choice(list(KINDS)), help="These kinds only."
)
@click.option("--dry-run", is_flag=True, help="Print the plan only.")
@click.option("--keep", default="", metavar="DIR", help="Leave logs and the ranks' journals there.")
@json_option
def chaos(json_file: str | None, dry_run: bool, **options: Any) -> None:
    """Kill, stop, corrupt and fill what a training job relies on, under load.

    Ranks, agents, movers, nodes, a rack, etcd members, bytes in RAM, the tmpfs. A fault strikes
    only where the layout's promise covers it together with the others; that waits if need be.
    """
    from rich.console import Console

    from p2pckpt.demo.chaos import play

    chosen = Options(**options)
    chosen.check()
    plan = chosen.plan()
    told = "\n".join((f"plan of seed {chosen.seed}: {len(plan)} faults", *map(str, plan)))
    if dry_run:
        faults = [asdict(fault) for fault in plan]
        finish("chaos", json_file, {"plan": faults, "planned": count(plan)}, told)
    click.echo(told, err=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(stderr=True)
    verdict = play(chosen, console)
    verdict.print(console)
    text = f"everything holds: {len(verdict.faults)} faults survived"
    if verdict.ok:
        finish("chaos", json_file, verdict.document(), text)
    text = f"FAILED: {'; '.join(verdict.why) or 'not all is known to be right'}"
    advice = f"{text}\nrun it again with --keep DIR and read the logs that it leaves"
    finish("chaos", json_file, verdict.document(), text, EXIT_FAILED, advice)
