"""`p2pckpt agent`: run this node's agent in the foreground, until SIGTERM or SIGINT.

What the agent does is told on stderr, one line an event; a line "ready" says that trainers can
join. The first signal ends saves in flight and stops; the RAM files stay for the next start.

Contract: `read_config` is how settings are read, here and by every command that shows or checks
them; `effective` adds what an agent makes of those that are empty, and changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket as sockets
import sys
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from p2pckpt.backends.budget import default_budget
from p2pckpt.backends.trainers import default_socket_paths
from p2pckpt.cli.output import finish, json_option
from p2pckpt.config import Config, Resolved, resolve
from p2pckpt.errors import ConfigError

CONFIG_FILE = "/etc/p2pckpt/agent.toml"


def config_options(command: Any) -> Any:
    """One option for every setting, and `--config FILE`."""
    for f in reversed(fields(Config)):
        flag, kind = "--" + f.name.replace("_", "-"), type(f.default)
        flag += f"/--no-{flag[2:]}" if kind is bool else ""
        what = {"help": f.metadata["why"], "type": None if kind is bool else kind}
        command = click.option(flag, f.name, default=None, **what)(command)
    text = f"TOML file; default: $P2PCKPT_CONFIG or {CONFIG_FILE}"
    return click.option("--config", "config_file", default=None, metavar="FILE", help=text)(command)


def read_config(config_file: str | None, flags: Mapping[str, Any]) -> Resolved:
    """Flags > environment > file > default. Raises ConfigError."""
    path = config_file or os.environ.get("P2PCKPT_CONFIG", "")
    place = Path(path or CONFIG_FILE)
    try:
        text = place.read_text() if path or place.is_file() else ""
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "is no text"
        raise ConfigError(f"config file {place}: {why}") from e
    resolved = resolve(flags, os.environ, text, str(place))
    if resolved.config.node:
        return resolved
    named = replace(resolved.config, node=sockets.gethostname().split(".")[0])
    return Resolved(named, {**resolved.origins, "node": "default: host name"})


def effective(found: Resolved) -> Resolved:
    """What an agent that is started now makes of settings that are empty or 0, and why."""
    from p2pckpt.agent.wiring import machine_host

    config, filled, origins = found.config, dict[str, Any](), dict(found.origins)
    if not config.host_id:
        filled["host_id"] = machine_host()
        lacks = "" if filled["host_id"] else " is absent: set host_id"
        origins["host_id"] = f"default: /etc/machine-id{lacks}"
    if not config.socket:
        filled["socket"] = socket_path(os.environ, make=False)
        origins["socket"] = "default: where trainers look"
    if not config.ram_budget_bytes:
        filled["ram_budget_bytes"], _ = default_budget(config.directory)
        origins["ram_budget_bytes"] = "default: half of what is free now"
    return Resolved(replace(config, **filled), origins)


@click.command()
@config_options
@json_option
def agent(config_file: str | None, json_file: str | None, **flags: Any) -> None:
    """Run this node's agent in the foreground.

    Events go to stderr, a JSON object a line; "ready" says that trainers can join. SIGTERM or
    SIGINT ends it: saves in flight end first, the RAM files stay for the next start.
    """
    from p2pckpt.agent.wiring import run_node

    config = read_config(config_file, flags).config
    socket = config.socket or socket_path(os.environ)

    def notes(what: str, facts: dict[str, Any]) -> None:
        line = json.dumps({"time": round(time.time(), 3), "event": what, **facts}, default=str)
        print(line, file=sys.stderr, flush=True)

    asyncio.run(_until_signal(lambda stop: run_node(config, socket, notes, stop)))
    finish("agent", json_file, {"node": config.node, "socket": socket}, "")


def socket_path(environ: Mapping[str, str], make: bool = True) -> str:
    """Where to listen: the first of the places where trainers look whose directory can be made.

    ``make``: make the directory. Raises ConfigError.
    """
    for path in default_socket_paths(environ):
        folder = Path(path).parent
        there = next(p for p in (folder, *folder.parents) if p.exists())
        if not (there.is_dir() and os.access(there, os.W_OK)):
            continue
        if make:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError:
                continue
        return path
    raise ConfigError(f"socket: none of {default_socket_paths(environ)} can be made; set it")


async def _until_signal(run: Any) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await run(stop)
