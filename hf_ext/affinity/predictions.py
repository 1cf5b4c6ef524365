"""What a model predicts for rows, beside what was measured there."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.columns import column_names

FloatArray = NDArray[np.float64]


def predict_labelled(trainer: Any, rows: Any) -> tuple[FloatArray, FloatArray]:
    """Predictions for `rows`, and their labels: (n,) float64 each, label units. Cost: one pass over the rows."""
    return unpack_labelled(trainer.predict(rows))


def unpack_labelled(output: Any) -> tuple[FloatArray, FloatArray]:
    """Predictions and labels, (n,) float64 each, of an `EvalPrediction` or `PredictionOutput`.

    Where a model returns several outputs, or rows hold several labels (a bound too), the first of each.
    """
    return _first_column(output.predictions), _first_column(output.label_ids)


def read_bounds(rows: Any) -> NDArray[np.int64] | None:
    """Of each row -1 (the truth is at or below its label), 1 (at or above) or 0 (exact), (n,); None without bounds."""
    if not hasattr(rows, "__len__") or "bound" not in column_names(rows):
        return None
    return np.asarray(rows["bound"][:], np.int64)


def _first_column(values: Any) -> FloatArray:
    return np.asarray(values[0] if isinstance(values, tuple) else values, np.float64).reshape(-1)
