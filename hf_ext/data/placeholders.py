"""Numbers that other programs write where nothing was measured, such as -999: refused where that is certain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .proteins import Problem

NINES = (99.0, 999.0, 9999.0, 99999.0, 999999.0, 99.9, 99.99, 999.9, 999.99, 9999.9, 9999.99)
MIN_OTHERS = 3  # distinct labels, which say where measurements lie
FAR = 10.0  # ranges of the other labels between them and a placeholder
MAX_RATIO = 100.0  # of positive labels: where they spread further, such as Kd in nM, 999 may be measured


def find_placeholders(
    labels: np.ndarray, bounds: np.ndarray, column: str, rows: Sequence[int], texts: Sequence[object]
) -> list[Problem]:
    """Refuses nines (-999, 9999, ...) that stand far outside of all other labels.

    Certain cases only: a negative one among labels of which none is negative, or one that is ten times the range of the
    other labels away from them; a positive one not where labels spread over two decades, as concentrations do.

    Args:
        labels: float64 [n], NaN where refused already.
        bounds: [n]; a limit (`<=999`) is no placeholder.
        column: the label column's name.
        rows: [n] 1-based file rows.
        texts: [n] cells as they were written.
    """
    is_nines = np.isin(np.abs(labels), NINES) & (bounds == 0)
    if not is_nines.any():
        return []
    others = np.unique(labels[np.isfinite(labels) & ~is_nines])
    if len(others) < MIN_OTHERS:
        return []
    low, high = float(others[0]), float(others[-1])
    remedy = "Leave the row out (empty is not 0), or write the limit that was measured, such as <=5."
    return [
        Problem(
            rows[index],
            column,
            str(texts[index]).strip(),
            f"the label reads as a missing value, all others lie between {low:g} and {high:g}",
            remedy,
        )
        for index in np.flatnonzero(is_nines).tolist()
        if _is_placeholder(float(labels[index]), low, high)
    ]


def _is_placeholder(value: float, low: float, high: float) -> bool:
    if low <= value <= high:
        return False
    if value < 0 <= low:
        return True
    may_be_measured = value > 0 and low > 0 and high > MAX_RATIO * low
    return max(value - high, low - value) > FAR * (high - low) and not may_be_measured
