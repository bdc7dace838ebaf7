"""Paper checks about time: failure rates, intervals, and what a failure wastes.

Intuition: the papers' formulas are first-order, the study's engine is exact. Here each formula is
computed, and the same job is run in the engine, whose failures come from its own processes. The
intervals are also asked of the product's decider, which must choose as Daly does.

Contract: `FORMS` by name, each a `Form` (see ``finding.py``). No published value stands here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.random import Generator

from p2pckpt.save.schedule import Tier, decide_schedule
from simulations.papers import trials
from simulations.papers.finding import Finding, Form, Given
from simulations.study import formulas
from simulations.study.hazards import History, draw
from simulations.study.model import Outcome, run
from simulations.study.plan import prepare
from simulations.study.scenario import (
    DAY_S,
    YEAR_S,
    Cause,
    Fate,
    Fleet,
    Hazards,
    Links,
    Recovery,
    Saving,
    Scenario,
)
from simulations.study.schemes import parse

HISTORIES = 100
"""Failure histories that are drawn for a rate."""
DAYS = 400_000
"""Days of machines that fail."""
RUNS = 20
FAILURES = 500
"""Failures of one run, on average."""
RARE = 3_000
"""Intervals between two failures that do not meet."""
FAST = 1e18
"""Bytes a second of what must not take time."""


# -- jobs that are played --------------------------------------------------------------------------


def _job(nodes: int, mtbf_s: float, horizon_s: float, shape: float = 1.0) -> Scenario:
    """A job without costs that is stopped by single processes; what it costs is added by key."""
    stop = Cause("stop", Fate.PROCESS, share=1.0, evict=False)
    return Scenario(
        "paper check", "", horizon_s, 0.0, Fleet(nodes), Links(FAST, FAST, s3_bytes_per_s=FAST),
        Saving(), Recovery(), Hazards(mtbf_s, (stop,), shape=shape),
    )  # fmt: skip


def _histories(rng: Generator, job: Scenario, count: int) -> list[History]:
    seed = np.random.SeedSequence(int(rng.integers(2**63)))
    return [draw(job, child) for child in seed.spawn(count)]


def _run(rng: Generator, job: Scenario, scheme: str) -> list[Outcome]:
    plan = prepare(job, parse(scheme))
    return [run(plan, history) for history in _histories(rng, job, RUNS)]


def _mean(values: Sequence[float]) -> trials.Estimate:
    return trials.estimate(np.array(values, np.float64))


def _counts(rng: Generator, nodes: int, rate: float, days: float) -> list[float]:
    """Failures within ``days`` of each of many histories."""
    job = _job(nodes, formulas.job_mtbf_h(nodes, rate) * 3600, days * DAY_S)
    return [float(len(history.failures)) for history in _histories(rng, job, HISTORIES)]


def _stop_and_save(rng: Generator, save: Saving, restart_s: float, job: Scenario) -> list[Outcome]:
    """Saves that stop training, restarts from local memory."""
    costly = job.varied("saving", save).varied("recovery.init_s", restart_s)
    return _run(rng, costly, "local")


def _from_store(rng: Generator, save_s: float, interval_s: float, mtbf_s: float) -> list[Outcome]:
    """Saves into a store beside the training, each ``save_s`` long, read back as fast."""
    job = _job(1, mtbf_s, FAILURES * mtbf_s).varied("saving.s3_only_interval_s", interval_s)
    return _run(rng, job.varied("state_bytes", save_s * FAST), "s3")


# -- rates: PC-01, PC-02, PC-20 --------------------------------------------------------------------


def _sum(g: Given, _: Generator | None) -> Finding:
    return Finding(float(sum(g.any("counts").values())))


def _share(g: Given, _: Generator | None) -> Finding:
    return Finding(100 * g["part"] / g["whole"])


def _mtbf_of_events(g: Given, _: Generator | None) -> Finding:
    return Finding(g["days"] * 24 / g["events"])


def _node_rate(g: Given, _: Generator | None) -> Finding:
    nodes = g["gpus"] / g["gpus_per_node"]
    return Finding(formulas.failures_per_1000_node_days(g["events"], nodes, g["days"]))


def _event_count(g: Given, rng: Generator | None) -> Finding:
    nodes = g.whole("gpus") // g.whole("gpus_per_node")
    rate, days = g["per_1000_node_days"], g["days"]
    played = _mean(_counts(rng, nodes, rate, days)) if rng else None
    return Finding(rate * nodes * days / 1000, played)


def _event_spread(g: Given, rng: Generator | None) -> Finding:
    nodes = g.whole("gpus") // g.whole("gpus_per_node")
    rate, days = g["per_1000_node_days"], g["days"]
    z, played = g["sigmas"], None
    if rng:
        spread = float(np.std(_counts(rng, nodes, rate, days), ddof=1))
        played = trials.Estimate(z * spread, z * spread / math.sqrt(2 * HISTORIES))
    return Finding(z * math.sqrt(rate * nodes * days / 1000), played)


def _job_mtbf(g: Given, rng: Generator | None) -> Finding:
    nodes, rate = g.whole("gpus") // g.whole("gpus_per_node"), g["per_1000_node_days"]
    hours, played = formulas.job_mtbf_h(nodes, rate), None
    if rng:
        counts = _mean(_counts(rng, nodes, rate, 10.0))
        mean = 240.0 / counts.mean
        played = trials.Estimate(mean, mean * counts.se / counts.mean)
    return Finding(hours, played)


def _standbys(g: Given, rng: Generator | None) -> Finding:
    share, machines, p = g["share"], g.whole("machines"), g["daily_failure_probability"]
    played = None
    if rng:
        error = 4 * math.sqrt(share * (1 - share) / DAYS)
        days = rng.binomial(machines, p, DAYS)
        around = [share, share - error, share + error]
        found, low, high = np.quantile(days, around, method="inverted_cdf").tolist()
        played = trials.Estimate(found, max(high - found, found - low) / 4)
    return Finding(formulas.binomial_quantile(share, machines, p), played)


# -- intervals: PC-03, PC-12, PC-14, PC-22, PC-27 --------------------------------------------------


def _meta(g: Given) -> tuple[float, float, float, float]:
    """interval, write, restart, MTBF in minutes."""
    nodes = g["gpus"] / g["gpus_per_node"]
    mtbf = 60 * formulas.job_mtbf_h(nodes, g["per_1000_node_days"])
    return formulas.young(g["write_min"], mtbf), g["write_min"], g["restart_min"], mtbf


def _meta_ettr(g: Given, rng: Generator | None) -> Finding:
    interval, write, restart, mtbf = _meta(g)
    played = None
    if rng:
        nodes = g.whole("gpus") // g.whole("gpus_per_node")
        job = _job(nodes, mtbf * 60, 3 * FAILURES * mtbf * 60)
        save = Saving(interval_s=interval * 60, stall_s=write * 60)
        played = _mean([out.ettr for out in _stop_and_save(rng, save, restart * 60, job)])
    return Finding(formulas.ettr(interval, write, restart, mtbf), played)


def _exact_ettr(g: Given, rng: Generator | None) -> Finding:
    played = _meta_ettr(g, rng).played
    return Finding(1 / formulas.daly_cost(*_meta(g)), played)


def _decider_ettr(g: Given, _: Generator | None) -> Finding:
    write, restart, mtbf = _meta(g)[1:]
    return Finding(formulas.ettr(_decided(write, mtbf), write, restart, mtbf))


def _decided(save: float, mtbf: float) -> float:
    """What the product's decider chooses; minutes in, minutes out."""
    tier = Tier(block_s=save * 60, settle_s=0.0, low_s=1.0, high_s=YEAR_S)
    return decide_schedule(tier, None, 1 / (mtbf * 60), 0.0).ram.interval_s / 60


