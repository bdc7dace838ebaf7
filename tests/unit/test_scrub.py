"""What a scrubber reads next, and what a drained node hands on: pure rules."""

from hypothesis import given, settings
from hypothesis import strategies as st

from p2pckpt import records as r
from p2pckpt.agent.drain import decide_moves
from p2pckpt.agent.governing import HEADROOM, LOWEST
from p2pckpt.agent.repair import decide_repair
from p2pckpt.agent.scrub import DUE, SLOWEST_BYTES_PER_S, URGENT, needed_bytes_s, next_file
from p2pckpt.restore.locate import Sources

NODES = [f"n{i}" for i in range(7)]


@given(
    st.dictionaries(st.text(max_size=3), st.floats(0, 1e6)),
    st.floats(0, 1e5),
    st.booleans(),
)
def test_the_one_that_was_read_longest_ago_is_next(ages, period_s, busy):
    chosen = next_file(ages, period_s, busy)
    oldest = max(ages.values(), default=0.0)
    due = bool(ages) and period_s > 0 and oldest >= period_s * (URGENT if busy else DUE)
    assert (chosen is not None) == due
    if due:
        assert ages[chosen] == oldest


def ages_of(read_at, now):
    return [now - at for at in read_at.values()]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=10),
    st.integers(600, 900),
    st.sampled_from([LOWEST, 0.3, 1.0]),
    st.data(),
)
def test_nothing_gets_older_than_the_period(sizes_mib, period_s, level, data):
    """However far the governor backs off, in pieces of a file, with saves in a quarter of the time
    or in flight for ever: whatever is held was always read within the period."""
    sizes = [mib << 20 for mib in sizes_mib]
    usual = max(SLOWEST_BYTES_PER_S, 2 * sum(sizes) / period_s)
    read_at = {i: data.draw(st.floats(-DUE * period_s, 0)) for i in range(len(sizes))}
    always = data.draw(st.booleans())
    now, last, part = 0.0, 2.0 * period_s, 16 << 20
    while now < last:
        ages = dict(enumerate(ages_of(read_at, now)))
        assert max(ages.values()) <= period_s
        chosen = next_file(ages, period_s, always or (now % 40) < 10)
        if chosen is None:
            now += 5.0
            continue
        begun = now
        for done in range(0, sizes[chosen], part):
            size = min(part, sizes[chosen] - done)
            left = [sizes[i] - (done if i == chosen else 0) for i in read_at]
            files = zip(ages_of(read_at, now), left, strict=True)
            needs = needed_bytes_s(files, period_s, sum(sizes))
            now += size / max(level * usual, HEADROOM * needs)
        read_at[chosen] = begun


@given(
    st.lists(st.tuples(st.floats(0, 200), st.integers(0, 1 << 40)), max_size=8),
    st.floats(1, 1000),
)
def test_what_is_needed_is_in_time_for_each_file_and_has_an_end(files, period_s):
    """Each file that is not late is read by its end, with all that are older, unless all of them
    would have to be read faster than in the last part of a period."""
    total = sum(length for _, length in files)
    needs = needed_bytes_s(files, period_s, total)
    most = total / (period_s * (1 - URGENT))
    assert needs <= most
    if needs < most:
        for age_s, _ in files:
            older = sum(length for other_s, length in files if other_s > age_s)
            assert older <= needs * (period_s - age_s) * (1 + 1e-9)


def held_by(draw_nodes):
    return st.lists(st.sampled_from(draw_nodes), max_size=3, unique=True).map(tuple)


@given(
    st.integers(1, 3),
    st.integers(0, 2),
    st.sets(st.sampled_from(NODES)),
    st.data(),
)
def test_after_the_moves_nothing_is_less_without_the_node(k, m, leaving, data):
    """Move what is to be moved to nodes that have none of the share: then every shard that the
    drained node has is on one that stays, and a repair finds as much without it as with it."""
    layout, here = r.Layout(k, m), "n0"
    staying = set(NODES) - leaving - {here}
    shards = {i: data.draw(held_by(NODES)) for i in range(layout.shards)}
    slots = {rank: data.draw(held_by(NODES)) for rank in (0, 1)}
    share = r.SealedShare("n1", "s", (0, 1), "d", 1, ("",) * layout.shards)
    before = Sources(slots, shards)
    moves = decide_moves(share, before, layout, here, staying)
    assert all(here in shards[i] for i in moves)
    after = Sources(slots, {i: (*n, f"new{i}") if i in moves else n for i, n in shards.items()})
    staying |= {f"new{i}" for i in moves}
    assert not decide_moves(share, after, layout, here, staying)
    owner = min((n for n in staying if all(n in slots[rank] for rank in (0, 1))), default="")
    for nodes in after.shards.values():
        if here in nodes:
            assert any(n in staying and n != owner for n in nodes)
    if owner:
        without = decide_repair(share, after, sorted(staying), layout)
        with_it = decide_repair(share, after, [*sorted(staying), here], layout)
        assert (without and without.missing) == (with_it and with_it.missing)
