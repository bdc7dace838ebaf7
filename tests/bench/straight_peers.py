"""Control between agents of one process, without a network: who asks is answered in his own task.

What `scale` measures is what agents do for a checkpoint and what they ask of etcd. A simulated
network would be a good part of it: three tasks and two timers for each message.

Contract: `ports.Peers`; requests and replies are packed and unpacked as for a wire; none is lost.
"""

from __future__ import annotations

import asyncio

from p2pckpt import wire
from p2pckpt.errors import PeerUnreachable
from p2pckpt.ports import PeerHandler
from p2pckpt.records import Record


class StraightPeers:
    """One agent's. ``doors``: of all agents, by address."""

    def __init__(self, node: str, doors: dict[str, PeerHandler]) -> None:
        self.address = f"{node}/peers"
        self._doors = doors

    async def serve(self, handler: PeerHandler) -> None:
        """Answer from now on."""
        self._doors[self.address] = handler

    async def call(self, address: str, request: Record, timeout_s: float) -> Record:
        """Ask. Raises PeerUnreachable, or what the answering agent raises."""
        if address not in self._doors:
            raise PeerUnreachable(f"{address}: nobody serves there")
        try:
            async with asyncio.timeout(timeout_s):
                asked = wire.unpack_any(wire.pack(request))
                reply = await self._doors[address](self.address, asked)
        except TimeoutError:
            raise PeerUnreachable(f"{address}: no answer within {timeout_s:g} s") from None
        record: Record = wire.unpack_any(wire.pack(reply))
        return record

    async def close(self) -> None:
        """Stop serving."""
        self._doors.pop(self.address, None)
