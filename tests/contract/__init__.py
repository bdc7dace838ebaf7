"""One suite per port, run against every backend of it: see `harness`."""
