"""A scenario and a scheme, worked out before anything random happens.

Intuition: how long a push, a restore, a rebuild and an upload take, where the pieces lie and how
often to save follow from the description of the cluster alone. They are worked out once; then runs
differ only in their failures.

Contract: placements are the product's (`topology.place`), intervals are the product's
(`p2pckpt.save.schedule`), unless the scenario gives one; none is below the time that a save takes
to settle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from p2pckpt.errors import ConfigError
from p2pckpt.save.schedule import Schedule, Tier, decide_schedule
from simulations.study import network
from simulations.study.exposure import deep_share
from simulations.study.hazards import cause_rates
from simulations.study.scenario import Fleet, Links, Scenario
from simulations.study.schemes import Pieces, Scheme, pieces
from topology import Cluster


@dataclass(frozen=True)
class Plan:
    """A scenario and a scheme, worked out: what the engine needs, and nothing random.

    ``every``: each so manieth snapshot goes to the store; 0: none.
    ``pull_bytes``: what a replaced node reads from peers.
    """

    scheme: Scheme
    pieces: Pieces
    fleet: Fleet
    links: Links
    horizon_s: float
    interval_s: float
    stall_s: float
    push_s: float
    every: int
    upload_s: float
    store_s: float
    local_s: float
    pull_bytes: float
    window_s: float
    return_wait_s: float
    evict_group: int
    check_s: float
    failures_per_s: float
    deep_share: float
    schedule: Schedule
    single_s: float

    @property
    def overhead(self) -> float:
        """Share of time that saving, work done again and restore cost, to first order."""
        return self.schedule.overhead

    def pull_s(self, nodes: Sequence[int]) -> float:
        """Peers bring replaced ``nodes`` their bytes."""
        if len(nodes) == 1:
            return self.single_s
        return network.pull_s(self.links, self.fleet, self.pull_bytes, nodes)


@dataclass(frozen=True)
class Costs:
    """Seconds of a push, of an upload (and so of a restore from the store), of a restore from
    peers; the share of failures too deep for RAM."""

    push_s: float
    upload_s: float
    pull_s: float
    deep_share: float


def placed(fleet: Fleet, scheme: Scheme) -> Pieces:
    """Where the pieces of ``scheme`` lie; kept, as sweeps ask again and again."""
    return _placed(replace(fleet, spares=0, ram_bytes=0.0), scheme)


@lru_cache(maxsize=64)
def _placed(fleet: Fleet, scheme: Scheme) -> Pieces:
    return pieces(_cluster(fleet), scheme)


@lru_cache(maxsize=4)
def _cluster(fleet: Fleet) -> Cluster:
    return fleet.cluster()


def prepare(scenario: Scenario, scheme: Scheme) -> Plan:
    """What the engine needs. Raises ConfigError where a job without RAM has no store either."""
    links, fleet, each = scenario.links, scenario.fleet, scenario.node_bytes
    if not scheme.memory and not links.s3_bytes_per_s:
        raise ConfigError(f"scenario {scenario.name}: {scheme.name} needs links.s3_bytes_per_s")
    where = placed(fleet, scheme)
    push = network.push_s(links, fleet, each * scheme.sent) if scheme.memory else 0.0
    store = network.store_s(links, fleet, scenario.state_bytes)
    local = each / links.ram_bytes_per_s
    rebuild = network.push_s(links, fleet, each * (scheme.ram + (scheme.read if scheme.n else 0)))
    stages = _mean_incident_s(scenario)
    deep = deep_share(scenario, scheme, where, stages + rebuild)
    single = max(local, network.pull_s(links, fleet, each, (0,)))
    schedule = schedule_of(scenario, scheme, Costs(push, store, single, deep))
    failures = _failures_per_s(scenario)
    saving = scenario.saving
    only_store = not scheme.memory
    return Plan(
        scheme=scheme, pieces=where, fleet=fleet, links=links, horizon_s=scenario.horizon_s,
        interval_s=schedule.ram.interval_s,
        stall_s=saving.s3_only_stall_s if only_store else saving.stall_s,
        push_s=store if only_store else push,
        every=schedule.offload_every, upload_s=store, store_s=store,
        local_s=local, pull_bytes=each, window_s=rebuild,
        return_wait_s=scenario.recovery.return_wait_s,
        evict_group=scenario.recovery.evict_group, check_s=scenario.recovery.check_s,
        failures_per_s=failures, deep_share=deep, schedule=schedule,
        single_s=single,
    )  # fmt: skip


def schedule_of(scenario: Scenario, scheme: Scheme, costs: Costs) -> Schedule:
    """The product's decider on this scenario; an interval that is given bounds it from both
    sides."""
    saving, rate, upload = scenario.saving, _failures_per_s(scenario), costs.upload_s

    def tier(times: tuple[float, float, float], given: float, bounds: tuple[float, float]) -> Tier:
        block, settle, restore = times
        low, high = (given, given) if given else bounds
        return Tier(block, settle, low, high, restore)

    slow = (saving.s3_low_s, saving.s3_high_s)
    if not scheme.memory:
        times = (saving.s3_only_stall_s, upload, upload)
        return decide_schedule(tier(times, saving.s3_only_interval_s, slow), None, rate, 0.0)
    store = None
    if scenario.links.s3_bytes_per_s:
        times = (saving.s3_stall_s, costs.push_s + upload, upload)
        store = tier(times, saving.s3_interval_s, slow)
    times = (saving.stall_s, costs.push_s, costs.pull_s)
    ram = tier(times, saving.interval_s, (saving.low_s, saving.high_s))
    return decide_schedule(ram, store, rate, costs.deep_share)


def _failures_per_s(scenario: Scenario) -> float:
    """Unplanned ones, of all causes."""
    pairs = zip(scenario.hazards.causes, cause_rates(scenario), strict=True)
    return sum(rate for cause, rate in pairs if not cause.planned)


def _mean_incident_s(scenario: Scenario) -> float:
    """Seconds from a failure until the job trains again, without restore, averaged over causes."""
    rates, recovery = cause_rates(scenario), scenario.recovery
    pairs = [
        (r, c.detect_s * recovery.detect_scale + c.diagnose_s * recovery.diagnose_scale)
        for c, r in zip(scenario.hazards.causes, rates, strict=True) if not c.planned
    ]  # fmt: skip
    total = sum(r for r, _ in pairs)
    own = sum(r * s for r, s in pairs) / total if total else 0.0
    return own + recovery.allocate_s + recovery.init_s
