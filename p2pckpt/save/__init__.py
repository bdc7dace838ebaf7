"""The way out: snapshot, encode, place, send, commit."""
