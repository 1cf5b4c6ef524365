"""Rows that share an antigen attend to its keys at once: the same scores and gradients as each row for itself."""

import pytest
import torch
from tiny_generators import make_batch, make_generator
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.t5.modeling_t5 import T5Attention

from hf_ext.errors import ArgumentError
from hf_ext.models.cpu_attention import attend
from hf_ext.models.generation import cross_attention
from hf_ext.models.generation.cross_attention import SharedAntigens, attend_by_antigen, shared_attention

INDEX = torch.tensor([2, 0, 2, 2, 0])  # of antigen 1 no row
MASKS = {
    "none": None,
    "right": torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]),
    "left": torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1]]),
    "holes": torch.tensor([[1, 0, 1, 0, 1], [1, 0, 0, 0, 1], [0, 1, 0, 1, 0]]),
}


def make_inputs(dtype=torch.float64):
    torch.manual_seed(0)
    shapes = ((5, 2, 4, 3), (3, 2, 5, 3), (3, 2, 5, 3))
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def by_row(query, key, value, antigens):
    mask = None if antigens.mask is None else antigens.mask[antigens.index][:, None, None]
    return scaled_dot_product_attention(query, key[antigens.index], value[antigens.index], attn_mask=mask, scale=0.5)


def gradients(output, inputs):
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return torch.autograd.grad((output * weights).sum(), inputs)


@pytest.mark.parametrize("mask", MASKS)
def test_rows_of_one_antigen_together_are_those_rows_each_alone(mask):
    antigens = SharedAntigens(INDEX, None if MASKS[mask] is None else MASKS[mask].bool())
    inputs = make_inputs()
    together, alone = attend_by_antigen(*inputs, antigens, 0.5, 0.0), by_row(*inputs, antigens)
    torch.testing.assert_close(together, alone)
    for ours, theirs in zip(gradients(together, inputs), gradients(alone, inputs)):
        torch.testing.assert_close(ours, theirs)
    wrong = SharedAntigens(INDEX.roll(1), antigens.mask)
    assert (attend_by_antigen(*inputs, wrong, 0.5, 0.0) - alone).abs().max() > 0.1


@pytest.mark.parametrize("mask", MASKS)
def test_a_gpu_takes_keys_by_row_once_they_are_projected(mask, monkeypatch):
    antigens = SharedAntigens(INDEX, None if MASKS[mask] is None else MASKS[mask].bool())
    inputs, module = make_inputs(), torch.nn.Module()
    module.is_causal = False
    given = (module, *inputs, None)
    here, _ = shared_attention(*given, scaling=0.5, antigens=antigens)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    there, _ = shared_attention(*given, scaling=0.5, antigens=antigens)
    torch.testing.assert_close(there, here)


@pytest.mark.parametrize("keep", [False, True])
def test_blocks_of_more_keys_than_tokens_are_torchs_attention(blocked_in_float32, monkeypatch, keep):
    monkeypatch.setattr("hf_ext.models.cpu_attention.BLOCK_BYTES", 3 * 4 * 7 * 4)  # three heads at a time
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, size, 3).requires_grad_() for size in (4, 7, 7)]
    ours, theirs = attend(*inputs, 0.5, 0.0, keep=keep), scaled_dot_product_attention(*inputs, scale=0.5)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(gradients(ours, inputs), gradients(theirs, inputs)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("change", ["as it is", "padded left", "eager", "an antigen of no row"])
def test_a_decoder_scores_shared_antigens_as_those_of_each_row(change):
    model, batch = make_generator("transformer"), make_batch()
    if change == "padded left":
        names = ("input_ids", "attention_mask")
        batch |= {name: torch.nn.functional.pad(batch[name], (2, 0)) for name in names}
    if change == "an antigen of no row":
        batch |= {name: torch.cat([batch[name], batch[name][:1]]) for name in ("input_ids", "attention_mask")}
    if change == "eager":
        model.set_attn_implementation("eager")
        assert model.decoder.stack.config._attn_implementation == "eager"
    index = batch["antigen_index"]
    alone = {**batch, **{name: batch[name][index] for name in ("input_ids", "attention_mask")}, "antigen_index": None}
    results = []
    for given in (batch, alone):
        model.zero_grad()
        loss = model(**given).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_keys_of_each_antigen_are_computed_once():
    model, batch, seen = make_generator("transformer"), make_batch(), []
    for module in model.decoder.modules():
        if isinstance(module, T5Attention) and not module.is_causal:
            module.k.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    model(**batch)
    assert seen == [3, 3]  # of four rows, in two layers


def test_attention_has_a_dropout_of_its_own():
    batch = make_batch()
    model = make_generator("transformer").train()
    assert torch.equal(model(**batch).loss, model(**batch).loss)
    other = make_generator("transformer", attention_dropout=0.5).train()
    assert not torch.equal(other(**batch).loss, other(**batch).loss)
    assert torch.equal(other.eval()(**batch).loss, model.eval()(**batch).loss)
    with pytest.raises(ArgumentError, match="attention_dropout"):
        make_generator("transformer", attention_dropout=1.0)


def test_the_backend_is_the_decoders_alone():
    model = make_generator("transformer")
    assert model.decoder.stack.config._attn_implementation == cross_attention.NAME
    assert model.encoder.stack.config._attn_implementation == "sdpa"
