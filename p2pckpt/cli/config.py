"""`p2pckpt config show` and `config check`: which settings are in force, and where each is from."""

from __future__ import annotations

from typing import Any

import click

from p2pckpt.cli.agent import config_options, read_config
from p2pckpt.cli.output import finish, json_option


@click.group()
def config() -> None:
    """Show or check the agent's settings."""


@config.command()
@config_options
@json_option
def show(config_file: str | None, json_file: str | None, **flags: Any) -> None:
    """Print effective values with their origin; secrets are masked."""
    shown = read_config(config_file, flags).shown()
    width = max(len(name) for name in shown)
    lines = [
        f"{name:{width}}  {entry['value']!s:24}  {entry['origin']:10}  {entry['why']}"
        for name, entry in shown.items()
    ]
    finish("config show", json_file, {"settings": shown}, "\n".join(lines))


@config.command()
@config_options
@json_option
def check(config_file: str | None, json_file: str | None, **flags: Any) -> None:
    """Check the settings; names the first wrong key, its line, and what is allowed."""
    read_config(config_file, flags)
    finish("config check", json_file, {}, "all settings are known and within their bounds")
