"""What the ledger says of one job, as a value: the facts on which every decision rests.

All records that agents follow lie below one prefix, `JobKeys.state`. A JobState is what that prefix
holds at one revision: made from a linearizable listing, kept current by applying watched changes.
The same value serves as the mirror that wakes an agent up and, when re-listed, as the proof that a
byte may be freed.

Contract: reading it is pure; `apply` is total: a record that cannot be decoded is kept in
`unreadable` with the reason, and never mistaken for an absent one.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from p2pckpt import records as r
from p2pckpt.errors import FormatError, StaleGenerationError
from p2pckpt.ports import (
    Change,
    Compare,
    Entry,
    Listing,
    absent,
    none_in,
    prefix_end,
    value_below,
    value_is,
)
from p2pckpt.wire import unpack

FLOOR_START = b"0000000000.0000000000"


@dataclass
class JobState:
    """Decoded records of one job, at `revision`. Attempts are keyed by `Attempt.key`."""

    keys: r.JobKeys
    revision: int = 0
    listed_revision: int = 0
    """Revision of the listing that this began with: a watch that lags may bring older changes."""
    ledger_id: str = ""
    floor: str = ""
    generation: r.Generation | None = None
    generation_revision: int = 0
    commits: dict[tuple[str, int], r.Commit] = field(default_factory=dict)
    outcomes: dict[str, r.Outcome] = field(default_factory=dict)
    retired: dict[str, r.Attempt] = field(default_factory=dict)
    cleaned: set[str] = field(default_factory=set)
    rebuilt: r.Rebuilt | None = None
    decisions: dict[tuple[int, int], r.Decision] = field(default_factory=dict)
    closed: dict[tuple[int, int], r.Closed] = field(default_factory=dict)
    schedules: dict[int, r.Schedule] = field(default_factory=dict)
    offloaded: dict[str, r.Offloaded] = field(default_factory=dict)
    offload_retired: dict[str, r.OffloadRetired] = field(default_factory=dict)
    offload_dropped: set[str] = field(default_factory=set)
    unreadable: dict[str, str] = field(default_factory=dict)

    @classmethod
    def listed(cls, keys: r.JobKeys, listing: Listing) -> JobState:
        """From a linearizable listing of ``keys.state``."""
        state = cls(keys)
        for entry in listing.entries:
            state.apply(Change(entry.key, entry.value, entry.mod_revision, entry.create_revision))
        state.revision = state.listed_revision = listing.revision
        return state

    def apply_all(self, changes: Iterable[Change]) -> None:
        """Apply watched changes in order; those that the listing had already are passed over."""
        for change in changes:
            if change.revision > self.listed_revision:
                self.apply(change)

    def apply(self, change: Change) -> None:
        """Apply one change; anything below ``keys.state`` is understood or listed unreadable."""
        self.revision = max(self.revision, change.revision)
        self.unreadable.pop(change.key, None)
        try:
            self._apply(change.key, change.value, change.revision)
        except (FormatError, ValueError) as e:
            self.unreadable[change.key] = str(e)

    def _apply(self, key: str, value: bytes | None, revision: int) -> None:
        k = self.keys
        if key == k.ledger_id:
            self.ledger_id = value.decode("ascii") if value else ""
        elif key == k.rebuilt:
            self.rebuilt = unpack(value, r.Rebuilt) if value is not None else None
        elif key == k.floor:
            self.floor = ""
            if value is not None:
                if not re.fullmatch(rb"\d{10}\.\d{10}", value):
                    raise FormatError(f"floor {value[:32]!r}: needs ten digits, a dot, ten digits")
                self.floor = value.decode("ascii")
        elif key == k.generation:
            self.generation, self.generation_revision = None, revision
            if value is not None:
                self.generation = unpack(value, r.Generation)
        elif key.startswith(k.commits):
            lineage, _, step = key[len(k.commits) :].partition("/")
            self.commits.pop((lineage, int(step)), None)
            if value is not None:
                commit = unpack(value, r.Commit)
                self.commits[(lineage, int(step))] = commit
        elif key.startswith(k.outcomes):
            self.outcomes.pop(key[len(k.outcomes) :], None)
            if value is not None:
                self.outcomes[key[len(k.outcomes) :]] = unpack(value, r.Outcome)
        elif key.startswith(k.retirements):
            self.retired.pop(key[len(k.retirements) :], None)
            if value is not None:
                self.retired[key[len(k.retirements) :]] = unpack(value, r.Retired).attempt
        elif key.startswith(k.cleanings):
            self.cleaned.discard(key[len(k.cleanings) :])
            if value is not None:
                self.cleaned.add(unpack(value, r.Cleaned).ledger_id)
        elif key.startswith(k.decisions):
            self.decisions.pop(_ballot(key, k.decisions), None)
            if value is not None:
                self.decisions[_ballot(key, k.decisions)] = unpack(value, r.Decision)
        elif key.startswith(k.closings):
            self.closed.pop(_ballot(key, k.closings), None)
            if value is not None:
                self.closed[_ballot(key, k.closings)] = unpack(value, r.Closed)
        elif key.startswith(k.schedules):
            self.schedules.pop(int(key[len(k.schedules) :]), None)
            if value is not None:
                self.schedules[int(key[len(k.schedules) :])] = unpack(value, r.Schedule)
        else:
            self._apply_offload(key, value)

    def _apply_offload(self, key: str, value: bytes | None) -> None:
        k = self.keys
        if key.startswith(k.offloads):
            self.offloaded.pop(key[len(k.offloads) :], None)
            if value is not None:
                self.offloaded[key[len(k.offloads) :]] = unpack(value, r.Offloaded)
        elif key.startswith(k.offload_retirements):
            self.offload_retired.pop(key[len(k.offload_retirements) :], None)
            if value is not None:
                gone = unpack(value, r.OffloadRetired)
                self.offload_retired[key[len(k.offload_retirements) :]] = gone
        elif key.startswith(k.offload_drops):
            self.offload_dropped.discard(key[len(k.offload_drops) :])
            if value is not None:
                self.offload_dropped.add(unpack(value, r.OffloadDropped).attempt.key)
        elif value is not None:
            raise FormatError("unknown key")

    # -- questions --------------------------------------------------------------------------------

    def committed(self, attempt: r.Attempt) -> r.Commit | None:
        """The attempt's commit record, while it is not retired."""
        found = (c for c in self.commits.values() if c.attempt == attempt)
        return next(found, None)

    def lineage(self, generation: int) -> r.Closed | None:
        """The record that tells a generation's lineage: its newest ballot closed OK."""
        ballots = [b for g, b in self.closed if g == generation]
        ok = [self.closed[generation, b] for b in sorted(ballots, reverse=True)]
        return next((c for c in ok if c.close is r.Close.OK), None)

    def current_lineage(self) -> r.Closed | None:
        """The lineage that 'latest' refers to.

        The newest OK that has something behind it: a commit or a base. A generation that opened a
        lineage and died before its first commit does not hide what was there before.
        """
        for key in sorted(self.closed, reverse=True):
            closed = self.closed[key]
            if closed.close is r.Close.OK and (closed.base or self._has_steps(closed.lineage)):
                return closed
        return None

    def steps(self, lineage: str) -> list[int]:
        """Committed steps of a lineage, ascending."""
        return sorted(step for name, step in self.commits if name == lineage)

    def known_commits(self) -> dict[tuple[str, int], r.Commit]:
        """Committed steps by lineage and step, in RAM or only in the object store."""
        kept = (o.commit for o in self.offloaded.values())
        return {**{(c.lineage, c.attempt.step): c for c in kept}, **self.commits}

    def known_steps(self, lineage: str) -> list[int]:
        """Steps of a lineage that are in RAM or in the object store, ascending."""
        return sorted(step for name, step in self.known_commits() if name == lineage)

    def _has_steps(self, lineage: str) -> bool:
        kept = (o.commit.lineage for o in self.offloaded.values())
        return any(name == lineage for name, _ in self.commits) or lineage in kept

    def latest(self) -> r.Commit | None:
        """The highest committed step of the current lineage, else its base."""
        closed = self.current_lineage()
        if closed is None:
            return None
        known = self.known_commits()
        if steps := self.known_steps(closed.lineage):
            return known[closed.lineage, steps[-1]]
        assert closed.base is not None
        return known.get((closed.base.lineage, closed.base.step))

    def restored_step(self, lineage: str) -> int:
        """The newest step of a lineage that a launch began with: its bytes were there; -1: none."""
        good = (c.commit for c in self.closed.values() if c.close is r.Close.OK)
        return max((c.attempt.step for c in good if c and c.lineage == lineage), default=-1)

    def quarantined(self) -> set[str]:
        """Attempts whose bytes were read and were wrong beyond repair: never restored again."""
        bad = (c for c in self.closed.values() if c.close is r.Close.BAD and c.commit)
        return {c.commit.attempt.key for c in bad if c.commit is not None}

    def settled(self, attempt: r.Attempt) -> str:
        """Why an attempt is over without a living commit; "" if it may still hold or commit.

        This is the proof that its bytes may be freed, if `self` comes from a linearizable read
        after the bytes were written (protocol: nobody frees a byte of an open attempt).
        """
        if self.retired.get(attempt.key) == attempt:
            return "retired"
        if attempt.ledger_id in self.cleaned:
            return "its job was cleaned"
        if attempt.ledger_id != self.ledger_id or self.committed(attempt) is not None:
            return ""
        outcome = self.outcomes.get(attempt.key)
        if outcome is not None:
            return f"aborted: {outcome.reason}" if outcome.verdict is r.Verdict.ABORT else ""
        if self.keys.outcome(attempt) in self.unreadable or self.commit_unreadable():
            return ""
        if attempt.floor_key < self.floor:
            return "below the floor"
        if self.generation is not None and self.generation.number > attempt.generation:
            return f"generation {self.generation.number} began"
        return ""

    def as_seen(self) -> r.LedgerSeen:
        """What an agent that knows this much remembers of the ledger."""
        generation = self.generation.number if self.generation else 0
        replaces = self.rebuilt.replaces if self.rebuilt else ()
        at = (self.keys.job, self.ledger_id, self.revision, generation)
        return r.LedgerSeen(*at, replaces=replaces)

    def keep_cleaned(self, mirror: JobState) -> None:
        """A clean-up that any read has shown is not undone by a ledger that forgot it, unless that
        went back to the job from before (`undoes`)."""
        self.cleaned |= mirror.cleaned - {self.ledger_id}
        mirror.cleaned |= self.cleaned

    def undoes(self, cleaned: Container[str]) -> str:
        """Why this is an older ledger: it has the job that was cleaned (``cleaned``: ledger ids of
        which that was known before it was listed). Whatever went on in it would take generations
        and steps that were given already. "" if nothing shows that."""
        if self.ledger_id not in cleaned or self.ledger_id in self.cleaned:
            return ""
        return f"the ledger went back: it has the job {self.ledger_id[:8]} again, which was cleaned"

    def doubtful(self) -> list[str]:
        """Unreadable records without which nobody can say what is the latest step."""
        decisive = (self.keys.commits, self.keys.closings, self.keys.generation)
        return sorted(key for key in self.unreadable if key.startswith(decisive))

    def commit_unreadable(self) -> bool:
        """Some commit record is unreadable, so that no attempt can be proven uncommitted."""
        return any(key.startswith(self.keys.commits) for key in self.unreadable)

    def went_back(self, seen: r.LedgerSeen, known: Iterable[r.Commit]) -> str:
        """What shows that this listing is an older state of the ledger `seen`; "" if nothing does.

        The revision does, until others wrote as much as was lost. Then what is gone does: after a
        generation come higher ones only, and a commit (``known`` before this was listed) goes only
        by a retirement, whose record stays until the floor is above it.
        """
        if self.ledger_id in self.cleaned:
            return ""
        if self.revision < seen.revision:
            return f"revision {self.revision}, seen {seen.revision}"
        number = self.generation.number if self.generation else 0
        if number < seen.generation and self.keys.generation not in self.unreadable:
            return f"generation {number}, seen {seen.generation}"
        doubtful = (self.keys.commits, self.keys.retirements)
        if any(key.startswith(doubtful) for key in self.unreadable):
            return ""
        for attempt in (commit.attempt for commit in known):
            taken = attempt.key in self.retired or attempt.floor_key < self.floor
            stands = taken or self.committed(attempt) is not None
            if not stands and attempt.ledger_id == self.ledger_id:
                return f"step {attempt.step} was committed and is gone"
        return ""

    # -- compares that every transaction of the job carries ---------------------------------------

    def same_ledger(self) -> Compare:
        """The job's records are still the ones that this state was read from."""
        return value_is(self.keys.ledger_id, self.ledger_id.encode())

    @property
    def being_rebuilt(self) -> str:
        """The node whose agent writes these records anew, or broke off; "" if they are whole."""
        return self.rebuilt.by if self.rebuilt is not None and self.rebuilt.unfinished else ""

    def not_cleaned(self) -> Compare:
        """The job of these records is not being cleaned."""
        return absent(self.keys.cleaned(self.ledger_id))

    def same_generation(self, number: int) -> Compare:
        """Fence: generation `number` still stands.

        Raises StaleGenerationError if this state knows already that it does not: the mirror may
        have moved on since something was judged.
        """
        if self.generation is None or self.generation.number != number:
            current = self.generation.number if self.generation else None
            raise StaleGenerationError(f"generation {number} is over, {current} is current")
        return Compare(self.keys.generation, "mod", "=", self.generation_revision)

    def undecided(self, attempt: r.Attempt) -> Compare:
        """The attempt has no outcome yet."""
        return absent(self.keys.outcome(attempt))

    def above_floor(self, attempt: r.Attempt) -> Compare:
        """The attempt was not settled for good, so that its outcome may still be put."""
        return value_below(self.keys.floor, attempt.floor_key.encode() + b"~")

    def no_step_from(self, lineage: str, step: int) -> Compare:
        """No commit of the lineage at or above a step: a lineage never goes back."""
        prefix = f"{self.keys.commits}{lineage}/"
        return none_in(self.keys.commit(lineage, step), prefix_end(prefix))


def forgot(seen: r.LedgerSeen | None, truth: JobState) -> str:
    """Why a ledger that was read is not the one that this node has seen; "" if it is.

    A ledger rebuilt from agents' copies is accepted when it is whole: its record names the one it
    replaces.
    """
    if truth.being_rebuilt and truth.ledger_id not in truth.cleaned:
        return f"its ledger is being rebuilt by {truth.being_rebuilt}, or that broke off"
    if seen is None or seen.ledger_id in truth.cleaned:
        return ""
    if truth.ledger_id != seen.ledger_id:
        rebuilt = truth.rebuilt
        if rebuilt is not None and seen.ledger_id in rebuilt.replaces:
            return ""
        found = truth.ledger_id[:8] or "none"
        return f"the ledger forgot: its id was {seen.ledger_id[:8]}, now {found}"
    return seen.back


def _ballot(key: str, prefix: str) -> tuple[int, int]:
    generation, _, ballot = key[len(prefix) :].partition("/")
    return int(generation), int(ballot)


def entry_of(listing: Listing, key: str) -> Entry | None:
    """One entry of a listing."""
    return next((e for e in listing.entries if e.key == key), None)
