"""One rank of the demo's training job: a small byte-level GPT, sharded by FSDP2 on CPU and gloo.

It reads Python's own library, each rank from its own place, with dropout drawn from the rank's own
generator. So no rank's state can be had from another rank: parameters and AdamW's moments are
shards (and no constructor broadcasts anything), generator and position are the rank's own. A rank
that came back wrong, or with an old generator, shows in the next loss.

Contract: told what to do by options and by RANK, WORLD_SIZE, P2PCKPT_AGENT. Appends JSON lines to
its journal: `up`, `joined`, `restored`, `step`, `save` (before the save: with the digest), `saved`,
`outcome`, `failed`, each with launch, rank and time. A line stands when `write` returned, so a
SIGKILL loses none. Without `--layout` it trains without any store, for the losses to compare with.

The digest is SHA-256 over every value of the state, found by a walk of its own and not by the code
under trial.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as f

from p2pckpt import Checkpointer, SaveHandle
from p2pckpt.errors import CheckpointError

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 128, 4, 4, 64, 2
DROPOUT = 0.1
TEXT_BYTES = 4 << 20
WAIT_S = 60.0
"""Bound of whatever a rank waits for: other ranks, a restore, its last save."""


class Dropout(nn.Module):
    """Dropout by a generator that is part of the state."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Zero a tenth of x, scale up the rest."""
        kept = torch.empty_like(x).bernoulli_(1 - DROPOUT, generator=self.generator)
        kept.div_(1 - DROPOUT)
        return x * kept


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, dropout: Dropout) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, context, width) to the same."""
        batch, context, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, context, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, context, WIDTH)))
        out: torch.Tensor = x + self.dropout(self.mlp(self.norms[1](x)))
        return out


class Gpt(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, dropout: Dropout) -> None:
        super().__init__()
        self.bytes_in = nn.Embedding(256, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(batch, context) of byte values to (batch * context, 256)."""
        x = self.bytes_in(text) + self.place(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x.flatten(0, 1))
        return out


