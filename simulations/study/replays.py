"""A trace drives the model, or the world: the failures of a file instead of those of a process.

Intuition: the losses of a trace come when they came, as many nodes at once as there were; which
nodes they were, and of which cause, is not in the file and is drawn. So one trace gives many runs,
whose spread says how much of the answer is luck of the nodes.

Contract: `drive` runs every scheme on the same histories, for as long as the trace is, with the
trace's own MTBF: the decider knows what the job will meet. The scenario's own failure processes
stand still; its causes, stages, links and spares hold. Raises UsageError for a trace without a
loss, ConfigError where the fleet is smaller than a loss. `absences` gives the world, which lasts
minutes and has few nodes, some losses of a trace in a row, in its own time and size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from p2pckpt.errors import UsageError
from simulations.study.hazards import replay
from simulations.study.model import Outcome, run
from simulations.study.plan import prepare
from simulations.study.scenario import Scenario
from simulations.study.schemes import parse
from simulations.study.statistics import Estimate, mean
from simulations.study.traces import Trace

EDGE = 0.05
"""Share of the world's time before the first loss and after the last."""


@dataclass(frozen=True)
class Driven:
    """What one scheme made of a trace; counts over all runs, times in seconds."""

    scheme: str
    interval_s: float
    ettr: Estimate
    lost_work_s: float
    failures: int
    incidents: int
    fallbacks: int


def drive(
    scenario: Scenario, trace: Trace, names: Sequence[str], runs: int, seed: int
) -> list[Driven]:
    """Each scheme under the trace, ``runs`` times with other nodes lost."""
    losses = trace.losses()
    if not losses or runs < 2:
        raise UsageError(
            f"trace {trace.name}: needs a loss and 2 runs, has {len(losses)} losses, {runs} runs"
        )
    job = scenario.varied("horizon_s", trace.duration_s)
    job = job.varied("hazards.mtbf_s", trace.duration_s / len(losses))
    seeds = np.random.SeedSequence(seed).spawn(runs)
    histories = [replay(job, losses, one) for one in seeds]
    found = []
    for name in names:
        plan = prepare(job, parse(name))
        outcomes = [run(plan, history) for history in histories]
        found.append(_driven(plan.scheme.name, plan.interval_s, outcomes))
    return found


def absences(trace: Trace, nodes: int, losses: int) -> tuple[tuple[float, float], ...]:
    """The first nodes that were lost, up to ``losses`` of them: (gone, back), each.

    Times are shares of the time from the first loss to the last, gaps as they were; a node that
    was not back by then is back at 1. Who was gone first is back first. Of a trace of more than
    ``nodes`` as many go at once as are the same share of ``nodes``, and at least one. Raises
    UsageError where the trace has no loss.
    """
    size = min(1.0, nodes / trace.most) if trace.most else 1.0
    waiting: deque[int] = deque()
    gone: list[float] = []
    back: dict[int, float] = {}
    for event in trace.events:
        lost = min(max(1, round(event.lost * size)), losses - len(gone)) if event.lost else 0
        for _ in range(lost):
            waiting.append(len(gone))
            gone.append(event.at_s)
        for _ in range(max(1, round(event.returned * size)) if event.returned else 0):
            if waiting:
                back[waiting.popleft()] = event.at_s
    if not gone:
        raise UsageError(f"trace {trace.name}: no node was lost in it")
    span_s = max(gone[-1] - gone[0], 1.0)

    def share(at_s: float) -> float:
        return min(1.0, EDGE + (1 - 2 * EDGE) * (at_s - gone[0]) / span_s)

    return tuple((share(at_s), share(back[i]) if i in back else 1.0) for i, at_s in enumerate(gone))


def _driven(name: str, interval_s: float, outcomes: Sequence[Outcome]) -> Driven:
    lost = [seconds for outcome in outcomes for seconds in outcome.lost_work_s]
    return Driven(
        scheme=name,
        interval_s=interval_s,
        ettr=mean([outcome.ettr for outcome in outcomes]),
        lost_work_s=sum(lost) / len(lost) if lost else 0.0,
        failures=sum(outcome.failures for outcome in outcomes),
        incidents=sum(outcome.incidents for outcome in outcomes),
        fallbacks=sum(outcome.fallbacks for outcome in outcomes),
    )
