"""`p2pckpt inspect`, `verify` and `export`: one committed step, looked at, proven, taken out.

All three ask the local agent for the step's records and for who holds what now; while they run the
step is kept from retirement. `verify` has every holder read its bytes again; what it then says of a
step is worked out from the pieces that are right, just as a restore would use them. `export` writes
the ranks' snapshots as they are: safetensors files that need nothing of ours to be read.

Contract: a step that does not exist is exit code 3. `verify`: 0 all files are right, 4 some are not
but every rank can be had, 1 some rank cannot. `export` makes the whole directory or none of it, and
checks every chunk that it writes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.backends.agent_link import AgentLink
from p2pckpt.cli.output import (
    EXIT_DEGRADED,
    EXIT_DONE,
    EXIT_FAILED,
    finish,
)
from p2pckpt.cli.step import (
    ASK_TIMEOUT_S,
    Checked,
    Step,
    ask_step,
    connect,
    files_of,
    lost_ranks,
    step_options,
    tensors_of,
)
from p2pckpt.coding.checksum import crc32c
from p2pckpt.errors import CheckpointError, FormatError, IntegrityError, NoRoom, UsageError
from p2pckpt.restore.locate import Sources

SLOW_BYTES_PER_S = 20 * 1024 * 1024
"""Slower than the agent's own floor, so that it is the agent who says what took too long."""
NODES_AT_ONCE = 8
EXPORT_FORMAT = "p2pckpt-export/1"


# -- inspect ---------------------------------------------------------------------------------------


@click.command()
@step_options
def inspect(step: str, job: str | None, agent: str | None, json_file: str | None) -> None:
    """Show everything that is known of the committed STEP (a number, or 'latest')."""
    with connect(agent) as link:
        found = ask_step(link, "inspect", step, job, json_file)
    document = describe(found)
    lost = [share["node"] for share in document["shares"] if share["ranks"] is None]
    code = EXIT_FAILED if lost else EXIT_DONE
    advice = f"no right manifest of {lost} was found; `p2pckpt verify {step}` says what is left"
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
        "degraded": list(commit.degraded),
        "bytes": sum(share["bytes"] for share in shares),
        "redundancy": json.loads(step.told.redundancy),
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
        f"job {d['job']}  step {d['step']}  {d['layout']}  {d['world_size']} ranks  "
        f"{_mib(d['bytes'])}",
        f"attempt {a['generation']}.{a['ordinal']} of ledger {a['ledger_id'][:8]}, "
        f"lineage {d['lineage'][:8]}",
    ]
    if "survivable_node_losses" in redundancy:
        lines.append(
            f"can still lose {redundancy['survivable_node_losses']} nodes "
            f"(full: {redundancy['full']})"
        )
    lines += [f"degraded: {why}" for why in d["degraded"]]
    for share in d["shares"]:
        lines.append(
            f"share of {share['node']}  {_mib(share['bytes'])}  "
            f"manifest {share['manifest_digest'][:12]}"
        )
        held = (f"{s['shard']}: {' '.join(s['held_by']) or 'MISSING'}" for s in share["shards"])
        lines.append(f"  shards  {', '.join(held) or 'none'}")
        for rank in share["ranks"] or ():
            copy = " ".join(rank["own_copy"]) or "MISSING"
            lines.append(
                f"  rank {rank['rank']}  {_mib(rank['bytes'])}  own copy: {copy}  "
                f"meta {json.dumps(rank['meta'])}"
            )
            for t in rank["tensors"]:
                lines.append(f"    {t['name']}  {t['dtype']} {t['shape']}  {t['bytes']} bytes")
    return "\n".join(lines)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


# -- verify ----------------------------------------------------------------------------------------


@click.command()
@step_options
def verify(step: str, job: str | None, agent: str | None, json_file: str | None) -> None:
    """Have every holder of STEP read its bytes again and compare them with the manifest.

    Exit codes: 0 all right, 4 something is wrong or missing but every rank can be restored, 1 not
    restorable.
    """
    with connect(agent) as link:
        found = ask_step(link, "verify", step, job, json_file)
        files = _check_all(found, files_of(found), lambda: connect(agent))
    lost, wrong = lost_ranks(found, files), [f for f in files if f.state != "right"]
    code = EXIT_FAILED if lost else EXIT_DEGRADED if wrong else EXIT_DONE
    lines = [_file_line(f) for f in files]
    if found.told.silent:
        lines.append(f"agents that did not answer: {', '.join(found.told.silent)}")
    lines += lost or [f"all {found.told.commit.world_size} ranks of the step can be restored"]
    advice = "repair brings back what is missing; a new save replaces what is wrong"
    if lost:
        advice = "start the agents that are away and verify again, or restore an older step"
    document = {
        "job": found.told.job,
        "step": found.told.commit.attempt.step,
        "restorable": not lost,
        "lost": lost,
        "silent": list(found.told.silent),
        "files": [f.document() for f in files],
    }
    finish("verify", json_file, document, "\n".join(lines), code, advice)


