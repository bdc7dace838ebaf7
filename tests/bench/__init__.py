"""What the product costs, in copies of the same bytes: `python -m tests.bench`, `make bench`."""
