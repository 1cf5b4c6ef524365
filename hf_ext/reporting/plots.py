"""Plots as PNG files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ArgumentError, DataError
from .charts.curves import Moments, collect_curves, curve_chart, name_curve
from .charts.look import FONT, PAPER, SOFT, set_title, write_png
from .charts.rows import scatter_chart


def plot_loss(log_history: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], title: str = "Loss") -> Path:
    """Draws training and evaluation loss against the step, with epochs along the top.

    Every `eval_loss` and `eval_{dataset}_loss` gets its own line, its lowest point marked. Entries logged twice for one
    step (a resumed run) count once, the later one. The axis turns logarithmic where the largest loss is over 30 times
    the smallest. Values that are not finite are left out and counted in the corner.

    Args:
        log_history: the Trainer's `state.log_history`.
        path: where the PNG goes; its folder is made.
        title: above the plot.

    Returns:
        `path`.

    Raises:
        ArgumentError: an entry holds a loss but no `step`.
        DataError: no entry holds a loss.
    """
    for number, entry in enumerate(log_history):
        lost = [key for key in entry if name_curve(key, "loss")]
        if lost and "step" not in entry:
            raise ArgumentError(f"log_history[{number}]: {lost[0]!r} without 'step'; pass trainer.state.log_history.")
    curves = collect_curves(log_history, "loss")
    if not any(curve.points for curve in curves):
        raise DataError("log_history holds no finite 'loss' or 'eval_loss': log at least once (logging_steps) first.")
    figure = curve_chart("loss", curves, log_history, Moments()).figure
    set_title(figure.axes[0], title)
    return write_png(figure, path)


def plot_scatter(
    predictions: Any,
    references: Any,
    path: str | os.PathLike[str],
    title: str = "",
    score_text: str = "",
    *,
    axis_label: str = "pKd",
) -> Path:
    """Draws predicted against measured values with the identity line, on equal axes with one range.

    Up to 1,500 rows are dots; more are hexagons coloured by the number of rows, on a logarithmic scale. Rows that are
    not finite are left out and counted in the corner.

    Args:
        predictions, references: (n,) or (n, 1) numbers in one unit.
        path: where the PNG goes; its folder is made.
        title: above the plot.
        score_text: one or a few lines in the upper left corner, for example "Spearman 0.82 [0.81, 0.83]".
        axis_label: what the numbers are.

    Returns:
        `path`.

    Raises:
        DataError: the lengths differ, or no row has two finite values.
    """
    predicted, measured = map(_as_floats, (predictions, references))
    if len(predicted) != len(measured):
        raise DataError(f"{len(predicted)} predictions for {len(measured)} references: one per row is needed.")
    finite = np.isfinite(predicted) & np.isfinite(measured)
    if not finite.any():
        raise DataError(f"none of the {len(measured)} rows has a finite prediction and a finite reference to draw.")
    figure = scatter_chart(measured[finite], predicted[finite], axis_label).figure
    axes, left_out = figure.axes[0], int((~finite).sum())
    set_title(axes, title)
    note = f"n = {finite.sum():,}" + (f" ({left_out:,} not finite, not drawn)" if left_out else "")
    box = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "pad": 2}
    look: dict[str, Any] = {"color": SOFT, "fontsize": FONT, "va": "top", "zorder": 4, "bbox": box, "parse_math": False}
    axes.text(0.03, 0.97, f"{score_text}\n{note}" if score_text else note, transform=axes.transAxes, **look)
    return write_png(figure, path)


def _as_floats(values: Any) -> np.ndarray:
    """An (n,) or (n, 1) list, array or tensor, of any type and on any device, as [n]."""
    return np.asarray(values.tolist() if hasattr(values, "tolist") else values, np.float64).reshape(-1)
