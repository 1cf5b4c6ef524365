"""Metrics of classes, of several labels, of residues and of several numbers: by hand, as copies, and in time."""

import math
import time

import numpy as np
import pytest

from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation import ResamplingGroups, compare_paired, metrics_of, rows_for, score_predictions
from hf_ext.labels import LabelKind, make_kind


def kind(task: str, names: str) -> LabelKind:
    return make_kind(task, ("y",), tuple(names))


def one_hot(predicted: list[int], classes: int) -> np.ndarray:
    return 0.1 + np.eye(classes)[predicted] * (1 - 0.1 * classes)


def test_two_classes_by_hand() -> None:
    second = np.array([0.1, 0.4, 0.6, 0.4, 0.9])  # predicted 0, 0, 1, 0, 1
    rows = rows_for(kind("classification", "ab"), np.stack([1 - second, second], 1), [0, 0, 0, 1, 1])
    expected = {
        "accuracy": 3 / 5,
        "balanced_accuracy": (2 / 3 + 1 / 2) / 2,
        "mcc": (1 * 2 - 1 * 1) / math.sqrt(2 * 2 * 3 * 3),
        "macro_f1": (2 / 3 + 1 / 2) / 2,
        "log_loss": -(2 * math.log(0.9) + math.log(0.6) + 2 * math.log(0.4)) / 5,
        "auroc": (1 + 0.5 + 0 + 3) / 6,  # 0.4 against 0.1, 0.4, 0.6; 0.9 against all three
        "average_precision": 1 / 2 * 1 / 1 + 1 / 2 * 2 / 4,
    }
    for name, value in expected.items():
        assert rows.value(name).value == pytest.approx(value, abs=1e-12), name
    assert {*metrics_of(kind("classification", "ab")).names} == {*expected, "calibration_error"}


def test_resamples_in_which_all_predictions_are_one_class_count_as_chance() -> None:
    predicted, truth = [1] + [0] * 39, [1] * 10 + [0] * 30
    found = score_predictions(one_hot(predicted, 2), truth, kind=kind("classification", "ab"))["mcc"]
    assert found["low"] == 0 < found["value"]  # a third of the resamples lacks the one row that is called otherwise


def test_three_classes_by_hand_and_a_class_that_is_only_predicted_counts_in_the_f1_of_others() -> None:
    rows = rows_for(kind("classification", "abc"), one_hot([0, 0, 1, 2, 2, 0], 3), [0, 0, 1, 1, 2, 2])
    # 4 of 6 right; called 3, 1, 2; true 2, 2, 2
    assert rows.value("mcc").value == pytest.approx((4 * 6 - 12) / math.sqrt((36 - 14) * (36 - 12)))
    assert rows.value("macro_f1").value == pytest.approx((4 / 5 + 2 / 3 + 2 / 4) / 3)
    rows = rows_for(kind("classification", "abc"), one_hot([0, 2, 1, 1], 3), [0, 0, 1, 1])
    assert rows.value("macro_f1").value == pytest.approx((2 / 3 + 1) / 2)
    assert rows.value("balanced_accuracy").value == pytest.approx(0.75)


def test_the_calibration_error_by_hand_with_equal_confidences_in_one_bin() -> None:
    top = np.repeat([0.6, 0.9], 10)
    labels = np.repeat([0, 1, 0, 1], [5, 5, 9, 1])  # right: 5 of 10, 9 of 10
    rows = rows_for(kind("classification", "ab"), np.stack([top, 1 - top], 1), labels)
    assert rows.value("calibration_error").value == pytest.approx((10 * 0.1 + 0) / 20)
    order = np.random.default_rng(0).permutation(20)
    again = rows_for(kind("classification", "ab"), np.stack([top, 1 - top], 1)[order], labels[order])
    assert again.value("calibration_error").value == pytest.approx(0.05)


def test_several_labels_by_hand_and_what_is_not_known_counts_nowhere() -> None:
    probabilities = [[0.9, 0.2, 0.5], [0.8, 0.7, 0.1], [0.3, 0.6, 0.99]]
    labels = [[1, 0, math.nan], [0, 1, 0], [0, 1, -100]]
    rows = rows_for(kind("multilabel", "abc"), probabilities, labels)
    # down to 0.6: 4 pairs, 3 of the 3 that are; a: first of three; b: first and second of three; c: none has it
    assert rows.value("f1_max").value == pytest.approx(2 * 3 / (4 + 3))
    assert rows.value("average_precision").value == pytest.approx(1.0)
    losses = np.log([0.9, 0.8, 0.2, 0.7, 0.9, 0.7, 0.6])
    assert rows.value("log_loss").value == pytest.approx(-losses.sum() / 7)
    none = rows_for(kind("multilabel", "ab"), [[0.5, 0.5]], [[0, math.nan]])
    assert none.value("f1_max").undefined == "no row has any of the labels"
    assert none.value("log_loss").value == pytest.approx(math.log(2))


