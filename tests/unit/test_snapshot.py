"""A snapshot holds every kind of state exactly, shares nothing with the caller, and comes back.

Each test saves with ``plan``/``write`` and reads with ``load``/``materialise``, the way a trainer
rank does. Case ids (B...) name the reported fault that a test stands for.
"""

import copy
import math
import mmap
import os
import random
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import Enum
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load as safetensors_load

from p2pckpt.coding import table as tables
from p2pckpt.errors import FormatError, NoRoom, StateMismatch, UnsupportedState, UsageError
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
    state["log"] = [{"loss": 1.5}] * 50_000
    second = plan(state, first)
    assert second.table is first.table
    assert second.snapshot_bytes > first.snapshot_bytes + 100_000
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


# -- ties and views -----------------------------------------------------------------------------


def test_tied_tensors_are_stored_once_and_come_back_tied():
    p = torch.nn.Parameter(torch.randn(8, 8))
    state = {"emb": p, "head": p, "data": p.data, "part": p.data[2:4], "free": torch.randn(3)}
    data = save(state)
    assert len(read_header(data).entries) == 3
    back = materialise(data)
    assert back["emb"] is back["head"]
    assert isinstance(back["emb"], torch.nn.Parameter)
    assert back["data"].data_ptr() == back["emb"].data_ptr()
    assert not back["data"].requires_grad
    assert torch.equal(back["part"], p[2:4])
    target = {"emb": torch.nn.Parameter(torch.zeros(8, 8)), "free": torch.zeros(3)}
    target |= {"head": target["emb"], "data": target["emb"].data}
    target["part"] = target["emb"].data[2:4]
    back = load(data, target)
    assert torch.equal(back["emb"], p)
    assert torch.equal(back["part"], p[2:4])


def test_a_target_that_shares_memory_where_the_save_did_not_is_refused():
    data = save({"a": torch.ones(4), "b": torch.zeros(4)})
    tied = torch.full((4,), 5.0)
    flat = torch.full((6,), 5.0)
    for target in ({"a": tied, "b": tied}, {"a": flat[:4], "b": flat[2:]}):
        with pytest.raises(StateMismatch, match="shares memory in the target"):
            load(data, target)
        assert (target["a"] == 5).all()
    with pytest.raises(StateMismatch, match="shares memory"):
        load(data, {"a": torch.zeros(1).expand(4), "b": torch.zeros(4)})
    columns = torch.zeros(4, 2)  # interleaved, but disjoint
    load(data, {"a": columns[:, 0], "b": columns[:, 1]})
    assert columns.tolist() == [[1, 0]] * 4
    shared = np.zeros(4, np.float32)
    with pytest.raises(StateMismatch, match="shares memory"):
        load(save({"a": torch.ones(4), "b": np.zeros(4, np.float32)}),
             {"a": torch.from_numpy(shared), "b": shared})  # fmt: skip


def test_an_expanded_target_of_an_expanded_save():
    data = save({"e": torch.arange(3.0).view(3, 1).expand(3, 5)})
    target = {"e": torch.zeros(3, 1).expand(3, 5)}
    load(data, target)
    assert target["e"][:, 4].tolist() == [0, 1, 2]


# -- objects ------------------------------------------------------------------------------------


def trained(seed=0, steps=3):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout())
    model.append(torch.nn.Linear(8, 1))
    frozen = torch.nn.Parameter(torch.ones(2))
    opt = torch.optim.AdamW(
        [
            {"params": [*model.parameters(), frozen], "lr": 1e-2, "betas": (0.8, 0.9)},
            {"params": [], "lr": 5e-3, "weight_decay": 0.25},
        ]
    )
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [2, 4], gamma=0.5)
    for _ in range(steps):
        opt.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        opt.step()
        sched.step()
    return {"model": model, "opt": opt, "sched": sched, "frozen": frozen,
            "rng": torch.get_rng_state()}  # fmt: skip


