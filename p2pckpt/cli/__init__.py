"""The p2pckpt command."""
