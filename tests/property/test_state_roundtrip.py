"""Any supported state comes back equal; any damaged file is refused, never misread or a crash.

The first half draws nested states and compares types, order and bits. The second half is hostile:
headers and trees that are random, or true ones with something changed. Only FormatError or
StateMismatch may come out, or a state.
"""

import json
import struct
from collections import OrderedDict

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load as safetensors_load

from p2pckpt.coding import memory, tree
from p2pckpt.errors import FormatError, StateMismatch
from p2pckpt.restore.load import load, materialise, read_header
from p2pckpt.save.snapshot import plan, write

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def save(state):
    p = plan(state)
    buffer = bytearray(p.snapshot_bytes)
    assert write(p, buffer) == len(buffer)
    return bytes(buffer)


floats = st.floats() | st.integers(0, 2**64 - 1).map(
    lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0]
)
texts = st.text(st.characters(exclude_categories=()), max_size=12)
atoms = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | floats | texts
    | st.binary(max_size=9) | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2, 3])])
)  # fmt: skip
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | texts | st.floats(allow_nan=False)
    | st.binary(max_size=4),
    lambda inner: st.tuples(inner) | st.tuples(inner, inner) | st.frozensets(inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def tensors(draw):
    names = ["float32", "bfloat16", "int64", "bool", "complex128", "complex32", "float8_e5m2"]
    dtype = getattr(torch, draw(st.sampled_from([*names, "uint16", "int8"])))
    shape = draw(shapes)
    t = torch.arange(max(1, int(np.prod(shape))) * dtype.itemsize, dtype=torch.uint8)
    t = (t % 2 if dtype == torch.bool else t).view(dtype)[: int(np.prod(shape))].reshape(shape)
    how = draw(st.sampled_from(["plain", "transposed", "parameter", "stepped", "expanded"]))
    if how == "transposed" and t.dim() > 1:
        return t.transpose(0, 1)
    if how == "stepped" and t.dim():
        return t[::2]
    if how == "expanded":
        return t.expand(2, *shape)
    if how == "parameter":
        grad = draw(st.booleans()) and (dtype.is_floating_point or dtype.is_complex)
        return torch.nn.Parameter(t, grad)
    return t


@st.composite
def arrays(draw):
    dtype = draw(st.sampled_from(["<f4", ">i2", "<U3", "|S2", "<M8[ns]", "<c16", "|b1", "<f2"]))
    shape = draw(shapes)
    size = int(np.prod(shape))
    a = np.arange(size).astype("i8").astype(dtype).reshape(shape)
    return np.asfortranarray(a) if draw(st.booleans()) else a[..., ::-1] if shape else a


leaves = atoms | tensors() | arrays() | st.sampled_from([np.float32(1.5), np.int8(-1)])
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(texts, inner, max_size=3).map(OrderedDict)
        | st.sets(keys, max_size=3)
    ),
    max_leaves=12,
)


def facts(x):
    """Return a value that is equal for two states exactly if they have the same types and bits."""
    if isinstance(x, torch.Tensor):
        ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = x.detach().view(ints.get(x.element_size(), x.dtype)).contiguous().numpy().tobytes()
        return type(x), x.dtype, tuple(x.shape), x.requires_grad, bits
    if isinstance(x, np.ndarray | np.generic):
        return type(x), x.dtype.str, x.shape, x.tobytes()
    if isinstance(x, dict):
        return type(x), [(facts(k), facts(v)) for k, v in x.items()]
    if isinstance(x, set | frozenset):
        return type(x), sorted(repr(facts(i)) for i in x)
    if isinstance(x, list | tuple):
        return type(x), [facts(i) for i in x]
    if isinstance(x, float):
        return float, struct.pack("<d", x)
    return type(x), x


def blank(x):
    """Return a target of the same structure with other values, in other memory."""
    if isinstance(x, torch.Tensor):
        empty = torch.zeros(x.shape, dtype=x.dtype)
        return torch.nn.Parameter(empty, x.requires_grad) if type(x) is not torch.Tensor else empty
    if isinstance(x, np.ndarray):
        return np.zeros(x.shape, x.dtype)
    if isinstance(x, dict):
        return type(x)((k, blank(v)) for k, v in reversed(x.items()))
    if isinstance(x, list | tuple) and type(x) is not torch.Size:
        return type(x)(blank(i) for i in x)
    return x


@quick
@given(states)
def test_any_state_comes_back(state):
    """B011, B012, B013, B017 over nested states, anew and into a target."""
    data = save(state)
    assert len(safetensors_load(data)) == len(read_header(data).entries) + 1
    want = facts(state)
    assert facts(materialise(data)) == want
    assert facts(load(data, blank(state))) == want


@quick
@given(states, states)
def test_a_table_is_reused_only_if_it_is_right(one, two):
    """B004: whatever the earlier state was, the later save has its own values."""
    p = plan(two, plan(one))
    buffer = bytearray(p.snapshot_bytes)
    write(p, buffer)
    assert facts(materialise(buffer)) == facts(two)


