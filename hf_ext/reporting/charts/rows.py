"""Charts of rows: predictions against labels, residuals, calibration, distributions, lengths, groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..units import is_finite, tick
from .look import MAX_DOTS, SERIES, Chart, add_legend, new_figure, plain_name, set_log, set_range, style_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIN_CALIBRATION_ROWS = 50
NUM_PARTS = 10
MIN_PART_ROWS = 10
MAX_NAMED_GROUPS = 30
MAX_LENGTH_COLUMNS = 5
FIRST, SECOND, THIRD, *_ = SERIES
DASHED: dict[str, Any] = {"color": SECOND, "linewidth": 1.5, "linestyle": "--", "zorder": 3}


def prediction_charts(labels: np.ndarray, predictions: np.ndarray, label: str) -> list[Chart]:
    """Scatter, residuals, calibration and distributions of the rows where label and prediction are finite.

    Args:
        labels, predictions: [n], of the test split.
        label: what the numbers are.
    """
    finite = np.isfinite(labels) & np.isfinite(predictions)
    measured, predicted, left_out = labels[finite], predictions[finite], int((~finite).sum())
    if not len(measured):
        return []
    note = f" {left_out:,} rows without a finite label and prediction are left out." if left_out else ""
    charts = [scatter_chart(measured, predicted, label, note=note), _residual_chart(measured, predicted, label)]
    if len(measured) >= MIN_CALIBRATION_ROWS:
        if len(np.unique(predicted)) > 1:
            charts.append(_calibration_chart(measured, predicted, label))
        charts.append(_distribution_chart(measured, predicted, label))
    return charts


def scatter_chart(measured: np.ndarray, predicted: np.ndarray, label: str, *, note: str = "") -> Chart:
    """Predicted against measured values, [n] each and finite, with the identity line, on equal axes with one range."""
    figure, (axes,) = new_figure((f"measured {label}", f"predicted {label}"), height=400)
    identity = _draw_identity(axes, np.concatenate([measured, predicted]))
    axes.set_aspect("equal")
    drawn = _draw_rows(axes, measured, predicted)
    add_legend(figure, [identity], ["prediction = measurement"])
    see = "The closer to the dashed line, the better; a flat cloud says little about the label."
    alt = f"Predicted against measured {label}, {len(measured):,} test rows"
    return Chart(figure, alt, f"Prediction against measurement, {drawn}. {see}{note}")


def _residual_chart(measured: np.ndarray, predicted: np.ndarray, label: str) -> Chart:
    residuals = measured - predicted
    figure, (axes,) = new_figure((f"predicted {label}", "measured - predicted"), height=400)
    set_range(axes, predicted, [*residuals, 0.0])
    handles = {"no error": axes.plot(axes.get_xlim(), [0, 0], **DASHED)[0]}
    parts = _equal_parts(predicted)
    if len(parts) > 1:
        middles = [np.median(predicted[part]) for part in parts], [np.median(residuals[part]) for part in parts]
        line = axes.plot(*middles, color=THIRD, linewidth=2, marker="o", markersize=6, zorder=3)
        handles[f"median of 1/{len(parts)} of the rows"] = line[0]
    drawn = _draw_rows(axes, predicted, residuals)
    add_legend(figure, [*handles.values()], [*handles])
    see = "A slope or a bend in the medians is an error that the model makes in one direction."
    alt = f"Residuals against predicted {label}, {len(measured):,} test rows"
    return Chart(figure, alt, f"Residuals against prediction, {drawn}. {see}")


def _calibration_chart(measured: np.ndarray, predicted: np.ndarray, label: str) -> Chart:
    parts = _equal_parts(predicted)
    centres, means = (np.array([values[part].mean() for part in parts]) for values in (predicted, measured))
    lows, highs = np.array([np.quantile(measured[part], (0.25, 0.75)) for part in parts]).T
    figure, (axes,) = new_figure((f"mean predicted {label}", f"measured {label}"))
    identity = _draw_identity(axes, np.concatenate([centres, lows, highs]))
    spans = axes.vlines(centres, lows, highs, color=FIRST, linewidth=7, alpha=0.35)
    mean = axes.plot(centres, means, color=FIRST, linewidth=2, marker="o", markersize=7)[0]
    add_legend(figure, [mean, spans, identity], ["mean", "middle half of the rows", "calibrated"])
    see = (
        "On the dashed line they are right on average; flatter, they go too far from the mean; steeper, not far enough."
    )
    alt = f"Mean measured {label} in {len(parts)} parts of the rows, by prediction"
    return Chart(figure, alt, f"Calibration: rows in {len(parts)} parts of similar size by prediction. {see}")


def _distribution_chart(measured: np.ndarray, predicted: np.ndarray, label: str) -> Chart:
    figure, (axes,) = new_figure((label, "rows"))
    set_range(axes, np.concatenate([measured, predicted]), 1, margin=0.02)
    num_bins = int(np.clip(2 * np.sqrt(len(measured)), 10, 40))
    edges = np.linspace(*axes.get_xlim(), num_bins + 1)
    counts = [np.histogram(values, edges)[0] for values in (measured, predicted)]
    axes.set_ylim(0, 1.05 * np.max(counts))
    bars = axes.stairs(counts[0], edges, fill=True, color=FIRST, linewidth=0, alpha=0.45)
    outline = axes.stairs(counts[1], edges, color=SECOND, linewidth=2)
    add_legend(figure, [bars, outline], ["measured", "predicted"])
    see = "Spikes are values that many rows share; predictions much narrower than labels are close to a constant."
    alt = f"Histogram of measured and predicted {label} on the test split"
    return Chart(figure, alt, f"Distribution on the test split. {see}")


def length_chart(columns: Mapping[str, Sequence[str]], names: Sequence[str]) -> Chart | None:
    """Histogram of residues per sequence column, over the test rows; None without columns or if no length varies."""
    shown = [name for name in names if name in columns][:MAX_LENGTH_COLUMNS]
    lengths = {name: np.array([*map(len, columns[name])]) for name in shown}
    if all(values.min() == values.max() for values in lengths.values()):
        return None
    figure, (axes,) = new_figure(("residues", "rows"))
    set_range(axes, np.concatenate([*lengths.values()]), 1, margin=0.02)
    edges = np.linspace(*axes.get_xlim(), 41)
    counts = [np.histogram(values, edges)[0] for values in lengths.values()]
    axes.set_ylim(0, 1.05 * np.max(counts))
    lines = [axes.stairs(values, edges, color=colour, linewidth=2) for values, colour in zip(counts, SERIES)]
    add_legend(figure, lines, [plain_name(name) for name in lengths])
    ranges = "; ".join(f"{name}: {values.min():,} to {values.max():,}" for name, values in lengths.items())
    alt = f"Histogram of sequence lengths on the test split. {ranges} residues"
    return Chart(figure, alt, f"Residues per sequence on the test split ({ranges}).")


def group_chart(groups: Mapping[str, Mapping[str, Any]], metric: str) -> Chart | None:
    """Values per group: by name for up to 30 groups, against the number of rows for more; None without any value."""
    known = {name: group for name, group in groups.items() if is_finite(group.get("value")) and group.get("n")}
    if not known:
        return None
    ordered = sorted(known, key=lambda name: known[name]["value"])
    values, sizes = [known[name]["value"] for name in ordered], [known[name]["n"] for name in ordered]
    within = f"{metric} within the group"
    if len(ordered) <= MAX_NAMED_GROUPS:
        figure, (axes,) = new_figure((within, ""), height=64 + 20 * len(ordered))
        set_range(axes, [*values, 0.0], [-0.3, len(ordered) - 0.7])
        names = [f"{plain_name(name, 18)} ({size:,})" for name, size in zip(ordered, sizes)]
        axes.set_yticks(range(len(names)), names, parse_math=False)
        axes.plot(values, range(len(names)), "o", color=FIRST, markersize=8)
        caption = f"{metric} per group, with its number of rows. Small groups scatter by chance."
    else:
        figure, (axes,) = new_figure(("rows in the group", within))
        set_range(axes, sizes, [*values, 0.0])
        set_log(axes, "x", sizes)
        axes.plot(axes.get_xlim(), [0, 0], **DASHED)
        axes.plot(sizes, values, "o", color=FIRST, markersize=7, alpha=0.5, markeredgewidth=0)
        caption = f"{metric} of {len(ordered):,} groups by size. Small groups scatter by chance, to the left."
    return Chart(figure, f"{metric} of {len(ordered):,} groups", caption)


def _draw_identity(axes: Axes, values: np.ndarray) -> Any:
    """One range for both axes, and where they are equal."""
    set_range(axes, values, values)
    return axes.plot(axes.get_xlim(), axes.get_xlim(), **DASHED)[0]


def _draw_rows(axes: Axes, xs: np.ndarray, ys: np.ndarray) -> str:
    """Dots, or hexagons for many rows; returns what is drawn, for the caption."""
    if len(xs) <= MAX_DOTS:
        axes.scatter(xs, ys, s=26, color=FIRST, alpha=0.5, linewidths=0, zorder=2)
        return f"{len(xs):,} test row{'s' * (len(xs) > 1)}"
    from matplotlib.colors import ListedColormap, to_rgb

    # One hue in steps of equal ratio, so that the lines above stay visible; the palest still shows a single row.
    shades = ListedColormap([(*to_rgb(FIRST), alpha) for alpha in np.linspace(0.22, 1, 6)])
    box = (*axes.get_xlim(), *axes.get_ylim())
    look: dict[str, Any] = {"cmap": shades, "edgecolors": "none", "linewidths": 0, "zorder": 2}
    cells = axes.hexbin(xs, ys, gridsize=36, bins="log", mincnt=1, extent=box, **look)
    bar = axes.figure.colorbar(cells, ax=axes, shrink=0.75, format=tick)
    style_axis(bar.ax.yaxis, "rows")
    bar.minorticks_off()
    bar.outline.set_visible(False)
    most = int(np.max(np.asarray(cells.get_array())))
    return f"{len(xs):,} test rows in cells, stronger in colour with more rows (at most {most:,})"


def _equal_parts(predicted: np.ndarray) -> list[np.ndarray]:
    """Masks of up to ten parts of similar size, by prediction; equal predictions stay together, empty parts go."""
    if len(predicted) < MIN_CALIBRATION_ROWS:
        return []
    num_parts = min(NUM_PARTS, len(predicted) // MIN_PART_ROWS)
    edges = np.unique(np.quantile(predicted, np.arange(1, num_parts) / num_parts))
    part = np.searchsorted(edges, predicted, side="right")
    return [part == number for number in np.unique(part)]
