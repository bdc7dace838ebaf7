"""`p2pckpt ledger rebuild`: a job's records, anew, from the copies that agents keep."""

from __future__ import annotations

import os

import click

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.backends.agent_link import AgentLink
from p2pckpt.backends.trainers import default_socket_paths
from p2pckpt.cli.output import EXIT_DONE, EXIT_FAILED, finish, json_option

REBUILD_TIMEOUT_S = 120.0


@click.group()
def ledger() -> None:
    """Look after the records in etcd."""


@ledger.command()
@click.option("--job", required=True, help="Name of the job, as given to Checkpointer.")
@click.option("--uid", default=None, type=int, help="Owner of the job; default: yours.")
@click.option("--dry-run", is_flag=True, help="Say what would be rebuilt, and change nothing.")
@click.option("--agent", default=None, help="Socket of the agent to ask.")
@json_option
def rebuild(
    job: str, uid: int | None, dry_run: bool, agent: str | None, json_file: str | None
) -> None:
    """After etcd was wiped or set back: write the job's records anew from agents' copies.

    Start all agents that hold bytes of the job first: an agent that does not answer cannot give
    its copies. Nothing is deleted but ledger records that the copies replace.
    """
    key = r.Job(owner_uid=os.getuid() if uid is None else uid, name=job).key
    paths = (agent,) if agent else default_socket_paths(os.environ)
    with AgentLink(paths) as link:
        reply = link.call(w.RebuildCall(key, dry_run), REBUILD_TIMEOUT_S)
    assert isinstance(reply, w.RebuildReply)
    silent = sorted(set(reply.asked) - set(reply.answered))
    document = {
        "job": key,
        "dry_run": dry_run,
        "problem": reply.problem,
        "ledger_id": reply.ledger_id,
        "generation": reply.generation,
        "steps": list(reply.steps),
        "answered": list(reply.answered),
        "silent": silent,
    }
    if reply.problem:
        click.echo(f"not rebuilt: {reply.problem}", err=True)
        finish("ledger rebuild", json_file, document, "", EXIT_FAILED)
    verb = "would have" if dry_run else "has"
    text = (
        f"job {key} {verb} steps {list(reply.steps)} from the copies of {', '.join(reply.answered)}"
    )
    if silent:
        text += f"\nagents that did not answer: {', '.join(silent)}"
    finish("ledger rebuild", json_file, document, text, EXIT_DONE)
