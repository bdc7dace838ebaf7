"""The demo: a real training job on this machine loses ranks, nodes and a rack, and goes on."""
