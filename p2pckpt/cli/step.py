"""A committed step as commands see it: its records, manifests and files, and what of it is right.

Intuition: the local agent tells the step's records and who holds what now; each share's manifest is
asked for by its digest and checked here. From that follows every file that should be there, and,
once the files were read again, which ranks can be had from the pieces that are right: those that a
restore would use, piece by piece and not file by file.

Contract: `tensors_of`, `files_of` and `lost_ranks` are pure. A step that does not exist ends the
command with EXIT_NOTHING.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import click

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.backends.agent_link import AgentLink
from p2pckpt.cli.output import (
    EXIT_NOTHING,
    agent_option,
    finish,
    job_key,
    job_option,
    json_option,
    waiting,
)
from p2pckpt.coding.table import TREE
from p2pckpt.errors import FormatError, UsageError
from p2pckpt.jobstate import JobState
from p2pckpt.restore.fetch import OBJECT_STORE
from p2pckpt.restore.locate import Facts, Sources, sources_of
from p2pckpt.restore.verify import open_manifest

ASK_TIMEOUT_S = 60.0
SLOW_BYTES_PER_S = 20 * 1024 * 1024
"""Slower than the agent's own floor, so that it is the agent who says what took too long."""
FIND_STEPS = "`p2pckpt ls` and `p2pckpt job ls` list what there is"


def step_options(command: Any) -> Any:
    """STEP, --job, --agent and --json."""
    command = job_option(agent_option(json_option(command)))
    return click.argument("step", metavar="STEP", callback=lambda *got: step_number(got[-1]))(
        command
    )


def step_number(step: str) -> str:
    """The same, found out before anybody is asked. Raises UsageError."""
    if step != "latest" and not (step.isdecimal() and step.isascii()):
        raise UsageError(f"STEP {step!r}: needs a number, or 'latest'")
    return step


# -- the step --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A committed step, and its manifests by owner (None: nobody has a right copy)."""

    told: w.StepReply
    manifests: Mapping[str, r.Manifest | None]

    @property
    def facts(self) -> dict[str, Any]:
        """What the step survives now and in which tiers its records say that it lies."""
        found: dict[str, Any] = json.loads(self.told.redundancy)
        return found

    @property
    def tiers(self) -> list[str]:
        """ "ram", "s3" or both."""
        return list(self.facts.get("tiers", ("ram",)))

    def shares(self) -> Iterator[r.SealedShare]:
        """In order of the groups."""
        return (share for group in self.told.groups for share in group.shares)

    def sources(self, share: r.SealedShare) -> Sources:
        """Who holds what of a share now."""
        state = JobState(r.JobKeys(self.told.job))
        facts = Facts(state, self.told.held, (), {}, False)
        return sources_of(share, self.told.commit.attempt, facts)


def ask_records(
    link: AgentLink, command: str, step: str, job: str | None, json_file: Any
) -> w.StepReply:
    """Ask for a step's records; ends the command with EXIT_NOTHING if there is no such step."""
    query = w.StepQuery(job_key(job), None if step == "latest" else int(step))
    with waiting("asking for the step's records"):
        told = link.call(query, ASK_TIMEOUT_S)
    if isinstance(told, w.RefusedReply):
        finish(command, json_file, {}, "", EXIT_NOTHING, f"{told.reason}\n{FIND_STEPS}")
    assert isinstance(told, w.StepReply)
    return told


def ask_step(link: AgentLink, command: str, step: str, job: str | None, json_file: Any) -> Step:
    """Ask for a step and its manifests; ends the command as `ask_records` does."""
    told = ask_records(link, command, step, job, json_file)
    manifests: dict[str, r.Manifest | None] = {}
    with waiting("asking for the step's manifests"):
        for share in (share for group in told.groups for share in group.shares):
            ask = w.GetManifest(told.commit.attempt, share.node, share.manifest_digest)
            reply = link.call(ask, ASK_TIMEOUT_S)
            manifests[share.node] = None
            if isinstance(reply, w.ManifestReply):
                manifests[share.node] = open_manifest(reply.packed, share.manifest_digest)
    return Step(told, manifests)


