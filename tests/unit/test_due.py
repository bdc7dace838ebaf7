"""Which steps are saved: the schedule as data, its changes, and ranks that hear of them late."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pckpt.board import PAGE_BYTES, Board
from p2pckpt.errors import UsageError
from p2pckpt.records import Schedule
from p2pckpt.save.due import (
    LEAST_AHEAD,
    MAX_EXTRA,
    MAX_PLAN,
    MAX_REASON,
    Loop,
    Wish,
    amend,
    every_at,
    first_schedule,
    fitting,
    is_due,
    steps_ahead,
)
from p2pckpt.wire import pack


def due_steps(schedule, steps=range(1, 400)):
    return [step for step in steps if is_due(schedule, step)]


def test_without_a_change_every_nth_step_is_due():
    assert due_steps(first_schedule(1, 100)) == [100, 200, 300]


def test_another_interval_holds_from_its_step_on_and_not_before():
    old = first_schedule(1, 20)
    new = amend(old, Wish(every=50), 100, 5)
    assert new.plan == ((0, 20), (105, 50))
    assert due_steps(new) == [20, 40, 60, 80, 100, 150, 200, 250, 300, 350]
    assert [every_at(new, step) for step in (104, 105)] == [20, 50]


def test_a_change_that_nobody_has_reached_is_replaced():
    new = amend(amend(first_schedule(1, 20), Wish(every=50), 100, 20), Wish(every=7), 100, 5)
    assert new.plan == ((0, 20), (105, 7))
    assert new.version == 2


def test_an_extra_step_is_saved_once_and_serves_all_who_want_one():
    new = amend(first_schedule(1, 100), Wish(extra=True), 111, 4)
    assert due_steps(new) == [100, 115, 200, 300]
    assert amend(new, Wish(extra=True), 114, 4) is new
    assert amend(new, Wish(extra=True), 115, 4).extra == (115, 119)


def test_uploads_change_at_once_and_touch_no_step_that_is_saved():
    old = amend(first_schedule(1, 20), Wish(every=50), 100, 5)
    new = amend(old, Wish(offload_every=7, by="n0", reason="cheap"), 300, 5)
    assert (new.offload_every, new.version, new.reason) == (7, 2, "cheap")
    assert (new.plan, new.extra, new.last) == (old.plan, old.extra, old.last)
    assert amend(new, Wish(offload_every=7), 400, 5) is new
    both = amend(new, Wish(every=60, offload_every=3), 400, 5)
    assert (both.plan[-1], both.offload_every, both.version) == ((405, 60), 3, 3)
    assert amend(both, Wish(extra=True), 500, 5).offload_every == 3, "other wishes leave it alone"
    with pytest.raises(UsageError, match="offload_every -1"):
        amend(old, Wish(offload_every=-1), 300, 5)


def test_a_reason_loses_what_a_record_would_have_to_escape():
    assert fitting('a "b"\\c\nd\ud800€') == "a 'b'/c d €"


def test_the_last_step_is_agreed_once():
    new = amend(first_schedule(1, 100), Wish(last=True, by="n0", reason="SIGTERM"), 111, 4)
    assert (new.last, new.by, new.reason) == (115, "n0", "SIGTERM")
    assert amend(new, Wish(last=True), 113, 9) is new
    assert amend(new, Wish(extra=True), 113, 9) is new, "there is no step after the last"
    assert due_steps(new) == [100, 115, 200, 300], "who does not ask should_stop goes on as before"


def test_a_loop_that_counts_in_strides_takes_the_first_step_at_or_past_the_one_named():
    schedule = Schedule(1, 1, ((0, 1000),), (110,), 2050)
    steps = range(0, 3000, 32)
    asked = [s for s in steps if is_due(schedule, s, s - 32)]
    assert asked == [0, 128, 2080]


def test_a_wish_for_what_is_there_changes_nothing():
    old = first_schedule(1, 20)
    assert amend(old, Wish(every=20), 5, 2) is old


def test_a_schedule_says_what_is_wrong_with_its_plan():
    for plan in ((), ((5, 2), (5, 3)), ((9, 1), (5, 1)), ((0, 0),)):
        with pytest.raises(UsageError, match="needs pairs"):
            Schedule(1, 1, plan)


def test_news_gets_its_time_in_steps():
    assert steps_ahead(10.0, 1.0) == LEAST_AHEAD
    assert steps_ahead(0.1, 1.0) == 10
    assert steps_ahead(0.1, 1.0, stride=32) == 320


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    Wish(extra=True),
                    Wish(last=True),
                    *(Wish(every=n) for n in (1, 3, 7)),
                    *(Wish(offload_every=n) for n in (1, 4)),
                ]
            ),
            st.integers(0, 60),
            st.integers(2, 20),
        ),
        max_size=20,
    )
)
def test_no_change_touches_what_a_rank_may_have_acted_on(wishes):
    """Whatever is wished: below highest + ahead all stays, versions grow, the record is small."""
    schedule, highest = first_schedule(1, 10), 0
    for wish, on, ahead in wishes:
        highest += on
        new = amend(schedule, wish, highest, ahead)
        past = range(max(1, highest - 20), highest + ahead)
        kept = len(schedule.plan) < MAX_PLAN and len(schedule.extra) < MAX_EXTRA
        if kept:
            assert due_steps(new, past) == due_steps(schedule, past)
        assert new is schedule or new.version == schedule.version + 1
        if schedule.last is not None:
            assert new.last == schedule.last
        assert len(new.plan) <= MAX_PLAN
        assert len(new.extra) <= MAX_EXTRA
        schedule = new


@settings(deadline=None)
@given(st.text(max_size=2000) | st.text('\x00\n"\\', min_size=400, max_size=500))
def test_any_reason_fits_the_board(reason):
    schedule = first_schedule(10**9, 10**6)
    for step in range(0, 200, 10):
        wish = Wish(10**6 + step + 1, 10**6 + step, extra=True, by="n" * 63, reason=reason)
        schedule = amend(schedule, wish, 10**12 + step, 3)
    schedule = amend(schedule, Wish(last=True, by="n" * 63, reason=reason), 10**13, 3)
    assert len(schedule.reason.encode()) <= MAX_REASON
    Board(memoryview(bytearray(PAGE_BYTES))).schedule.write(schedule)


# -- ranks -----------------------------------------------------------------------------------------


class Rank:
    """A loop with its board; `log` has the attempts it makes, `gone` those it gives up."""

    def __init__(self, every=10):
        self.board = Board(memoryview(bytearray(PAGE_BYTES)))
        self.clock = 0.0
        self.loop = Loop(1, every, False, lambda: self.clock, self.board)
        self.log, self.gone = [], []

    def step(self, step, step_s=0.1):
        self.clock += step_s
        due = self.loop.due(step)
        self.gone += self.loop.late
        self.loop.late.clear()
        if due:
            self.log.append((self.loop.begin_save(), step))
            self.clock += 0.5
            self.loop.saved(0.5)
        return due

    def hear(self, schedule):
        self.board.schedule.write(schedule)


def test_a_rank_tells_how_far_it_is_and_how_long_things_take():
    rank = Rank(every=5)
    for step in range(1, 13):
        rank.step(step)
    told = rank.board.progress.read()
    assert (told.step, told.stride, told.every, told.saves) == (12, 1, 5, 2)
    assert told.step_s == pytest.approx(0.1)
    assert told.block_s == 0.5


def test_a_step_asked_twice_gets_one_answer():
    rank = Rank()
    rank.loop.due(9)
    rank.hear(amend(rank.loop.schedule, Wish(extra=True), 7, 2))
    assert rank.loop.due(9) is False
    assert rank.loop.late == [(0, 9)]


def test_the_end_is_reached_when_the_agreed_step_was_asked():
    rank = Rank()
    rank.hear(amend(first_schedule(1, 10), Wish(last=True), 3, 2))
    ends = [(rank.step(step), rank.loop.over(step)) for step in (3, 4, 5)]
    assert ends == [(False, False), (False, False), (True, True)]


def test_a_loop_that_saves_by_its_own_rule_hears_of_the_end_and_confesses_nothing():
    rank = Rank(every=1)
    for step in range(1, 8):
        assert rank.loop.over(step) is (step >= 5)
        if step == 6:
            rank.hear(Schedule(1, 2, ((0, 1), (3, 7)), (4,), 5))
        if step == 2:
            rank.hear(amend(first_schedule(1, 1), Wish(last=True), 3, 2))
    assert rank.loop.late == []
    assert rank.loop.ordinal == 0
    assert rank.board.progress.read().step == 7


def test_who_went_back_to_an_older_step_is_asked_anew():
    rank = Rank(every=10)
    for step in (*range(1, 11), *range(6, 11)):
        rank.step(step)
    assert rank.log == [(0, 10), (1, 10)]


def test_an_older_generations_schedule_says_nothing_here():
    rank = Rank(every=10)
    rank.hear(Schedule(2, 5, ((0, 1),)))
    assert not rank.step(3)


def test_a_late_rank_counts_like_the_others_afterwards():
    """Two changes come 12 steps late: what it missed and what it made alone is given up by name,
    and from then on its attempts are those of the others."""
    good, late = Rank(), Rank()
    for step in range(1, 121):
        if step == 30:
            news = amend(good.loop.schedule, Wish(extra=True), step, 3)
            good.hear(news)
        if step == 34:
            news = amend(good.loop.schedule, Wish(every=15), step, 3)
            good.hear(news)
        if step == 58:
            late.hear(news)
        good.step(step)
        late.step(step)
    assert [s for _, s in good.log] == [10, 20, 30, 33, 45, 60, 75, 90, 105, 120]
    assert [s for _, s in late.log] == [10, 20, 30, 40, 50, 60, 75, 90, 105, 120]
    assert late.log[-5:] == good.log[-5:]
    alone = set(good.log) ^ set(late.log)
    assert alone == {(3, 33), (3, 40), (4, 45), (4, 50)}
    assert set(late.gone) >= alone
    assert not set(late.gone) & (set(good.log) & set(late.log))


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from(["every", "extra", "last"])), max_size=5
    ),
    st.lists(st.integers(0, 40), min_size=5, max_size=5),
)
def test_however_late_the_news_the_count_comes_right(changes, delays):
    """One rank in time, one late: when all news is through they make the same attempts, and every
    attempt that only one of them made was given up by the late one."""
    good, late = Rank(every=4), Rank(every=4)
    pending, wanted = [], {}
    at = 0
    for (gap, what), delay in zip(changes, delays, strict=False):
        at += gap
        wanted.setdefault(at, (what, delay))
    end = max([a + d for a, (_, d) in wanted.items()], default=0) + 60
    for step in range(1, end):
        if step in wanted:
            what, delay = wanted[step]
            wish = {"every": Wish(every=3 + step % 5), "extra": Wish(extra=True)}.get(what)
            news = amend(good.loop.schedule, wish or Wish(last=True), step, 2)
            if news is not good.loop.schedule:
                good.hear(news)
                pending.append((step + delay, news))
        for due in [p for p in pending if p[0] <= step]:
            pending.remove(due)
            if due[1].version > late.loop.schedule.version:
                late.hear(due[1])
        good.step(step)
        late.step(step)
    assert late.loop.ordinal == good.loop.ordinal
    tail = [a for a in good.log if a[1] > end - 40]
    assert tail == [a for a in late.log if a[1] > end - 40]
    assert Counter(set(good.log) ^ set(late.log)).keys() <= set(late.gone)


def test_packed_progress_is_small():
    rank = Rank()
    rank.step(10**15)
    assert len(pack(rank.board.progress.read())) < 400
