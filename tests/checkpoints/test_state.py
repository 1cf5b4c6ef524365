"""N steps, save, load into fresh objects, M steps: bit-identical to N+M steps, for every optimizer and schedule."""

import random

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from exact_trees import differences
from packaging.version import Version
from torch import nn
from torch.optim import lr_scheduler
from transformers import SchedulerType, get_scheduler, set_seed
from transformers.optimization import Adafactor as TransformersAdafactor
from transformers.optimization import get_reduce_on_plateau_schedule

from hf_ext.checkpoints.format.trees import load_tree, save_tree, tree_bytes
from hf_ext.checkpoints.state.finite import not_finite
from hf_ext.checkpoints.state.rng import capture_rng, restore_rng
from hf_ext.checkpoints.state.steppers import (
    expected_optimizer_bytes,
    load_optimizer_tree,
    load_scaler_tree,
    load_scheduler_tree,
    optimizer_tree,
    scaler_tree,
    scheduler_tree,
)
from hf_ext.errors import ArgumentError, CheckpointError

BEFORE, AFTER = 4, 3


def make_model(dtype=torch.float32, bias=True, sparse=False, width=8) -> nn.Module:
    torch.manual_seed(0)
    if sparse:
        return nn.Embedding(16, 4, sparse=True)
    return nn.Sequential(nn.Linear(6, width, bias=bias), nn.Tanh(), nn.Linear(width, 1, bias=bias)).to(dtype)


def take_steps(model: nn.Module, optimizer, first: int, last: int, scheduler=None) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        if isinstance(model, nn.Embedding):
            inputs = torch.randint(16, (5,), generator=generator)
        else:
            inputs = torch.randn(5, 6, generator=generator).to(next(model.parameters()).dtype)

        def loss_of(inputs=inputs):
            optimizer.zero_grad()
            loss = (model(inputs) - 1).square().sum()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(loss_of)
        else:
            loss_of()
            optimizer.step()
        if scheduler is not None:
            scheduler.step(*([1.0] if "Plateau" in type(scheduler).__name__ else []))


