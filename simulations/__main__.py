"""`python -m simulations ...` is `p2pckpt simulate ...`."""

import sys

from p2pckpt.cli.main import main

sys.argv.insert(1, "simulate")
main()
