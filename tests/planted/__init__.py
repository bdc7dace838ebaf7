"""Bugs that were planted into copies of the product, so that the world's checkers find them."""
