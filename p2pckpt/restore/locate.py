"""Which step can be restored, decided from records and from what living stores say they hold.

Candidates are the committed steps of the current lineage, newest first, then its bases (or one
step that was asked for). A step is provable if, for every rank of every share, some living store
holds the rank's own slot or k different shards hold the share. An older step is taken only after
the stores that could prove the newer one had their time to come back.

Contract: pure. Three kinds of answer, never mixed up: RESTORE names one commit for all ranks;
NOTHING only if the ledger knows no commit, every living agent had time to come and answered, and
nobody holds bytes of another ledger's records of this job; everything else is WAIT or UNPROVEN,
with ranks and reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from p2pckpt import records as r
from p2pckpt.jobstate import JobState
from p2pckpt.wire import HeldReply


@dataclass(frozen=True)
class Bucket:
    """What the object store says of the steps that RAM cannot prove.

    ``steps``: by attempt key, "" if its manifest is there, else what is wrong. ``cut``: ranks whose
    objects are not there as that manifest says, and what is wrong; these RAM may have.
    ``away``: why it cannot be asked. ``manifests``: job manifests, if the ledger knows no commit.
    """

    steps: Mapping[str, str] = field(default_factory=dict)
    cut: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    away: str = ""
    manifests: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """All that a decision rests on.

    ``answers``: by node name. ``silent``: living by lease, but did not answer. ``groups``: group
    records by attempt key. ``known_stores``: store_ids of living members. ``patient``: stores that
    are away may still return, so an older step must wait. ``early``: who decides reaches the ledger
    for so short a time that, were it wiped or away before, others might not have a session again.
    """

    state: JobState
    answers: Mapping[str, HeldReply]
    silent: Sequence[str]
    groups: Mapping[str, Sequence[r.GroupRecord]]
    patient: bool
    bucket: Bucket | None = None
    early: bool = False
    _index: dict[r.Attempt, dict[str, Sources]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def sources(self, attempt: r.Attempt) -> Mapping[str, Sources]:
        """Who holds what of an attempt, by manifest digest; worked out once from all answers."""
        if attempt not in self._index:
            found: dict[str, tuple[dict[int, list[str]], dict[int, list[str]]]] = {}
            for node in sorted(self.answers):
                for file in self.answers[node].files:
                    if file.attempt == attempt:
                        slots, shards = found.setdefault(file.manifest_digest, ({}, {}))
                        kept = slots if file.kind is r.FileKind.SLOT else shards
                        kept.setdefault(file.part, []).append(node)
            self._index[attempt] = {
                digest: Sources(_fixed(slots), _fixed(shards))
                for digest, (slots, shards) in found.items()
            }
        return self._index[attempt]


@dataclass(frozen=True)
class Finding:
    """``choice`` None: wait for what ``reason`` names. ``stored``: RAM alone cannot prove the
    commit, the object store has what is missing."""

    choice: r.Choice | None
    reason: str
    commit: r.Commit | None = None
    stored: bool = False


@dataclass(frozen=True)
class Sources:
    """Where one share can be had: nodes by rank for own slots, by index for shards."""

    slots: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    shards: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


def candidates(state: JobState, step: int | None) -> list[r.Commit]:
    """Commits to try, best first: the current lineage downwards, then base after base.

    With `step`, that step in the current lineage or in the nearest lineage below it.
    """
    out: list[r.Commit] = []
    closed, seen, known = state.current_lineage(), set(), state.known_commits()
    below: int | None = None
    while closed is not None and closed.lineage not in seen:
        seen.add(closed.lineage)
        steps = [s for s in state.known_steps(closed.lineage) if below is None or s <= below]
        out += [known[closed.lineage, s] for s in reversed(steps)]
        base = closed.base
        if base is None:
            break
        below = base.step
        parents = [c for c in state.closed.values() if c.lineage == base.lineage]
        oldest = min(parents, key=lambda c: (c.generation, c.ballot), default=None)
        if oldest is None:  # its record was trimmed; its commits tell for themselves
            oldest = r.Closed(generation=0, ballot=0, close=r.Close.OK, by="", lineage=base.lineage)
        closed = oldest
    bad = state.quarantined()
    return [c for c in out if step in (None, c.attempt.step) and c.attempt.key not in bad]


def sources_of(share: r.SealedShare, attempt: r.Attempt, facts: Facts) -> Sources:
    """Who holds what of one share, by their own word, matched by manifest digest."""
    return facts.sources(attempt).get(share.manifest_digest, Sources())


def _fixed(nodes: dict[int, list[str]]) -> dict[int, tuple[str, ...]]:
    return {part: tuple(names) for part, names in nodes.items()}


def unprovable(commit: r.Commit, facts: Facts) -> list[str]:
    """Why a commit cannot be proven: a sentence a share; empty if every rank can be had."""
    groups = facts.groups.get(commit.attempt.key, ())

    def stored(ranks: Sequence[int]) -> str:
        why = _in_bucket(commit, ranks, facts) or "never offloaded"
        return f"; object store: {why}" if facts.bucket else ""

    if len(groups) != commit.groups:
        lack = f"{len(groups)} of {commit.groups} group records"
        return [f"step {commit.attempt.step}: {lack}{stored(())}"]
    out = []
    for share in (s for group in groups for s in group.shares):
        found = sources_of(share, commit.attempt, facts)
        lacking = [rank for rank in share.ranks if rank not in found.slots]
        if not lacking or len(found.shards) >= commit.layout.k:
            continue
        if _in_bucket(commit, lacking, facts) != "":
            out.append(
                f"step {commit.attempt.step}, ranks {lacking} of {share.node}: own copy gone, "
                f"{len(found.shards)} of {commit.layout.shards} shards left, "
                f"needs {commit.layout.k}{stored(lacking)}"
            )
    return out


def _in_bucket(commit: r.Commit, ranks: Sequence[int], facts: Facts) -> str | None:
    """ "" if the object store has these ranks of the step, else what is wrong; None if the step is
    not offloaded."""
    key = commit.attempt.key
    if facts.bucket is None or key not in facts.state.offloaded:
        return None
    if why := facts.bucket.steps.get(key, f"away: {facts.bucket.away}"):
        return why
    cut = facts.bucket.cut.get(key, {})
    return "; ".join(cut[rank] for rank in ranks if rank in cut)


def decide_restore(facts: Facts, step: int | None, world_size: int) -> Finding:
    """What this generation restores. See the file's head."""
    state = facts.state
    if doubt := state.doubtful():
        return Finding(r.Choice.UNPROVEN, f"unreadable records: {doubt[:3]}")
    tries = candidates(state, step)
    if not tries:
        return _nothing(facts, step)
    reasons: list[str] = []
    for commit in tries:
        if commit.world_size != world_size:  # an older step of another size is no answer either
            reasons.append(
                f"step {commit.attempt.step} was saved by {commit.world_size} ranks, "
                f"this launch has {world_size}"
            )
            break
        why = unprovable(commit, facts)
        if not why:
            passed = f"; newer ones are not provable: {'; '.join(reasons)}" if reasons else ""
            stored = facts.bucket is not None and commit.attempt.key in facts.bucket.steps
            reason = f"step {commit.attempt.step} is provable{passed}"
            return Finding(r.Choice.RESTORE, reason, commit, stored)
        reasons += why
        if facts.patient:
            return Finding(None, "; ".join(why[:3]))
    return Finding(r.Choice.UNPROVEN, "; ".join(reasons[:6]))


