"""A snapshot holds every kind of state exactly, shares nothing with the caller, and comes back.

Each test saves with ``plan``/``write`` and reads with ``load``/``materialise``, the way a trainer
rank does. Case ids (B...) name the reported fault that a test stands for.
"""

import copy
import math
import struct
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import load as safetensors_load

from p2pckpt.coding import table as tables
from p2pckpt.errors import UsageError
from p2pckpt.restore.load import load, materialise, read_header
from p2pckpt.save.snapshot import plan, write

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = sorted(tables.TORCH_BYTES)
SKIP_PREFIX = ("int1", "uint1")


def save(state, previous=None):
    p = plan(state, previous)
    buffer = bytearray(b"\xee" * (p.snapshot_bytes + 7))
    length = write(p, buffer)
    assert length == p.snapshot_bytes
    assert buffer[length:] == b"\xee" * 7
    return bytes(buffer[:length])


AS_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def raw(t):
    """Return the bytes of a tensor's elements, by index."""
    t = t.detach().resolve_conj().resolve_neg()
    return t.view(AS_INT[t.element_size()]).contiguous().numpy().tobytes()


def random_bits(dtype, *shape):
    t = torch.empty(shape, dtype=dtype)
    generator = np.random.default_rng(7)
    flat = np.frombuffer(generator.bytes(t.numel() * t.element_size()), np.uint8).copy()
    if dtype == torch.bool:
        flat &= 1
    return torch.from_numpy(flat).view(dtype).reshape(shape)


