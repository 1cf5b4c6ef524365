"""oneDNN's product with bias and GELU, where an encoder under bf16 autocast keeps no gradient."""

import pytest
import torch
from tiny_encoders import esm_encoder, make_batch, packed

from hf_ext.models import flop_counter
from hf_ext.speedups import fused_layers

pytestmark = pytest.mark.internals

needs_operation = pytest.mark.skipif(not fused_layers._has_operation(), reason="this torch or CPU has none")
BATCH = make_batch((40, 25, 9))


def make_encoder():
    encoder = packed(esm_encoder()).eval()
    assert fused_layers.fuse_gelu(encoder) == fused_layers.fuse_qkv(encoder) == 2
    return encoder


def run(encoder, gradients=False):
    """States under autocast, and how many operations of each kind, by their number of FLOPs."""
    with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16), flop_counter() as counted:
        states = encoder(**BATCH).last_hidden_state
    return states, counted.get_flop_counts()["Global"]


@needs_operation
def test_states_are_as_near_to_float32_as_by_torchs_own_and_the_products_are_the_same(monkeypatch):
    encoder = make_encoder()
    exact = encoder(**BATCH).last_hidden_state.detach()
    states, flops = run(encoder)
    monkeypatch.setattr(fused_layers, "_has_operation", lambda: False)
    own_states, own_flops = run(encoder)
    assert torch.ops.mkldnn._linear_pointwise in flops
    assert torch.ops.mkldnn._linear_pointwise not in own_flops
    assert sum(flops.values()) == sum(own_flops.values())
    error, own_error = ((found - exact).norm() / exact.norm() for found in (states, own_states))
    assert error < min(1.1 * own_error, 0.02)


def test_training_compiled_code_and_layers_with_hooks_keep_torchs_own(monkeypatch):
    encoder = make_encoder()
    states, flops = run(encoder, gradients=True)
    assert torch.ops.mkldnn._linear_pointwise not in flops
    assert states.requires_grad
    seen = []
    for layer in encoder.encoder.layer:
        layer.intermediate.dense.register_forward_hook(lambda *_: seen.append(1))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.ops.mkldnn._linear_pointwise not in run(encoder)[1]
    assert len(seen) == 2


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, None])
def test_an_operation_that_fails_or_computes_other_numbers_is_not_used(monkeypatch, error):
    def other(x, weight, bias, *rest):
        if error:
            raise error("not here")
        return torch.nn.functional.gelu(x @ weight.T)  # without the bias

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", other, raising=False)
    assert not fused_layers._has_operation.__wrapped__()
