"""The world: the product's own agents under virtual time, faults and checkers; `story` tells it."""