def test_residues_by_hand_and_padding_counts_nowhere() -> None:
    labels = np.array([[0, 1, 2, -100], [1, -100, -100, -100]])
    probabilities = np.full((2, 4, 3), -100.0)
    probabilities[0, :3], probabilities[1, :1] = one_hot([0, 1, 1], 3), one_hot([1], 3)
    padded = rows_for(kind("residue_classification", "CEH"), probabilities, labels)
    as_lists = rows_for(
        kind("residue_classification", "CEH"), [probabilities[0, :3], probabilities[1, :1]], [[0, 1, 2], [1]]
    )
    for rows in (padded, as_lists):
        assert (rows.num_rows, rows.value("accuracy").value) == (2, 3 / 4)
        assert rows.value("log_loss").value == pytest.approx(-(3 * math.log(0.8) + math.log(0.1)) / 4)
    # the first protein twice: 4 of 6; the second twice: 2 of 2
    assert padded.metric("accuracy")(np.array([[2.0, 0.0], [0.0, 2.0]])) == pytest.approx([4 / 6, 1.0])
    numbers = rows_for(kind("residue_regression", "y"), [[1.0, 2.0, 9.0], [3.0]], [[1.0, 4.0, math.nan], [4.0]])
    assert numbers.value("rmse").value == pytest.approx(math.sqrt(5 / 3))
    assert numbers.metric("rmse")(np.array([[0.0, 3.0]])) == pytest.approx([1.0])


def test_several_numbers_are_the_mean_of_their_columns_and_nrmse_has_no_unit() -> None:
    measured = np.array([[1.0, 100.0], [3.0, 300.0], [math.nan, 200.0]])
    predicted = np.array([[2.0, 100.0], [2.0, 300.0], [5.0, 230.0]])
    rows = rows_for(make_kind("regression", ("a", "b_c"), ("a", "b_c")), predicted, measured)
    assert rows.value("a_rmse").value == pytest.approx(1.0)
    assert rows.value("b_c_mae").value == pytest.approx(10.0)
    assert rows.value("rmse").value == pytest.approx((1.0 + math.sqrt(300)) / 2)
    assert rows.value("nrmse").value == pytest.approx(math.sqrt((1.0 + 300 / (20000 / 3)) / 2))
    assert rows.value("pearson").undefined == "a: all 2 predictions are equal (2)"


