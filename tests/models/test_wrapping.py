"""What FSDP2 splits by, found in the model itself: every family, adapters and wrappers included."""

import pytest
from tiny_encoders import tiny_esm
from transformers import BertConfig, BertForMaskedLM

from hf_ext.errors import ArgumentError
from hf_ext.models.blocks import (
    block_classes,
    choose_classes,
    exact_modules,
    unused_parameters,
)


def tiny_bert():
    shape = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(vocab_size=30, **shape))


def test_towers_are_split_by_the_layers_of_all_their_encoders(make_affinity):
    model, _ = make_affinity("lora", "full")
    assert block_classes(model) == ["BertLayer", "EsmLayer"]
    several, _ = make_affinity(num_seeds=3)
    several.attach_encoders()
    assert block_classes(several) == ["BertLayer", "EsmLayer"]  # the list of heads is none of an encoder's
    several.release_encoders()
    assert block_classes(several) == []


def test_a_class_that_was_asked_for_is_kept_and_one_that_is_not_there_refused():
    model = tiny_esm()
    assert choose_classes(model, None) == ["EsmLayer"]
    assert choose_classes(model, ["EsmAttention"]) == ["EsmAttention"]
    with pytest.raises(ArgumentError, match=r"T5Block: the model has no such module. Its layers are EsmLayer"):
        choose_classes(model, ["EsmLayer", "T5Block"])


def test_only_the_contact_head_of_esm_is_without_a_gradient():
    model = tiny_esm()
    assert [*unused_parameters(model)] == [
        "esm.contact_head.regression.weight",
        "esm.contact_head.regression.bias",
    ]
    for parameter in unused_parameters(model).values():
        parameter.requires_grad_(False)
    assert unused_parameters(model) == {}
    assert unused_parameters(tiny_bert()) == {}


def test_heads_and_frozen_encoders_compute_in_their_own_precision(make_affinity):
    model, _ = make_affinity("frozen", "full")
    model.attach_encoders()
    assert exact_modules(model) == [model.encoders["0"], model.head]
    several, _ = make_affinity(num_seeds=2)
    several.attach_encoders()
    assert len(exact_modules(several)) == 4  # two encoders, two heads
    assert exact_modules(tiny_esm()) == []
