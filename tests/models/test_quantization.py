"""Frozen layers in 8 and 4 bits: bitsandbytes' numbers in training and evaluation, and gradients that arrive."""

import copy
import sys

import pytest
import torch
from miniature_esm import make_wide_esm
from tiny_t5 import write_t5_encoder
from torch import nn
from torch.nn.functional import linear
from transformers import EsmForSequenceClassification, T5EncoderModel

from hf_ext.errors import ArgumentError, MissingDependencyError
from hf_ext.models.quantization import (
    QuantizedLinear,
    make_float,
    quantize_linear_layers,
    quantized_layers,
)
from hf_ext.optional import import_problem
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

bnb = pytest.importorskip("bitsandbytes")


def make_layer(rows: int = 96, columns: int = 320, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(columns, rows, bias).requires_grad_(False)


def make_theirs(layer: nn.Linear, bits: int) -> nn.Module:
    """bitsandbytes' own layer, as transformers and PEFT use it."""
    shape = layer.in_features, layer.out_features, layer.bias is not None
    if bits == 8:
        theirs = bnb.nn.Linear8bitLt(*shape, has_fp16_weights=False)
    else:
        theirs = bnb.nn.Linear4bit(*shape, quant_type="nf4", compress_statistics=False)
    theirs.load_state_dict(layer.state_dict())
    return theirs.to("cpu")


def run(layer: nn.Module, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and input gradients for 5 random inputs."""
    torch.manual_seed(seed)
    inputs = torch.randn(2, 5, layer.in_features).requires_grad_()
    output = layer(inputs)
    return output.detach(), torch.autograd.grad(output, inputs, torch.randn_like(output))[0]


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_outputs_and_gradients_in_training_are_bitsandbytes_own_to_the_bit(bits, bias):
    layer = make_layer(bias=bias)
    ours, theirs = run(QuantizedLinear(layer, bits)), run(make_theirs(layer, bits).train())
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    other = run(QuantizedLinear(make_layer(bias=bias, seed=2), bits))
    assert not torch.equal(ours[0], other[0])


def test_eight_bits_are_rounded_to_127_steps_of_the_largest_weight_of_each_output():
    layer = nn.Linear(3, 2, bias=False).requires_grad_(False)
    layer.weight.copy_(torch.tensor([[127.0, -64.0, 0.4], [0.0, 0.0, 0.0]]))
    stored = QuantizedLinear(layer, 8)
    assert stored.weight.tolist() == [[127, -64, 0], [0, 0, 0]]
    assert stored.scales.tolist() == [127.0, 0.0]
    assert torch.allclose(stored.dequantize(), torch.tensor([[127.0, -64.0, 0.0], [0.0, 0.0, 0.0]]))


def test_four_bits_keep_zero_and_the_largest_weight_of_each_64():
    layer = nn.Linear(64, 2, bias=False).requires_grad_(False)
    layer.weight.zero_()
    layer.weight[0, 3], layer.weight[1, 5] = 2.0, -0.5
    assert torch.equal(QuantizedLinear(layer, 4).dequantize(), layer.weight)


@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.15)])
def test_the_error_of_a_layer_is_what_so_many_bits_leave(bits, error):
    layer = make_layer()
    for found, exact in zip(run(QuantizedLinear(layer, bits)), run(layer)):
        assert error / 4 < (found - exact).norm() / exact.norm() < error


@pytest.mark.parametrize("bits", [8, 4])
def test_evaluation_computes_what_training_computes(bits):
    stored = QuantizedLinear(make_layer(), bits)
    inputs = torch.randn(7, 320)
    with torch.no_grad():
        assert torch.equal(stored.eval()(inputs), stored.train()(inputs))
        theirs = make_theirs(make_layer(), bits)
        trained, evaluated = theirs.train()(inputs), theirs.eval()(inputs)
        assert bits == 4 or not torch.equal(trained, evaluated)  # what is avoided here


@pytest.mark.parametrize("bits", [8, 4])
def test_autocast_decides_the_dtype_as_it_does_of_a_plain_layer_and_the_bias_stays(bits):
    layer = make_layer()
    stored, inputs, bias = QuantizedLinear(layer, bits), torch.randn(3, 320), layer.bias.clone()
    with torch.autocast("cpu", torch.bfloat16):
        found = stored(inputs)
    expected = linear(inputs.bfloat16(), stored.dequantize(torch.bfloat16), bias.bfloat16())
    assert torch.equal(found, expected)
    assert torch.equal(stored.bias, bias)
    assert stored.bias.dtype == torch.float32


# --- gradients that get lost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
def test_gradients_arrive_after_an_evaluation_too(bits):
    layer = make_layer(bias=False)
    stored = QuantizedLinear(layer, bits)
    with torch.no_grad():
        stored.eval()(torch.ones(1, 320))
    (_, found), (_, exact) = run(stored.train()), run(layer)
    assert (found - exact).norm() < 0.15 * exact.norm()


def test_the_trainer_keeps_gradients_of_a_model_that_bitsandbytes_loaded(tmp_path):
    model = nn.Sequential(make_theirs(make_layer(bias=False), 4), nn.Linear(96, 1))
    model[0].support_avx512bf16_for_cpu = True  # as on such a CPU
    FastTrainer(model, FastTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none"))
    assert model[0].support_avx512bf16_for_cpu is False
    model.eval()(torch.ones(1, 320))
    (_, found), (_, exact) = run(model[0].train()), run(make_layer(bias=False))
    assert (found - exact).norm() < 0.15 * exact.norm()


@pytest.mark.parametrize("bits", [8, 4])
def test_nothing_but_codes_and_scales_is_kept_for_the_backward_pass(bits):
    stored, kept = QuantizedLinear(make_layer(), bits), []
    inputs = torch.randn(4, 320).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        stored(inputs)
    assert {t.data_ptr() for t in kept} == {stored.weight.data_ptr(), stored.scales.data_ptr()}


@pytest.mark.parametrize("bits", [8, 4])
def test_a_penalty_on_gradients_is_that_of_a_plain_layer_with_the_rounded_weights(bits):
    stored = QuantizedLinear(make_layer(rows=6, columns=64), bits)
    with torch.no_grad():
        weight, bias = (stored(torch.eye(64)) - stored.bias).T, stored.bias
    found = []
    for layer in (stored, lambda given: nn.functional.linear(given, weight, bias)):
        given = torch.linspace(-1, 1, 128).view(2, 64).requires_grad_()
        output = layer(given).pow(3).sum() + given.pow(3).sum()
        (first,) = torch.autograd.grad(output, given, create_graph=True)
        found.append(torch.autograd.grad(first.pow(2).sum(), given)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


# --- which layers, how many bytes -------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_bytes_are_those_computed_by_hand():
    layer = make_layer(96, 320)
    for bits, expected in ((8, 96 * 320 + 4 * 96), (4, 96 * 320 // 2 + 4 * 480)):
        stored = QuantizedLinear(layer, bits)
        assert stored.weight.nbytes + stored.scales.nbytes == expected
    odd = make_layer(3, 7)
    stored = QuantizedLinear(odd, 4)
    assert stored.weight.nbytes + stored.scales.nbytes == 11 + 4
    assert stored.dequantize().shape == (3, 7)


@pytest.mark.parametrize("bits", [8, 4])
def test_encoders_are_quantised_and_heads_are_not(bits):
    model = make_wide_esm(EsmForSequenceClassification).requires_grad_(False)
    names = quantize_linear_layers(model, bits)
    assert len(names) == 12  # two layers: query, key, value, three dense
    assert all(name.startswith("esm.encoder.layer.") for name in names)
    plain = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert plain == ["esm.contact_head.regression", "classifier.dense", "classifier.out_proj"]
    broken = make_wide_esm(EsmForSequenceClassification).requires_grad_(False)
    assert len(quantize_linear_layers(broken, bits, skip=())) == 15  # its twin without the list of heads


def test_what_trains_is_left_alone():
    model = make_wide_esm()
    assert quantize_linear_layers(model, 8) == []
    model.requires_grad_(False)
    model.esm.encoder.layer[0].requires_grad_(True)
    assert len(quantize_linear_layers(model, 8)) == 6


def test_a_t5_encoder_whose_layers_have_no_bias_computes_close_to_itself(tmp_path):
    model = T5EncoderModel.from_pretrained(write_t5_encoder(tmp_path)).eval().requires_grad_(False)
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8, 1]])}
    twin = copy.deepcopy(model)
    quantize_linear_layers(twin, 4)
    found, expected = twin(**batch).last_hidden_state, model(**batch).last_hidden_state
    assert 0 < (found - expected).norm() / expected.norm() < 0.5
    quantize_linear_layers(model, 8)
    found = model(**batch).last_hidden_state
    assert 0 < (found - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_weights_that_cannot_be_coded_are_refused_with_the_layer(value):
    model = nn.Sequential(make_layer())
    model[0].weight[2, 3] = value
    with pytest.raises(ArgumentError, match="0: weights above 65504, NaN or infinite cannot be stored in 8 bits"):
        quantize_linear_layers(model, 8)
    with pytest.raises(ArgumentError, match="3 bits: frozen layers are stored in 8 or 4 bits"):
        quantize_linear_layers(model, 3)


def test_without_bitsandbytes_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    import_problem.cache_clear()
    with pytest.raises(MissingDependencyError, match=r'pip install "hf_ext\[quantization\]"'):
        QuantizedLinear(make_layer(), 8)
    monkeypatch.undo()
    import_problem.cache_clear()


# --- what is saved, moved and put back --------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_no_entry_of_a_state_dict_and_take_no_float_weights(bits):
    model = nn.Sequential(make_layer())
    floats = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantize_linear_layers(model, bits)
    assert list(model.state_dict()) == ["0.bias"]
    model.load_state_dict({"0.bias": floats["0.bias"] + 1})
    assert torch.equal(model[0].bias, floats["0.bias"] + 1)
    with pytest.raises(RuntimeError, match="cannot take other weights"):
        model.load_state_dict(floats)


def test_a_cast_of_the_model_leaves_codes_and_scales_exact():
    model = nn.Sequential(make_layer())
    quantize_linear_layers(model, 4)
    before = model[0].dequantize()
    twin = copy.deepcopy(model).to(torch.bfloat16)
    assert twin[0].scales.dtype == torch.float32
    assert torch.equal(twin[0].dequantize(), before)


@pytest.mark.parametrize("bits", [8, 4])
def test_float_layers_come_back_with_what_the_codes_stand_for(bits):
    model = nn.Sequential(make_layer())
    quantize_linear_layers(model, bits)
    expected = model(torch.ones(1, 320))
    assert model[0].has_codes_of(make_layer())
    assert not model[0].has_codes_of(make_layer(seed=3))
    assert not model[0].has_codes_of(make_layer(rows=95))
    assert make_float(model) == ["0"]
    assert type(model[0]) is nn.Linear
    assert not quantized_layers(model)
    assert torch.equal(model(torch.ones(1, 320)), expected)
