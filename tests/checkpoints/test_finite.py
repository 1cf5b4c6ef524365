"""Tensors of an optimizer's state by names that say where a NaN is."""

import math

import pytest
import torch
from torch import nn

from hf_ext.checkpoints.finite import not_finite, optimizer_tensors


class Two:
    """An optimizer made of others, which arranges its state as it likes."""

    def __init__(self, model):
        self.parts = [torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()]

    @property
    def param_groups(self):
        return [group for part in self.parts for group in part.param_groups]

    def step(self):
        for part in self.parts:
            part.step()

    def state_dict(self):
        return {f"part{i}": part.state_dict() for i, part in enumerate(self.parts)}


def stepped(make):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = make(model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_names_say_which_state_of_which_parameter():
    model, optimizer = stepped(lambda model: torch.optim.AdamW(model.parameters()))
    assert [name for name, _ in optimizer_tensors(optimizer, model.named_parameters())] == [
        f"{key} of {name}" for name in ("weight", "bias") for key in ("step", "exp_avg", "exp_avg_sq")
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_state_that_is_no_number_is_found_by_its_name(value):
    model, optimizer = stepped(lambda model: torch.optim.AdamW(model.parameters()))
    assert not_finite(optimizer_tensors(optimizer, model.named_parameters())) == []
    optimizer.state[model.bias]["exp_avg_sq"][1] = value
    assert not_finite(optimizer_tensors(optimizer, model.named_parameters())) == ["exp_avg_sq of bias"]


def test_an_optimizer_made_of_others_is_looked_through():
    model, optimizer = stepped(Two)
    optimizer.parts[1].state[model.bias]["momentum_buffer"][0] = math.nan
    assert not_finite(optimizer_tensors(optimizer, model.named_parameters())) == ["state.0.momentum_buffer of part1"]


def test_an_optimizer_that_has_not_stepped_has_none():
    model = nn.Linear(2, 2)
    assert list(optimizer_tensors(torch.optim.AdamW(model.parameters()), model.named_parameters())) == []


def test_8_bit_state_is_looked_at_in_its_parts():
    torchao = pytest.importorskip("torchao.optim")
    torch.manual_seed(0)
    model = nn.Linear(64, 128)  # 8-bit where it has 4,096 elements or more
    optimizer = torchao.AdamW8bit(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    tensors = dict(optimizer_tensors(optimizer, model.named_parameters()))
    assert not_finite(tensors.items()) == []
    tensors["exp_avg.tensors.scale of weight"][0] = math.nan
    assert not_finite(optimizer_tensors(optimizer, model.named_parameters())) == ["exp_avg.tensors.scale of weight"]