def tensors_of(header: bytes) -> list[dict[str, Any]]:
    """Name, dtype, shape and bytes of every tensor of a snapshot, from its safetensors header.

    Dtypes that safetensors lacks are stored as bytes; the true one is told. Raises FormatError.
    """
    try:
        items = json.loads(header)
        true = json.loads(items.pop("__metadata__")["p2pckpt"])["dtypes"]
        out = []
        for name, item in items.items():
            start, stop = item["data_offsets"]
            dtype, shape = item["dtype"], item["shape"]
            if name in true:
                dtype, shape = true[name], shape[:-1]
            if name != TREE:
                out.append({"name": name, "dtype": dtype, "shape": shape, "bytes": stop - start})
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise FormatError(f"snapshot header is malformed: {e!r}"[:300]) from e
    return out


# -- its files -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """One file of a share on one node, or one that nobody has (``node`` ""); what was found.

    An object in the object store is a slot of the node OBJECT_STORE.

    ``state``: "right", "wrong" (``bad``; all of it if ``why`` says so), "missing", "unreachable".
    """

    share: str
    kind: r.FileKind
    part: int
    node: str
    length: int
    state: str = "missing"
    bad: tuple[w.BadPiece, ...] = ()
    why: str = ""

    def has(self, rank: int, shard: int) -> bool:
        """Is this shard's piece of this rank right here?"""
        mine = self.part == (rank if self.kind is r.FileKind.SLOT else shard)
        if not mine or self.why or self.state not in ("right", "wrong"):
            return False
        return all((piece.rank, piece.shard) != (rank, shard) for piece in self.bad)

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        bad = [r.json_value(piece) for piece in self.bad]
        facts = {"share": self.share, "kind": str(self.kind), "part": self.part, "node": self.node}
        return {**facts, "bytes": self.length, "state": self.state, "wrong": bad, "why": self.why}


def files_of(step: Step) -> list[Checked]:
    """Every file that should be there: by who has it now, or as missing.

    A step that lies in the object store only should have no file in RAM.
    """
    out = []
    nobody = ("",) if "ram" in step.tiers else ()
    stored = (OBJECT_STORE,) if "s3" in step.tiers else ()
    for share in step.shares():
        manifest, sources = step.manifests[share.node], step.sources(share)
        for rank in share.ranks:
            length = manifest.of_rank(rank).length if manifest else 0
            for node in (*sources.slots.get(rank, nobody), *stored):
                out.append(Checked(share.node, r.FileKind.SLOT, rank, node, length))
        for index in range(step.told.commit.layout.shards):
            length = manifest.shard_file_bytes(index) if manifest else 0
            for node in sources.shards.get(index, nobody):
                out.append(Checked(share.node, r.FileKind.SHARD, index, node, length))
    return out


def lost_ranks(step: Step, files: list[Checked]) -> list[str]:
    """A sentence for every rank that cannot be had from the pieces that are right."""
    out = []
    for share in step.shares():
        manifest, mine = step.manifests[share.node], [f for f in files if f.share == share.node]
        if manifest is None:
            ranks = ", ".join(map(str, share.ranks))
            out.append(f"ranks {ranks} of {share.node}: no right copy of the manifest")
            continue
        k = manifest.layout.k
        for entry in manifest.ranks:
            whole = [
                i
                for i in range(manifest.layout.shards)
                if (i < k and entry.stored_bytes(i, k) == 0)
                or any(f.has(entry.rank, i) for f in mine if i < k or f.kind is r.FileKind.SHARD)
            ]
            if len(whole) < k:
                have = f"{len(whole)} of {manifest.layout.shards} pieces are right, it needs {k}"
                out.append(f"rank {entry.rank} of {share.node}: {have}")
    return out
