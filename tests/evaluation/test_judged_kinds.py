"""Verdicts, alarms, early stopping and what evaluations log, of labels that are not one number per row."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from hf_ext.evaluation import (
    RowMetrics,
    StoppingRule,
    Summed,
    collapse_report,
    compare_paired,
    judge,
    judge_pair,
    metrics_of,
)
from hf_ext.labels import make_kind
from hf_ext.text import less_is_better, metric_name

THREE = make_kind("classification", ("place",), ("membrane", "nucleus", "other"))
FREQUENCIES = THREE.constant_name
NUM_ROWS = 400
LABELS = np.random.default_rng(0).choice(3, NUM_ROWS, p=[0.6, 0.3, 0.1])
SHARES = np.tile(np.bincount(LABELS) / NUM_ROWS, (NUM_ROWS, 1))
RISING_IS_WORSE = {"rmse", "mae", "nrmse", "log_loss", "calibration_error"} | {
    f"{c}_{m}" for c in "ab" for m in ("rmse", "mae")
}


def probabilities(strength: float, seed: int = 1) -> np.ndarray:
    """Of a model that is right more often the larger `strength` is, and knows how often."""
    logits = np.random.default_rng(seed).normal(0, 1, (NUM_ROWS, 3)) + strength * np.eye(3)[LABELS]
    return THREE.to_predictions(max(strength, 0.1) * logits + np.log(SHARES))


def test_a_model_above_chance_and_every_baseline_is_better_in_the_metric_of_its_kind() -> None:
    given = {"model": probabilities(3), FREQUENCIES: SHARES, "weak": probabilities(1, 2), "strong": probabilities(2, 3)}
    verdict = judge(LABELS, given, kind=THREE)
    assert (verdict.outcome, verdict.baseline) == ("better", "strong")
    assert verdict.text.startswith("Better than every baseline: MCC 0.")
    assert "of strong, the hardest of 2 to beat (difference 0." in verdict.text
    worse = judge(LABELS, given | {"model": given["weak"]}, kind=THREE)
    assert (worse.outcome, worse.text[:25]) == ("no better", "No better than strong: MC")
    alone = judge(LABELS, {"model": probabilities(3), FREQUENCIES: SHARES}, kind=THREE)
    assert alone.text.startswith("Better than chance: MCC 0.")
    assert alone.text.endswith("400 rows; no other baseline.")


def test_one_class_everywhere_is_no_better_than_a_constant_however_often_it_is_right() -> None:
    verdict = judge(LABELS, {"model": SHARES, FREQUENCIES: SHARES}, kind=THREE)
    assert (verdict.outcome, verdict.baseline) == ("no better", FREQUENCIES)
    assert verdict.text == "No better than a constant: all 400 predictions are membrane."


def test_shuffled_labels_end_in_no_better_than_chance() -> None:
    outcomes = []
    for seed in range(10):
        shuffled = np.random.default_rng(seed).permutation(LABELS)
        verdict = judge(shuffled, {"model": probabilities(3), FREQUENCIES: SHARES}, kind=THREE, num_resamples=200)
        outcomes.append(verdict.outcome)
        assert "than chance: MCC" in verdict.text
    assert outcomes.count("better") <= 1
    assert "no better" in outcomes


@pytest.mark.parametrize(("power", "worth"), [(30, "no better"), (5, "not shown to be better")])
def test_probabilities_not_shown_to_be_worth_more_than_shares_are_named_beside_a_good_order(
    power: int, worth: str
) -> None:
    sure = probabilities(2) ** power
    verdict = judge(LABELS, {"model": sure / sure.sum(1, keepdims=True), FREQUENCIES: SHARES}, kind=THREE)
    assert verdict.outcome == "better"
    assert f"Its probabilities are {worth} than the class frequencies: log loss " in verdict.text


def test_label_frequencies_and_means_of_several_numbers_are_constants_to_beat() -> None:
    several = make_kind("multilabel", ("y",), ("a", "b"))
    has = np.stack([LABELS == 0, LABELS == 1], 1).astype(float)
    verdict = judge(has, {"model": probabilities(2)[:, :2], "label frequencies": SHARES[:, :2]}, kind=several)
    assert verdict.text.startswith("Better than the label frequencies: maximal F1 0.")
    numbers = make_kind("regression", ("a", "b"), ("a", "b"))
    measured = np.random.default_rng(0).normal(0, [1, 100], (200, 2))
    mean = np.broadcast_to(measured.mean(axis=0), measured.shape)
    verdict = judge(measured, {"model": 0.5 * measured, "training mean": mean}, kind=numbers)
    assert verdict.text.startswith("Better than the training mean: nRMSE 0.5")
    assert " against 1.00 of the training mean " in verdict.text


def test_two_models_of_residues_are_told_apart_by_protein() -> None:
    kind = make_kind("residue_classification", ("y",), ("C", "E", "H"))
    generator = np.random.default_rng(0)
    labels = [generator.integers(0, 3, length) for length in generator.integers(5, 40, 60)]
    good = [kind.to_predictions(2.0 * np.eye(3)[row] + generator.normal(0, 1, (len(row), 3))) for row in labels]
    bad = [kind.to_predictions(0.5 * np.eye(3)[row] + generator.normal(0, 1, (len(row), 3))) for row in labels]
    verdict = judge_pair(labels, bad, good, kind=kind, metric="accuracy", names=("old", "new"))
    assert verdict.outcome == "better"
    assert verdict.text.startswith("new is better than old: accuracy 0.")
    assert judge_pair(labels, bad, bad, kind=kind, metric="accuracy").text.startswith(
        "No difference: the later predicts"
    )
    mean = compare_paired(labels, bad, good, "accuracy", kind=kind)
    right = sum((each.argmax(1) == row).sum() for each, row in zip(good, labels)) / sum(map(len, labels))
    assert (mean.n, mean.after) == (60, pytest.approx(right))


@pytest.mark.parametrize(
    ("task", "names", "verdict", "checkpoint"),
    [
        ("regression", "y", "rmse", "rmse"),
        ("regression", "ab", "nrmse", "nrmse"),
        ("classification", "abc", "mcc", "log_loss"),
        ("multilabel", "abc", "f1_max", "log_loss"),
        ("residue_classification", "CEH", "accuracy", "log_loss"),
        ("residue_regression", "y", "rmse", "rmse"),
    ],
)
def test_each_kind_has_its_deciding_metrics_among_those_that_it_scores(task, names, verdict, checkpoint) -> None:
    kind = make_kind(task, ("y",), tuple(names))
    metrics = metrics_of(kind)
    assert (metrics.decides, metrics.chooses) == (verdict, checkpoint)
    assert {verdict, checkpoint, *metrics.means} <= {*metrics.names}
    assert all(less_is_better(name) == (name in RISING_IS_WORSE) for name in metrics.names)


def test_names_of_metrics_read_as_people_write_them() -> None:
    read = [metric_name(name) for name in ("mcc", "balanced_accuracy", "macro_f1", "auroc", "log_loss")]
    assert read == ["MCC", "balanced accuracy", "macro F1", "AUROC", "log loss"]


def test_alarms_about_probabilities_are_said_where_they_are_due_and_not_of_a_good_model() -> None:
    assert collapse_report(probabilities(3), LABELS, THREE)["alarms"] == []
    report = collapse_report(SHARES, LABELS, THREE)
    assert (report["num_distinct"], report["spread_ratio"]) == (1, pytest.approx(0, abs=1e-6))
    assert report["alarms"][0] == "All 400 predictions are membrane: the model is a constant."
    assert report["alarms"][1].startswith("The probabilities spread 0.000 times as far as the labels")
    never = probabilities(3) * [1.0, 1.0, 1e-6]
    alarms = collapse_report(never / never.sum(1, keepdims=True), LABELS, THREE)["alarms"]
    assert alarms[0] == "Never predicted, though 30 labels or more are it: other."
    wrong = collapse_report(probabilities(3)[:, [1, 2, 0]], LABELS, THREE)
    assert any(text.startswith("Log loss") and "no better" in text for text in wrong["alarms"])
    several = make_kind("multilabel", ("y",), ("a", "b"))
    has = np.stack([LABELS == 0, LABELS == 1], 1).astype(float)
    assert collapse_report(probabilities(3)[:, :2], has, several)["alarms"] == []
    assert len(collapse_report(SHARES[:, :2], has, several)["alarms"]) >= 1


def test_an_evaluation_logs_the_metrics_of_its_kind_from_what_the_model_puts_out() -> None:
    logits = np.log(probabilities(2)).astype(np.float32) + 5.0
    metrics = RowMetrics(kind=THREE)
    found = metrics(SimpleNamespace(predictions=(logits, None), label_ids=LABELS))
    assert {*found} == {*metrics.names} - {"loss"}
    assert found["accuracy"] == np.mean(logits.argmax(1) == LABELS)
    loss = -np.mean(np.log(probabilities(2)[np.arange(NUM_ROWS), LABELS]))
    assert found["log_loss"] == pytest.approx(loss, rel=1e-5)
    broken = metrics(SimpleNamespace(predictions=np.full((NUM_ROWS, 3), math.nan), label_ids=LABELS))
    assert all(math.isnan(value) for value in broken.values())


def test_early_stopping_compares_what_an_evaluation_logs() -> None:
    kind = make_kind("residue_regression", ("y",), ("y",))
    generator = np.random.default_rng(0)
    labels = np.where(generator.random((50, 12)) < 0.7, generator.normal(0, 1, (50, 12)), -100)
    metrics = RowMetrics(kind=kind)
    outputs = [labels + size * generator.normal(0, 1, labels.shape) for size in (1.0, 0.5, 1.0)]
    numbers, _ = metrics.summed("rmse", outputs[0], labels)
    rule = StoppingRule(numbers, metric="rmse", rows=lambda sums, counts: Summed(sums, counts, np.sqrt), patience=1)
    decisions = [rule.update(metrics.summed("rmse", each, labels)[1], step=i) for i, each in enumerate(outputs)]
    assert [each.verdict for each in decisions] == ["improved", "improved", "no improvement"]
    logged = [metrics(SimpleNamespace(predictions=each, label_ids=labels))["rmse"] for each in outputs]
    compared = decisions[1].against_best
    assert (compared.before, compared.after) == (pytest.approx(logged[0]), pytest.approx(logged[1]))
    assert logged[1] == pytest.approx(0.5, abs=0.05)
