"""The `p2pckpt` command.

Every command takes `--json [FILE]`: one JSON document on stdout (or in FILE), for errors as well,
as `output.py` has it. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 nothing found, 4 done but
degraded, 130 interrupted. The last line on stderr of a command that did not end with 0 says what
to do next.

Contract: `run` never raises; whatever goes wrong below becomes a message, an exit code and, if one
was asked for, a document. `EXAMPLES` has a line for every command, which its `--help` shows.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator

import click

from p2pckpt.cli.agent import agent
from p2pckpt.cli.chaos import chaos
from p2pckpt.cli.config import config
from p2pckpt.cli.demo import demo
from p2pckpt.cli.doctor import doctor
from p2pckpt.cli.drain import drain
from p2pckpt.cli.export import export
from p2pckpt.cli.jobs import clean, job
from p2pckpt.cli.ledger import ledger
from p2pckpt.cli.output import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    STDOUT,
    Trouble,
    emit,
    json_target,
    whole,
)
from p2pckpt.cli.preempt import preempt, save_now
from p2pckpt.cli.restart import plan_restart
from p2pckpt.cli.simulate import simulate
from p2pckpt.cli.status import ls, status
from p2pckpt.cli.steps import inspect, verify
from p2pckpt.cli.topology import topology
from p2pckpt.errors import (
    AgentUnreachable,
    CheckpointError,
    ConfigError,
    LedgerUnavailable,
    MissingDependency,
    NoRoom,
    ObjectStoreUnavailable,
    PeerUnreachable,
    RestoreFailed,
    UsageError,
)

ADVICE: tuple[tuple[type[Exception], str], ...] = (
    (
        AgentUnreachable,
        "start `p2pckpt agent` on this node, or name its socket with --agent (or P2PCKPT_AGENT)",
    ),
    (LedgerUnavailable, "see to it that etcd answers: `p2pckpt doctor` asks every endpoint"),
    (
        ObjectStoreUnavailable,
        "see to it that the agent reaches the object store (s3_url, s3_endpoint)",
    ),
    (PeerUnreachable, "try again; `p2pckpt status` says which agents live"),
    (
        NoRoom,
        "make room, or raise the limit that is named (the agent's own: --ram-budget-bytes), or "
        "clean a finished job",
    ),
    (RestoreFailed, "`p2pckpt inspect` says who holds what; start the agents that are away"),
    (MissingDependency, "install it; `p2pckpt doctor` checks all parts"),
    (ConfigError, "`p2pckpt config show` lists every setting; correct the one that is named"),
    (UsageError, "see `p2pckpt {command} --help`"),
    (CheckpointError, "try again; if it stays, `p2pckpt status` and the agent's log say more"),
    (OSError, "put right what it names, and try again"),
    (Exception, "this is a bug in p2pckpt: please report it with the lines above"),
)
"""What to do about an error, by its class; the first that fits."""

EXAMPLES = {
    "agent": "p2pckpt agent --endpoints etcd1:2379,etcd2:2379,etcd3:2379 --domains rack=r7",
    "status": "p2pckpt status --json",
    "ls": "p2pckpt ls --job gpt",
    "inspect": "p2pckpt inspect latest --job gpt",
    "verify": "p2pckpt verify 400 --job gpt",
    "export": "p2pckpt export latest ./checkpoint --job gpt",
    "job ls": "p2pckpt job ls",
    "clean": "p2pckpt clean --job gpt --dry-run",
    "drain": "p2pckpt drain node-7 --timeout-s 120",
    "preempt": "p2pckpt preempt --node --reason spot-notice",
    "save-now": "p2pckpt save-now --job gpt",
    "plan-restart": "p2pckpt plan-restart --job gpt --format slurm-hostfile",
    "ledger rebuild": "p2pckpt ledger rebuild --job gpt --dry-run",
    "doctor": "p2pckpt doctor --layout rs:4,2",
    "config show": "p2pckpt config show --json",
    "config check": "p2pckpt config check --config agent.toml",
    "topology show": "p2pckpt topology show cluster.toml",
    "topology check": "p2pckpt topology check cluster.toml --layout rs:4,2 --spread rack",
    "topology plan": "p2pckpt topology plan cluster.toml --layout rs:4,2 --svg plan.svg",
    "simulate paper-checks": "p2pckpt simulate paper-checks --only mttdl",
    "simulate run": "p2pckpt simulate run small --runs 50 --out study",
    "simulate compare": "p2pckpt simulate compare small s3 copies:2 rs:4,2",
    "simulate recommend": "p2pckpt simulate recommend llama3",
    "simulate trace": "p2pckpt simulate trace failures.csv --time-unit h",
    "simulate world": "p2pckpt simulate world --seed 7 --fault crash_lose",
    "simulate campaign": "p2pckpt simulate campaign --seeds 1:300 --minutes 10",
    "demo": "p2pckpt demo --nodes 6 --layout rs:2,1",
    "chaos": "p2pckpt chaos --minutes 5 --seed 7",
}
COMPLETION = """\b
Completion of commands and options in the shell:
  eval "$(_P2PCKPT_COMPLETE=bash_source p2pckpt)"    (or zsh_source)
  _P2PCKPT_COMPLETE=fish_source p2pckpt | source