class FloatMoments(torch.optim.Optimizer):
    """Momentum in float32 whatever the parameter's dtype, with counts and bytes beside it, nested."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(nested={"moment": torch.zeros_like(parameter, dtype=torch.float32)}, ages=[0])
                    state["signs"] = torch.zeros_like(parameter, dtype=torch.int8)
                moment = state["nested"]["moment"].mul_(0.9).add_(parameter.grad)
                state["signs"].copy_(moment.sign())
                state["ages"][0] += 1
                parameter.sub_((group["lr"] * moment).to(parameter.dtype))


class MuonAndAdamW(torch.optim.Optimizer):
    """Two optimizers as one, as hybrids are written: Muon for matrices, AdamW for the rest."""

    def __init__(self, params):
        params = list(params)
        self.parts = [
            torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.01),
            torch.optim.AdamW([p for p in params if p.ndim != 2], lr=0.01),
        ]
        super().__init__([{"params": group["params"]} for part in self.parts for group in part.param_groups], {})

    def step(self):
        for part in self.parts:
            part.step()

    def state_dict(self):
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict):
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


OPTIMIZERS = {  # class, arguments, model
    "Adadelta": (torch.optim.Adadelta, {}, {}),
    "Adafactor": (torch.optim.Adafactor, {}, {}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}, {}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}, {}),
    "Adam, tensor rate": (torch.optim.Adam, {"lr": torch.tensor(0.01)}, {}),
    "Adam, float64": (torch.optim.Adam, {}, {"dtype": torch.float64}),
    "AdamW": (torch.optim.AdamW, {}, {}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}, {}),
    "AdamW, foreach": (torch.optim.AdamW, {"foreach": True}, {}),
    "AdamW, bfloat16": (torch.optim.AdamW, {}, {"dtype": torch.bfloat16}),
    "AdamW, fused, bfloat16": (torch.optim.AdamW, {"fused": True}, {"dtype": torch.bfloat16}),
    "Adamax": (torch.optim.Adamax, {}, {}),
    "ASGD": (torch.optim.ASGD, {"t0": 2}, {}),
    "LBFGS": (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 3}, {}),
    "LBFGS, strong Wolfe": (torch.optim.LBFGS, {"max_iter": 3, "line_search_fn": "strong_wolfe"}, {}),
    "Muon": (torch.optim.Muon, {}, {"bias": False}),
    "NAdam": (torch.optim.NAdam, {}, {}),
    "RAdam": (torch.optim.RAdam, {}, {}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}, {}),
    "Rprop": (torch.optim.Rprop, {}, {}),
    "SGD": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}, {}),
    "SGD, plain": (torch.optim.SGD, {"lr": 0.01}, {}),
    "SparseAdam": (torch.optim.SparseAdam, {}, {"sparse": True}),
    "transformers Adafactor": (TransformersAdafactor, {}, {}),
    "float32 moments": (FloatMoments, {}, {}),
    "float32 moments, bfloat16": (FloatMoments, {}, {"dtype": torch.bfloat16}),
    "hybrid": (MuonAndAdamW, {}, {}),
}


def make_optimizer(name: str):
    cls, settings, model_settings = OPTIMIZERS[name]
    model = make_model(**model_settings)
    settings = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in settings.items()}
    return model, cls(model.parameters(), **settings)


def train_interrupted(make, folder, load=load_optimizer_tree):
    """Weights and state dict after BEFORE steps, a save, and AFTER steps with everything built anew."""
    model, optimizer = make()
    take_steps(model, optimizer, 0, BEFORE)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    save_tree(folder, "optimizer", optimizer_tree(optimizer))
    model, optimizer = make()
    model.load_state_dict(weights)
    load(optimizer, load_tree(folder, "optimizer"))
    take_steps(model, optimizer, BEFORE, BEFORE + AFTER)
    return dict(model.state_dict()), optimizer.state_dict()


def train_through(make):
    model, optimizer = make()
    take_steps(model, optimizer, 0, BEFORE + AFTER)
    return dict(model.state_dict()), optimizer.state_dict()


def load_as_torch_does(optimizer, tree):
    optimizer.load_state_dict(tree["state_dict"])


def load_nothing(optimizer, tree):
    pass


def test_every_optimizer_of_torch_is_tried():
    of_torch = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)}
    assert of_torch - {"Optimizer"} == {name for name in OPTIMIZERS if name in of_torch}
    assert len(of_torch) >= 15


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_continues_bit_for_bit(tmp_path, name):
    through = train_through(lambda: make_optimizer(name))
    assert differences(through, train_interrupted(lambda: make_optimizer(name), tmp_path)) == []


@pytest.mark.parametrize(("name", "load"), [("AdamW", load_nothing), ("float32 moments, bfloat16", load_as_torch_does)])
def test_the_comparison_sees_state_that_was_lost_or_rounded(tmp_path, name, load):
    weights, _ = train_interrupted(lambda: make_optimizer(name), tmp_path, load)
    assert differences(train_through(lambda: make_optimizer(name))[0], weights)


@pytest.mark.parametrize("name", ["AdamW, fused", "SGD", "float32 moments, bfloat16"])
def test_an_optimizer_that_accelerate_wraps_continues_bit_for_bit(tmp_path, name):
    accelerator = Accelerator(cpu=True)

    def make():
        model, optimizer = make_optimizer(name)
        return model, accelerator.prepare(optimizer)

    assert differences(train_through(make), train_interrupted(make, tmp_path)) == []


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_quantized_states_of_torchao_continue_bit_for_bit(tmp_path, name):
    torchao = pytest.importorskip("torchao.optim")

    def make():
        model = make_model(width=1024)  # torchao quantizes from 4096 elements on
        return model, getattr(torchao, name)(model.parameters(), lr=0.01)

    through = train_through(make)
    assert type(through[1]["state"][0]["exp_avg"]).__name__.startswith("OptimState")
    continued = train_interrupted(make, tmp_path)
    assert differences(through[0], continued[0]) == []
    assert differences(*(optimizer_parts(state) for _, state in (through, continued))) == []


def optimizer_parts(state_dict: dict) -> list:
    """Plain tensors of a state dict that holds quantized ones."""
    values = [value for state in state_dict["state"].values() for value in state.values()]
    return [[getattr(v, n) for n in v.tensor_attrs] if hasattr(v, "tensor_attrs") else v for v in values]


def stepped(model: nn.Module, cls=torch.optim.AdamW, groups=None):
    optimizer = cls(groups or model.parameters(), lr=0.01)
    take_steps(model, optimizer, 0, 2)
    return optimizer


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda: stepped(make_model(), torch.optim.SGD), "AdamW in the checkpoint, SGD now"),
        (lambda: stepped(make_model(bias=False)), "group 0 has 4 parameters in the checkpoint, 2 now"),
        (
            lambda: stepped(make_model(width=9)),
            r"parameter 0 of group 0 is float32 \(8, 6\) in the checkpoint, float32 \(9, 6\) now; .*parameter 1",
        ),
        (
            lambda: stepped(make_model(torch.bfloat16)),
            r"float32 \(8, 6\) in the checkpoint, bfloat16 \(8, 6\) now.*and 1 more",
        ),
        (
            lambda: stepped(m := make_model(), groups=[{"params": [p]} for p in m.parameters()]),
            "1 parameter groups in the checkpoint, 4 now",
        ),
    ],
    ids=["class", "count", "shape", "dtype", "groups"],
)
def test_another_optimizer_is_refused_and_left_as_it_was(other, says):
    tree = optimizer_tree(stepped(make_model()))
    live = other()
    before = differences(live.state_dict(), {})
    with pytest.raises(CheckpointError, match=says):
        load_optimizer_tree(live, tree)
    assert differences(live.state_dict(), {}) == before


@pytest.mark.parametrize("tree", [{}, [], {"class": "AdamW", "parameters": 3, "state_dict": {}}], ids=str)
def test_what_is_no_optimizer_state_is_refused(tree):
    with pytest.raises(CheckpointError, match="Not the state of an optimizer"):
        load_optimizer_tree(stepped(make_model()), tree)


def test_an_optimizer_that_drops_state_is_refused():
    class Forgetful(torch.optim.AdamW):
        def load_state_dict(self, state_dict):
            state = {key: {"step": value["step"]} for key, value in state_dict["state"].items()}
            super().load_state_dict({**state_dict, "state": state})

    optimizer = stepped(make_model(), Forgetful)
    with pytest.raises(CheckpointError, match=r"Forgetful does not keep .*\['exp_avg'\]"):
        load_optimizer_tree(optimizer, optimizer_tree(optimizer))


def test_rounded_state_takes_half_the_bytes_and_comes_back_in_float32(tmp_path):
    model = make_model(width=4096)
    optimizer = stepped(model)
    exact = optimizer.state_dict()["state"]
    tree = optimizer_tree(optimizer, dtype=torch.bfloat16)
    assert 0.5 < tree_bytes(tree) / tree_bytes(optimizer_tree(optimizer)) < 0.6
    save_tree(tmp_path, "optimizer", tree)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.01)
    load_optimizer_tree(fresh, load_tree(tmp_path, "optimizer"))
    rounded = fresh.state_dict()["state"]
    for i, state in exact.items():
        for key, value in state.items():
            expected = value if value.numel() == 1 else value.bfloat16().float()  # step counts, the last bias
            assert differences(expected, rounded[i][key]) == []
    assert differences(exact[0]["exp_avg"], rounded[0]["exp_avg"]) != []


def test_rounding_leaves_what_is_smaller_than_the_parameter():
    model = make_model()
    state = optimizer_tree(stepped(model, torch.optim.Adafactor), dtype=torch.bfloat16)["state_dict"]["state"]
    assert differences(state[0]["row_var"], torch.optim.Adafactor(model.parameters()).state) != []
    assert state[0]["row_var"].dtype == torch.float32
    assert state[1]["variance"]["dtype"] == torch.float32
    assert state[1]["variance"]["tensor"].dtype == torch.bfloat16


def test_state_of_an_optimizer_made_of_others_is_rounded_too():
    _, optimizer = make_optimizer("hybrid")
    optimizer.parts[0].state[optimizer.parts[0].param_groups[0]["params"][0]]["momentum_buffer"] = torch.ones(8, 6)
    parts = optimizer_tree(optimizer, dtype=torch.bfloat16)["state_dict"]["parts"]
    assert parts[0]["state"][0]["momentum_buffer"]["tensor"].dtype == torch.bfloat16


def test_rounding_to_another_dtype_is_refused():
    with pytest.raises(ArgumentError, match="float16"):
        optimizer_tree(stepped(make_model()), dtype=torch.float16)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["AdamW, fused", "SGD", "SGD, plain", "Adafactor", "Adagrad", "transformers Adafactor", "float32 moments"]
)
def test_bytes_are_known_before_the_first_step(name, dtype):
    cls, settings, _ = OPTIMIZERS[name]
    model = make_model(width=3000)
    optimizer = cls(model.parameters(), **settings)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    expected = expected_optimizer_bytes(optimizer, dtype)
    assert name == "Adagrad" or not optimizer.state  # Adagrad has state from the start
    assert differences(weights, [parameter.detach() for parameter in model.parameters()]) == []
    take_steps(model, optimizer, 0, 1)
    stored = tree_bytes(optimizer_tree(optimizer, dtype))
    if name == "Adagrad" and Version(torch.__version__) < Version("2.13"):
        assert stored <= expected  # announced as larger than it is: on 2.11 by 150 kB
    else:
        assert abs(stored - expected) <= 4096  # a block, for digits in the JSON


def test_bytes_are_known_beside_a_schedule_and_through_accelerate():
    _, optimizer, _ = make_schedule("linear")
    rates = [group["lr"] for group in optimizer.param_groups]
    assert expected_optimizer_bytes(Accelerator(cpu=True).prepare(optimizer)) < 30_000
    assert [group["lr"] for group in optimizer.param_groups] == rates


def test_bytes_of_an_optimizer_that_cannot_be_tried_are_those_of_two_states(caplog):
    model = make_model(width=3000)
    with caplog.at_level("INFO"):
        assert expected_optimizer_bytes(torch.optim.LBFGS(model.parameters())) == 24_001 * 8 + 65_536
    assert "LBFGS cannot be sized" in caplog.text


def count_schedule_steps(make, folder, name, load=load_scheduler_tree):
    """Learning rates of 14 steps, of which the last 7 come from a schedule that was saved and loaded."""
    rates = []
    model, optimizer, scheduler = make()
    for step in range(14):
        if step == 7 and folder:
            save_tree(folder, "optimizer", optimizer_tree(optimizer))
            save_tree(folder, "scheduler", scheduler_tree(scheduler))
            model, optimizer, scheduler = make()
            load_optimizer_tree(optimizer, load_tree(folder, "optimizer"))
            load(scheduler, load_tree(folder, "scheduler"))
        take_steps(model, optimizer, step, step + 1)
        scheduler.step(*([1.0 / (1 + step % 4)] if name in NEEDS_METRIC else []))
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
    return rates, {key: value for key, value in scheduler.state_dict().items() if key != "_schedulers"}


NEEDS_METRIC = {"reduce_lr_on_plateau", "greedy", "ReduceLROnPlateau", "transformers plateau"}
OF_TORCH = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.1, 9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, 3, cycle_momentum=False),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 10),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 8, 8, 11]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.95),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 12, 2.0),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 5), lr_scheduler.CosineAnnealingLR(o, 9)], [5]
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 4),
}
SPECIFIC = {
    "warmup_stable_decay": {"num_decay_steps": 5},
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
    "greedy": {"patience": 1, "smooth": True, "window_size": 3},
    "reduce_lr_on_plateau": {"patience": 1},
}


def make_schedule(name: str):
    model = make_model()
    first, *rest = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": rest, "lr": 0.02}], lr=0.01)
    if name in OF_TORCH:
        return model, optimizer, OF_TORCH[name](optimizer)
    if name == "transformers plateau":
        return model, optimizer, get_reduce_on_plateau_schedule(optimizer, patience=1)
    return model, optimizer, get_scheduler(name, optimizer, 2, 12, SPECIFIC.get(name))


def test_every_schedule_of_torch_is_tried():
    kinds = {name for name in lr_scheduler.__all__ if name not in ("LRScheduler",)}
    assert kinds == set(OF_TORCH)
    assert len(SchedulerType) >= 11


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*OF_TORCH, *(kind.value for kind in SchedulerType), "transformers plateau"])
def test_a_schedule_continues_bit_for_bit(tmp_path, name):
    through = count_schedule_steps(lambda: make_schedule(name), None, name)
    continued = count_schedule_steps(lambda: make_schedule(name), tmp_path, name)
    assert differences(through, continued) == []
    if name not in ("constant",):
        assert len({rates[0] for rates in through[0]}) > 1  # the schedule did something


def test_the_comparison_sees_a_schedule_that_began_again(tmp_path):
    def make():
        return make_schedule("linear")

    continued = count_schedule_steps(make, tmp_path, "linear", load=lambda scheduler, tree: None)
    assert differences(count_schedule_steps(make, None, "linear"), continued)


def test_another_schedule_is_refused():
    *_, linear = make_schedule("linear")
    *_, step = make_schedule("StepLR")
    with pytest.raises(CheckpointError, match="class is StepLR now, LambdaLR in the checkpoint"):
        load_scheduler_tree(step, scheduler_tree(linear))
    one_group = get_scheduler("linear", torch.optim.SGD(make_model().parameters(), lr=0.1), 2, 12)
    with pytest.raises(CheckpointError, match="number of parameter groups is 1 now, 2 in the checkpoint"):
        load_scheduler_tree(one_group, scheduler_tree(linear))


def test_a_schedule_that_accelerate_wraps_continues(tmp_path):
    accelerator = Accelerator(cpu=True)

    def make():
        model, optimizer, scheduler = make_schedule("cosine")
        return model, *accelerator.prepare(optimizer, scheduler)

    through = count_schedule_steps(make, None, "cosine")
    assert differences(through, count_schedule_steps(make, tmp_path, "cosine")) == []


def make_scaler(**settings):
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, **settings)


def scaled_step(scaler, value: float) -> float:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter.sum() * value).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def test_a_loss_scale_continues(tmp_path):
    values = [1.0, 1.0, 1.0, float("inf"), 1.0, 1.0, 1.0, 1.0]
    through = make_scaler()
    expected = [scaled_step(through, value) for value in values]
    assert expected == [1024.0, 1024.0, 2048.0, 1024.0, 1024.0, 1024.0, 2048.0, 2048.0]
    first, second = make_scaler(), make_scaler()
    before = [scaled_step(first, value) for value in values[:5]]
    save_tree(tmp_path, "scaler", scaler_tree(first))
    load_scaler_tree(second, load_tree(tmp_path, "scaler"))
    assert before + [scaled_step(second, value) for value in values[5:]] == expected


def test_loss_scaling_that_was_switched_is_refused():
    on, off = make_scaler(), make_scaler(enabled=False)
    load_scaler_tree(off, scaler_tree(off))
    with pytest.raises(CheckpointError, match="is off now and was on"):
        load_scaler_tree(off, scaler_tree(on))
    with pytest.raises(CheckpointError, match="is on now and was off"):
        load_scaler_tree(on, scaler_tree(off))


def draw() -> list:
    dropped = nn.functional.dropout(torch.ones(8))
    of_numpy = [np.random.rand(), np.random.randn()]  # noqa: NPY002  the global generator is what is tested
    return [random.random(), random.gauss(0, 1), *of_numpy, torch.rand(3), dropped]


def test_random_numbers_continue(tmp_path):
    set_seed(1)
    draw()  # one Gaussian of each pair is kept for the next call: part of the state
    state = capture_rng("cpu")
    expected = draw()
    assert differences(expected, draw())
    save_tree(tmp_path, "rng", state)
    set_seed(2)
    restore_rng(load_tree(tmp_path, "rng"))
    assert differences(expected, draw()) == []


@pytest.mark.gpu
def test_an_optimizer_of_the_gpu_continues_bit_for_bit(tmp_path):
    def make():
        model = make_model().to("cuda")
        return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01, device="cuda"), fused=True)

    def train(resumed: bool):
        model, optimizer = make()
        for step in range(6):
            if step == 3 and resumed:
                weights = {name: value.clone() for name, value in model.state_dict().items()}
                save_tree(tmp_path, "optimizer", optimizer_tree(optimizer))
                model, optimizer = make()
                model.load_state_dict(weights)
                load_optimizer_tree(optimizer, load_tree(tmp_path, "optimizer"))
            optimizer.zero_grad()
            model(torch.full((5, 6), step / 6, device="cuda")).square().sum().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    assert differences(train(False), train(True)) == []


@pytest.mark.gpu
def test_random_numbers_of_the_gpu_continue(tmp_path):
    save_tree(tmp_path, "rng", capture_rng("cuda"))
    expected = torch.rand(3, device="cuda").cpu()
    assert differences(expected, torch.rand(3, device="cuda").cpu())
    restore_rng(load_tree(tmp_path, "rng"))
    assert differences(expected, torch.rand(3, device="cuda").cpu()) == []


def test_generators_of_an_absent_accelerator_are_warned_about(tmp_path, caplog):
    state = {**capture_rng("cpu"), "accelerator": {"kind": "xpu", "states": [torch.zeros(16, dtype=torch.uint8)] * 2}}
    save_tree(tmp_path, "rng", state)
    expected = draw()
    restore_rng(load_tree(tmp_path, "rng"))
    assert differences(expected, draw()) == []
    assert "holds generators of 2 xpu device(s), 0 are here" in caplog.text


@pytest.mark.parametrize("tree", [{}, {"python": 1}, {**capture_rng(), "numpy": {"bit_generator": "PCG64"}}], ids=len)
def test_what_is_no_random_state_is_refused(tree):
    with pytest.raises(CheckpointError, match="Not the states of random generators"):
        restore_rng(tree)


def with_value(value: float, position: int, size: int = 1000, dtype=torch.float32) -> torch.Tensor:
    tensor = torch.ones(size, dtype=dtype)
    tensor[position] = value
    return tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_found_anywhere(dtype, value):
    for position in (0, 499, 999):
        tensors = {"good": torch.ones(7), "bad": with_value(value, position, dtype=dtype), "empty": torch.ones(0)}
        assert not_finite(tensors.items()) == ["bad"]


def test_names_of_what_is_not_finite_come_in_order():
    nan = with_value(float("nan"), 0, dtype=torch.bfloat16)
    tensors = {"c": nan, "b": torch.ones(1), "a": with_value(float("inf"), 5), "d": nn.Parameter(nan.float())}
    assert not_finite(tensors.items()) == ["c", "a", "d"]
    assert not_finite([("float8", with_value(float("nan"), 3).to(torch.float8_e4m3fn))]) == ["float8"]


def test_large_values_and_integers_are_finite():
    tensors = {
        "norm overflows": torch.full((100,), 3e38),
        "half": torch.full((100,), 6e4, dtype=torch.float16),
        "integers": torch.full((3,), 2**62),
        "flags": torch.ones(3, dtype=torch.bool),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
    }
    assert not_finite(tensors.items()) == []
    assert not_finite([]) == []
