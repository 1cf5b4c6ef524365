"""FLOPs of a generator against those that torch counts while it computes, and against sums by hand."""

from __future__ import annotations

import pytest
import torch
from tiny_generators import make_generator
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hf_ext.models.encoders import read_encoder
from hf_ext.models.generation.configuration import GeneratorConfig
from hf_ext.models.generation.flops import GeneratorFlops, count_forward, count_training
from hf_ext.models.generation.model import AntibodyGenerator
from hf_ext.models.lora import LoraSettings

SHAPE = {"d_model": 64, "d_ff": 128, "num_heads": 4, "dropout": 0.0}
# Two antigens of 40 tokens, three antibodies of 64: whole chunks of linear attention, whose padding torch would count.
ANTIGENS, ANTIGEN, ROWS, PAIR = 2, 40, 3, 64


def total(flops: GeneratorFlops) -> float:
    return (
        flops.antigen_token * ANTIGENS * ANTIGEN
        + flops.antigen_square * ANTIGENS * ANTIGEN**2
        + flops.pair_token * ROWS * PAIR
        + flops.pair_square * ROWS * PAIR**2
        + flops.cross * ROWS * PAIR * ANTIGEN
    )


def count_by_torch(model: AntibodyGenerator, *, backward: bool) -> int:
    torch.manual_seed(0)
    batch = {
        "input_ids": torch.randint(4, 24, (ANTIGENS, ANTIGEN)),
        "attention_mask": torch.ones(ANTIGENS, ANTIGEN, dtype=torch.long),
        "antigen_index": torch.tensor([0, 1, 1]),
        "labels": torch.randint(4, 24, (ROWS, PAIR)),
    }
    # Kernels that torch does not look into: LSTMs of oneDNN, and fused attention.
    plain = torch.backends.mkldnn.flags(enabled=False)
    counter = FlopCounterMode(display=False)
    with plain, sdpa_kernel(SDPBackend.MATH), counter:
        loss = model(**batch).loss
        if backward:
            loss.backward()
    return counter.get_total_flops()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [("lstm", {}), ("lstm", {"attend": True}), ("transformer", {}), ("light", {})],
    ids=["lstm", "attending_lstm", "transformer", "light"],
)
def test_flops_are_those_that_torch_counts(architecture, settings, backward):
    shape = {"d_model": 32, "hidden_size": 48, "dropout": 0.0} if architecture == "lstm" else SHAPE
    config = GeneratorConfig.of_size(architecture, "tiny", **{**shape, **settings})
    model = AntibodyGenerator(config).train()
    ours = total((count_training if backward else count_forward)(model))
    assert ours == pytest.approx(count_by_torch(model, backward=backward), rel=0.02)


def test_one_more_layer_is_seen():
    """The twin: what is left out of the count is further off than the tolerance above."""
    counts = [
        total(count_forward(AntibodyGenerator(GeneratorConfig.of_size("transformer", "tiny", **SHAPE, **more))))
        for more in ({}, {"num_decoder_layers": 3}, {"num_encoder_layers": 3})
    ]
    assert min(counts[1:]) > 1.1 * counts[0]


def test_a_small_lstm_by_hand():
    model = make_generator("lstm", d_model=8, hidden_size=4, num_encoder_layers=1, num_decoder_layers=1, attend=False)
    found = count_forward(model)
    # Four gates of 4, from 8 inputs and 4 states: 4 x 4 x 12 weights; both ways in the encoder; 25 outputs from 4.
    assert found == GeneratorFlops(antigen_token=2 * 2 * 192, pair_token=2 * (192 + 4 * 25))
    assert count_training(model) == found.times(3)


def test_a_frozen_encoder_costs_a_step_nothing_and_one_that_trains_costs_more_than_with_adapters(demo_encoders):
    found = {}
    for training in ("frozen", "lora", "full"):
        spec = read_encoder(demo_encoders[1], None, training, LoraSettings())
        found[training] = count_training(AntibodyGenerator.from_encoder(spec, "tiny", **SHAPE))
    projection = 6 * 5 * 64 * 64  # of cached states, to the decoder's width, and to two layers' keys and values
    assert found["frozen"].antigen_token == projection
    assert (found["frozen"].antigen_square, found["full"].antigen_square) == (0.0, 12.0 * 64 * 2)
    assert projection < found["lora"].antigen_token < found["full"].antigen_token


def test_the_sizes_need_no_memory():
    with torch.device("meta"):
        full = AntibodyGenerator(GeneratorConfig.of_size("transformer", "full"))
    # Layers: 6 x (4 x 512^2 + 2 x 512 x 2048), and keys and values of the antigen 6 x 2 x 512^2; 6 x 6 x 512^2 and the
    # same feed-forward layers to write; two forward each.
    flops = count_forward(full)
    assert flops.antigen_token == 2 * 6 * (6 * 512**2 + 2 * 512 * 2048)
    assert flops.pair_token == 2 * 6 * (6 * 512**2 + 2 * 512 * 2048) + 2 * 512 * 25
