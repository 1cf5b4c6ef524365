"""`HostOptimizer`: bit for bit the optimizer it wraps, whose states have left the device; moved in the middle of a run.

Without a GPU host and device are two places in one memory: copies and bookkeeping are those of a card all the same.
"""

import copy

import pytest
import torch
from accelerate import Accelerator
from closeness import largest
from torch import nn
from transformers import get_linear_schedule_with_warmup
from transformers.optimization import Adafactor

from hf_ext.errors import ArgumentError
from hf_ext.models.host_optimizer import HostOptimizer, find_host_optimizer, move_to_host
from hf_ext.models.muon import MuonAdamW

STEPS = 20


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def make_adamw(net, **given):
    """Two groups, of which the first has a rate of its own, as encoders have."""
    groups = [{"params": [*net[:3].parameters()], "lr": 1e-3}, {"params": [*net[3:].parameters()]}]
    return torch.optim.AdamW(groups, **{"lr": 1e-2, "weight_decay": 0.1, "fused": True, **given})


MAKERS = {
    "adamw_fused": make_adamw,
    "adamw": lambda net: make_adamw(net, fused=False),
    "muon": lambda net: MuonAdamW(make_adamw(net), [net[0].weight, net[2].weight]),
    "adafactor": lambda net: Adafactor(net.parameters(), lr=1e-2, scale_parameter=False, relative_step=False),
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=0.1),  # has its state before the first step
}


class Training:
    """Steps of two clipped passes each, under a schedule; the last layer has a gradient in every second step."""

    def __init__(self, make, wrap=lambda optimizer: optimizer):
        self.net = make_net()
        self.optimizer = wrap(make(self.net))
        self.schedule = get_linear_schedule_with_warmup(self.optimizer, 3, 2 * STEPS)
        self.num_done, self.scale = 0, lambda loss: loss

    def run(self, num_steps: int = STEPS) -> "Training":
        for _ in range(num_steps):
            for part in range(2):
                rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * self.num_done + part))
                hidden = self.net[:4](rows)
                self.scale((self.net[4](hidden) if self.num_done % 2 else hidden).square().mean()).backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.05)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.num_done += 1
        return self

    def difference(self, other: "Training") -> float:
        pairs = zip(self.net.parameters(), other.net.parameters(), strict=True)
        return largest((mine - theirs).abs().max() for mine, theirs in pairs)


class ZeroGradients(HostOptimizer):
    """Broken: a parameter without a gradient is given one of zeros, so that momentum and decay move it."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return super().step(closure)


class OldRates(HostOptimizer):
    """Broken: the host has groups of its own, to which no schedule writes."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self._first = [group["lr"] for group in self.param_groups]

    def step(self, closure=None):
        for group, rate in zip(self.param_groups, self._first):
            group["lr"] = rate
        return super().step(closure)


@pytest.mark.parametrize("name", MAKERS)
def test_twenty_steps_on_the_host_equal_the_optimizers_own_bit_for_bit(name):
    plain, ours = Training(MAKERS[name]).run(), Training(MAKERS[name], HostOptimizer).run()
    assert plain.difference(ours) == 0.0
    assert plain.difference(Training(MAKERS[name])) > 1e-3  # it trained
    assert [group["lr"] for group in ours.optimizer.param_groups] == [g["lr"] for g in plain.optimizer.param_groups]
    assert equal_trees(plain.optimizer.state_dict(), ours.optimizer.state_dict())


def equal_trees(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_trees(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal_trees, one, other))
    return one == other


@pytest.mark.parametrize("broken", [ZeroGradients, OldRates])
def test_broken_twins_are_told_apart(broken):
    assert Training(make_adamw).run().difference(Training(make_adamw, broken).run()) > 1e-4


def test_a_step_whose_gradients_were_taken_away_changes_nothing():
    ours = Training(make_adamw, HostOptimizer).run(3)
    before = copy.deepcopy(ours.net.state_dict()), copy.deepcopy(ours.optimizer.state_dict())
    ours.optimizer.step()  # as `nan_policy skip` leaves it
    assert equal_trees(before[0], ours.net.state_dict())
    assert equal_trees(before[1], ours.optimizer.state_dict())


