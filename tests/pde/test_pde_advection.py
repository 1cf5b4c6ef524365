"""Advection: exact where a shift is a whole number of points, and the same rows however many are asked for."""

from __future__ import annotations

import numpy as np

from hf_ext.pde.solvers import make_advection


def test_solutions_are_the_initial_state_moved_by_speed_times_time():
    """At a speed of 0.4 a quarter of the time is a tenth of the domain: one point of ten."""
    inputs, targets = make_advection(20, points=10, times=4, beta=0.4, seed=3)
    assert inputs.shape == (20, 10)
    assert targets.shape == (20, 4, 10)
    assert inputs.dtype == targets.dtype == np.float32
    for k in range(4):
        assert np.abs(targets[:, k] - np.roll(inputs, k + 1, axis=1)).max() < 1e-6
        assert np.abs(targets[:, k] - np.roll(inputs, k + 2, axis=1)).max() > 0.5  # the wrong speed is seen


def test_after_a_whole_turn_the_state_is_the_first_one_again():
    inputs, targets = make_advection(5, points=64, times=1, beta=1.0, seed=0)
    assert np.abs(targets[:, 0] - inputs).max() < 1e-6


def test_initial_states_are_two_sines_of_modes_1_to_8():
    inputs, _ = make_advection(500, points=64, times=1, seed=0)
    amplitudes = np.abs(np.fft.rfft(inputs.astype(np.float64), axis=1)) / 32
    is_there = amplitudes > 1e-5
    assert not is_there[:, 0].any()
    assert not is_there[:, 9:].any()
    assert is_there[:, 1:9].any(0).all()
    assert set(is_there.sum(1)) == {1, 2}  # 1: both sines have one mode
    alone = amplitudes[is_there.sum(1) == 2]
    assert 0.4 < alone[alone > 1e-5].mean() < 0.6
    assert amplitudes.max() < 2


def test_row_i_is_the_same_whatever_else_is_made():
    few, many = (make_advection(num, points=32, seed=7) for num in (3, 9))
    for short, long in zip(few, many):
        assert np.array_equal(short, long[:3])
    states = [make_advection(3, points=32, **given)[0] for given in ({"seed": 8}, {"seed": 7, "stream": 1})]
    assert not any(np.isclose(few[0], other).all(1).any() for other in states)
