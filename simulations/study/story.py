"""The story of a study: the same failures for every scheme, and what became of each.

Intuition: two schemes are told apart by what they do with the same bad luck. So run i of every
scheme has the same failures (common random numbers), and schemes are compared by the mean of their
differences, run by run, which is known far better than the difference of their means.

Contract: a study is a function of scenario, runs and seed. `replicate` gives all outcomes,
`compare` a `Row` per scheme, `sweep` the rows over values of one input, `study` everything that the
report and the figures need. Every mean has its interval; a loss that was never seen has an upper
bound, and beside it the stratified share (`Plan.deep_share`) that needs no luck to be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from p2pckpt.errors import UsageError
from simulations.study import curves, hazards, model, schemes
from simulations.study.scenario import Scenario
from simulations.study.statistics import Estimate, enough, mean, never_seen, ratio

QUANTILES = np.linspace(0, 1, 201)
FIRST_BATCH = 10

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class Row:
    """One scheme under one scenario. Shares of time by `model.STAGES`; counts over all runs.

    ``gain``: its ETTR less the first scheme's, run by run. ``lost_s``: lost work of an incident,
    its mean and its `QUANTILES`. ``fallback``: share of incidents that RAM could not recover.
    """

    scheme: schemes.Scheme
    mtbf_s: float
    plan: model.Plan
    runs: int
    ettr: Estimate
    gain: Estimate
    stages: tuple[Estimate, ...]
    lost_s: Estimate
    lost_quantiles_s: tuple[float, ...]
    fallback: Estimate
    recovered: tuple[tuple[int, ...], ...]
    counts: dict[str, int]


@dataclass(frozen=True)
class Study:
    """All that `simulate run` found out."""

    scenario: Scenario
    runs: int
    seed: int
    rows: tuple[Row, ...]
    intervals: curves.Valley
    domains: tuple[curves.Curve, ...]
    scatter: tuple[curves.Scatter, ...]
    sensitivity: tuple[curves.Swing, ...]

    def at(self, mtbf_s: float) -> tuple[Row, ...]:
        """The rows of one MTBF, in the scenario's order."""
        return tuple(row for row in self.rows if row.mtbf_s == mtbf_s)

    @property
    def close(self) -> tuple[Row, ...]:
        """The rows at the scenario's own MTBF."""
        return self.at(self.scenario.hazards.mtbf_s)


