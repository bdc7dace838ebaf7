"""Movers and peers that are killed, frozen, cancelled or were never there, with real UCX.

In each case both sides get PeerUnreachable in bounded time, nobody crashes, and a region that was
taken back keeps every byte.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from ucx_rig import BIG, HOST, MIB, begin, ends_with, ucx_world

from p2pckpt.backends import ucx
from p2pckpt.backends.ucx import UcxTransport
from p2pckpt.errors import (
    PeerUnreachable,
    Refused,
    UsageError,
)
from p2pckpt.ports import Region


@pytest.fixture(scope="module")
def world():
    with ucx_world() as made:
        yield made


def test_cancel_in_mid_transfer_with_a_sender_that_stops_and_resumes(world):
    """The sender is frozen with granted pieces on the way; after cancel not one byte changes."""
    size, target = BIG, world.big_target

    async def body(freeze):
        grant, send = await begin(world, size)
        if freeze:
            os.kill(world.a.mover_pid, signal.SIGSTOP)
        assert not send.done()
        begun_s = time.monotonic()
        await grant.cancel()
        assert time.monotonic() - begun_s < 2
        target[:] = 9
        if freeze:
            os.kill(world.a.mover_pid, signal.SIGCONT)
        await ends_with(PeerUnreachable, send, 3)
        await ends_with(Refused, grant.received(1), 1)
        await world.running(world.b)
        assert (target == 9).all()

    for freeze in (True, False, True):
        target[:] = 0
        world.run(body(freeze))


def test_cancelled_send_ends_the_receiver_too(world):
    size = BIG

    async def body():
        grant, send = await begin(world, size)
        send.cancel()
        await asyncio.gather(send, return_exceptions=True)
        assert send.cancelled()
        await ends_with(PeerUnreachable, grant.received(10), 5)

    world.run(body())


def test_own_mover_that_is_stuck_is_killed_before_cancel_returns(world):
    size, target = BIG, world.big_target

    async def body():
        grant, send = await begin(world, size)
        stuck = world.b.mover_pid
        os.kill(stuck, signal.SIGSTOP)
        await grant.cancel()
        target[:] = 9
        assert not Path(f"/proc/{stuck}").exists()
        await ends_with(PeerUnreachable, send, 3)
        await world.running(world.b)
        assert (target == 9).all()
        await world.move(Region("big-source", 0, size), Region("big-target", 0, size))

    world.run(body())


def test_a_cancel_that_is_cancelled_itself_ends_no_sooner(world):
    """Whoever takes a grant back is in a hurry twice: its region is not touched afterwards."""
    size, target = BIG, world.big_target

    async def body():
        grant, send = await begin(world, size)
        stuck = world.b.mover_pid
        os.kill(stuck, signal.SIGSTOP)
        taking_back = asyncio.create_task(grant.cancel())
        for _ in range(3):
            await asyncio.sleep(0.05)
            taking_back.cancel()
        await asyncio.wait({taking_back})
        assert taking_back.cancelled()
        target[:] = 9
        with contextlib.suppress(ProcessLookupError):
            os.kill(stuck, signal.SIGCONT)
        await asyncio.wait({send})
        await world.running(world.b)
        assert (target == 9).all()

    world.run(body())


def test_a_send_that_is_cancelled_twice_ends_no_sooner(world):
    """What is sent may be overwritten once `send` has ended, by whatever way."""
    size, target = BIG, world.big_target
    source = np.memmap(world.directory / "big-source", np.uint8, "r+", shape=(size,))
    before = source.copy()

    async def body():
        target[:] = 0
        _, send = await begin(world, size)
        stuck = world.a.mover_pid
        os.kill(stuck, signal.SIGSTOP)
        for _ in range(3):
            await asyncio.sleep(0.05)
            send.cancel()
        await asyncio.wait({send})
        assert send.cancelled()
        source[:] = before + 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(stuck, signal.SIGCONT)
        await world.running(world.a)
        assert ((target == before) | (target == 0)).all()

    try:
        world.run(body())
    finally:
        source[:] = before


# -- peers that die, freeze or were never there ---------------------------------------------------


def _held(pid):
    """Open descriptors and resident MiB of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return len(os.listdir(f"/proc/{pid}/fd")), int(anonymous.split()[1]) / 1024


