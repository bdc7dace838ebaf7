"""What people's commands ask: which job, which step, which pieces a file has."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_world import KEYS, Book

from p2pckpt import records as r
from p2pckpt.agent.asking import choose_job, find_commit
from p2pckpt.agent.rereading import pieces_of
from p2pckpt.errors import UsageError

JOBS = ["0.a", "1000.a", "1000.b"]


def test_the_job_that_is_meant():
    assert choose_job("1000.a", JOBS) == "1000.a"
    assert choose_job("", ["0.a"]) == "0.a"
    with pytest.raises(UsageError, match=r"which job.*0\.a, 1000\.a, 1000\.b"):
        choose_job("", JOBS)
    for unknown in ("a", "0.b", "1000.ab"):
        assert choose_job(unknown, JOBS) == ""
    assert choose_job("", []) == ""


def test_the_step_that_is_meant():
    book = Book()
    assert "no step is committed" in find_commit(book.state(), None)
    book.close(1, 1, "L1")
    for step in (10, 20):
        book.commit(step)
    book.close(2, 1, "L2", ("L1", 20))
    book.commit(30, "L2", generation=2)
    book.commit(20, "stray", ordinal=99)
    state = book.state()
    assert find_commit(state, None).attempt.step == 30
    assert find_commit(state, 10).lineage == "L1"
    assert find_commit(state, 20).lineage == "L1", "of the lineage, not the stray one"
    assert "step 15: committed: [10, 20, 30]" in find_commit(state, 15)
    book.delete(KEYS.commit("L1", 20))
    assert find_commit(book.state(), 20).lineage == "stray"


layouts = st.builds(r.Layout, st.integers(1, 5), st.integers(0, 3))


@given(layouts, st.lists(st.integers(0, 5000), min_size=1, max_size=4), st.sampled_from([512, 600]))
def test_pieces_cover_every_file_exactly(layout, lengths, chunk):
    entries = []
    for rank, length in enumerate(lengths):
        size = ceil(ceil(length / layout.k) / chunk) * chunk
        stored = [max(0, min(size, length - i * size)) for i in range(layout.k)]
        tables = [bytes(4 * -(-n // chunk)) for n in [*stored, *[size] * layout.m]]
        entries.append(r.RankSnapshot(rank, length, size, tuple(tables)))
    of = r.Attempt("1" * 32, "1000.job", 1, 2, 3)
    manifest = r.Manifest(of, "n0", "s", layout, chunk, "crc32c/1", tuple(entries))
    files = [(r.FileKind.SLOT, e.rank, e.length) for e in entries]
    files += [(r.FileKind.SHARD, i, manifest.shard_file_bytes(i)) for i in range(layout.shards)]
    for kind, part, length in files:
        at = 0
        for rank, shard, offset, count in pieces_of(manifest, kind, part):
            assert offset == at
            assert count == entries[rank].stored_bytes(shard, layout.k)
            at += count
        assert at == length
