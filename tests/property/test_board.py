"""The board: a reader meets half-written cells and garbage, and sees whole records only."""

import mmap
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pckpt.board import CELL_BYTES, PAGE_BYTES, Board
from p2pckpt.errors import UsageError
from p2pckpt.records import Progress, Schedule
from p2pckpt.wire import pack


def schedule(version, text=""):
    return Schedule(1, version, ((0, 20),), (), None, "n0", text)


def progress(version):
    return Progress(1, version, 7, 1, 20, False, 0.1, 0.2, 0.0, 3)


def boards():
    page = bytearray(PAGE_BYTES)
    return page, Board(memoryview(page)), Board(memoryview(page))


def test_nothing_is_there_at_first():
    _, agent, rank = boards()
    assert rank.schedule.read() is None
    assert agent.progress.read() is None


def test_each_side_reads_what_the_other_wrote_last():
    _, agent, rank = boards()
    for version in range(1, 8):
        agent.schedule.write(schedule(version))
        rank.progress.write(progress(version))
        assert rank.schedule.read() == schedule(version)
        assert agent.progress.read() == progress(version)


def test_a_record_that_is_too_long_is_refused_and_the_old_one_stays():
    _, agent, rank = boards()
    agent.schedule.write(schedule(1))
    with pytest.raises(UsageError, match="needs records of 1024 bytes"):
        agent.schedule.write(schedule(2, "x" * CELL_BYTES))
    assert rank.schedule.read() == schedule(1)


def test_a_page_of_another_size_is_refused():
    with pytest.raises(UsageError, match="4096"):
        Board(memoryview(bytearray(100)))


@settings(deadline=None)
@given(
    st.lists(st.text(max_size=80), min_size=1, max_size=8),
    st.integers(0, CELL_BYTES),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_a_torn_write_shows_the_record_before(texts, done, in_order, rng):
    """A write stops after any part of its bytes, in order or not: the reader sees the record before
    until the new one is whole; never a mixture, and never nothing."""
    page, agent, rank = boards()
    for version, text in enumerate(texts, 1):
        agent.schedule.write(schedule(version, text))
    before, old = rank.schedule.read(), bytes(page)
    new = schedule(len(texts) + 1, "new")
    agent.schedule.write(new)
    whole = bytes(page)
    page[:] = old
    changed = [i for i in range(PAGE_BYTES) if old[i] != whole[i]]
    if not in_order:
        rng.shuffle(changed)
    for i in changed[: done * len(changed) // CELL_BYTES]:
        page[i] = whole[i]
    assert rank.schedule.read() == (new if bytes(page) == whole else before)
    for i in changed:
        page[i] = whole[i]
    assert rank.schedule.read() == new


@settings(deadline=None)
@given(st.binary(max_size=CELL_BYTES), st.booleans())
def test_garbage_is_no_record(garbage, other):
    page, agent, rank = boards()
    agent.schedule.write(schedule(1))
    start = 0 if other else CELL_BYTES
    page[start : start + CELL_BYTES] = garbage.ljust(CELL_BYTES, b"\1")
    assert rank.schedule.read() in (None, schedule(1))


def test_a_record_of_another_kind_is_none():
    page, _, rank = boards()
    page[: len(pack(progress(1)))] = pack(progress(1))
    assert rank.schedule.read() is None


def test_two_processes_at_full_speed_never_see_a_mixture(tmp_path):
    """The writer's records say the same thing twice; the reader looks for one that does not."""
    with (tmp_path / "page").open("w+b") as f:
        f.truncate(PAGE_BYTES)
        page = mmap.mmap(f.fileno(), PAGE_BYTES)
    child = os.fork()
    if child == 0:
        agent, version, end = Board(memoryview(page)), 0, time.monotonic() + 1.0
        while time.monotonic() < end:
            version += 1
            agent.schedule.write(schedule(version, f"{version} " * (version % 40)))
        os._exit(0)
    rank, newest, reads = Board(memoryview(page)), 0, 0
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        found = rank.schedule.read()
        if found is not None:
            assert found.reason == f"{found.version} " * (found.version % 40)
            newest, reads = max(newest, found.version), reads + 1
    assert newest > 100
    assert reads > 100
