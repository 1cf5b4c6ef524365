"""What long sequences are shortened to matters to long sequences: of the others, nothing is encoded again."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS, NUM_LONG = 40, 6  # of 50 residues, and of 90
FAST = "--num_train_epochs 1 --head_sizes 8 --disable_tqdm true --use_cpu true --resume no --without cpu_matmul"


@pytest.fixture
def train(tmp_path, monkeypatch, demo_encoders):
    """Calls max_speed.py on one table and one cache; returns how many sequences it encoded."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    lengths = [90] * NUM_LONG + [50] * (NUM_ROWS - NUM_LONG)
    rows = ["".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=length)) for length in lengths]
    Path("rows.csv").write_text("sequence,label\n" + "".join(f"{row},{row.count('A')}\n" for row in rows))

    def call(*words: str) -> int:
        given = ["--dataset_name", "rows.csv", "--encoders", demo_encoders[1], "--embedding_cache_dir", "cache"]
        importlib.import_module("max_speed").main([*given, *FAST.split(), *words])
        plan = json.loads(Path("outputs/affinity/plan.json").read_text())
        return next(one["evidence"]["num_encoded"] for one in plan["decisions"] if one["name"] == "embedding_cache")

    return call


@pytest.mark.nightly
def test_another_rule_for_long_sequences_encodes_the_long_ones_alone(train):
    assert train() == NUM_ROWS
    assert train("--too_long", "truncate", "--max_residues", "60") == NUM_LONG
    assert train("--too_long", "truncate", "--max_residues", "60") == 0
    assert train("--too_long", "window", "--max_residues", "60") == NUM_LONG
    assert train("--too_long", "truncate", "--max_residues", "70") == NUM_LONG
    assert train("--too_long", "window", "--max_residues", "100") == 0  # longer than all: as without
    assert train("--too_long", "truncate", "--max_residues", "45") == NUM_ROWS
    assert train() == 0
