"""One way to give a command's result: a JSON document, or text for people.

Contract: the document goes to stdout or the file that was named, and nothing else does; a command
says how it ended by the exit code (`EXIT_*`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

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


def finish(
    command: str, json_file: str | None, document: Mapping[str, Any], text: str, code: int = 0
) -> None:
    """Print the result and end with `code`."""
    whole = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "ok": code in (EXIT_DONE, EXIT_DEGRADED),
        **document,
    }
    if json_file is None:
        click.echo(text)
    elif json_file == "-":
        click.echo(json.dumps(whole, indent=2))
    else:
        Path(json_file).write_text(json.dumps(whole, indent=2) + "\n")
    sys.stdout.flush()
    raise click.exceptions.Exit(code)
