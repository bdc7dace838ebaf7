"""Bent input at every door: a few hundred cases each, and all that ever broke something.

`make fuzz` goes on for as long as you like (see `__main__.py`).
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import seeds
from tests.fuzz.mutate import MOVES, mutated
from tests.fuzz.targets import TARGETS, check

some = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
moves = st.lists(
    st.tuples(st.integers(0, MOVES - 1), st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1)),
    min_size=1,
    max_size=6,
)

SCENARIO = seeds.SCENARIOS[0]
NODE = b'nodes = ["n1"]\n'
DEEP = b".rack" * 4000
CHAIN = b"".join(b"SwitchName=s%d Switches=s%d\n" % (i, i + 1) for i in range(3000))
OPEN = seeds.CHECKPOINT[:-1] + b',"x":' + b"[" * 40_000
OUTCOME = seeds.STATE.replace(b'"ordinal":2', b'"ordinal":9007199254740993')
CASES = {
    "a number beyond floats": ("config", b"lease_s = " + b"9" * 400, False),
    "a number too long for Python": ("config", b"lease_s = " + b"9" * 5000, False),
    "brackets without end": ("config", b"node = " + b"[" * 5000, False),
    "a deep table for a setting": ("config", b"[node" + DEEP + b"]\na = 1", False),
    "RAM that no machine has": ("config", b"ram_budget_bytes = 1" + b"0" * 30, False),
    "a path with a zero byte": ("config", b'directory = "/dev/shm/\\u0000"', False),
    "topology: a long number": ("topology", b"nodes = " + b"9" * 5000, False),
    "topology: a deep table": ("topology", NODE + b"[domains" + DEEP + b"]\na = 1", False),
    "one range, two hundred times": ("host list", b"n[" + b"0-999999," * 200 + b"1]", False),
    "two lists of a few thousand": ("host list", b"a[1-2000],b[1-600]", True),
    "switches one over the other": ("topology.conf", CHAIN + b"SwitchName=s3000 Nodes=n1\n", False),
    "counts that jump by millions": ("trace", b"0,9999999\n" + b"".join(
        b"%d,9999999\n%d,0\n%d,0\n%d,9999999\n" % (i, i, i, i) for i in range(1, 500)), False),
    "a count too long for Python": ("trace", b"0," + b"9" * 5000, False),
    "a cell too long for csv": ("trace", b"0,1\n" + b"1" * 140_000 + b",1\n", False),
    "a time beyond all": ("trace", b"0,1\n1e308,1\n1e308,0\n", False),
    "scenario: a deep table": ("scenario", b"[a" + DEEP + b"]\nb = true", False),
    "scenario: a word for a table": ("scenario", b'hazards = "x"', False),
    "scenario: words for causes": ("scenario", b'[hazards]\ncauses = ["x"]', False),
    "scenario: a word for a number": ("scenario", SCENARIO.replace(
        b"horizon_s = {", b'horizon_s = "soon" # {'), False),
    "scenario: bytes that are no text": ("scenario", b'name = "\xff"', False),
    "an ordinal far beyond the floor": ("job records", OUTCOME, True),
    "brackets without end in a bucket": ("checkpoint.json", OPEN, False),
}  # fmt: skip
"""What, and (target, input, is it accepted?): each once raised something else, hung, or took all
of the memory."""


@pytest.mark.parametrize("name", list(TARGETS))
def test_what_the_product_writes_is_accepted(name):
    assert all(check(name, data) for data in TARGETS[name].seeds) or name == "agent reply"


@pytest.mark.parametrize("name", list(TARGETS))
@some
@given(first=st.integers(0, 2**16 - 1), moves=moves)
def test_bent_input_is_accepted_or_refused_in_words(name, first, moves):
    check(name, mutated(TARGETS[name].seeds, first, moves))


@pytest.mark.parametrize("what", CASES)
def test_what_once_broke(what):
    name, data, accepted = CASES[what]
    assert check(name, data) == accepted
