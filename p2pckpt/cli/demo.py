"""`p2pckpt demo`: training on this machine that loses ranks, nodes and a rack, and goes on.

All of it is real: embedded etcd, one agent a node, torch ranks. Exit code 0 only if every kill was
recovered, every restored state equals the saved one, and every loss equals that of the same
training without failures. `--self-test` removes the shards too and so must end with 1.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import click

from p2pckpt.cli.output import EXIT_DONE, EXIT_FAILED, finish, json_option


@click.command()
@click.option("--nodes", default=6, show_default=True, help="Nodes, each with its own agent.")
@click.option("--racks", default=3, show_default=True, help="Failure domains of the nodes.")
@click.option("--layout", default="rs:2,1", show_default=True, help="rs:k,m or copies:r.")
@click.option(
    "--kill", default=0, metavar="N", help="Only one kill: an owner and N-1 of its holders at once."
)
@click.option(
    "--s3", is_flag=True, help="Offload to a SeaweedFS too; a kill may exceed the layout."
)
@click.option("--ranks-per-node", default=1, show_default=True)
@click.option("--steps", default=120, show_default=True, help="Train at least so far.")
@click.option("--every", default=5, show_default=True, help="Steps between saves.")
@click.option("--seed", default=1, show_default=True)
@click.option("--self-test", is_flag=True, help="Remove the peers' shards too: must exit with 1.")
@click.option("--keep", is_flag=True, help="Leave logs and the ranks' journals.")
@json_option
def demo(json_file: str | None, **options: Any) -> None:
    """Kill a trainer, a node, several nodes, a rack; training goes on as if nothing was."""
    from rich.console import Console

    from p2pckpt.demo.story import Options, play

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(stderr=True)
    summary = play(Options(**options), console)
    summary.print(console)
    if summary.run_directory:
        console.print(f"logs and journals: {summary.run_directory}", highlight=False)
    code = EXIT_DONE if summary.ok else EXIT_FAILED
    text = "everything holds" if summary.ok else f"FAILED: {'; '.join(summary.why)}"
    if options["self_test"]:
        console.print("this failure is what --self-test is for: the demo can fail")
    elif code != EXIT_DONE:
        console.print("what to do: run it again with --keep and read the logs that it leaves")
    finish("demo", json_file, summary.document(), text, code)
