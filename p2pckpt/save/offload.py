"""Which committed steps go to the object store, under which names, and when they go away again.

Every Nth commit is due, by the N that it names, else the agents' setting. Each share's snapshots
become one safetensors object a rank, its manifest one more; when all shares are reported, one
job-level `checkpoint.json` is written, last; then the ledger records the step as offloaded. All
names contain the ledger id, the attempt and the owner, and all contents are fixed by the attempt's
records: two writers that both believe to be the one write the same bytes, so it does not matter who
wins (delta-io/delta-rs#4433 is what happens else).

    <job>/<ledger id>/<attempt>/<owner>/rank-<r>.safetensors
    <job>/<ledger id>/<attempt>/<owner>/manifest
    <job>/<ledger id>/<attempt>/checkpoint.json

Contract: pure. A step is offloaded only by the record that `offloaded_txn` puts, fenced by its
commit being there; objects go only under an OffloadRetired record, by the names in a manifest with
the recorded digest. Nothing else in a bucket is ever judged, or deleted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

import msgspec
import numpy as np
from msgspec.structs import replace

from p2pckpt import records as r
from p2pckpt.coding.checksum import verify_chunks
from p2pckpt.errors import FormatError, IntegrityError
from p2pckpt.jobstate import JobState
from p2pckpt.ports import (
    Compare,
    Pending,
    Put,
    Stored,
    Txn,
    absent,
    none_in,
    none_newer,
    prefix_end,
    present,
)
from p2pckpt.wire import pack

KEPT_DUE = 4
"""Due steps that wait at most: each is a whole version in RAM."""

CHECKPOINT = "checkpoint.json"
STALE_UPLOAD_S = 24 * 3600.0
"""A multipart upload of ours that is older was abandoned, whatever its step."""


# -- names ----------------------------------------------------------------------------------------


def job_directory(job: str) -> str:
    """Prefix of all objects of a job, whatever ledger knew it."""
    return f"{job}/"


def directory(attempt: r.Attempt) -> str:
    """Prefix of an attempt's objects."""
    return f"{job_directory(attempt.job)}{attempt.ledger_id}/{attempt.key}/"


def checkpoint_name(attempt: r.Attempt) -> str:
    """The job-level manifest's."""
    return directory(attempt) + CHECKPOINT


def manifest_name(attempt: r.Attempt, owner: str) -> str:
    """A share's packed manifest's."""
    return f"{directory(attempt)}{quote(owner, safe='')}/manifest"


def rank_name(attempt: r.Attempt, owner: str, rank: int) -> str:
    """A rank's snapshot's."""
    return f"{directory(attempt)}{quote(owner, safe='')}/rank-{rank}.safetensors"


# -- which are due --------------------------------------------------------------------------------


def every_in_force(state: JobState, every: int) -> int:
    """Every so manieth commit from now on is due: by the present generation's schedule, else by
    ``every``, an agent's setting. 0: none; what is off is not turned on by a schedule."""
    schedule = state.schedules.get(state.generation.number) if state.generation else None
    tuned = schedule.offload_every if schedule else 0
    return (tuned or every) if every else 0


def due(state: JobState, every: int) -> list[r.Commit]:
    """Commits that are to be offloaded and are not, oldest first.

    A commit that names its N is judged by it for ever, so that a changed schedule makes no older
    commit due, and lets none be given up half way. ``every``: an agent's setting, for the others;
    0: nothing is due.
    """
    if every < 1:
        return []
    commits = (c for c in state.commits.values() if c.number)
    wanted = [c for c in commits if c.number % (c.offload_every or every) == 0]
    if not wanted:
        return []
    over = {*state.offloaded, *state.offload_retired, *state.offload_dropped}
    over |= state.quarantined()
    return sorted((c for c in wanted if c.attempt.key not in over), key=lambda c: c.number)


