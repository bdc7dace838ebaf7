"""What the hook gives back: `SaveHandle` of a save, `Restored` of a restore.

A handle is the trainer's view of one attempt; it asks the agent only when it is looked at.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from p2pckpt.errors import SaveAborted


class Looks(Protocol):
    """Who can bring a handle up to date."""

    def look(self, handle: SaveHandle, wait_s: float) -> None:
        """Ask the agent how it stands, waiting at most `wait_s`. Raises UsageError if closed."""
        ...


@dataclass(frozen=True)
class Restored:
    """What a restore did: where the bytes came from, and the seconds of each stage."""

    step: int
    source: str
    snapshot_bytes: int
    bytes_from: dict[str, int]
    seconds: dict[str, float]
    meta: dict[str, Any]


@dataclass
class SaveHandle:
    """One save. ``status``: "in flight", "committed", "aborted", "skipped" or "failed".

    "skipped": this attempt was not taken on any rank; "aborted": it ended without commit;
    "failed": this rank could not take part. ``reason`` says why. Who closes the Checkpointer while
    it is in flight cannot ask any more: then `done` and `wait` raise UsageError.
    """

    step: int
    status: str = "in flight"
    reason: str = ""
    _owner: Looks | None = field(default=None, repr=False)
    _ordinal: int = field(default=0, repr=False)

    def done(self) -> bool:
        """Has the save an end? Asks the agent, without waiting."""
        if self.status == "in flight" and self._owner is not None:
            self._owner.look(self, 0.0)
        return self.status != "in flight"

    def wait(self, timeout_s: float = 60.0) -> str:
        """Wait for the commit. Returns "committed"; raises SaveAborted with the reason, or
        TimeoutError if the save is still in flight."""
        deadline = time.monotonic() + timeout_s
        while self.status == "in flight" and self._owner is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"save of step {self.step}: in flight after {timeout_s:g} s")
            self._owner.look(self, min(left_s, 5.0))
        if self.status != "committed":
            raise SaveAborted(f"save of step {self.step} {self.status}: {self.reason}")
        return self.status
