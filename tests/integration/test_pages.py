"""Pages of RAM files on real memory: what was written stays, and small pages do as well."""

import ctypes
import os
import tempfile

import pytest

from p2pckpt.backends import pages

MB = 1024 * 1024


@pytest.fixture
def file():
    with tempfile.TemporaryFile(dir="/dev/shm") as f:
        yield f.fileno()


def test_a_mapping_lies_at_a_multiple_of_the_huge_page_and_ends_with_its_last_view(file):
    os.ftruncate(file, 5 * MB)
    whole = pages.mapped(file, 5 * MB - 100)
    assert ctypes.addressof(whole.obj) % pages.huge_bytes() == 0
    assert (len(whole), whole.readonly, whole.format) == (5 * MB - 100, False, "B")
    part, alive = whole[MB : MB + 4], pages.life(whole)
    part[:] = b"here"
    del whole
    assert alive() is not None
    assert bytes(part) == b"here" == os.pread(file, 4, MB)
    del part
    assert alive() is None
    seen = pages.mapped(file, 5 * MB, writable=False)
    assert seen.readonly
    assert bytes(seen[MB : MB + 4]) == b"here"


def test_an_absent_descriptor_cannot_be_mapped():
    with pytest.raises(OSError):
        pages.mapped(-1, MB)


@pytest.mark.parametrize("start", [0, 3 * MB, MB + 4096])
def test_gathering_keeps_what_was_written_and_clears_the_rest(file, start):
    size = 9 * MB + 4096
    os.ftruncate(file, size)
    memory = pages.mapped(file, size)
    expected = bytearray(size)
    for at in (0, 2 * MB, 4 * MB - 1, 7 * MB, size - 1):
        os.pwrite(file, b"\x07", at)
        expected[at] = 7
    worked = pages.gather(file, memory, start, size - start)
    pages.touch(file, memory, 0, size)
    assert bytes(memory) == expected
    assert os.fstat(file).st_blocks * 512 == size
    assert worked is (pages.page_facts("/dev/shm")["pages"] == "huge")


def test_a_range_without_a_whole_huge_page_is_left_to_small_ones(file):
    os.ftruncate(file, MB)
    memory = pages.mapped(file, MB)
    assert pages.gather(file, memory, 0, MB)
    assert os.fstat(file).st_blocks == 0


def test_the_facts_say_what_pages_there_are_and_why(tmp_path):
    facts = pages.page_facts("/dev/shm")
    assert facts["pages"] in ("huge", "small")
    assert int(facts["huge_bytes"]) == pages.huge_bytes()
    assert facts["why"]
    with pytest.raises(OSError):
        pages.page_facts(tmp_path / "absent")
