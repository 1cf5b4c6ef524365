"""Split conformal prediction: how far truths lie from predictions on held-out rows says how far further ones will."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ._arrays import FloatArray, as_column, count_not_finite
from .resampling import ResamplingUnits, check_units, t_quantile

LEVELS = (*(round(0.01 * i, 2) for i in range(1, 100)), 0.995, 0.999)
ROUNDING = 1e-9  # of sums of weights


def conformal_half_widths(
    residuals: Any, levels: FloatArray | tuple[float, ...] = LEVELS, *, units: ResamplingUnits | None = None
) -> FloatArray:
    """Half widths of intervals that hold the truth of a further row with the probability that their level says.

    Of n rows it is the ceil((n + 1) level)-th smallest absolute residual: the further row counts as one more, and may
    be the worst. Whatever the errors look like, that holds for rows that could as well have stood among these. Rows of
    one antibody cannot: they share what a model gets wrong. With `units` each unit weighs as one, shared evenly by its
    rows, beside the one more unit that the further row is of; then it holds for a row of a new unit, averaged over
    units, not for each. Fitted by units that are rows, both are the same to the bit.

    Sources: V. Vovk, A. Gammerman, G. Shafer, Algorithmic Learning in a Random World (2005); Y. Lee, R. F. Barber,
    R. Willett, Distribution-free inference with hierarchical data (2023), arXiv:2306.06342, their HCP; R. Dunn,
    L. Wasserman, A. Ramdas, Distribution-free prediction sets for two-layer hierarchical models (2022).

    Args:
        residuals: (n,) truth less prediction, of rows that neither model nor calibration was fitted on; the sign plays
            no part.
        levels: each above 0, below 1.
        units: of the rows; None: each row by itself.

    Returns:
        One half width per level, (levels,), in the unit of the residuals; infinite where a level needs more rows, or
        units, than there are (`hf_ext.models.postprocess.least_units`).

    Raises:
        DataError: a residual is not finite, or units are of another number of rows.

    Cost: one sort.
    """
    errors = np.abs(as_column(residuals, "residuals"))
    if problem := count_not_finite(errors, "residuals"):
        raise DataError(f"{problem}: intervals need finite ones.")
    units = check_units(units, len(errors))
    num_units = len(errors) if units is None else units.num_units
    sizes = np.ones(len(errors)) if units is None else units.sizes[units.unit_of_row]
    order = np.argsort(errors, kind="stable")
    held = np.cumsum(1 / sizes[order]) / (num_units + 1)
    place = np.searchsorted(held, np.asarray(levels, np.float64) - ROUNDING)
    return np.append(errors[order], np.inf)[place]


@dataclass(frozen=True)
class Coverage:
    """Which share of rows their intervals held.

    Attributes:
        value: of all rows.
        low, high: 95 % interval of `value`, by units where there are some; None from fewer than 2.
        mean_of_units: where units weigh alike, as the level is meant for a new unit; None where units are rows.
        num_rows: that were looked at.
        num_units: None where units are rows.
    """

    value: float
    low: float | None
    high: float | None
    mean_of_units: float | None
    num_rows: int
    num_units: int | None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def measure_coverage(
    is_held: NDArray[np.bool_], *, units: ResamplingUnits | None = None, confidence: float = 0.95
) -> Coverage:
    """The share of rows that their intervals hold, with an interval of that share.

    It is Wilson's, with as many rows as would vary alike if they were independent: it neither leaves 0 to 1 nor
    collapses where all rows are held. Where all units agree, each counts as one row.

    Source: N. Dean, M. Pagano, Evaluating confidence interval methods for binomial proportions in clustered surveys,
    Journal of Survey Statistics and Methodology 3 (2015), the modified Wilson interval.

    Args:
        is_held: (n,), n >= 1.
        units: rows that were held out together; None: each by itself.
        confidence: of the interval.
    """
    held = np.asarray(is_held, np.float64)
    num_rows, units = len(held), check_units(units, len(held))
    share = float(held.mean())
    if units is None:
        low, high = _wilson(share, num_rows, num_rows, confidence)
        return Coverage(share, low, high, None, num_rows, None)
    of_units = np.bincount(units.unit_of_row, held)
    num, effective = units.num_units, units.num_effective
    ends: tuple[float | None, float | None] = (None, None)
    if num > 1:
        variance = num / (num - 1) * float(np.sum((of_units - share * units.sizes) ** 2)) / num_rows**2
        size = min(share * (1 - share) / variance, num_rows) if variance > 0 else effective
        ends = _wilson(share, size, effective, confidence)
    return Coverage(share, *ends, float(np.mean(of_units / units.sizes)), num_rows, num)


def _wilson(share: float, size: float, num_units: float, confidence: float) -> tuple[float, float]:
    """Wilson's interval of a share of `size` rows, but with the quantile of t for as many units."""
    squared = t_quantile((1 + confidence) / 2, num_units) ** 2
    centre = (share + squared / (2 * size)) / (1 + squared / size)
    reach = math.sqrt(squared * (share * (1 - share) / size + squared / (4 * size**2))) / (1 + squared / size)
    return max(0.0, centre - reach), min(1.0, centre + reach)
