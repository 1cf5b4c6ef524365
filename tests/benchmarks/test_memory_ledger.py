"""What the memory benchmark found still holds of the ledger as it is."""

import json
from pathlib import Path

import pytest
from measured import memory_ledger
from memory_ledger import CASES, predict

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "memory_ledger_cpu.json"
ROWS = {row["case"]: row for row in json.loads(RESULT.read_text())["rows"]}


@pytest.mark.parametrize("measure", ["allocations", "resident"])
def test_predictions_are_within_a_tenth_in_13_of_15_cases(measure):
    near = [abs(row[f"predicted_by_{measure}"] - 1) <= 0.1 for row in ROWS.values()]
    assert len(near) >= 15
    assert sum(near) / len(near) >= 13 / 15


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["full, bf16, recomputing all", "LoRA, all together", "frozen"])
def test_the_ledger_predicts_today_what_it_predicted_then(name):
    case = next(case for case in CASES if case.name == name)
    assert predict(case)["bytes"] == pytest.approx(ROWS[name]["allocations"]["bytes"], rel=0.02)


def test_the_table_has_a_row_for_each_case():
    assert len(memory_ledger().splitlines()) == 2 + len(ROWS)