# -- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_keeps_its_bits(name):
    """B011: same bits, same dtype, stored size = element size x count."""
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    state = {"w": random_bits(dtype, 4, 3), "t": random_bits(dtype, 3, 2).transpose(0, 1)}
    data = save(state)
    entry = next(e for e in read_header(data).entries if e.name == "w")
    assert (entry.nbytes, entry.dtype) == (12 * dtype.itemsize, name)
    target = {"w": torch.empty(4, 3, dtype=dtype), "t": torch.empty(3, 2, dtype=dtype).t()}
    for back in (materialise(data), load(data, target)):
        for key, value in state.items():
            assert (back[key].dtype, back[key].shape) == (dtype, value.shape)
            assert raw(back[key]) == raw(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_special_floats_keep_their_bits(dtype):
    """B011: NaN with payload, -0.0, subnormals and infinities, contiguous or not."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    top = 1 << (8 * dtype.itemsize - 1)
    bits = [1, top - 1, top - 2, 3 - top, -top, top // 2 + 1, 0, -1]
    t = torch.tensor(bits, dtype=integer).view(dtype)
    back = materialise(save({"a": t, "b": t.view(4, 2).t()}))
    assert back["a"].view(integer).tolist() == bits
    assert back["b"].view(integer).tolist() == t.view(integer).view(4, 2).t().tolist()


def test_plain_values_keep_type_and_bits():
    """B017 and floats by their bits, ints of any size, odd strings."""
    nan = struct.unpack("<d", bytes.fromhex("010000000000f07f"))[0]
    state = {
        "ints": [0, -1, 2**63, -(2**63), 2**64, -(2**200), 10**400],
        "packed": [list(range(700)), tuple(range(-5, 5)), (2**32, 0), [2**64 - 1, 1]],
        "floats": (nan, -0.0, math.inf, 5e-324, 1.0),
        "text": ["", "ü", "\ud800", "a\0b", "x" * 100_000, "\udfff" * 70_000],
        "bytes": [b"", b"\0\xff", bytes(200_000)],
        "misc": (None, True, False, 1, 1 + 2j, torch.float8_e5m2, torch.device("cuda:3")),
        "sets": {1, "a", (1, (2, None)), frozenset({b"x"})},
        "size": torch.Size([3, 0]),
        "od": OrderedDict(b=1, a={}),
        "counter": Counter({3: 2}),
        "empty": [{}, [], (), set(), frozenset()],
    }
    back = materialise(save(state))
    assert struct.pack("<d", back["floats"][0]) == struct.pack("<d", nan)
    assert math.copysign(1, back["floats"][1]) == -1
    state["floats"] = back["floats"] = state["floats"][1:]
    assert (back.pop("sets"), back["floats"]) == (state.pop("sets"), state["floats"])
    assert repr(back) == repr(state)

    def types(x):
        if isinstance(x, dict):
            return type(x), [(type(k), types(v)) for k, v in x.items()]
        return type(x), [types(i) for i in x] if isinstance(x, list | tuple) else None

    assert types(back) == types(state)


def test_odd_keys_keep_their_places_and_names_stay_distinct():
    """B017: int 0 beside '0', dots, slashes, NUL, 5,000 characters; no two paths share a name."""
    t = torch.arange
    state = {
        "a.b": t(1), "a": {"b": t(2), "b%~2": t(3)}, 0: t(4), "0": t(5), "../x": t(6),
        "n\0l": t(7), "k" * 5000: t(8), (1, "a"): t(9), None: t(10), 2.5: t(11), "%": t(12),
        "%25;": t(13), "__metadata__": t(14), tables.TREE: t(15), "": t(16), b"b": t(17),
        "\ud800": t(18), "list": [t(19), {"0": t(20)}], "list.0": t(21), True: t(22),
    }  # fmt: skip
    data = save(state)
    names = [entry.name for entry in read_header(data).entries]
    assert len(set(names)) == len(names) == 22
    assert len(safetensors_load(data)) == 23
    for back in (materialise(data), load(data, copy.deepcopy(state))):
        assert list(back) == list(state)
        assert [type(key) for key in back] == [type(key) for key in state]
        flat = [back.pop("a"), back.pop("list")]
        sizes = [len(v) for v in back.values()]
        assert sizes == [1, *range(4, 19), 21, 22]
        assert [len(flat[0]["b"]), len(flat[0]["b%~2"]), len(flat[1][1]["0"])] == [2, 3, 20]


def test_readable_names_and_parts():
    model = torch.nn.Sequential(OrderedDict(layers=torch.nn.ModuleList([torch.nn.Linear(2, 3)])))
    p = plan({"model": model})
    assert [part.fqn for part in p.parts] == ["model.layers.0.weight", "model.layers.0.bias"]
    assert (p.parts[0].global_shape, p.parts[0].offset, p.parts[0].lengths) == (
        (3, 2), (0, 0), (3, 2))  # fmt: skip


def test_a_list_that_was_empty_in_the_target_is_filled():
    """B017."""
    data = save({"log": [{"k1": 1}, {"k2": torch.ones(2)}], "d": {"x": 1}})
    target = {"log": [], "d": {}}
    log = target["log"]
    back = load(data, target)
    assert back is target
    assert back["log"] is log
    assert log[0] == {"k1": 1}
    assert log[1]["k2"].tolist() == [1, 1]
    assert back["d"] == {"x": 1}


def test_scalars_and_empty_tensors():
    """B012: 0-dim, one element, no elements."""
    state = {
        "s": torch.tensor(3.0), "one": torch.ones(1), "e": torch.zeros(0, 5),
        "e2": torch.zeros(3, 0), "n": np.array(2.5), "ne": np.zeros((2, 0)), "np": np.int16(-3),
        "t": np.datetime64("2020-01-02"), "u": np.str_("hé"),
    }  # fmt: skip
    data = save(state)
    for back in (materialise(data), load(data, copy.deepcopy(state))):
        for key in ("s", "one", "e", "e2"):
            assert back[key].shape == state[key].shape
            assert torch.equal(back[key], state[key])
        assert back["n"] == 2.5
        assert back["n"].shape == ()
        assert back["ne"].shape == (2, 0)
        for key in ("np", "t", "u"):
            assert type(back[key]) is type(state[key])
            assert back[key] == state[key]
    assert materialise(save({})) == {}
    assert materialise(save(torch.zeros(0))).shape == (0,)


def test_any_layout_is_right_by_index():
    """B013: transposed, strided, expanded, channels_last, F order; a slice leaves its base."""
    t = torch.arange(120).view(2, 3, 4, 5)
    state = {
        "transposed": t.transpose(0, 3), "step": t[::2], "expanded": t[:, :1].expand(2, 9, 4, 5),
        "channels_last": t.float().to(memory_format=torch.channels_last),
        "conj": torch.randn(3, 2, dtype=torch.complex64).conj().t(),
        "neg": torch.randn(4, dtype=torch.complex64).conj().imag,
        "f": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "reversed": np.arange(10, dtype=">i4")[::-2],
        "bcast": np.broadcast_to(np.arange(3), (4, 3)),
    }  # fmt: skip
    data = save(state)
    target = {
        key: (torch if isinstance(v, torch.Tensor) else np).empty(v.shape, dtype=v.dtype)
        for key, v in state.items()
    }
    target["transposed"] = target["transposed"].to(memory_format=torch.channels_last)
    for back in (materialise(data), load(data, target)):
        for key, value in state.items():
            assert (back[key] == value).all(), key
    assert target["transposed"].is_contiguous(memory_format=torch.channels_last)
    small = save({"w": torch.zeros(10_000_000)[5:7]})
    assert len(small) < 10_000


# -- one instant --------------------------------------------------------------------------------


def test_the_snapshot_does_not_share_the_callers_memory():
    """B001: everything is changed at once after the save; the saved values are the old ones."""
    base = torch.ones(4).share_memory_()
    state = {
        "w": torch.ones(3), "shared": base, "n": {"a": np.ones(3)}, "l": [1, 1], "b": {"k": 1},
    }  # fmt: skip
    data = save(state)
    state["w"].fill_(2)
    base.fill_(2)
    state["n"]["a"][:] = 2
    state["l"].append(2)
    state["b"]["k"] = 2
    back = materialise(data)
    assert back["w"].tolist() == [1] * 3
    assert back["shared"].tolist() == [1] * 4
    assert back["n"]["a"].tolist() == [1] * 3
    assert (back["l"], back["b"]) == ([1, 1], {"k": 1})


def test_a_reused_plan_reads_replaced_storages_anew():
    """B004: with the table reused, every save has the values of its own call."""
    model = torch.nn.Linear(3, 3)
    opt = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    state = {"m": model, "o": opt, "step": 1}
    first = plan(state)
    data = [save(state)]
    for step in (2, 3):
        for p in model.parameters():
            p.data = p.data.clone() + 1
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        state["step"] = step
        assert first.matches(state)
        again = plan(state, first)
        assert again.table is first.table
        data.append(save(state, first))
        back = materialise(data[-1])
        assert torch.equal(back["m"]["weight"], model.weight)
        assert back["step"] == step
    assert len(set(data)) == 3
    write(first, bytearray(first.snapshot_bytes))
    with pytest.raises(UsageError, match="written already"):
        write(first, bytearray(first.snapshot_bytes))


def test_a_plan_matches_only_the_same_structure():
    w = torch.zeros(4, 4)
    p = plan({"a": w, "b": torch.zeros(4, 4), "n": 1})
    assert p.matches({"a": torch.ones(4, 4), "b": torch.zeros(4, 4), "n": {"deep": [2]}})
    for other in (
        {"a": w, "c": torch.zeros(4, 4)},
        {"a": w, "b": torch.zeros(4, 4, dtype=torch.int32)},
        {"a": w, "b": torch.zeros(16)},
        {"a": w, "b": torch.zeros(3, 4)},
        {"a": w, "b": torch.zeros(4, 4).t()},
        {"a": w, "b": w},
        {"a": w, "b": torch.zeros(4, 4), "c": torch.zeros(0)},
    ):
        assert not p.matches(other)
    flat = torch.zeros(6)
    p = plan({"a": flat[:4], "b": flat[2:]})
    assert p.matches({"a": flat[:4], "b": flat[2:]})
    assert not p.matches({"a": flat[:4], "b": torch.zeros(4)})


def test_the_data_start_does_not_move_when_values_change():
    state = {"w": torch.ones(3), "log": []}
    first = plan(state)
    state["log"] = [{"loss": 1.5}] * 5_000
    second = plan(state, first)
    assert second.table is first.table
    assert second.snapshot_bytes > first.snapshot_bytes + 50_000
    assert materialise(save(state, first))["log"][-1] == {"loss": 1.5}
    assert len(first.table.header(10**18)) == first.table.data_start


def test_an_address_that_was_used_before_is_no_identity():
    """B015: temporaries of state_dict() get their own addresses; equal contents are no tie."""

    class Fresh:
        def state_dict(self):
            return {"x": torch.full((1000,), 7.0)}

    state = {f"o{i}": Fresh() for i in range(20)} | {"a": torch.ones(9), "b": torch.ones(9)}
    assert len(read_header(save(state)).entries) == 22
    a = torch.full((1000,), 1.0)
    first = plan({"a": a, "b": torch.zeros(1000)})
    del a
    with torch.no_grad():
        b = torch.full((1000,), 2.0)
    back = materialise(save({"a": torch.full((1000,), 3.0), "b": b}, first))
    assert (back["a"][0], back["b"][0]) == (3.0, 2.0)
