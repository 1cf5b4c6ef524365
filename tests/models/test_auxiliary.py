"""Terms that are due in every n-th step, and points drawn per seed, epoch and row: worked out by hand, and uniform."""

import numpy as np
import pytest
import torch

from hf_ext.errors import ArgumentError
from hf_ext.models.auxiliary import choose_points, compute_every, subsample

# --- compute_every ---------------------------------------------------------------------------------------------------


def values(n, steps=7, **given):
    return [compute_every(n, lambda: 2.0, step=step, **{"training": True, **given}) for step in range(steps)]


def test_a_term_is_due_in_the_first_step_and_every_nth_after_it_and_always_in_an_evaluation():
    assert values(1) == values(1, scale=True) == [2.0] * 7
    assert values(3) == [2.0, 0.0, 0.0, 2.0, 0.0, 0.0, 2.0]
    assert values(3, scale=True) == [6.0, 0.0, 0.0, 6.0, 0.0, 0.0, 6.0]
    assert values(3, training=False) == values(3, training=False, scale=True) == [2.0] * 7


# --- subsample -------------------------------------------------------------------------------------------------------

DRAW = {"seed": 3, "epoch": 2, "training": True}


def test_the_choice_is_this_one_for_good():
    """Another one would give every run that goes on from a checkpoint other points."""
    assert choose_points(8, 3, seed=0, epoch=0, row_ids=["a", 7]).tolist() == [[1, 2, 6], [0, 3, 5]]


def test_tuples_are_taken_alike_in_order_on_the_trailing_dimensions():
    places = torch.arange(2 * 6 * 2.0).view(2, 6, 2)
    names = torch.arange(12).view(2, 6)
    chosen = choose_points(6, 4, seed=3, epoch=2, row_ids=[5, 9])
    taken_places, taken_names = subsample((places, names), 4, **DRAW, row_ids=[5, 9])
    for row in range(2):
        assert torch.equal(taken_places[row], places[row, chosen[row]])
        assert torch.equal(taken_names[row], names[row, chosen[row]])
    assert torch.equal(subsample(places, 4, **DRAW, row_ids=torch.tensor([5, 9])), taken_places)


def test_an_evaluation_and_few_points_are_taken_whole():
    points = torch.rand(2, 6)
    assert subsample(points, 3, **{**DRAW, "training": False}, row_ids=[0, 1]) is points
    assert subsample(points, 6, **DRAW, row_ids=[0, 1]) is points
    assert subsample(points, 5, **DRAW, row_ids=[0, 1]).shape == (2, 5)


def test_a_rows_points_depend_on_seed_epoch_and_row_and_on_nothing_else():
    rows = [*range(10)]
    together = choose_points(20, 5, seed=3, epoch=2, row_ids=rows)
    torch.manual_seed(9)
    backwards = choose_points(20, 5, seed=3, epoch=2, row_ids=rows[::-1])[::-1]
    one_by_one = np.concatenate([choose_points(20, 5, seed=3, epoch=2, row_ids=[row]) for row in rows])
    assert np.array_equal(together, backwards)
    assert np.array_equal(together, one_by_one)
    for other in ({"seed": 4, "epoch": 2}, {"seed": 3, "epoch": 3}, {"seed": 2, "epoch": 3}):
        assert not np.array_equal(together, choose_points(20, 5, row_ids=rows, **other))
    assert len({tuple(row) for row in together.tolist()}) == 10


def test_what_fits_no_row_or_step_is_refused():
    for points, k, says in (
        (torch.rand(2, 6), 0, "k=0 must be at least 1"),
        (torch.rand(3, 6), 2, "for 2 rows of row_ids"),
        ((torch.rand(2, 6), torch.rand(2, 5)), 2, r"shapes \[\(2, 5\), \(2, 6\)\]"),
    ):
        with pytest.raises(ArgumentError, match=says):
            subsample(points, k, **DRAW, row_ids=[0, 1])
    with pytest.raises(ArgumentError, match="n=0 must be at least 1"):
        values(0)
