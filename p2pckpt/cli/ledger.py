"""`p2pckpt ledger rebuild`: a job's records, anew, from the copies that agents keep."""

from __future__ import annotations

import click

from p2pckpt import wire as w
from p2pckpt.cli.output import (
    EXIT_DEGRADED,
    EXIT_DONE,
    EXIT_FAILED,
    agent_option,
    connect,
    finish,
    job_key,
    json_option,
    waiting,
)

REBUILD_TIMEOUT_S = 120.0


@click.group()
def ledger() -> None:
    """Look after the records in etcd."""


@ledger.command()
@click.option("--job", required=True, metavar="NAME", help="NAME of your job, or UID.NAME.")
@click.option("--dry-run", is_flag=True, help="Say what would be rebuilt, and change nothing.")
@agent_option
@json_option
def rebuild(job: str, dry_run: bool, agent: str | None, json_file: str | None) -> None:
    """After etcd was wiped or set back: write the job's records anew from agents' copies.

    Start all agents that hold bytes of the job first: an agent that does not answer cannot give
    its copies. Nothing is deleted but ledger records that the copies replace. Exit codes: 0 done, 1
    refused, 4 done, but some agents did not answer.
    """
    key = job_key(job)
    with connect(agent) as link, waiting("asking all agents for their copies"):
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
        advice = f"not rebuilt: {reply.problem}\n`p2pckpt job ls` lists the jobs that etcd knows"
        finish("ledger rebuild", json_file, document, "", EXIT_FAILED, advice)
    verb = "would have" if dry_run else "has"
    steps = ", ".join(map(str, reply.steps)) or "none"
    text = f"job {key} {verb} steps {steps}; copies are from {', '.join(reply.answered)}"
    code, advice = EXIT_DONE, ""
    if silent:
        advice = f"agents that did not answer: {', '.join(silent)}\n"
        advice += "start them and rebuild again, if what you miss may be theirs"
        code = EXIT_DEGRADED
    finish("ledger rebuild", json_file, document, text, code, advice)
