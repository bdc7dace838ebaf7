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
from p2pckpt.cli.doctor import doctor
from p2pckpt.cli.jobs import clean, job
from p2pckpt.cli.ledger import ledger
from p2pckpt.cli.simulate import simulate
from p2pckpt.cli.status import ls, status
from p2pckpt.cli.steps import export, inspect, verify
from p2pckpt.errors import (
    AgentUnreachable,
    CheckpointError,
    LedgerUnavailable,
    MissingDependency,
    NoRoom,
    PeerUnreachable,
    RestoreFailed,
    UsageError,
)

ADVICE: tuple[tuple[type[CheckpointError], str], ...] = (
    (AgentUnreachable, "start `p2pckpt agent`, or name its socket with --agent; see also `doctor`"),
    (LedgerUnavailable, "see to it that etcd answers: `p2pckpt doctor` asks every endpoint"),
    (PeerUnreachable, "try again; `p2pckpt status` says which agents live"),
    (NoRoom, "give the agent more room (--ram-budget-bytes) or clean a finished job"),
    (RestoreFailed, "`p2pckpt inspect` says who holds what; start the agents that are away"),
    (MissingDependency, "install it; `p2pckpt doctor` checks all parts"),
    (UsageError, "see --help of the command"),
    (CheckpointError, "try again; if it stays, `p2pckpt status` and the agent's log say more"),
)
"""What to do about an error, by its class; the first that fits."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="p2pckpt")
def cli() -> None:
    """Peer-to-peer replicated in-memory checkpoints for distributed PyTorch training."""


COMMANDS = (
    *(agent, status, ls, inspect, verify, export),
    *(job, clean, ledger, doctor, config, simulate, demo),
)
for command in COMMANDS:
    cli.add_command(command)


def main() -> None:
    """Entry point: errors of ours become one line and an exit code."""
    try:
        code = cli(prog_name="p2pckpt", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as e:
        e.show()
        context = getattr(e, "ctx", None)
        print(f"see `{context.command_path if context else 'p2pckpt'} --help`", file=sys.stderr)
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except CheckpointError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        print(next(what for kind, what in ADVICE if isinstance(e, kind)), file=sys.stderr)
        sys.exit(2 if isinstance(e, UsageError) else 1)


if __name__ == "__main__":
    main()
