"""What is stored of prediction intervals, and how wide one is at a level: no labels are needed any more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from ..errors import ArgumentError


def half_width(stored: Mapping[str, Any] | None, level: float) -> float:
    """Half the width of an interval around a prediction, label units.

    Args:
        stored: `AffinityConfig.prediction_intervals`: `levels`, rising, each with one of `half_widths`, and what stands
            behind them (`num_rows`, `num_limits` left out, `unit`, `num_units`); or `reason`, why there are none.
        level: share of rows that the interval is to hold, above 0, below 1; between two stored ones the higher counts.

    Raises:
        ArgumentError: not a level; the model has no intervals, or none of this level.
    """
    if not 0 < level < 1:  # also NaN
        raise ArgumentError(f"An interval of level {level:g}: give the share of rows that it is to hold, 0.9 say.")
    if stored is None:
        raise ArgumentError(
            f"An interval of level {level:g}: this model holds no residuals of validation rows: an earlier version "
            "wrote it, or it is one head of --num_seeds. Run recipes/max_speed.py again with the arguments of that "
            "run: training that has ended is not repeated where its last checkpoint is there (--resume auto)."
        )
    if stored.get("reason"):
        raise ArgumentError(f"An interval of level {level:g}: this model has none: {stored['reason']}.")
    known = zip(stored["levels"], stored["half_widths"])
    found = next((width for at, width in known if at >= level - 1e-9), None)
    if found is None:
        highest = stored["levels"][-1]
        raise ArgumentError(
            f"An interval of level {level:g} needs at least {least_units(level):,} {_noun(stored)} for validation; "
            f"behind this model's intervals are {describe_basis(stored)}, which allow {highest:g} at most. Ask for "
            "less, or train with more to validate on."
        )
    return float(found)


def least_units(level: float) -> int:
    """How many rows, or units that were held out together, an interval of a level needs at least."""
    return math.ceil(level / (1 - level) - 1e-9)


def describe_basis(stored: Mapping[str, Any]) -> str:
    """120 validation rows; or 12 values of heavy in 120 validation rows."""
    rows = f"{stored['num_rows']:,} validation rows" + (" with exact labels" if stored.get("num_limits") else "")
    return rows if stored.get("unit") is None else f"{stored['num_units']:,} {_noun(stored)} in {rows}"


def _noun(stored: Mapping[str, Any]) -> str:
    return "rows" if stored.get("unit") is None else f"values of {stored['unit']}"


def check_prediction_intervals(stored: Any) -> None:
    """Refuses what `half_width` could not read.

    Raises:
        ArgumentError: names what is wrong.
    """
    if stored is None or (isinstance(stored, Mapping) and stored.get("reason")):
        return
    if not isinstance(stored, Mapping) or not all(stored.get(name) for name in ("levels", "half_widths", "num_rows")):
        raise ArgumentError("prediction_intervals: needs levels, half_widths and num_rows, or a reason.")
    levels, widths = stored["levels"], stored["half_widths"]
    numbers = [*levels, *widths]
    if not all(isinstance(v, int | float) and math.isfinite(v) and v >= 0 for v in numbers) or levels[-1] >= 1:
        raise ArgumentError("prediction_intervals: every level must be below 1, every number finite and not negative.")
    is_rising = all(a < b for a, b in pairwise(levels)) and all(a <= b for a, b in pairwise(widths))
    if len(levels) != len(widths) or not is_rising:
        raise ArgumentError("prediction_intervals: each level, rising, needs a half width that never falls.")
