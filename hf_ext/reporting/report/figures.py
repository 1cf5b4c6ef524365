"""Figures of predictions: against labels, residuals, calibration, distributions, lengths, groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .blocks import Figure
from .run_files import Predictions
from .svg import Plot, Scale
from .values import is_finite

MAX_DOTS = 1500  # more rows are drawn as hexagons: dots would hide each other, and the page would grow
MIN_CALIBRATION_ROWS = 50
NUM_PARTS = 10
MIN_PART_ROWS = 10
MAX_NAMED_GROUPS = 30
MAX_LENGTH_COLUMNS = 5


def prediction_figures(predictions: Predictions, label: str, png: str | None = None) -> list[Figure]:
    """Scatter, residuals, calibration and distributions of the rows where label and prediction are finite.

    Args:
        predictions: of the test split.
        label: what the numbers are.
        png: a file beside the report that shows the scatter, or None.
    """
    finite = np.isfinite(predictions.labels) & np.isfinite(predictions.predictions)
    measured, predicted = predictions.labels[finite], predictions.predictions[finite]
    if not len(measured):
        return []
    left_out = int((~finite).sum())
    note = f" {left_out:,} rows without a finite label and prediction are left out." if left_out else ""
    figures = [_scatter(measured, predicted, label, png, note), _residuals(measured, predicted, label)]
    if len(measured) >= MIN_CALIBRATION_ROWS and len(np.unique(predicted)) > 1:
        figures.append(_calibration(measured, predicted, label))
    if len(measured) >= MIN_CALIBRATION_ROWS:
        figures.append(_distributions(measured, predicted, label))
    return figures


def _scatter(measured: np.ndarray, predicted: np.ndarray, label: str, png: str | None, note: str) -> Figure:
    scale = Scale.around(np.concatenate([measured, predicted]))
    plot = Plot(scale, scale, f"measured {label}", f"predicted {label}", height=380)
    plot.name("prediction = measurement", 2, "dash")
    drawn = _draw_rows(plot, measured, predicted)
    plot.line([scale.low, scale.high], [scale.low, scale.high], 2, "dash")
    alt = f"Predicted against measured {label}, {len(measured):,} test rows"
    see = "The closer to the dashed line, the better; a flat cloud says little about the label."
    return Figure(plot.render(alt), f"Prediction against measurement, {drawn}. {see}{note}", png)


def _residuals(measured: np.ndarray, predicted: np.ndarray, label: str) -> Figure:
    residuals = measured - predicted
    plot = Plot(
        Scale.around(predicted),
        Scale.around([*residuals, 0.0]),
        f"predicted {label}",
        "measured - predicted",
        height=380,
    )
    plot.name("no error", 2, "dash")
    parts = _equal_parts(predicted)
    if len(parts) > 1:
        plot.name(f"median of 1/{len(parts)} of the rows", 3, "dot")
    drawn = _draw_rows(plot, predicted, residuals)
    plot.line([plot.x.low, plot.x.high], [0, 0], 2, "dash")
    if len(parts) > 1:
        middles = [float(np.median(predicted[part])) for part in parts], [float(np.median(residuals[p])) for p in parts]
        plot.line(*middles, 3)
        plot.dots(*middles, 3)
    alt = f"Residuals against predicted {label}, {len(measured):,} test rows"
    see = "A slope or a bend in the medians is an error that the model makes in one direction."
    return Figure(plot.render(alt), f"Residuals against prediction, {drawn}. {see}")


def _calibration(measured: np.ndarray, predicted: np.ndarray, label: str) -> Figure:
    parts = _equal_parts(predicted)
    centres = np.array([predicted[part].mean() for part in parts])
    means = np.array([measured[part].mean() for part in parts])
    lows, highs = np.array([np.quantile(measured[part], (0.25, 0.75)) for part in parts]).T
    scale = Scale.around(np.concatenate([centres, lows, highs]))
    plot = Plot(scale, scale, f"mean predicted {label}", f"measured {label}")
    plot.name("mean", 1, "dot")
    plot.name("middle half of the rows", 1, "bar")
    plot.name("calibrated", 2, "dash")
    plot.line([scale.low, scale.high], [scale.low, scale.high], 2, "dash")
    plot.spans(centres, lows, highs, 1)
    plot.line(centres, means, 1)
    plot.dots(centres, means, 1, size=4)
    alt = f"Mean measured {label} in {len(parts)} parts of the rows, by prediction"
    see = (
        "On the dashed line they are right on average; flatter, they go too far from the mean; steeper, not far enough."
    )
    return Figure(plot.render(alt), f"Calibration: rows in {len(parts)} parts of similar size by prediction. {see}")


def _distributions(measured: np.ndarray, predicted: np.ndarray, label: str) -> Figure:
    both = np.concatenate([measured, predicted])
    scale = Scale.around(both, margin=0.02)
    num_bins = int(np.clip(2 * np.sqrt(len(measured)), 10, 40))
    edges = np.linspace(scale.low, scale.high, num_bins + 1)
    labels, outline = np.histogram(measured, edges)[0], np.histogram(predicted, edges)[0]
    plot = Plot(scale, Scale(0, 1.05 * max(labels.max(), outline.max())), label, "rows")
    plot.name("measured", 1, "bar")
    plot.name("predicted", 2, "line")
    plot.bars(edges, labels, 1)
    plot.line(np.repeat(edges, 2)[1:-1], np.repeat(outline, 2), 2)
    alt = f"Histogram of measured and predicted {label} on the test split"
    see = "Spikes are values that many rows share; predictions much narrower than labels are close to a constant."
    return Figure(plot.render(alt), f"Distribution on the test split. {see}")


def length_figure(predictions: Predictions, columns: Sequence[str]) -> Figure | None:
    """Histogram of residues per sequence column, over the test rows; None without columns or if no length varies."""
    shown = [name for name in columns if name in predictions.columns][:MAX_LENGTH_COLUMNS]
    lengths = {name: np.array([*map(len, predictions.columns[name])]) for name in shown}
    if all(values.min() == values.max() for values in lengths.values()):
        return None
    scale = Scale.around(np.concatenate([*lengths.values()]), margin=0.02)
    edges = np.linspace(scale.low, scale.high, 41)
    counts = {name: np.histogram(values, edges)[0] for name, values in lengths.items()}
    top = max(int(values.max()) for values in counts.values())
    plot = Plot(scale, Scale(0, 1.05 * top), "residues", "rows")
    for series, name in enumerate(counts, 1):
        plot.name(name, series, "line")
    for series, values in enumerate(counts.values(), 1):
        plot.line(np.repeat(edges, 2)[1:-1], np.repeat(values, 2), series)
    ranges = "; ".join(f"{name}: {values.min():,} to {values.max():,}" for name, values in lengths.items())
    alt = f"Histogram of sequence lengths on the test split. {ranges} residues"
    return Figure(plot.render(alt), f"Residues per sequence on the test split ({ranges}).")


def group_figure(groups: Mapping[str, Mapping[str, Any]], metric: str) -> Figure | None:
    """Values per group: by name for up to 30 groups, against the number of rows for more; None without any value."""
    known = {name: group for name, group in groups.items() if is_finite(group.get("value")) and group.get("n")}
    if not known:
        return None
    ordered = sorted(known, key=lambda name: known[name]["value"])
    values = [known[name]["value"] for name in ordered]
    span = Scale.around([*values, 0.0])
    if len(ordered) <= MAX_NAMED_GROUPS:
        names = [f"{_cut(name)} ({known[name]['n']:,})" for name in ordered]
        height = 64 + 20 * len(ordered)
        plot = Plot(span, Scale(-0.6, len(names) - 0.4), f"{metric} within the group", "", height=height, y_names=names)
        plot.dots(values, range(len(names)), 1, size=4.5)
        caption = f"{metric} per group, with its number of rows. Small groups scatter by chance."
    else:
        sizes = [known[name]["n"] for name in ordered]
        plot = Plot(Scale.around(sizes, log=True), span, "rows in the group", f"{metric} within the group")
        plot.line([plot.x.low, plot.x.high], [0, 0], 2, "dash")
        plot.dots(sizes, values, 1, "faint", size=4)
        caption = f"{metric} of {len(ordered):,} groups by size. Small groups scatter by chance, to the left."
    return Figure(plot.render(f"{metric} of {len(ordered):,} groups"), caption)


def _draw_rows(plot: Plot, xs: np.ndarray, ys: np.ndarray) -> str:
    """Dots, or hexagons for many rows; returns what is drawn, for the caption."""
    if len(xs) > MAX_DOTS:
        most = plot.hexagons(xs, ys, 1)
        return f"{len(xs):,} test rows in cells, stronger in colour with more rows (at most {most:,})"
    plot.dots(xs, ys, 1, "faint")
    return f"{len(xs):,} test row{'s' * (len(xs) > 1)}"


def _equal_parts(predicted: np.ndarray) -> list[np.ndarray]:
    """Masks of up to ten parts of similar size, by prediction; equal predictions stay together, empty parts go."""
    if len(predicted) < MIN_CALIBRATION_ROWS:
        return []
    num_parts = min(NUM_PARTS, len(predicted) // MIN_PART_ROWS)
    edges = np.unique(np.quantile(predicted, np.arange(1, num_parts) / num_parts))
    part = np.searchsorted(edges, predicted, side="right")
    return [part == number for number in np.unique(part)]


def _cut(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:16]}.."