def study(scenario: Scenario, runs: int, seed: int, progress: Progress = lambda *_: None) -> Study:
    """The whole study of ``scenario``; curves beside the main table take a quarter of the runs."""
    values = scenario.mtbf_sweep_s or (scenario.hazards.mtbf_s,)
    if scenario.hazards.mtbf_s not in values:
        values = tuple(sorted({*values, scenario.hazards.mtbf_s}))
    rows = sweep(scenario, ("hazards.mtbf_s", values), runs, seed, progress)
    few, main = max(2, runs // 4), scenario.schemes[0]

    def ettr(changed: Scenario, name: str) -> Estimate:
        outcomes = replicate(changed, (name,), few, seed)[schemes.parse(name).name]
        return mean([outcome.ettr for outcome in outcomes])

    return Study(
        scenario=scenario,
        runs=runs,
        seed=seed,
        rows=rows,
        intervals=curves.valley(scenario, main, ettr, progress),
        domains=curves.domain_losses(scenario),
        scatter=curves.scatter_widths(scenario),
        sensitivity=curves.sensitivity(scenario, main, ettr, progress),
    )


def sweep(
    scenario: Scenario,
    over: tuple[str, Sequence[float]],
    runs: int,
    seed: int,
    progress: Progress = lambda *_: None,
) -> tuple[Row, ...]:
    """The scenario's schemes compared at each value of one input, ``over`` = (key, values)."""
    key, values = over
    rows: list[Row] = []
    for number, value in enumerate(values):
        what = f"{key.rpartition('.')[2]} {value:g}"

        def tell(_: str, done: int, of: int, what: str = what, number: int = number) -> None:
            progress(what, number * of + done, len(values) * of)

        rows += compare(scenario.varied(key, value), scenario.schemes, runs, seed, tell)
    return tuple(rows)


def compare(
    scenario: Scenario,
    names: Sequence[str],
    runs: int,
    seed: int,
    progress: Progress = lambda *_: None,
) -> list[Row]:
    """A row for each scheme; gains are over the first."""
    found = replicate(scenario, names, runs, seed, progress)
    first = [outcome.ettr for outcome in next(iter(found.values()))]
    rng = np.random.default_rng(seed)
    return [_row(scenario, name, outcomes, first, rng) for name, outcomes in found.items()]


def replicate(
    scenario: Scenario,
    names: Sequence[str],
    runs: int,
    seed: int,
    progress: Progress = lambda *_: None,
    half_width: float = 0.0,
) -> dict[str, list[model.Outcome]]:
    """The outcomes of each scheme by its name; run i has the same failures for all.

    With ``half_width`` it stops as soon as every ETTR is known to it. Raises UsageError for no
    run, no scheme, or one twice.
    """
    wanted = [schemes.parse(name) for name in names]
    if runs < 1 or not wanted or len({s.name for s in wanted}) != len(wanted):
        raise UsageError(f"study: needs a run and different schemes, got {runs} runs of {names}")
    plans = {scheme.name: model.prepare(scenario, scheme) for scheme in wanted}
    found: dict[str, list[model.Outcome]] = {name: [] for name in plans}
    for number in range(runs):
        history = hazards.draw(scenario, np.random.SeedSequence(seed, spawn_key=(number,)))
        for name, plan in plans.items():
            found[name].append(model.run(plan, history))
        progress("runs", number + 1, runs)
        if (
            half_width
            and number + 1 >= FIRST_BATCH
            and all(enough([o.ettr for o in outcomes], half_width) for outcomes in found.values())
        ):
            break
    return found


def _row(
    scenario: Scenario,
    name: str,
    outcomes: Sequence[model.Outcome],
    first: Sequence[float],
    rng: np.random.Generator,
) -> Row:
    lost = np.array([s for outcome in outcomes for s in outcome.lost_work_s] or [0.0])
    incidents = [float(outcome.incidents) for outcome in outcomes]
    fallbacks = [float(outcome.fallbacks) for outcome in outcomes]
    nothing = Estimate(0.0, 0.0, 0.0)
    fallback, lost_s = nothing, nothing
    if sum(incidents):
        lost_s = ratio([sum(o.lost_work_s) for o in outcomes], incidents, rng)
        fallback = ratio(fallbacks, incidents, rng)
        if not sum(fallbacks):
            fallback = Estimate(0.0, 0.0, never_seen(int(sum(incidents))))
    counted = ("failures", "incidents", "planned", "merged", "fallbacks", "events", "snapshots",
               "uploads", "spares_waited")  # fmt: skip
    plan = model.prepare(scenario, schemes.parse(name))
    return Row(
        scheme=plan.scheme,
        mtbf_s=scenario.hazards.mtbf_s,
        plan=plan,
        runs=len(outcomes),
        ettr=mean([outcome.ettr for outcome in outcomes]),
        gain=mean([o.ettr - before for o, before in zip(outcomes, first, strict=True)]),
        stages=tuple(
            mean([o.seconds[i] / scenario.horizon_s for o in outcomes])
            for i in range(len(model.STAGES))
        ),
        lost_s=lost_s,
        lost_quantiles_s=tuple(np.quantile(lost, QUANTILES).tolist()),
        fallback=fallback,
        recovered=tuple(
            tuple(sum(o.recovered[fate][source] for o in outcomes)
                  for source in range(len(model.SOURCES)))
            for fate in range(len(model.FATES))
        ),
        counts={what: sum(getattr(o, what) for o in outcomes) for what in counted},
    )  # fmt: skip
