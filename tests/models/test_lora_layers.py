"""Adapters: on the encoder's linear layers and nowhere else, merged without a trace, out of the way when measured."""

import pytest
import torch
from any_models import gpt2, vit
from miniature_esm import NO_DROPOUT, make_esm
from safetensors.torch import load_file
from tiny_affinity import make_batch, make_model, predict, shift
from tiny_t5 import write_t5_encoder
from torch import nn
from transformers import (
    EsmForMaskedLM,
    EsmForSequenceClassification,
    EsmForTokenClassification,
    EsmModel,
    EsmPreTrainedModel,
    T5Config,
    T5EncoderModel,
    T5ForTokenClassification,
)

from hf_ext.errors import ArgumentError
from hf_ext.models import AffinityModel, LoraSettings, has_adapters, merged_copy, wrap_with_lora
from hf_ext.models.lora import find_heads, find_targets

pytestmark = pytest.mark.internals
IDS = {"input_ids": torch.tensor([[0, 5, 6, 7, 9, 2], [0, 8, 8, 4, 5, 2]])}
EXACT = LoraSettings(r=2, dropout=0.0)


def make_still_esm(cls, layers=1):
    """16 wide, 32 in the feed-forward layer; no dropout."""
    return make_esm(cls, num_hidden_layers=layers, **NO_DROPOUT).eval()


ESM_LAYER = {
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
}


@pytest.mark.parametrize(
    ("cls", "prefix", "heads"),
    [
        (EsmModel, "", []),
        (EsmForMaskedLM, "esm.", []),
        (EsmForSequenceClassification, "esm.", ["classifier"]),
        (EsmForTokenClassification, "esm.", ["classifier"]),
    ],
)
def test_esm_gets_adapters_in_its_encoder_and_new_heads_train_in_full(cls, prefix, heads):
    model = make_still_esm(cls)
    assert set(find_targets(model, EXACT)) == {f"{prefix}encoder.layer.0.{name}" for name in ESM_LAYER}
    assert find_heads(model) == heads
    trainable = {name for name, parameter in wrap_with_lora(model, EXACT).named_parameters() if parameter.requires_grad}
    assert sum("lora_" in name for name in trainable) == 12  # two matrices for each of six layers
    rest = {name.split("base_model.model.")[1].split(".")[0] for name in trainable if "lora_" not in name}
    assert sorted(rest) == heads


@pytest.mark.parametrize(("kind", "layers"), [("relu", ["wi", "wo"]), ("gated-gelu", ["wi_0", "wi_1", "wo"])])
def test_t5_gets_adapters_in_attention_and_in_both_kinds_of_feed_forward_layer(kind, layers):
    shape = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    for cls, prefix, heads in ((T5EncoderModel, "", []), (T5ForTokenClassification, "transformer.", ["classifier"])):
        model = cls(T5Config(**shape, num_labels=2, feed_forward_proj=kind))
        block = f"{prefix}encoder.block.0.layer"
        expected = {f"{block}.0.SelfAttention.{name}" for name in "qkvo"}
        expected |= {f"{block}.1.DenseReluDense.{name}" for name in layers}
        assert set(find_targets(model, EXACT)) == expected
        assert find_heads(model) == heads


def test_of_other_families_all_linear_layers_that_repeat_are_adapted_and_gpt2s_convolutions_are_linear():
    model = gpt2(n_layer=1)
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert find_targets(model, EXACT) == [f"transformer.h.0.{name}" for name in layers]
    ids = torch.tensor([[1, 2, 3]])
    before = model.eval()(ids).logits
    adapted = wrap_with_lora(model, EXACT)
    assert torch.equal(adapted.eval()(ids).logits, before)  # they begin as zero
    shift(adapted, "lora_B")
    changed = adapted(ids).logits
    assert not torch.allclose(changed, before, atol=1e-3)
    assert torch.allclose(merged_copy(adapted)(ids).logits, changed, atol=1e-5)
    found = find_targets(vit(num_hidden_layers=1), EXACT)
    assert len(found) == 6  # query, key, value, output, and two of the feed-forward layer
    assert all(".0." in name for name in found)


