"""One way to give a command's result: a JSON document, or text for people.

Contract: the document goes to stdout or the file that was named, and nothing else does; a command
says how it ended by the exit code (`EXIT_*`) and, if that is not 0, what to do about it by the last
line on stderr. `agent_option` and `job_key` are shared by the commands that ask the local agent.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from p2pckpt.errors import UsageError
from p2pckpt.records import Job

SCHEMA_VERSION = 1
EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_NOTHING, EXIT_DEGRADED = 0, 1, 2, 3, 4

F = TypeVar("F", bound=Callable[..., Any])


def json_option(command: F) -> F:
    """Add `--json [FILE]`."""
    return click.option(
        "--json",
        "json_file",
        is_flag=False,
        flag_value="-",
        default=None,
        metavar="[FILE]",
        help="Give one JSON document, on stdout or in FILE.",
    )(command)


def agent_option(command: F) -> F:
    """Add `--agent SOCKET`."""
    return click.option("--agent", default=None, help="Socket of the agent to ask.")(command)


def job_key(job: str | None) -> str:
    """NAME is the caller's own job, UID.NAME anybody's; "" is the only one there is.

    Raises UsageError for what is no name of a job.
    """
    if job is None:
        return ""
    uid, dot, name = job.rpartition(".")
    if dot and not uid.isdecimal():
        raise UsageError(f"job {job!r}: needs NAME, or UID.NAME for another user's")
    return Job(int(uid) if dot else os.getuid(), name).key


def finish(
    command: str,
    json_file: str | None,
    document: Mapping[str, Any],
    text: str,
    code: int = 0,
    advice: str = "",
) -> None:
    """Print the result and end with `code`; ``advice`` is the last line on stderr, unless 0."""
    whole = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "ok": code in (EXIT_DONE, EXIT_DEGRADED),
        **document,
    }
    if json_file is None:
        click.echo(text, nl=bool(text))
    elif json_file == "-":
        click.echo(json.dumps(whole, indent=2))
    else:
        Path(json_file).write_text(json.dumps(whole, indent=2) + "\n")
    sys.stdout.flush()
    if code != EXIT_DONE and advice:
        click.echo(advice, err=True)
    raise click.exceptions.Exit(code)
