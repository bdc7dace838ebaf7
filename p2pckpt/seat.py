"""A rank's seat at its node's agent: joined once, taken again after a restart, asked with patience.

An agent can stand still, be restarted, or have no ledger; a training loop must not wait for that.
So every question has a bound, and within a save all questions together have one. Who was not
answered once asks with SILENT_WAIT_S of patience from then on, until there is an answer.

Contract: `call` raises what the agent raises, AgentUnreachable in time, NotSeated only if the seat
cannot be taken again. `aside` never raises: what the loop has to say between saves is repeated
until it is heard. Trouble is counted in `errors`, and each kind logged once in LOG_EVERY_S.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.backends.agent_link import AgentLink
from p2pckpt.board import Board
from p2pckpt.errors import (
    AgentUnreachable,
    CheckpointError,
    NotJoined,
    NotSeated,
    StaleGenerationError,
    UsageError,
)

LOG_EVERY_S = 30.0
CALL_TIMEOUT_S = 30.0
"""Of a call that the agent answers within its own, shorter, bounds."""

SILENT_WAIT_S = 0.2
"""A save waits so long for an agent that let the last question go unanswered; any answer of it
ends that. A living agent answers within milliseconds what needs no slot and no ledger."""
JOIN_SLICE_S = 10.0
"""How often a launch that forms says what it waits for."""
ASIDE_WAIT_S = 1.0
"""What the loop tells the agent beside saves takes so long at most."""
ASIDE_PAUSE_S, ASIDE_PAUSE = 1.0, 9.0
"""After a failure the next try has to wait: so long, and so many times what the failure took. An
agent that hangs costs the loop a tenth of its time, at most."""

_log = logging.getLogger("p2pckpt")


class Seat:
    """See the file's head. ``wait_s``: what one save waits for the agent, as long as it answers."""

    def __init__(self, link: AgentLink, join: w.TrainerJoin, wait_s: float) -> None:
        self.link = link
        self.join = join
        self.generation = 0
        self._nonce = ""
        """Of the generation: a job that was cleaned has one of this number again."""
        self.node = ""
        self.board: Board | None = None
        self.errors = 0
        self.closed = False
        self._wait_s = wait_s
        self._left_s = math.inf
        """What the save that is under way may still wait for the agent; without one, no bound."""
        self.silent = False
        """The last question was not answered in time."""
        self._seated = False
        self._logged_at: dict[str, float] = {}
        self._aside_at: dict[str, float] = {}

    def __str__(self) -> str:
        return f"rank {self.join.rank} on {self.node}"

    @property
    def patience_s(self) -> float:
        """How long the training loop may be held for an answer."""
        return SILENT_WAIT_S if self.silent else self._wait_s

    def take(self, timeout_s: float) -> None:
        """Join the launch, telling every few seconds what is waited for.

        Raises NotJoined, GenerationHeld. Who gave up, for whatever reason, has no seat.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                joined = self.link.call(self.join, JOIN_SLICE_S + CALL_TIMEOUT_S)
                assert isinstance(joined, w.Joined)
                self.generation, self.node = joined.generation, joined.node
                self._nonce = joined.nonce
                return self._sit(joined)
            except NotJoined as e:
                if time.monotonic() >= deadline:
                    self.link.call(w.Leave(), CALL_TIMEOUT_S)
                    raise
                _log.warning("joining job %s: %s", self.join.job, e)
            except UsageError:  # refused: a seat that we may have is another Checkpointer's
                raise
            except BaseException:  # we may be seated yet, and nobody would know
                with suppress(CheckpointError):
                    self.link.call(w.Leave(), SILENT_WAIT_S)
                raise

    def keep(self) -> None:
        """Take the seat again if the agent was restarted: without it no change of the schedule is
        heard. Costs a microsecond while there is nothing to do."""
        if not self._seated or self.link.broken:
            self._seated = False
            if (joined := self.aside(self._rejoin)) is not None:
                self._sit(joined)

    def call(self, request: r.Record, timeout_s: float = CALL_TIMEOUT_S) -> r.Record:
        """Ask the agent; after it was restarted, take our seat there first."""
        if self.closed:
            raise UsageError("this Checkpointer is closed")
        try:
            return self._ask(request, timeout_s)
        except NotSeated:
            self._sit(self._ask(self._rejoin, timeout_s))
            return self._ask(request, timeout_s)

    def aside(self, request: r.Record, again_s: float = 0.0) -> r.Record | None:
        """Tell the agent something between saves; None if it was not heard.

        The same kind again is not sent before ``again_s``; after a failure, see ASIDE_PAUSE.
        """
        begun, kind = time.monotonic(), type(request).__name__
        if self.closed or begun < self._aside_at.get(kind, 0.0):
            return None
        try:
            reply = self.call(request, ASIDE_WAIT_S)
        except CheckpointError as e:
            now = time.monotonic()
            self._aside_at[kind] = now + max(ASIDE_PAUSE_S, ASIDE_PAUSE * (now - begun))
            self.trouble(kind, e)
            return None
        self._aside_at[kind] = begun + again_s
        return reply

    @contextmanager
    def bounded(self, wait_s: float) -> Iterator[None]:
        """All questions inside wait for the agent at most so long together."""
        self._left_s = wait_s
        try:
            yield
        finally:
            self._left_s = math.inf

    def trouble(self, what: str, error: Exception) -> None:
        """Count, and log each kind at most once in LOG_EVERY_S."""
        self.errors += 1
        kind, now = type(error).__name__, time.monotonic()
        if now - self._logged_at.get(kind, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged_at[kind] = now
            hint = " (training goes on)" if not isinstance(error, StaleGenerationError) else ""
            _log.warning("%s: %s: %s%s", what, kind, error, hint)

    @property
    def _rejoin(self) -> w.TrainerRejoin:
        return w.TrainerRejoin(self.join.job, self.join.rank, self.generation, self._nonce)

    def _sit(self, joined: r.Record) -> None:
        """We have a seat; without a board we shall ask again."""
        assert isinstance(joined, w.Joined)
        self._seated = bool(joined.board)
        self.board = Board(self.link.map(joined.board)) if joined.board else None

    def _ask(self, request: r.Record, timeout_s: float) -> r.Record:
        """One question; within a save, no longer than what that may still wait."""
        begun, allowed_s = time.monotonic(), min(timeout_s, self._left_s)
        was_silent, self.silent = self.silent, False
        try:
            return self.link.call(request, allowed_s)
        except AgentUnreachable:
            self.silent = time.monotonic() - begun >= allowed_s
            raise
        finally:
            whole_s = self._wait_s if was_silent and not self.silent else self._left_s
            if self._left_s < math.inf:
                self._left_s = max(SILENT_WAIT_S, whole_s - (time.monotonic() - begun))