def _young(g: Given, _: Generator | None) -> Finding:
    return Finding(formulas.young(g["save_min"], g["mtbf_min"]))


def _daly(g: Given, _: Generator | None) -> Finding:
    return Finding(formulas.daly(g["save_min"], g["mtbf_min"]))


def _decider(g: Given, _: Generator | None) -> Finding:
    return Finding(_decided(g["save_min"], g["mtbf_min"]))


def _renewal(g: Given) -> Callable[[float], float]:
    save, restart, mtbf, shape = (g[x] for x in ("save_min", "restart_min", "mtbf_min", "shape"))
    return lambda interval: formulas.renewal_cost(interval, save, restart, mtbf, shape)


def _best_interval(g: Given, _: Generator | None) -> Finding:
    return Finding(formulas.best(_renewal(g), g["save_min"] / 2, 3 * g["mtbf_min"]))


def _best_cost(g: Given, rng: Generator | None) -> Finding:
    cost = _renewal(g)
    best = formulas.best(cost, g["save_min"] / 2, 3 * g["mtbf_min"])
    played = None
    if rng:
        mtbf_s = g["mtbf_min"] * 60
        job = _job(1, mtbf_s, FAILURES * mtbf_s, g["shape"])
        save = Saving(interval_s=best * 60, stall_s=g["save_min"] * 60)
        outs = _stop_and_save(rng, save, g["restart_min"] * 60, job)
        played = _mean([1 / out.ettr for out in outs])
    return Finding(cost(best), played)


def _against_best(rule: Callable[[float, float], float]) -> Form:
    def form(g: Given, _: Generator | None) -> Finding:
        cost = _renewal(g)
        best = formulas.best(cost, g["save_min"] / 2, 3 * g["mtbf_min"])
        return Finding(cost(rule(g["save_min"], g["mtbf_min"])) / cost(best))

    return form


def _availability(g: Given, _: Generator | None) -> Finding:
    return Finding(formulas.availability_cycle(g["save_min"], g["mttf_min"], g["repair_min"]))


