"""SIGTERM as a flag: the machine is to be taken away, and the training loop may end in good order.

Python runs a handler between two steps of the main thread, perhaps in the midst of a collective or
of a copy. So this one does nothing but remember; the loop looks when it asks for the next step.

Contract: installed only on request, in the main thread. A handler that was there before is called
as well, and put back by `restore`, unless somebody has installed another one since.
"""

from __future__ import annotations

import signal
from types import FrameType

from p2pckpt.errors import UsageError


class Notice:
    """Was SIGTERM sent to this process since? Raises UsageError outside of the main thread."""

    def __init__(self) -> None:
        self.given = False
        try:
            self._before = signal.signal(signal.SIGTERM, self._take)
        except ValueError as e:
            raise UsageError(f"preemption=True: needs the main thread ({e})") from e

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.given = True
        if callable(self._before):
            self._before(number, frame)

    def restore(self) -> None:
        """Put back what was there before. (A handler that is not Python's own cannot be.)"""
        if signal.getsignal(signal.SIGTERM) == self._take:
            before = self._before
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
