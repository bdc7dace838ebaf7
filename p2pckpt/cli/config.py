"""`p2pckpt config show` and `config check`: which settings are in force, and where each is from."""

from __future__ import annotations

from typing import Any

import click

from p2pckpt.cli.agent import config_options, effective, read_config
from p2pckpt.cli.output import finish, json_option


@click.group()
def config() -> None:
    """Show or check the agent's settings."""


@config.command()
@config_options
@json_option
def show(config_file: str | None, json_file: str | None, **flags: Any) -> None:
    """Print the values that an agent started here and now would have, each with its origin.

    Secrets are masked. `p2pckpt status --json` has those of an agent that runs.
    """
    shown = effective(read_config(config_file, flags)).shown()
    name_width = max(len(name) for name in shown)
    value_width = min(32, max(len(str(entry["value"])) for entry in shown.values()))
    origin_width = min(32, max(len(entry["origin"]) for entry in shown.values()))
    lines = [
        f"{name:{name_width}}  {_value(entry['value']):{value_width}}  "
        f"{entry['origin']:{origin_width}}  {entry['why']}"
        for name, entry in shown.items()
    ]
    finish("config show", json_file, {"settings": shown}, "\n".join(lines))


def _value(value: Any) -> str:
    """As it would be written on a command line; "-": nothing."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or "-"


@config.command()
@config_options
@json_option
def check(config_file: str | None, json_file: str | None, **flags: Any) -> None:
    """Check the settings; names the first wrong key, its line, and what is allowed."""
    read_config(config_file, flags)
    finish("config check", json_file, {}, "all settings are known and within their bounds")