class Training:
    """One rank's training; ``state`` is all of it that matters."""

    def __init__(self, rank: int, world: int, seed: int) -> None:
        text = library_text()
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        generator = torch.Generator().manual_seed(seed * 1000 + rank)
        torch.manual_seed(seed)
        self.model = Gpt(Dropout(generator))
        mesh = init_device_mesh("cpu", (world,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "generator": generator,
            "position": rank * (len(text) // world),
            "step": 0,
        }

    def step(self) -> float:
        """One step; this rank's loss."""
        take = BATCH * CONTEXT
        start = self.state["position"] % (len(self.text) - take - 1)
        window = self.text[start : start + take + 1].long()
        logits = self.model(window[:-1].view(BATCH, CONTEXT))
        loss = f.cross_entropy(logits, window[1:])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state["position"] = start + take
        self.state["step"] += 1
        return loss.item()


def library_text() -> bytes:
    """The first TEXT_BYTES of Python's own library, file after file."""
    out = bytearray()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        out += file.read_bytes()
        if len(out) >= TEXT_BYTES:
            break
    return bytes(out[:TEXT_BYTES])


def digest(state: Any) -> str:
    """SHA-256 over all values of a state, each with its path."""
    total = hashlib.sha256()
    for path, data in _values(state, ""):
        total.update(f"{path} {len(data)}\n".encode())
        total.update(data)
    return total.hexdigest()


def _values(x: Any, path: str) -> Iterator[tuple[str, bytes]]:
    if isinstance(x, nn.Module | torch.optim.Optimizer):
        x = x.state_dict()
    if isinstance(x, torch.Generator):
        x = x.get_state()
    if isinstance(x, Mapping):
        for key in x:
            yield from _values(x[key], f"{path}/{key}")
    elif isinstance(x, list | tuple):
        for i, item in enumerate(x):
            yield from _values(item, f"{path}/{i}")
    elif isinstance(x, torch.Tensor):
        local = getattr(x, "to_local", lambda: x)().detach().contiguous()
        kind = f"{path} {local.dtype} {tuple(local.shape)}"
        yield kind, local.view(-1).view(torch.uint8).numpy().tobytes()
    else:
        yield path, repr(x).encode()


class Journal:
    """JSON lines that stand once written."""

    def __init__(self, file: str, **always: Any) -> None:
        self._fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._always = always

    def __call__(self, event: str, **facts: Any) -> None:
        """Append one line."""
        line = {"event": event, "time": time.monotonic(), **self._always, **facts}
        os.write(self._fd, json.dumps(line).encode() + b"\n")


class Saving:
    """The hook in the loop, with a line in the journal for whatever happens."""

    def __init__(self, job: Training, options: argparse.Namespace, journal: Journal) -> None:
        self._job, self._journal = job, journal
        self._open: list[SaveHandle] = []
        self._hook = Checkpointer(
            "demo",
            layout=options.layout,
            every=options.every,
            preemption=options.preemption,
            join_timeout_s=WAIT_S,
        )

    def restore(self) -> int:
        """The step to go on from."""
        step = self._hook.restore(self._job.state, default=0, timeout_s=WAIT_S)
        if (back := self._hook.restored) is not None:
            self._journal(
                "restored",
                step=step,
                sha256=digest(self._job.state),
                node=self._hook.node,
                source=back.source,
                bytes_from=back.bytes_from,
                snapshot_bytes=back.snapshot_bytes,
                seconds=back.seconds,
            )
        return step

    def after(self, step: int) -> None:
        """Save if it is due, and note the ends of earlier saves."""
        if self._hook.should_save(step):
            self._journal("save", step=step, node=self._hook.node, sha256=digest(self._job.state))
            begun = time.monotonic()
            handle = self._hook.save(step, self._job.state)
            blocking_s = time.monotonic() - begun
            status, reason = handle.status, handle.reason
            self._journal("saved", step=step, blocking_s=blocking_s, status=status, reason=reason)
            self._open.append(handle)
        for handle in [h for h in self._open if h.done()]:
            self._open.remove(handle)
            self._journal("outcome", step=handle.step, status=handle.status, reason=handle.reason)

    def over(self, step: int) -> bool:
        """Is this the agreed last step?"""
        return self._hook.should_stop(step)

    def close(self) -> None:
        """Wait for the last saves, then leave."""
        for handle in self._open:
            try:
                handle.wait(WAIT_S)
            except (CheckpointError, TimeoutError):
                pass
            self._journal("outcome", step=handle.step, status=handle.status, reason=handle.reason)
        self._hook.close()


def main() -> None:
    """Train until `--last`, or until the file `--finish` is there.

    ``--pace-s``: a pause before each step. ``--preemption``: SIGTERM ends it in good order.
    """
    parser = argparse.ArgumentParser()
    for name in ("journal", "rendezvous", "finish", "layout"):
        parser.add_argument(f"--{name}", default="")
    for name in ("launch", "seed", "every", "last"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--pace-s", type=float, default=0.0)
    parser.add_argument("--preemption", action="store_true")
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    journal = Journal(options.journal, launch=options.launch, rank=rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.rendezvous}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=WAIT_S),
    )
    job = Training(rank, world, options.seed)
    journal("up")
    saving, step = None, 0
    if options.layout:
        try:
            saving = Saving(job, options, journal)
            journal("joined")
            step = saving.restore()
        except CheckpointError as e:
            journal("failed", error=type(e).__name__, reason=str(e))
            sys.exit(1)
    while not _over(step, options):
        time.sleep(options.pace_s)
        loss = job.step()
        step += 1
        journal("step", step=step, loss=loss.hex())
        if saving is not None:
            saving.after(step)
            if saving.over(step):
                break
    if saving is not None:
        saving.close()
    dist.destroy_process_group()


def _over(step: int, options: argparse.Namespace) -> bool:
    """Rank 0 looks, and all agree: ranks that end at different steps would wait for each other."""
    last: int = options.last
    if last:
        return step >= last
    flag = torch.tensor([int(Path(options.finish).exists())])
    dist.broadcast(flag, 0)
    return bool(flag.item())


if __name__ == "__main__":
    main()
