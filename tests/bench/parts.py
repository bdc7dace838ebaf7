"""Parts of the data path alone: coding and checksums on one thread, the transport beside a socket.

Each is measured in turn with what it is compared to, so that a neighbour's noise hits both.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from p2pckpt.backends.ucx import UcxTransport
from p2pckpt.coding.checksum import crc32c
from p2pckpt.coding.reed_solomon import Code
from p2pckpt.ports import Region
from p2pckpt.records import Layout
from p2pckpt.save.encode import encode_rank, shard_bytes

CHUNK_BYTES = 256 * 1024
SEND_BYTES = 4 << 20
HOT_BYTES = 128 * 1024
HOT_ROUNDS = 8
HOT_BATCHES = 50
TIMEOUT_S = 60.0


def send_bytes(sock: socket.socket, source: np.ndarray, size: int) -> None:
    """Send `size` bytes from `source`, round and round."""
    sent = 0
    while sent < size:
        at = sent % len(source)
        sent += sock.send(source[at : min(at + SEND_BYTES, at + size - sent)])


def receive_bytes(sock: socket.socket, target: np.ndarray, size: int) -> None:
    """Receive `size` bytes into `target`, round and round."""
    got = 0
    while got < size:
        at = got % len(target)
        found = sock.recv_into(target[at : min(at + SEND_BYTES, at + size - got)])
        if not found:
            raise ConnectionResetError(f"the peer closed after {got} of {size} bytes")
        got += found


def kernel_seconds(k: int, m: int, size: int) -> float:
    """Seconds for rs(k, m) and CRC32C over `size` bytes by kernels that work in the cache.

    The best of many short batches: this is what the processor can do, not what it did today.
    """
    code = Code(k, m)
    columns = list(np.ones((k + m, HOT_BYTES), np.uint8))

    def batch() -> None:
        for _ in range(HOT_ROUNDS):
            code.encode(columns[:k], columns[k:])
            for column in columns:
                crc32c(column)

    best_s = min(_seconds(batch) for _ in range(HOT_BATCHES))
    return best_s * size / (HOT_ROUNDS * k * HOT_BYTES)


def encoding(layout: str, size: int, runs: int) -> list[tuple[float, float, float]]:
    """(encode and CRC, copy, kernels in cache) of `size` bytes on one thread; seconds a run."""
    torch.set_num_threads(1)
    parsed = Layout.parse(layout)
    source = torch.arange(size // 8, dtype=torch.int64)
    target = torch.zeros_like(source).fill_(1)
    image = memoryview(source.numpy()).cast("B")
    piece = shard_bytes(len(image), parsed, CHUNK_BYTES)
    parity = [memoryview(np.ones(piece, np.uint8)) for _ in range(parsed.m)]
    out = []
    for _ in range(runs):
        copies = [_seconds(lambda: target.copy_(source))]
        coded = _seconds(lambda: encode_rank(0, image, parity, parsed, CHUNK_BYTES))
        copies += [_seconds(lambda: target.copy_(source))]
        out.append((coded, sum(copies) / 2, kernel_seconds(parsed.k, parsed.m, size)))
    return out


def _seconds(work) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


# -- the transport --------------------------------------------------------------------------------


def moving(size: int, runs: int, ram: Path) -> list[tuple[float, float]]:
    """(UCX, raw socket) seconds to move `size` bytes from one process's file to another's."""
    directory = Path(tempfile.mkdtemp(prefix=f"p2pckpt-bench-{os.getpid()}-", dir=ram))
    try:
        for name in ("source", "target"):
            np.ones(size, np.uint8).tofile(directory / name)
        with raw_socket(directory / "source", directory / "target", size) as by_socket:
            return asyncio.run(_moving(directory, size, runs, by_socket))
    finally:
        shutil.rmtree(directory)


async def _moving(directory: Path, size: int, runs: int, by_socket) -> list[tuple[float, float]]:
    def descriptor(file: str, writable: bool) -> int:
        return os.open(directory / file, os.O_RDWR if writable else os.O_RDONLY)

    a = await UcxTransport.start(descriptor, "127.0.0.1")
    b = await UcxTransport.start(descriptor, "127.0.0.1")

    async def by_ucx() -> float:
        begun = time.perf_counter()
        grant = await b.expect(Region("target", 0, size))
        await a.send(b.address, grant.nonce, Region("source", 0, size), TIMEOUT_S)
        await grant.received(TIMEOUT_S)
        return time.perf_counter() - begun

    try:
        await by_ucx()  # maps the files and connects
        return [(await by_ucx(), by_socket()) for _ in range(runs)]
    finally:
        await a.close()
        await b.close()


@contextmanager
def raw_socket(source: Path, target: Path, size: int) -> Iterator:
    """A call that moves `size` bytes over a TCP connection between two processes; its seconds."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receiver, args=(theirs, target, size), daemon=True)
    process.start()
    theirs.close()
    data = np.memmap(source, np.uint8, "r", shape=(size,))
    try:
        if not ours.poll(TIMEOUT_S):
            raise TimeoutError("the receiving process does not start")
        with socket.create_connection(("127.0.0.1", ours.recv()), TIMEOUT_S) as sock:

            def move() -> float:
                begun = time.perf_counter()
                send_bytes(sock, data, size)
                ours.recv()
                return time.perf_counter() - begun

            move()
            yield move
    finally:
        process.kill()
        process.join(TIMEOUT_S)
        ours.close()


def _receiver(pipe, target: Path, size: int) -> None:
    memory = np.memmap(target, np.uint8, "r+", shape=(size,))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        sock, _ = listener.accept()
    try:
        while True:
            receive_bytes(sock, memory, size)
            pipe.send(True)
    except OSError:
        pass