Every command takes --json [FILE]. Exit codes: 0 done, 1 failed, 2 wrong usage,
3 nothing found, 4 done but degraded, 130 interrupted."""


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=COMPLETION,
)
@click.version_option(package_name="p2pckpt", prog_name="p2pckpt")
def cli() -> None:
    """Peer-to-peer replicated in-memory checkpoints for distributed PyTorch training."""


COMMANDS = (
    *(agent, status, ls, inspect, verify, export, plan_restart),
    *(job, clean, preempt, save_now, drain, ledger, doctor, config, topology, simulate),
    *(demo, chaos),
)
for command in COMMANDS:
    cli.add_command(command)


def leaves(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by its whole name."""
    for name, found in group.commands.items():
        if isinstance(found, click.Group):
            yield from leaves(found, f"{before}{name} ")
        else:
            yield before + name, found


for name, leaf in leaves(cli):
    if name in EXAMPLES:
        leaf.epilog = f"Example: {EXAMPLES[name]}"


def main() -> None:
    """Entry point."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """One command; its exit code."""
    command = named(arguments)
    try:
        code = cli(arguments, prog_name="p2pckpt", standalone_mode=False)
        return code if isinstance(code, int) else EXIT_DONE
    except click.ClickException as e:
        return _misused(e, arguments)
    except (click.exceptions.Abort, KeyboardInterrupt):
        trouble = Trouble("Interrupted", f"{command or 'p2pckpt'} was interrupted", "run it again")
        return _fail(arguments, EXIT_INTERRUPTED, trouble)
    except SystemExit as e:  # a command that ended on a signal
        code = e.code if isinstance(e.code, int) else EXIT_FAILED
        ended = Trouble("Interrupted", f"{command} ended with {code}", "run it again")
        return _fail(arguments, code, ended) if code else EXIT_DONE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("stdout was closed before all was written; write to a file", file=sys.stderr)
        return EXIT_FAILED
    except Exception as e:
        if not isinstance(e, CheckpointError | OSError):
            traceback.print_exc()
        advice = next(text for kind, text in ADVICE if isinstance(e, kind))
        following = advice.format(command=command)
        code = EXIT_USAGE if isinstance(e, UsageError) else EXIT_FAILED
        return _fail(arguments, code, Trouble(type(e).__name__, str(e), following))


def named(arguments: list[str]) -> str:
    """The command that the arguments name, as "job ls"; "" if they name none."""
    group: click.Command = cli
    words = []
    for word in arguments:
        if not isinstance(group, click.Group) or word not in group.commands:
            break
        group = group.commands[word]
        words.append(word)
    return " ".join(words)


def _misused(e: click.ClickException, arguments: list[str]) -> int:
    """Wrong usage, as click found it."""
    context = getattr(e, "ctx", None)
    path = context.command_path if context else "p2pckpt"
    message, following = e.format_message(), f"see `{path} --help`"
    if isinstance(e, click.exceptions.NoArgsIsHelpError):
        group = e.ctx.command
        known = ", ".join(group.commands) if isinstance(group, click.Group) else ""
        print(e.ctx.get_help(), file=sys.stderr)
        message = f"{path}: needs a command: {known}"
    elif context is not None:
        print(context.get_usage(), file=sys.stderr)
    taken = json_target(arguments)
    if isinstance(e, click.exceptions.MissingParameter) and taken not in (None, STDOUT):
        following = f"--json took {taken!r} for its FILE: write --json last, or --json=-"
        arguments = [*arguments, "--json"]  # which wins: that was meant for no file
    return _fail(arguments, e.exit_code, Trouble("UsageError", message, following))


def _fail(arguments: list[str], code: int, trouble: Trouble) -> int:
    """Say what is wrong, as a document too if one was asked for."""
    if (json_file := json_target(arguments)) is not None:
        document = whole(named(arguments), code, trouble, {})
        try:
            emit(json_file, document)
        except UsageError:  # that is what is wrong
            emit(STDOUT, document)
    sys.stdout.flush()
    print(f"{trouble.kind}: {trouble.message}\n{trouble.next}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
