"""Restoring into a target: ties, objects, optimizers and RNGs come back; a misfit changes nothing.

Case ids (B...) name the reported fault that a test stands for.
"""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from test_snapshot import raw, save

from p2pckpt.errors import StateMismatch
from p2pckpt.restore.load import load, materialise, read_header

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
from test_load import trained, go_on
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


# -- memory ---------------------------------------------------------------------------------------

LOAD = """
import ctypes, mmap, resource, sys
sys.path.insert(0, {tests!r})
import torch
from test_load import many_tensors, MIB
from p2pckpt.restore.load import load
torch.set_num_threads(1)
with open({path!r}, "r+b") as file:
    image = memoryview(mmap.mmap(file.fileno(), 0))
target = many_tensors(0.0)
load(image, target)  # code and caches of a load are there
for tensor in target.values():
    tensor.zero_()
ctypes.CDLL(None).malloc_trim(0)
status = open("/proc/self/status").read()
now = next(int(l.split()[1]) * 1024 for l in status.splitlines() if l.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (now + 32 * MIB, -1))
try:
    torch.empty(48 * MIB, dtype=torch.uint8)
except RuntimeError:
    pass
else:
    sys.exit("the limit does not hold")
load(image, target)
assert all(bool((t == i).all()) for i, t in enumerate(target.values()))
"""
MIB = 1 << 20


def many_tensors(by):
    """200 tensors of 116 MiB, the largest one of 16."""
    sizes = [16] + [1] * 100 + [0] * 99
    return {str(i): torch.full((mib * MIB // 4,), by * i) for i, mib in enumerate(sizes)}


def test_a_restore_needs_no_memory_but_the_targets(tmp_path):
    """B066: 200 tensors are loaded from a mapped file with no more room than twice the largest:
    each goes straight to its place, once. (A rank reads its own part only: it has its own file.)"""
    path = tmp_path / "snapshot"
    path.write_bytes(save(many_tensors(1.0)))
    code = LOAD.format(tests=os.path.dirname(__file__), path=str(path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
