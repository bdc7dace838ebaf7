"""`p2pckpt export`: a committed step, taken out as files that need nothing of ours to be read.

The ranks' snapshots are safetensors files as they are. The local agent brings each from wherever it
lies (its own RAM, other nodes, the object store), some ranks at once; here its chunks are checked
and written. While that runs the step is kept from retirement.

Contract: the whole directory comes to be, or nothing of it. Every chunk is checked as a copy, so
what is written is what was right. A step that does not exist is exit code 3.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.backends.agent_link import AgentLink
from p2pckpt.cli.output import amount, connect, finish, progress
from p2pckpt.cli.step import ASK_TIMEOUT_S, SLOW_BYTES_PER_S, Step, ask_step, step_options
from p2pckpt.coding.checksum import crc32c
from p2pckpt.errors import CheckpointError, IntegrityError, NoRoom, UsageError

EXPORTS_AT_ONCE = 4
"""Ranks that are brought and written at once: each may take its size of the agent's RAM."""
FORMAT = "p2pckpt-export/1"


@click.command(short_help="Write a step as plain safetensors files.")
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
            document = _write_all(found, partial, lambda: connect(agent))
        partial.rename(target)
    except OSError as e:
        kind = NoRoom if e.errno in (errno.ENOSPC, errno.EDQUOT) else UsageError
        raise kind(f"export to {target}: {e}") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    text = f"step {document['step']}: {amount(document['bytes'])} in {target}"
    finish("export", json_file, {"directory": str(target), **document}, text)


def _write_all(step: Step, folder: Path, new_link: Callable[[], AgentLink]) -> dict[str, Any]:
    """All files; the description of them, which is `checkpoint.json`."""
    commit = step.told.commit
    ranks = sorted(rank for share in step.shares() for rank in share.ranks)
    total = sum(share.snapshot_bytes for share in step.shares())
    with progress() as bar:
        task = bar.add_task("writing", total=total)

        def one(rank: int, stopped: Callable[[], bool]) -> dict[str, Any]:
            def advance(count: int) -> None:
                if stopped():
                    raise CheckpointError(f"rank {rank}: export was given up")
                bar.advance(task, count)

            with new_link() as link:
                return _write_rank(link, step, (rank, folder), advance)

        written = _some_at_once(ranks, one)
    document = {
        "format": FORMAT,
        "job": step.told.job,
        "step": commit.attempt.step,
        "attempt": r.json_value(commit.attempt),
        "lineage": commit.lineage,
        "layout": str(commit.layout),
        "world_size": commit.world_size,
        "bytes": sum(rank["bytes"] for rank in written),
        "ranks": written,
    }
    (folder / "checkpoint.json").write_text(json.dumps(document, indent=2) + "\n")
    return document


def _some_at_once(
    ranks: list[int], one: Callable[[int, Callable[[], bool]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """``one`` for every rank, in order of ranks; the first error ends all.

    A rank for which the agent had no room beside the others is done alone, after them.
    """
    stop = threading.Event()
    done: dict[int, dict[str, Any]] = {}
    with ThreadPoolExecutor(EXPORTS_AT_ONCE) as pool:
        jobs = {rank: pool.submit(one, rank, stop.is_set) for rank in ranks}
        try:
            for rank, job in jobs.items():
                try:
                    done[rank] = job.result()
                except NoRoom:
                    if len(ranks) == 1:
                        raise
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    for rank in ranks:
        if rank not in done:
            done[rank] = one(rank, stop.is_set)
    return [done[rank] for rank in ranks]


def _write_rank(
    link: AgentLink, step: Step, place: tuple[int, Path], advance: Callable[[int], None]
) -> dict[str, Any]:
    """One rank's file; what `checkpoint.json` says of it."""
    rank, folder = place
    (share,) = (s for s in step.shares() if rank in s.ranks)
    timeout_s = ASK_TIMEOUT_S + 4 * share.snapshot_bytes / SLOW_BYTES_PER_S
    file = link.call(w.ExportCall(step.told.commit.attempt, rank), timeout_s)
    assert isinstance(file, w.RestoreFile)
    name = f"rank-{rank:05d}.safetensors"
    view = link.map(file.file)
    try:
        digest = _write(folder / name, view, file, advance)
    finally:
        view.release()
        link.release(file.file)
        link.call(w.ExportDone(file.file), ASK_TIMEOUT_S)
    facts = {"rank": rank, "file": name, "bytes": file.length, "sha256": digest}
    return {**facts, "source": file.source, "meta": json.loads(file.meta)}


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
