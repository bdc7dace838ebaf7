"""Real movers, real UCX, real faults: bytes arrive exactly, or the error says what happened.

Two transports share one loop for the whole module; a test that kills a mover waits for the next.
Peers that break the protocol are played by a process that speaks it wrongly (ROGUE).
"""

import asyncio
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from p2pckpt.backends import ucx
from p2pckpt.backends import ucx_flow as flow
from p2pckpt.backends.ucx import UcxTransport
from p2pckpt.backends.ucx_child import ENVIRONMENT
from p2pckpt.errors import (
    IntegrityError,
    MissingDependency,
    PeerUnreachable,
    Refused,
    UsageError,
)
from p2pckpt.ports import Region

if importlib.util.find_spec("ucxx") is None:
    pytest.skip("needs p2pckpt[ucx-cu12]", allow_module_level=True)

MIB = 1 << 20
HOST = "127.0.0.1"
QUICK = flow.Limits(piece_s=1.0, silent_s=2.0)
"""Deadlines in the tests, to save time; that they reach the mover is tested with others."""

ROGUE = """
import sys, time
from p2pckpt.backends import ucx
from p2pckpt.backends import ucx_flow as flow
from p2pckpt.backends.ucx_line import Line, ucx
port, nonce, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
context = ucx.UCXContext({}, (ucx.Feature.TAG, ucx.Feature.STREAM, ucx.Feature.WAKEUP))
worker = ucx.UCXWorker(context)
worker.init_blocking_progress_mode()
line = Line(worker, ucx.UCXEndpoint.create(worker, "127.0.0.1", port, True), "victim", 0.0)
offer = flow.Frame(flow.Kind.OFFER, nonce, length=1000)
if mode == "version":
    data = bytearray(offer.pack())
    data[4] = 77
    class Old:
        def pack(self): return bytes(data)
    line.say(Old())
elif mode == "flood":
    for _ in range(2000):
        line.say(offer)
else:
    line.say(offer)
refused, end = 0, time.monotonic() + 10
try:
    while time.monotonic() < end:
        worker.progress_worker_event(20)
        line.settle()
        frame = line.hear()
        if frame is None:
            continue
        print(frame.kind.name, flush=True)
        if frame.kind is flow.Kind.GRANT and mode in ("short", "long"):
            line.send(memoryview(bytearray(999 if mode == "short" else 1001)), frame.tag)
        if frame.kind is flow.Kind.REFUSED and mode == "guess":
            line.say(offer)
except Exception as e:
    print("broken", type(e).__name__, flush=True)
"""


class World:
    """Two transports over one directory of files."""

    def __init__(self, runner, directory):
        self.run = runner.run
        self.directory = Path(directory)
        self.a = self.run(UcxTransport.start(self.descriptor, HOST, limits=QUICK))
        self.b = self.run(UcxTransport.start(self.descriptor, HOST, limits=QUICK))

    def descriptor(self, file, writable):
        return os.open(self.directory / file, os.O_RDWR if writable else os.O_RDONLY)

    def file(self, name, size_bytes, seed=None):
        """A new file (new inode) of this name: zeros, or random by seed."""
        path = self.directory / name
        path.unlink(missing_ok=True)
        path.touch()
        os.truncate(path, max(size_bytes, 1))
        data = np.memmap(path, np.uint8, "r+", shape=(max(size_bytes, 1),))
        if seed is not None:
            data[:] = np.random.default_rng(seed).integers(0, 256, data.size, np.uint8)
        return data

    async def running(self, transport):
        """Wait until the transport's mover takes work (again)."""
        (self.directory / "probe").touch()
        end = time.monotonic() + 20
        while True:
            try:
                grant = await transport.expect(Region("probe", 0, 0))
                await grant.cancel()
                return
            except PeerUnreachable:
                assert time.monotonic() < end

    async def move(self, source, target, timeout_s=20.0):
        """Send a region from a to b and wait for it there."""
        grant = await self.b.expect(target)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.a.send(self.b.address, grant.nonce, source, timeout_s))
            group.create_task(grant.received(timeout_s))

    def rogue(self, grant, mode):
        port = self.b.address.split(":")[1]
        return subprocess.Popen(
            [sys.executable, "-c", ROGUE, port, grant.nonce, mode],
            stdout=subprocess.PIPE,
            text=True,
            env={**ENVIRONMENT, **os.environ},
        )


