"""Frozen layers in 8 and 4 bits: which are stored so, what that leaves of their numbers, and gradients that arrive."""

import pytest
import torch
from miniature_esm import make_wide_esm
from torch import nn
from transformers import EsmForSequenceClassification

from hf_ext.errors import ArgumentError
from hf_ext.models.frozen_weights import quantize_linear_layers
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

pytest.importorskip("bitsandbytes")


def make_layer(rows: int = 96, columns: int = 320, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(columns, rows, bias).requires_grad_(False))


def run(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and input gradients for 10 random inputs."""
    torch.manual_seed(1)
    inputs = torch.randn(2, 5, model[0].in_features).requires_grad_()
    output = model(inputs)
    return output.detach(), torch.autograd.grad(output, inputs, torch.randn_like(output))[0]


@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.15)])
def test_outputs_and_gradients_are_off_by_what_so_many_bits_leave_and_codes_take_their_bytes(bits, error):
    stored, exact = make_layer(), make_layer()
    assert quantize_linear_layers(stored, bits) == ["0"]
    weight = stored[0].weight
    scales = weight.SCB if bits == 8 else weight.quant_state.absmax
    by_hand = {8: 96 * 320 + 4 * 96, 4: 96 * 320 // 2 + 4 * 480}[bits]
    assert weight.nbytes + scales.nbytes == by_hand
    for found, expected in zip(run(stored), run(exact)):
        assert error / 4 < (found - expected).norm() / expected.norm() < error


def test_the_trainer_keeps_gradients_of_a_model_that_bitsandbytes_loaded(tmp_path):
    model = make_layer(bias=False)
    quantize_linear_layers(model, 4)
    model[0].support_avx512bf16_for_cpu = True  # as on such a CPU
    FastTrainer(model, FastTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none"))
    assert model[0].support_avx512bf16_for_cpu is False
    model.eval()(torch.ones(1, 320))
    (_, found), (_, exact) = run(model.train()), run(make_layer(bias=False))
    assert (found - exact).norm() < 0.15 * exact.norm()


@pytest.mark.parametrize("bits", [8, 4])
def test_frozen_layers_of_encoders_are_quantised_and_heads_and_what_trains_are_not(bits):
    model = make_wide_esm(EsmForSequenceClassification)
    assert quantize_linear_layers(model, bits) == []
    model.requires_grad_(False).esm.encoder.layer[0].requires_grad_(True)
    assert len(quantize_linear_layers(model, bits)) == 6  # query, key, value, three dense
    names = quantize_linear_layers(model.requires_grad_(False), bits)
    assert len(names) == 6
    assert all(name.startswith("esm.encoder.layer.0.") for name in names)
    plain = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert plain == ["esm.contact_head.regression", "classifier.dense", "classifier.out_proj"]
    broken = make_wide_esm(EsmForSequenceClassification).requires_grad_(False)
    assert len(quantize_linear_layers(broken, bits, skip=())) == 15  # its twin without the list of heads


@pytest.mark.parametrize("value", [float("nan"), 1e6])
def test_weights_that_cannot_be_coded_are_refused_with_the_layer(value):
    model = make_layer()
    model[0].weight[2, 3] = value
    with pytest.raises(ArgumentError, match="0: weights above 65504, NaN or infinite cannot be stored in 8 bits"):
        quantize_linear_layers(model, 8)
    with pytest.raises(ArgumentError, match="3 bits: frozen layers are stored in 8 or 4 bits"):
        quantize_linear_layers(model, 3)