RESUME = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_snapshot import trained, go_on
from p2pckpt.restore.load import load
state = load(open({path!r}, "rb").read(), trained(seed=9, steps=0))
torch.set_rng_state(state["rng"])
open({path!r}, "wb").write(go_on(state))
"""


def go_on(state):
    for _ in range(3):
        state["opt"].zero_grad()
        state["model"](torch.randn(16, 4)).square().mean().backward()
        state["opt"].step()
        state["sched"].step()
    return (
        b"".join(raw(v) for v in state["model"].state_dict().values())
        + repr(state["opt"].param_groups[0]["lr"]).encode()
    )


def test_a_fresh_process_resumes_bit_by_bit(tmp_path):
    """B018, B020: an empty group keeps its options, a never-used parameter has no state."""
    state = trained()
    path = tmp_path / "snapshot"
    path.write_bytes(save(state))
    want = go_on(state)
    code = RESUME.format(tests=os.path.dirname(__file__), path=str(path))
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)
    assert path.read_bytes() == want


def test_optimizer_groups_and_absent_states():
    """B018, B020: and a half-present state is refused."""
    state = trained()
    data = save(state)
    target = trained(seed=1, steps=0)
    parameters = [p.data_ptr() for p in target["model"].parameters()]
    frozen = target["frozen"]
    load(data, target)
    assert target["frozen"] is frozen
    assert [p.data_ptr() for p in target["model"].parameters()] == parameters
    assert target["opt"].param_groups[1]["weight_decay"] == 0.25
    assert target["opt"].param_groups[0]["betas"] == (0.8, 0.9)
    assert frozen not in target["opt"].state
    assert target["sched"].state_dict() == state["sched"].state_dict()
    half = trained()
    before = raw(half["model"][0].weight)
    del half["opt"].state[half["model"][0].weight]["exp_avg_sq"]
    with pytest.raises(StateMismatch, match=r"\['state'\]\[0\]\['exp_avg_sq'\]"):
        load(data, half)
    saved_half = save(half)
    with pytest.raises(StateMismatch, match="missing"):
        load(saved_half, trained())
    assert raw(half["model"][0].weight) == before
    other = trained(steps=0)
    other["opt"].add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(StateMismatch, match="param_groups"):
        load(data, other)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RMSprop", "NAdam", "Adafactor", "LBFGS"])
def test_other_optimizers(name):
    def make(seed):
        torch.manual_seed(seed)
        w = torch.nn.Parameter(torch.randn(5, 3))
        return w, getattr(torch.optim, name)([w], lr=0.01)

    def step(w, opt):
        def closure():
            opt.zero_grad()
            loss = (w**2).sum()
            loss.backward()
            return loss

        for _ in range(2):
            opt.step(closure)

    w, opt = make(0)
    step(w, opt)
    data = save({"w": w, "opt": opt})
    w2, opt2 = make(1)
    load(data, {"w": w2, "opt": opt2})
    for pair in ((w, opt), (w2, opt2)):
        step(*pair)
    assert raw(w) == raw(w2)


def test_schedulers_and_scaler_come_back():
    def make():
        opt = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        s = torch.optim.lr_scheduler
        cosine = s.CosineAnnealingLR(opt, 10)
        return {
            "opt": opt, "lambda": s.LambdaLR(opt, lambda e: 0.9**e), "one": s.OneCycleLR(opt, 1, 9),
            "seq": s.SequentialLR(opt, [s.ConstantLR(opt), cosine], [2]),
            "plateau": s.ReduceLROnPlateau(opt), "scaler": torch.amp.GradScaler("cpu"),
        }  # fmt: skip

    state, target = make(), make()
    state["opt"].step()
    for name in ("lambda", "seq"):
        state[name].step()
    load(save(state), target)
    for name in state:
        assert repr(target[name].state_dict()) == repr(state[name].state_dict())


def test_rng_of_torch_python_and_numpy_go_on():
    """B021 for one rank: each generator continues its own sequence."""
    python, generator = random.Random(3), torch.Generator().manual_seed(4)
    legacy, modern = np.random.RandomState(5), np.random.default_rng(6)
    python.random(), torch.rand(3, generator=generator), legacy.rand(3), modern.random(3)
    state = {"py": python.getstate(), "t": generator, "np": legacy.get_state(),
             "np2": modern.bit_generator.state}  # fmt: skip
    data = save(state)
    want = (
        python.random(),
        torch.rand(2, generator=generator).tolist(),
        legacy.rand(),
        modern.random(),
    )
    target = {"py": None, "t": torch.Generator(), "np": None, "np2": {}}
    own = target["t"]
    back = load(data, target)
    assert back["t"] is own
    python2, legacy2, modern2 = random.Random(), np.random.RandomState(), np.random.default_rng()
    python2.setstate(back["py"])
    legacy2.set_state(back["np"])
    modern2.bit_generator.state = back["np2"]
    got = python2.random(), torch.rand(2, generator=own).tolist(), legacy2.rand(), modern2.random()
    assert got == want
    assert len(data) < 4096 * 3 + 12_000


def test_an_object_fills_a_dict_and_a_dict_fills_an_object():
    model = torch.nn.Linear(2, 2)
    target = {"m": {key: torch.zeros_like(v) for key, v in model.state_dict().items()}}
    load(save({"m": model}), target)
    assert torch.equal(target["m"]["weight"], model.weight)
    other = torch.nn.Linear(2, 2)
    load(save({"m": dict(model.state_dict())}), {"m": other})
    assert torch.equal(other.weight, model.weight)


def test_load_state_dict_that_raises_is_told():
    class Picky:
        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            raise RuntimeError("no")

    with pytest.raises(StateMismatch, match=r"state\['p'\].*Picky raised.*no"):
        load(save({"p": Picky()}), {"p": Picky()})


# -- refusals -----------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


class Colour(Enum):
    RED = 1


class Foo:
    pass


def test_what_cannot_be_stored_is_named():
    """B026: no pickle is made; all bad paths in one error."""
    with pytest.raises(UnsupportedState) as caught:
        plan({"opt": {"hook": Foo()}, "p": Point(1, 2), "e": [0, Colour.RED], "d": deque(),
              "dd": defaultdict(list), "f": len, "c": Foo, "o": np.array([None]),
              "k": {Point(1, 2): 1}})  # fmt: skip
    message = str(caught.value)
    assert "state['opt']['hook']: object of class" in message
    for part in ("Foo cannot be stored", "['p']", "['e'][1]", "deque", "defaultdict", "['f']",
                 "['c']", "numpy array of dtype object", "['k'][Point(x=1, y=2)]"):  # fmt: skip
        assert part in message
    with pytest.raises(UnsupportedState, match="and 15 more"):
        plan([Foo() for _ in range(25)])


def test_unusual_tensors_are_refused_by_name():
    sparse = torch.eye(3).to_sparse()

    class Sub(torch.Tensor):
        pass

    nested = torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)
    sub = torch.ones(1).as_subclass(Sub)
    with pytest.raises(UnsupportedState) as caught:
        plan({"s": sparse, "m": torch.empty(2, device="meta"), "sub": sub, "nested": nested})
    message = str(caught.value)
    for part in (
        "state['s']: tensor of layout torch.sparse_coo",
        "meta tensor",
        "Sub",
        "NestedTensor",
    ):
        assert part in message


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_tensors_are_refused_by_name():
    with pytest.raises(UnsupportedState, match=r"quantised tensor of dtype torch\.qint8"):
        plan(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


def test_cycles_and_depth_are_refused_by_path():
    loop = {"a": []}
    loop["a"].append(loop)
    with pytest.raises(UnsupportedState, match=r"state\['a'\]\[0\]: a container that holds itself"):
        plan(loop)
    deep = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(UnsupportedState, match="nesting deeper"):
        plan(deep)
    shared = [1]
    assert materialise(save([shared, shared])) == [[1], [1]]


def test_a_misfit_names_its_paths_and_changes_nothing():
    saved = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(2), "n": 1, "x": [1, 2]}
    data = save(saved)
    target = {"a": torch.zeros(2), "b": torch.zeros(4), "c": torch.zeros(2, dtype=torch.int64),
              "n": {"k": 1}, "x": (1, 2), "extra": 1}  # fmt: skip
    with pytest.raises(StateMismatch) as caught:
        load(data, target)
    message = str(caught.value)
    for part in ("1 missing:\n  state['extra']", "state['b']: saved float32[3], target float32[4]",
                 "state['c']", "state['n']", "state['x']"):  # fmt: skip
        assert part in message
    assert target["a"].tolist() == [0, 0]
    with pytest.raises(StateMismatch) as caught:
        load(save({str(i): i for i in range(50)}), {"q": 0})
    assert "50 unexpected" in str(caught.value)
    assert str(caught.value).count("\n") < 30
    array = np.zeros(2)
    array.flags.writeable = False
    with pytest.raises(StateMismatch, match="read-only"):
        load(save({"a": np.ones(2)}), {"a": array})
    with pytest.raises(StateMismatch, match="missing"):
        load(save(torch.nn.Linear(2, 2, bias=False)), torch.nn.Linear(2, 2))


def test_parameters_keep_identity_strides_and_gradient_flag():
    w = torch.randn(3, 4, 2, 2)
    target = torch.nn.Parameter(torch.zeros(3, 4, 2, 2).to(memory_format=torch.channels_last))
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    state = {"w": target, "f": frozen}
    back = load(save({"w": w, "f": torch.nn.Parameter(torch.ones(2))}), state)
    assert back["w"] is target
    assert target.requires_grad
    assert not frozen.requires_grad
    assert target.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(target, w)


# -- the file -----------------------------------------------------------------------------------


def test_any_safetensors_reader_opens_it():
    state = {"a": torch.randn(3, 3).bfloat16(), "c": torch.randn(2, dtype=torch.complex128),
             "e": torch.zeros(0, 2), "b": torch.ones(5, dtype=torch.bool), "n": 1}  # fmt: skip
    data = save(state)
    found = safetensors_load(data)
    assert torch.equal(found["a"], state["a"])
    assert found["c"].view(-1).view(torch.complex128).tolist() == state["c"].tolist()
    table = read_header(data)
    assert table.data_start % 4096 == 0
    offsets = {entry.name: entry.offset for entry in table.entries}
    assert offsets["c"] < offsets["a"] < offsets["b"]
    assert table.tree_offset + table.tree_nbytes == len(data)


def test_the_buffer_is_checked():
    p = plan({"a": torch.ones(4)})
    with pytest.raises(NoRoom, match=f"need {p.snapshot_bytes} bytes, have 10"):
        write(p, bytearray(10))
    with pytest.raises(UsageError, match="read-only"):
        write(p, bytes(p.snapshot_bytes))
    assert p.capacity_bytes == 2 * 1024 * 1024
    w = torch.nn.Parameter(torch.zeros(2**20))
    fresh = plan({"w": w, "opt": torch.optim.AdamW([w])})
    assert fresh.capacity_bytes >= 3 * 4 * 2**20


def test_every_byte_is_checked_right_before_it_is_used():
    state = {"a": torch.ones(4), "b": np.ones(3), "c": b"x" * 70_000, "n": 3}
    data, seen = save(state), []
    load(data, None, lambda offset, length: seen.append((offset, length)))
    covered = sorted(seen)
    assert covered[0][0] == 0
    assert all(a + n == b for (a, n), (b, _) in pairwise(covered))
    assert sum(covered[-1]) == len(data)

    def bad(offset, length):
        raise FormatError(f"range {offset}")

    with pytest.raises(FormatError, match="range 0"):
        load(data, None, bad)


def test_a_pickle_in_the_tree_is_never_run(tmp_path):
    """B026: a pickle that would create a file lies where the tree should be."""
    proof = tmp_path / "proof"
    evil = f"cposix\nsystem\n(S'touch {proof}'\ntR.".encode()
    data = bytearray(save({"a": torch.ones(1), "text": "x" * 200}))
    table = read_header(bytes(data))
    data[table.tree_offset : table.tree_offset + len(evil)] = evil
    with pytest.raises(FormatError):
        materialise(bytes(data))
    assert not proof.exists()


def test_dtensors_come_back_sharded():
    """FSDP2's kind of state: local parts with their global place, also in a fresh optimizer."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))

        def make(fill):
            local = torch.full((2, 4), fill)
            whole = torch.Size([7, 4]), (4, 1)
            d = DTensor.from_local(local, mesh, [Shard(0)], run_check=False,
                                   shape=whole[0], stride=whole[1])  # fmt: skip
            w = torch.nn.Parameter(d)
            return w, torch.optim.AdamW([w], foreach=False)

        w, opt = make(1.0)
        w.grad = torch.ones_like(w)
        opt.step()
        p = plan({"w": w, "opt": opt})
        assert (p.parts[0].global_shape, p.parts[0].offset, p.parts[0].lengths) == (
            (7, 4), (2, 0), (2, 4))  # fmt: skip
        data = save({"w": w, "opt": opt})
        w2, opt2 = make(0.0)
        load(data, {"w": w2, "opt": opt2})
        assert torch.equal(w2.to_local(), w.to_local())
        moment = opt2.state[w2]["exp_avg"]
        assert isinstance(moment, DTensor)
        assert moment.shape == (7, 4)
        assert torch.equal(moment.to_local(), opt.state[w]["exp_avg"].to_local())
        with pytest.raises(StateMismatch, match="target float32"):
            load(data, {"w": torch.zeros(2, 4), "opt": opt2})
        replicated = DTensor.from_local(torch.zeros(2, 4), mesh, [Replicate()], run_check=False)
        with pytest.raises(StateMismatch, match="placements"):
            load(data, {"w": replicated, "opt": opt2})
        with pytest.raises(StateMismatch, match="none like it"):
            load(data, {"w": None, "opt": None})
        assert materialise(data)["w"].shape == (2, 4)
    finally:
        torch.distributed.destroy_process_group()