def _check_all(
    step: Step, files: list[Checked], new_link: Callable[[], AgentLink]
) -> list[Checked]:
    """All files, some nodes at once, on each node one after the other."""
    nodes = sorted({f.node for f in files if f.node})
    with _progress() as bar:
        task = bar.add_task("reading", total=sum(f.length for f in files if f.node))

        def on_node(node: str) -> list[Checked]:
            out = []
            with new_link() as link:
                for file in (f for f in files if f.node == node):
                    out.append(_check(link, step, file))
                    bar.advance(task, file.length)
            return out

        with ThreadPoolExecutor(NODES_AT_ONCE) as pool:
            checked = [f for done in pool.map(on_node, nodes) for f in done]
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
        f"rank {p.rank} shard {p.shard}: {p.count} chunks, {' '.join(map(str, p.chunks[:8]))}"
        + (" ..." if p.count > 8 else "")
        for p in f.bad
    )
    what = f"{f.kind} {f.part} of {f.share}"
    return "  ".join(filter(None, (f"{f.state:11} {what}", f.node, wrong, f.why)))


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(console=console, disable=not console.is_terminal)


# -- export ----------------------------------------------------------------------------------------


@click.command()
@step_options
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
def export(
    step: str, directory: Path, job: str | None, agent: str | None, json_file: str | None
) -> None:
    """Write the snapshots of all ranks of STEP to DIR, which must be empty or not exist.

    DIR/rank-00000.safetensors and so on are plain safetensors files; DIR/checkpoint.json says what
    they are. DIR appears when all of it is there.
    """
    target = directory.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target}: needs an empty directory, or none")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with connect(agent) as link:
            found = ask_step(link, "export", step, job, json_file)
            partial.mkdir(parents=True)
            document = _write_all(link, found, partial)
        partial.rename(target)
    except OSError as e:
        kind = NoRoom if e.errno in (errno.ENOSPC, errno.EDQUOT) else UsageError
        raise kind(f"export to {target}: {e}") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    text = f"step {document['step']}: {_mib(document['bytes'])} in {target}"
    finish("export", json_file, {"directory": str(target), **document}, text)


def _write_all(link: AgentLink, step: Step, folder: Path) -> dict[str, Any]:
    """All files; the description of them, which is `checkpoint.json`."""
    commit, ranks = step.told.commit, []
    total = sum(share.snapshot_bytes for share in step.shares())
    with _progress() as bar:
        task = bar.add_task("writing", total=total)
        for rank in sorted(rank for share in step.shares() for rank in share.ranks):
            timeout_s = ASK_TIMEOUT_S + 4 * total / SLOW_BYTES_PER_S
            file = link.call(w.ExportCall(commit.attempt, rank), timeout_s)
            assert isinstance(file, w.RestoreFile)
            name = f"rank-{rank:05d}.safetensors"
            view = link.map(file.file)
            try:
                digest = _write(folder / name, view, file, lambda n: bar.advance(task, n))
            finally:
                view.release()
                link.release(file.file)
            link.call(w.ExportDone(file.file), ASK_TIMEOUT_S)
            meta = json.loads(file.meta)
            facts = {"rank": rank, "file": name, "bytes": file.length, "sha256": digest}
            ranks.append({**facts, "source": file.source, "meta": meta})
    document = {
        "format": EXPORT_FORMAT,
        "job": step.told.job,
        "step": commit.attempt.step,
        "attempt": r.json_value(commit.attempt),
        "lineage": commit.lineage,
        "layout": str(commit.layout),
        "world_size": commit.world_size,
        "bytes": sum(rank["bytes"] for rank in ranks),
        "ranks": ranks,
    }
    (folder / "checkpoint.json").write_text(json.dumps(document, indent=2) + "\n")
    return document


def _write(
    path: Path, view: memoryview, file: w.RestoreFile, advance: Callable[[int], None]
) -> str:
    """Write and check chunk by chunk; the SHA-256. Raises IntegrityError, OSError."""
    table, digest = np.frombuffer(file.table, "<u4"), hashlib.sha256()
    with path.open("xb") as out:
        for i, crc in enumerate(table.tolist()):
            start = i * file.chunk_bytes
            # A copy: what is written is then what was checked, whatever becomes of the file.
            chunk = bytes(view[start : min(start + file.chunk_bytes, file.length)])
            if crc32c(chunk) != crc:
                raise IntegrityError(f"{path.name}: chunk {i} changed while it was written")
            out.write(chunk)
            digest.update(chunk)
            advance(len(chunk))
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()
