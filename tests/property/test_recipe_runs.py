"""Runs of the recipe that are best by recall; what they record."""

import csv
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_ext.evaluation import score_predictions

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
LETTERS = "ACDEFGHIKLMNPQRSTVWY"
PARTS = ["train"] * 120 + ["valid"] * 60 + ["test"] * 60
QUICK = "--num_train_epochs 4 --learning_rate 0.003 --per_device_train_batch_size 8 --head_sizes 4 --head_dropout 0"
RECALL = (
    "--metric_for_best_model recall --binder_threshold 7.5 --group_column family --eval_subset 45 --learning_rate 0.01 "
    "--head_sizes 16 --num_train_epochs 3"
)
METRICS = ("recall", "precision", "f1", "average_precision")


def write_table(path: Path) -> None:
    """240 sequences of 12 residues in 3 families; the label is a weighted sum of their residues, with noise."""
    generator = np.random.default_rng(0)
    letters = generator.integers(0, 20, (240, 12))
    labels = 7 + np.linspace(-1, 1, 20)[letters].sum(1) + generator.normal(0, 0.3, 240)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sequence", "part", "family", "pKd"])
        for i, (row, part, label) in enumerate(zip(letters, PARTS, labels)):
            writer.writerow(["".join(LETTERS[letter] for letter in row), part, f"family {i % 3}", f"{label:.4f}"])


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recall")
    write_table(folder / "rows.csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        yield folder


@pytest.fixture(scope="module")
def run(root, demo_encoders):
    """Trains with some further words, once for each; its results and its folder."""
    done: dict[str, tuple[dict[str, Any], Path]] = {}

    def trained(words: str) -> tuple[dict[str, Any], Path]:
        if words not in done:
            out = root / f"run{len(done)}"
            files = ["--dataset_name", str(root / "rows.csv"), "--output_dir", str(out), "--encoders", demo_encoders[1]]
            columns = ["--label_column", "pKd", "--split_column", "part", "--embedding_cache_dir", str(root / "cache")]
            quiet = ["--disable_tqdm", "true", "--use_cpu", "true", "--without", "encoder_precision"]  # float32
            results = importlib.import_module("max_speed").main(
                [*files, *columns, *QUICK.split(), *quiet, *words.split()]
            )
            done[words] = (results, out)
        return done[words]

    return trained


@pytest.mark.nightly
def test_every_evaluation_of_the_subset_and_of_all_rows_has_every_metric(run):
    folder = run(RECALL)[1]
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    evaluations = [log for log in history if "eval_loss" in log]
    assert len(evaluations) == 3
    assert all({f"eval_{name}" for name in METRICS} < log.keys() for log in evaluations)
    assert {f"eval_full_{name}" for name in METRICS} < evaluations[-1].keys()
    best = json.loads((folder / "all_results.json").read_text())["best"]
    full = {log["step"]: log["eval_full_recall"] for log in evaluations if "eval_full_recall" in log}
    assert best["recall"] == max(full.values()) == full[best["step"]]


def test_the_final_scores_and_the_verdict_hold_them_too(run):
    results, folder = run(RECALL)
    model = results["test"]["scores"]["model"]
    assert results["verdict"]["comparison"]["metric"] == "recall"
    assert results["verdict"]["comparison"]["after"] == model["recall"]["value"] > 0.2
    rows = read(folder / "predictions.csv")
    predicted, labels = ([float(row[name]) for row in rows] for name in ("prediction", "label"))
    expected = score_predictions(predicted, labels, group_names=[row["family"] for row in rows], threshold=7.5, seed=42)
    for name in (*METRICS, "per_group_spearman"):
        for number in ("value", "low", "high"):
            assert model[name][number] == pytest.approx(expected[name][number], abs=1e-3)
    assert "verdict in recall." in (folder / "run.log").read_text()
    assert "recall on test" in (folder / "README.md").read_text()