# -- large --------------------------------------------------------------------------------------


def sparse_map(path, nbytes):
    with open(path, "w+b") as file:
        file.truncate(nbytes)
        return mmap.mmap(file.fileno(), nbytes)


def test_offsets_beyond_4_gib(tmp_path):
    """B025: a table with a 4 GiB + 1 tensor, read from a file with holes."""
    big = 2**32 + 1
    data = save(
        {"big": torch.zeros(3, dtype=torch.int8), "z": torch.tensor([1, 2], dtype=torch.int8)}
    )
    small = read_header(data)
    table = tables.build([("big", "int8", (big,)), ("z", "int8", (2,))], {})
    tree = data[small.tree_offset :]
    mapped = sparse_map(tmp_path / "big", table.tree_offset + len(tree))
    header = table.header(len(tree))
    mapped[: len(header)] = header
    mapped[table.entries[1].offset : table.tree_offset] = b"\x05\x06"
    mapped[table.tree_offset :] = tree
    found = read_header(mapped)
    assert found.entries == table.entries
    assert found.entries[1].offset > 2**32
    seen = []
    target = {"big": torch.zeros(1, dtype=torch.int8), "z": torch.zeros(2, dtype=torch.int8)}
    with pytest.raises(StateMismatch, match=f"int8.{big}."):
        load(mapped, target, lambda *r: seen.append(r))
    assert seen == [(0, table.data_start), (table.tree_offset, len(tree))]


@pytest.mark.slow
def test_five_gib_and_many_small_tensors(tmp_path):
    """B025: a 5 GiB tensor, a bytes object of 4 GiB + 1, 100,000 small tensors."""
    state = {"t": torch.zeros(5 * 2**30, dtype=torch.int8), "b": bytes(2**32 + 1)}
    state["t"][-1] = 3
    p = plan(state)
    mapped = sparse_map(tmp_path / "big", p.snapshot_bytes)
    assert write(p, mapped) == p.snapshot_bytes
    size = len(state["b"])
    del state, p
    back = materialise(mapped)
    assert (back["t"].numpy().sum(), back["t"][-1], len(back["b"])) == (3, 3, size)
    del back
    many = {i: torch.full((i % 3,), i) for i in range(100_000)}
    back = materialise(save(many))
    assert all(torch.equal(back[i], many[i]) for i in many)
