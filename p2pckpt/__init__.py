"""Peer-to-peer replicated in-memory checkpoints for distributed PyTorch training."""
