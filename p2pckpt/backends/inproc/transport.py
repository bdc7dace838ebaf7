"""Payload between the arenas of agents over the fake network: the port Transport.

Intuition. A grant is a place of the receiver's that accepts one write of one length by whoever
shows its nonce. A flow carries the bytes piece by piece, and can be stopped between two of them.

Contract. Nothing is written without a living grant of exactly that length: with another length
nothing is written at all, the receiver gets IntegrityError, the sender Refused. A grant serves one
sender. `cancel` is instant: no piece is written after it, unless the planted bug
`Weather.late_write` is on. `send` returns when the last piece has left, which may still be lost.
Both sides hold a flow back by the `limit` they have for what it is for.
A sender that gives up or dies breaks the connection (the receiver gets PeerUnreachable), but over a
blocked link that does not get through either, and both sides wait for their timeouts.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from p2pckpt.backends.inproc.net import FakeNet, true_time
from p2pckpt.coding.checksum import crc32c
from p2pckpt.errors import CheckpointError, IntegrityError, PeerUnreachable, Refused
from p2pckpt.ports import Expected, Region
from p2pckpt.traffic import Pace, Rates, Traffic


class _Grant:
    """`ports.Expected`: the receiver's side of a transfer."""

    def __init__(
        self,
        nonce: str,
        file: str,
        target: memoryview,
        traffic: Traffic,
        forget: Callable[[str], None],
    ) -> None:
        self.file = file
        self.target = target
        self.traffic = traffic
        self.taken = False
        self.cancelled = False
        self._nonce = nonce
        self._forget = forget
        self._written = 0
        self._end: asyncio.Future[CheckpointError | None]
        self._end = asyncio.get_running_loop().create_future()

    @property
    def nonce(self) -> str:
        """What the sender must show."""
        return self._nonce

    async def received(self, timeout_s: float) -> None:
        """Wait for all bytes. Raises PeerUnreachable, IntegrityError, Refused (cancelled)."""
        try:
            async with asyncio.timeout(timeout_s):
                error = await asyncio.shield(self._end)
        except TimeoutError:
            raise PeerUnreachable(
                f"grant {self._nonce}: {self._written} of {len(self.target)} bytes "
                f"came within {timeout_s:g} s"
            ) from None
        if error is not None:
            raise type(error)(str(error))

    async def cancel(self) -> None:
        """Withdraw the grant, at once."""
        self.cancelled = True
        self.end(Refused(f"grant {self._nonce}: cancelled"))

    def write(self, offset: int, piece: bytes) -> None:
        """Bytes that arrive."""
        self.target[offset : offset + len(piece)] = piece
        self._written += len(piece)

    def end(self, error: CheckpointError | None) -> None:
        """Tell the receiver how it ended; the first word counts."""
        self._forget(self._nonce)
        if not self._end.done():
            self._end.set_result(error)


class TransportDoor:
    """`ports.Transport` of one agent. ``view(region)`` is its arena's."""

    def __init__(self, net: FakeNet, node: str, view: Callable[[Region], memoryview]) -> None:
        self.grants: dict[str, _Grant] = {}
        self.inward = Pace()
        self.outward = Pace()
        self._net = net
        self._node = node
        self._view = view
        self._flows: list[asyncio.Task[None]] = []
        net.doors[self.address] = self

    @property
    def address(self) -> str:
        """The same for every start of the node's agent."""
        return f"{self._node}/transport"

    async def expect(
        self,
        region: Region,
        traffic: Traffic = Traffic.RESTORE,
        timeout_s: float = math.inf,  # noqa: ARG002
    ) -> Expected:
        """Grant a write of the whole region to whoever shows the nonce."""
        nonce = f"{self._net.rng.getrandbits(128):032x}"
        target = self._view(region)
        self.grants[nonce] = grant = _Grant(nonce, region.file, target, traffic, self._forget)
        return grant

    def limit(self, rates: Rates) -> None:
        """At most so many bytes a second of each kind, in each direction."""
        self.inward.limit(rates)
        self.outward.limit(rates)

    async def send(
        self,
        address: str,
        nonce: str,
        region: Region,
        timeout_s: float,
        traffic: Traffic = Traffic.RESTORE,
    ) -> None:
        """Write a region to a peer's grant. Raises PeerUnreachable or Refused."""
        left: asyncio.Future[CheckpointError | None]
        left = asyncio.get_running_loop().create_future()
        flow = _Flow(self._net, (self._node, address), nonce, left, (self.outward, traffic))
        task = self._net.start(flow.run(self._view(region)), f"{self._node} sends to {address}")
        self._flows.append(task)
        task.add_done_callback(self._flows.remove)
        task.add_done_callback(flow.ended)
        try:
            async with asyncio.timeout(timeout_s):
                error = await left
        except TimeoutError:
            raise PeerUnreachable(f"{address}: took not all bytes in {timeout_s:g} s") from None
        finally:
            if left.cancelled():
                task.cancel()
        if error is not None:
            raise error

    async def close(self) -> None:
        """End all transfers, both ways."""
        self.detach()

    def restart(self) -> None:
        """The process that moves the bytes died, and another one took its place at once."""
        self._net.log(self._node, "fault.net.mover", {"flows": len(self._flows)})
        for task in self._flows:
            task.cancel()
        for grant in list(self.grants.values()):
            grant.cancelled = True
            grant.end(PeerUnreachable(f"grant {grant.nonce}: the mover died"))

    def detach(self) -> None:
        """Be gone, as when the process dies."""
        if self._net.doors.get(self.address) is self:
            del self._net.doors[self.address]
        for task in self._flows:
            task.cancel()
        for grant in list(self.grants.values()):
            grant.end(PeerUnreachable(f"grant {grant.nonce}: the transport was closed"))

    def _forget(self, nonce: str) -> None:
        self.grants.pop(nonce, None)


