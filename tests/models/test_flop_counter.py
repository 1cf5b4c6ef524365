"""torch's counter with attention on CPUs in it: by hand, alone and in models."""

import pytest
import torch
from tiny_encoders import esm_encoder, make_batch, packed
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from hf_ext.models.cpu_attention import attend, flop_counter, keeping_no_weights
from hf_ext.reporting.flops import flops_coefficients

# Before 2.15; when that is the oldest torch of setup.py, tests/test_upstream.py says what may go.
TORCH_LEAVES_IT_OUT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu not in flop_registry
SEQUENCES, HEADS, TOKENS, SIZE = 2, 3, 5, 8
PRODUCT = 2 * SEQUENCES * HEADS * TOKENS * TOKENS * SIZE  # one of queries and keys, 1,200 multiplications and additions


def make_rows():
    return [torch.randn(SEQUENCES, HEADS, TOKENS, SIZE, requires_grad=True) for _ in range(3)]


def count(counter, attention):
    with counter as counted:
        output = attention(*make_rows())
        forward = counted.get_total_flops()
        output.sum().backward()
    return forward, counted.get_total_flops() - forward


def blocked(*rows):
    return attend(*rows, SIZE**-0.5, 0.0)


def blocked_keeping(*rows):
    return attend(*rows, SIZE**-0.5, 0.0, keep=True)


def test_a_pass_of_attention_is_two_products_and_backward_five() -> None:
    assert PRODUCT == 2400
    assert count(flop_counter(), scaled_dot_product_attention) == (2 * PRODUCT, 5 * PRODUCT)


@pytest.mark.usefixtures("blocked_in_float32")
def test_blocks_count_alike_and_one_product_less_where_the_softmax_was_kept() -> None:
    assert count(flop_counter(), blocked) == (2 * PRODUCT, 5 * PRODUCT)
    assert count(flop_counter(), blocked_keeping) == (2 * PRODUCT, 4 * PRODUCT)
    with keeping_no_weights():
        assert count(flop_counter(), blocked_keeping) == (2 * PRODUCT, 5 * PRODUCT)


@pytest.mark.usefixtures("blocked_in_float32")
@pytest.mark.parametrize("kernel", ["sdpa", "blocked"])
def test_an_encoder_counts_what_its_configuration_says(kernel) -> None:
    """Of two sequences of 12 tokens: 6 per weight, and 12 per pair and width, or 14 where scores are computed again."""
    length, rows = 12, 2
    encoder, batch = esm_encoder(), make_batch((length, length))
    packed(encoder, kernel) if kernel != "sdpa" else encoder.set_attn_implementation("sdpa")
    with flop_counter() as counted:
        encoder(**batch).last_hidden_state.sum().backward()
    per_token, per_pair = flops_coefficients(encoder)
    again = 1 if kernel == "blocked" else 14 / 12
    expected = rows * length * (per_token + again * per_pair * length)
    unused = sum(2 * p.numel() * 3 * rows * length for p in encoder.contact_head.parameters() if p.dim() == 2)
    assert counted.get_total_flops() == pytest.approx(expected - unused, rel=0.02)
    if not TORCH_LEAVES_IT_OUT:
        return
    encoder, batch = esm_encoder(attn_implementation="sdpa"), make_batch((length, length))
    with FlopCounterMode(display=False) as without:
        encoder(**batch).last_hidden_state.sum().backward()
    assert without.get_total_flops() < 0.95 * counted.get_total_flops()
