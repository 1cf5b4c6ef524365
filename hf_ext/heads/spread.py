"""The spread of a prediction: the standard deviation of what is measured around it, row by row, from mixed heads.

Heads that agree on a row are nearer to the truth than heads that do not: by how much is fitted on rows that they had
not seen. The variance is `noise`, the same for all rows, plus `slope` times the squared distance of members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import ndtri

from ..errors import ArgumentError
from ..evaluation import FloatArray
from ..text import format_cell, share
from .intervals import find_exact

SHARES = np.linspace(0, 0.99, 100)  # of the variance that members explain
CENTRAL = np.linspace(0.1, 0.9, 9)  # shares of rows expected within so many standard deviations
NUM_PARTS = 4
LEAST = 1e-12  # of a variance, label units squared
FLAT = 1e-6  # of what they stand beside: differences below it are rounding


def fit_spread(apart: FloatArray, residuals: FloatArray) -> dict[str, float]:
    """Fits the variance of a row's residual, by the likelihood of normal ones.

    Args:
        apart: (n,) squared distance of members of which none has seen the row, as `HeadEnsemble.mix` computes it.
        residuals: (n,) label less prediction by these members.

    Returns:
        `noise` and `slope`, not negative, of the variance `noise + slope * apart`, label units squared.

    Cost: a hundred passes over the rows.
    """
    squares = np.square(residuals)
    mean = apart.mean()
    if mean <= FLAT * squares.mean():
        return {"noise": float(squares.mean()), "slope": 0.0}
    found = []
    for part in SHARES:
        shape = 1 - part + part * apart / mean
        size = max(np.mean(squares / shape), LEAST)  # the likeliest
        found.append((np.log(shape).mean() + np.log(size), part, size))
    _, part, size = min(found)
    return {"noise": float(size * (1 - part)), "slope": float(size * part / mean)}


def require_spread(stored: Mapping[str, float] | None, what: str) -> None:
    """Checks that a model has `AffinityConfig.prediction_spread`.

    Raises:
        ArgumentError: it has none; `what` needs it.
    """
    if stored is None:
        raise ArgumentError(
            f"{what}: this model has no spread. One with mixed heads of one number per row has (--head auto, encoders "
            "frozen): train again with these, or rank by the prediction alone (--by greedy)."
        )


def mix_spreads(means: Sequence[FloatArray], stds: Sequence[FloatArray | None]) -> FloatArray | None:
    """Combines standard deviations of several models' predictions, (models, n), to that of their mean, (n,).

    Its variance is the mean of their variances plus the variance of their means. None where a model has none.
    """
    known = [std for std in stds if std is not None]
    if len(known) < len(means):
        return None
    return np.sqrt(np.square(known).mean(0) + np.var(means, axis=0))


def score_spread(stds: FloatArray, errors: FloatArray, rows: Any) -> dict[str, Any]:
    """Scores standard deviations by the errors of test rows, (n,) each, label units; `rows` say which labels are exact.

    Returns:
        JSON-able: `expected` shares of rows within so many of them, `observed` ones, and `calibration_error`, their
        mean difference; `std` and `rmse`, root mean squares of quarters of the rows, the narrowest first; `spearman` of
        width and size of the error, None where widths are the same; `notes`, sentences for reports. Only these where no
        label is exact.
    """
    is_exact = find_exact(rows)
    if not is_exact.any():
        return {"notes": ["prediction_std cannot be scored: every label of the test rows is a limit."]}
    stds = stds[is_exact]
    sizes = np.abs(errors[is_exact])
    reaches = ndtri((1 + CENTRAL) / 2)
    observed = (sizes / stds <= reaches[:, None]).mean(1)
    off = float(np.abs(observed - CENTRAL).mean())
    quarters = np.array_split(np.argsort(stds, kind="stable"), min(NUM_PARTS, len(stds)))
    widths, rmse = ([float(np.sqrt(np.square(one[part]).mean())) for part in quarters] for one in (stds, sizes))
    text = (
        f"prediction_std: the share of {len(sizes):,} test rows within so many of it is {share(off)} off, on average. "
    )
    rho = None
    if np.ptp(stds) > FLAT * stds.max():
        from scipy.stats import spearmanr  # here, since it takes 0.15 s that predictions do not need

        rho = float(spearmanr(stds, sizes).statistic)
        ends = f"{format_cell(rmse[0])} in the quarter with the smallest, {format_cell(rmse[-1])} with the largest"
        text += f"RMSE is {ends} (Spearman of both {rho:.2f})."
    else:
        text += "It is the same for all rows: that heads are apart said nothing about errors."
    return {
        "calibration_error": off,
        "expected": CENTRAL.tolist(),
        "observed": observed.tolist(),
        "std": widths,
        "rmse": rmse,
        "spearman": rho,
        "notes": [text],
    }
