"""`p2pckpt inspect` and `verify`: one committed step, looked at and proven.

Both ask the local agent for the step's records and for who holds what now; while they run the step
is kept from retirement. A step that lies in the object store only is read from there, through the
agent. `verify` has every holder read its bytes again, and reads the objects; what it then says of a
step is worked out from the pieces that are right, just as a restore would use them.

Contract: a step that does not exist is exit code 3. `verify`: 0 all files are right, 4 some are not
but every rank can be had, 1 some rank cannot.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.backends.agent_link import AgentLink
from p2pckpt.cli.output import (
    EXIT_DEGRADED,
    EXIT_DONE,
    EXIT_FAILED,
    amount,
    connect,
    finish,
    plural,
    progress,
)
from p2pckpt.cli.step import (
    ASK_TIMEOUT_S,
    SLOW_BYTES_PER_S,
    Checked,
    Step,
    ask_step,
    files_of,
    lost_ranks,
    step_options,
    tensors_of,
)
from p2pckpt.errors import CheckpointError, FormatError, IntegrityError
from p2pckpt.restore.fetch import OBJECT_STORE
from p2pckpt.restore.locate import Sources

NODES_AT_ONCE = 8
OBJECTS_AT_ONCE = 4
TIERS = {"ram": "RAM", "s3": "the object store"}


# -- inspect ---------------------------------------------------------------------------------------


@click.command(short_help="Show all that is known of a step.")
@step_options
def inspect(step: str, job: str | None, agent: str | None, json_file: str | None) -> None:
    """Show everything that is known of the committed STEP (a number, or 'latest')."""
    with connect(agent) as link:
        found = ask_step(link, "inspect", step, job, json_file)
    document = describe(found)
    lost = [share["node"] for share in document["shares"] if share["ranks"] is None]
    code = EXIT_FAILED if lost else EXIT_DONE
    advice = f"no right manifest of the share of {', '.join(lost)} was found\n"
    advice += f"`p2pckpt verify {step}` says what is left"
    finish("inspect", json_file, document, _inspect_text(document), code, advice)


def describe(step: Step) -> dict[str, Any]:
    """The document of `inspect`."""
    commit = step.told.commit
    shares = []
    for share in step.shares():
        manifest, sources = step.manifests[share.node], step.sources(share)
        ranks = None if manifest is None else [_rank(e, sources) for e in manifest.ranks]
        shards = [
            {"shard": i, "recorded": store, "held_by": list(sources.shards.get(i, ()))}
            for i, store in enumerate(share.holders)
        ]
        shares.append(
            {
                "node": share.node,
                "store_id": share.store_id,
                "bytes": share.snapshot_bytes,
                "manifest_digest": share.manifest_digest,
                "shards": shards,
                "ranks": ranks,
            }
        )
    return {
        "job": step.told.job,
        "step": commit.attempt.step,
        "attempt": r.json_value(commit.attempt),
        "lineage": commit.lineage,
        "layout": str(commit.layout),
        "world_size": commit.world_size,
        "tiers": step.tiers,
        "degraded": list(commit.degraded),
        "bytes": sum(share["bytes"] for share in shares),
        "redundancy": step.facts,
        "silent": list(step.told.silent),
        "shares": shares,
    }


def _rank(entry: r.RankSnapshot, sources: Sources) -> dict[str, Any]:
    return {
        "rank": entry.rank,
        "bytes": entry.length,
        "own_copy": list(sources.slots.get(entry.rank, ())),
        "meta": json.loads(entry.meta),
        "tensors": tensors_of(entry.header) if entry.header else [],
    }


def _inspect_text(d: dict[str, Any]) -> str:
    a, redundancy = d["attempt"], d["redundancy"]
    lines = [
        f"job {d['job']}  step {d['step']}  {d['layout']}  {plural(d['world_size'], 'rank')}  "
        f"{amount(d['bytes'])}  in {' and '.join(TIERS[tier] for tier in d['tiers'])}",
        f"attempt {a['generation']}.{a['ordinal']} of ledger {a['ledger_id'][:8]}, "
        f"lineage {d['lineage'][:8]}",
    ]
    if "survivable_node_losses" in redundancy:
        losses, full = redundancy["survivable_node_losses"], redundancy["full"]
        told = f"survives the loss of {plural(losses, 'more node')} (its layout allows {full})"
        lines.append(f"in RAM it {told if losses >= 0 else 'is lost'}")
    lines += [f"degraded: {why}" for why in d["degraded"]]
    for share in d["shares"]:
        lines.append(
            f"share of {share['node']}  {amount(share['bytes'])}  "
            f"manifest {share['manifest_digest'][:12]}"
        )
        missing = "MISSING" if "ram" in d["tiers"] else "not in RAM"
        held = (f"{s['shard']}: {' '.join(s['held_by']) or missing}" for s in share["shards"])
        if share["shards"]:
            lines.append(f"  shards  {', '.join(held)}")
        for rank in share["ranks"] or ():
            copy = " ".join(rank["own_copy"]) or missing
            lines.append(
                f"  rank {rank['rank']}  {amount(rank['bytes'])}  own copy: {copy}  "
                f"meta {json.dumps(rank['meta'])}"
            )
            for t in rank["tensors"]:
                lines.append(f"    {t['name']}  {t['dtype']} {t['shape']}  {t['bytes']} bytes")
    return "\n".join(lines)


# -- verify ----------------------------------------------------------------------------------------


@click.command(short_help="Have every byte of a step read and compared.")
@step_options
def verify(step: str, job: str | None, agent: str | None, json_file: str | None) -> None:
    """Have every holder of STEP read its bytes again and compare them with the manifest.

    If the step lies in the object store, its objects are read too. Exit codes: 0 all right, 4
    something is wrong or missing but every rank can be restored, 1 not restorable.
    """
    with connect(agent) as link:
        found = ask_step(link, "verify", step, job, json_file)
        files = _check_all(found, files_of(found), lambda: connect(agent))
    lost, wrong = lost_ranks(found, files), [f for f in files if f.state != "right"]
    code = EXIT_FAILED if lost else EXIT_DEGRADED if wrong else EXIT_DONE
    lines = [_file_line(f) for f in files]
    if found.told.silent:
        lines.append(f"agents that did not answer: {', '.join(found.told.silent)}")
    size = found.told.commit.world_size
    whole = "the one rank" if size == 1 else f"all {size} ranks"
    lines += lost or [f"{whole} of the step can be restored"]
    advice = _advice(lost, wrong)
    document = {
        "job": found.told.job,
        "step": found.told.commit.attempt.step,
        "restorable": not lost,
        "lost": lost,
        "silent": list(found.told.silent),
        "files": [f.document() for f in files],
    }
    finish("verify", json_file, document, "\n".join(lines), code, advice)


def _advice(lost: list[str], wrong: list[Checked]) -> str:
    """What is wrong, and what to do about it."""
    if lost:
        ranks = plural(len(lost), "rank or share", "ranks or shares")
        what = f"{ranks} of the step cannot be restored from what is right and answers now"
        return f"{what}\nstart what is away and verify again, or restore an older step"
    files = plural(len(wrong), "file is", "files are")
    following = "repair brings back what is missing in RAM; a new save replaces what is wrong"
    if all(f.node == OBJECT_STORE for f in wrong):
        files = plural(len(wrong), "object is", "objects are")
        following = "RAM has the step; the next step that is offloaded replaces the objects"
    return f"{files} missing, wrong or out of reach, but the step is not lost\n{following}"


def _check_all(
    step: Step, files: list[Checked], new_link: Callable[[], AgentLink]
) -> list[Checked]:
    """All files: some nodes at once, one after the other on each, but some objects at once."""
    lanes: dict[tuple[str, int], list[Checked]] = {}
    for f in (f for f in files if f.node):
        lane = f.part % OBJECTS_AT_ONCE if f.node == OBJECT_STORE else 0
        lanes.setdefault((f.node, lane), []).append(f)
    with progress() as bar:
        task = bar.add_task("reading", total=sum(f.length for f in files if f.node))

        def on_lane(mine: list[Checked]) -> list[Checked]:
            out = []
            with new_link() as link:
                for file in mine:
                    out.append(_check(link, step, file))
                    bar.advance(task, file.length)
            return out

        with ThreadPoolExecutor(NODES_AT_ONCE) as pool:
            checked = [f for done in pool.map(on_lane, lanes.values()) for f in done]
    checked += [f for f in files if not f.node]
    return sorted(checked, key=lambda f: (f.share, f.kind, f.part, f.node))


def _check(link: AgentLink, step: Step, file: Checked) -> Checked:
    (share,) = (s for s in step.shares() if s.node == file.share)
    place = (file.share, file.kind, file.part, file.node, file.length)
    digest, attempt = share.manifest_digest, step.told.commit.attempt
    query = w.VerifyQuery(attempt, file.kind, file.share, file.part, digest, file.length)
    try:
        timeout_s = ASK_TIMEOUT_S + file.length / SLOW_BYTES_PER_S
        reply = link.call(w.VerifyCall(file.node, query), timeout_s)
    except (IntegrityError, FormatError) as e:
        return Checked(*place, "wrong", (), str(e))
    except CheckpointError as e:
        return Checked(*place, "unreachable", (), f"{type(e).__name__}: {e}")
    if isinstance(reply, w.VerifyReply):
        return Checked(*place, "wrong" if reply.bad else "right", reply.bad)
    return Checked(*place, "missing", (), getattr(reply, "reason", ""))


def _file_line(f: Checked) -> str:
    wrong = "; ".join(
        f"rank {p.rank} shard {p.shard}: {plural(p.count, 'chunk')}, "
        + " ".join(map(str, p.chunks[:8]))
        + (" ..." if p.count > 8 else "")
        for p in f.bad
    )
    what = f"{'object' if f.node == OBJECT_STORE else f.kind} {f.part} of {f.share}"
    return "  ".join(filter(None, (f"{f.state:11} {what}", f.node, wrong, f.why)))
