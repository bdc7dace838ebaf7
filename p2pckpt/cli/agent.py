"""`p2pckpt agent`: run this node's agent in the foreground, until SIGTERM or SIGINT.

What the agent does is told on stderr, one line an event; a line "ready" says that trainers can
join. The first signal ends saves in flight and stops; the RAM files stay for the next start.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket as sockets
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from p2pckpt.backends.trainers import default_socket_paths
from p2pckpt.config import Config, Resolved, resolve
from p2pckpt.errors import ConfigError
from p2pckpt.telemetry import Telemetry

CONFIG_FILE = "/etc/p2pckpt/agent.toml"


def config_options(command: Any) -> Any:
    """One option for every setting, and `--config FILE`."""
    for f in reversed(fields(Config)):
        flag, kind = "--" + f.name.replace("_", "-"), type(f.default)
        flag += f"/--no-{flag[2:]}" if kind is bool else ""
        what = {"help": f.metadata["why"], "type": None if kind is bool else kind}
        command = click.option(flag, f.name, default=None, **what)(command)
    text = f"TOML file; default: $P2PCKPT_CONFIG or {CONFIG_FILE}"
    return click.option("--config", "config_file", default=None, help=text)(command)


def read_config(config_file: str | None, flags: dict[str, Any]) -> Resolved:
    """Flags > environment > file > default. Raises ConfigError."""
    path = config_file or os.environ.get("P2PCKPT_CONFIG", "")
    must = bool(path)
    place = Path(path or CONFIG_FILE)
    if must and not place.is_file():
        raise ConfigError(f"config file {place}: there is none")
    text = place.read_text() if place.is_file() else ""
    resolved = resolve(flags, os.environ, text, str(place))
    if resolved.config.node:
        return resolved
    named = replace(resolved.config, node=sockets.gethostname().split(".")[0])
    return Resolved(named, {**resolved.origins, "node": "host name"})


@click.command()
@config_options
def agent(config_file: str | None, **flags: Any) -> None:
    """Run this node's agent in the foreground."""
    from p2pckpt.agent.wiring import run_node

    config = read_config(config_file, flags).config
    socket = config.socket or socket_path(os.environ)
    telemetry = Telemetry(time.monotonic)

    def notes(what: str, facts: dict[str, Any]) -> None:
        telemetry.note(what, facts)
        line = json.dumps({"time": round(time.time(), 3), "event": what, **facts}, default=str)
        print(line, file=sys.stderr, flush=True)

    asyncio.run(_until_signal(lambda stop: run_node(config, socket, notes, stop)))


def socket_path(environ: Any) -> str:
    """Where to listen: the first of the places where trainers look whose directory can be made."""
    for path in default_socket_paths(environ):
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
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
