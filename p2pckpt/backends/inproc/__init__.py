"""All ports in one process, for tests and for the simulator; `cluster` is the story file."""
