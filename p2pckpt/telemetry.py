"""One registry of what happened, how often, how long it took, and how things stand.

Every stage of the pipelines is wrapped by `stage`, every decision and fault is counted by `note`,
and what can be looked at now is a gauge. `status --json` reads `as_dict`; `prometheus` renders the
same numbers in the text exposition format (prometheus.io, version 0.0.4).

Contract: names are few and fixed, labels never carry a step, a file or a nonce, so the number of
series is bounded (MAX_SERIES; past it a count goes to the label "other"). Nothing here can fail a
save: values are numbers and the clock is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MAX_SERIES = 1000
PREFIX = "p2pckpt_"


@dataclass
class Telemetry:
    """Counters, gauges and stage times of one process. ``clock`` gives seconds, monotonic."""

    clock: Callable[[], float]
    counters: dict[tuple[str, str], float] = field(default_factory=dict)
    gauges: dict[tuple[str, str], float] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)

    def count(self, name: str, label: str = "", by: float = 1) -> None:
        """Add to a counter."""
        key = (name, label)
        if key not in self.counters and len(self.counters) >= MAX_SERIES:
            key = (name, "other")
        self.counters[key] = self.counters.get(key, 0) + by

    def gauge(self, name: str, value: float, label: str = "") -> None:
        """Set a gauge."""
        if (name, label) in self.gauges or len(self.gauges) < MAX_SERIES:
            self.gauges[name, label] = value

    def note(self, what: str, facts: dict[str, Any]) -> None:
        """Count an event and keep its latest facts, for people."""
        self.count("events_total", what)
        if what in self.last or len(self.last) < MAX_SERIES:
            self.last[what] = facts

    @contextmanager
    def stage(self, name: str, size_bytes: int = 0) -> Iterator[None]:
        """Time a stage: adds to its seconds, runs and bytes, failed or not."""
        start = self.clock()
        try:
            yield
        except BaseException:
            self.count("stage_failures_total", name)
            raise
        finally:
            self.count("stage_seconds_total", name, self.clock() - start)
            self.count("stage_runs_total", name)
            self.count("stage_bytes_total", name, size_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON: {"counters": {name: {label: n}}, "gauges": ..., "last": ...}."""
        out: dict[str, Any] = {"counters": {}, "gauges": {}, "last": dict(self.last)}
        for kind, table in (("counters", self.counters), ("gauges", self.gauges)):
            for (name, label), value in sorted(table.items()):
                out[kind].setdefault(name, {})[label] = value
        return out

    def prometheus(self) -> str:
        """The text exposition format."""
        lines = []
        for kind, table in (("counter", self.counters), ("gauge", self.gauges)):
            for name in sorted({name for name, _ in table}):
                lines.append(f"# TYPE {PREFIX}{name} {kind}")
                for (n, label), value in sorted(table.items()):
                    if n == name:
                        escaped = label.replace("\\", "\\\\").replace('"', '\\"')
                        escaped = escaped.replace("\n", "\\n")
                        tags = f'{{what="{escaped}"}}' if label else ""
                        lines.append(f"{PREFIX}{name}{tags} {float(value)!r}")
        return "\n".join(lines) + "\n"
