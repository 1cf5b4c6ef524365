"""The comparisons that equivalence tests rest on, worked out by hand; and that a number that is none never passes."""

import math

import pytest
import torch
from closeness import largest, relative_error

NAN = math.nan


@pytest.mark.parametrize("values", [[NAN, 1.0], [1.0, NAN], [torch.tensor(1.0), torch.tensor(NAN), 3.0]])
def test_nan_is_the_largest_wherever_it_stands(values):
    assert math.isnan(largest(values))
    assert largest([2.0, math.inf, 1.0]) == math.inf
    assert largest([1.0, torch.tensor(3.0), 2.0]) == 3.0


def tensors(*rows) -> dict[str, torch.Tensor]:
    return {str(i): torch.tensor(row) for i, row in enumerate(rows)}


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([[2.5, -4.0]], [[2.0, -4.0]], 0.125),
        ([[4.0], [0.5]], [[4.0], [0.25]], 1.0),  # the second tensor by its own values
        ([[2.0**24], [8.0]], [[2.0**24], [0.0]], 0.5),  # four roundings of the largest are 4, a quarter of 16
        ([[2.0**24], [8.0]], [[2.0**24], [32.0]], 0.75),  # and less than a quarter of 32
        ([[100.0], [0.0]], [[100.0], [0.0]], 0.0),
        ([[0.0]], [[0.0]], 0.0),
        ([[1.0, 2.0]], [[1.0, 2.0], [3.0, 4.0]], math.inf),
    ],
)
def test_errors_are_relative_to_a_tensor_or_to_the_roundings_of_the_largest(found, expected, error):
    assert relative_error(tensors(*found), tensors(*expected), bound=0.25) == error
