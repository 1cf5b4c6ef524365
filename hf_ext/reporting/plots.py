"""Plots as PNG files, drawn through matplotlib's objects: no pyplot, no backend switch, nothing global is changed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, DataError
from ..whole_files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart with every common colour blindness; yellow is left out, it vanishes on white.
BLUE, *EVAL_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#555555"
MAX_SCATTER_POINTS = 5000  # above this dots cover each other and density is drawn instead
LOG_SCALE_RATIO = 30.0
DPI = 150

Series = list[tuple[float, float]]


def plot_loss(log_history: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], title: str = "Loss") -> Path:
    """Draw training and evaluation loss against the step, with epochs along the top.

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
        DataError: no entry holds a loss.
    """
    series = collect_losses(log_history)
    drawn = {name: [point for point in points if math.isfinite(point[1])] for name, points in series.items()}
    if not any(drawn.values()):
        raise DataError("log_history holds no finite 'loss' or 'eval_loss': log at least once (logging_steps) first.")
    figure, axes = _new_figure(7.5, 4.5)
    colours = iter(EVAL_COLOURS * len(drawn))
    for name, points in drawn.items():
        if points:
            _draw_loss(axes, name, points, BLUE if name == "train" else next(colours))
    values = [value for points in drawn.values() for _, value in points]
    if min(values) > 0 and max(values) > LOG_SCALE_RATIO * min(values):
        axes.set_yscale("log")
    _add_epoch_axis(axes, log_history)
    num_left_out = sum(len(points) for points in series.values()) - len(values)
    if num_left_out:
        axes.text(0.01, 0.02, f"{num_left_out} values not finite, not drawn", transform=axes.transAxes, color=GREY)
    axes.set(xlabel="step", ylabel="loss")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.legend(frameon=False)
    return _save(figure, path)


def plot_scatter(
    predictions: Any,
    references: Any,
    path: str | os.PathLike[str],
    title: str = "",
    score_text: str = "",
    *,
    axis_label: str = "pKd",
) -> Path:
    """Draw predicted against measured values with the identity line, on equal axes with one range.

    Up to 5,000 rows are dots; more are hexagons coloured by the number of rows, on a logarithmic scale. Rows that are
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
    predicted, measured = _as_floats(predictions), _as_floats(references)
    if len(predicted) != len(measured):
        raise DataError(f"{len(predicted)} predictions for {len(measured)} references: one per row is needed.")
    rows = [pair for pair in zip(measured, predicted) if math.isfinite(pair[0]) and math.isfinite(pair[1])]
    if not rows:
        raise DataError(f"none of the {len(measured)} rows has a finite prediction and a finite reference to draw.")
    figure, axes = _new_figure(5.8 if len(rows) > MAX_SCATTER_POINTS else 5.2, 5.2)
    limits = _common_limits(rows)
    _draw_rows(figure, axes, rows, limits)
    axes.plot(limits, limits, color=EVAL_COLOURS[0], linewidth=1.2, linestyle="--", zorder=3)
    axes.set(xlim=limits, ylim=limits, aspect="equal")
    axes.set(xlabel=f"measured {axis_label}", ylabel=f"predicted {axis_label}")
    axes.set_title(title, loc="left", fontweight="bold")
    left_out = len(measured) - len(rows)
    note = f"n = {len(rows):,}" + (f" ({left_out:,} not finite, not drawn)" if left_out else "")
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2}
    text = f"{score_text}\n{note}" if score_text else note
    axes.text(0.03, 0.97, text, transform=axes.transAxes, va="top", zorder=4, bbox=box)
    return _save(figure, path)


def collect_losses(log_history: Sequence[Mapping[str, Any]]) -> dict[str, Series]:
    """Return the loss curves of a Trainer's log: name -> [(step, loss)], by step, one point per step.

    Raises `ArgumentError` where an entry holds a loss but no `step`.
    """
    curves: dict[str, dict[float, float]] = {}
    for number, entry in enumerate(log_history):
        for key, value in entry.items():
            name = _curve_name(key)
            if name is None:
                continue
            if "step" not in entry:
                raise ArgumentError(f"log_history[{number}]: {key!r} without 'step'; pass trainer.state.log_history.")
            curves.setdefault(name, {})[float(entry["step"])] = float(value)
    ordered = sorted(curves, key=lambda name: (name != "train", name))
    return {name: sorted(curves[name].items()) for name in ordered}


def _curve_name(key: str) -> str | None:
    if key == "loss":
        return "train"
    if key.startswith("eval_") and key.endswith("loss"):
        return key.removesuffix("loss").rstrip("_").replace("eval_", "eval ", 1)
    return None


def _draw_loss(axes: Axes, name: str, points: Series, colour: str) -> None:
    steps, values = zip(*points)
    is_train = name == "train"
    step, lowest = min(points, key=lambda point: point[1])
    # The training loss is one batch's or one logging window's, so it is noisy: thin, and behind the evaluation.
    axes.plot(
        steps,
        values,
        color=colour,
        linewidth=1.2 if is_train else 1.8,
        alpha=0.75 if is_train else 1.0,
        marker="." if len(points) == 1 or (not is_train and len(points) <= 30) else None,
        label=name if is_train else f"{name} (lowest: {lowest:.4g} at step {step:,.0f})",
    )
    if not is_train and len(points) > 1:
        axes.plot(step, lowest, marker="o", markersize=7, color=colour, markerfacecolor="white", markeredgewidth=1.8)


def _add_epoch_axis(axes: Axes, log_history: Sequence[Mapping[str, Any]]) -> None:
    """Put epochs along the top, by the last entry's epochs per step; without one there is nothing to put."""
    known = [entry for entry in log_history if entry.get("step") and entry.get("epoch")]
    if known:
        rate = float(known[-1]["epoch"]) / float(known[-1]["step"])
        as_epochs: Any = (lambda step: step * rate, lambda epoch: epoch / rate)
        top = axes.secondary_xaxis("top", functions=as_epochs)
        top.set_xlabel("epoch", color=GREY)
        top.tick_params(colors=GREY)


def _draw_rows(figure: Figure, axes: Axes, rows: Series, limits: tuple[float, float]) -> None:
    measured, predicted = zip(*rows)
    if len(rows) <= MAX_SCATTER_POINTS:
        alpha = 0.6 if len(rows) <= 500 else 0.3
        axes.scatter(measured, predicted, s=14, color=BLUE, alpha=alpha, linewidths=0, zorder=2)
        return
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    # One hue, light to dark, so that the identity line stays visible; the palest part is cut off for single rows.
    blues = ListedColormap(colormaps["Blues"]([0.25 + 0.75 * step / 255 for step in range(256)]))
    box = (*limits, *limits)
    cells = axes.hexbin(
        measured, predicted, gridsize=60, bins="log", cmap=blues, mincnt=1, extent=box, linewidths=0.1, zorder=2
    )
    figure.colorbar(cells, ax=axes, label="rows", shrink=0.75)


def _common_limits(rows: Series) -> tuple[float, float]:
    low, high = min(min(row) for row in rows), max(max(row) for row in rows)
    margin = 0.04 * (high - low) or 0.5
    return low - margin, high + margin


def _as_floats(values: Any) -> list[float]:
    """Flatten an (n,) or (n, 1) list, array or tensor into floats."""
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    return [float(value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value) for value in listed]


def _new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as draft:
        figure.savefig(draft, format="png")
    return target
