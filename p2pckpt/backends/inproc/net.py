"""The fake network: who reaches whom, how fast, and what gets lost; with faults to switch on.

Intuition. Everything on the network is a hop from a node to a node, which takes time and may never
end, or bytes that pass the two nodes' links one piece at a time. `peers` and `transport` are made
of these two; the faults are here, once.

Contract. Latencies and losses are drawn from the generator passed in, in the order of the hops, so
a seed fixes them. A link passes one piece after the other, first come first served, so concurrent
transfers share it. A blocked direction loses messages and stalls transfers; a frozen node neither
sends nor takes pieces. What happens on the network follows no node's own clock (`true_time`).
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any

MIB = 1 << 20

_NOBODY = contextvars.Context()


def true_time() -> float:
    """The loop's time outside of any node, whose own clock may run at another rate."""
    now: float = _NOBODY.run(asyncio.get_running_loop().time)
    return now


def call_at_true_time(delay_s: float, work: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
    """`call_later` by no node's own clock."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle = _NOBODY.run(loop.call_later, delay_s, work, *args)
    return timer


LATE_S = 1.5


@dataclass
class Weather:
    """Faults that strike by chance, and one planted bug.

    ``loss``, ``duplicate`` and ``late`` are per message (a hop), ``flip`` per piece of payload:
    chances from 0 to 1. A late message takes up to `LATE_S` longer, so others overtake it.
    ``late_write`` lets a sender write on into a grant that was cancelled, as hardware does
    whose endpoint was not closed: what checks that the product notices needs it.
    """

    loss: float = 0.0
    duplicate: float = 0.0
    flip: float = 0.0
    late: float = 0.0
    late_write: bool = False


class FakeNet:
    """The links between all nodes. ``doors`` maps an address to the door that answers there.

    ``log(who, what, facts)`` is told of messages, transfers and faults. ``latency_s`` bounds a hop;
    ``bytes_per_s`` is a node's link each way, and ``piece_bytes`` what it passes at a time.
    """

    def __init__(
        self,
        rng: Random,
        log: Callable[[str, str, dict[str, Any]], None],
        *,
        latency_s: tuple[float, float] = (50e-6, 500e-6),
        bytes_per_s: float = 10e9,
        piece_bytes: int = 8 * MIB,
    ) -> None:
        self.rng = rng
        self.log = log
        self.piece_bytes = piece_bytes
        self.weather = Weather()
        self.doors: dict[str, Any] = {}
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._slow: dict[str, float] = {}
        self._blocked: dict[tuple[str, str], bool] = {}
        self._frozen: dict[str, bool] = {}
        self._out_free: dict[str, float] = {}
        self._in_free: dict[str, float] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}  # thousands, if many nodes save at once
        self._waiting: list[asyncio.Future[None]] = []

    # -- faults -----------------------------------------------------------------------------------

    def block(self, source: str, target: str) -> None:
        """Nothing gets from one node to the other any more; the way back is another matter."""
        self._blocked[source, target] = True
        self.log(source, "fault.net.block", {"target": target})

    def heal(self) -> None:
        """Nothing is blocked any more."""
        self._blocked.clear()
        self._wake()

    def freeze(self, node: str) -> None:
        """The node's process stands still: it neither sends nor takes payload."""
        self._frozen[node] = True

    def thaw(self, node: str) -> None:
        """It runs again."""
        self._frozen.pop(node, None)
        self._wake()

    def slow(self, node: str, bytes_per_s: float) -> None:
        """Give one node another link."""
        self._slow[node] = bytes_per_s
        self._out_free.pop(node, None)  # what is under way does not hold up what comes now
        self._in_free.pop(node, None)
        self.log(node, "fault.net.slow", {"bytes_per_s": bytes_per_s})

    def chance(self, probability: float) -> bool:
        """Does it happen? Draws nothing if it cannot."""
        return probability > 0 and self.rng.random() < probability

    # -- what doors are made of -------------------------------------------------------------------

    @staticmethod
    def node_of(address: str) -> str:
        """Addresses are <node>/<door>."""
        return address.rpartition("/")[0]

    def is_open(self, source: str, target: str) -> bool:
        """Does anything get from one node to the other?"""
        return (source, target) not in self._blocked

    async def hop(self, source: str, target: str) -> bool:
        """One message's way. False: it is lost, and nobody is told."""
        late_s = self.rng.uniform(0, LATE_S) if self.chance(self.weather.late) else 0.0
        await asyncio.sleep(self.rng.uniform(*self._latency_s) + late_s)
        return self.is_open(source, target) and not self.chance(self.weather.loss)

    async def pass_piece(self, source: str, target: str, count: int) -> None:
        """Let `count` bytes through both links, when it is their turn and both nodes are there."""
        while source in self._frozen or target in self._frozen:
            await self._news()
        now = true_time()
        out_s, in_s = (count / self._slow.get(n, self._bytes_per_s) for n in (source, target))
        self._out_free[source] = max(now, self._out_free.get(source, 0.0)) + out_s
        self._in_free[target] = max(now, self._in_free.get(target, 0.0)) + in_s
        end = max(self._out_free[source], self._in_free[target])
        await asyncio.sleep(end - now)
        while not self.is_open(source, target) or source in self._frozen or target in self._frozen:
            await self._news()

    def flipped(self, piece: bytes) -> bytes:
        """The piece as it arrives: one bit is another one, if the weather says so."""
        if not piece or not self.chance(self.weather.flip):
            return piece
        wrong = bytearray(piece)
        wrong[self.rng.randrange(len(piece))] ^= 1 << self.rng.randrange(8)
        self.log("net", "fault.net.flip", {"bytes": len(piece)})
        return bytes(wrong)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Let something happen on the network, whatever becomes of who caused it."""
        task = asyncio.create_task(work, name=name, context=contextvars.Context())
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler(
                {"message": f"{task.get_name()} failed", "exception": error, "task": task}
            )

    async def _news(self) -> None:
        """Wait for the next `heal` or `thaw`."""
        bell: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(bell)
        await bell

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for bell in waiting:
            if not bell.done():
                bell.set_result(None)
