"""`p2pckpt status` and `p2pckpt ls`: what this node's agent says, for people or as JSON."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from p2pckpt import wire as w
from p2pckpt.backends.agent_link import AgentLink
from p2pckpt.backends.trainers import default_socket_paths
from p2pckpt.cli.output import EXIT_DEGRADED, EXIT_DONE, EXIT_NOTHING, finish, json_option

ASK_TIMEOUT_S = 30.0


def ask_status(agent: str | None) -> dict[str, Any]:
    """The agent's status document. Raises AgentUnreachable."""
    paths = (agent,) if agent else default_socket_paths(os.environ)
    with AgentLink(paths) as link:
        reply = link.call(w.StatusQuery(), ASK_TIMEOUT_S)
    assert isinstance(reply, w.StatusReply)
    document: dict[str, Any] = json.loads(reply.document)
    return document


@click.command()
@click.option("--agent", default=None, help="Socket of the agent to ask.")
@json_option
def status(agent: str | None, json_file: str | None) -> None:
    """How this node and its jobs stand; how many more node losses the newest step survives."""
    document = ask_status(agent)
    degraded = document["cut_off"] or document["members"] is None
    degraded = degraded or any(_degraded(job) for job in document["jobs"].values())
    code = EXIT_DEGRADED if degraded else EXIT_DONE
    advice = "start agents on more nodes: repair brings back what is missing"
    if any(job["last_abort"] for job in document["jobs"].values()):
        advice = "the reason of the aborted save says what to change"
    if document["cut_off"] or document["members"] is None:
        advice = "see to it that etcd answers: `p2pckpt doctor` asks every endpoint"
    finish("status", json_file, document, _text(document), code, advice)


@click.command()
@click.option("--agent", default=None, help="Socket of the agent to ask.")
@json_option
def ls(agent: str | None, json_file: str | None) -> None:
    """List the committed steps of the jobs that this node takes part in."""
    jobs = ask_status(agent)["jobs"]
    rows = {name: job["steps"] or [job["latest"]] for name, job in jobs.items() if job["latest"]}
    text = "\n".join(f"{name}  {' '.join(map(str, steps))}" for name, steps in rows.items())
    code = EXIT_DONE if rows else EXIT_NOTHING
    advice = "`p2pckpt job ls` lists all jobs; a step is there when all ranks have saved it"
    text = text or "no committed step is known here"
    finish("ls", json_file, {"jobs": rows}, text, code, advice)


def _degraded(job: dict[str, Any]) -> bool:
    redundancy = job["redundancy"]
    if job["last_abort"] is not None:
        return True
    if job["latest"] is None:
        return False
    return redundancy is None or redundancy["survivable_node_losses"] < redundancy["full"]


def _text(document: dict[str, Any]) -> str:
    ram = document["ram"]
    lines = [
        f"node {document['node']} on host {document['host']}"
        + (" (cut off from etcd)" if document["cut_off"] else ""),
        f"RAM  {ram['used_bytes'] / 2**20:.0f} of {ram['budget_bytes'] / 2**20:.0f} MiB",
        f"members  {', '.join(document['members'] or ['unknown: etcd does not answer'])}",
    ]
    for name, job in document["jobs"].items():
        lines.append(f"job {name}  generation {job['generation']}  {job['layout']}")
        lines.append(f"  committed steps  {' '.join(map(str, job['steps'])) or 'none'}")
        if abort := job["last_abort"]:
            lines.append(f"  newest save, step {abort['step']}, was ABORTED: {abort['reason']}")
        redundancy = job["redundancy"]
        if redundancy is not None:
            lines.append(
                f"  step {redundancy['step']} can still lose "
                f"{redundancy['survivable_node_losses']} nodes (full: {redundancy['full']})"
            )
            for gap in redundancy["missing"]:
                own = "" if gap["own_copy"] else ", own copy lost"
                lines.append(f"    share of {gap['share']}: shards {gap['shards']} missing{own}")
    return "\n".join(lines)
