"""The way back: locate, fetch, decode, verify, load."""