class _Flow:
    """A transfer on the network, from the sender's first word to the last byte."""

    def __init__(
        self,
        net: FakeNet,
        way: tuple[str, str],
        nonce: str,
        left: asyncio.Future[CheckpointError | None],
        outward: tuple[Pace, Traffic],
    ) -> None:
        self._net = net
        self._node, self._address = way
        self._nonce = nonce
        self._left = left
        self._outward = outward
        self._target = net.node_of(self._address)

    async def run(self, source: memoryview) -> None:
        """All of it; a message that is lost just ends it, and the timeouts tell both sides."""
        net = self._net
        self._log("transfer.begin", source)
        if not await net.hop(self._node, self._target):
            return
        door = net.doors.get(self._address)
        if not isinstance(door, TransportDoor):
            await self._answer(PeerUnreachable(f"{self._address}: nobody takes payload there"))
            return
        grant = door.grants.get(self._nonce)
        if grant is None or grant.taken:
            await self._answer(Refused(f"{self._address}: no open grant {self._nonce}"))
            return
        grant.taken = True
        if len(grant.target) != len(source):
            lengths = f"needs {len(grant.target)} bytes, has {len(source)}"
            grant.end(IntegrityError(f"grant {self._nonce}: {lengths}"))
            await self._answer(Refused(f"{self._address}: grant {self._nonce} {lengths}"))
            return
        try:
            await self._move(source, grant, door)
        except asyncio.CancelledError:
            if net.is_open(self._node, self._target):
                grant.end(PeerUnreachable(f"grant {self._nonce}: {self._node} broke off"))
            raise

    def ended(self, task: asyncio.Task[None]) -> None:
        """A flow that was ended from outside must not leave its sender waiting."""
        if task.cancelled():
            self._leave(PeerUnreachable(f"{self._address}: the transport here was closed"))

    async def _move(self, source: memoryview, grant: _Grant, door: TransportDoor) -> None:
        net, offset, last = self._net, 0, False
        while not last:
            size = await self._turn(grant, door, len(source) - offset)
            piece = bytes(source[offset : offset + size])
            await net.pass_piece(self._node, self._target, len(piece))
            last = offset + size == len(source)
            if last:
                self._leave(None)
                if not await net.hop(self._node, self._target):
                    return
            if net.doors.get(self._address) is not door:
                await self._answer(PeerUnreachable(f"{self._address}: connection lost"))
                return
            if grant.cancelled and not net.weather.late_write:
                await self._answer(Refused(f"{self._address}: grant {self._nonce} was cancelled"))
                return
            if grant.cancelled:
                self._log("fault.net.late_write", piece, file=grant.file)
            grant.write(offset, net.flipped(piece))
            offset += size
        self._log("transfer.arrived", source)
        grant.end(None)

    async def _turn(self, grant: _Grant, door: TransportDoor, left: int) -> int:
        """Wait until it is time for the next piece, here and then there; its length."""
        paces = (self._outward, (door.inward, grant.traffic))
        most = min(left, self._net.piece_bytes)
        size = min(pace.slice_bytes(traffic, most) for pace, traffic in paces)
        for pace, traffic in paces:
            wait_s = pace.wait_s(traffic, true_time())
            pace.spend(traffic, size, true_time())  # in line: others wait for this one
            if wait_s:
                await asyncio.sleep(wait_s)
        return size

    async def _answer(self, error: CheckpointError) -> None:
        """Tell the sender, if it can be reached and still listens."""
        if await self._net.hop(self._target, self._node):
            self._leave(error)

    def _leave(self, error: CheckpointError | None) -> None:
        if not self._left.done():
            self._left.set_result(error)

    def _log(self, what: str, content: memoryview | bytes, **more: str) -> None:
        facts = {"to": self._address, "bytes": len(content), "crc32c": f"{crc32c(content):08x}"}
        self._net.log(self._node, what, {**facts, "nonce": self._nonce, **more})
