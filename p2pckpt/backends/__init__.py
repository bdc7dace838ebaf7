"""The only files that import a client or start a thread or a process."""
