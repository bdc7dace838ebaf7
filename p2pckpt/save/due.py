"""Which steps are saved: the same answer on every rank, also while the schedule changes.

Intuition: all ranks must save the same steps, or no attempt ever gets all its shares. Nobody asks
anybody at a step; each rank reads the same record, and a change of it names a step that no rank has
reached yet. So it is in force everywhere before it matters:

    highest step that a rank told        a change may be in force from here
    ... 98 99 100 | 101 102 103 104 105 ...      (ahead: 5 steps, the time the news needs)

News can be late all the same. A rank that learns of a step which it should have saved (or saved
alone) counts its saves as the others do from then on, and says that these attempts cannot be
completed, so that they end at once.

Contract: pure, but for what a `Loop` remembers of its own rank. `amend` never changes what a
schedule said of steps below `highest + ahead`. A step that was answered keeps its answer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from p2pckpt.board import Board
from p2pckpt.records import Progress, Schedule

AUTO_EVERY = 20
"""Steps between saves with every="auto", until the agents know what a save costs."""

LEAST_AHEAD = 2
"""Iterations between the highest step known and a change: ranks in step differ by one at most."""

MAX_PLAN, MAX_EXTRA = 8, 4
"""Entries that a schedule remembers; it must fit a cell of the board."""

MEDIAN_OF = 15
REMEMBERED = 256
"""Asked steps whose answers are known, to find which were wrong when news is late."""

MAX_REASON = 400
"""Bytes, of a packed schedule, too: none of a reason's letters takes more there."""

_ESCAPED = {ord('"'): "'", ord("\\"): "/"}


@dataclass(frozen=True)
class Wish:
    """What somebody wants of a schedule: another interval, in RAM or in the object store (every so
    manieth commit), an extra step, an end."""

    every: int | None = None
    offload_every: int | None = None
    extra: bool = False
    last: bool = False
    by: str = ""
    reason: str = ""


def first_schedule(generation: int, every: int) -> Schedule:
    """What holds until somebody changes it: what the hook was told."""
    return Schedule(generation, 0, ((0, every),))


def every_at(schedule: Schedule, step: int) -> int:
    """Steps between saves, as planned for a step."""
    every = schedule.plan[0][1]
    for start, then in schedule.plan:
        every = then if start <= step else every
    return every


def is_due(schedule: Schedule, step: int, since: int | None = None) -> bool:
    """Is `step` to be saved? ``since``: the step that was asked for before it, as a loop may count
    in strides and so step over an extra step or the last one; those are then due at the next."""
    since = step - 1 if since is None else since
    named = (*schedule.extra, *(() if schedule.last is None else (schedule.last,)))
    return any(since < at <= step for at in named) or step % every_at(schedule, step) == 0


def known_from(schedule: Schedule) -> int:
    """The first step of which a schedule still tells what was due: old entries fall out of it."""
    full = [schedule.plan[0][0]] if len(schedule.plan) == MAX_PLAN else []
    full += [schedule.extra[0]] if len(schedule.extra) == MAX_EXTRA else []
    return max(full, default=-1)


def steps_ahead(step_s: float, notice_s: float, stride: int = 1) -> int:
    """So many steps beyond the highest known one a change may be in force: as far as the news
    needs, LEAST_AHEAD iterations at least. ``step_s``: seconds of one iteration, above 0."""
    return max(LEAST_AHEAD, math.ceil(notice_s / step_s)) * stride


def amend(old: Schedule, wish: Wish, highest: int, ahead: int) -> Schedule:
    """The schedule with a wish in force from `highest + ahead`; `old` itself if nothing changes.

    An extra step that is still to come serves a second wish for one. The last step, once agreed,
    stays: ranks may act on it already. ``offload_every`` holds at once: no rank acts on it, and
    each commit says by which it is judged.
    """
    at = highest + ahead
    plan, extra, last = old.plan, old.extra, old.last
    offload = old.offload_every if wish.offload_every is None else wish.offload_every
    ended = last is not None and last <= at
    if wish.every not in (None, plan[-1][1]):
        kept = tuple((start, every) for start, every in plan if start < at)
        plan = (*kept, (at, wish.every))[-MAX_PLAN:]
    if wish.extra and not ended and not any(step > highest for step in extra):
        extra = (*extra, at)[-MAX_EXTRA:]
    if wish.last and last is None:
        last = at
    if (plan, extra, last, offload) == (old.plan, old.extra, old.last, old.offload_every):
        return old
    return Schedule(
        old.generation,
        old.version + 1,
        plan,
        extra,
        last,
        wish.by,
        fitting(wish.reason),
        offload,
    )


