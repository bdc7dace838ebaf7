"""`p2pckpt preempt` and `save-now`: an end, or one more save, agreed by all ranks of a job.

Both go through the job's save schedule (PROTOCOL.md, "Which steps are saved"): the local agent
names a step that no rank has reached yet, and every rank finds it there in time. `preempt` is what
a spot notice or a node's shutdown calls; `--node` means every job that has ranks on this node.

Contract: returns when the step is agreed on, not when it is saved (`p2pckpt ls` shows that). An end
that was agreed stays agreed: a second notice gives the same step. Exit codes: 0 agreed for every
job that was meant, 1 not, 3 no job has ranks here.
"""

from __future__ import annotations

import click

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.cli.output import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NOTHING,
    agent_option,
    connect,
    finish,
    job_key,
    json_option,
    waiting,
)
from p2pckpt.errors import UsageError

AGREE_S = 30.0
CALL_TIMEOUT_S = 60.0


@click.command(short_help="Let a job save once more and end.")
@click.option("--job", default=None, metavar="NAME", help="NAME of your job, or UID.NAME.")
@click.option("--node", is_flag=True, help="Every job that has ranks on this node.")
@click.option("--reason", default="preempt", metavar="TEXT", help="Why; kept with the schedule.")
@agent_option
@json_option
def preempt(
    job: str | None, node: bool, reason: str, agent: str | None, json_file: str | None
) -> None:
    """Agree on a last step: all ranks save it, and `should_stop` then ends their loops.

    Run it on a node that has ranks of the job. Nothing is killed: loops that do not ask
    `should_stop` go on.
    """
    if (job is None) is not node:
        raise UsageError("preempt: needs either --job NAME or --node")
    _agree("preempt", "" if job is None else job_key(job), reason, agent, json_file)


@click.command("save-now", short_help="Let a job save one more step.")
@click.option("--job", required=True, metavar="NAME", help="NAME of your job, or UID.NAME.")
@click.option("--reason", default="save-now", metavar="TEXT", help="Why; kept with the schedule.")
@agent_option
@json_option
def save_now(job: str, reason: str, agent: str | None, json_file: str | None) -> None:
    """Agree on an extra step: all ranks save it, beside what the interval says.

    Run it on a node that has ranks of the job. One that is still to come serves again.
    """
    _agree("save-now", job_key(job), reason, agent, json_file)


def _agree(command: str, job: str, reason: str, agent: str | None, json_file: str | None) -> None:
    ends = command == "preempt"
    with connect(agent) as link, waiting("agreeing on a step"):
        reply = link.call(w.ScheduleCall(job, ends, reason, AGREE_S), CALL_TIMEOUT_S)
    assert isinstance(reply, w.ScheduleReply)
    steps = {name: _step(known, ends) for name, known in reply.schedules.items()}
    document = {
        "steps": steps,
        "schedules": {name: r.json_value(known) for name, known in reply.schedules.items()},
        "problems": dict(reply.problems),
    }
    verb = "ends after step" if ends else "saves step"
    text = "\n".join(f"job {name} {verb} {step}" for name, step in sorted(steps.items()))
    code, advice = EXIT_DONE, ""
    if reply.problems:
        lines = (f"not agreed: {why}" for _, why in sorted(reply.problems.items()))
        advice = "\n".join((*lines, "run it on a node where ranks of the job train, or again"))
        code = EXIT_FAILED
    elif not steps:
        advice = "no job has ranks on this node\n`p2pckpt status` says which jobs are here"
        code = EXIT_NOTHING
    finish(command, json_file, document, text, code, advice)


def _step(schedule: r.Schedule, ends: bool) -> int | None:
    """The step that will be saved: nothing is saved after an end that was agreed before."""
    if ends or schedule.last is not None:
        return schedule.last
    return schedule.extra[-1]