@pytest.fixture(scope="module")
def world():
    directory = tempfile.mkdtemp(prefix="p2pckpt-test-", dir="/dev/shm")
    with asyncio.Runner() as runner:
        made = World(runner, directory)
        yield made
        runner.run(made.a.close())
        runner.run(made.b.close())
    shutil.rmtree(directory)


async def ends_with(error, awaitable, within_s, match=None):
    """The call raises `error` within the bound; returns the message."""
    begun_s = time.monotonic()
    with pytest.raises(error, match=match) as found:
        await awaitable
    assert time.monotonic() - begun_s < within_s
    return str(found.value)


# -- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 1000, 70_000, 8 * MIB, 8 * MIB + 1, 37 * MIB + 5])
def test_exactly_the_region_arrives(world, length):
    source, target = (
        world.file("source", length + 77, seed=length),
        world.file("target", length + 9),
    )
    before = world.b.received_total_bytes
    world.run(world.move(Region("source", 77, length), Region("target", 4, length)))
    assert np.array_equal(target[4 : 4 + length], source[77 : 77 + length])
    assert not target[:4].any()
    assert not target[4 + length :].any()
    assert world.b.received_total_bytes - before == length


def test_many_at_once_in_both_directions_and_to_oneself(world):
    size = 9 * MIB
    source, target = world.file("source", size, seed=5), world.file("target", 9 * size)
    moves = [(world.a, world.b), (world.b, world.a), (world.a, world.a)] * 3

    async def body():
        async with asyncio.TaskGroup() as group:
            for i, (sender, receiver) in enumerate(moves):
                grant = await receiver.expect(Region("target", i * size, size))
                to = (receiver.address, grant.nonce, Region("source", 0, size))
                group.create_task(sender.send(*to, 20))
                group.create_task(grant.received(20))

    world.run(body())
    assert np.array_equal(target, np.tile(source, 9))


def test_new_content_at_the_same_address_and_new_file_of_the_same_name(world):  # B076
    target = world.file("target", MIB)
    for i in range(60):
        if i % 2 == 0:
            source = world.file("source", MIB, seed=i)
        else:
            source[:] = np.random.default_rng(i).integers(0, 256, MIB, np.uint8)
        world.run(world.move(Region("source", 0, MIB), Region("target", 0, MIB)))
        assert np.array_equal(source, target)


def test_a_removed_file_is_unmapped_and_forget_does_so_at_once(world):
    async def unmapped(transport, name):
        end = time.monotonic() + 5
        while f"/{name}" in Path(f"/proc/{transport.mover_pid}/maps").read_text():
            assert time.monotonic() < end
            await asyncio.sleep(0.02)

    async def body():
        await world.move(Region("old", 0, MIB), Region("target", 0, MIB))
        assert "/old" in Path(f"/proc/{world.a.mover_pid}/maps").read_text()
        (world.directory / "old").unlink()
        await unmapped(world.a, "old")
        world.b.forget("target")
        await unmapped(world.b, "target")

    world.file("old", MIB, seed=1)
    world.file("target", MIB)
    world.run(body())


def test_region_outside_the_file_is_refused(world):
    world.file("target", 1000)
    with pytest.raises(UsageError, match="region of 1000 bytes at 1, the file has 1000"):
        world.run(world.b.expect(Region("target", 1, 1000)))


# -- grants ---------------------------------------------------------------------------------------


