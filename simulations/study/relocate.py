"""The job of a scenario on another cluster: the nodes and labels of a file, all else as it was.

Intuition: what fails how often, what a copy costs and how long a restart takes are known for some
job; which machines share a rack is known to Slurm or Kubernetes. Put together they say what that
job would need here.

Contract: pure. What cannot be carried over is not made up: causes of a level for which no node has
a label are left out, and a note says so, which `recommend` turns into a warning.
"""

from __future__ import annotations

from dataclasses import replace

from simulations.study.hazards import node_rate
from simulations.study.scenario import LEFT_OUT, Note, Scenario
from topology import Cluster

STALLS = ("stall_s", "s3_stall_s", "s3_only_stall_s")


def on_cluster(
    scenario: Scenario, cluster: Cluster, file: str, state_bytes: float = 0.0
) -> Scenario:
    """The job of ``scenario`` on the nodes of a real cluster, which ``file`` describes.

    Every node fails, and is maintained, as often as one of the scenario's; domains as often as its
    domains. Causes and uplinks of levels that the cluster has no label for are left out. Training
    stands still as long for a byte as there. Spares are not among the nodes: 0, until somebody says
    how many. ``state_bytes`` 0: the scenario's.
    """
    state_bytes = state_bytes or scenario.state_bytes
    used = {level for node in cluster.nodes for level, _ in node.domains}
    sizes = tuple(
        (level, max(len(names) for label, names in cluster.members(level).items() if label))
        for level in cluster.levels
        if level in used
    )
    scale = len(cluster) / scenario.fleet.nodes
    bytes_ratio = state_bytes / scenario.state_bytes / scale
    causes = tuple(
        replace(cause, per_year=cause.per_year * scale) if cause.planned else cause
        for cause in scenario.hazards.causes
        if cause.level == "node" or cause.level in used
    )
    left_out = [
        Note(LEFT_OUT, cause.name, f"no node of {file} has a label for {cause.level}", False)
        for cause in scenario.hazards.causes
        if cause.level not in ("node", *used)
    ]
    mtbf_s = 1 / (node_rate(scenario) * scale)
    changed = ("fleet.", "hazards.mtbf", "state_bytes", *(f"saving.{name}" for name in STALLS))
    kept = [note for note in scenario.notes if not note.key.startswith(changed)]
    stalls = {name: getattr(scenario.saving, name) * bytes_ratio for name in STALLS}
    told = [
        Note("fleet.nodes", len(cluster), file, False),
        Note("state_bytes", state_bytes, f"given, or as in {scenario.name}", False),
        Note("hazards.mtbf_s", mtbf_s, f"a node fails as often as in {scenario.name}", True),
        Note("saving.stall_s", stalls["stall_s"], f"for a byte as in {scenario.name}", True),
    ]
    return replace(
        scenario,
        name=f"{scenario.name} on {file}",
        about=f"{state_bytes / 1e12:.3g} TB of state on the {len(cluster)} nodes of {file}, "
        f"all else as in {scenario.name}",
        state_bytes=state_bytes,
        fleet=replace(
            scenario.fleet,
            nodes=len(cluster), domains=sizes, labelled=bool(sizes), spares=0, places=cluster,
        ),
        links=replace(
            scenario.links, uplinks=tuple(u for u in scenario.links.uplinks if u[0] in used)
        ),
        saving=replace(scenario.saving, **stalls),
        hazards=replace(scenario.hazards, mtbf_s=mtbf_s, mtbf_counts="node", causes=causes),
        mtbf_sweep_s=(),
        notes=(*kept, *left_out, *told),
    )  # fmt: skip