@quick
@given(states, states)
def test_any_other_target_fits_or_is_left_alone(one, two):
    data, before = save(one), facts(two)
    try:
        result = load(data, two)
    except StateMismatch:
        assert facts(two) == before
    else:
        if not isinstance(two, dict | list):
            assert facts(materialise(save(result))) == facts(result)


@quick
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4), st.integers(1, 3)), min_size=1,
                max_size=4))  # fmt: skip
def test_views_of_one_storage_restore_alike_or_are_refused(cuts):
    """Overlapping views come back right in a like target; in separate memory too."""
    base = torch.arange(24, dtype=torch.int32)
    state = [base[start : start + n * step : step] for start, n, step in cuts]
    data = save(state)
    flat = torch.full((24,), -1, dtype=torch.int32)
    alike = [flat[start : start + n * step : step] for start, n, step in cuts]
    assert facts(load(data, alike)) == facts(state)
    assert facts(materialise(data)) == facts(state)
    separate = save([t.clone() for t in state])
    flat.fill_(-1)
    touched = [set(range(s, s + n * k, k)) for s, n, k in cuts]
    disjoint = sum(map(len, touched)) == len(set().union(*touched))
    if disjoint:
        assert facts(load(separate, alike)) == facts(state)
    else:
        with pytest.raises(StateMismatch, match="shares memory"):
            load(separate, alike)
        assert (flat == -1).all()


@quick
@given(st.integers(1, 40), st.lists(st.tuples(st.integers(1, 3), st.integers(-6, 6)), max_size=3))
def test_self_overlap_is_never_missed(start, dims):
    shape = tuple(n for n, _ in dims)
    extent = memory.Extent("cpu", 1000 + start, shape, tuple(s for _, s in dims), 2)
    seen = [1000 + start]
    for n, stride in dims:
        seen = [a + i * stride for a in seen for i in range(n)]
    cells = [byte for a in seen for byte in (a, a + 1)]
    if len(set(cells)) < len(cells):
        assert extent.overlaps_itself()
    assert extent.span() == ("cpu", min(cells), max(cells) + 1)


SAMPLE = {
    "w": torch.nn.Parameter(torch.ones(3)), "v": torch.zeros(2, dtype=torch.complex64),
    "a": np.arange(3), "s": np.float32(2), "n": [1, 2**70, {"k": (None, {1})}], "b": b"x" * 66_000,
    "g": torch.Generator(), "c": 1j, "d": torch.float16, "dev": torch.device("cpu"),
}  # fmt: skip
GOOD = save(SAMPLE)
TABLE = read_header(GOOD)


def outcome(data):
    """Load hostile bytes in both ways; anything but the two errors escapes and fails the test."""
    for target in (None, {"w": torch.zeros(3), "n": [], "g": torch.Generator()}):
        try:
            load(data, target)
        except (FormatError, StateMismatch):
            pass


def with_tree(data):
    return plan(SAMPLE).table.header(len(data)) + GOOD[TABLE.data_start : TABLE.tree_offset] + data


def with_header(header):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    length = -(-(8 + len(text)) // 4096) * 4096
    return struct.pack("<Q", length - 8) + text.ljust(length - 8) + GOOD[TABLE.data_start :]


HEADER = json.loads(GOOD[8 : TABLE.data_start])
load(with_header(HEADER))
load(with_tree(GOOD[TABLE.tree_offset :]))


@quick
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data):
    with pytest.raises(FormatError):
        materialise(data)
    with pytest.raises(FormatError):
        materialise(struct.pack("<Q", 4088) + data.ljust(4088))
    with pytest.raises(FormatError):
        tree.decode(data)


@quick
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1,
                max_size=4), st.booleans())  # fmt: skip
def test_flipped_bytes_give_an_error_or_a_state(flips, in_tree):
    data = bytearray(GOOD)
    for at, value in flips:
        low = TABLE.tree_offset if in_tree else 0
        high = len(GOOD) if in_tree else TABLE.data_start // 2
        data[low + at % (high - low)] = value
    outcome(bytes(data))


