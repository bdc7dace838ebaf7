"""How long it takes to move bytes: a fluid model of the narrowest place, no packets.

Intuition: a push, a restore and an upload are many equal flows at once, and such flows end when the
most loaded resource has passed all its bytes: time = max over resources of bytes / capacity. Only
where flows differ does it matter how they share; then max-min fair rates are filled progressively
(Bertsekas and Gallager, Data Networks, 6.5.2), and raised again each time a flow ends.

Contract: pure. `Flow`s name the resources that they cross; `bottleneck_s` is a lower bound of
`completion_s` and equal to it for uniform flows. The named times below (`push_s` ...) are the
bottleneck of all that moves at once, at the line rate times the efficiency that is really reached,
less the share that training takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulations.study.scenario import Fleet, Links


@dataclass(frozen=True)
class Flow:
    """Bytes that cross all of ``resources`` at the same rate."""

    bytes: float
    resources: tuple[str, ...]


def bottleneck_s(flows: Sequence[Flow], capacity: Mapping[str, float]) -> float:
    """Seconds that the most loaded resource needs for its bytes. KeyError: unknown resource."""
    load: Counter[str] = Counter()
    for flow in flows:
        for name in flow.resources:
            load[name] += flow.bytes  # type: ignore[assignment]
    return max((amount / capacity[name] for name, amount in load.items()), default=0.0)


def fair_rates(flows: Sequence[Flow], capacity: Mapping[str, float]) -> list[float]:
    """Max-min fair rate of each flow, by progressive filling. KeyError: unknown resource."""
    rates = [float("inf") if not flow.resources else 0.0 for flow in flows]
    open_flows = {i for i, flow in enumerate(flows) if flow.resources}
    left = dict(capacity)
    while open_flows:
        users = Counter(name for i in open_flows for name in flows[i].resources)
        step, tight = min((left[name] / count, name) for name, count in users.items())
        for i in open_flows:
            rates[i] += step
        for name, count in users.items():
            left[name] -= step * count
        open_flows -= {i for i in open_flows if tight in flows[i].resources}
    return rates


def completion_s(flows: Sequence[Flow], capacity: Mapping[str, float]) -> float:
    """Seconds until the last flow ends, if rates are max-min fair at every moment."""
    left = [(flow.bytes, flow) for flow in flows if flow.bytes > 0]
    now = 0.0
    while left:
        rates = fair_rates([flow for _, flow in left], capacity)
        step = min(amount / rate for (amount, _), rate in zip(left, rates, strict=True))
        now += step
        after = [
            (amount - rate * step, flow) for (amount, flow), rate in zip(left, rates, strict=True)
        ]
        done = 1e-9 * max(flow.bytes for flow in flows)
        left = [(amount, flow) for amount, flow in after if amount > done]
    return now


# -- what a checkpoint moves -------------------------------------------------------------------


def nic_bytes_per_s(links: Links) -> float:
    """What one node's network really gives a checkpoint, in each direction."""
    return links.nic_bytes_per_s * links.efficiency * (1 - links.training_share)


def uplink_bytes_per_s(links: Links, fleet: Fleet, level: str) -> float:
    """A domain's way out."""
    return nic_bytes_per_s(links) * dict(fleet.domains)[level] / dict(links.uplinks)[level]


def push_s(links: Links, fleet: Fleet, sent_bytes: float) -> float:
    """Every node sends (and so receives) ``sent_bytes`` to nodes of other domains at once."""
    times = [sent_bytes / nic_bytes_per_s(links)]
    for level, _ in links.uplinks:
        size = dict(fleet.domains)[level]
        times.append(size * sent_bytes / uplink_bytes_per_s(links, fleet, level))
    return max(times)


def pull_s(links: Links, fleet: Fleet, wanted_bytes: float, nodes: Sequence[int]) -> float:
    """The ``nodes`` pull ``wanted_bytes`` each from many donors: their NICs, their uplinks."""
    times = [wanted_bytes / nic_bytes_per_s(links)]
    for level, _ in links.uplinks:
        most = max(Counter(fleet.domain(level, node) for node in nodes).values(), default=0)
        times.append(most * wanted_bytes / uplink_bytes_per_s(links, fleet, level))
    return max(times)


def store_s(links: Links, fleet: Fleet, total_bytes: float) -> float:
    """All nodes move ``total_bytes`` together to or from the store; 0 where there is none."""
    if not links.s3_bytes_per_s:
        return 0.0
    each = total_bytes / fleet.nodes
    per_node = min(links.s3_node_bytes_per_s or float("inf"), nic_bytes_per_s(links))
    return max(total_bytes / links.s3_bytes_per_s, each / per_node)