def test_unknown_cancelled_and_used_nonces_are_refused_and_change_nothing(world):
    world.file("source", MIB, seed=1)
    target = world.file("target", MIB)

    async def body():
        region = Region("source", 0, MIB)
        send = lambda nonce: world.a.send(world.b.address, nonce, region, 10)  # noqa: E731
        await ends_with(Refused, send("ab" * 16), 3, "abababab: unknown or cancelled")
        grant = await world.b.expect(Region("target", 0, MIB))
        await grant.cancel()
        await grant.cancel()
        await ends_with(Refused, grant.received(1), 1)
        await ends_with(Refused, send(grant.nonce), 3, "unknown or cancelled")
        assert not target.any()
        grant = await world.b.expect(Region("target", 0, MIB))
        await send(grant.nonce)
        await grant.received(1)
        await grant.cancel()
        await grant.received(1)
        target[:] = 0
        await ends_with(Refused, send(grant.nonce), 3)
        assert not target.any()
        assert world.b.received_bytes[grant.nonce[:8]] == MIB

    world.run(body())


def test_offering_another_length_names_both(world):  # B077
    world.file("source", MIB, seed=1)
    target = world.file("target", MIB)

    async def body():
        for length in (999, 1001, 0):
            grant = await world.b.expect(Region("target", 0, 1000))
            send = world.a.send(world.b.address, grant.nonce, Region("source", 0, length), 10)
            await ends_with(Refused, send, 3, f"needs 1000 bytes, the sender has {length}")
            await ends_with(IntegrityError, grant.received(3), 3, f"1000 bytes.* has {length}")

    world.run(body())
    assert not target.any()


@pytest.mark.parametrize(
    ("mode", "error", "match"),
    [
        ("short", IntegrityError, "999.*1000"),  # B077: announced 1000, sent 999
        ("long", IntegrityError, "1001.*1000"),
        ("flood", PeerUnreachable, "breaks the protocol: OFFER out of turn"),
        ("mute", PeerUnreachable, "1000 bytes at 0 did not arrive within 1.0 s"),
    ],
)
def test_rogue_sender_with_the_nonce(world, mode, error, match):
    target = world.file("target", 3000)
    target[:] = 7

    async def body():
        grant = await world.b.expect(Region("target", 1000, 1000))
        with world.rogue(grant, mode) as peer:
            await ends_with(error, grant.received(15), 15, match)
            said = await asyncio.to_thread(peer.communicate, None, 20)
        assert "DONE" not in said[0]
        assert "broken" in said[0]
        pid = world.b.mover_pid
        await world.running(world.b)
        assert world.b.mover_pid == pid

    world.run(body())
    assert (target[:1000] == 7).all()
    assert (target[2000:] == 7).all()


@pytest.mark.parametrize(("mode", "refusals"), [("guess", 16), ("version", 0)])
def test_rogue_sender_without_a_nonce_is_dropped(world, mode, refusals):
    class Guess:
        nonce = "00" * 16

    async def body():
        with world.rogue(Guess, mode) as peer:
            said, _ = await asyncio.to_thread(peer.communicate, None, 20)
        assert said.count("REFUSED") == refusals
        assert "broken" in said
        await world.running(world.b)

    world.run(body())


async def _begin(world, size):
    """A transfer of which a part has landed: grant and send task."""
    before = world.b.received_total_bytes
    grant = await world.b.expect(Region("target", 0, size))
    send = asyncio.create_task(
        world.a.send(world.b.address, grant.nonce, Region("source", 0, size), 30)
    )
    end = time.monotonic() + 10
    while world.b.received_total_bytes == before:
        assert time.monotonic() < end
        await asyncio.sleep(0)
    return grant, send


