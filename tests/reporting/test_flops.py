"""FLOPs per token: by hand, and against torch's own counter on tiny models with eager attention."""

import pytest
import torch
from miniature_esm import NO_DROPOUT, make_esm
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import EsmForMaskedLM, EsmModel, T5Config, T5EncoderModel, T5ForConditionalGeneration

from hf_ext.errors import ArgumentError
from hf_ext.reporting import flops_coefficients

BATCH, LENGTH = 3, 24


def make_large_esm(cls=EsmForMaskedLM):
    """Four layers, 64 wide, with an attention that torch's counter sees on a CPU: it does not see SDPA there."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
    return make_esm(cls, **sizes, **NO_DROPOUT, attn_implementation="eager")


def counted_per_token(model: nn.Module) -> float:
    """Forward and backward of one batch by torch's counter."""
    ids = torch.randint(4, 24, (BATCH, LENGTH))
    with FlopCounterMode(display=False) as counter:
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids))
        (output.logits if "logits" in output else output.last_hidden_state).sum().backward()
    return counter.get_total_flops() / (BATCH * LENGTH)


def flops_per_token(model: nn.Module, sequence_length: float) -> float:
    per_token, per_pair = flops_coefficients(model)
    return per_token + per_pair * sequence_length


def assert_close_to_counted(model: nn.Module, tolerance: float) -> None:
    assert flops_per_token(model, LENGTH) == pytest.approx(counted_per_token(model), rel=tolerance)


def test_flops_of_an_esm_that_trains_are_six_per_weight_and_twelve_per_pair() -> None:
    # Per layer 4 x 64 x 64 + 2 x 64 x 256 = 49,152 weights; head 64 x 64 + 64 x 33; contacts 16.
    per_token, per_pair = flops_coefficients(make_large_esm())
    assert per_token == 6 * (4 * 49_152 + 4_096 + 2_112 + 16)
    assert per_pair == 12 * 4 * 64


def test_flops_agree_with_torchs_counter_whatever_trains() -> None:
    assert_close_to_counted(make_large_esm(), 0.02)
    lora = LoraConfig(r=4, target_modules=["query", "value"], lora_dropout=0.0)
    assert_close_to_counted(get_peft_model(make_large_esm(), lora), 0.05)
    model = make_large_esm()
    for frozen in (model.esm.embeddings, model.esm.encoder.layer[:2], model.esm.contact_head):
        frozen.requires_grad_(False)
    model.lm_head.decoder.weight = nn.Parameter(model.lm_head.decoder.weight.clone())  # untied from the embeddings
    assert_close_to_counted(model, 0.05)
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "d_model": 64, "d_kv": 8, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = T5Config(**sizes, dropout_rate=0.0, is_decoder=False)
    config._attn_implementation = "eager"
    assert_close_to_counted(T5EncoderModel(config), 0.02)
    # The comparison can fail.
    assert flops_per_token(make_large_esm(), 2 * LENGTH) != pytest.approx(counted_per_token(make_large_esm()), rel=0.02)


def test_flops_of_a_frozen_encoder_are_two_per_weight_and_four_per_pair() -> None:
    model = make_large_esm(EsmModel).requires_grad_(False)
    per_token, per_pair = flops_coefficients(model)
    pooler = 64 * 64
    assert per_token == 2 * (4 * 49_152 + pooler + 16)
    assert per_pair == 4 * 4 * 64


def test_models_whose_flops_are_not_defined_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="Linear: its configuration lacks num_hidden_layers"):
        flops_coefficients(nn.Linear(2, 2))
    config = T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ArgumentError, match="T5ForConditionalGeneration is an encoder-decoder"):
        flops_coefficients(T5ForConditionalGeneration(config))
