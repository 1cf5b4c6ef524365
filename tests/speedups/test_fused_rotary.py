"""Attention layers that rotate in place compute what transformers' own do, packed and padded, and give way again."""

import copy

import pytest
import torch
from tiny_encoders import esm_encoder, largest_error, make_batch, packed, real_outputs, tiny_esm, tiny_esmc
from tiny_masked_lm import largest_weight_difference, make_trainer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import EsmForMaskedLM
from transformers.models.esm import modeling_esm

from hf_ext.speedups.fused_rotary import fuse_rotary, unfuse_rotary

BOUND = 2e-5
MAKE = {"ESM-2": tiny_esm, "ESM-2 encoder": esm_encoder, "ESM C": tiny_esmc}


@pytest.fixture(params=MAKE)
def make(request):
    return MAKE[request.param]


def fused(model):
    assert fuse_rotary(model) == 2
    return model


@pytest.mark.parametrize("left", [False, True])
def test_states_and_gradients_equal_transformers(make, left):
    batch = make_batch(left=left)
    assert largest_error(fused(make()), make(), batch) < BOUND


def test_with_packing_and_every_kernel(make):
    for kernel in ("blocked", "padded", "grouped"):
        assert largest_error(fused(packed(make(), kernel)), make(), make_batch()) < BOUND


def test_under_activation_checkpointing_lora_free(make):
    model = fused(packed(make())).train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert largest_error(model, make(), make_batch()) < BOUND


def test_attention_weights_and_absolute_positions_are_answered_as_before():
    batch = make_batch()
    for settings in ({}, {"position_embedding_type": "absolute"}):
        stock, model = (tiny_esm(attn_implementation="eager", **settings) for _ in range(2))
        found, expected = (m(**batch, output_attentions=True).attentions for m in (fused(model), stock))
        assert len(found) == len(expected) == 2
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected))


def test_cross_attention_is_the_layers_own():
    states = torch.randn(4, 9, 32)
    settings = {"is_decoder": True, "add_cross_attention": True}
    stock, model = (tiny_esm(**settings) for _ in range(2))
    fuse_rotary(model)
    batch = {**make_batch(), "encoder_hidden_states": states}
    assert torch.allclose(model(**batch).logits, stock(**batch).logits, atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_no_further_from_float32_than_before(make, dtype):
    """On average: of one batch it is one draw of rounding."""

    def noise(change) -> float:
        found = []
        for seed in range(8):
            batch = make_batch((30, 17, 25, 9, 38), seed=seed)
            exact = next(iter(real_outputs(make(), batch).values()))
            with torch.autocast("cpu", dtype):
                new = next(iter(real_outputs(change(packed(make())), batch).values()))
            found.append((new - exact).norm() / exact.norm())
        return sum(found) / len(found)

    assert noise(fused) < 1.1 * noise(lambda model: model)


def test_the_comparison_tells_a_wrong_scale_of_queries_apart(monkeypatch):
    model = fused(tiny_esm())
    for layer in model.esm.encoder.layer:
        layer.attention.self.attention_head_size, layer.attention.self.scaling = 8, 1.01
    assert largest_error(model, tiny_esm(), make_batch()) > 100 * BOUND


class Bytes(TorchDispatchMode):
    """Sums what element-wise operations write."""

    def __init__(self):
        super().__init__()
        self.written = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if isinstance(result, torch.Tensor) and not function.is_view and name not in ("mm", "addmm", "bmm"):
            self.written += result.numel() * result.element_size()
        return result


def test_less_is_written_in_a_step():
    written = []
    for model in (tiny_esm(), fused(tiny_esm())):
        with Bytes() as counted:
            model(**make_batch((40, 40))).logits.sum().backward()
        written.append(counted.written)
    assert written[1] < 0.9 * written[0]


def test_layers_get_their_own_forward_back_and_copies_keep_theirs(make):
    model = fused(make())
    kept = copy.deepcopy(model)
    unfuse_rotary(model)
    assert not [module for module in model.modules() if "forward" in vars(module)]
    assert largest_error(kept, make(), make_batch()) < BOUND
    assert model.state_dict().keys() == kept.state_dict().keys()


def test_a_run_with_it_ends_in_the_weights_of_one_without(tmp_path, monkeypatch):
    calls = []
    own = modeling_esm.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_esm, "apply_rotary_pos_emb", lambda *args, **kw: calls.append(1) or own(*args, **kw))
    stock, ours = make_trainer(tmp_path / "stock"), make_trainer(tmp_path / "ours", speedups=["fused_rotary"])
    assert ours.plan["fused_rotary"].status == "applied"
    ours.train()
    assert not calls
    stock.train()
    assert calls
    assert largest_weight_difference(stock.model, ours.model) < 1e-5
    ours.end()
    assert isinstance(ours.model, EsmForMaskedLM)
    assert not [module for module in ours.model.modules() if "forward" in vars(module)]