def test_cancel_in_mid_transfer_with_a_sender_that_stops_and_resumes(world):
    """The sender is frozen with granted pieces on the way; after cancel not one byte changes."""
    size = 200 * MIB
    world.file("source", size, seed=3)
    target = world.file("target", size)

    async def body(freeze):
        grant, send = await _begin(world, size)
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
    size = 200 * MIB
    world.file("source", size, seed=3)
    world.file("target", size)

    async def body():
        grant, send = await _begin(world, size)
        send.cancel()
        await asyncio.gather(send, return_exceptions=True)
        assert send.cancelled()
        await ends_with(PeerUnreachable, grant.received(10), 5)

    world.run(body())


def test_own_mover_that_is_stuck_is_killed_before_cancel_returns(world):
    size = 200 * MIB
    world.file("source", size, seed=3)
    target = world.file("target", size)

    async def body():
        grant, send = await _begin(world, size)
        stuck = world.b.mover_pid
        os.kill(stuck, signal.SIGSTOP)
        await grant.cancel()
        target[:] = 9
        assert not Path(f"/proc/{stuck}").exists()
        await ends_with(PeerUnreachable, send, 3)
        await world.running(world.b)
        assert (target == 9).all()
        await world.move(Region("source", 0, size), Region("target", 0, size))

    world.run(body())


# -- peers that die, freeze or were never there ---------------------------------------------------


