"""Where a shard may live: clusters, placement and what a placement survives."""

from topology.cluster import LEVELS, Cluster, Node, TopologyError
from topology.place import Level, Placement, Rules, place
from topology.survive import (
    Share,
    WorstCase,
    sources,
    survivable_losses,
    survives,
    why_not,
    worst_case,
)

__all__ = [
    "LEVELS",
    "Cluster",
    "Level",
    "Node",
    "Placement",
    "Rules",
    "Share",
    "TopologyError",
    "WorstCase",
    "place",
    "sources",
    "survivable_losses",
    "survives",
    "why_not",
    "worst_case",
]
