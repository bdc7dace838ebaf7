"""Every error that p2pckpt raises: one tree that says whose fault it is and what to do next.

Catch :class:`CheckpointError` to catch them all. ``retryable`` on the class says whether the same
call can succeed later without anybody changing anything. Foreign exceptions (gRPC, UCX, OS) are
translated into this tree at the border, in ``backends/``; above it nothing else is raised on
purpose. A message names the thing, what was needed and what was found.
"""

from __future__ import annotations

from typing import ClassVar


class CheckpointError(Exception):
    """Root of the tree."""

    retryable: ClassVar[bool] = False


# -- the caller's side ----------------------------------------------------------------------------


class UsageError(CheckpointError, ValueError):
    """An argument, option or call order is wrong; the message says what is allowed."""


class ConfigError(UsageError):
    """A configuration value is wrong; the message names key, origin and allowed values."""


class UnsupportedState(UsageError):
    """``state`` holds an object that cannot be stored; the message names its path and class."""


class StateMismatch(UsageError):
    """What was saved does not fit the target of ``restore``; names each differing path."""


class NotJoined(CheckpointError):
    """The ranks of one launch did not all join in time; names the missing ranks."""

    retryable = True


class NotSeated(CheckpointError):
    """The agent does not know this process as a rank: it was restarted since the join."""


class GenerationHeld(CheckpointError):
    """Another living launch of the job holds the current generation; names the holder."""


class StaleGenerationError(CheckpointError):
    """This process belongs to an older generation of its job and is fenced off."""


class AgentUnreachable(CheckpointError):
    """No agent answers on this node's socket; names every place that was looked at."""

    retryable = True


# -- outcomes of a save or a restore --------------------------------------------------------------


class SaveAborted(CheckpointError):
    """The save ended with ABORT; the previous committed step stays as it was."""


class NothingToRestore(CheckpointError):
    """It is proven that the job never committed a checkpoint anywhere."""


class RestoreFailed(CheckpointError):
    """The step cannot be proven or was lost; says which ranks and why. Never means 'nothing'."""


class SourcesAway(RestoreFailed):
    """Not enough sources answer now, but nothing that was read was wrong: worth another try."""

    retryable = True


class KeyUnavailable(CheckpointError):
    """The key of a sealed checkpoint cannot be had now; names the key id."""

    retryable = True


# -- bytes ----------------------------------------------------------------------------------------


class IntegrityError(CheckpointError):
    """Stored or received bytes differ from their digest; they count as an erasure."""


class FormatError(CheckpointError):
    """Bytes are not a record, frame or file of a version that this release reads."""


class CodingError(CheckpointError):
    """The shards at hand cannot be decoded: too few, or a singular matrix."""


class NoRoom(CheckpointError):
    """A budget, tmpfs or cgroup limit is too small; names need and have in bytes."""


# -- the other side -------------------------------------------------------------------------------


class Refused(CheckpointError):
    """A peer refused for a stated reason (older generation, decided attempt, cut off)."""


class PeerUnreachable(CheckpointError):
    """A peer did not answer within its deadline, or its connection broke."""

    retryable = True


class LedgerUnavailable(CheckpointError):
    """The ledger did not answer, has no leader, or alarms; nothing was written."""

    retryable = True


class ObjectStoreUnavailable(CheckpointError):
    """The object store did not answer in time, throttles, or refuses us; says which. What was
    asked may have happened. Never a reason to doubt a checkpoint."""

    retryable = True


class ObjectAbsent(CheckpointError):
    """The object store has no object of this name."""


class AmbiguousAnswer(CheckpointError):
    """A ledger write may or may not have happened; settle it by reading the key back."""

    retryable = True


class Compacted(CheckpointError):
    """A watch started below the ledger's compaction; re-list, then watch from there."""

    retryable = True


class LedgerForgot(CheckpointError):
    """The ledger is another one, or older than what this node has seen: the agent froze."""


class MissingDependency(CheckpointError):
    """A library or program that this path needs is absent or too old; says how to get it."""


def cause_of(error: Exception) -> Exception:
    """The first error of ours inside of a task group's, or the error itself."""
    while isinstance(error, ExceptionGroup):
        ours = error.subgroup(CheckpointError)
        error = (ours or error).exceptions[0]
    return error
