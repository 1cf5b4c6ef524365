"""The encoder that a device should take: the best that fits and is not too slow, one answer for all who ask."""

from dataclasses import replace
from itertools import pairwise

import pytest

from hf_ext.hardware import describe_hardware
from hf_ext.models import choose_encoder
from hf_ext.models.families import CANDIDATES, Candidate

pytestmark = pytest.mark.internals
TRAININGS = ("frozen", "lora", "full")


def names(device: str, **changes) -> list[str]:
    hardware = replace(describe_hardware(device), **changes)
    return [choose_encoder(hardware, training).name.split("/")[1] for training in TRAININGS]


def test_choices_worked_out_by_hand():
    # 30 % of a T4's 65 TFLOP/s over 6 x 573M FLOPs a residue: 5,670/s; of 2.8 billion weights, frozen: 3,440.
    assert names("T4") == ["ESMC-600M"] * 3
    # A100: 93.6 TFLOP/s over 6 x 2.83 billion: 5,510/s, and 2.83 billion x 16 bytes: 42 GiB.
    assert names("A100-80GB") == ["esm2_t36_3B_UR50D"] * 3
    assert names("A100-40GB") == ["esm2_t36_3B_UR50D", "esm2_t36_3B_UR50D", "ESMC-600M"]
    assert names("cpu") == ["esm2_t12_35M_UR50D"] * 3


def test_where_nothing_fits_it_is_the_smallest():
    assert names("T4", memory_gib=0.01) == ["esm2_t6_8M_UR50D"] * 3


def test_bytes_and_rates_by_hand():
    model = Candidate("x/y", 2, 100, 1e6, 2.0)
    one_layer = 8192 * 100 * 60
    assert model.needed_bytes("frozen") == 2e6 + one_layer
    assert model.needed_bytes("lora") == 2e6 + one_layer + 2 * 8192 * 100 * 4
    assert model.needed_bytes("full") == 16e6 + one_layer + 2 * 8192 * 100 * 4
    hardware = replace(describe_hardware("T4"), peak_tflops={"fp16": 10.0})
    assert model.expected_rate("full", hardware) == pytest.approx(0.3 * 10e12 / 6e6)


def test_the_best_comes_first_and_each_later_one_takes_less():
    """Then the first that will do is the best, and no model is named that a smaller one beats."""
    for better, worse in pairwise(CANDIDATES):
        assert better.loss < worse.loss - 0.02
        assert all(better.needed_bytes(training) > worse.needed_bytes(training) for training in TRAININGS)


@pytest.mark.parametrize(("layers", "width", "inner", "gated"), [(36, 2560, 10240, False), (30, 960, 2560, True)])
def test_parameters_are_those_of_the_layers(layers, width, inner, gated):
    """Of ESM-2 3B and ESM C 300M, whose linear layers nearly all weights are."""
    count = layers * (4 * width * width + (3 if gated else 2) * width * inner)
    (model,) = [one for one in CANDIDATES if one.width == width]
    assert model.num_parameters == pytest.approx(count, rel=0.001)
