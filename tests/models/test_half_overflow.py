"""Scores above what float16 holds (65,504), as on a T4: its kernel does not store them, eager attention does.

A T4 multiplies float16 and adds up in float32. What its memory-efficient kernel computes is written out here as that:
scores and softmax in float32, weights and output rounded to float16. torch's kernel for CPUs does the same.
"""

import pytest
import torch
from tiny_encoders import esm_encoder, make_batch, packed, tiny_t5
from torch.nn.functional import scaled_dot_product_attention

from hf_ext.data.varlen_layout import VarlenLayout
from hf_ext.models.attention import padded_attention

LARGEST = torch.finfo(torch.float16).max
LENGTHS = (9, 4, 6, 4)


def large_inputs(scale=200.0):
    """Layout, and packed float16 queries, keys, values (T, heads, size) whose scores are far above `LARGEST`."""
    generator = torch.Generator().manual_seed(0)
    segments = VarlenLayout.from_mask(torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None])
    query, key, value = (torch.randn(sum(LENGTHS), 3, 16, generator=generator) for _ in range(3))
    return segments, *(x.half().requires_grad_() for x in (scale * query, scale * key, value))


def as_on_a_t4(query, key, value, segments, scaling):
    """Each sequence alone: products and softmax in float32, weights and output rounded."""
    outputs, start = [], 0
    for length in segments.lengths:
        q, k, v = (x[start : start + length].transpose(0, 1).float() for x in (query, key, value))
        weights = (q @ k.transpose(1, 2) * scaling).softmax(-1).half()
        outputs.append((weights.float() @ v).half().transpose(0, 1))
        start += length
    return torch.cat(outputs)


def test_scores_that_float16_does_not_hold_are_not_stored():
    segments, *rows = large_inputs()
    assert (rows[0].float() @ rows[1].float().transpose(1, 2)).abs().max() > 5 * LARGEST
    found = padded_attention(*rows, segments, 1.0, 0.0, None)
    expected = as_on_a_t4(*rows, segments, 1.0)
    assert found.isfinite().all()
    assert torch.allclose(found.float(), expected.float(), atol=2e-3)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(found.float().sum(), rows))


def test_gradients_of_scores_that_it_holds_are_those_of_float32():
    segments, *rows = large_inputs(scale=1.0)
    factors = torch.arange(rows[0].numel()).sin().view_as(rows[0])
    found = torch.autograd.grad((padded_attention(*rows, segments, 0.25, 0.0, None).float() * factors).sum(), rows)
    exact = [x.detach().float().requires_grad_() for x in rows]
    expected = torch.autograd.grad((padded_attention(*exact, segments, 0.25, 0.0, None) * factors).sum(), exact)
    for ours, theirs in zip(found, expected, strict=True):
        assert ((ours.float() - theirs).norm() / theirs.norm()).item() < 3e-3


def large_esm(scale=60.0):
    """An encoder whose queries and keys are far larger than those of a trained one."""
    encoder = esm_encoder()
    with torch.no_grad():
        for layer in encoder.encoder.layer:
            for part in (layer.attention.self.query, layer.attention.self.key):
                part.weight.mul_(scale / part.weight.std())
    return encoder


@pytest.mark.parametrize("kernel", ["padded", "sdpa", "eager"])
def test_an_encoder_under_autocast_to_float16_stays_finite_but_with_eager_attention(kernel):
    encoder, batch = large_esm(), make_batch()
    if kernel == "padded":
        packed(encoder, kernel)
    else:
        encoder.set_attn_implementation(kernel)
    with torch.autocast("cpu", torch.float16):
        states = encoder(**batch).last_hidden_state[batch["attention_mask"].bool()]
    states.float().square().sum().backward()
    gradients = [p.grad for p in encoder.parameters() if p.grad is not None]
    finite = all(x.isfinite().all() for x in (states, *gradients))
    assert finite is (kernel != "eager")  # which stores them


def test_a_bias_with_the_lowest_number_where_padding_is_stays_finite():
    encoder, batch = packed(tiny_t5(), "padded"), make_batch()
    with torch.no_grad():  # scores that are already as low as float16 goes
        encoder.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.sub_(60_000)
    with torch.autocast("cpu", torch.float16):
        states = encoder(**batch).last_hidden_state
    assert states.isfinite().all()


def test_a_kernel_that_stores_scores_would_be_seen():
    _, query, key, value = large_inputs()
    rows = [x.transpose(0, 1)[None] for x in (query, key, value)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert scaled_dot_product_attention(*rows, scale=1.0).isfinite().all()  # scales both factors before
    assert not (rows[0] @ rows[1].transpose(2, 3)).isfinite().all()
