"""The hook in a training loop: `Checkpointer`, and the `SaveHandle` that a save returns.

A save copies the state into shared memory that belongs to this node's agent, says so, and returns;
everything after that (coding, sending, committing) happens in the agent and survives this process.
A restore asks the agent which step the whole job goes back to, gets this rank's bytes as mapped
memory, checks every chunk on the way into the tensors, and returns when all ranks have theirs.

Contract: the constructor and `restore` raise. `save` and `close` do not, unless `on_error="raise"`:
a store that is out of order must not kill training; trouble is counted in `errors`, told by the
handle, and logged once in LOG_EVERY_S. Beside the copy, a save waits for the agent at most
`save_wait_s`, and SILENT_WAIT_S while that does not answer. No thread, no fork, no UCX, gRPC or
etcd in this process. Every rank makes the same calls in the same order. One thread at a time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from typing import Any, Literal

from p2pckpt import records as r
from p2pckpt import wire as w
from p2pckpt.backends.agent_link import AgentLink
from p2pckpt.backends.trainers import default_socket_paths
from p2pckpt.errors import (
    CheckpointError,
    IntegrityError,
    NothingToRestore,
    RestoreFailed,
    SaveAborted,
    UsageError,
)
from p2pckpt.handles import Restored, SaveHandle
from p2pckpt.launch import Launch
from p2pckpt.notices import Notice
from p2pckpt.restore import load as loading
from p2pckpt.restore.verify import ChunkCheck
from p2pckpt.save import snapshot
from p2pckpt.save.due import AUTO_EVERY, Loop
from p2pckpt.seat import CALL_TIMEOUT_S, JOIN_SLICE_S, SILENT_WAIT_S, Seat

LAST_OUTCOME_S = 2.0
"""`close` waits so long for the outcome of a save in flight, to tell it."""
LAST_SAVE_WAIT_S = 12.0
"""The agreed last step is saved however long the saves before it take: the agent's `stop_grace_s`
and a little."""

ASK_AGAIN_S = 0.5
"""An agent that was told of a notice has that long to agree on a last step, until it is told again.
"""

_UNSET: Any = object()
_log = logging.getLogger("p2pckpt")


class Checkpointer:
    """Checkpoints of one job, for one rank. See the file's head for what may raise.

    ``layout``: "rs:k,m" or "copies:r". ``every``: steps between saves, for `should_save`; "auto":
    chosen by what saves cost and failures are to be expected. ``preemption``: SIGTERM no longer
    ends this process; all ranks agree on a last step, and `should_stop` says when it is reached.
    ``keep_last``: committed steps that are kept. ``agent``: the agent's socket, if it is not where
    P2PCKPT_AGENT, XDG_RUNTIME_DIR or /run/p2pckpt say. ``takeover``: replace a launch of the job
    that still lives. ``save_wait_s``: a save that the agent has not served by then is given up, for
    all ranks; an agent that works says within twice its `skip_wait_s` that it has no slot. A
    process is a rank of one job at a time: `close` one Checkpointer before the next.
    Raises AgentUnreachable, NotJoined, GenerationHeld, UsageError.
    """

    def __init__(  # noqa: PLR0913 - the user's door: keyword-only, each with a default
        self,
        job: str,
        *,
        layout: str = "rs:4,2",
        every: int | Literal["auto"] = 1,
        keep_last: int = 1,
        agent: str | None = None,
        launch: Launch | None = None,
        takeover: bool = False,
        preemption: bool = False,
        on_error: Literal["log", "raise"] = "log",
        join_timeout_s: float = 300.0,
        save_wait_s: float = 3.0,
    ) -> None:
        steps = AUTO_EVERY if every == "auto" else every
        if not isinstance(steps, int) or steps < 1 or keep_last < 1:
            raise UsageError(
                f'every={every!r}, keep_last={keep_last}: need 1 or more (every: or "auto")'
            )
        if on_error not in ("log", "raise"):
            raise UsageError(f'on_error={on_error!r}: allowed are "log" and "raise"')
        if not SILENT_WAIT_S <= save_wait_s <= CALL_TIMEOUT_S:
            raise UsageError(
                f"save_wait_s={save_wait_s:g}: needs {SILENT_WAIT_S:g} to {CALL_TIMEOUT_S:g}"
            )
        self.job = r.Job(owner_uid=os.getuid(), name=job)
        self.launch = launch or Launch.find(os.environ)
        self.restored: Restored | None = None
        self._on_error = on_error
        self._plan: snapshot.Plan | None = None
        self._restores = 0
        self._untold: list[w.SlotFailed] = []
        self._pending: list[SaveHandle] = []
        self._uncommitted = 0
        paths = (agent,) if agent else default_socket_paths(os.environ)
        join = w.TrainerJoin(
            job=self.job.key,
            rank=self.launch.rank,
            world_size=self.launch.world_size,
            run_token=hashlib.sha256(self.launch.run_token.encode()).hexdigest()[:32],
            layout=r.Layout.parse(layout),
            keep_last=keep_last,
            takeover=takeover,
            timeout_s=JOIN_SLICE_S,
        )
        self._seat = Seat(AgentLink(paths), join, save_wait_s)
        try:
            self._seat.take(join_timeout_s)
            self._notice = Notice() if preemption else None
        except BaseException:
            self._seat.link.close()
            raise
        self.generation = self._seat.generation
        self.node = self._seat.node
        self._loop = Loop(self.generation, steps, every == "auto", time.monotonic)

    @property
    def errors(self) -> int:
        """How often something was in trouble; the log says what."""
        return self._seat.errors

    # -- saving -----------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Is a save due at this step? Every rank asks at every step; an answer takes microseconds.

        By ``every``, unless the job's save schedule was changed meanwhile: for all ranks alike.
        """
        seat, loop = self._seat, self._loop
        seat.keep()
        loop.board = seat.board
        due = loop.due(step)
        if loop.late:
            self._hear_late()
        while self._untold and seat.aside(self._untold[0]) is not None:
            del self._untold[0]
        if self._notice is not None and self._notice.given and loop.schedule.last is None:
            told = w.ScheduleCall(seat.join.job, True, f"SIGTERM to {seat}", wait_s=0.0)
            seat.aside(told, ASK_AGAIN_S)
        return due

    def should_stop(self, step: int) -> bool:
        """Is this the agreed last step, or beyond? Ask after it was saved, and then end the loop.

        Without a notice (SIGTERM with ``preemption``, `p2pckpt preempt`) it never is.
        """
        return self._loop.over(step)

    def save(self, step: int, state: Any, meta: Mapping[str, Any] | None = None) -> SaveHandle:
        """Snapshot `state` as step `step`; returns when `state` may be changed again.

        An agent that does not answer holds it for at most `save_wait_s`; then the handle says
        "failed", and the attempt ends in ABORT once any agent can tell. ``meta`` is small JSON kept
        with the step. What cannot be stored is refused with its path and class (UnsupportedState),
        on all ranks.
        """
        handle = SaveHandle(step, _owner=self, _ordinal=self._loop.begin_save())
        begun = time.monotonic()
        wait_s = LAST_SAVE_WAIT_S if self._loop.is_last(step) else self._seat.patience_s
        try:
            with self._seat.bounded(wait_s):
                if not self._seat.silent:
                    self._tell_outcomes(0.0)
                self._save(handle, state, meta)
        except Exception as e:
            handle.status, handle.reason = "failed", f"{type(e).__name__}: {e}"
            if getattr(e, "retryable", False):
                failed = w.SlotFailed(handle._ordinal, step, handle.reason[:2000])
                self._untold = [*self._untold[-15:], failed]  # older ones end by their deadline
            self._seat.trouble(f"save of step {step}", e)
            if self._on_error == "raise":
                raise
        finally:
            if self._plan is not None:
                self._plan.release()  # a save that was skipped must not keep the state alive
            self._loop.saved(time.monotonic() - begun)
        self._pending.append(handle)
        return handle

    def _tell_outcomes(self, wait_s: float) -> None:
        """Look at earlier saves: one that did not commit is trouble that somebody must hear of.

        Waits at most `wait_s` in all, and asks an agent that does not answer only once.
        """
        deadline, silent = time.monotonic() + wait_s, False
        for handle in self._pending:
            troubles = self.errors
            if handle.status == "in flight" and not silent:
                self.look(handle, max(0.0, deadline - time.monotonic()))
                silent = handle.status == "in flight" and self.errors > troubles
            self._uncommitted += handle.status in ("aborted", "skipped", "failed")
            if handle.status in ("aborted", "skipped"):
                why = SaveAborted(f"{handle.status}: {handle.reason}")
                self._seat.trouble(f"save of step {handle.step}", why)
        self._pending = [h for h in self._pending if h.status == "in flight"][-16:]

    def _hear_late(self) -> None:
        """We heard of the schedule too late: what others saved without us, or we without them, is
        to end now and not at its deadline."""
        late = self._loop.late
        why = f"{self._seat} heard of the changed save schedule too late"
        self._seat.trouble("saves", SaveAborted(f"{why}: steps {[step for _, step in late]}"))
        self._untold = [*self._untold, *(w.SlotFailed(*attempt, why) for attempt in late)][-16:]
        late.clear()

    def _tell_untold(self) -> None:
        """Of attempts that the agent did not hear of: other ranks still wait for our part."""
        while self._untold:
            self._seat.call(self._untold[0])
            del self._untold[0]

    def _save(self, handle: SaveHandle, state: Any, meta: Mapping[str, Any] | None) -> None:
        ordinal, step = handle._ordinal, handle.step
        self._tell_untold()
        try:
            text = json.dumps(dict(meta or {}))
            self._plan = plan = snapshot.plan(state, self._plan)
        except Exception as e:
            self._seat.call(w.SlotFailed(ordinal, step, f"{type(e).__name__}: {e}"[:2000]))
            raise
        slot = self._seat.call(w.OpenSlot(ordinal, step, plan.capacity_bytes))
        if isinstance(slot, w.Skipped):
            handle.status, handle.reason = "skipped", slot.reason
            return
        assert isinstance(slot, w.Slot)
        try:
            length = snapshot.write(plan, self._seat.link.map(slot.file))
        except Exception as e:
            self._seat.call(w.SlotFailed(ordinal, step, f"{type(e).__name__}: {e}"[:2000]))
            raise
        self._seat.call(w.SlotDone(ordinal, step, length, text))

    def look(self, handle: SaveHandle, wait_s: float) -> None:
        """Bring a handle up to date, waiting at most `wait_s`. Raises UsageError after `close`."""
        if self._seat.closed:
            raise UsageError(
                f"save of step {handle.step}: in flight when this Checkpointer was closed, and "
                "perhaps committed since; wait for it before"
            )
        try:
            ask = w.SaveStatus(handle._ordinal, handle.step, wait_s)
            reply = self._seat.call(ask, wait_s + self._seat.patience_s)
        except CheckpointError as e:
            if e.retryable:  # the save goes on, whoever cannot say how it stands
                self._seat.trouble(f"status of step {handle.step}", e)
                time.sleep(min(wait_s, 0.2))
            else:
                handle.status, handle.reason = "failed", f"{type(e).__name__}: {e}"
            return
        assert isinstance(reply, w.SaveState)
        if reply.outcome is not None:
            committed = reply.outcome.verdict is r.Verdict.COMMIT
            handle.status = "committed" if committed else "aborted"
            handle.reason = reply.outcome.reason

    # -- restoring --------------------------------------------------------------------------------

    def restore(
        self,
        state: Any,
        *,
        step: int | None = None,
        default: int = _UNSET,
        timeout_s: float = 600.0,
    ) -> int:
        """Bring `state` back to the newest provable step, in place; that step.

        Three answers: restored; *provably nothing was ever committed*: returns ``default`` or
        raises NothingToRestore; anything else raises (RestoreFailed: lost or not provable;
        StateMismatch: the target has another structure), and then `state` must not be used.
        Returns on no rank before all ranks have verified and loaded.
        """
        ordinal, self._restores = self._restores, self._restores + 1
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise RestoreFailed(f"restore: not finished within {timeout_s:g} s")
            reply = self._seat.call(w.RestoreCall(ordinal, step, left_s), left_s)
            if isinstance(reply, w.RestoreNothing):
                if default is _UNSET:
                    raise NothingToRestore(f"job {self.job.name}: {reply.reason}")
                self._prepare(state)
                return default
            if isinstance(reply, w.RestoreFile) and self._load(reply, state, deadline):
                self._prepare(state)
                return reply.step

    def _prepare(self, state: Any) -> None:
        """Let the agent make room for the saves to come, while the first steps train."""
        try:
            self._plan = snapshot.plan(state, self._plan)
            self._plan.release()
            self._seat.call(w.PrepareSlots(self._plan.capacity_bytes))
        except CheckpointError as e:
            self._seat.trouble("preparing for saves", e)

    def _load(self, reply: w.RestoreFile, state: Any, deadline: float) -> bool:
        """Load and report; False if the ballot was not closed OK, so that another follows."""
        begun = time.monotonic()
        image = self._seat.link.map(reply.file)[: reply.length]
        check = ChunkCheck(reply, image, self._mend, time.monotonic)
        failure: Exception | None = None
        try:
            loading.load(image, state, check)
        except Exception as e:
            failure = e
        finally:
            image.release()
        load_s = time.monotonic() - begun
        done = w.RestoreDone(
            ballot=reply.ballot,
            failed="" if failure is None else f"{type(failure).__name__}: {failure}"[:500],
            retryable=not isinstance(failure, IntegrityError),
        )
        again = isinstance(failure, IntegrityError) or getattr(failure, "retryable", False)
        closed = self._seat.call(done, max(1.0, deadline - time.monotonic()))
        if failure is not None and not again:
            raise failure
        assert isinstance(closed, w.RestoreClosed)
        if closed.closed.close is not r.Close.OK:
            return False
        seconds = {**reply.seconds, "load": load_s - check.seconds, "check": check.seconds}
        facts = (reply.step, reply.source, reply.length, reply.bytes_from, seconds)
        self.restored = Restored(*facts, json.loads(reply.meta))
        self._loop.restore_s = sum(seconds.values())
        return True

    def _mend(self, ballot: int, offset: int, length: int) -> None:
        """Have the agent fetch a part of the restore file anew."""
        self._seat.call(w.MendChunk(ballot, offset, length), 600.0)

    # -- the rest ---------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Committed steps of the current lineage, ascending."""
        reply = self._seat.call(w.ListSteps())
        assert isinstance(reply, w.Steps)
        return list(reply.committed)

    def close(self) -> None:
        """Say good-bye to the agent; saves in flight go on in it."""
        if self._seat.closed:
            return
        try:
            try:
                self._tell_last()
            finally:  # else we count as living for as long as this process does
                self._seat.closed = True
                self._seat.link.call(w.Leave(), self._seat.patience_s)
        except Exception as e:
            self._seat.trouble("close", e)
            if self._on_error == "raise":
                raise
        finally:
            self._seat.closed = True
            if self._notice is not None:
                self._notice.restore()
            self._seat.link.close()

    def _tell_last(self) -> None:
        with self._seat.bounded(self._seat.patience_s):
            self._tell_untold()
        self._tell_outcomes(LAST_OUTCOME_S)
        if self._uncommitted:
            _log.warning(
                "job %s: %d of %d saves were not committed", self.job.name,
                self._uncommitted, self._loop.ordinal,
            )  # fmt: skip

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
