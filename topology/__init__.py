"""Where a shard may live: clusters, placement and what a placement survives."""

from topology.cluster import LEVELS, Cluster, Node, TopologyError
from topology.place import place, place_all
from topology.rules import POLICIES, Level, Placement, Policy, Rules
from topology.survive import (
    Hazard,
    Odds,
    Share,
    WorstCase,
    odds,
    sources,
    survivable_losses,
    survives,
    why_not,
    worst_case,
)

__all__ = [
    "LEVELS",
    "POLICIES",
    "Cluster",
    "Hazard",
    "Level",
    "Node",
    "Odds",
    "Placement",
    "Policy",
    "Rules",
    "Share",
    "TopologyError",
    "WorstCase",
    "odds",
    "place",
    "place_all",
    "sources",
    "survivable_losses",
    "survives",
    "why_not",
    "worst_case",
]
