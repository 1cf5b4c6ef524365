"""Bytes by formula are those of the real optimizers and of weights stored in fewer bits."""

import pytest
import torch
from ledger_subjects import make_model
from torch import nn
from transformers.optimization import Adafactor

from hf_ext.memory.stored import gradient_bytes, optimizer_bytes, weight_bytes
from hf_ext.models.blocks import find_base_layers

# 100 x 64 x 4 = 25,600 of a table; 128 x 64 = 8,192 numbers of a matrix; 128 of its bias, too few for 8 bits.
TABLE, MATRIX, BIAS = 6400, 8192, 128


def small_model():
    return nn.ModuleDict({"table": nn.Embedding(100, 64), "layer": nn.Linear(64, 128)})


def test_weights_gradients_and_two_states_of_adamw():
    model = small_model()
    assert weight_bytes(model) == gradient_bytes(model) == 4 * (TABLE + MATRIX + BIAS)
    assert optimizer_bytes(model, "adamw_torch_fused") == (8 * (TABLE + MATRIX + BIAS), 0)
    model["table"].requires_grad_(False)
    assert gradient_bytes(model) == 4 * (MATRIX + BIAS)
    assert optimizer_bytes(model, "adamw_torch") == (8 * (MATRIX + BIAS), 4 * (MATRIX + BIAS))


def state_bytes(optimizer):
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return sum(tensor.nbytes for tensor in states if isinstance(tensor, torch.Tensor) and tensor.numel() > 1)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw_torch_fused", lambda weights: torch.optim.AdamW(weights, fused=True)),
        ("adagrad", torch.optim.Adagrad),
        ("rmsprop", torch.optim.RMSprop),
        ("sgd", torch.optim.SGD),
        ("adafactor", lambda weights: Adafactor(weights, relative_step=False, scale_parameter=False, lr=1e-3)),
    ],
)
def test_the_formula_is_what_the_optimizer_keeps(name, make):
    model = small_model()
    optimizer = make([*model.parameters()])
    (model["table"].weight.sum() + model["layer"].weight.sum() + model["layer"].bias.sum()).backward()
    optimizer.step()
    assert state_bytes(optimizer) == optimizer_bytes(model, name)[0]


def test_a_frozen_base_takes_what_its_bits_say():
    model = make_model((64, 2, 2), "lora")
    layers = find_base_layers(model)
    size = sum(layer.weight.numel() for layer in layers)
    rows = sum(layer.out_features for layer in layers)
    assert size == 2 * (4 * 64 * 64 + 2 * 64 * 256)
    saved = {base: weight_bytes(model) - weight_bytes(model, base, layers) for base in ("half", "8-bit", "4-bit")}
    assert saved["half"] == 2 * size
    assert saved["8-bit"] == 3 * size - 4 * rows
    assert saved["4-bit"] == 4 * size - size // 2 - 4 * size // 64
