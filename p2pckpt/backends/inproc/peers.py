"""Messages between agents over the fake network: the port Peers.

Contract. A message is packed by the sender and unpacked by the receiver, so nothing mutable is
shared and what cannot be sent is refused. It is carried by the network: a caller that gives up, is
cancelled or dies takes nothing back. A lost request or reply is PeerUnreachable at the timeout; an
address where nobody serves, or a peer that dies while it works, is PeerUnreachable after one hop.
An error of `errors` in the handler reaches the caller as the same class with the same message; any
other one is a defect, and goes to the loop's exception handler.
"""

from __future__ import annotations

import asyncio

from p2pckpt import wire
from p2pckpt.backends.inproc.net import FakeNet
from p2pckpt.errors import CheckpointError, PeerUnreachable, UsageError
from p2pckpt.ports import PeerHandler
from p2pckpt.records import Record

MAX_MESSAGE_BYTES = 4 << 20


class PeersDoor:
    """`ports.Peers` of one agent. ``handler`` is None as long as it does not serve."""

    def __init__(self, net: FakeNet, node: str) -> None:
        self.handler: PeerHandler | None = None
        self._net = net
        self._node = node

    @property
    def address(self) -> str:
        """The same for every start of the node's agent."""
        return f"{self._node}/peers"

    async def serve(self, handler: PeerHandler) -> None:
        """Answer requests from now on."""
        self.handler = handler
        self._net.doors[self.address] = self

    async def call(self, address: str, request: Record, timeout_s: float) -> Record:
        """Ask. Raises PeerUnreachable, what the peer raised, or UsageError if it is too long."""
        packed = _pack(request)
        answer: asyncio.Future[bytes | CheckpointError]
        answer = asyncio.get_running_loop().create_future()
        name = f"{self._node} asks {address}"
        self._net.start(self._carry(address, packed, answer), name)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await answer
        except TimeoutError:
            raise PeerUnreachable(f"{address}: no answer within {timeout_s:g} s") from None
        if isinstance(reply, CheckpointError):
            raise reply
        record: Record = wire.unpack_any(reply)
        return record

    async def close(self) -> None:
        """Stop serving."""
        self.detach()

    def detach(self) -> None:
        """Be gone, as when the process dies."""
        self.handler = None
        if self._net.doors.get(self.address) is self:
            del self._net.doors[self.address]

    async def _carry(
        self, address: str, packed: bytes, answer: asyncio.Future[bytes | CheckpointError]
    ) -> None:
        """The message's whole life on the network."""
        net, target = self._net, self._net.node_of(address)
        self._log("message.sent", address, packed)
        if not await net.hop(self._node, target):
            self._log("message.lost", address, packed)
            return
        if net.chance(net.weather.duplicate):
            name = f"{self._node} asks {address} again"
            net.start(self._deliver_again(address, packed), name)
        reply = await self._deliver(address, packed)
        if not await net.hop(target, self._node):
            self._log("reply.lost", address, packed)
        elif not answer.done():
            answer.set_result(reply)

    async def _deliver_again(self, address: str, packed: bytes) -> None:
        await self._net.hop(self._node, self._net.node_of(address))
        await self._deliver(address, packed)

    async def _deliver(self, address: str, packed: bytes) -> bytes | CheckpointError:
        """Have it answered: the packed reply, or the error."""
        door = self._net.doors.get(address)
        if not isinstance(door, PeersDoor) or door.handler is None:
            return PeerUnreachable(f"{address}: nobody serves there")
        self._log("message.arrived", address, packed)
        work = asyncio.ensure_future(door.handler(self.address, wire.unpack_any(packed)))
        await asyncio.wait((work,))
        if work.cancelled():
            return PeerUnreachable(f"{address}: connection lost while it answered")
        try:
            return _pack(work.result())
        except CheckpointError as e:
            return type(e)(str(e))

    def _log(self, what: str, address: str, packed: bytes) -> None:
        kind = packed.split(b" ", 2)[1].decode()
        facts = {"to": address, "kind": kind, "bytes": len(packed)}
        self._net.log(self._node, what, facts)


def _pack(record: Record) -> bytes:
    packed = wire.pack(record)
    if len(packed) > MAX_MESSAGE_BYTES:
        kind = type(record).__name__
        raise UsageError(f"{kind}: message of {len(packed)} bytes, at most {MAX_MESSAGE_BYTES}")
    return packed
