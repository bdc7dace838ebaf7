"""The `p2pckpt` command.

Every command takes `--json [FILE]`: one JSON document on stdout (or in FILE) whose first keys are
`schema_version`, `command`, `ok`; progress and logs go to stderr. Exit codes: 0 done, 1 failed,
2 wrong usage, 3 nothing found, 4 done but degraded, 130 interrupted. The last line on stderr of a
command that did not end with 0 says what to do.
"""

from __future__ import annotations

import sys

import click

from p2pckpt.cli.agent import agent
from p2pckpt.cli.config import config
from p2pckpt.cli.demo import demo
from p2pckpt.cli.ledger import ledger
from p2pckpt.cli.simulate import simulate
from p2pckpt.cli.status import ls, status
from p2pckpt.errors import CheckpointError, UsageError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="p2pckpt")
def cli() -> None:
    """Peer-to-peer replicated in-memory checkpoints for distributed PyTorch training."""


for command in (agent, config, demo, ls, simulate, status, ledger):
    cli.add_command(command)


def main() -> None:
    """Entry point: errors of ours become one line and an exit code."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except click.exceptions.Exit as e:
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except CheckpointError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        sys.exit(2 if isinstance(e, UsageError) else 1)


if __name__ == "__main__":
    main()
