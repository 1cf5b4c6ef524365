"""A run whose measure is recall, on the command line: evaluations, checkpoint, verdict, report; what is refused."""

from __future__ import annotations

import csv
import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from hf_ext.affinity.measure import check_measure
from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation import score_predictions
from hf_ext.evaluation.row_metrics import RowMetrics
from hf_ext.training_args import FastTrainingArguments

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
LETTERS = "ACDEFGHIKLMNPQRSTVWY"
PARTS = ["train"] * 120 + ["valid"] * 60 + ["test"] * 60
METRICS = ("recall", "precision", "f1", "average_precision", "enrichment_1pct", "enrichment_5pct", "per_group_spearman")
QUICK = "--num_train_epochs 3 --learning_rate 0.01 --per_device_train_batch_size 8 --head_sizes 16 --head_dropout 0"


def write_table(path: Path) -> None:
    """240 sequences of 12 residues in 3 families; the label is a weighted sum of the residues, with noise."""
    generator = np.random.default_rng(0)
    letters = generator.integers(0, 20, (240, 12))
    labels = 7 + np.linspace(-1, 1, 20)[letters].sum(1) + generator.normal(0, 0.3, 240)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sequence", "part", "family", "pKd"])
        for i, (row, part, label) in enumerate(zip(letters, PARTS, labels)):
            writer.writerow(["".join(LETTERS[letter] for letter in row), part, f"family {i % 3}", f"{label:.4f}"])


@pytest.fixture(scope="module")
def run(tmp_path_factory, demo_encoders):
    """A finished run by recall at 7.5; its folder."""
    root = tmp_path_factory.mktemp("recall")
    write_table(root / "rows.csv")
    files = ["--dataset_name", str(root / "rows.csv"), "--output_dir", str(root / "run")]
    files += ["--encoders", demo_encoders[1]]
    columns = ["--label_column", "pKd", "--split_column", "part", "--embedding_cache_dir", str(root / "cache")]
    asked = "--metric_for_best_model recall --binder_threshold 7.5 --group_column family --eval_subset 45"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        quiet = "--disable_tqdm true --use_cpu true"
        importlib.import_module("max_speed").main([*files, *columns, *f"{QUICK} {asked} {quiet}".split()])
    return root / "run"


@pytest.mark.nightly
def test_every_evaluation_of_the_subset_and_of_all_rows_has_every_metric(run):
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    evaluations = [log for log in history if "eval_loss" in log]
    assert len(evaluations) == 3
    assert all({f"eval_{name}" for name in METRICS} < log.keys() for log in evaluations)
    assert {log["eval_num_defined_groups"] for log in evaluations} == {3.0}
    assert {f"eval_full_{name}" for name in METRICS} < evaluations[-1].keys()
    best = json.loads((run / "all_results.json").read_text())["best"]
    full = {log["step"]: log["eval_full_recall"] for log in evaluations if "eval_full_recall" in log}
    assert best["recall"] == max(full.values()) == full[best["step"]]


def test_the_final_scores_and_the_verdict_hold_them_too(run):
    results = json.loads((run / "all_results.json").read_text())
    model = results["test"]["scores"]["model"]
    assert results["verdict"]["comparison"]["metric"] == "recall"
    assert results["verdict"]["comparison"]["after"] == model["recall"]["value"] > 0.2
    with (run / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    predicted, labels = ([float(row[name]) for row in rows] for name in ("prediction", "label"))
    expected = score_predictions(predicted, labels, groups=[row["family"] for row in rows], threshold=7.5, seed=42)
    for name in METRICS:
        for number in ("value", "low", "high"):
            assert model[name][number] == pytest.approx(expected[name][number], abs=1e-3)


def test_predictions_are_left_as_trained_and_the_log_says_why(run):
    assert "verdict in recall. No calibration" in (run / "run.log").read_text()
    assert json.loads((run / "config.json").read_text())["calibration"] is None
    assert "recall on test" in (run / "report.md").read_text()


def check(metric, metrics, loss="mse", labels=None):
    args = FastTrainingArguments("never_made", report_to="none", metric_for_best_model=metric)
    check_measure(args, loss, metrics, None if labels is None else Dataset.from_dict({"label": labels}))


def test_a_measure_that_nothing_computes_is_refused_with_what_it_needs():
    for metric, metrics, loss, message in (
        ("recall", RowMetrics(), "mse", "recall needs a --binder_threshold that divides the labels"),
        ("per_group_spearman", RowMetrics(9.0), "mse", "per_group_spearman needs --group_column"),
        ("f1", RowMetrics(9.0), "ranking", "have no unit.*average_precision, enrichment_1pct or enrichment_5pct"),
        ("recal", RowMetrics(9.0), "mse", "'recal': allowed are loss, spearman, .*, recall, .*, enrichment_5pct, num"),
    ):
        with pytest.raises(ArgumentError, match=message):
            check(metric, metrics, loss)


def test_validation_rows_that_no_prediction_could_score_are_refused():
    labels = [7.0, 8.0, 8.9]
    with pytest.raises(DataError, match=r"'recall': no label of the evaluation rows is at or above .* 9"):
        check("recall", RowMetrics(9.0), labels=labels)
    for metric, loss in (("recall", "mse"), ("average_precision", "ranking"), ("rmse", "mse")):  # the innocent twins
        check(metric, RowMetrics(8.9), loss, labels)