def some_rows(task: str, num_rows: int, chosen: np.ndarray):
    """Rows of a task, of which some are copied or left out."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 15, num_rows)
    if task.startswith("residue"):
        labels = [generator.integers(0, 3, length).astype(float) for length in lengths]
        outputs = [
            generator.normal(0, 1, (length, 3)) + 2 * np.eye(3)[row.astype(int)] for length, row in zip(lengths, labels)
        ]
        if task == "residue_regression":
            outputs = [each[:, 0] for each in outputs]
            return rows_for(kind(task, "y"), [outputs[i] for i in chosen], [labels[i] for i in chosen])
        outputs = [kind(task, "CEH").to_predictions(each) for each in outputs]
        return rows_for(kind(task, "CEH"), [outputs[i] for i in chosen], [labels[i] for i in chosen])
    if task == "classification":
        labels = generator.integers(0, 2, num_rows)
        outputs = np.round(generator.normal(0, 1, (num_rows, 2)) + np.eye(2)[labels], 1)
        return rows_for(kind(task, "ab"), kind(task, "ab").to_predictions(outputs[chosen]), labels[chosen])
    labels = generator.integers(0, 2, (num_rows, 2)).astype(float)
    outputs = np.round(generator.normal(0, 1, (num_rows, 2)) + labels, 1)
    labels[::7, 0] = math.nan
    if task == "regression":
        return rows_for(kind(task, "ab"), outputs[chosen], labels[chosen])
    return rows_for(kind(task, "ab"), kind(task, "ab").to_predictions(outputs[chosen]), labels[chosen])


ON_ALL_ROWS = ("calibration_error", "nrmse")  # bins and scales are those of all rows, in each resample


@pytest.mark.parametrize(
    "task", ["classification", "multilabel", "residue_classification", "residue_regression", "regression"]
)
def test_counts_are_copies_of_rows(task: str) -> None:
    num_rows = 60
    counts = np.random.default_rng(1).multinomial(num_rows, np.full(num_rows, 1 / num_rows), size=3)
    rows = some_rows(task, num_rows, np.arange(num_rows))
    for name in metrics_of(kind(task, "CEH" if task.startswith("residue") else "ab")).names:
        drawn = rows.metric(name)(counts.astype(float))
        copies = [some_rows(task, num_rows, np.repeat(np.arange(num_rows), row)).value(name).value for row in counts]
        others = [
            some_rows(task, num_rows, np.repeat(np.arange(num_rows), row[::-1])).value(name).value for row in counts
        ]
        assert (np.abs(drawn - copies).max() < 1e-12) or name in ON_ALL_ROWS, name
        assert np.abs(drawn - others).max() > 1e-6, name


def test_what_has_no_value_says_why() -> None:
    two = kind("classification", "ab")
    for predictions, labels, metric, reason in (
        (one_hot([0, 0], 2), [0, 1], "mcc", "all 2 predictions are a"),
        (one_hot([0, 1], 2), [1, 1], "mcc", "all 2 labels are b"),
        (one_hot([0, 1], 2), [1, 1], "auroc", "all 2 labels are b"),
        (one_hot([0, 1], 2), [0, 0], "average_precision", "no label is b"),
        ([[0.5, math.nan], [0.5, 0.5]], [0, 1], "accuracy", "1 of 2 predictions are NaN or infinite (first: row 0)"),
        (np.empty((0, 2)), [], "accuracy", "no rows"),
    ):
        assert rows_for(two, predictions, labels).value(metric).undefined == reason
    assert score_predictions(one_hot([0, 0], 2), [0, 1], kind=two)["mcc"]["low"] is None


def test_labels_and_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(DataError, match="row 1: 2 is no class; 0 to 1"):
        rows_for(kind("classification", "ab"), one_hot([0, 0], 2), [0, 2])
    with pytest.raises(DataError, match=r"predictions: shape \(2, 3\) given; \(2, 2\)"):
        rows_for(kind("multilabel", "ab"), np.ones((2, 3)), np.ones((2, 2)))
    with pytest.raises(DataError, match=r"labels: shape \(2,\) given; \(2, 2\)"):
        rows_for(kind("multilabel", "ab"), np.ones((2, 2)), np.ones(2))
    with pytest.raises(DataError, match="row 1: predictions of 1 residues for labels of 2"):
        rows_for(kind("residue_regression", "y"), [[1.0], [1.0]], [[1.0], [1.0, 2.0]])
    with pytest.raises(ArgumentError, match="'spearman': use one of accuracy"):
        compare_paired([0, 1], one_hot([0, 1], 2), one_hot([0, 0], 2), "spearman", kind=kind("classification", "ab"))


def test_intervals_by_cluster_are_wider_where_clusters_are_right_or_wrong_together() -> None:
    is_right = np.repeat(np.random.default_rng(0).random(40) < 0.7, 25)
    labels = np.arange(1000) % 2
    predicted = one_hot(np.where(is_right, labels, 1 - labels).tolist(), 2)
    clusters = ResamplingGroups.of("cluster", np.repeat(np.arange(40), 25))
    by_row = score_predictions(predicted, labels, kind=kind("classification", "ab"))
    by_cluster = score_predictions(predicted, labels, kind=kind("classification", "ab"), groups=clusters)
    for name in ("accuracy", "mcc", "log_loss"):
        widths = [scores[name]["high"] - scores[name]["low"] for scores in (by_row, by_cluster)]
        assert by_row[name]["value"] == by_cluster[name]["value"]
        assert widths[1] > 3 * widths[0], name


def test_a_thousand_classes_take_seconds() -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 1195, 5000)
    logits = generator.normal(0, 1, (5000, 1195)).astype(np.float32)
    logits[np.arange(5000), labels] += 3
    many = make_kind("classification", ("y",), tuple(map(str, range(1195))))
    start = time.process_time()
    scores = score_predictions(many.to_predictions(logits), labels, kind=many)
    assert time.process_time() - start < 10
    for name in ("accuracy", "mcc", "macro_f1", "log_loss"):
        assert scores[name]["low"] < scores[name]["value"] < scores[name]["high"], name
