"""One rank, told over a pipe what to do: a process of its own, as under any launcher.

    driver --(method, arguments)--> rank --(result | error)--> driver

Times that are returned are of the machine's monotonic clock, so that those of two ranks can be
compared. A rank that is told nothing more, because the driver died, ends.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

import p2pckpt
from p2pckpt.coding.checksum import chunk_table, copy_and_check
from tests.bench import parts
from tests.bench import state as states

WAIT_S = 120.0
CHUNK_BYTES = 256 * 1024


class Rank:
    """The state of a rank and what is done with it."""

    def __init__(self, rank: int, scale: float, seed: int | None) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        self.state = states.empty(scale)
        if seed is not None:
            states.fill(self.state, seed + rank)
        self._copy = states.Copy(self.state)
        self._store: p2pckpt.Checkpointer | None = None
        self._listener: socket.socket | None = None

    def bytes(self) -> int:
        """Of all tensors."""
        return self._copy.bytes

    def copy(self) -> float:
        """Seconds of one copy into warm memory."""
        return self._copy.seconds()

    # -- the product ------------------------------------------------------------------------------

    def join(self, agent: str, world: int, token: str, layout: str) -> None:
        """Take a seat in the job."""
        launch = p2pckpt.Launch(self.rank, world, token)
        self._store = p2pckpt.Checkpointer(
            "bench", layout=layout, agent=agent, launch=launch, on_error="raise"
        )

    def digest(self) -> str:
        """Of the state as it is now."""
        return states.digest(self.state)

    def save(self, step: int, change: bool) -> dict[str, float]:
        """Save and wait until the step is committed; ``change`` every tensor as soon as we may."""
        assert self._store is not None
        begun = time.perf_counter()
        handle = self._store.save(step, self.state)
        returned = time.perf_counter()
        if change:
            states.change(self.state)
        handle.wait(WAIT_S)
        return {"begun": begun, "returned": returned, "ended": time.perf_counter()}

    def restore(self) -> dict[str, Any]:
        """Restore the newest step."""
        assert self._store is not None
        begun = time.perf_counter()
        step = self._store.restore(self.state, timeout_s=WAIT_S)
        ended = time.perf_counter()
        found = self._store.restored
        assert found is not None
        return {
            "begun": begun,
            "ended": ended,
            "step": step,
            "digest": states.digest(self.state),
            "source": found.source,
            "seconds": found.seconds,
        }

    # -- what the machine can do ------------------------------------------------------------------

    def fresh(self, directory: str) -> float:
        """Seconds to make a file in RAM and write the state into it: pages cleared, then filled."""
        size = self._copy.bytes
        with tempfile.TemporaryFile(dir=directory) as file:
            begun = time.perf_counter()
            os.posix_fallocate(file.fileno(), 0, size)
            memory = np.memmap(file, np.uint8, "r+", shape=(size,))
            at = 0
            for tensor in states.tensors(self.state):
                source = states.raw(tensor)
                np.copyto(memory[at : at + len(source)], source)
                at += len(source)
            seconds = time.perf_counter() - begun
            del memory
        return seconds

    def check(self) -> float:
        """Seconds of one CRC32C pass over the state."""
        begun = time.perf_counter()
        for tensor in states.tensors(self.state):
            chunk_table(states.raw(tensor), CHUNK_BYTES)
        return time.perf_counter() - begun

    def check_and_copy(self) -> float:
        """Seconds of a copy that checks every chunk on its way."""
        pairs = [(states.raw(target), states.raw(source)) for target, source in self._copy.pairs]
        tables = [chunk_table(source, CHUNK_BYTES) for _, source in pairs]
        self.copy()
        begun = time.perf_counter()
        for (target, source), table in zip(pairs, tables, strict=True):
            assert not copy_and_check(target, source, CHUNK_BYTES, table)
        return time.perf_counter() - begun

    def code(self, k: int, m: int) -> float:
        """Seconds to code and check the state's bytes if none had to be fetched from memory."""
        return parts.kernel_seconds(k, m, self._copy.bytes)

    def listen(self) -> int:
        """The port of a listening socket on loopback."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        return int(self._listener.getsockname()[1])

    def exchange(self, port: int, sends: bool, receives: bool) -> float:
        """Seconds to send the state's bytes to a peer's socket and to receive as many from it."""
        assert self._listener is not None
        out = socket.create_connection(("127.0.0.1", port), WAIT_S)
        into, _ = self._listener.accept()
        into.settimeout(WAIT_S)
        self._listener.close()
        source, target = (states.raw(t) for t in reversed(self._largest()))
        size = self._copy.bytes
        sender = threading.Thread(target=parts.send_bytes, args=(out, source, size if sends else 0))
        begun = time.perf_counter()
        sender.start()
        parts.receive_bytes(into, target, size if receives else 0)
        sender.join()
        seconds = time.perf_counter() - begun
        out.close()
        into.close()
        return seconds

    def _largest(self) -> tuple[torch.Tensor, torch.Tensor]:
        return max(self._copy.pairs, key=lambda pair: pair[1].nbytes)


def serve(pipe: Connection, rank: int, scale: float, seed: int | None, log: Path) -> None:
    """Do what the driver says until it says no more."""
    with log.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    try:
        worker = Rank(rank, scale, seed)
        pipe.send(("ready", os.getpid()))
        while True:
            method, arguments = pipe.recv()
            try:
                pipe.send(("done", getattr(worker, method)(*arguments)))
            except Exception as e:
                pipe.send(("failed", f"rank {rank}: {method}: {type(e).__name__}: {e}"))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