def _held(pid):
    """Open descriptors and resident MiB of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return len(os.listdir(f"/proc/{pid}/fd")), int(anonymous.split()[1]) / 1024


def _kill_receivers(world, times):  # B070
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
    monkeypatch.setattr(ucx, "PAUSE_S", (0.01, 0.02))
    _kill_receivers(world, 20)


@pytest.mark.slow
def test_kill_the_receiving_mover_a_hundred_times(world, monkeypatch):
    monkeypatch.setattr(ucx, "PAUSE_S", (0.01, 0.02))
    _kill_receivers(world, 100)


def test_kill_the_sending_mover(world):
    size = 200 * MIB
    world.file("source", size, seed=3)
    world.file("target", size)

    async def body():
        grant, send = await _begin(world, size)
        os.kill(world.a.mover_pid, signal.SIGKILL)
        await ends_with(PeerUnreachable, grant.received(10), 5)
        await ends_with(PeerUnreachable, send, 2, "our own mover ended with -9")
        await world.running(world.a)
        await world.move(Region("source", 0, size), Region("target", 0, size))

    world.run(body())


def test_frozen_receiver_is_unreachable_after_the_silent_time(world):
    size = 200 * MIB
    world.file("source", size, seed=3)
    target = world.file("target", size)

    async def body():
        grant, send = await _begin(world, size)
        os.kill(world.b.mover_pid, signal.SIGSTOP)
        await ends_with(PeerUnreachable, send, 3.5, "silent for 2")
        os.kill(world.b.mover_pid, signal.SIGCONT)
        await ends_with(PeerUnreachable, grant.received(5), 5)
        target[:] = 9
        await world.move(Region("source", 0, MIB), Region("target", 0, MIB))
        assert (target[MIB:] == 9).all()

    world.run(body())


def test_frozen_sender_is_unreachable_after_the_piece_deadline(world):
    size = 200 * MIB
    world.file("source", size, seed=3)
    target = world.file("target", size)

    async def body():
        grant, send = await _begin(world, size)
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


def test_close_right_after_send_loses_nothing(world):  # B079
    size = 3 * MIB
    source, target = world.file("source", size, seed=3), world.file("target", size)

    async def body():
        for _ in range(4):
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


# -- the mover as a child -------------------------------------------------------------------------


def test_restarted_mover_keeps_the_port(world):
    async def body():
        address, pid = world.b.address, world.b.mover_pid
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0)
        while world.b.mover_pid == pid:
            await asyncio.sleep(0.02)
        await world.running(world.b)
        assert world.b.address == address

    world.run(asyncio.wait_for(body(), 30))


def test_describe_says_what_is_really_used(world):
    facts = world.a.describe()
    assert facts["address"] == world.a.address
    assert facts["ucx"].count(".") == 2
    assert "tcp/lo" in facts["transports"]
    assert facts["prefers"] == "wheel"
    assert Path(facts["library"]).exists()
    assert "ucxx" not in sys.modules or "UCX_TLS" not in os.environ


def test_missing_bindings_name_the_extra(world, tmp_path):
    (tmp_path / "ucxx").mkdir()
    (tmp_path / "ucxx" / "__init__.py").write_text("raise ImportError('no such library')")
    environment = {"PYTHONPATH": str(tmp_path)}
    with pytest.raises(MissingDependency, match=r"p2pckpt\[ucx-cu12\].*no such library"):
        world.run(UcxTransport.start(world.descriptor, HOST, environment=environment))


def test_mover_that_cannot_start_is_reported(world):
    environment = {"UCX_TLS": "nonsense"}
    with pytest.raises(PeerUnreachable, match="did not start"):
        world.run(UcxTransport.start(world.descriptor, HOST, environment=environment))


def test_mover_dies_with_its_agent(world):
    script = (
        "import asyncio, os, signal\n"
        "from p2pckpt.backends.ucx import UcxTransport\n"
        "async def main():\n"
        "    t = await UcxTransport.start(None, '127.0.0.1')\n"
        "    print(t.mover_pid, flush=True)\n"
        "    os.kill(t.mover_pid, signal.SIGSTOP)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    agent = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=30)
    pid = int(agent.stdout)
    end = time.monotonic() + 5
    while Path(f"/proc/{pid}/exe").exists():
        assert time.monotonic() < end
        time.sleep(0.02)


# -- throughput -----------------------------------------------------------------------------------


def _raw_seconds(source, target):
    """The same bytes through one TCP socket between two threads."""
    with socket.create_server((HOST, 0)) as server:
        begun_s = time.monotonic()

        def push():
            with socket.create_connection(server.getsockname()) as to:
                to.sendall(source)

        pusher = threading.Thread(target=push)
        pusher.start()
        with server.accept()[0] as come:
            view, at = memoryview(target), 0
            while at < len(view):
                at += come.recv_into(view[at : at + MIB])
        pusher.join()
        return time.monotonic() - begun_s


@pytest.mark.slow
def test_throughput_against_a_raw_socket(world):
    size = 256 * MIB
    source, target = world.file("source", size, seed=3), world.file("target", size)
    region = (Region("source", 0, size), Region("target", 0, size))
    ours, raw = [], []
    for _ in range(7):
        begun_s = time.monotonic()
        world.run(world.move(*region))
        ours.append(time.monotonic() - begun_s)
        raw.append(_raw_seconds(source, target))
    ours_s, raw_s = sorted(ours)[3], sorted(raw)[3]
    print(f"UCX {size / ours_s / 1e9:.2f} GB/s, raw TCP {size / raw_s / 1e9:.2f} GB/s (medians)")
    assert ours_s < 2 * raw_s


def test_limits_travel_to_the_mover(world):
    async def body():
        limits = flow.Limits(piece_bytes=MIB, open_pieces=1, silent_s=1.0)
        transport = await UcxTransport.start(world.descriptor, HOST, limits=limits)
        with socket.create_server((HOST, 0)) as mute:
            to = f"{HOST}:{mute.getsockname()[1]}"
            send = transport.send(to, "00" * 16, Region("source", 0, MIB), 20)
            await ends_with(PeerUnreachable, send, 3, "silent for 1")
        grant = await transport.expect(Region("target", 0, 5 * MIB))
        await world.a.send(transport.address, grant.nonce, Region("source", 0, 5 * MIB), 10)
        await grant.received(5)
        await transport.close()

    source, target = world.file("source", 5 * MIB, seed=3), world.file("target", 5 * MIB)
    world.run(body())
    assert np.array_equal(source, target)
