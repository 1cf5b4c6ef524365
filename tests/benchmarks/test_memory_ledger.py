"""What the memory benchmark found still holds of the ledger as it is."""

import json
from pathlib import Path

import pytest
from memory_ledger import CASES, predict

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "memory_ledger_cpu.json"
ROWS = {row["case"]: row for row in json.loads(RESULT.read_text())["rows"]}


def test_predictions_are_within_four_percent_of_what_was_allocated():
    assert len(ROWS) >= 15
    assert all(abs(row["predicted_by_allocations"] - 1) <= 0.04 for row in ROWS.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["full, bf16, recomputing all", "LoRA, all together", "frozen"])
def test_the_ledger_predicts_today_what_it_predicted_then(name):
    case = next(case for case in CASES if case.name == name)
    assert predict(case)["bytes"] == pytest.approx(ROWS[name]["allocations"]["bytes"], rel=0.02)
