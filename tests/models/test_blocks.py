"""The repeated layers of any model: found in every architecture what FSDP2 splits by."""

import re

import pytest
from any_models import (
    Attributes,
    Layer,
    Listed,
    Net,
    albert,
    bart,
    bert,
    clip,
    gpt2,
    llama,
    mixtral,
    resnet,
    swin,
    t5,
    vit,
)
from tiny_encoders import tiny_esm
from torch import nn

from hf_ext.errors import ArgumentError
from hf_ext.memory.fakes import slice_layers
from hf_ext.models import block_classes, choose_classes, find_blocks, unused_parameters
from hf_ext.models.blocks import name_blocks

pytestmark = pytest.mark.internals


def places(model) -> dict[str, int]:
    """Names with their numbers left out -> how many blocks have them."""
    found: dict[str, int] = {}
    for name in name_blocks(model):
        place = re.sub(r"\d+", "#", name)
        found[place] = found.get(place, 0) + 1
    return found


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (bert, {"bert.encoder.layer.#": 3}),
        (vit, {"vit.layers.#": 3}),
        (gpt2, {"transformer.h.#": 3}),
        (llama, {"model.layers.#": 3}),
        (mixtral, {"model.layers.#": 3}),  # and not the experts
        (t5, {"encoder.block.#": 2, "decoder.block.#": 3}),  # the first of each has a table more
        (bart, {"model.encoder.layers.#": 2, "model.decoder.layers.#": 3}),
        (swin, {"swin.encoder.layers.#.blocks.#": 5}),  # stages differ in width: what repeats is inside
        (resnet, {"resnet.encoder.stages.#.layers.#": 5}),
        (albert, {"albert.encoder.albert_layer_groups.#.albert_layers.#": 1}),  # one, that computes three times
        (clip, {"text_model.encoder.layers.#": 2, "vision_model.encoder.layers.#": 2}),
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 3, enable_nested_tensor=False),
            {"layers.#": 3},
        ),
        (lambda: nn.Transformer(16, 2, 2, 3, 32), {"encoder.layers.#": 2, "decoder.layers.#": 3}),
    ],
)
def test_the_repeated_layers_of_every_architecture_are_found(make, expected):
    assert places(make()) == expected


def test_in_modules_made_by_hand_what_repeats_is_found_and_what_only_looks_like_it_is_not():
    for model, expected in (
        (Net(), {"trunk.#": 4}),
        (nn.Sequential(nn.Linear(5, 8), Layer(), Layer(), nn.Linear(8, 3)), {"#": 2}),
        (Listed(layers=nn.ModuleList([Layer(8), Layer(8), Layer(4)])), {"layers.#": 3}),
        (Listed(stages=nn.ModuleList([nn.Sequential(Layer(w), Layer(w)) for w in (4, 8)])), {"stages.#.#": 4}),
        (Listed(members=nn.ModuleList([bert(), bert()])), {"members.#.bert.encoder.layer.#": 6}),
        (Listed(tower1=Net(), tower2=Net()), {"tower#.trunk.#": 8}),
        (Listed(heads=nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])), {}),
        (Listed(stages=nn.ModuleList([Layer(4), Layer(8), Layer(16)])), {}),
        (Listed(heads=nn.ModuleDict({"advection": Layer(), "darcy": Layer()})), {}),
        (Listed(acts=nn.Sequential(nn.ReLU(), nn.ReLU())), {}),
        (Attributes(), {}),
    ):
        assert places(model) == expected


def test_a_layer_that_is_used_twice_is_one_block_and_lists_of_it_are_not_cut():
    layer = Layer()
    model = Listed(layers=nn.ModuleList([layer] * 6), others=nn.ModuleList([layer, Layer()]))
    assert find_blocks(model) == [layer, model.others[1]]
    assert {part.name: part.kept for part in slice_layers(model)} == {"layers": 6, "others": 2}
    alike = Listed(trunk=nn.Sequential(*(Layer() for _ in range(8))))
    assert {part.name: part.kept for part in slice_layers(alike)} == {"trunk": 3}


def test_towers_are_split_by_the_layers_of_all_their_encoders(make_affinity):
    model, _ = make_affinity("lora", "full")
    assert block_classes(model) == ["BertLayer", "EsmLayer"]
    frozen, _ = make_affinity()
    frozen.attach_encoders()
    assert block_classes(frozen) == ["BertLayer", "EsmLayer"]
    frozen.release_encoders()
    assert block_classes(frozen) == []


def test_a_class_that_was_asked_for_is_kept_and_one_that_is_not_there_refused():
    model = tiny_esm()
    assert choose_classes(model, None) == ["EsmLayer"]
    assert choose_classes(model, ["EsmAttention"]) == ["EsmAttention"]
    with pytest.raises(ArgumentError, match=r"T5Block: the model has no such module. Its layers are EsmLayer"):
        choose_classes(model, ["EsmLayer", "T5Block"])


def test_only_the_contact_head_of_esm_is_without_a_gradient():
    model = tiny_esm()
    assert [*unused_parameters(model)] == ["esm.contact_head.regression.weight", "esm.contact_head.regression.bias"]
    for parameter in unused_parameters(model).values():
        parameter.requires_grad_(False)
    assert unused_parameters(model) == {}
    assert unused_parameters(bert()) == {}