def _nothing(facts: Facts, step: int | None) -> Finding:
    state = facts.state
    if facts.silent:
        reason = f"agents {list(facts.silent)[:5]} have not answered"
        return Finding(None if facts.patient else r.Choice.UNPROVEN, reason)
    commits = state.known_commits()
    if step is not None and commits:
        steps = sorted(s for _, s in commits)
        these = [c.attempt.key for c in commits.values() if c.attempt.step == step]
        why = "is of a lineage that was left" if these else "is not committed"
        if these and state.quarantined().issuperset(these):
            why = "is quarantined, as its bytes were wrong"
        return Finding(r.Choice.UNPROVEN, f"step {step} {why}; committed: {steps[-8:]}")
    if commits:
        return Finding(r.Choice.UNPROVEN, f"no current lineage, but commits {sorted(commits)[:4]}")
    number = state.generation.number if state.generation else 0
    strangers = [
        f"{node} holds step {f.attempt.step} of generation {f.attempt.generation}, "
        f"ledger {f.attempt.ledger_id[:8]}"
        for node in sorted(facts.answers)
        for f in facts.answers[node].files
        if f.attempt.ledger_id not in state.cleaned
        # a generation above the present one: the ledger went back
        and (f.attempt.ledger_id != state.ledger_id or f.attempt.generation > number)
    ]
    if strangers:
        return Finding(
            r.Choice.UNPROVEN,
            f"the ledger knows no commit, but {'; '.join(strangers[:3])}: see `ledger rebuild`",
        )
    if facts.bucket is not None and facts.bucket.away:
        reason = f"the object store cannot be asked whether it has any: {facts.bucket.away}"
        return Finding(None if facts.patient else r.Choice.UNPROVEN, reason)
    if facts.bucket is not None and facts.bucket.manifests:
        names = list(facts.bucket.manifests[-3:])
        return Finding(
            r.Choice.UNPROVEN, f"the ledger knows no commit, but the object store has {names}"
        )
    if facts.early:
        return Finding(None, "agents with bytes may be about to come back to a ledger this young")
    return Finding(r.Choice.NOTHING, "no commit was ever recorded, and nobody holds one")


def lineage_after(state: JobState, commit: r.Commit, fresh: str) -> tuple[str, r.Base | None]:
    """Lineage and base of a restore: the same if it goes on from its newest, else a new one."""
    newest = state.latest()
    current = state.current_lineage()
    goes_on = newest is not None and newest.attempt == commit.attempt
    if goes_on and current is not None and commit.lineage == current.lineage:
        return current.lineage, current.base
    return fresh, r.Base(lineage=commit.lineage, step=commit.attempt.step)


def decide_close(
    decision: r.Decision, groups: Sequence[r.GroupReport], pieces: int, overdue: bool
) -> r.Closed | None:
    """How a ballot ends; None: wait for more reports.

    BAD only for bytes that were read and were wrong; time, keys and absent peers are RETRY.
    """

    def closed(close: r.Close, reason: str) -> r.Closed:
        return r.Closed(
            generation=decision.generation,
            ballot=decision.ballot,
            close=close,
            by="",
            reason=reason[:500],
            choice=decision.choice,
            lineage=decision.lineage,
            base=decision.base,
            commit=decision.commit,
        )

    reports = [report for group in groups for report in group.reports]
    for close, retryable in ((r.Close.BAD, False), (r.Close.RETRY, True)):
        failed = dict(f for rep in reports if rep.retryable is retryable for f in rep.failed)
        if failed:
            why = next(iter(failed.values()))
            return closed(close, f"ranks {sorted(failed)[:8]}: {why}")
    if len({g.group for g in groups}) == pieces:
        return closed(r.Close.OK, "all ranks verified and loaded")
    return closed(r.Close.RETRY, "not all ranks reported in time") if overdue else None
