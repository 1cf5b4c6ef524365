"""Equations solved as a hand or a dense matrix does; generated samples are made once, never believed when damaged."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hf_ext.pde.data import SPLITS, TASKS, baseline_errors, load_task, measure_units
from hf_ext.pde.solvers import make_advection, make_darcy, solve_darcy


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


SMALL = {"resolution": 8, "seed": 0}


def load(cache_dir, name="darcy2d", split="train", num=3, **given):
    return load_task(name, split, num, cache_dir=cache_dir, **{**SMALL, **given})


def are_equal(one, other) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[kind], other[kind]) for kind in one)


def test_splits_share_no_sample():
    inputs = np.concatenate([load(None, "advection1d", split, 50)["inputs"] for split in SPLITS])
    assert len(np.unique(inputs.round(4), axis=0)) == 150


@pytest.mark.parametrize("name", TASKS)
def test_what_is_read_again_is_what_was_made_and_other_samples_have_another_file(tmp_path, name, caplog):
    fresh = load(None, name)
    made = load(tmp_path, name)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    assert are_equal(fresh, made)
    assert are_equal(fresh, load(tmp_path, name))
    assert file.stat().st_mtime_ns == written
    for given in ({"num": 4}, {"seed": 1}, {"resolution": 12}, {"split": "test"}):
        assert are_equal(load(tmp_path, name, **given), load(None, name, **given))
    assert len([*tmp_path.iterdir()]) == 5
    assert not caplog.records


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def put_a_pipe(file):
    file.unlink()
    os.mkfifo(file)


DAMAGES = {
    "bit": flip_a_bit,
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file: file.write_bytes(b""),
    "text": lambda file: file.write_text("no samples"),
    "fewer": lambda file: np.savez(file, inputs=np.zeros(2)),
    "pipe": put_a_pipe,
}


def test_a_damaged_file_is_said_and_made_anew(tmp_path, caplog):
    fresh = load(tmp_path)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    for name, damage in DAMAGES.items():
        caplog.clear()
        damage(file)
        assert are_equal(fresh, load(tmp_path)), name
        if name != "pipe":  # which is not waited for, and nothing is kept
            assert "made anew" in caplog.text
            assert str(file) in caplog.text
            assert file.read_bytes() == content
    assert [*tmp_path.iterdir()] == [file]


def test_a_folder_that_cannot_be_made_is_said_and_samples_are_used(tmp_path, caplog):
    (tmp_path / "taken").write_text("")
    with caplog.at_level(logging.WARNING):
        assert are_equal(load(tmp_path / "taken" / "cache"), load(None))
    assert "cannot be kept" in caplog.text


def test_many_who_ask_at_once_get_the_same(tmp_path, caplog):
    with ThreadPoolExecutor(6) as pool:
        found = [*pool.map(lambda _: load(tmp_path), range(6))]
    assert all(are_equal(found[0], other) for other in found[1:])
    assert len([*tmp_path.iterdir()]) == 1
    assert not caplog.records


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
    found = {name: baseline_errors(name, train, test) for name in TASKS}
    means = {name: {kind: errors.mean() for kind, errors in kinds.items()} for name, kinds in found.items()}
    assert means["advection1d"] == {"training mean": 0.75, "persistence": 1.125}
    assert means["darcy2d"] == {"training mean": 0.75}
