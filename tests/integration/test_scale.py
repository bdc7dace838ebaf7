"""`make scale` at a small size: it measures what it says, and its bounds can fail."""

from dataclasses import replace

import pytest

from tests.bench.scale import run
from tests.bench.sizes import broken, table


@pytest.fixture(scope="module")
def small():
    (size,) = run([9], checkpoints=2, layout="rs:2,1", durable=False)
    return size


def test_a_checkpoint_is_agreed_on_with_few_requests(small):
    assert len(small.checkpoints) == 2
    for checkpoint in small.checkpoints:
        assert checkpoint.seal_s > 0
        assert checkpoint.decide_s > 0
        assert checkpoint.notify_s > -0.1  # a watch may be faster than the transaction's answer
        assert len(checkpoint.requests) == 9
    assert small.most_requests <= 2, "a node whose part goes well reads the group records, once"
    assert 0 < small.largest["bytes"] < 64 * 1024
    assert 0 < small.largest["operations"] <= 128
    assert "notify" in table([small])


def test_every_bound_is_looked_at(small):
    slow = [replace(c, seal_s=9.0, requests=[9] * 9) for c in small.checkpoints]
    bad = replace(small, checkpoints=slow, largest={"bytes": 70_000, "operations": 129})
    said = "; ".join(broken([small, bad]))
    for what in ("requests, at most", "requests of one node", "70000 bytes", "129 operations"):
        assert what in said
    for what in ("at most 3.0 s", "times as long"):
        assert what in said