@quick
@given(st.integers(0, len(GOOD)), st.binary(max_size=3))
def test_a_file_of_another_length_is_refused(cut, more):
    for data in (GOOD[:cut], GOOD + more):
        if len(data) != len(GOOD):
            with pytest.raises(FormatError):
                materialise(data)


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4)
    | st.sampled_from(["U8", "F32", "numpy:<O", "numpy:|V0", "complex64", "bfloat16", "p2pckpt"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@quick
@given(
    st.sampled_from(sorted(HEADER)), st.sampled_from(["dtype", "shape", "data_offsets", None]), junk
)
def test_a_header_with_junk_is_refused(name, field, value):
    header = json.loads(json.dumps(HEADER))
    if field is None or name == "__metadata__":
        header[name] = value
    elif header[name][field] == value:
        return
    else:
        header[name][field] = value
    with pytest.raises(FormatError):
        materialise(with_header(header))


@quick
@given(st.sampled_from(["version", "dtypes", "views"]), junk)
def test_metadata_with_junk_is_refused_or_harmless(name, value):
    header = json.loads(json.dumps(HEADER))
    own = json.loads(header["__metadata__"]["p2pckpt"])
    own[name] = value
    header["__metadata__"]["p2pckpt"] = json.dumps(own)
    outcome(with_header(header))


@pytest.mark.parametrize(
    "header",
    [
        b"[]", b"{}", b"{" * 4000, b"[" * 60_000, b'{"a":1,"a":1}', b"\xff", b"1" * 6000,
        json.dumps(HEADER).replace('"w"', '"v"').encode(),
        json.dumps(HEADER).replace("[3]", "[3.0]").encode(),
        json.dumps(HEADER).replace("[3]", "[3,true]").encode(),
    ],
)  # fmt: skip
def test_bad_headers(header):
    with pytest.raises(FormatError):
        materialise(with_header(header))


nodes = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3)
    | st.builds(tree.Tensor, st.integers(-2, 9), st.booleans(), st.booleans(),
                st.none() | st.builds(tree.Part, *[st.just([3])] * 3, st.just(["S(0)"]),
                                      st.just([2]), st.just([0])))
    | st.builds(tree.Array, st.integers(-1, 7), st.booleans())
    | st.builds(tree.Blob, st.integers(-1, 7), st.booleans())
    | st.builds(tree.Generator, st.sampled_from(["cpu", "cuda:9", "", "x"]), st.binary(max_size=9))
    | st.builds(tree.Dtype, st.sampled_from(["float32", "nn", "", "load"]))
    | st.builds(tree.Device, st.sampled_from(["cpu", "cuda:x", ""]))
    | st.builds(tree.BigInt, st.binary(max_size=9)) | st.builds(tree.Text, st.binary(max_size=4))
    | st.builds(tree.Raw, st.binary(max_size=4)) | st.builds(tree.Complex, st.floats(), st.floats())
    | st.builds(tree.Ints, st.sampled_from(["list", "tuple"]), st.sampled_from(["<u1", "<i8"]),
                st.binary(max_size=16)),
    lambda inner: st.builds(tree.Object, inner)
    | st.builds(tree.Seq, st.sampled_from(["list", "tuple", "set", "frozenset", "Size"]),
                st.lists(inner, max_size=3))
    | st.builds(tree.Dict, st.sampled_from(["dict", "OrderedDict", "Counter"]),
                st.lists(inner | st.sampled_from(["w", "n", "g"]), max_size=3),
                st.lists(inner, max_size=3), inner),
    max_leaves=10,
)  # fmt: skip


@settings(quick, max_examples=400)
@given(nodes)
def test_a_hostile_tree_gives_an_error_or_a_state(root):
    outcome(with_tree(tree.encode(root)))


def wrapped(body):
    return struct.pack("<4sHHQ", b"P2PT", 1, 0, len(body)) + body


@quick
@given(junk)
def test_other_messagepack_gives_an_error_or_a_state(value):
    try:
        body = msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return
    outcome(with_tree(wrapped(body)))


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc1", b"",
        b"\xc0\xc0", b"\x92\x0f" * 250 + b"\xc0", b"\x92\x0f" * 5000 + b"\xc0",
        b"\x93\x02\xa4list\x90",
    ],
)  # fmt: skip
def test_bad_trees(body):
    with pytest.raises(FormatError):
        materialise(with_tree(wrapped(body)))


def test_tensors_that_overlap_or_leave_a_hole_are_refused():
    header = json.loads(json.dumps(HEADER))
    header["w"] |= {"shape": [4], "data_offsets": header["v"]["data_offsets"]}
    with pytest.raises(FormatError, match="overlap, leave holes"):
        materialise(with_header(header))


def test_a_name_that_occurs_twice_is_refused():
    entry = f'"w": {json.dumps(HEADER["w"])}'
    text = json.dumps(HEADER)
    assert entry in text
    with pytest.raises(FormatError, match="occurs twice"):
        materialise(with_header(text.replace(entry, f"{entry}, {entry}").encode()))


def test_another_version_is_refused_with_both_numbers():
    with pytest.raises(FormatError, match="version 9, this release reads 1"):
        tree.decode(struct.pack("<4sHHQ", b"P2PT", 9, 0, 1) + b"\xc0")
    text = json.dumps(HEADER).replace('\\"version\\":1', '\\"version\\":7')
    with pytest.raises(FormatError, match="version 7, this release reads 1"):
        read_header(with_header(text.encode()))


def test_the_limit_of_depth_is_the_same_on_both_sides():
    state = []
    for _ in range(tree.MAX_DEPTH - 3):
        state = [state]
    assert facts(materialise(save(state))) == facts(state)
