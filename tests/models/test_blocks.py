"""The repeated layers of any model: found in every architecture, in modules made by hand, or named by a pattern."""

import re

import pytest
import torch
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
from torch import nn

from hf_ext.errors import ArgumentError
from hf_ext.memory.fakes import slice_layers
from hf_ext.models.blocks import block_lists, choose_classes, describe_blocks, find_blocks, name_blocks
from hf_ext.models.lora import LoraSettings, wrap_with_lora


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 3, enable_nested_tensor=False)


def places(model, pattern=None) -> dict[str, int]:
    """Names with their numbers left out -> how many blocks have them."""
    found: dict[str, int] = {}
    model.block_pattern = pattern
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


def two_widths():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Net(), {"trunk.#": 4}),
        (nn.Sequential(nn.Linear(5, 8), Layer(), Layer(), nn.Linear(8, 3)), {"#": 2}),
        (Listed(layers=nn.ModuleList([Layer()])), {"layers.#": 1}),
        (Listed(layers=nn.ModuleList([Layer(8), Layer(8), Layer(4)])), {"layers.#": 3}),
        (Listed(stages=nn.ModuleList([nn.Sequential(Layer(w), Layer(w)) for w in (4, 8)])), {"stages.#.#": 4}),
        (
            Listed(one=nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2, enable_nested_tensor=False)),
            {"one.layers.#": 2},
        ),
        # What only looks like them.
        (Listed(heads=nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])), {}),
        (Listed(tables=nn.ModuleList([nn.Embedding(9, 8), nn.Embedding(9, 8)])), {}),
        (Listed(parts=nn.ModuleList([two_widths(), Layer()])), {}),
        (Listed(stages=nn.ModuleList([Layer(4), Layer(8), Layer(16)])), {}),
        (Listed(heads=nn.ModuleDict({"advection": Layer(), "darcy": Layer()})), {}),
        (Listed(acts=nn.Sequential(nn.ReLU(), nn.ReLU())), {}),
        (nn.Linear(2, 2), {}),
        (Attributes(), {}),
    ],
)
def test_in_modules_made_by_hand_what_repeats_is_found_and_what_does_not_is_not(model, expected):
    assert places(model) == expected


def test_an_ensemble_and_two_towers_are_searched_and_are_not_blocks_themselves():
    assert places(Listed(members=nn.ModuleList([bert(), bert()]))) == {"members.#.bert.encoder.layer.#": 6}
    assert places(Listed(tower1=Net(), tower2=Net())) == {"tower#.trunk.#": 8}


def test_a_layer_that_is_used_twice_is_one_block_and_lists_of_it_are_not_cut():
    layer = Layer()
    model = Listed(layers=nn.ModuleList([layer] * 6), others=nn.ModuleList([layer, Layer()]))
    assert find_blocks(model) == [layer, model.others[1]]
    assert {part.name: part.kept for part in slice_layers(model)} == {"layers": 6, "others": 2}
    alike = Listed(trunk=nn.Sequential(*(Layer() for _ in range(8))))
    assert {part.name: part.kept for part in slice_layers(alike)} == {"trunk": 4}


def test_adapters_in_some_layers_only_hide_no_layer():
    settings = LoraSettings(r=2, target_modules=("query",))
    model = wrap_with_lora(bert(num_hidden_layers=4), settings)
    assert describe_blocks(find_blocks(model)) == "4 BertLayer"
    for layer in model.get_base_model().bert.encoder.layer[:2]:
        layer.attention.self.query = layer.attention.self.query.base_layer
    assert describe_blocks(find_blocks(model)) == "4 BertLayer"


# --- by pattern ------------------------------------------------------------------------------------------------------


def test_a_pattern_names_blocks_that_the_structure_does_not_show():
    model = Attributes()
    model.block_pattern = "block[12]|left"
    assert [*name_blocks(model)] == ["block1", "block2", "left"]
    assert places(bert(), r"bert\.encoder\.layer\.\d+\.attention") == {"bert.encoder.layer.#.attention": 3}
    net = Net()
    assert list(block_lists(net)) == ["trunk"]
    net.block_pattern = r"trunk\.\d"
    assert list(block_lists(net)) == ["trunk"]
    net.block_pattern = r"trunk\.[01]"
    assert block_lists(net) == {}  # half of a list cannot stand for the whole
    net.block_pattern = "stem|head"
    assert choose_classes(net, None) == ["Linear"]


@pytest.mark.parametrize(
    ("make", "pattern", "says"),
    [
        (bert, "layer", r"matches the name of no module.*There are: bert\\\.encoder\\\.layer\\\.\\d\+\."),
        (Net, r"trunk(\.\d)?", r"matches trunk\.0, which is inside trunk, and that matches too"),
        (Net, ".*", r"which only holds modules|which is inside"),
        (Net, "", r"matches the name of no module"),
        (bert, r"bert\.encoder\.layer", r"matches bert\.encoder\.layer, which only holds modules: match its members"),
        (lambda: Listed(a=Layer(), b=Layer()), "c", r"There are: a, b\."),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused_with_those_that_can(make, pattern, says):
    with pytest.raises(ArgumentError, match=says):
        places(make(), pattern)


def test_what_an_error_offers_does_match():
    with pytest.raises(ArgumentError) as caught:
        places(swin(), "nothing")
    (offered,) = re.findall(r"There are: (\S+)\.$", str(caught.value))
    model = swin()
    model.block_pattern = offered
    assert describe_blocks(find_blocks(model)) == "5 SwinLayer"


def test_of_towers_that_are_not_loaded_nothing_can_match_yet(make_affinity):
    model, _ = make_affinity("frozen", "frozen")
    model.block_pattern = r"encoders\.0\.encoder\.layer\.\d+"
    assert find_blocks(model) == []
    model.attach_encoders()
    assert len(find_blocks(model)) == 2
    assert torch.is_tensor(next(find_blocks(model)[0].parameters()))
