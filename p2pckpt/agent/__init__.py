"""The node agent: one process a node that outlives trainers."""
