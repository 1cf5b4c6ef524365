"""Baselines: the ridge equals a plain solve, by either route, and the penalty is the best on validation rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation import RidgeBaseline, baselines
from hf_ext.evaluation.baselines import predict_group_means


def linear_data(num_rows: int, num_features: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features of unequal scale and far from 0, a linear target and some noise."""
    generator = np.random.default_rng(seed)
    features = generator.normal(size=(num_rows, num_features)) * np.linspace(0.1, 10, num_features) + 100
    weights = np.random.default_rng(99).normal(size=num_features) / np.linspace(0.1, 10, num_features)
    return features, features @ weights + generator.normal(size=num_rows)


def plain_ridge(features: np.ndarray, targets: np.ndarray, penalty: float, standardise: bool = True) -> np.ndarray:
    """The twin: (Z'Z/n + lambda I) w = Z'y/n by one solve, returned as predictions on the training rows."""
    centred = features - features.mean(axis=0)
    scaled = centred / features.std(axis=0) if standardise else centred
    matrix = scaled.T @ scaled / len(scaled) + penalty * np.eye(scaled.shape[1])
    weights = np.linalg.solve(matrix, scaled.T @ (targets - targets.mean()) / len(scaled))
    return scaled @ weights + targets.mean()


@pytest.mark.parametrize("num_rows", [200, 15], ids=["rows > features", "rows < features"])
@pytest.mark.parametrize("penalty", [0.01, 1.0, 100.0])
def test_ridge_equals_a_plain_solve_and_not_one_on_unscaled_features(num_rows: int, penalty: float) -> None:
    features, targets = linear_data(num_rows, 30)
    predicted = RidgeBaseline([penalty]).fit(features, targets, features, targets).predict(features)
    np.testing.assert_allclose(predicted, plain_ridge(features, targets, penalty), atol=1e-8)
    assert not np.allclose(predicted, plain_ridge(features, targets, penalty, standardise=False), atol=1e-3)


def test_ridge_by_hand() -> None:
    # standardised feature -1, 1; targets 0, 4: slope 2 / (1 + lambda) = 1 at lambda 1, so 2 - 1 and 2 + 1
    model = RidgeBaseline([1.0]).fit([[10.0], [30.0]], [0, 4], [[10.0]], [0])
    np.testing.assert_allclose(model.predict([[10.0], [30.0], [50.0]]), [1.0, 3.0, 5.0])
    assert model.validation_rmse == {1.0: pytest.approx(1.0)}


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    features, targets = linear_data(100, 8)
    whole = RidgeBaseline().fit(features, targets, features[:20], targets[:20]).predict(features)
    monkeypatch.setattr(baselines, "CHUNK_BYTES", 8 * 8 * 7)  # 7 rows at a time
    pieces = RidgeBaseline().fit(features, targets, features[:20], targets[:20]).predict(features)
    np.testing.assert_allclose(whole, pieces, atol=1e-9)


def test_the_penalty_with_the_smallest_validation_rmse_is_kept() -> None:
    features, targets = linear_data(60, 40)
    held_out, held_out_targets = linear_data(50, 40, seed=1)
    model = RidgeBaseline([0.001, 0.1, 10.0]).fit(features, targets, held_out, held_out_targets)
    by_hand = {}
    for penalty in (0.001, 0.1, 10.0):
        single = RidgeBaseline([penalty]).fit(features, targets, held_out, held_out_targets)
        by_hand[penalty] = float(np.sqrt(np.mean((single.predict(held_out) - held_out_targets) ** 2)))
    assert model.validation_rmse == pytest.approx(by_hand)
    assert model.best_lambda == min(by_hand, key=by_hand.__getitem__)


def test_noise_features_drive_the_penalty_to_the_large_end_and_it_says_so() -> None:
    generator = np.random.default_rng(0)
    features, targets = generator.normal(size=(80, 40)), generator.normal(size=80)
    model = RidgeBaseline([0.01, 1.0, 1e4]).fit(features, targets, generator.normal(size=(500, 40)), np.zeros(500))
    assert (model.best_lambda, model.at_grid_edge) == (1e4, True)


def test_of_equal_penalties_the_strongest_is_kept() -> None:
    model = RidgeBaseline([0.1, 1.0, 10.0]).fit([[1.0], [1.0]], [1, 3], [[1.0]], [2])  # a constant feature: no weight
    assert model.best_lambda == 10.0
    np.testing.assert_array_equal(model.predict([[1.0], [500.0]]), [2.0, 2.0])


