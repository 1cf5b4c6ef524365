"""Labels that are limits (at or below, at or above a value): what counts as an error there."""

from __future__ import annotations

import numpy as np

from ._arrays import FloatArray


def at_limits(predicted: FloatArray, measured: FloatArray, sides: FloatArray) -> FloatArray:
    """`predicted`, but at the label where the label is a limit and the prediction lies beyond it.

    Args:
        predicted, measured: (n,), label units.
        sides: (n,) of -1 (the truth is at or below the label), 1 (at or above), 0 (exact).
    """
    return np.where(sides * (predicted - measured) > 0, measured, predicted)


def rmse_at_limits(predicted: FloatArray, measured: FloatArray, sides: FloatArray) -> float:
    """Root mean squared error, label units, where a prediction beyond a limit is no error. Arguments as `at_limits`."""
    return float(np.sqrt(np.mean((at_limits(predicted, measured, sides) - measured) ** 2)))
