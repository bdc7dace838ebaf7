"""`p2pckpt status` and `p2pckpt ls`: how things stand, and which steps there are.

`status` is what this node's agent says of itself and of the jobs that are here; `ls` lists every
step that a restore may take, of all jobs that the ledger knows, and the tier that it lies in: "ram"
(of the nodes), "s3" (the object store), or both, as the records say; `verify` says what of it is
right. `status` works while etcd is away, `ls` does not.
"""

from __future__ import annotations

import json
from typing import Any

import click

from p2pckpt import wire as w
from p2pckpt.cli.output import (
    EXIT_DEGRADED,
    EXIT_DONE,
    EXIT_NOTHING,
    agent_option,
    connect,
    finish,
    job_key,
    job_option,
    json_option,
    plural,
    table,
)

ASK_TIMEOUT_S = 30.0
TIERS = {"ram": "RAM", "s3": "S3"}


@click.command(short_help="How this node and its jobs stand.")
@job_option
@agent_option
@json_option
def status(job: str | None, agent: str | None, json_file: str | None) -> None:
    """How this node and its jobs stand; how many more node losses the newest step survives."""
    with connect(agent) as link:
        reply = link.call(w.StatusQuery(), ASK_TIMEOUT_S)
    assert isinstance(reply, w.StatusReply)
    document: dict[str, Any] = json.loads(reply.document)
    document["jobs"] = _chosen("status", document["jobs"], job, json_file)
    code, advice = _verdict(document)
    finish("status", json_file, document, _text(document), code, advice)


@click.command(short_help="List committed steps, and where each lies.")
@job_option
@agent_option
@json_option
def ls(job: str | None, agent: str | None, json_file: str | None) -> None:
    """List the committed steps that a restore may take, and where each lies: RAM, S3 or both."""
    with connect(agent) as link:
        reply = link.call(w.JobsQuery(), ASK_TIMEOUT_S)
    assert isinstance(reply, w.JobsReply)
    jobs = _chosen("ls", json.loads(reply.document), job, json_file)
    steps = {name: facts["steps"] for name, facts in jobs.items() if facts["steps"]}
    rows = [("JOB", "STEP", "RECORDED IN", "LAYOUT")]
    rows += [
        (name, str(s["step"]), ", ".join(TIERS[tier] for tier in s["tiers"]), s["layout"])
        for name, known in steps.items()
        for s in known
    ]
    if not steps:
        advice = "`p2pckpt job ls` lists all jobs; a step is there when all ranks have saved it"
        finish("ls", json_file, {"jobs": {}}, "no step is committed", EXIT_NOTHING, advice)
    finish("ls", json_file, {"jobs": steps}, table(rows))


def _chosen(
    command: str, jobs: dict[str, Any], job: str | None, json_file: str | None
) -> dict[str, Any]:
    """All jobs, or the one that is asked for; ends the command if that is not there."""
    if job is None:
        return jobs
    key = job_key(job)
    if key not in jobs:
        known = ", ".join(sorted(jobs)[:16]) or "none"
        advice = f"job {key} is not known; there are: {known}\n`p2pckpt job ls` lists all jobs"
        finish(command, json_file, {"jobs": {}}, "", EXIT_NOTHING, advice)
    return {key: jobs[key]}


def _verdict(document: dict[str, Any]) -> tuple[int, str]:
    """The exit code, and what is wrong with what to do about it."""
    if document["cut_off"] or document["members"] is None:
        what = "etcd does not answer this agent"
        return (
            EXIT_DEGRADED,
            f"{what}\nsee to it that it does: `p2pckpt doctor` asks every endpoint",
        )
    for name, job in document["jobs"].items():
        if trouble := job["ledger_trouble"]:
            wrong = f"job {name}: no save can commit, as etcd takes no record of it"
            return EXIT_DEGRADED, f"{wrong}\n{trouble}"
    for name, job in document["jobs"].items():
        if abort := job["last_abort"]:
            wrong = f"job {name}: the newest save, step {abort['step']}, was aborted"
            return EXIT_DEGRADED, f"{wrong}\nthe reason, `{abort['reason']}`, says what to change"
    for name, job in document["jobs"].items():
        redundancy = job["redundancy"]
        if job["latest"] is None or (redundancy is None and _tiers(job, job["latest"]) == ["s3"]):
            continue
        if redundancy is None:
            why = job.get("redundancy_why", "unknown")
            return EXIT_DEGRADED, f"job {name}: what it survives is not known: {why}\ntry again"
        if redundancy["survivable_node_losses"] < redundancy["full"]:
            wrong = f"job {name}: {_survives(redundancy)}"
            if leaving := document["draining"]:
                wrong += f"; {', '.join(leaving)}, being drained, counted as gone"
            return EXIT_DEGRADED, f"{wrong}\nstart agents on more nodes: repair does the rest"
    return EXIT_DONE, ""


