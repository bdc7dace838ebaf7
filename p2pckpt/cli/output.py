"""One way to give a command's result: a JSON document, or text for people.

Every document begins with `schema_version`, `command`, `ok`, `error`, `exit_code`. `ok` is true
exactly when the exit code is 0, and then `error` is null; else it is {kind, message, next}, also
for 4 ("Degraded": done, but not all is as it should be).

Contract: the document goes to stdout or the file that was named, and nothing else does; progress
goes to stderr, on a terminal only. A command that does not end with 0 says on stderr what is wrong,
and in the last line what to do next, whether or not there is a document. What commands that ask the
local agent have in common (`--agent`, `--job`, the connection) stands here too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import Progress

from p2pckpt.backends.agent_link import AgentLink
from p2pckpt.backends.trainers import default_socket_paths
from p2pckpt.errors import UsageError
from p2pckpt.records import Job

SCHEMA_VERSION = 1
EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_NOTHING, EXIT_DEGRADED = 0, 1, 2, 3, 4
EXIT_INTERRUPTED = 130
KINDS = {EXIT_NOTHING: "NothingFound", EXIT_DEGRADED: "Degraded"}
"""`error.kind` of a result that is no exception; any other code is "Failed"."""

STDOUT = "-"

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Trouble:
    """Why a command did not end with 0: a class of errors or of `KINDS`, and what to do next."""

    kind: str
    message: str
    next: str


# -- options ---------------------------------------------------------------------------------------


def json_option(command: F) -> F:
    """Add `--json [FILE]`."""
    return click.option(
        "--json",
        "json_file",
        is_flag=False,
        flag_value=STDOUT,
        default=None,
        metavar="[FILE]",
        callback=lambda _context, _option, file: _can_be_written(file),
        help="Give one JSON document, on stdout or in FILE.",
    )(command)


def _can_be_written(file: str | None) -> str | None:
    """Found out before anything is done. Raises UsageError."""
    if file not in (None, STDOUT):
        place = Path(file or ".")
        if place.is_dir() or not os.access(place if place.exists() else place.parent, os.W_OK):
            raise UsageError(f"--json {file}: no file can be written there")
    return file


def json_target(arguments: list[str]) -> str | None:
    """Where the document goes ("-": stdout), or None, as click would read the arguments."""
    target = None
    for at, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument.startswith("--json="):
            target = argument.partition("=")[2]
        elif argument == "--json":
            after = arguments[at + 1 : at + 2]
            target = after[0] if after and not after[0].startswith("-") else STDOUT
    return target


def agent_option(command: F) -> F:
    """Add `--agent SOCKET`."""
    text = "Socket of the agent to ask; default: where trainers look."
    return click.option("--agent", default=None, metavar="SOCKET", help=text)(command)


def job_option(command: F) -> F:
    """Add `--job NAME`, which may be left out where there is only one."""
    text = "NAME of your job, or UID.NAME; not needed where there is only one."
    return click.option(
        "--job", default=None, metavar="NAME", help=text, callback=lambda *got: job_name(got[-1])
    )(command)


def job_name(job: str | None) -> str | None:
    """The same, after it was found to be one. Raises UsageError."""
    job_key(job)
    return job


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


def connect(agent: str | None) -> AgentLink:
    """The local agent. Raises AgentUnreachable."""
    return AgentLink((agent,) if agent else default_socket_paths(os.environ))


# -- words -----------------------------------------------------------------------------------------


def plural(count: int, one: str, many: str = "") -> str:
    """ "1 step", "2 steps"; ``many`` where an s will not do."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(f"{c:{n}}" for c, n in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def amount(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.1f} MiB"


# -- while it runs ---------------------------------------------------------------------------------


def progress() -> Progress:
    """A bar on stderr, if that is a terminal; gone when it is done."""
    console = Console(stderr=True)
    return Progress(console=console, disable=not console.is_terminal, transient=True)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say on stderr, if that is a terminal, what is waited for where no bar can tell how long."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


# -- the end ---------------------------------------------------------------------------------------


def finish(
    command: str,
    json_file: str | None,
    document: Mapping[str, Any],
    text: str,
    code: int = EXIT_DONE,
    advice: str = "",
) -> None:
    """Print the result and end with ``code``.

    ``advice``, unless that is 0: what to do next, in its last line; lines before it say what is
    wrong (else the last line of ``text`` does). Raises UsageError if FILE cannot be written.
    """
    message, _, following = advice.rpartition("\n")
    trouble = None
    if code != EXIT_DONE:
        known = message or (text.splitlines() or [f"{command} ended with {code}"])[-1]
        following = following or f"see `p2pckpt {command} --help`"
        trouble = Trouble(KINDS.get(code, "Failed"), known.strip(), following)
    if json_file is None:
        click.echo(text, nl=bool(text))
    else:
        emit(json_file, whole(command, code, trouble, document))
    sys.stdout.flush()
    if trouble is not None:
        click.echo("\n".join(filter(None, (message, following))), err=True)
    raise click.exceptions.Exit(code)


def whole(
    command: str, code: int, trouble: Trouble | None, document: Mapping[str, Any]
) -> dict[str, Any]:
    """The document with its head, whose keys nothing in it replaces."""
    head = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "ok": code == EXIT_DONE,
        "error": asdict(trouble) if trouble else None,
        "exit_code": code,
    }
    return {**head, **{key: value for key, value in document.items() if key not in head}}


def emit(json_file: str, document: Mapping[str, Any]) -> None:
    """Write it. Raises UsageError if FILE cannot be written."""
    text = json.dumps(document, indent=2)
    if json_file == STDOUT:
        click.echo(text)
        return
    try:
        Path(json_file).write_text(text + "\n")
    except OSError as e:
        raise UsageError(f"--json {json_file}: {e.strerror}") from e