def held_back(state: JobState, every: int, keep_last: int) -> set[str]:
    """Attempts that stay in RAM only because they are due: beyond what a job retains anyway."""
    current = state.current_lineage()
    kept = state.steps(current.lineage)[-keep_last:] if current else []
    return {
        c.attempt.key
        for c in due(state, every)
        if current is None or c.lineage != current.lineage or c.attempt.step not in kept
    }


@dataclass(frozen=True)
class Ram:
    """What a decision to hold needs to know of this node. ``held``: bytes by attempt key."""

    held: Mapping[str, int]
    budget_bytes: int
    keep_last: int


def decide_drops(
    state: JobState, every: int, ram: Ram, spared: Container[str] = (), most: int = KEPT_DUE
) -> list[tuple[r.Commit, str]]:
    """Due steps that are to be given up, and why: saves come first.

    More than ``most`` wait; a step that was saved later, of whatever lineage, is offloaded already;
    or what they hold here leaves no room for the retained steps, one in flight and its staging. The
    oldest goes first, but not ``spared`` ones, whose upload is getting on, as long as there is
    another: else a store that is slower than steps fall due would never have a whole one.
    """
    waiting = due(state, every)
    newest = max((o.commit.attempt.key for o in state.offloaded.values()), default="")
    step = state.offloaded[newest].commit.attempt.step if newest else 0
    drops = [(c, f"step {step} was offloaded before it") for c in waiting if c.attempt.key < newest]
    late = {c.attempt.key for c, _ in drops}
    waiting = [c for c in waiting if c.attempt.key not in late]
    while len(waiting) > most:
        drops.append((_give_up(waiting, spared), f"more than {most} wait for the object store"))
    extra = held_back(state, every, ram.keep_last)
    version = max(ram.held.values(), default=0)
    room = ram.budget_bytes - (ram.keep_last + 2) * version
    waiting = [c for c in waiting if c.attempt.key in extra]
    while waiting and sum(ram.held.get(c.attempt.key, 0) for c in waiting) > max(0, room):
        drops.append((_give_up(waiting, spared), "saves need its room in RAM"))
    return drops


def _give_up(waiting: list[r.Commit], spared: Container[str]) -> r.Commit:
    others = (i for i, c in enumerate(waiting) if c.attempt.key not in spared)
    return waiting.pop(next(others, 0))


# -- one share ------------------------------------------------------------------------------------


