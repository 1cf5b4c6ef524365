"""The encoder that the doctor names: the best that fits and is not too slow, and why no better one."""

from dataclasses import replace
from itertools import pairwise

import pytest

from hf_ext.doctor.encoder_choice import (
    CANDIDATES,
    LEAST_GAIN,
    Candidate,
    choose_encoders,
    describe_choices,
    expected_rate,
    needed_bytes,
)
from hf_ext.hardware import describe_hardware

GIB = 2**30


def names(device: str, gib: float | None = None) -> list[str | None]:
    choices = choose_encoders(describe_hardware(device), gib and gib * GIB)
    return [choice.candidate and choice.candidate.name.split("/")[1] for choice in choices]


def test_choices_worked_out_by_hand():
    # 30 % of a T4's 65 TFLOP/s over 6 x 573M FLOPs a residue: 5,670/s; of 2.8 billion weights, frozen: 3,440.
    assert names("T4", 14.6) == ["ESMC-600M", "ESMC-600M", "ESMC-600M"]
    # A100: 93.6 TFLOP/s over 6 x 2.83 billion: 5,510/s, and 2.83 billion x 16 bytes: 42 GiB.
    assert names("A100-80GB", 72.8) == ["esm2_t36_3B_UR50D"] * 3
    assert names("A100-40GB", 36.4) == ["esm2_t36_3B_UR50D", "esm2_t36_3B_UR50D", "ESMC-600M"]
    assert names("cpu") == ["esm2_t12_35M_UR50D", "esm2_t12_35M_UR50D", "esm2_t12_35M_UR50D"]


def test_esm_2_650m_is_never_taken_where_esm_c_of_half_its_size_is_as_good():
    for device in ("cpu", "T4", "L4", "A100-40GB", "A100-80GB", "H100", "H200", "B200"):
        for gib in (4, 8, 16, 24, 40, 80, None):
            assert "esm2_t33_650M_UR50D" not in names(device, gib)


def test_memory_and_speed_each_leave_a_model_out_and_the_line_says_which():
    hardware = describe_hardware("A100-40GB")
    *_, full = describe_choices(choose_encoders(hardware, 36.4 * GIB))
    assert full.startswith("all weights: biohub/ESMC-600M (")
    assert full.endswith("facebook/esm2_t36_3B_UR50D takes 46 GiB)")
    frozen, *_ = describe_choices(choose_encoders(describe_hardware("T4"), 14.6 * GIB))
    assert "facebook/esm2_t36_3B_UR50D would reach 3,444" in frozen


def test_where_nothing_fits_none_is_named():
    assert names("T4", 0.01) == [None, None, None]
    assert [*describe_choices(choose_encoders(describe_hardware("T4"), 1))] == [
        "frozen: none",
        "LoRA: none",
        "all weights: none",
    ]


def test_bytes_and_rates_by_hand():
    model = Candidate("x/y", 2, 100, 1e6, 2.0)
    one_layer = 8192 * 100 * 60
    assert needed_bytes(model, "frozen") == 2e6 + one_layer
    assert needed_bytes(model, "lora") == 2e6 + one_layer + 2 * 8192 * 100 * 4
    assert needed_bytes(model, "full") == 16e6 + one_layer + 2 * 8192 * 100 * 4
    hardware = replace(describe_hardware("T4"), peak_tflops={"fp16": 10.0})
    assert expected_rate(model, "full", hardware) == pytest.approx(0.3 * 10e12 / 6e6)


def test_larger_models_in_the_table_are_better_or_never_taken():
    losses = [one.loss for one in sorted(CANDIDATES, key=lambda one: one.num_parameters) if "650M" not in one.name]
    assert all(later < earlier - LEAST_GAIN for earlier, later in pairwise(losses))


@pytest.mark.parametrize(("layers", "width", "inner", "gated"), [(33, 1280, 5120, False), (30, 960, 2560, True)])
def test_parameters_are_those_of_the_layers(layers, width, inner, gated):
    """Of ESM-2 650M and ESM C 300M, whose linear layers nearly all weights are."""
    count = layers * (4 * width * width + (3 if gated else 2) * width * inner)
    (model,) = [one for one in CANDIDATES if one.width == width]
    assert model.num_parameters == pytest.approx(count, rel=0.001)
