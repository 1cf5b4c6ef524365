"""What a layer moves through memory beside products: the count by hand, and the budget of the compiled layer."""

from __future__ import annotations

import json
from pathlib import Path

import element_wise
import pytest
import torch

RESULT = json.loads((Path(element_wise.__file__).parent / "results" / "element_wise.json").read_text())
BYTES_PER_WIDTH = 0.972e6 / 1280  # of ESM-2 650M as transformers writes it, by an independent count
GOAL = 0.4


def test_bytes_are_those_of_what_is_read_and_written() -> None:
    with element_wise.Moved() as moved:
        x = torch.zeros(10)
        y = x + 1  # 40 bytes in, 40 out
        y.view(2, 5)
        (y.bfloat16().view(2, 5) @ torch.zeros(5, 1, dtype=torch.bfloat16)).relu_()  # 40 in, 20 out; 4 in, 4 out
    made = 40 + 10  # the two that hold zeros
    assert (moved.bytes - made, moved.kernels) == (80 + 60 + 8, 5)


def test_the_layer_as_it_is_written_moves_what_was_counted_before() -> None:
    found = element_wise.count("as transformers writes it")
    assert found["bytes_per_token"] == pytest.approx(0.972e6, rel=0.02)
    assert 100 <= found["kernels"] <= 112
    assert found == RESULT["rows"][0]


def test_fused_gelu_moves_a_third_less_without_a_compiler() -> None:
    found = element_wise.count("with fused_gelu")
    assert found == RESULT["rows"][1]
    assert found["bytes_per_token"] < 0.7 * RESULT["rows"][0]["bytes_per_token"]


@pytest.mark.nightly
def test_a_compiled_layer_keeps_the_budget() -> None:
    """In miniature, with so many tokens that the casts of weights do not count: compiled once, not twice."""
    width, tokens = 128, 2048
    torch.manual_seed(0)
    moved, kernels = element_wise.count_compiled(width, 2, True, tokens)
    assert moved / tokens / width < GOAL * BYTES_PER_WIDTH
    assert kernels < 50
    assert (
        element_wise.count_eager(width, 2, False, tokens)[0] / tokens / width > GOAL * BYTES_PER_WIDTH
    )  # would be seen


def test_the_numbers_that_are_kept_hold_the_goal() -> None:
    by_side = {row["side"]: row for row in RESULT["rows"]}
    assert list(by_side) == list(element_wise.SIDES)
    stock = by_side["as transformers writes it"]["bytes_per_token"]
    assert by_side["compiled, with fused_gelu"]["bytes_per_token"] <= GOAL * stock
