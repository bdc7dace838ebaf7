"""`p2pckpt drain [NODE]`: have a node hand on what it holds, before it is evicted.

The local agent passes the order on to the named node's agent, which does the work; this command
asks how far it is until it is done. The drain stays on when the command has ended, so that nothing
new is placed there until the node goes; `--cancel` ends it.

Contract: exit code 0 means that the node may go, and nothing is less for it: every step that is in
RAM stays restorable, and what the newest one survives is told as without the node. 4: something
could not be moved, at all or in time; what, and why, is told, and the drain goes on. 3: no agent of
that name.
"""

from __future__ import annotations

import json
import time
from typing import Any

import click

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.backends.agent_link import AgentLink
from p2pckpt.cli.output import (
    EXIT_DEGRADED,
    EXIT_DONE,
    EXIT_NOTHING,
    agent_option,
    amount,
    connect,
    finish,
    json_option,
    plural,
    progress,
)

ASK_TIMEOUT_S = 30.0
ASK_EVERY_S = 0.5


@click.command(short_help="Move what a node holds for others, before it goes.")
@click.argument("node", required=False, default="", metavar="[NODE]")
@click.option("--cancel", is_flag=True, help="End the drain: the node may hold shards again.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0),
    default=600.0,
    show_default=True,
    help="Wait so long until all is moved.",
)
@agent_option
@json_option
def drain(
    node: str, cancel: bool, timeout_s: float, agent: str | None, json_file: str | None
) -> None:
    """Move the shards that NODE (default: this node) holds for others to nodes that stay.

    Training goes on, on NODE as well; no new shard is placed there. Ends when NODE may go.
    """
    end = time.monotonic() + timeout_s
    with connect(agent) as link:
        told = _ask(link, node, not cancel, json_file)
        with progress() as bar:
            task = bar.add_task("draining" if not cancel else "ending the drain", total=None)
            while not (told.done or told.stuck) and time.monotonic() < end:
                time.sleep(ASK_EVERY_S)
                told = _ask(link, node, None, json_file)
                bar.update(task, total=told.moved + told.left or None, completed=told.moved)
    document = {**r.json_value(told), "jobs": json.loads(told.jobs)}
    if cancel:
        code = EXIT_DONE if told.done else EXIT_DEGRADED
        advice = f"not all agents know yet that {told.node} stays\nrun it again"
        finish("drain", json_file, document, f"{told.node} stays: it may hold shards", code, advice)
    code = EXIT_DONE if told.done else EXIT_DEGRADED
    finish("drain", json_file, document, _text(told), code, _advice(told))


def _ask(link: AgentLink, node: str, draining: bool | None, json_file: str | None) -> w.DrainReply:
    """One question; ends the command if there is no such node."""
    reply = link.call(w.DrainCall(node, draining), ASK_TIMEOUT_S)
    if isinstance(reply, w.RefusedReply):
        advice = f"{reply.reason}\n`p2pckpt status` lists the members"
        finish("drain", json_file, {}, "", EXIT_NOTHING, advice)
    assert isinstance(reply, w.DrainReply)
    return reply


def _text(told: w.DrainReply) -> str:
    moved = f"{plural(told.moved, 'shard')} moved, {amount(told.moved_bytes)}"
    lines = [f"{told.node} may go: {moved}" if told.done else f"{told.node} must stay: {moved}"]
    jobs: dict[str, Any] = json.loads(told.jobs)
    lines += [f"job {name}: {_survives(facts)}" for name, facts in jobs.items()]
    return "\n".join(lines)


def _survives(facts: dict[str, Any]) -> str:
    if "why" in facts:
        return f"what step {facts['step']} survives is not known: {facts['why']}"
    losses = facts["survivable_node_losses"]
    if losses < 0:
        return f"step {facts['step']} cannot be restored from RAM without it"
    full = f"its layout allows {facts['full']}"
    more = plural(losses, "more node")
    return f"step {facts['step']} survives, without it, the loss of {more} ({full})"


def _advice(told: w.DrainReply) -> str:
    """What is left, and what to do about it."""
    lines = list(told.lacking)
    if told.waiting:
        lines.append(f"{plural(told.waiting, 'save')} in flight with a part on {told.node}")
    if not lines:
        lines.append(f"the time-out came before {told.node} had said what is left")
    following = "the drain goes on: run it again to see; --cancel ends it"
    if told.stuck:
        following = "start agents on more hosts: the drain goes on by itself; --cancel ends it"
    return "\n".join([*lines, following])
