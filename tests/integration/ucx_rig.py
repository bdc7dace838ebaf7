"""What the tests of the UCX transport share: two transports over files, and a rogue peer."""

import asyncio
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from p2pckpt.backends import ucx_flow as flow
from p2pckpt.backends.ucx import UcxTransport
from p2pckpt.backends.ucx_child import ENVIRONMENT
from p2pckpt.errors import PeerUnreachable
from p2pckpt.ports import Region

if importlib.util.find_spec("ucxx") is None:
    pytest.skip("needs p2pckpt[ucx-cu12]", allow_module_level=True)

MIB = 1 << 20
HOST = "127.0.0.1"
BIG = 200 * MIB
"""Takes long enough for something to happen in the middle."""
QUICK = flow.Limits(piece_s=1.0, silent_s=2.0, floor_bytes_per_s=100e6)
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

        self.file("big-source", BIG, seed=3)
        self.big_target = self.file("big-target", BIG)

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


@contextmanager
def ucx_world():
    """Two transports that share a loop; a test that kills a mover waits for the next one."""
    directory = tempfile.mkdtemp(prefix="p2pckpt-test-", dir="/dev/shm")
    try:
        with asyncio.Runner() as runner:
            made = World(runner, directory)
            yield made
            runner.run(made.a.close())
            runner.run(made.b.close())
    finally:
        shutil.rmtree(directory)


async def ends_with(error, awaitable, within_s, match=None):
    """The call raises `error` within the bound; returns the message."""
    begun_s = time.monotonic()
    with pytest.raises(error, match=match) as found:
        await awaitable
    assert time.monotonic() - begun_s < within_s
    return str(found.value)


async def begin(world, size):
    """A transfer of which a part has landed: grant and send task."""
    before = world.b.received_total_bytes
    grant = await world.b.expect(Region("big-target", 0, size))
    send = asyncio.create_task(
        world.a.send(world.b.address, grant.nonce, Region("big-source", 0, size), 30)
    )
    end = time.monotonic() + 10
    while world.b.received_total_bytes == before:
        assert time.monotonic() < end
        await asyncio.sleep(0)
    return grant, send
