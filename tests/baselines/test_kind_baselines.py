"""Baselines of classes, several labels, residues and several numbers: small cases by hand."""

import math

import numpy as np
import pytest

from hf_ext.baselines import logistic
from hf_ext.baselines.by_kind import NearestBaseline, make_linear, predict_constant, predict_residues, window_features
from hf_ext.baselines.logistic import LogisticBaseline
from hf_ext.labels import make_kind

pytestmark = pytest.mark.internals
THREE = make_kind("classification", ("y",), ("a", "b", "c"))
SEVERAL = make_kind("multilabel", ("y",), ("a", "b"))


def test_constants_are_shares_and_means_of_what_is_known() -> None:
    assert predict_constant(THREE, [0, 0, 1, 2], 2).tolist() == [[0.5, 0.25, 0.25]] * 2
    assert predict_constant(SEVERAL, [[1, math.nan], [0, 1], [0, -100]], 1).tolist() == [[1 / 3, 1.0]]
    residues = make_kind("residue_classification", ("y",), ("C", "E"))
    assert [each.tolist() for each in predict_constant(residues, [[0, 1, -100], [0]], [2, 1])] == [
        [[2 / 3, 1 / 3]] * 2,
        [[2 / 3, 1 / 3]],
    ]
    numbers = make_kind("residue_regression", ("y",), ("y",))
    assert [each.tolist() for each in predict_constant(numbers, [[1.0, math.nan], [3.0]], [1, 2])] == [
        [2.0],
        [2.0, 2.0],
    ]


def test_logistic_regression_finds_the_shares_behind_a_feature_and_a_strong_penalty_those_of_all() -> None:
    features = np.repeat([[0.0], [1.0]], 20, axis=0)
    labels = np.repeat([0, 1, 2, 0, 1, 2], [10, 5, 5, 4, 12, 4])
    # Half a mean row of each class stands beside these 40.
    weak = LogisticBaseline(THREE, [1e-7]).fit(features, labels, features, labels)
    assert weak.predict(np.array([[0.0], [1.0]])) == pytest.approx(
        np.array([[0.5, 0.25, 0.25], [0.2, 0.6, 0.2]]), abs=15e-3
    )
    strong = LogisticBaseline(THREE, [1e5]).fit(features, labels, features, labels)
    assert strong.predict(features)[0] == pytest.approx([14.5 / 41.5, 17.5 / 41.5, 9.5 / 41.5], abs=1e-3)


def test_labels_that_are_not_known_take_no_part_in_a_logistic_regression() -> None:
    features = np.repeat([[0.0], [1.0]], 20, axis=0)
    labels = np.stack([np.repeat([0, 1, 0, 1], [15, 5, 5, 15]), np.repeat([0, 1, math.nan, 1], [10, 10, 15, 5])], 1)
    fitted = LogisticBaseline(SEVERAL, [1e-7]).fit(features, labels, features, labels)
    found = fitted.predict(np.array([[0.0], [1.0]]))
    assert found[:, 0] == pytest.approx([0.25, 0.75], abs=15e-3)
    assert found[0, 1] == pytest.approx(0.5, abs=15e-3)
    assert found[1, 1] > 0.95


def test_the_penalty_is_the_one_with_the_lowest_validation_loss() -> None:
    generator = np.random.default_rng(0)
    features, labels = generator.normal(0, 1, (60, 40)), generator.integers(0, 3, 60)  # nothing to learn
    held_out = generator.normal(0, 1, (300, 40)), generator.integers(0, 3, 300)
    assert LogisticBaseline(THREE).fit(features, labels, *held_out).alpha == 1.0
    features[:, 0] += 5 * labels
    held_out[0][:, 0] += 5 * held_out[1]
    assert LogisticBaseline(THREE).fit(features, labels, *held_out).alpha < 1.0


def test_principal_components_that_hold_all_that_varies_change_nothing(monkeypatch) -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 80)
    features = (generator.normal(0, 1, (80, 3)) + np.eye(3)[labels]) @ generator.normal(0, 1, (3, 10))
    given = features, labels, features, labels
    whole = LogisticBaseline(THREE, [0.1]).fit(*given)
    monkeypatch.setattr(logistic, "MAX_WORK", 1)
    for num, is_same in ((3, True), (1, False)):
        monkeypatch.setattr(logistic, "MIN_AXES", num)
        reduced = LogisticBaseline(THREE, [0.1]).fit(*given)
        assert np.allclose(reduced.predict(features), whole.predict(features), atol=0.01) == is_same


def test_nearest_rows_vote_beside_one_row_that_stands_for_training() -> None:
    features = np.array([[2.0, 0.1], [2.0, -0.1], [-2.0, 0.1], [-2.0, -0.1]])
    labels = np.array([0, 0, 1, 2])
    fitted = NearestBaseline(THREE).fit(features, labels, features, labels)
    assert fitted.num_neighbours == 1
    assert fitted.predict(np.array([[1.0, 0.05], [-5.0, -0.25]])) == pytest.approx(
        np.array([[0.75, 0.125, 0.125], [0.25, 0.125, 0.625]])
    )
    number = make_kind("regression", ("y",), ("y",))
    numbers = NearestBaseline(number).fit(features, [5.0, 5.0, 1.0, 2.0], features, [5.0, 5.0, 1.0, 2.0])
    assert numbers.predict(features) == pytest.approx([5.0, 5.0, 1.0, 2.0])


def test_a_window_sees_the_neighbours_of_a_residue_and_no_other_protein() -> None:
    assert window_features(["AB", "C"], None).sum(axis=1).tolist() == [2, 2, 1]
    assert window_features(["AB", "C"], np.array([1])).nonzero()[1].tolist() == [6 * 26 + 0, 7 * 26 + 1]
    generator = np.random.default_rng(0)
    proteins = ["".join(generator.choice([*"ACDE"], length)) for length in generator.integers(20, 40, 60)]
    before = [
        [-100, *(int(letter == "C") for letter in protein[:-1])] for protein in proteins
    ]  # what the one before is
    kind = make_kind("residue_classification", ("y",), ("other", "after C"))
    known = [(proteins[:40], before[:40]), (proteins[40:50], before[40:50])]
    found, _ = predict_residues(kind, known, window_features, proteins[50:], standardize=False)
    for predicted, labels in zip(found, before[50:], strict=True):
        assert predicted.shape == (len(labels), 2)
        assert predicted.argmax(axis=1)[1:].tolist() == labels[1:]
    numbers = make_kind("residue_regression", ("y",), ("y",))
    (predicted,), _ = predict_residues(numbers, known, window_features, proteins[50:51], standardize=False)
    assert np.abs(predicted[1:] - before[50][1:]).max() < 0.05


def test_a_ridge_of_several_numbers_fits_each_on_the_rows_that_have_it() -> None:
    generator = np.random.default_rng(0)
    features = generator.normal(0, 1, (100, 3))
    labels = np.stack([features[:, 0] * 2 + 1, features[:, 1] - 3], axis=1)
    labels[:50, 1] = math.nan
    linear = make_linear(make_kind("regression", ("a", "b"), ("a", "b")))
    linear.fit(features, labels, features, labels)
    assert linear.predict(np.array([[1.0, 1.0, 0.0]])) == pytest.approx(np.array([[3.0, -2.0]]), abs=1e-3)
    assert linear.summary()["columns"].keys() == {"a", "b"}
