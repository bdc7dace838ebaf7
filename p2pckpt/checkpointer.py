"""The hook in a training loop: `Checkpointer`, and the `SaveHandle` that a save returns.

A save copies the state into shared memory that belongs to this node's agent, says so, and returns;
everything after that (coding, sending, committing) happens in the agent and survives this process.
A restore asks the agent which step the whole job goes back to, gets this rank's bytes as mapped
memory, checks every chunk on the way into the tensors, and returns when all ranks have theirs.

Contract: the constructor and `restore` raise. `save` and `close` do not, unless `on_error="raise"`:
a store that is out of order must not kill training; trouble is counted in `errors`, told by the
handle, and logged once in LOG_EVERY_S. No thread, no fork, no UCX, gRPC or etcd in this process.
Every rank makes the same calls in the same order. One thread at a time.
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
    AgentUnreachable,
    CheckpointError,
    IntegrityError,
    NothingToRestore,
    NotJoined,
    NotSeated,
    RestoreFailed,
    SaveAborted,
    StaleGenerationError,
    UsageError,
)
from p2pckpt.handles import Restored, SaveHandle
from p2pckpt.launch import Launch
from p2pckpt.restore import load as loading
from p2pckpt.restore.verify import ChunkCheck
from p2pckpt.save import snapshot

LOG_EVERY_S = 30.0
CALL_TIMEOUT_S = 30.0
"""Of a call that the agent answers within its own, shorter, bounds."""

LOOK_TIMEOUT_S = 5.0
"""Of a look at a save, which a living agent answers at once."""
JOIN_SLICE_S = 10.0
"""How often a launch that forms says what it waits for."""
LAST_OUTCOME_S = 2.0
"""`close` waits so long for the outcome of a save in flight, to tell it."""

_UNSET: Any = object()
_log = logging.getLogger("p2pckpt")


class Checkpointer:
    """Checkpoints of one job, for one rank. See the file's head for what may raise.

    ``layout``: "rs:k,m" or "copies:r". ``every``: steps between saves, for `should_save`.
    ``keep_last``: committed steps that are kept. ``agent``: the agent's socket, if it is not where
    P2PCKPT_AGENT, XDG_RUNTIME_DIR or /run/p2pckpt say. ``takeover``: replace a launch of the job
    that still lives. Raises AgentUnreachable, NotJoined, GenerationHeld, UsageError.
    """

    def __init__(  # noqa: PLR0913 - the user's door: keyword-only, each with a default
        self,
        job: str,
        *,
        layout: str = "rs:4,2",
        every: int = 1,
        keep_last: int = 1,
        agent: str | None = None,
        launch: Launch | None = None,
        takeover: bool = False,
        on_error: Literal["log", "raise"] = "log",
        join_timeout_s: float = 300.0,
    ) -> None:
        if every < 1 or keep_last < 1:
            raise UsageError(f"every={every}, keep_last={keep_last}: both need 1 or more")
        if on_error not in ("log", "raise"):
            raise UsageError(f'on_error={on_error!r}: allowed are "log" and "raise"')
        self.job = r.Job(owner_uid=os.getuid(), name=job)
        self.launch = launch or Launch.find(os.environ)
        self.every = every
        self.errors = 0
        self.restored: Restored | None = None
        self._on_error = on_error
        self._logged_at: dict[str, float] = {}
        self._plan: snapshot.Plan | None = None
        self._ordinal = 0
        self._restores = 0
        self._untold: list[w.SlotFailed] = []
        self._pending: list[SaveHandle] = []
        self._uncommitted = 0
        self._closed = False
        paths = (agent,) if agent else default_socket_paths(os.environ)
        self._link = AgentLink(paths)
        self._join = w.TrainerJoin(
            job=self.job.key,
            rank=self.launch.rank,
            world_size=self.launch.world_size,
            run_token=hashlib.sha256(self.launch.run_token.encode()).hexdigest()[:32],
            layout=r.Layout.parse(layout),
            keep_last=keep_last,
            takeover=takeover,
            timeout_s=JOIN_SLICE_S,
        )
        try:
            joined = self._join_launch(join_timeout_s)
        except BaseException:
            self._link.close()
            raise
        self.generation = joined.generation
        self.node = joined.node

    def _join_launch(self, timeout_s: float) -> w.Joined:
        """Join, telling every few seconds what is waited for. Raises NotJoined, GenerationHeld."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                joined = self._link.call(self._join, JOIN_SLICE_S + CALL_TIMEOUT_S)
                assert isinstance(joined, w.Joined)
                return joined
            except NotJoined as e:
                if time.monotonic() >= deadline:
                    self._link.call(w.Leave(), CALL_TIMEOUT_S)
                    raise
                _log.warning("joining job %s: %s", self.job.name, e)

    # -- saving -----------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Is a save due at this step?"""
        return step % self.every == 0

    def save(self, step: int, state: Any, meta: Mapping[str, Any] | None = None) -> SaveHandle:
        """Snapshot `state` as step `step`; returns when `state` may be changed again.

        ``meta`` is small JSON kept with the step. What cannot be stored is refused with its path
        and class (UnsupportedState), on all ranks.
        """
        handle = SaveHandle(step, _owner=self, _ordinal=self._ordinal)
        self._ordinal += 1
        try:
            self._tell_outcomes(0.0)
            self._save(handle, state, meta)
        except Exception as e:
            handle.status, handle.reason = "failed", f"{type(e).__name__}: {e}"
            if getattr(e, "retryable", False):
                failed = w.SlotFailed(handle._ordinal, step, handle.reason[:2000])
                self._untold = [*self._untold[-15:], failed]  # older ones end by their deadline
            self._trouble(f"save of step {step}", e)
            if self._on_error == "raise":
                raise
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
                self._trouble(f"save of step {handle.step}", why)
        self._pending = [h for h in self._pending if h.status == "in flight"][-16:]

    def _save(self, handle: SaveHandle, state: Any, meta: Mapping[str, Any] | None) -> None:
        ordinal, step = handle._ordinal, handle.step
        while self._untold:  # the agent did not hear of these: other ranks still wait for our part
            self._call(self._untold[0])
            del self._untold[0]
        try:
            text = json.dumps(dict(meta or {}))
            self._plan = plan = snapshot.plan(state, self._plan)
        except Exception as e:
            self._call(w.SlotFailed(ordinal, step, f"{type(e).__name__}: {e}"[:2000]))
            raise
        slot = self._call(w.OpenSlot(ordinal, step, plan.capacity_bytes))
        if isinstance(slot, w.Skipped):
            handle.status, handle.reason = "skipped", slot.reason
            return
        assert isinstance(slot, w.Slot)
        try:
            length = snapshot.write(plan, self._link.map(slot.file))
        except Exception as e:
            self._call(w.SlotFailed(ordinal, step, f"{type(e).__name__}: {e}"[:2000]))
            raise
        self._call(w.SlotDone(ordinal, step, length, text))

    def look(self, handle: SaveHandle, wait_s: float) -> None:
        """Bring a handle up to date, waiting at most `wait_s`."""
        try:
            ask = w.SaveStatus(handle._ordinal, handle.step, wait_s)
            reply = self._call(ask, wait_s + LOOK_TIMEOUT_S)
        except AgentUnreachable as e:
            self._trouble(f"status of step {handle.step}", e)
            time.sleep(min(wait_s, 0.2))
            return
        except CheckpointError as e:
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
            reply = self._call(w.RestoreCall(ordinal, step, left_s), left_s)
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
            self._call(w.PrepareSlots(self._plan.capacity_bytes))
        except CheckpointError as e:
            self._trouble("preparing for saves", e)

    def _load(self, reply: w.RestoreFile, state: Any, deadline: float) -> bool:
        """Load and report; False if the ballot was not closed OK, so that another follows."""
        begun = time.monotonic()
        image = self._link.map(reply.file)[: reply.length]
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
        closed = self._call(done, max(1.0, deadline - time.monotonic()))
        if failure is not None and not again:
            raise failure
        assert isinstance(closed, w.RestoreClosed)
        if closed.closed.close is not r.Close.OK:
            return False
        seconds = {**reply.seconds, "load": load_s - check.seconds, "check": check.seconds}
        self.restored = Restored(
            reply.step,
            reply.source,
            reply.length,
            reply.bytes_from,
            seconds,
            json.loads(reply.meta),
        )
        return True

    def _mend(self, ballot: int, offset: int, length: int) -> None:
        """Have the agent fetch a part of the restore file anew."""
        self._call(w.MendChunk(ballot, offset, length), 600.0)

    # -- the rest ---------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Committed steps of the current lineage, ascending."""
        reply = self._call(w.ListSteps())
        assert isinstance(reply, w.Steps)
        return list(reply.committed)

    def close(self) -> None:
        """Say good-bye to the agent; saves in flight go on in it."""
        if self._closed:
            return
        try:
            self._tell_outcomes(LAST_OUTCOME_S)
            if self._uncommitted:
                _log.warning(
                    "job %s: %d of %d saves were not committed", self.job.name,
                    self._uncommitted, self._ordinal,
                )  # fmt: skip
            self._closed = True
            self._link.call(w.Leave(), CALL_TIMEOUT_S)
        except Exception as e:
            self._trouble("close", e)
            if self._on_error == "raise":
                raise
        finally:
            self._closed = True
            self._link.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, request: r.Record, timeout_s: float = CALL_TIMEOUT_S) -> r.Record:
        """Ask the agent; after it was restarted, take our seat there first."""
        if self._closed:
            raise UsageError("this Checkpointer is closed")
        try:
            return self._link.call(request, timeout_s)
        except NotSeated:
            rejoin = w.TrainerRejoin(self.job.key, self.launch.rank, self.generation)
            self._link.call(rejoin, CALL_TIMEOUT_S)
            return self._link.call(request, timeout_s)

    def _trouble(self, what: str, error: Exception) -> None:
        """Count, and log each kind at most once in LOG_EVERY_S."""
        self.errors += 1
        kind, now = type(error).__name__, time.monotonic()
        if now - self._logged_at.get(kind, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged_at[kind] = now
            hint = " (training goes on)" if not isinstance(error, StaleGenerationError) else ""
            _log.warning("%s: %s: %s%s", what, kind, error, hint)
