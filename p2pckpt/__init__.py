"""Peer-to-peer replicated in-memory checkpoints for distributed PyTorch training.

    import p2pckpt

    ckpt = p2pckpt.Checkpointer(job="gpt", layout="rs:4,2", every=20)
    start = ckpt.restore(state, default=0)

The names below load on first use, so that the agent, which imports this package too, never imports
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2pckpt.checkpointer import Checkpointer
    from p2pckpt.handles import Restored, SaveHandle
    from p2pckpt.launch import Launch

__all__ = ["Checkpointer", "Launch", "Restored", "SaveHandle"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from p2pckpt import checkpointer

        return getattr(checkpointer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
