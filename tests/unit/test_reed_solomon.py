"""Reed-Solomon: every loss that the code promises to repair is repaired exactly, more is refused.

The reference here multiplies bit by bit and shares nothing with the module under test. Loss
patterns are exhaustive up to 12 shards; the patterns that break rows of powers of two (k=6, m=5
and others) are tried by name.
"""

import itertools
import mmap
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from p2pckpt.coding import reed_solomon
from p2pckpt.coding.reed_solomon import Code, generator_matrix
from p2pckpt.errors import CodingError, MissingDependency, UsageError


def times(a, b):
    """Product in GF(2^8) modulo 0x11D, one bit at a time."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        a = a << 1 ^ (0x11D if a & 0x80 else 0)
        b >>= 1
    return product


def reference_parity(k, m, data):
    """Parity by definition: 1 / (row xor column), or 1 for k = 1."""
    parity = []
    for row in range(k, k + m):
        inverses = [
            next(x for x in range(256) if times(x, row ^ column) == 1) for column in range(k)
        ]
        row_out = bytearray(len(data[0]))
        for shard, coefficient in zip(data, inverses if k > 1 else [1], strict=True):
            for at, byte in enumerate(shard):
                row_out[at] ^= times(byte, coefficient)
        parity.append(bytes(row_out))
    return parity


def encoded(k, m, length, seed=0):
    """All k+m shards of random data, as rows of one array."""
    shards = np.zeros((k + m, length), dtype=np.uint8)
    shards[:k] = np.random.default_rng([seed, k, m]).integers(0, 256, (k, length))
    Code(k, m).encode(list(shards[:k]), list(shards[k:]))
    return shards


def decoded(k, m, shards, lost, wanted=None):
    """What decode writes for the wanted ones of the lost shards, over a pattern of 0xA5."""
    wanted = lost if wanted is None else wanted
    out = {index: np.full(shards.shape[1], 0xA5, dtype=np.uint8) for index in wanted}
    present = {index: row for index, row in enumerate(shards) if index not in lost}
    Code(k, m).decode(present, out)
    return out


def assert_repaired(k, m, shards, lost):
    for index, got in decoded(k, m, shards, lost).items():
        assert np.array_equal(got, shards[index]), (k, m, lost, index)


# -- the format -----------------------------------------------------------------------------------


def test_generator_matrix_is_the_stored_format():
    expected = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [244, 142, 1], [71, 167, 122]]
    assert generator_matrix(3, 2).tolist() == expected
    assert generator_matrix(1, 3).tolist() == [[1]] * 4
    assert generator_matrix(7, 0).tolist() == np.eye(7).tolist()


@pytest.mark.parametrize(("k", "m"), [(1, 1), (1, 4), (2, 1), (3, 2), (4, 2), (10, 4), (5, 9)])
@pytest.mark.parametrize("length", [1, 2, 15, 31, 32, 33, 63, 64, 65, 127, 200])
def test_parity_equals_the_definition(k, m, length):
    shards = encoded(k, m, length)
    expected = reference_parity(k, m, [row.tobytes() for row in shards[:k]])
    assert [row.tobytes() for row in shards[k:]] == expected


@pytest.mark.parametrize("m", [1, 2, 7])
def test_one_data_shard_gives_byte_equal_copies(m):
    shards = encoded(1, m, 1001)
    assert all(row.tobytes() == shards[0].tobytes() for row in shards)


def test_the_largest_code():
    shards = encoded(155, 100, 65)
    lost = list(np.random.default_rng(1).permutation(255)[:100])
    assert_repaired(155, 100, shards, lost)


# -- loss patterns --------------------------------------------------------------------------------


@pytest.mark.parametrize("total", range(1, 13))
def test_every_loss_of_up_to_m_is_repaired(total):
    """B104."""
    for k in range(1, total + 1):
        m = total - k
        shards = encoded(k, m, 19)
        for count in range(m + 1):
            for lost in itertools.combinations(range(total), count):
                assert_repaired(k, m, shards, lost)


@pytest.mark.parametrize("total", range(1, 13))
def test_every_loss_of_m_plus_one_is_refused(total):
    """B104."""
    for k in range(1, total + 1):
        m = total - k
        shards = encoded(k, m, 3)
        for lost in itertools.combinations(range(total), m + 1):
            out = np.full(3, 0xA5, dtype=np.uint8)
            present = {index: row for index, row in enumerate(shards) if index not in lost}
            with pytest.raises(CodingError, match=f"needs {k} shards, have {k - 1}"):
                Code(k, m).decode(present, {lost[0]: out})
            assert out.tolist() == [0xA5] * 3


BREAK_POWER_ROWS = [
    (6, 5, (0, 3, 5, 8, 9)),
    (5, 6, (0, 3, 4, 6, 8, 9)),
    (22, 4, (0, 10, 21, 24)),
    (9, 9, (0, 1, 2, 5, 7, 9, 10, 14, 16)),
]


@pytest.mark.parametrize(("k", "m", "lost"), BREAK_POWER_ROWS)
def test_losses_that_break_rows_of_powers_are_repaired(k, m, lost):
    """B104."""
    assert_repaired(k, m, encoded(k, m, 333), lost)


@pytest.mark.parametrize(("k", "m", "lost"), BREAK_POWER_ROWS[:3])
def test_a_singular_matrix_is_an_error(k, m, lost):
    """With rows of powers the same losses leave a singular matrix: the inverter says so. (B104)"""
    rows = np.zeros((k + m, k), dtype=np.uint8)
    rows[:k] = np.eye(k)
    base = 1
    for row in range(k, k + m):
        value = 1
        for column in range(k):
            rows[row, column] = value
            value = times(value, base)
        base = times(base, 2)
    survivors = [index for index in range(k + m) if index not in lost][:k]
    with pytest.raises(CodingError, match=f"{k} x {k} decode matrix is singular"):
        reed_solomon._invert(reed_solomon._kernels(), rows[survivors])


@pytest.mark.parametrize("codes", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_random_losses_of_large_codes(codes):
    """B104."""
    random = np.random.default_rng(104)
    for _ in range(codes):
        total = int(random.integers(13, 65))
        m = int(random.integers(1, min(total, 13)))
        shards = encoded(total - m, m, 11)
        for _ in range(50):
            assert_repaired(total - m, m, shards, random.permutation(total)[:m].tolist())


# -- what decode reads and writes -----------------------------------------------------------------


def test_only_what_is_asked_is_written_and_nothing_else_changes():
    shards = encoded(4, 3, 100)
    before = shards.copy()
    out = decoded(4, 3, shards, lost=(1, 2, 5), wanted=(5, 1))
    assert list(out) == [5, 1]
    assert np.array_equal(out[1], before[1])
    assert np.array_equal(out[5], before[5])
    assert np.array_equal(shards, before)


def test_with_more_than_k_present_the_lowest_k_are_read():
    shards = encoded(3, 3, 50)
    spoiled = shards.copy()
    spoiled[4:] ^= 0xFF
    assert np.array_equal(decoded(3, 3, spoiled, lost=(1,))[1], shards[1])


def test_a_range_decodes_alone():
    k, m, lost = 5, 3, (0, 3, 6)
    shards = encoded(k, m, 1000)
    whole = decoded(k, m, shards, lost)
    for start, stop in [(0, 1), (1, 2), (7, 300), (999, 1000), (255, 1000), (500, 500)]:
        part = decoded(k, m, shards[:, start:stop], lost)
        for index in lost:
            assert np.array_equal(part[index], whole[index][start:stop])


def test_nothing_missing_writes_nothing_but_still_needs_k():
    shards = encoded(3, 2, 8)
    Code(3, 2).decode({0: shards[0], 2: shards[2], 4: shards[4]}, {})
    with pytest.raises(CodingError, match="needs 3 shards, have 2"):
        Code(3, 2).decode({0: shards[0], 2: shards[2]}, {})


@pytest.mark.parametrize(("k", "m"), [(1, 0), (1, 2), (4, 2), (4, 0)])
def test_empty_shards_are_legal(k, m):
    shards = encoded(k, m, 0)
    assert all(got.size == 0 for got in decoded(k, m, shards, range(m)).values())


def test_no_parity_is_legal():
    Code(3, 0).encode([b"abc", b"def", b"ghi"], [])
    with pytest.raises(CodingError, match=r"rs\(3, 0\): decode needs 3 shards, have 2: \[0, 2\]"):
        Code(3, 0).decode({0: b"abc", 2: b"ghi"}, {1: bytearray(3)})


def test_one_block_of_zeros_may_stand_for_several_data_shards():
    zeros, data = bytes(100), bytes(range(100))
    parity = [bytearray(100), bytearray(100)]
    Code(4, 2).encode([data, zeros, zeros, zeros], parity)
    assert list(map(bytes, parity)) == reference_parity(4, 2, [data, zeros, zeros, zeros])


# -- buffers --------------------------------------------------------------------------------------


def test_mmap_memoryview_bytearray_and_typed_arrays_without_copies():
    k, m, length = 4, 2, 4096
    shards = encoded(k, m, length)
    with mmap.mmap(-1, length * (k + m)) as area:
        area[: k * length] = shards[:k].tobytes()
        view = memoryview(area)
        parts = [view[i * length : (i + 1) * length] for i in range(k + m)]
        Code(k, m).encode(parts[:k], parts[k:])
        assert area[:] == shards.tobytes()
        for part in parts:
            part.release()
        view.release()
    out = {0: bytearray(length), 3: np.zeros((32, 32), dtype=np.float32)}
    present = {1: shards[1].tobytes(), 2: memoryview(shards[2]), 4: shards[4], 5: shards[5]}
    Code(k, m).decode(present, out)
    assert bytes(out[0]) == shards[0].tobytes()
    assert out[3].tobytes() == shards[3].tobytes()


@pytest.mark.parametrize("length", [1, 7, 64, 129, 1000])
def test_unaligned_buffers_and_no_byte_beside_them(length):
    k, m = 3, 2
    shards = encoded(k, m, length)
    room = np.full((k + m, length + 200), 0xEE, dtype=np.uint8)
    starts = [1, 3, 17, 33, 63]
    parts = [room[i, at : at + length] for i, at in enumerate(starts)]
    for part, shard in zip(parts[:k], shards[:k], strict=True):
        part[:] = shard
    Code(k, m).encode(parts[:k], parts[k:])
    for row, at, shard in zip(room, starts, shards, strict=True):
        assert np.array_equal(row[at : at + length], shard)
        assert set(row[:at].tolist() + row[at + length :].tolist()) == {0xEE}


def test_lengths_beyond_one_kernel_call(monkeypatch):
    shards = encoded(4, 2, 1000)
    monkeypatch.setattr(reed_solomon, "_PIECE_BYTES", 96)
    assert np.array_equal(encoded(4, 2, 1000), shards)
    assert_repaired(4, 2, shards, (0, 5))


def test_threads_share_one_code():
    def repair(seed):
        shards = encoded(6, 3, 20_000, seed)
        assert_repaired(6, 3, shards, (seed % 6, 6, 7))
        return shards[0].tobytes()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(repair, range(64), timeout=30))) == 64


# -- wrong use ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "m"), [(0, 1), (-1, 2), (3, -1), (200, 56)])
def test_impossible_codes(k, m):
    with pytest.raises(UsageError, match=rf"rs\({k}, {m}\): needs k >= 1, m >= 0"):
        Code(k, m)


def test_wrong_number_of_buffers():
    with pytest.raises(UsageError, match="needs 2 data and 1 parity buffers, found 1 and 2"):
        Code(2, 1).encode([b"a"], [bytearray(1), bytearray(1)])


def test_unequal_lengths_write_nothing():
    parity = bytearray(b"zzz")
    with pytest.raises(UsageError, match=r"one length.*\{0: 3, 1: 4, 2: 3\}"):
        Code(2, 1).encode([b"abc", b"abcd"], [parity])
    with pytest.raises(UsageError, match="one length"):  # shard 2 would not even be read
        Code(2, 2).decode({0: b"abc", 1: b"abc", 2: b"ab"}, {3: parity})
    assert parity == b"zzz"


@pytest.mark.parametrize("index", [-1, 3])
def test_wrong_shard_number(index):
    with pytest.raises(UsageError, match=rf"shard numbers are 0..2, got {index}"):
        Code(2, 1).decode({0: b"a", 1: b"b"}, {index: bytearray(1)})
    with pytest.raises(UsageError, match=rf"shard numbers are 0..2, got {index}"):
        Code(2, 1).decode({0: b"a", index: b"b"}, {2: bytearray(1)})


def test_present_and_missing_at_once():
    with pytest.raises(UsageError, match=r"shards \[1\] are given as present and as missing"):
        Code(2, 1).decode({0: b"a", 1: b"b"}, {1: bytearray(1)})


def test_read_only_output():
    with pytest.raises(UsageError, match="shard 2: needs a writable buffer"):
        Code(2, 1).encode([b"a", b"b"], [b"c"])
    frozen = np.zeros(1, dtype=np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(UsageError, match="shard 0: needs a writable buffer"):
        Code(2, 1).decode({1: b"b", 2: b"c"}, {0: frozen})


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(8, np.uint8)[::2],
        memoryview(bytes(8))[::2],
        np.zeros((2, 2), order="F").T[:, :1],
        7,
    ],
)
def test_no_contiguous_buffer(wrong):
    with pytest.raises(UsageError, match="shard 1: needs a C-contiguous buffer"):
        Code(2, 1).encode([bytes(4), wrong], [bytearray(4)])


def test_overlapping_output():
    area = np.zeros(30, dtype=np.uint8)
    with pytest.raises(UsageError, match="shard 2: output needs its own memory, overlaps 1"):
        Code(2, 1).encode([area[:10], area[10:20]], [area[19:29]])
    with pytest.raises(UsageError, match="shard 1: output needs its own memory, overlaps 2"):
        Code(1, 2).encode([bytes(10)], [area[:10], area[9:19]])
    Code(2, 1).encode([area[:10], area[10:20]], [area[20:]])


# -- the library ----------------------------------------------------------------------------------


def test_loaded_at_first_use_and_without_running_pyeclib():
    script = (
        "import sys; from p2pckpt.coding import reed_solomon as r\n"
        "assert 'libisal' not in open('/proc/self/maps').read()\n"
        "path = r.codec_library()\n"
        "assert 'libisal' in path and 'libisal' in open('/proc/self/maps').read()\n"
        "assert not any(name.startswith('pyeclib') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.fixture
def reload_library():
    reed_solomon._kernels.cache_clear()
    yield
    reed_solomon._kernels.cache_clear()


@pytest.mark.parametrize("name", ["libnothing-of-the-kind.so.2", "libc.so.6"])
def test_no_library(monkeypatch, reload_library, name):
    monkeypatch.setattr(reed_solomon, "_candidates", lambda: [name])
    with pytest.raises(MissingDependency, match=rf"pip install 'pyeclib.*libisal2.*{name}: "):
        reed_solomon.codec_library()


def test_a_library_of_another_field_is_refused(monkeypatch, reload_library):
    monkeypatch.setattr(reed_solomon, "_POLYNOMIAL", 0x12B)
    product, inverse = reed_solomon._field()
    monkeypatch.setattr(reed_solomon, "_PRODUCT", product)
    monkeypatch.setattr(reed_solomon, "_INVERSE", inverse)
    with pytest.raises(CodingError, match="differs from reference"):
        reed_solomon.codec_library()
