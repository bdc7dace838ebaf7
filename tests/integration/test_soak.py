"""A thousand saves in fast motion (`make soak ARGS="--fast --saves 1000"`); judges that can fail.

What is judged here is what the full soak judges over 10,000.
"""

import pytest

from tests.soak.__main__ import main
from tests.soak.watch import MOST_SLOPE, Verdict, largest, slopes


@pytest.mark.slow
def test_a_thousand_saves_leave_nothing_behind(capsys):
    failed = main(["--fast", "--saves", "1000"])
    told = capsys.readouterr().out
    assert not failed, told
    assert "etcd MB, most" in told


def test_a_leak_is_seen_and_a_warm_up_is_not():
    leak = {at: {"agent RSS MB": 50 + 0.0015 * at} for at in range(50, 2001, 50)}
    flat = {at: {"agent RSS MB": 60 - 1000 / at} for at in range(50, 10_001, 50)}
    (leaking,) = slopes(leak)
    assert leaking.last == pytest.approx(0.15)
    assert not leaking.passed
    assert slopes(flat)[0].passed
    full = {50: {"etcd MB": 17.0}, 100: {"etcd MB": 1.0}}
    assert not largest(full, "etcd MB", 16.8).passed
    assert Verdict("x", 0.0, MOST_SLOPE, MOST_SLOPE).passed
