"""Whoever waits until something is true, and is let look after every change.

Much of an agent waits for others: for an outcome, for the last piece of a group, for a commit to be
retired. Each such wait is a predicate on what the agent knows, and knowing more is one event for
all of them. So a change does not say who it is for: everybody looks, and who sees what he waited
for goes on.

All deadlines of a job share one timer of the event loop: nearly every wait is over long before its
own, and a thousand agents in one loop would keep it sorting timers that never ring.

Contract: `wake` lets all look in the next turn of the event loop, once for all that changes until
then, `look` at once; a predicate that was true only in between is not seen. What a predicate raises
is raised where it was waited for; what one of `first` raises goes to the event loop's handler, and
all look nonetheless. No wait takes longer than its timeout.

Consequence: predicates are asked often, by every wait for every change, so they must be cheap; and
an agent for which nothing changes does nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class Waiting:
    """All waits of one job on this node."""

    wakes: int = 0
    """How often all were let look: who sees another number knows that something changed."""
    first: list[Callable[[], None]] = field(default_factory=list)
    """Called whenever all look, before they do: for who only takes down what may be gone later."""
    _bells: dict[asyncio.Future[bool], _Wait] = field(default_factory=dict)
    """Rung with True by a change, with False by the timeout."""
    _woken: bool = False
    _alarm: asyncio.TimerHandle | None = None
    _alarm_at: float = math.inf
    """Not after the first deadline, perhaps before it: who stops waiting leaves it as it is."""

    def wake(self) -> None:
        """Something changed."""
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._look_if_woken)

    def _look_if_woken(self) -> None:
        if self._woken:
            self.look()

    def look(self) -> None:
        """Something changed, and it is the last of it for now: all look at once."""
        self._woken = False
        self.wakes += 1
        for take_down in self.first:
            try:
                take_down()
            except Exception as e:  # who changed something has no part in it
                facts = {"message": f"{take_down.__qualname__} failed", "exception": e}
                asyncio.get_running_loop().call_exception_handler(facts)
        for bell, wait in list(self._bells.items()):
            try:
                if not bell.done() and wait.ready():
                    bell.set_result(True)
            except Exception as e:
                bell.set_exception(e)

    async def until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until `ready()`; False if it is not after `timeout_s`. None: however long."""
        if ready():
            return True
        if timeout_s is not None and timeout_s <= 0:
            return False
        loop = asyncio.get_running_loop()
        wait = _Wait(ready, math.inf if timeout_s is None else loop.time() + timeout_s)
        while True:
            bell: asyncio.Future[bool] = loop.create_future()
            self._bells[bell] = wait
            if wait.deadline < self._alarm_at:
                self._set_alarm(loop, wait.deadline)
            try:
                rung = await bell
            finally:
                del self._bells[bell]
            if ready():
                return True
            if not rung:
                return False

    def _set_alarm(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at, self._alarm = at, loop.call_at(at, self._on_alarm, loop)

    def _on_alarm(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the waits that were to end by now, whatever the clock says."""
        due, first = self._alarm_at, math.inf
        self._alarm_at, self._alarm = math.inf, None
        for bell, wait in self._bells.items():
            if wait.deadline > due:
                first = min(first, wait.deadline)
            elif not bell.done():
                bell.set_result(False)
        if first < math.inf:
            self._set_alarm(loop, first)

    async def changed(self, wakes: int, timeout_s: float) -> bool:
        """Wait until anything changed since there were so many wakes; False after `timeout_s`."""
        return await self.until(lambda: self.wakes != wakes, timeout_s)


class _Wait(NamedTuple):
    ready: Callable[[], bool]
    deadline: float