def _kill_receivers(world, times):
    """Two receivers in turn, so that one starts again while the other one is killed."""
    size = 64 * MIB
    source, target = world.file("source", size, seed=3), world.file("target", size)
    chance = random.Random(times)

    async def one(receiver, length):
        await world.running(receiver)
        grant = await receiver.expect(Region("target", 0, length))
        to = (receiver.address, grant.nonce, Region("source", 0, length))
        send = asyncio.create_task(world.a.send(*to, 30))
        await asyncio.sleep(chance.uniform(0, 0.06))
        os.kill(receiver.mover_pid, signal.SIGKILL)
        begun_s = time.monotonic()
        (sent,) = await asyncio.gather(send, return_exceptions=True)
        assert time.monotonic() - begun_s < 5
        assert sent is None or isinstance(sent, PeerUnreachable)
        try:
            await grant.received(5)
            assert np.array_equal(target[:length], source[:length])
        except PeerUnreachable:
            pass

    async def body():
        second = await UcxTransport.start(world.descriptor, HOST)
        sender, held = world.a.mover_pid, []
        for i in range(times):
            await one((world.b, second)[i % 2], (1000, size)[i % 4 // 2])
            assert world.a.mover_pid == sender
            held.append(_held(sender))
        await second.close()
        await world.running(world.b)
        await world.move(Region("source", 0, size), Region("target", 0, size))
        descriptors, rss = zip(*held[times // 2 :], strict=True)
        assert max(descriptors) <= min(descriptors) + 3
        assert rss[-1] < held[times // 4][1] + 20
        print(f"descriptors {held[0][0]}..{held[-1][0]}, MiB {held[0][1]:.1f}..{held[-1][1]:.1f}")

    world.run(body())
    assert np.array_equal(target, source)


def test_kill_the_receiving_mover_at_random_moments(world, monkeypatch):
    """B070: the sender has an error within 5 s, lives, and grows neither memory nor descriptors."""
    monkeypatch.setattr(ucx, "PAUSE_S", (0.01, 0.02))
    _kill_receivers(world, 20)


@pytest.mark.slow
def test_kill_the_receiving_mover_a_hundred_times(world, monkeypatch):
    """B070."""
    monkeypatch.setattr(ucx, "PAUSE_S", (0.01, 0.02))
    _kill_receivers(world, 100)


def test_kill_the_sending_mover(world):
    size = BIG

    async def body():
        grant, send = await begin(world, size)
        os.kill(world.a.mover_pid, signal.SIGKILL)
        await ends_with(PeerUnreachable, grant.received(10), 5)
        await ends_with(PeerUnreachable, send, 2, "our own mover ended with -9")
        await world.running(world.a)
        await world.move(Region("big-source", 0, size), Region("big-target", 0, size))

    world.run(body())


def test_frozen_receiver_is_unreachable_after_the_silent_time(world):
    size, target = BIG, world.big_target

    async def body():
        grant, send = await begin(world, size)
        os.kill(world.b.mover_pid, signal.SIGSTOP)
        await ends_with(PeerUnreachable, send, 3.5, "silent for 2")
        os.kill(world.b.mover_pid, signal.SIGCONT)
        await ends_with(PeerUnreachable, grant.received(5), 5)
        target[:] = 9
        await world.move(Region("big-source", 0, MIB), Region("big-target", 0, MIB))
        assert (target[MIB:] == 9).all()

    world.run(body())


def test_frozen_sender_is_unreachable_after_the_piece_deadline(world):
    size, target = BIG, world.big_target

    async def body():
        grant, send = await begin(world, size)
        os.kill(world.a.mover_pid, signal.SIGSTOP)
        await ends_with(PeerUnreachable, grant.received(10), 4, "did not arrive within 1.0 s")
        target[:] = 9
        os.kill(world.a.mover_pid, signal.SIGCONT)
        await ends_with(PeerUnreachable, send, 3)
        await world.running(world.b)
        assert (target == 9).all()

    world.run(body())


def test_nobody_there(world):
    world.file("source", 1000, seed=1)
    with socket.create_server((HOST, 0)) as mute, socket.socket() as bound:
        bound.bind((HOST, 0))
        mute_at, refused_at = mute.getsockname()[1], bound.getsockname()[1]

        async def body():
            mover = world.a.mover_pid

            def send(address, timeout_s=20.0):
                return world.a.send(address, "00" * 16, Region("source", 0, 1000), timeout_s)

            await asyncio.gather(
                ends_with(PeerUnreachable, send(f"{HOST}:{refused_at}"), 3),
                ends_with(PeerUnreachable, send(f"{HOST}:{mute_at}"), 3.5, "silent for 2"),
                ends_with(PeerUnreachable, send(f"{HOST}:{mute_at}", 0.5), 2, "within 0.5 s"),
                ends_with(PeerUnreachable, send("no-such-host.invalid:1"), 20),
                ends_with(UsageError, send("nonsense"), 1, "needs host:port"),
            )
            await world.running(world.a)
            assert world.a.mover_pid == mover

        world.run(body())


@pytest.mark.parametrize("times", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_close_right_after_send_loses_nothing(world, times):
    """B079."""
    size = 3 * MIB
    source, target = world.file("source", size, seed=3), world.file("target", size)

    async def body():
        for _ in range(times):
            target[:] = 0
            sender = await UcxTransport.start(world.descriptor, HOST)
            grant = await world.b.expect(Region("target", 0, size))
            await sender.send(world.b.address, grant.nonce, Region("source", 0, size), 10)
            await sender.close()
            await grant.received(0.5)
            assert np.array_equal(source, target)

    world.run(body())


def test_close_ends_what_is_open(world):
    world.file("target", MIB)

    async def body():
        transport = await UcxTransport.start(world.descriptor, HOST)
        grant = await transport.expect(Region("target", 0, MIB))
        waiting = asyncio.create_task(grant.received(20))
        await asyncio.sleep(0)
        pid = transport.mover_pid
        await transport.close()
        assert not Path(f"/proc/{pid}").exists()
        await ends_with(PeerUnreachable, waiting, 1)
        await ends_with(PeerUnreachable, transport.expect(Region("target", 0, MIB)), 1)

    world.run(body())


# -- the end of an agent's process ----------------------------------------------------------------

SENDER = """
import asyncio, os, sys
from p2pckpt.backends.ucx import UcxTransport
from p2pckpt.ports import Region
end, address, nonce, where, size = sys.argv[1:]
def descriptor(file, writable):
    return os.open(f"{where}/{file}", os.O_RDWR)
async def main():
    transport = await UcxTransport.start(descriptor, "127.0.0.1")
    sending = transport.send(address, nonce, Region("big-source", 0, int(size)), 30)
    sending = asyncio.create_task(sending)
    print(transport.mover_pid, flush=True)
    told = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    await asyncio.wait((sending, told), return_when=asyncio.FIRST_COMPLETED)
    assert not sending.done(), sending
    if end == "exception":
        raise ArithmeticError
asyncio.run(main())
"""


def _end_in_mid_transfer(world, end, expected):
    """A process sends and ends, in its own way, when a part has arrived."""
    arguments = (sys.executable, "-c", SENDER, end, world.b.address)

    async def body():
        await world.running(world.b)
        before = world.b.received_total_bytes
        grant = await world.b.expect(Region("big-target", 0, BIG))
        where = str(world.directory)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        sender = await asyncio.create_subprocess_exec(
            *arguments, grant.nonce, where, str(BIG), **pipes
        )
        try:
            mover = int(await asyncio.wait_for(sender.stdout.readline(), 20))
            deadline = time.monotonic() + 10
            while world.b.received_total_bytes == before:
                assert time.monotonic() < deadline
                await asyncio.sleep(0)
            begun_s = time.monotonic()
            if end == "SIGTERM":
                sender.terminate()
            _, err = await asyncio.wait_for(sender.communicate(b"\n"), 10)
        finally:
            if sender.returncode is None:
                sender.kill()
                await sender.wait()
        assert sender.returncode == expected, err.decode()
        await ends_with(PeerUnreachable, grant.received(10), 5)
        while Path(f"/proc/{mover}/exe").exists():
            await asyncio.sleep(0.01)
            assert time.monotonic() - begun_s < 5
        assert time.monotonic() - begun_s < 5

    world.run(body())


ENDS = {"return": 0, "exception": 1, "SIGTERM": -signal.SIGTERM}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_in_mid_transfer(world, end):
    """B081: native code runs in the mover, a process of its own, so no thread of it is in the way:
    both are gone within 5 s, with the code that was to be expected."""
    _end_in_mid_transfer(world, end, ENDS[end])


@pytest.mark.slow
def test_a_process_ends_in_mid_transfer_a_hundred_times(world):
    """B081."""
    for _ in range(33):
        for end, expected in ENDS.items():
            _end_in_mid_transfer(world, end, expected)