def test_a_constant_feature_gets_no_weight_although_its_mean_is_rounded() -> None:
    features = np.full((1000, 2), 0.1)
    features[:, 1] = np.linspace(-1, 1, 1000)
    assert features.sum(axis=0)[0] / 1000 != 0.1
    model = RidgeBaseline().fit(features, features[:, 1], features[:10], features[:10, 1])
    assert model.weights is not None
    assert model.weights[0] == 0.0


def test_float16_memory_maps_fit_as_float64_arrays_do(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    features = generator.normal(size=(50, 4)).astype(np.float16)
    targets = generator.normal(size=50)
    np.save(tmp_path / "features.npy", features)
    mapped = np.load(tmp_path / "features.npy", mmap_mode="r")
    one = RidgeBaseline().fit(mapped, targets, mapped, targets).predict(mapped)
    two = RidgeBaseline().fit(features.astype(np.float64), targets, features.astype(np.float64), targets)
    np.testing.assert_allclose(one, two.predict(features.astype(np.float64)), atol=1e-12)


def test_ridge_summary_is_json() -> None:
    model = RidgeBaseline([1.0]).fit([[10.0], [30.0]], [0, 4], [[10.0]], [0])
    assert json.loads(json.dumps(model.summary())) == {
        "kind": "ridge",
        "num_features": 1,
        "best_lambda": 1.0,
        "validation_rmse": pytest.approx(1.0),
        "at_grid_edge": False,
    }


def test_a_feature_that_is_not_finite_is_named_by_row_and_column() -> None:
    features = np.ones((3, 2))
    features[2, 1] = np.nan
    with pytest.raises(DataError, match="features, row 2, column 1: nan"):
        RidgeBaseline().fit(features, [1, 2, 3], np.ones((1, 2)), [1])
    with pytest.raises(DataError, match="validation_features, row 2, column 1: nan"):
        RidgeBaseline().fit(np.ones((3, 2)), [1, 2, 3], features, [1, 2, 3])


def test_shapes_that_do_not_fit_are_refused() -> None:
    good, targets = np.ones((3, 2)), [1.0, 2.0, 3.0]
    with pytest.raises(DataError, match="targets: 2 rows for 3 rows of features"):
        RidgeBaseline().fit(good, [1, 2], good, targets)
    with pytest.raises(DataError, match="validation_features: 1 features given; 2"):
        RidgeBaseline().fit(good, targets, np.ones((3, 1)), targets)
    with pytest.raises(DataError, match=r"features: shape \(0, 2\)"):
        RidgeBaseline().fit(np.ones((0, 2)), [], good, targets)
    with pytest.raises(DataError, match="targets: 1 of 3 targets are NaN"):
        RidgeBaseline().fit(good, [1, np.nan, 3], good, targets)


def test_predict_before_fit_and_bad_grids_are_refused() -> None:
    with pytest.raises(ArgumentError, match="before fit"):
        RidgeBaseline().predict([[1.0]])
    for grid in ([], [0.0], [-1.0], [np.inf]):
        with pytest.raises(ArgumentError, match="lambdas="):
            RidgeBaseline(grid)


@pytest.mark.parametrize("num_rows", [200, 15], ids=["rows > features", "rows < features"])
def test_without_standardising_all_features_are_divided_by_one_number(num_rows: int) -> None:
    features, targets = linear_data(num_rows, 30)
    ridge = RidgeBaseline([0.01], standardize=False).fit(features, targets, features, targets)
    scale = np.sqrt(np.mean(features.var(axis=0)))
    expected = plain_ridge(features / scale, targets, 0.01, standardise=False)
    np.testing.assert_allclose(ridge.predict(features), expected, atol=1e-8)
    assert not np.allclose(ridge.predict(features), plain_ridge(features, targets, 0.01), atol=1e-3)


def test_group_means_by_hand_and_the_mean_of_all_for_a_new_group() -> None:
    predicted, num_groups = predict_group_means([1.0, 3.0, 8.0], ["a", "a", 7], ["7", "a", "new", "a"])
    assert (predicted.tolist(), num_groups) == ([8.0, 2.0, 4.0, 2.0], 2)
    with pytest.raises(DataError, match="1 groups for 2 rows"):
        predict_group_means([1.0, 2.0], ["a"], ["a"])
