"""The registry: counts add up, stages time failures too, series are bounded, the text is valid."""

import json
import re
from itertools import count

import pytest

from p2pckpt.telemetry import MAX_SERIES, PREFIX, Telemetry


def ticking(*times):
    return Telemetry(iter(times).__next__)


def test_counts_and_gauges():
    t = Telemetry(lambda: 0.0)
    t.count("saves_total")
    t.count("saves_total", by=2)
    t.count("saves_total", "aborted")
    t.gauge("spare", 2, "step")
    t.gauge("spare", 1, "step")
    assert t.as_dict()["counters"] == {"saves_total": {"": 3, "aborted": 1}}
    assert t.as_dict()["gauges"] == {"spare": {"step": 1}}
    json.dumps(t.as_dict())


def test_a_note_counts_and_keeps_its_latest_facts():
    t = Telemetry(lambda: 0.0)
    t.note("commit", {"step": 1})
    t.note("commit", {"step": 2})
    assert t.counters["events_total", "commit"] == 2
    assert t.as_dict()["last"] == {"commit": {"step": 2}}


def test_a_stage_is_timed_whether_it_fails_or_not():
    t = ticking(10.0, 12.5, 20.0, 21.0)
    with t.stage("encode", 100):
        pass
    with pytest.raises(ZeroDivisionError), t.stage("encode", 50):
        raise ZeroDivisionError
    assert t.counters["stage_seconds_total", "encode"] == 3.5
    assert t.counters["stage_runs_total", "encode"] == 2
    assert t.counters["stage_bytes_total", "encode"] == 150
    assert t.counters["stage_failures_total", "encode"] == 1


def test_cancellation_counts_as_a_failure_and_goes_on():
    t = Telemetry(count().__next__)
    with pytest.raises(KeyboardInterrupt), t.stage("send"):
        raise KeyboardInterrupt
    assert t.counters["stage_failures_total", "send"] == 1


def test_the_number_of_series_is_bounded_and_no_count_is_lost():
    t = Telemetry(lambda: 0.0)
    for i in range(3 * MAX_SERIES):
        t.count("events_total", f"label {i}")
        t.gauge("things", i, f"label {i}")
        t.note(f"event {i}", {})
    assert len(t.counters) <= MAX_SERIES + 5
    assert len(t.gauges) <= MAX_SERIES
    assert len(t.last) <= MAX_SERIES
    assert sum(t.counters.values()) == 6 * MAX_SERIES
    assert t.counters["events_total", "other"] >= 2 * MAX_SERIES


LINE = re.compile(r'[a-zA-Z_:][a-zA-Z0-9_:]*(\{what="([^"\\\n]|\\["\\n])*"\})? \S+')


def lines(t):
    text = t.prometheus()
    assert text.endswith("\n")
    return text.splitlines()


def test_the_text_format():
    t = Telemetry(lambda: 0.0)
    t.count("saves_total", "a")
    t.count("saves_total", 'say "b\\"')
    t.gauge("spare", 1.5)
    found = lines(t)
    assert found == [
        f"# TYPE {PREFIX}saves_total counter",
        f'{PREFIX}saves_total{{what="a"}} 1.0',
        f'{PREFIX}saves_total{{what="say \\"b\\\\\\""}} 1.0',
        f"# TYPE {PREFIX}spare gauge",
        f"{PREFIX}spare 1.5",
    ]
    assert all(LINE.fullmatch(line) for line in found if line[0] != "#")


def test_a_line_feed_in_a_label_does_not_break_the_format():
    t = Telemetry(lambda: 0.0)
    t.note("two\nlines", {})
    assert all(LINE.fullmatch(line) for line in lines(t) if line[0] != "#")


def test_large_counters_are_exact():
    t = Telemetry(lambda: 0.0)
    with t.stage("send", 123_456_789_012):
        pass
    line = next(x for x in lines(t) if "stage_bytes_total{" in x)
    assert float(line.split()[-1]) == 123_456_789_012


def test_an_empty_registry_is_a_valid_text():
    assert Telemetry(lambda: 0.0).prometheus() == "\n"