def _tiers(job: dict[str, Any], step: int) -> list[str]:
    kept = {"ram": job["steps"], "s3": job["offloaded"]}
    return [tier for tier, steps in kept.items() if step in steps]


def _survives(redundancy: dict[str, Any]) -> str:
    step, losses = redundancy["step"], redundancy["survivable_node_losses"]
    full = f"its layout allows {redundancy['full']}"
    if losses < 0:
        return f"step {step} cannot be restored now from RAM ({full} lost nodes)"
    return f"step {step} survives the loss of {plural(losses, 'more node')} ({full})"


def _text(document: dict[str, Any]) -> str:
    ram = document["ram"]
    lines = [
        f"node {document['node']} on host {document['host']}"
        + (" (cut off from etcd)" if document["cut_off"] else ""),
        f"RAM  {ram['used_bytes'] / 2**20:.0f} of {ram['budget_bytes'] / 2**20:.0f} MiB",
        f"members  {', '.join(document['members'] or ['unknown: etcd does not answer'])}",
    ]
    if document["draining"]:
        lines.append(f"being drained, counted as gone  {', '.join(document['draining'])}")
    if (scrub := document["scrub"])["found"]:
        wounds = f"{scrub['found']} found wrong or lost, {scrub['mended']} mended"
        lines.append(f"read again  {wounds}, {scrub['open']} open")
    if scrub["late_s"]:
        lines.append(f"read again  {scrub['late_s']:.0f} s later than {scrub['period_s']:.0f} s")
    if (bandwidth := document["bandwidth"])["level"] < 1:
        budget = f"{bandwidth['budget_bytes_s'] / 1e6:.0f} MB/s"
        lines.append(f"beside training  {budget} for saves and the like: {bandwidth['why']}")
    for name, job in document["jobs"].items():
        lines.append(f"job {name}  generation {job['generation']}  {job['layout']}")
        steps = sorted({*job["steps"], *job["offloaded"]})
        told = (f"{s} ({', '.join(TIERS[t] for t in _tiers(job, s))})" for s in steps)
        lines.append(f"  committed steps  {', '.join(told) or 'none'}")
        if schedule := job["schedule"]:
            lines += [f"  {line}" for line in _schedule(schedule)]
        if job["offload_due"]:
            lines.append(f"  on the way to S3  {', '.join(map(str, job['offload_due']))}")
        if trouble := job["ledger_trouble"]:
            lines.append(f"  etcd takes NO RECORD of it: {trouble}")
        if abort := job["last_abort"]:
            lines.append(f"  newest save, step {abort['step']}, was ABORTED: {abort['reason']}")
        if (redundancy := job["redundancy"]) is not None:
            lines.append(f"  {_survives(redundancy)}")
            lines += [f"    {_gap(gap)}" for gap in redundancy["missing"]]
        elif why := job.get("redundancy_why"):
            lines.append(f"  {why}")
    if not document["jobs"]:
        lines.append("no job is here")
    return "\n".join(lines)


def _schedule(schedule: dict[str, Any]) -> list[str]:
    """Which steps are saved, and which of them go to S3, and why."""
    lines = [f"saves every {plural(schedule['every'], 'step')}{_chosen_for(schedule, schedule)}"]
    if store := schedule["store"]:
        often = "every save" if store["every"] == 1 else f"one of {store['every']} saves"
        lines.append(f"{often} goes to S3{_chosen_for(schedule, store)}")
    if (extra := schedule["extra"]) is not None:
        lines.append(f"extra step {extra}: {schedule['reason']}")
    if (last := schedule["last"]) is not None:
        lines.append(f"step {last} is the LAST: {schedule['reason']}")
    return lines


def _chosen_for(schedule: dict[str, Any], tier: dict[str, Any]) -> str:
    """Why an interval is what it is, where agents choose it, and which would be as good."""
    if not schedule["auto"]:
        return ""
    if not schedule["decides"]:
        return " (chosen; the agent of rank 0 says why)"
    if tier["why"] is None:
        return " (to be chosen; nothing is known yet of what a save costs)"
    low_s, high_s = tier["as_good_s"]
    return f" (chosen: {tier['why']}; as good: {low_s:.4g} to {high_s:.4g} s)"


def _gap(gap: dict[str, Any]) -> str:
    """What a share lacks, in a sentence."""
    shards = gap["shards"]
    lacks = [] if gap["own_copy"] else ["its own copy"]
    if shards:
        lacks.append(f"shard{'s' * (len(shards) > 1)} {', '.join(map(str, shards))}")
    return f"share of {gap['share']} lacks {' and '.join(lacks)}"
