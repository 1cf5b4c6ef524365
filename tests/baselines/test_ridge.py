"""Baselines by hand: means, ridge against a plain solve, and what is read off sequences."""

import numpy as np
import pytest

from hf_ext.baselines.ridge import RidgeBaseline, predict_group_means
from hf_ext.data import SequenceFeatures

pytestmark = pytest.mark.internals
BOTH_ROUTES = pytest.mark.parametrize("num_rows", [200, 15], ids=["rows > features", "rows < features"])


def linear_data(num_rows: int, num_features: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features of unequal scale and far from 0, a linear target and some noise."""
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(num_rows, num_features)) * np.linspace(0.1, 10, num_features) + 100
    weights = np.random.default_rng(99).normal(size=num_features) / np.linspace(0.1, 10, num_features)
    return features, features @ weights + generator.normal(size=num_rows)


def plain_ridge(features: np.ndarray, targets: np.ndarray, penalty: float, scale) -> np.ndarray:
    """The twin: (Z'Z/n + lambda I) w = Z'y/n by one solve, returned as predictions on the training rows."""
    scaled = (features - features.mean(axis=0)) / scale
    matrix = scaled.T @ scaled / len(scaled) + penalty * np.eye(scaled.shape[1])
    weights = np.linalg.solve(matrix, scaled.T @ (targets - targets.mean()) / len(scaled))
    return scaled @ weights + targets.mean()


@BOTH_ROUTES
@pytest.mark.parametrize("standardize", [True, False])
def test_ridge_equals_a_plain_solve_and_not_one_of_another_scale(num_rows, standardize):
    features, targets = linear_data(num_rows, 30)
    each, one = features.std(axis=0), np.sqrt(np.mean(features.var(axis=0)))
    right, wrong = (each, one) if standardize else (one, each)
    fitted = RidgeBaseline([0.01], standardize=standardize).fit(features, targets, features, targets)
    predicted = fitted.predict(features)
    np.testing.assert_allclose(predicted, plain_ridge(features, targets, 0.01, right), atol=1e-8)
    assert not np.allclose(predicted, plain_ridge(features, targets, 0.01, wrong), atol=1e-3)


def test_the_penalty_with_the_smallest_validation_rmse_is_kept_of_equal_ones_the_strongest():
    (features, targets), (held_out, truth) = linear_data(60, 40), linear_data(50, 40, seed=1)
    model = RidgeBaseline([0.001, 0.1, 10.0]).fit(features, targets, held_out, truth)
    errors = {}
    for penalty in (0.001, 0.1, 10.0):
        single = RidgeBaseline([penalty]).fit(features, targets, held_out, truth)
        errors[penalty] = float(np.sqrt(np.mean((single.predict(held_out) - truth) ** 2)))
    assert model.best_alpha == min(errors, key=errors.__getitem__)
    assert model.validation_rmse == pytest.approx(min(errors.values()))
    constant = RidgeBaseline([0.1, 1.0, 10.0]).fit([[1.0], [1.0]], [1, 3], [[1.0]], [2])  # a constant: no weight
    assert constant.best_alpha == 10.0
    assert constant.predict([[1.0], [500.0]]).tolist() == [2.0, 2.0]


def test_group_means_by_hand_and_the_mean_of_all_for_a_new_group():
    predicted, num_groups = predict_group_means([1.0, 3.0, 8.0], ["a", "a", 7], ["7", "a", "new", "a"])
    assert (predicted.tolist(), num_groups) == ([8.0, 2.0, 4.0, 2.0], 2)


def test_sequences_of_one_length_are_read_by_position_without_what_never_varies():
    features = SequenceFeatures([["ACD", "AYD", "ACD"]])
    assert (features.name, features.num_features, features.num_counts) == ("one-hot", 2, 2)
    # C and Y at the second position, in the order of the alphabet; W there was never seen.
    assert features.transform([["ACD", "AYD", "AWD"]]).tolist() == [[1, 0], [0, 1], [0, 0]]


def test_sequences_of_several_lengths_are_read_by_3mers_also_where_only_asked_ones_differ():
    features = SequenceFeatures([["AAAA", "AAAC", "C"]])
    # AAA twice, AAA and AAC once, nothing in a sequence shorter than 3.
    assert (features.name, features.num_features) == ("3-mer", 2)
    assert features.transform([["AAAA", "AAAC", "C", "CAAA"]]).tolist() == [[2, 0], [1, 1], [0, 0], [1, 0]]
    train = [["ACD", "AYD"]]
    assert SequenceFeatures(train, [[["ACW"]]]).name == "one-hot"
    assert SequenceFeatures(train, [[["ACDW"]]]).name == "3-mer"


def test_columns_stand_side_by_side_and_one_with_a_single_value_is_left_out():
    features = SequenceFeatures([["AC", "AD"], ["WWWW", "WWWW"], ["MKT", "MKTA"]])
    assert (features.name, features.num_features) == ("one-hot and 3-mer", 3)
    assert features.transform([["AD"], ["YYYY"], ["MKTA"]]).tolist() == [[0, 1, 1]]


def test_many_features_are_decomposed_once_until_one_number_differs(monkeypatch):
    rng = np.random.default_rng(0)
    features = rng.integers(0, 3, (60, 1100)).astype(np.float16)
    labels = rng.normal(size=60)
    decompose, sizes = np.linalg.eigh, []
    monkeypatch.setattr(np.linalg, "eigh", lambda matrix: sizes.append(len(matrix)) or decompose(matrix))

    def fit(values):
        return RidgeBaseline(standardize=False).fit(values, labels, values[:9], labels[:9]).weights

    first, again = fit(features), fit(features.astype(np.float32))
    assert len(sizes) == 1
    np.testing.assert_array_equal(first, again)
    features[59, 1099] += 1
    assert np.abs(fit(features) - first).max() > 0
    assert len(sizes) == 2
    fit(features.astype(np.float64))  # may differ beyond what float32 shows
    assert len(sizes) == 3