class EsmWithHead(EsmPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.esm, self.head = EsmModel(config), nn.Linear(16, 1)
        self.post_init()


def test_what_cannot_be_adapted_or_merged_is_refused(make_affinity):
    for given, message in (
        ({"r": 0}, "lora_r=0: must be at least 1"),
        ({"alpha": 0}, "lora_alpha=0: must be at least 1"),
        ({"dropout": 1.0}, r"lora_dropout=1.0: must be at least 0 and below 1"),
        ({"dropout": -0.1}, r"lora_dropout=-0.1: must be"),
        ({"kwargs": {"dora": True}}, r"peft.LoraConfig has no dora"),
    ):
        with pytest.raises(ArgumentError, match=message):
            LoraSettings(**given)
    with pytest.raises(ArgumentError, match=r"target_modules \['q_proj'\]: no such .* there are dense, key, query, "):
        find_targets(make_still_esm(EsmModel), LoraSettings(target_modules=["query", "q_proj"]))
    with pytest.raises(ArgumentError, match=r"this Sequential has none: name the linear layers.*there are 0\."):
        find_targets(nn.Sequential(nn.Linear(2, 2)), EXACT)
    with pytest.raises(ArgumentError, match=r"Head 'head' would also select \['esm.contact_head'\]: rename it"):
        wrap_with_lora(make_still_esm(EsmWithHead), EXACT)
    with pytest.raises(ArgumentError, match="No tower of this model has adapters"):
        make_affinity("frozen", "full")[0].merge_adapters()
    with pytest.raises(ArgumentError, match="EsmModel has no adapters to merge: train with --use_peft"):
        merged_copy(make_still_esm(EsmModel))


KINDS = [EXACT, *(LoraSettings(2, 16, 0.0, kwargs={kind: True}) for kind in ("use_rslora", "use_dora"))]


@pytest.mark.parametrize("settings", KINDS, ids=["lora", "rslora", "dora"])
def test_a_merged_peft_model_predicts_the_same_and_loads_without_peft(tmp_path, settings):
    model = wrap_with_lora(make_still_esm(EsmForSequenceClassification), settings).eval()
    before = model(**IDS).logits
    assert shift(model, "lora_B") == 6
    adapted = model(**IDS).logits
    assert (adapted - before).abs().max() > 1e-3  # the adapters do something
    merged_copy(model).save_pretrained(tmp_path)
    assert not list(tmp_path.glob("adapter*"))
    assert not [name for name in load_file(tmp_path / "model.safetensors") if "lora" in name or "base_layer" in name]
    again = EsmForSequenceClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(again(**IDS).logits, adapted, rtol=0, atol=1e-5)
    assert torch.equal(model(**IDS).logits, adapted)  # the model itself keeps its adapters


@pytest.fixture
def folders(demo_encoders, tmp_path):
    return [demo_encoders[0], write_t5_encoder(tmp_path / "t5"), demo_encoders[1]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", KINDS, ids=["lora", "rslora", "dora"])
def test_a_merged_affinity_model_predicts_the_same_from_plain_encoders(folders, tmp_path, settings):
    model = make_model(folders, "lora", lora=settings, label_mean=7.0)
    batch = make_batch(model)
    before = predict(model, batch)
    shift(model, "lora_B")
    adapted = predict(model, batch)
    assert (adapted - before).abs().max() > 1e-3
    merged_copy(model).save_pretrained(tmp_path / "merged")
    again, info = AffinityModel.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not has_adapters(again)
    torch.testing.assert_close(predict(again, batch), adapted, rtol=0, atol=1e-5)
    assert has_adapters(model)
    torch.testing.assert_close(predict(model, batch), adapted, rtol=0, atol=0)


def test_merging_touches_no_frozen_tower_and_takes_the_merged_one_for_no_known_encoder(make_affinity, tmp_path):
    model, _ = make_affinity("frozen", "lora")
    assert model.merge_adapters() == 12  # two ESM layers with six linear layers each
    assert [spec.training for spec in model.config.encoder_specs] == ["frozen", "full"]
    assert model.frozen_inputs == ["heavy", "light"]  # the merged tower's embeddings are never cached
    model.save_pretrained(tmp_path)
    names = {name.split(".")[0] + name.split(".")[1] for name in load_file(tmp_path / "model.safetensors")}
    assert {name for name in names if name.startswith("encoders")} == {"encoders1"}
