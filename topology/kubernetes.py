"""A cluster from ``kubectl get nodes -o json``: the labels by which clouds say where a node is.

Intuition: every cloud has its own names for the same three steps up from a machine. They are mapped
to ``leaf``, ``spine`` and ``core``, so that one rule (spread over leaf) means the same everywhere.

Contract: pure. Of each level the first label that a node has counts; a level that no node has is
left out; ``more`` adds labels of one's own before the known ones. Where a cloud tells the physical
machine, that is the host, else the node is. Errors name the item.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from topology.cluster import HOST, TopologyError

LABELS: dict[str, tuple[str, ...]] = {  # levels from narrow to wide
    HOST: ("cloud.google.com/gce-topology-host", "oci.oraclecloud.com/rdma.host_id"),
    "chassis": ("topology.rook.io/chassis",),
    "nvlink": (
        "nvidia.com/gpu.clique",
        "network.topology.nvidia.com/accelerator",
        "accelerator.topograph.run/domain",
        "topology.k8s.aws/ultraserver-id",
    ),
    "rack": ("topology.kubernetes.io/rack", "topology.rook.io/rack"),
    "layer4": ("topology.k8s.aws/network-node-layer-4",),
    "leaf": (
        "topology.k8s.aws/network-node-layer-3",
        "cloud.google.com/gce-topology-subblock",
        "oci.oraclecloud.com/rdma.local_block_id",
        "network.topology.nvidia.com/leaf",
        "fabric.topograph.run/tier-0",
    ),
    "spine": (
        "topology.k8s.aws/network-node-layer-2",
        "cloud.google.com/gce-topology-block",
        "oci.oraclecloud.com/rdma.network_block_id",
        "network.topology.nvidia.com/spine",
        "fabric.topograph.run/tier-1",
    ),
    "core": (
        "topology.k8s.aws/network-node-layer-1",
        "oci.oraclecloud.com/rdma.hpc_island_id",
        "network.topology.nvidia.com/core",
        "fabric.topograph.run/tier-2",
    ),
    "pod": ("topology.rook.io/pod",),
    "power": ("topology.rook.io/pdu",),
    "zone": ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone"),
    "region": ("topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region"),
}


def parse_nodes(
    text: str, more: Mapping[str, str]
) -> tuple[dict[str, dict[str, str]], tuple[str, ...]]:
    """Labels by node ("host" included), and the levels from narrow to wide.

    ``more``: level to label key; a level that is not known yet is taken as wider than all others.
    """
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise TopologyError(f"needs JSON: {e}") from e
    items = document.get("items", [document]) if isinstance(document, dict) else None
    if not isinstance(items, list) or not items:
        raise TopologyError("needs a list of nodes under 'items', as `kubectl get nodes -o json`")
    wanted = {
        level: ((more[level],) if level in more else ()) + LABELS.get(level, ())
        for level in (*LABELS, *(level for level in more if level not in LABELS))
    }
    found: dict[str, dict[str, str]] = {}
    for number, item in enumerate(items):
        meta = item.get("metadata") if isinstance(item, dict) else None
        name = meta.get("name") if isinstance(meta, dict) else None
        labels = meta.get("labels") or {} if isinstance(meta, dict) else None
        if not isinstance(name, str) or not name or not isinstance(labels, dict):
            raise TopologyError(f"item {number}: needs metadata with a name and labels, found none")
        if name in found:
            raise TopologyError(f"item {number}: node {name!r} is given twice")
        found[name] = {}
        for level, keys in wanted.items():
            values = [labels[key] for key in keys if labels.get(key)]
            if values and not isinstance(values[0], str):
                raise TopologyError(f"item {number}: node {name!r}: label {values[0]!r} is no text")
            if values:
                found[name][level] = values[0]
    used = {level for labels in found.values() for level in labels} - {HOST}
    return found, tuple(level for level in wanted if level in used)