def fitting(reason: str) -> str:
    """A reason as a schedule can have it: short, of letters that are packed as they are, so that
    the record fits its cell of the board."""
    plain = "".join(c if c.isprintable() else " " for c in reason).translate(_ESCAPED)
    return plain.encode()[:MAX_REASON].decode(errors="ignore")


@dataclass(frozen=True)
class Asked:
    """A step that the loop asked for, and the one before; what it was told.

    ``due``: what the others do, as far as it is known; ``ordinal``: of their save, if they do.
    """

    step: int
    since: int
    told: bool
    due: bool
    ordinal: int


@dataclass
class Loop:
    """One rank's training loop, as it follows the schedule. ``now``: monotonic seconds.

    ``ordinal`` is that of the next save. ``late``: attempts (ordinal, step) that cannot be
    completed, because this rank heard of the schedule too late; for the hook to tell and clear.
    """

    generation: int
    every: int
    auto: bool
    now: Callable[[], float]
    board: Board | None = None
    ordinal: int = 0
    late: list[tuple[int, int]] = field(default_factory=list)
    restore_s: float = 0.0
    schedule: Schedule = field(init=False)
    _asked: deque[Asked] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=MEDIAN_OF))
    _blocks_s: deque[float] = field(default_factory=lambda: deque(maxlen=MEDIAN_OF))
    _resumed_at: float | None = None
    _version: int = 0

    def __post_init__(self) -> None:
        self.schedule = first_schedule(self.generation, self.every)

    def due(self, step: int) -> bool:
        """Is a save due at `step`? The same step again gets the same answer."""
        self._heed()
        before = self._asked[-1] if self._asked else None
        if before is not None and step == before.step:
            return before.told
        if before is not None and step < before.step:  # training went back to an older step
            self._asked.clear()
            before = None
        since = step - 1 if before is None else before.step
        due = is_due(self.schedule, step, since)
        self._asked.append(Asked(step, since, due, due, self.ordinal))
        self._tell(step, step - since)
        return due

    def over(self, step: int) -> bool:
        """Was the agreed last step reached? By the schedule that `due` went by at this step."""
        if (
            not self._asked or self._asked[-1].step != step
        ):  # a loop that decides itself what to save
            self._heed()
            self._tell(step, 1)
        return self.is_last(step)

    def is_last(self, step: int) -> bool:
        """The same of any step, without asking."""
        return self.schedule.last is not None and step >= self.schedule.last

    def begin_save(self) -> int:
        """The ordinal of the save that begins."""
        self.ordinal += 1
        return self.ordinal - 1

    def saved(self, block_s: float) -> None:
        """A save has let training go on after `block_s`."""
        self._blocks_s.append(block_s)
        self._resumed_at = self.now()

    def _heed(self) -> None:
        """Take a newer schedule, and find which answers it would have changed."""
        new = self.board.schedule.read() if self.board is not None else None
        if new is None or new.generation != self.generation:
            return
        if new.version <= self.schedule.version:
            return
        self.schedule, shift = new, 0
        known = known_from(new)
        for i, asked in enumerate(self._asked):
            if asked.step < known:
                continue
            due = is_due(new, asked.step, asked.since)
            theirs, mine = (asked.ordinal + shift, asked.step), (asked.ordinal, asked.step)
            if due and (not asked.due or shift):
                self.late.append(theirs)
            if asked.due and (not due or shift):
                self.late.append(mine)
            self._asked[i] = Asked(asked.step, asked.since, asked.told, due, theirs[0])
            shift += due - asked.due
        self.ordinal += shift

    def _tell(self, step: int, stride: int) -> None:
        """Write the progress. A first step has no duration, and may be long (compilation)."""
        now = self.now()
        if self._resumed_at is not None:
            self._steps_s.append(now - self._resumed_at)
        self._resumed_at = now
        if self.board is not None:
            self._version += 1
            self.board.progress.write(
                Progress(
                    self.generation,
                    self._version,
                    step,
                    stride,
                    self.every,
                    self.auto,
                    _median(self._steps_s),
                    _median(self._blocks_s),
                    self.restore_s,
                    self.ordinal,
                    self._steps_s[-1] if self._steps_s else 0.0,
                )
            )


def _median(seconds: deque[float]) -> float:
    return median(seconds) if seconds else 0.0
