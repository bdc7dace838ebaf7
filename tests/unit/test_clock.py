"""Virtual time: ordinary asyncio code, no waiting, the same schedule each time, hangs found."""

import asyncio
import contextvars
import os
import socket
import subprocess
import sys
import time

import pytest

from p2pckpt.errors import UsageError
from simulations.world import clock
from simulations.world.clock import Stuck


def now():
    return asyncio.get_running_loop().time()


def test_a_year_of_sleep_costs_no_time_and_is_exact():
    async def story():
        before = now()
        await asyncio.sleep(365 * 86400.0)
        return now() - before

    begun = time.monotonic()
    assert clock.run(story(), limit_s=4e7) == 365 * 86400.0
    assert time.monotonic() - begun < 2.0


@pytest.mark.parametrize("start", [0.0, 1.0, 1.7e9])
def test_timers_end_in_order_of_their_time_at_any_start(start):
    async def story():
        seen = []

        async def one(delay_s):
            await asyncio.sleep(delay_s)
            seen.append((delay_s, now()))

        await asyncio.gather(*(one(d) for d in (0.3, 0.1, 0.2, 0.1000001, 5e4)))
        return seen

    seen = clock.run(story(), start=start, limit_s=1e5)
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    for delay_s, at in seen:
        assert at == pytest.approx(start + delay_s, abs=2e-6)


def test_timeouts_and_task_groups_work_unchanged():
    async def story():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        assert now() == 5.0
        async with asyncio.TaskGroup() as group:
            a = group.create_task(asyncio.sleep(2, "a"))
            b = group.create_task(asyncio.sleep(1, "b"))
        assert now() == 7.0
        return a.result() + b.result()

    assert clock.run(story(), limit_s=10) == "ab"


def test_a_hang_is_found_and_names_the_tasks():
    async def waits_for_ever():
        await asyncio.get_running_loop().create_future()

    async def story():
        task = asyncio.create_task(waits_for_ever(), name="the culprit")
        await task

    with pytest.raises(Stuck, match="nothing can happen") as stuck:
        clock.run(story(), limit_s=10)
    assert len(stuck.value.pending) == 2
    assert "the culprit" in str(stuck.value)
    assert "waits_for_ever" in str(stuck.value)
    assert "test_clock.py" in str(stuck.value)


def test_bounds_of_time_and_of_turns_end_a_run_that_goes_round_in_circles():
    async def slow():
        while True:
            await asyncio.sleep(1)

    async def busy():
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Stuck, match="not done after 100 virtual seconds"):
        clock.run(slow(), limit_s=100)
    with pytest.raises(Stuck, match="more than 500 turns"):
        clock.run(busy(), limit_s=100, limit_turns=500)


def test_a_stuck_run_still_lets_its_tasks_clean_up_and_gives_up_on_those_that_will_not():
    ended = []

    async def tidy():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            ended.append("tidy")

    async def stubborn():
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append("stubborn")

    async def story():
        tasks = [asyncio.create_task(tidy()), asyncio.create_task(stubborn())]
        await asyncio.wait(tasks)

    with pytest.raises(Stuck):
        clock.run(story(), limit_s=10)
    assert ended == ["stubborn", "tidy"]


def test_left_over_tasks_are_cancelled_in_order_of_creation():
    ended = []

    async def one(i):
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append(i)

    async def story():
        global _kept
        _kept = [asyncio.create_task(one(i)) for i in range(50)]
        await asyncio.sleep(0)
        return "done"

    assert clock.run(story(), limit_s=10) == "done"
    assert ended == list(range(50))


def test_errors_of_main_come_out_as_they_are():
    async def story():
        await asyncio.sleep(1)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        clock.run(story(), limit_s=10)


def test_threads_and_sockets_are_refused():
    async def thread():
        await asyncio.to_thread(print)

    async def connect():
        a, b = socket.socketpair()
        with a, b:
            a.setblocking(False)
            await asyncio.get_running_loop().sock_recv(a, 1)

    for story in (thread, connect):
        with pytest.raises(UsageError, match="virtual time"):
            clock.run(story(), limit_s=10)


ORDER = """
import asyncio
import contextvars
from simulations.world import clock
async def story():
    seen = []
    async def one(i):
        try:
            await asyncio.sleep(100)
        finally:
            seen.append(i)
    junk = [object() for _ in range({junk})]
    try:
        async with asyncio.TaskGroup() as group:
            for i in range(300):
                group.create_task(one(i))
                junk.append(bytearray(i * {junk} % 999))
            await asyncio.sleep(1)
            raise KeyError
    except* KeyError:
        pass
    loop = asyncio.get_running_loop()
    futures = [loop.create_future() for _ in range(300)]
    for f in futures:
        f.set_result(0)
    done, _ = await asyncio.wait(futures)
    return seen, [futures.index(f) for f in done]
print(clock.run(story(), limit_s=200))
"""


def test_cancellation_order_is_the_same_in_every_process():
    """asyncio.TaskGroup cancels in the hash order of its tasks."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", ORDER.format(junk=junk)],
            env={**os.environ, "PYTHONHASHSEED": str(junk)},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for junk in (0, 7777)
    }
    assert len(outputs) == 1
    assert len(outputs.pop()) > 600


def test_a_local_clock_shows_something_else_and_its_timers_go_by_it():
    async def story():
        began = now()
        here = clock.LocalClock(5000.0)
        context = contextvars.copy_context()
        context.run(clock.LOCAL.set, here)
        here.set_rate(2.0, began)

        async def there():
            before = now()
            await asyncio.sleep(10.0)
            async with asyncio.timeout(20.0):
                await asyncio.sleep(10.0)
            return before, now()

        local = await asyncio.create_task(there(), context=context)
        assert local == (5000.0, 5020.0)
        assert now() - began == 10.0  # twice as fast
        here.set_rate(0.5, now())
        local = await asyncio.create_task(there(), context=context)
        assert local == (5020.0, 5040.0)
        return now() - began

    assert clock.run(story(), limit_s=1e3) == pytest.approx(50.0)
