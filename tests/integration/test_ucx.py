"""Real movers, real UCX: bytes arrive exactly, and only by the receiver's grant.

Peers that break the protocol are played by a process that speaks it wrongly (`ucx_rig.ROGUE`).
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ucx_rig import HOST, MIB, ends_with, ucx_world

from p2pckpt.backends import ucx_flow as flow
from p2pckpt.backends.ucx import UcxTransport
from p2pckpt.errors import (
    IntegrityError,
    MissingDependency,
    PeerUnreachable,
    Refused,
    UsageError,
)
from p2pckpt.ports import Region


@pytest.fixture(scope="module")
def world():
    with ucx_world() as made:
        yield made


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


@pytest.mark.parametrize("times", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_new_content_at_the_same_address_and_new_file_of_the_same_name(world, times):
    """B076."""
    target = world.file("target", MIB)
    for i in range(times):
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


def test_offering_another_length_names_both(world):
    """B077."""
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
        ("short", IntegrityError, "999.*1000"),
        ("long", IntegrityError, "1001.*1000"),
        ("flood", PeerUnreachable, "breaks the protocol: OFFER out of turn"),
        ("mute", PeerUnreachable, "1000 bytes at 0 did not arrive within 1.0 s"),
    ],
)
def test_rogue_sender_with_the_nonce(world, mode, error, match):
    """B077: 1,000 bytes are announced and 999, 1,001, too many messages or none come; nothing
    outside the region changes."""
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
    assert "ucxx" not in sys.modules  # nor its settings in our environment
    assert not [name for name in os.environ if name.startswith("UCX")]


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
