"""Waits on what an agent knows: rung by a change, by their timeout, or by what a predicate raises.

The clock is the simulator's, so that no wait costs time.
"""

import asyncio

import pytest

from p2pckpt.agent.waiting import Waiting
from simulations.world import clock


def run(main):
    return clock.run(main(), limit_s=1e6)


def test_a_wait_ends_with_the_change_that_makes_it_true_and_not_before():
    async def main():
        waiting, known = Waiting(), []
        waits = [asyncio.ensure_future(waiting.until(lambda n=n: len(known) >= n, None))
                 for n in (1, 2, 2)]  # fmt: skip
        await asyncio.sleep(1)
        assert [w.done() for w in waits] == [False, False, False]
        known.append(1)
        await asyncio.sleep(1)
        assert not any(w.done() for w in waits), "nobody said that something changed"
        waiting.wake()
        await asyncio.sleep(0.001)
        assert [w.done() for w in waits] == [True, False, False]
        known.append(2)
        waiting.wake()
        assert await asyncio.gather(*waits) == [True, True, True]
        assert not waiting._bells

    run(main)


def test_what_is_true_already_needs_no_change_and_no_turn():
    async def main():
        asking = Waiting().until(lambda: True, 0.0)
        with pytest.raises(StopIteration) as ended:
            asking.send(None)
        assert ended.value.value is True

    run(main)


def test_a_timeout_is_kept_to_the_second_and_leaves_nothing_behind():
    async def main():
        waiting, loop = Waiting(), asyncio.get_running_loop()
        began = loop.time()
        assert not await waiting.until(lambda: False, 5.0)
        assert loop.time() - began == pytest.approx(5.0, abs=1e-6)
        assert await waiting.until(lambda: loop.time() >= began + 7, 2.0), "true when it ran out"
        assert not await waiting.until(lambda: False, 0.0)
        assert not waiting._bells

    run(main)


def test_a_timer_of_a_skewed_clock_that_rings_too_early_ends_the_wait_all_the_same(monkeypatch):
    """The clock of a node may be off by a rounding where its timers are set: not again and again
    in no time."""

    async def main():
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_at", lambda _when, call, *args: loop.call_soon(call, *args))
        assert not await Waiting().until(lambda: False, 5.0)

    clock.run(main(), limit_s=1e6, limit_turns=100)


def test_waits_of_one_job_end_each_at_its_own_time_with_one_timer():
    async def main():
        waiting, loop, ended = Waiting(), asyncio.get_running_loop(), []

        async def wait(timeout_s, ready=lambda: False):
            came = await waiting.until(ready, timeout_s)
            ended.append((loop.time(), came))

        came = []
        begun = [asyncio.ensure_future(wait(t)) for t in (9.0, 3.0, 5.0, 3.0, None)]
        begun.append(asyncio.ensure_future(wait(4.0, lambda: bool(came))))
        await asyncio.sleep(2)
        assert sum(not timer.cancelled() for timer in loop._scheduled) == 1
        begun.append(asyncio.ensure_future(wait(0.5)))  # from 2 to 2.5, before all others
        await asyncio.sleep(1.75)
        came.append(1)
        waiting.wake()
        waiting.wake()
        await asyncio.sleep(10)
        begun[4].cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        times = [(pytest.approx(at), by) for at, by in ((2.5, False), (3, False), (3, False))]
        later = [(pytest.approx(at), by) for at, by in ((3.75, True), (5, False), (9, False))]
        assert ended == times + later
        assert not waiting._bells

    run(main)


def test_a_wait_that_is_rung_in_vain_keeps_its_deadline():
    async def main():
        waiting, loop = Waiting(), asyncio.get_running_loop()
        answers = iter((False, True, False))  # true only while all look

        wait = asyncio.ensure_future(waiting.until(lambda: next(answers, False), 5.0))
        await asyncio.sleep(1)
        waiting.wake()
        assert not await wait
        assert loop.time() == pytest.approx(5.0)

    run(main)


def test_changes_of_one_turn_are_looked_at_once():
    async def main():
        waiting, asked = Waiting(), []
        wait = asyncio.ensure_future(waiting.until(lambda: asked.append(1), 9.0))
        await asyncio.sleep(1)
        asked.clear()
        for _ in range(100):
            waiting.wake()
        await asyncio.sleep(1)
        assert (len(asked), waiting.wakes) == (1, 1)
        assert not await wait

    run(main)


def test_who_takes_down_what_may_be_gone_later_is_called_before_the_others_look():
    async def main():
        waiting, state, taken = Waiting(), [], []
        waiting.first.append(lambda: taken.extend(state))
        wait = asyncio.ensure_future(waiting.until(lambda: bool(taken), None))
        await asyncio.sleep(0)
        state.append("outcome")
        waiting.look()
        state.clear()
        assert await wait
        assert taken == ["outcome"]

    run(main)


def test_who_fails_to_take_something_down_holds_up_nobody():
    async def main():
        waiting, told, taken = Waiting(), [], []
        asyncio.get_running_loop().set_exception_handler(lambda _, facts: told.append(facts))

        def broken():
            raise ValueError("too long for its page")

        waiting.first += [broken, lambda: taken.append(1)]
        wait = asyncio.ensure_future(waiting.until(lambda: bool(taken), None))
        await asyncio.sleep(0)
        waiting.look()
        assert await wait
        assert [str(facts["exception"]) for facts in told] == ["too long for its page"]
        assert "broken failed" in told[0]["message"]

    run(main)


def test_what_a_predicate_raises_is_raised_where_it_is_waited_for():
    async def main():
        waiting, wrong = Waiting(), []

        def ready():
            if wrong:
                raise ValueError("broken")
            return False

        others = asyncio.ensure_future(waiting.until(lambda: bool(wrong), None))
        wait = asyncio.ensure_future(waiting.until(ready, None))
        await asyncio.sleep(0)
        wrong.append(1)
        waiting.wake()
        with pytest.raises(ValueError, match="broken"):
            await wait
        assert await others

    run(main)


def test_a_wait_that_is_cancelled_is_forgotten_with_its_timer():
    async def main():
        waiting = Waiting()
        wait = asyncio.ensure_future(waiting.until(lambda: False, 1e5))
        await asyncio.sleep(0)
        wait.cancel()
        await asyncio.gather(wait, return_exceptions=True)
        assert wait.cancelled()
        assert not waiting._bells
        waiting.wake()
        await asyncio.sleep(1)

    run(main)


def test_changed_tells_of_any_change_since():
    async def main():
        waiting = Waiting()
        before = waiting.wakes
        assert not await waiting.changed(before, 3.0)
        waiting.wake()
        assert await waiting.changed(before, 3.0)
        assert await waiting.changed(before, 0.0), "also of one that is over"

    run(main)
