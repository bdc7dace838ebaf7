"""Which rank of which launch a training process is: `Launch`, given or found in the environment.

All ranks of one launch must name it alike, and no other launch may: that is the run token. Where
torch.distributed is initialised, rank 0 puts a nonce in its store; else the token is made of what
the launcher (torchrun, Slurm) says of itself, its restart count included.

Contract: reads what it is given, and the store; changes nothing else.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from torch import distributed

from p2pckpt.errors import UsageError

_made = 0
"""Launches that this process found; all ranks of a launch count alike."""


@dataclass(frozen=True)
class Launch:
    """Which rank of which launch this process is. `find` reads it from the environment."""

    rank: int
    world_size: int
    run_token: str

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> Launch:
        """From torchrun's or Slurm's variables; else a launch of one rank.

        The run token is a nonce that rank 0 puts in torch.distributed's store, if that is
        initialised; else it is made of the launcher's own variables. Raises UsageError.
        """
        e = environ
        if "RANK" in e and "WORLD_SIZE" in e:
            rank, size = _number(e, "RANK"), _number(e, "WORLD_SIZE")
            names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
        elif "SLURM_PROCID" in e and "SLURM_NTASKS" in e:
            rank, size = _number(e, "SLURM_PROCID"), _number(e, "SLURM_NTASKS")
            names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        else:
            return cls(0, 1, uuid.uuid4().hex)
        token = _shared_nonce(rank) or "/".join(e.get(name, "") for name in names)
        return cls(rank, size, token)


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isdecimal():
        raise UsageError(f"{name}={environ[name]!r}: needs a whole number, 0 or more")
    return int(environ[name])


def _shared_nonce(rank: int) -> str:
    """A nonce of rank 0's, by torch.distributed's store; "" where that is not initialised."""
    global _made
    if not (distributed.is_available() and distributed.is_initialized()):
        return ""
    _made += 1
    store = distributed.distributed_c10d._get_default_store()
    key = f"p2pckpt/launch/{_made}"
    if rank == 0:
        store.set(key, uuid.uuid4().hex)
    return str(store.get(key).decode())
