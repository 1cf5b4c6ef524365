"""Frozen encoders in 8 and 4 bits: which layers are stored so, and what that leaves of their numbers and gradients."""

import pytest
import torch
from miniature_esm import make_wide_esm
from torch import nn
from transformers import EsmModel

from hf_ext.models import LoraSettings, load_encoder, read_encoder
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

bnb = pytest.importorskip("bitsandbytes.nn")
CODED = (bnb.Linear8bitLt, bnb.Linear4bit)


@pytest.mark.parametrize(("bits", "error"), [(8, 0.02), (4, 0.4)])  # of small layers of wide weights
def test_linear_layers_are_off_by_what_so_many_bits_leave_and_the_rest_stays_as_it_is(tmp_path, bits, error):
    make_wide_esm(EsmModel).save_pretrained(tmp_path, save_original_format=False)
    spec = read_encoder(str(tmp_path), None, "frozen", LoraSettings())
    exact, stored = load_encoder(spec), load_encoder(spec, bits=bits)
    coded = {name: m for name, m in stored.named_modules() if isinstance(m, CODED)}
    plain = [name for name, m in exact.named_modules() if isinstance(m, nn.Linear) and name not in coded]
    assert plain == ["contact_head.regression"]
    assert len(coded) == 12
    kept = {name: p for name, p in stored.named_parameters() if name.removesuffix(".weight") not in coded}
    assert all(torch.equal(p, exact.get_parameter(name)) for name, p in kept.items())
    for name, layer in coded.items():
        inputs = torch.randn(10, layer.in_features, generator=torch.Generator().manual_seed(1))
        found, expected = layer(inputs), exact.get_submodule(name)(inputs)
        assert error / 8 < (found - expected).norm() / expected.norm() < error


def test_the_trainer_keeps_gradients_of_a_model_that_bitsandbytes_loaded(tmp_path):
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Linear(320, 96, bias=False).requires_grad_(False))
    model = nn.Sequential(bnb.Linear4bit(320, 96, bias=False, quant_type="nf4"))
    model.load_state_dict(exact.state_dict())
    model.to("cpu")
    model[0].support_avx512bf16_for_cpu = True  # as on such a CPU
    FastTrainer(model, FastTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none"))
    assert model[0].support_avx512bf16_for_cpu is False
    inputs = torch.randn(10, 320, requires_grad=True)
    model.eval()(inputs)
    found, expected = (torch.autograd.grad(m.train()(inputs).sum(), inputs)[0] for m in (model, exact))
    assert (found - expected).norm() < 0.15 * expected.norm()
