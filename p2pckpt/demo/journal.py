"""What the ranks wrote down, read as it grows, and the questions that a verdict rests on.

The ranks know nothing of who reads: each appends lines to its own file. Here they become events,
and pure questions over them: how far is training, does every restored state equal the one that was
saved, is every loss the same as without failures.

Contract: `read` takes whole lines only, so a line that a SIGKILL cut short is not misread. An
answer over nothing is False, never "all of none are equal".
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]


@dataclass
class Journal:
    """All events of the ranks that write below ``place``, in the order they were read."""

    place: Path
    events: list[Event] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    def read(self) -> list[Event]:
        """What is new since the last call."""
        fresh: list[Event] = []
        for file in sorted(self.place.glob("*.jsonl")):
            with file.open("rb") as f:
                f.seek(self._read.get(file, 0))
                data = f.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[file] = self._read.get(file, 0) + len(whole)
            fresh += [json.loads(line) for line in whole.splitlines()]
        self.events += fresh
        return fresh

    def of(self, event: str, launch: int | None = None) -> list[Event]:
        """Events of one kind, of one launch or of all."""
        return [e for e in self.events if e["event"] == event and launch in (None, e["launch"])]

    def newest(self, launch: int | None = None) -> int:
        """The highest step that any rank has taken."""
        return max((e["step"] for e in self.of("step", launch)), default=0)

    def committed(self) -> list[int]:
        """Steps that are known to be committed: a handle said so, or a restore took it."""
        said = {e["step"] for e in self.of("outcome") if e["status"] == "committed"}
        return sorted(said | {e["step"] for e in self.of("restored")})


def losses(events: Iterable[Event]) -> dict[tuple[int, int], set[str]]:
    """All losses, as hexadecimal floats, that a rank had at a step: one, if all went well."""
    out: dict[tuple[int, int], set[str]] = {}
    for e in events:
        out.setdefault((e["rank"], e["step"]), set()).add(e["loss"])
    return out


def losses_identical(journal: Journal, reference: Journal) -> bool:
    """Has every rank at every step, also one taken twice, the loss of the run without failures?"""
    ours, theirs = losses(journal.of("step")), losses(reference.of("step"))
    return bool(ours) and ours == theirs


def wrong_digests(journal: Journal) -> list[str]:
    """A sentence for each restored state that is not the one that was saved."""
    saved: dict[tuple[int, int], set[str]] = {}
    for e in journal.of("save"):
        saved.setdefault((e["rank"], e["step"]), set()).add(e["sha256"])
    return [
        f"rank {e['rank']}, step {e['step']}: restored {e['sha256'][:12]}, saved {sorted(known)}"
        for e in journal.of("restored")
        if (known := saved.get((e["rank"], e["step"]), set())) != {e["sha256"]}
    ]
