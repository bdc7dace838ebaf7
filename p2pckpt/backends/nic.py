"""How many bytes a second the network of this node gives each way, found out in a moment.

Two things bound it. The link: what the kernel says of the interface that has our address (a
loopback or virtual one says nothing). The way there: a transport that sends to itself, best of
twenty, since another process may have had the core in the others. Both ends of that are one mover,
so it is less than what two machines get from each other on a link that outruns a core; whoever
knows better sets `nic_bytes_s`.

Contract: takes about a second at most and, while it lasts, a small file of the arena, or a
`Scratch` where there is none; 0 where there is no room for it or nothing arrives. Says how it was
found.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Protocol

from p2pckpt.errors import CheckpointError, NoRoom, UsageError
from p2pckpt.ports import Region, Transport

PROBE = "nic-probe"
PROBE_BYTES = 16 * 1024 * 1024
TRIES = 20
ENOUGH_S = 1.0
TIMEOUT_S = 2.0
_SIOCGIFADDR = 0x8915


class Room(Protocol):
    """Of an arena, what measuring needs."""

    async def reserve(self, file: str, capacity: int) -> None:
        """See ports.Arena."""
        ...

    def remove(self, file: str) -> None:
        """See ports.Arena."""
        ...


class Scratch:
    """A `Room` of anonymous memory, for who has no arena: one file at a time, in no directory."""

    def __init__(self) -> None:
        self._fd = -1

    async def reserve(self, file: str, capacity: int) -> None:
        """See ports.Arena."""
        self._fd = os.memfd_create(f"p2pckpt-{file}")
        try:
            os.posix_fallocate(self._fd, 0, capacity)
        except OSError as e:
            self.remove(file)
            raise NoRoom(f"{file}: needs {capacity} bytes of memory: {e.strerror}") from None

    def remove(self, file: str) -> None:  # noqa: ARG002
        """See ports.Arena."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def descriptor(self, file: str, writable: bool) -> int:  # noqa: ARG002
        """The file, opened once more, as a transport wants it. Raises UsageError without one."""
        if self._fd < 0:
            raise UsageError(f"{file}: is not there")
        return os.dup(self._fd)


async def measure(arena: Room, transport: Transport, address: str) -> tuple[int, str]:
    """Bytes a second, and how that is known. ``address``: ours in that network."""
    try:
        path = await _through(arena, transport)
    except CheckpointError as e:
        return 0, f"not measured: {type(e).__name__}: {e}"
    found = f"{path / 1e9:.2f} GB/s from the mover to itself"
    name, link = link_of(address)
    if link:
        found += f", {name} has {link / 1e9:.2f} GB/s"
    return min(path, link or path), f"measured: {found}"


async def _through(arena: Room, transport: Transport) -> int:
    """The best of some transfers to ourselves. Raises CheckpointError."""
    clock, best_s = asyncio.get_running_loop().time, TIMEOUT_S
    enough = clock() + ENOUGH_S
    source, target = Region(PROBE, 0, PROBE_BYTES), Region(PROBE, PROBE_BYTES, PROBE_BYTES)
    await arena.reserve(PROBE, 2 * PROBE_BYTES)
    try:
        for _ in range(TRIES):
            begun = clock()
            grant = await transport.expect(target)
            try:
                await transport.send(transport.address, grant.nonce, source, TIMEOUT_S)
                await grant.received(TIMEOUT_S)
            finally:
                await grant.cancel()
            best_s = min(best_s, clock() - begun)
            if clock() > enough:
                break
    finally:
        arena.remove(PROBE)
    return int(PROBE_BYTES / best_s)


def link_of(address: str) -> tuple[str, int]:
    """The interface that has an IPv4 address, and its bytes a second; 0 if it says none."""
    try:
        wanted = socket.gethostbyname(address)
    except OSError:
        return "", 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("16s24x", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == wanted:
                return name, _speed(name)
    return "", 0


def _speed(name: str) -> int:
    try:
        megabits = int(Path(f"/sys/class/net/{name}/speed").read_text())
    except (OSError, ValueError):
        return 0
    return max(0, megabits) * 1_000_000 // 8
