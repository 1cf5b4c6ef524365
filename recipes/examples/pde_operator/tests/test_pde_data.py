"""Equations solved as a hand or a dense matrix does; no two splits share a sample."""

from collections.abc import Callable

import numpy as np
import pytest
from pde_operator.configuration import TASKS
from pde_operator.data import SPLITS, make_advection, make_darcy, make_task, measure_units, solve_darcy
from pde_operator.results import trivial_errors


def test_solutions_are_the_initial_state_moved_by_speed_times_time():
    """At a speed of 0.4 a quarter of the time is a tenth of the domain: one point of ten."""
    inputs, targets = make_advection(20, points=10, times=4, beta=0.4, seed=3)
    assert inputs.shape == (20, 10)
    assert targets.shape == (20, 4, 10)
    assert inputs.dtype == targets.dtype == np.float32
    for k in range(4):
        assert np.abs(targets[:, k] - np.roll(inputs, k + 1, axis=1)).max() < 1e-6
        assert np.abs(targets[:, k] - np.roll(inputs, k + 2, axis=1)).max() > 0.5  # the wrong speed is seen


def harmonic(a: float, b: float) -> float:
    return 2 * a * b / (a + b)


def solve_densely(a: np.ndarray, mean: Callable[[float, float], float] = harmonic) -> np.ndarray:
    """Cell by cell, face by face, as it stands in a textbook."""
    r = len(a)
    matrix = np.zeros((r * r, r * r))
    for i in range(r):
        for j in range(r):
            for k, m in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
                is_inside = 0 <= k < r and 0 <= m < r
                flow = mean(a[i, j], a[k, m]) if is_inside else 2 * a[i, j]
                matrix[i * r + j, i * r + j] += flow
                if is_inside:
                    matrix[i * r + j, k * r + m] -= flow
    return np.linalg.solve(matrix, np.full(r * r, 1 / r**2)).reshape(r, r)


def test_four_cells_by_hand():
    """Left 12, right 3: (48 + 4.8) l - 4.8 r = 1/4 and (12 + 4.8) r - 4.8 l = 1/4, so l = 1/160 and r = 1/60."""
    found = solve_darcy(np.array([[12.0, 3.0], [12.0, 3.0]]))
    assert found == pytest.approx(np.array([[1 / 160, 1 / 60], [1 / 160, 1 / 60]]))


def test_rows_solve_the_equation_of_their_own_medium_as_a_dense_matrix_does():
    coefficients, solutions = make_darcy(3, resolution=10, seed=2)
    assert coefficients.dtype == solutions.dtype == np.float32
    assert set(np.unique(coefficients)) == {3.0, 12.0}
    assert (solutions > 0).all()
    for a, u in zip(coefficients.astype(np.float64), solutions):
        assert np.allclose(u, solve_densely(a), rtol=1e-6)
        assert not np.allclose(u, solve_densely(a, mean=lambda b, c: (b + c) / 2), rtol=1e-2)


def test_a_finer_grid_sees_the_same_field():
    """The centre of each of 10 cells is that of the middle one of three."""
    coarse, fine = (make_darcy(4, resolution=r, seed=9)[0] for r in (10, 30))
    assert np.array_equal(coarse, fine[:, 1::3, 1::3])
    assert not np.array_equal(coarse, fine[:, ::3, ::3])


def test_row_i_is_the_same_whatever_else_is_made():
    for make, resolution in ((make_advection, "points"), (make_darcy, "resolution")):
        few, many = (make(num, seed=7, **{resolution: 32}) for num in (2, 4))
        for short, long in zip(few, many):
            assert np.array_equal(short, long[:2])
        for given in ({"seed": 8}, {"seed": 7, "stream": 1}):
            assert not np.isclose(few[0], make(2, **{resolution: 32}, **given)[0]).all()


def test_splits_share_no_sample():
    inputs = np.concatenate([make_task("advection1d", split, 50, resolution=8, seed=0)["inputs"] for split in SPLITS])
    assert len(np.unique(inputs.round(4), axis=0)) == 150


def test_units_and_trivial_errors_by_hand():
    """The mean of the training targets is 2: |2 - 4| / 4 and |2 - 1| / 1. The initial state is 3: 1/4 and 2/1."""
    train = {"darcy2d": {"inputs": np.array([[3.0, 12.0], [12.0, 3.0]]), "targets": np.array([[2.0, 2.0], [2.0, 2.0]])}}
    assert measure_units(train) == {
        "input_means": {"darcy2d": 7.5},
        "input_stds": {"darcy2d": 4.5},
        "target_means": {"darcy2d": 2.0},
        "target_stds": {"darcy2d": 1.0},  # nothing to divide by
    }
    train = {"inputs": np.zeros((2, 1)), "targets": np.array([[[1.0]], [[3.0]]])}
    test = {"inputs": np.full((2, 1), 3.0), "targets": np.array([[[4.0]], [[1.0]]])}
    found = trivial_errors(dict.fromkeys(TASKS, train), dict.fromkeys(TASKS, test))
    assert found["training mean"].mean(0).tolist() == [0.75, 0.75]
    assert found["persistence"][:, 0].mean() == 1.125
    assert np.isnan(found["persistence"][:, 1]).all()  # Darcy flow has no time