def _availability_limit(g: Given, _: Generator | None) -> Finding:
    cycle = formulas.availability_cycle(g["save_min"], g["mttf_min"], g["repair_min"])
    return Finding(cycle / formulas.young(g["save_min"], g["mttf_min"]))


def _iterations_h(g: Given, _: Generator | None) -> Finding:
    return Finding(g["iterations"] * g["iteration_s"] / 3600)


def _mean_loss_h(g: Given, rng: Generator | None) -> Finding:
    interval = g["iterations"] * g["iteration_s"] / 3600
    return Finding(interval / 2, _played_waste(rng, 0.0, interval, 0.0))


# -- what a failure wastes: PC-06, PC-07, PC-08, PC-28 ---------------------------------------------


def _played_waste(
    rng: Generator | None, save: float, interval: float, retrieve: float
) -> trials.Estimate | None:
    """Lost work of failures that are rare against both clocks, and the retrieval on top."""
    if rng is None:
        return None
    outs = _from_store(rng, save, interval, RARE * interval)
    lost = _mean([sum(out.lost_work_s) / len(out.lost_work_s) for out in outs])
    return trials.Estimate(lost.mean + retrieve, lost.se)


def _save_min(g: Given, _: Generator | None) -> Finding:
    size = g["bytes_per_parameter"] * g["parameters"]
    return Finding(formulas.transfer_s(size, g["gbit_per_s"]) / 60)


def _back_to_back_min(g: Given, rng: Generator | None) -> Finding:
    save = _save_min(g, None).computed or 0.0
    played = _played_waste(rng, save, save, save)
    return Finding(formulas.wasted(save, save, save), played)


def _wasted_min(g: Given, rng: Generator | None) -> Finding:
    save, interval = g["save_min"], g["interval_min"]
    played = _played_waste(rng, save, interval, save)
    return Finding(formulas.wasted(save, interval, save), played)


def _per_iteration_min(g: Given, rng: Generator | None) -> Finding:
    step = g["iteration_s"] / 60
    played = _played_waste(rng, step, step, 0.0)
    return Finding(formulas.wasted(step, step, 0.0), played)


def _wasted_ratio(g: Given, _: Generator | None) -> Finding:
    save, step = g["save_min"], g["iteration_s"] / 60
    return Finding(formulas.wasted(save, save, save) / formulas.wasted(step, step, 0.0))


def _frequency_ratio(g: Given, _: Generator | None) -> Finding:
    return Finding(g["per_hour"] * g["other_interval_min"] / 60)


def _per_hour(g: Given, _: Generator | None) -> Finding:
    return Finding(3600 / g["iteration_s"])


def _achieved(g: Given, _: Generator | None) -> Finding:
    ideal = formulas.save_speedup(g["nodes"], g["nic_gbit_per_s"], g["store_gbit_per_s"])
    return Finding(g["measured"] / ideal)


def _speedup_ratio(g: Given, _: Generator | None) -> Finding:
    few, many = (
        formulas.save_speedup(g[n], g["nic_gbit_per_s"], g["store_gbit_per_s"])
        for n in ("nodes", "more_nodes")
    )
    return Finding(many / few)


def _store_only(g: Given, rng: Generator | None) -> Finding:
    save, mtbf = g["state_bytes"] / g["bytes_per_s"], g["mtbf_h"] * 3600
    played, expected = None, None
    if rng:
        expected = 100 * formulas.store_only_loss_exact(save, mtbf)
        outs = _from_store(rng, save, save, mtbf)
        played = _mean([100 * (1 - out.ettr) for out in outs])
    return Finding(100 * formulas.store_only_loss(save, mtbf), played, expected)


FORMS: dict[str, Form] = {
    "sum": _sum,
    "share": _share,
    "mtbf of events": _mtbf_of_events,
    "node rate": _node_rate,
    "event count": _event_count,
    "event spread": _event_spread,
    "job MTBF": _job_mtbf,
    "stand-bys": _standbys,
    "ETTR": _meta_ettr,
    "ETTR, exact": _exact_ettr,
    "ETTR at the decider's interval": _decider_ettr,
    "Young": _young,
    "Daly": _daly,
    "decider": _decider,
    "best interval": _best_interval,
    "best cost": _best_cost,
    "Daly against the best": _against_best(formulas.daly),
    "decider against the best": _against_best(_decided),
    "availability": _availability,
    "availability against Young": _availability_limit,
    "iterations": _iterations_h,
    "mean loss of iterations": _mean_loss_h,
    "save of parameters": _save_min,
    "waste back to back": _back_to_back_min,
    "waste": _wasted_min,
    "waste of an iteration": _per_iteration_min,
    "waste ratio": _wasted_ratio,
    "frequency ratio": _frequency_ratio,
    "saves per hour": _per_hour,
    "achieved share": _achieved,
    "speedup ratio": _speedup_ratio,
    "store only": _store_only,
}
