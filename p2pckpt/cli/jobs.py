"""`p2pckpt job ls` and `clean`: the jobs that there are, and the end of one that is finished.

`clean` asks first what would go, shows it, and goes on only when it is told to (`--yes`, or an
answer at a terminal). The local agent does the work: it writes the irrevocable record by which
every agent frees its own bytes, waits for them, and removes the job's records last.

Contract: nothing goes while trainers of the job live, a launch forms, or somebody reads; what is in
the object store stays. Exit codes of `clean`: 0 all is gone, 1 refused, 3 there was nothing, 4
some agents are away: what they hold goes when they return.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.cli.output import (
    EXIT_DEGRADED,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NOTHING,
    agent_option,
    amount,
    connect,
    finish,
    job_key,
    json_option,
    plural,
    table,
    waiting,
)
from p2pckpt.errors import UsageError

ASK_TIMEOUT_S = 60.0
CLEAN_TIMEOUT_S = 300.0


@click.group()
def job() -> None:
    """Look after jobs."""


@job.command("ls")
@agent_option
@json_option
def job_ls(agent: str | None, json_file: str | None) -> None:
    """List the jobs that the ledger knows, and what this node holds of each."""
    with connect(agent) as link:
        reply = link.call(w.JobsQuery(), ASK_TIMEOUT_S)
    assert isinstance(reply, w.JobsReply)
    jobs: dict[str, dict[str, Any]] = json.loads(reply.document)
    rows: list[tuple[str, ...]] = [("JOB", "GENERATION", "RANKS", "LAYOUT", "LATEST", "HELD HERE")]
    rows += [_row(name, facts) for name, facts in jobs.items()]
    text = table(rows) if jobs else "no job is known"
    advice = "a job is known from its first start on: `p2pckpt status` says if this agent is alone"
    code = EXIT_DONE if jobs else EXIT_NOTHING
    finish("job ls", json_file, {"jobs": jobs}, text, code, advice)


def _row(name: str, facts: dict[str, Any]) -> tuple[str, ...]:
    keys = ("generation", "world_size", "layout", "latest")
    told = ("-" if facts[key] is None else str(facts[key]) for key in keys)
    lost = "" if facts["in_ledger"] else " (not in the ledger)"
    return (name, *told, f"{amount(facts['held_bytes'])}{lost}")


@click.command(short_help="Remove all of a finished job.")
@click.option("--job", "name", required=True, metavar="NAME", help="NAME of your job, or UID.NAME.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@agent_option
@json_option
def clean(name: str, dry_run: bool, yes: bool, agent: str | None, json_file: str | None) -> None:
    """Leave nothing of a finished job: its checkpoints in RAM on all nodes, its records in etcd.

    This cannot be undone. Checkpoints in the object store stay.
    """
    key = job_key(name)
    plan = _clean(agent, key, dry_run=True)
    document = {"dry_run": True, **r.json_value(plan)}
    if plan.problem:
        code, following = EXIT_FAILED, "when that is so no more, clean again"
        if not (plan.records or plan.held):
            code, following = EXIT_NOTHING, "`p2pckpt job ls` lists the jobs"
        advice = f"not cleaned: {plan.problem}\n{following}"
        finish("clean", json_file, document, "", code, advice)
    if dry_run:
        finish("clean", json_file, document, f"would remove {_what(plan)}")
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("nobody can be asked here; pass --yes, or --dry-run to look")
        if not click.confirm(f"Remove {_what(plan)}?", err=True):
            advice = "not cleaned: the answer was no\nnothing was changed"
            finish("clean", json_file, document, "", EXIT_FAILED, advice)
    done = _clean(agent, key, dry_run=False)
    document = {"dry_run": False, **r.json_value(done)}
    if done.problem:
        advice = f"not cleaned: {done.problem}\nwhen that is so no more, clean again"
        finish("clean", json_file, document, "", EXIT_FAILED, advice)
    late = sorted({*done.left, *done.away})
    code = EXIT_DEGRADED if late else EXIT_DONE
    advice = f"agents of {', '.join(late)} still hold bytes, or are away\n"
    advice += "start them: they free what they hold when they return"
    finish("clean", json_file, document, f"removed {_what(done)}", code, advice)


def _clean(agent: str | None, key: str, dry_run: bool) -> w.CleanReply:
    what = "looking what there is" if dry_run else "waiting until all agents have freed theirs"
    with connect(agent) as link, waiting(what):
        reply = link.call(w.CleanCall(key, dry_run), CLEAN_TIMEOUT_S)
    assert isinstance(reply, w.CleanReply)
    return reply


def _what(plan: w.CleanReply) -> str:
    """In a sentence for people."""
    held = ", ".join(f"{node} {amount(count)}" for node, count in plan.held.items())
    steps = " ".join(map(str, plan.steps)) or "none"
    text = f"job {plan.job}: steps {steps}; RAM {held or 'none'}; "
    text += plural(plan.records, "ledger record")
    if len(plan.ledger_ids) > 1:
        text += f" (of {len(plan.ledger_ids)} ledgers: etcd was wiped or rebuilt in between)"
    if plan.away:
        text += f"; agents of {', '.join(plan.away)} are away: whether ranks live there is unknown"
    if plan.objects:
        text += f"; stays in the object store: {', '.join(plan.objects)}"
    return text
