"""The study: a model of months of failures, for every scheme the same; `story` tells it."""
