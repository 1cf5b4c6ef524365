"""What a model predicts for rows, beside what was measured there."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.columns import column_names
from ..evaluation.row_metrics import unpack_labelled

FloatArray = NDArray[np.float64]


def predict_labelled(trainer: Any, rows: Any) -> tuple[FloatArray, FloatArray]:
    """Predictions for `rows`, and their labels: (n,) float64 each, label units. Cost: one pass over the rows."""
    return unpack_labelled(trainer.predict(rows))


def read_bounds(rows: Any) -> NDArray[np.int64] | None:
    """Of each row -1 (the truth is at or below its label), 1 (at or above) or 0 (exact), (n,); None without bounds."""
    if not hasattr(rows, "__len__") or "bound" not in column_names(rows):
        return None
    return np.asarray(rows["bound"][:], np.int64)