def checked_part(manifest: r.Manifest, rank: int, image: memoryview) -> Callable[[int, int], bytes]:
    """Copies ranges of a rank's snapshot, at multiples of a chunk, each proven by the manifest.

    The copy is checked, not the memory: what goes out is right even if the slot changes under it.
    Raises IntegrityError.
    """
    table = np.concatenate(
        [np.frombuffer(t, "<u4") for t in manifest.of_rank(rank).tables[: manifest.layout.k]]
    )
    size = manifest.chunk_bytes

    def part(offset: int, length: int) -> bytes:
        data = bytes(image[offset : offset + length])
        first = offset // size
        entries = table[first : first + -(-length // size)]
        if bad := verify_chunks(data, size, entries, first_chunk=first):
            raise IntegrityError(f"rank {rank}: chunks {bad[:5]} of the slot differ from the share")
        return data

    return part


def share_objects(
    share: r.SealedShare, attempt: r.Attempt, manifest: r.Manifest, manifest_bytes: int
) -> r.ShareObjects:
    """How a share lies in the object store."""
    return r.ShareObjects(
        attempt=attempt,
        owner=share.node,
        manifest=manifest_name(attempt, share.node),
        manifest_digest=share.manifest_digest,
        manifest_bytes=manifest_bytes,
        ranks=tuple(
            r.RankObject(e.rank, rank_name(attempt, share.node, e.rank), e.length)
            for e in manifest.ranks
        ),
    )


# -- the whole checkpoint -------------------------------------------------------------------------


def checkpoint_of(
    commit: r.Commit, groups: Sequence[r.GroupRecord], shares: Sequence[r.ShareObjects]
) -> r.Checkpoint | None:
    """The job-level manifest, the same whoever makes it; None while shares are missing.

    Who holds shards in RAM is left out: that may change, and is nothing to a reader of objects.
    """
    wanted = {s.node: s.manifest_digest for g in groups for s in g.shares}
    by_owner = {s.owner: s for s in shares if wanted.get(s.owner) == s.manifest_digest}
    if len(groups) != commit.groups or set(by_owner) != set(wanted):
        return None
    ordered = tuple(by_owner[owner] for owner in sorted(by_owner))
    bare = tuple(
        replace(g, shares=tuple(replace(s, holders=()) for s in g.shares))
        for g in sorted(groups, key=lambda g: g.group)
    )
    return r.Checkpoint(r.CHECKPOINT_FORMAT, commit, bare, ordered)


def encode_checkpoint(checkpoint: r.Checkpoint) -> bytes:
    """As JSON, with one form for one content."""
    return msgspec.json.encode(checkpoint, order="deterministic")


def read_checkpoint(data: bytes, digest: str) -> r.Checkpoint:
    """A `checkpoint.json` with this SHA-256. Raises IntegrityError or FormatError."""
    if (found := hashlib.sha256(data).hexdigest()) != digest:
        raise IntegrityError(f"{CHECKPOINT}: digest {found[:12]}, needs {digest[:12]}")
    try:
        form = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("format", b"")
        if bytes(form) != msgspec.json.encode(r.CHECKPOINT_FORMAT):
            raise FormatError(
                f"{CHECKPOINT}: format {bytes(form)[:40]!r}, needs {r.CHECKPOINT_FORMAT!r}"
            )
        return msgspec.json.decode(data, type=r.Checkpoint)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise FormatError(f"{CHECKPOINT}: {e}") from None


def objects_of(checkpoint: r.Checkpoint) -> dict[str, int]:
    """Length by name of every object that the job-level manifest names, without itself."""
    out: dict[str, int] = {}
    for share in checkpoint.shares:
        out[share.manifest] = share.manifest_bytes
        out |= {rank.name: rank.length for rank in share.ranks}
    return out


def incomplete(checkpoint: r.Checkpoint, listing: Sequence[Stored]) -> dict[str, str]:
    """What is wrong with the listed objects of a checkpoint, by name; empty if all are there."""
    there = {stored.name: stored.length for stored in listing}
    return {
        name: f"{name}: {there.get(name, 'no')} bytes, needs {length}"
        for name, length in objects_of(checkpoint).items()
        if there.get(name) != length
    }


def lacking(checkpoint: r.Checkpoint, listing: Sequence[Stored]) -> dict[int, str]:
    """Ranks that cannot be had from the listed objects of a checkpoint, and what is wrong."""
    wrong = incomplete(checkpoint, listing)
    out = {}
    for share in checkpoint.shares:
        for rank in share.ranks:
            if why := wrong.get(share.manifest) or wrong.get(rank.name):
                out[rank.rank] = why
    return out


# -- records --------------------------------------------------------------------------------------


def share_txn(state: JobState, share: r.ShareObjects) -> Txn:
    """Report a share, once, while its step is still due."""
    keys, attempt = state.keys, share.attempt
    key = keys.share(attempt, share.owner)
    return Txn((*_open(state, attempt), absent(key)), (Put(key, pack(share)),))


def offloaded_txn(state: JobState, commit: r.Commit, data: bytes, by: str) -> Txn:
    """The step lies whole in the store. Fenced by its commit: a late one finds that gone."""
    checkpoint = msgspec.json.decode(data, type=r.Checkpoint)
    record = r.Offloaded(
        commit=commit,
        manifest=checkpoint_name(commit.attempt),
        manifest_digest=hashlib.sha256(data).hexdigest(),
        snapshot_bytes=sum(e.length for s in checkpoint.shares for e in s.ranks),
        by=by,
    )
    compares = (
        *_open(state, commit.attempt),
        present(state.keys.commit(commit.lineage, commit.attempt.step)),
    )
    return Txn(compares, (Put(state.keys.offloaded(commit.attempt), pack(record)),))


def drop_txn(state: JobState, commit: r.Commit, by: str, reason: str) -> Txn:
    """The step is given up, nobody waits for it any more; unless another was given up or went out
    since `state` was read, which may have made it needless."""
    keys = state.keys
    record = r.OffloadDropped(attempt=commit.attempt, by=by, reason=reason)
    fresh = (
        none_newer(keys.offload_drops, state.revision),
        none_newer(keys.offloads, state.revision),
    )
    put = Put(keys.offload_dropped(commit.attempt), pack(record))
    return Txn((*_open(state, commit.attempt), *fresh), (put,))


def _open(state: JobState, attempt: r.Attempt) -> tuple[Compare, ...]:
    """Neither offloaded, nor given up, nor gone from the store."""
    keys = state.keys
    return (
        state.same_ledger(),
        absent(keys.offloaded(attempt)),
        absent(keys.offload_retired(attempt)),
        absent(keys.offload_dropped(attempt)),
    )


@dataclass(frozen=True)
class Removal:
    """An offloaded step that may go, because of the newer ones at `because`."""

    offloaded: r.Offloaded
    because: tuple[str, ...]
    reason: str


def decide_retention(state: JobState, keep: int) -> list[Removal]:
    """Offloaded steps that `keep` good newer ones of the current lineage make needless."""
    current = state.current_lineage()
    if current is None or keep < 1:
        return []
    bad = state.quarantined()
    own = [o for o in state.offloaded.values() if o.commit.lineage == current.lineage]
    good = [o for o in own if o.commit.attempt.key not in bad]
    newest = sorted(good, key=lambda o: o.commit.attempt.step)[-keep:]
    if len(newest) < keep:
        return []
    oldest = newest[0].commit.attempt.step
    because = tuple(state.keys.offloaded(o.commit.attempt) for o in newest)
    return [
        Removal(o, because, f"{keep} newer steps are in the store")
        for _, o in sorted(state.offloaded.items())
        if o.commit.lineage != current.lineage or o.commit.attempt.step < oldest
    ]


def removal_txn(state: JobState, removal: Removal, by: str) -> Txn:
    """Irrevocable, and only if nobody reads the step and nothing of the reason changed."""
    attempt, keys = removal.offloaded.commit.attempt, state.keys
    record = r.OffloadRetired(offloaded=removal.offloaded, by=by, reason=removal.reason)
    readers = keys.readers(attempt)
    return Txn(
        compares=(
            state.same_ledger(),
            state.same_generation(state.generation.number if state.generation else 0),
            present(keys.offloaded(attempt)),
            absent(keys.offload_retired(attempt)),
            none_in(readers, prefix_end(readers)),
            *(present(key) for key in removal.because),
        ),
        puts=(Put(keys.offload_retired(attempt), pack(record)),),
        deletes=(keys.offloaded(attempt),),
    )


def names_to_delete(gone: r.OffloadRetired, checkpoint: r.Checkpoint) -> list[str]:
    """The objects of a retired step, by the names in its manifest; those outside of its own
    directory are not ours to judge."""
    ours = directory(gone.offloaded.commit.attempt)
    return [name for name in objects_of(checkpoint) if name.startswith(ours)]


def abandoned(pending: Sequence[Pending], state: JobState, every: int) -> list[Pending]:
    """Multipart uploads of this ledger's attempts that nobody goes on with: their step is no
    longer due, or a day has passed."""
    waiting = {c.attempt.key for c in due(state, every)}
    out = []
    for upload in pending:
        job, ledger_id, attempt, *rest = (*upload.name.split("/"), "", "", "")
        ours = f"{job}" == state.keys.job and ledger_id == state.ledger_id and bool(rest[0])
        if ours and (attempt not in waiting or upload.age_s > STALE_UPLOAD_S):
            out.append(upload)
    return out
