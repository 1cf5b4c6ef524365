"""What a card falls short of, and why: hand-made measurements, each beside one that must not be complained of."""

from __future__ import annotations

from typing import Any

import pytest

from hf_ext.hardware import describe_hardware
from hf_ext.reporting.rates import Device
from hf_ext.reporting.shortfall import SpeedFacts, find_shortfall

GOOD = {"residues_per_s": 5000.0, "data_wait_share": 0.01, "mfu": 0.30}


def judge(card: str = "T4", dtype: str = "fp16", width: int = 1280, **rates: float) -> str | None:
    device = Device(describe_hardware(card), dtype, 1)
    found = find_shortfall(SpeedFacts(device, {**GOOD, **rates}, width))
    return None if found is None else str(found)


def test_a_run_as_fast_as_usual_is_not_complained_of() -> None:
    assert judge() is None
    assert judge("A100-40GB", "bf16") is None
    assert judge("cpu", "fp32") is None


def test_a_low_share_of_the_peak_without_a_cause_points_to_the_profiler() -> None:
    assert judge(mfu=0.14) == (
        "below what this T4 should reach (14.0% of its fp16 peak, where 15% to 45% is usual): why is not known, "
        "--torch_profiler 5 shows where the time goes"
    )


def test_narrow_encoders_reach_less() -> None:
    assert judge(mfu=0.14, width=320) is None
    assert "3% to 20% is usual" in (judge(mfu=0.02, width=320) or "")


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"data_wait_share": 0.45}, "it waits for data 45% of the time (more --dataloader_num_workers)"),
        ({"dtype": "bf16", "mfu": 0.3}, "T4 emulates bf16 (--fp16 true in its place)"),
        ({"dtype": "fp32"}, "it computes in fp32 (--fp16 true)"),
        ({"card": "A100-40GB", "dtype": "tf32"}, "it computes in tf32 (--bf16 true)"),
    ],
)
def test_a_cause_that_always_costs_time_is_enough(given: dict[str, Any], cause: str) -> None:
    card = given.get("card", "T4")
    assert judge(**given) == f"below what this {card} should reach, because {cause}"


def test_heads_on_cached_embeddings_are_too_small_to_keep_a_card_busy() -> None:
    device, rates = Device(describe_hardware("T4"), "fp32", 1), {"sequences_per_s": 9e4, "mfu": 0.01}
    assert find_shortfall(SpeedFacts(device, rates, 1280)) is None
    assert find_shortfall(SpeedFacts(device, {**rates, "residues_per_s": 1.0}, 1280)) is not None


def test_a_cpu_is_told_what_is_known_and_nothing_that_it_should_reach() -> None:
    assert judge("cpu", "fp32", data_wait_share=0.45, mfu=0.01) == "it waits for data 45% of the time"
