"""Darcy flow: what a hand can solve, what a dense matrix solves, and what the equation says of any solution."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hf_ext.pde.solvers import make_darcy, solve_darcy

CENTRE = 0.0736713532814  # of -Laplace u = 1 on the unit square; 16 / pi^4 times the double series of sines


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


def test_four_equal_cells_by_hand():
    """Nothing flows between them: two faces of flux 2 a u each, against a source of 1 in a quarter of the square."""
    assert solve_darcy(np.full((2, 2), 2.0)) == pytest.approx(np.full((2, 2), 1 / 32))


def test_four_cells_by_hand():
    """Left 12, right 3: (48 + 4.8) l - 4.8 r = 1/4 and (12 + 4.8) r - 4.8 l = 1/4, so l = 1/160 and r = 1/60."""
    found = solve_darcy(np.array([[12.0, 3.0], [12.0, 3.0]]))
    assert found == pytest.approx(np.array([[1 / 160, 1 / 60], [1 / 160, 1 / 60]]))


def test_any_medium_is_solved_as_by_a_dense_matrix():
    a = np.where(np.random.default_rng(0).random((6, 6)) < 0.5, 12.0, 3.0)
    assert np.allclose(solve_darcy(a), solve_densely(a), rtol=1e-12)
    assert not np.allclose(solve_darcy(a), solve_densely(a, mean=lambda b, c: (b + c) / 2), rtol=1e-2)


def test_a_constant_medium_converges_to_the_series_with_the_square_of_the_cells():
    errors = [solve_darcy(np.full((r, r), 5.0))[r // 2, r // 2] * 5 - CENTRE for r in (9, 27)]
    assert abs(errors[1]) < 2e-3 * CENTRE
    assert errors[0] / errors[1] == pytest.approx(9, rel=0.1)


def test_a_medium_of_two_values_converges_as_cells_get_smaller():
    (coarse,), _ = make_darcy(1, resolution=16, seed=5)
    fields = [solve_darcy(np.kron(coarse, np.ones((n, n)))) for n in (1, 2, 4, 8)]
    means = [field.reshape(16, n, 16, n).mean((1, 3)) for field, n in zip(fields, (1, 2, 4, 8))]
    errors = [np.linalg.norm(mean - means[-1]) / np.linalg.norm(means[-1]) for mean in means[:-1]]
    assert errors[0] < 0.03
    assert errors[2] < errors[1] / 2 < errors[0] / 4


@pytest.mark.parametrize("turn", [lambda x: x.T, lambda x: x[::-1], lambda x: x[:, ::-1]])
def test_a_turned_medium_has_the_turned_solution(turn):
    (a,), _ = make_darcy(1, resolution=12, seed=1)
    assert np.allclose(solve_darcy(turn(a)), turn(solve_darcy(a)), rtol=1e-10)
    assert not np.allclose(solve_darcy(turn(a)), solve_darcy(a), rtol=1e-2)


def test_rows_solve_the_equation_of_their_own_medium():
    coefficients, solutions = make_darcy(3, resolution=10, seed=2)
    assert coefficients.dtype == solutions.dtype == np.float32
    assert set(np.unique(coefficients)) == {3.0, 12.0}
    assert (solutions > 0).all()
    for a, u in zip(coefficients, solutions):
        assert np.allclose(u, solve_densely(a.astype(np.float64)), rtol=1e-6)


def test_half_of_the_square_is_of_either_kind():
    coefficients, _ = make_darcy(300, resolution=8, seed=0)
    assert (coefficients == 12).mean() == pytest.approx(0.5, abs=0.03)


def test_a_finer_grid_sees_the_same_field():
    """The centre of each of 10 cells is that of the middle one of three."""
    coarse, fine = (make_darcy(4, resolution=r, seed=9)[0] for r in (10, 30))
    assert np.array_equal(coarse, fine[:, 1::3, 1::3])
    assert not np.array_equal(coarse, fine[:, ::3, ::3])


def test_row_i_is_the_same_whatever_else_is_made():
    few, many = (make_darcy(num, resolution=8, seed=7) for num in (2, 5))
    for short, long in zip(few, many):
        assert np.array_equal(short, long[:2])
    for given in ({"seed": 8}, {"seed": 7, "stream": 1}):
        assert not np.array_equal(few[0], make_darcy(2, resolution=8, **given)[0])