def test_weights_that_somebody_changed_between_two_steps_are_what_the_next_starts_from():
    pair = [Training(make_adamw).run(2), Training(make_adamw, HostOptimizer).run(2)]
    for training in pair:
        for parameter in training.net.parameters():
            parameter.data.mul_(0.5)  # which no version counter shows
        training.run(2)
    assert pair[0].difference(pair[1]) == 0.0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["adamw_fused", "adamw", "muon"])
def test_a_loss_scaler_unscales_leaves_out_and_goes_on_as_without_the_host(name):
    def run(wrap):
        net, accelerator = make_net(), Accelerator(cpu=True)
        scaler = accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        optimizer, skipped = accelerator.prepare_optimizer(wrap(MAKERS[name](net))), []
        for step in range(6):
            loss = net(torch.full((2, 8), float(step))).square().mean()
            scaler.scale(loss * (float("inf") if step == 3 else 1.0)).backward()
            if step % 2 == 0:  # else the scaler unscales by itself
                scaler.unscale_(optimizer.optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
        return [[p.detach() for p in net.parameters()], scaler.state_dict(), optimizer.state_dict(), skipped]

    plain, ours = run(lambda optimizer: optimizer), run(HostOptimizer)
    assert equal_trees(plain[:3], ours[:3])
    assert ours[3] == [step == 3 for step in range(6)]  # of a fused kernel on the device accelerate sees nothing
    assert ours[1]["scale"] == 8.0  # 4, doubled after two steps, halved by the third, doubled again


# --- in the middle of a run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_one_that_has_stepped_goes_on_from_its_state(name):
    plain, ours = Training(MAKERS[name]).run(), Training(MAKERS[name]).run(7)
    moved = move_to_host(ours.optimizer)
    assert type(moved) is HostOptimizer
    assert move_to_host(moved) is find_host_optimizer(moved) is moved
    ours.optimizer = moved  # the schedule is still that of the one that was moved
    assert plain.difference(ours.run(STEPS - 7)) == 0.0


@pytest.mark.parametrize("has_scaler", [False, True])
def test_accelerates_wrapper_stays_and_steps_what_is_in_it(has_scaler):
    def begin() -> Training:
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=100) if has_scaler else None
        training = Training(make_adamw, accelerator.prepare_optimizer)
        training.scale = accelerator.scaler.scale if has_scaler else training.scale
        return training.run(3)

    plain, ours = begin().run(3), begin()
    assert find_host_optimizer(ours.optimizer) is None
    assert move_to_host(ours.optimizer) is move_to_host(ours.optimizer) is ours.optimizer
    assert plain.difference(ours.run(3)) == 0.0
    assert find_host_optimizer(ours.optimizer) is not None


# --- states and copies -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["adamw_fused", "muon", "adafactor", "sgd"])
@pytest.mark.parametrize(("saves", "loads"), [("host", "device"), ("device", "host"), ("host", "host")])
def test_a_run_goes_on_bit_for_bit_with_and_without_the_host(tmp_path, name, saves, loads):
    wrap = {"host": HostOptimizer, "device": lambda optimizer: optimizer}
    whole = Training(MAKERS[name], wrap[saves]).run(8)
    torch.save(whole.optimizer.state_dict(), tmp_path / "optimizer.pt")
    ours = Training(MAKERS[name], wrap[loads])
    ours.optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    ours.net.load_state_dict(whole.net.state_dict())
    ours.schedule.load_state_dict(whole.schedule.state_dict())
    ours.num_done = 8
    assert whole.run(STEPS - 8).difference(ours.run(STEPS - 8)) == 0.0
    assert whole.difference(Training(MAKERS[name]).run()) == 0.0


def test_what_cannot_be_stepped_there_is_refused_by_name():
    with pytest.raises(ArgumentError, match=r"Linear is no torch\.optim\.Optimizer"):
        HostOptimizer(nn.Linear(1, 1))
    for library in ("bitsandbytes", "torchao"):
        foreign = type("AdamW8bit", (torch.optim.SGD,), {"__module__": f"{library}.optim.adamw"})
        with pytest.raises(ArgumentError, match=rf"AdamW8bit \({library}\) steps by kernels of its own"):
            HostOptimizer(foreign(make_net().parameters(), lr=0.1))
