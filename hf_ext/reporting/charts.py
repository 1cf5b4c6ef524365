"""Charts of a run: each is drawn once with matplotlib's objects, and is a PNG file or SVG text inside a page.

No pyplot, and no setting of matplotlib changes; it is imported with the first chart.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError
from ..files import replacing
from .units import is_finite, less_is_better, tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The page's variables in its light mode; series after Okabe and Ito, told apart with every common colour blindness.
PAPER, SOFT, EDGE = "#ffffff", "#545d68", "#d5dbe1"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#b0578d", "#8a6500", "#3a86b0")
VARIABLES = {PAPER: "paper", SOFT: "soft", EDGE: "edge", **{colour: f"c{i}" for i, colour in enumerate(SERIES, 1)}}
FIRST, SECOND, *_ = SERIES
FONT = 12  # points; the page shows its text as large
MAX_POINTS = 400  # of a curve; more are averaged, the drawing is not wider
MAX_DOTS = 1500  # more rows are drawn as density: dots would hide each other, and the page would grow
MAX_NAMED_GROUPS = 30
NUM_PARTS, MIN_PART_ROWS, MIN_CALIBRATION_ROWS = 10, 10, 50
LOG_RATIO = 30.0  # from here on an axis of losses is logarithmic
FULL = "eval_full_"  # of the logged keys of an evaluation of all rows, where others are of a subset
DASHED: dict[str, Any] = {"color": SECOND, "linewidth": 1.5, "linestyle": "--", "zorder": 3}
# The training loss is one batch's or one logging window's, so it is noisy: thin, and behind the evaluation.
LINES: dict[str, dict[str, Any]] = {
    "train": {"linewidth": 1.3, "alpha": 0.75},
    "eval": {"linewidth": 2.0, "marker": "o", "markersize": 4},
    "full": {"linewidth": 1.5, "linestyle": "--", "marker": "D", "markersize": 6},
}
Log = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Chart:
    """A figure, what a reader hears who cannot see it, and a caption that says what to look for."""

    figure: Figure
    alt: str
    caption: str

    def svg(self) -> str:
        """For a page: in the page's colours, without a script or a request; ids differ between charts."""
        import matplotlib

        buffer = io.StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.alt}):
            _as_written(self.figure).savefig(buffer, format="svg", metadata={"Date": None})
        text = buffer.getvalue()
        # What only names a group is in every figure alike, and nothing refers to it.
        unused = r'<metadata>.*?</metadata>|<!--.*?-->|(?<=<g) id="[^"]*"'
        text = re.sub(unused, "", text[text.index("<svg") :], flags=re.DOTALL)
        for colour, name in VARIABLES.items():
            text = text.replace(colour, f"var(--{name})")
        return text.replace("<svg ", f'<svg role="img" aria-label="{escape(self.alt)}" ', 1)


def write_png(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Writes the figure; the folder is made. Returns `path`."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as draft:
        _as_written(figure).savefig(draft, format="png", dpi=170)
    return target


def _as_written(figure: Figure) -> Figure:
    """Names of the user's are no mathematics."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    return figure


def new_figure(*labels: tuple[str, str], height: float = 320, width: float = 460) -> tuple[Figure, list[Axes]]:
    """A figure of this size in points, and axes side by side: one for each pair of labels, across and up."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained", facecolor=PAPER)
    for axes, (across, up) in zip(figure.subplots(1, len(labels), squeeze=False)[0], labels):
        axes.set_facecolor("none")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(SOFT)
        axes.grid(color=EDGE, linewidth=0.7)
        axes.set_axisbelow(True)
        for axis, label in ((axes.xaxis, across), (axes.yaxis, up)):
            axis.set_major_formatter(tick)
            axis.set_label_text(plain_name(label, 80), color=SOFT, fontsize=FONT)
            axis.set_tick_params(length=0, colors=SOFT, labelsize=FONT)
    return figure, figure.axes


def plain_name(text: str, longest: int = 40) -> str:
    """A name of the user's on one line, cut where it would leave no room for the chart."""
    text = " ".join(str(text).split())
    return text if len(text) <= longest else f"{text[: longest - 2]}.."


def set_title(axes: Axes, text: str) -> None:
    """Above the axes; in a file that stands alone, for in a page the caption says it."""
    axes.set_title(text, loc="left", color=SOFT, fontweight="bold")


def _add_legend(figure: Figure) -> None:
    """What has a label, above the axes, in as many columns as the labels leave room for."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    columns = max(1, 62 // (max(map(len, names)) + 6))
    look = {"frameon": False, "labelcolor": SOFT, "fontsize": FONT, "borderaxespad": 0.2}
    figure.legend(handles, names, loc="outside upper left", ncols=columns, **look)


# --- learning curves --------------------------------------------------------------------------------------------------


@dataclass
class Curve:
    """Values of one logged key by step: of training (`kind` "train"), of evaluation, or of full passes."""

    name: str
    kind: str
    values: dict[float, float] = field(default_factory=dict)

    @property
    def points(self) -> dict[float, float]:
        """Those that are finite."""
        return {step: value for step, value in self.values.items() if is_finite(value)}


def curve_charts(log: Log, results: Mapping[str, Any]) -> list[Chart]:
    """Loss, the metric that chose the best model, one more of the task's; those that were never logged are left out.

    Args:
        log: `log_history` of `trainer_state.json`.
        results: the run's record: what chose the best model, and early stopping.
    """
    parts = [results.get(name) for name in ("best", "early_stopping")]
    best, stopping = (part if isinstance(part, Mapping) else {} for part in parts)
    chosen_by = next((name for name in best if name != "step"), "loss").removeprefix(FULL).removeprefix("eval_")
    charts: list[Chart] = []
    for metric in dict.fromkeys(["loss", chosen_by, "spearman", "accuracy"]):
        curves = collect_curves(log, metric)
        if len(charts) < 3 and any(len(curve.points) > 1 for curve in curves):
            kept = best.get("step") if metric == chosen_by else None
            charts.append(curve_chart(metric, curves, kept, stopping.get("stopped_at_step")))
    return charts


def collect_curves(log: Log, metric: str) -> list[Curve]:
    """Curves of a metric: training first (of the loss only), then evaluations, then full passes.

    Of entries logged twice for one step (a resumed run) the later counts; entries without a step are left out.
    """
    curves: dict[str, Curve] = {}
    has_full = any(key.startswith(FULL) for entry in log for key in entry)
    for entry in (entry for entry in log if is_finite(entry.get("step"))):
        for key, value in entry.items():
            named = _name_curve(key, metric, has_full)
            if named and isinstance(value, (int, float)):
                curves.setdefault(key, Curve(*named)).values[float(entry["step"])] = float(value)
    return sorted(curves.values(), key=lambda curve: ([*LINES].index(curve.kind), curve.name))


def _name_curve(key: str, metric: str, has_full: bool = False) -> tuple[str, str] | None:
    """What a logged key is called in a legend, and its kind; None where it is another metric."""
    if key == metric == "loss":
        return "training", "train"
    kind, rest = ("full", key.removeprefix(FULL)) if key.startswith(FULL) else ("eval", key.removeprefix("eval_"))
    if not key.startswith("eval_") or not (rest == metric or rest.endswith(f"_{metric}")):
        return None
    dataset = rest.removesuffix(metric).rstrip("_")
    if metric == "loss" and dataset == "token":  # token_loss is a metric of its own
        return None
    words = "all rows" if kind == "full" else ("subset" if has_full else "validation")
    return (f"{dataset}, {words}" if dataset else words), kind


def curve_chart(metric: str, curves: Sequence[Curve], best: Any = None, stopped: Any = None) -> Chart:
    """Curves of one metric over steps, the best value of each evaluation named.

    Args:
        curves: with at least one finite point among them.
        best: the step of the model that was kept, marked on full passes where there are any; None: it is not known.
        stopped: the step at which training stopped early, or None.
    """
    drawn = [curve for curve in curves if curve.points]
    values = [value for curve in drawn for value in curve.points.values()]
    title = metric.replace("_", " ")
    figure, (axes,) = new_figure(("step", title))
    is_log = metric == "loss" and min(values) > 0 and max(values) > LOG_RATIO * min(values)
    if is_log:
        axes.set_yscale("log", subs=(2, 5))
        axes.yaxis.set(major_formatter=tick, minor_formatter=tick)
        axes.tick_params(axis="y", which="minor", length=0, labelcolor=SOFT, labelsize=FONT)
    # The first colour is training's, with or without it, so that colours agree between charts.
    for i, curve in enumerate(drawn, 0 if drawn[0].kind == "train" else 1):
        _draw_curve(axes, curve, metric, SERIES[i % len(SERIES)])
    caption = f"{title.capitalize()} by step{', on a logarithmic scale' if is_log else ''}."
    evaluated = sorted((curve for curve in drawn if curve.kind != "train"), key=lambda curve: curve.kind != "full")
    kept = next((curve.points[best] for curve in evaluated if best in curve.points), None)
    if kept is not None:
        look: dict[str, Any] = {"marker": "o", "markersize": 14, "markerfacecolor": "none", "linestyle": ""}
        axes.plot(best, kept, label="best", color=SECOND, **look)
        caption += f" The best model, kept by this metric, is that of step {best:,.0f} ({metric} {kept:.4g})."
    elif metric == "loss" and len(drawn) > 1:
        caption += " Where training goes on falling and validation rises, the model learns rows by heart."
    if is_finite(stopped):
        axes.axvline(stopped, label="stopped early", color=SOFT, linewidth=1.2, linestyle=":")
    if num_left_out := sum(len(curve.values) - len(curve.points) for curve in curves):
        note = f"{num_left_out} values not finite, not drawn"
        axes.text(0.01, 0.02, note, transform=axes.transAxes, color=SOFT, fontsize=FONT)
    _add_legend(figure)
    return Chart(figure, f"{title} by step: {', '.join(curve.name for curve in drawn)}", caption)


def _draw_curve(axes: Axes, curve: Curve, metric: str, colour: str) -> None:
    """The line, of at most `MAX_POINTS` means of windows; its name tells where an evaluation was best."""
    ordered, name = np.array(sorted(curve.points.items())), plain_name(curve.name)
    steps, values = np.array([part.mean(0) for part in np.array_split(ordered, min(len(ordered), MAX_POINTS))]).T
    if curve.kind != "train":
        word, choose = ("lowest", min) if less_is_better(metric) else ("highest", max)
        step, value = choose(curve.points.items(), key=lambda point: point[1])
        name += f" ({word}: {value:.4g} at step {step:,.0f})"
    axes.plot(steps, values, color=colour, label=name, **LINES[curve.kind])


# --- rows -------------------------------------------------------------------------------------------------------------


def prediction_charts(labels: np.ndarray, predictions: np.ndarray, label: str) -> list[Chart]:
    """Scatter, calibration and distributions of the rows where label and prediction are finite.

    Args:
        labels, predictions: [n], of the test split.
        label: what the numbers are.
    """
    finite = np.isfinite(labels) & np.isfinite(predictions)
    measured, predicted, left_out = labels[finite], predictions[finite], int((~finite).sum())
    if not len(measured):
        return []
    note = f" {left_out:,} rows without a finite label and prediction are left out." if left_out else ""
    charts = [scatter_chart(measured, predicted, label, note=note)]
    if len(measured) >= MIN_CALIBRATION_ROWS:
        if len(np.unique(predicted)) > 1:
            charts.append(_calibration_chart(measured, predicted, label))
        see = "Spikes are values that many rows share; predictions much narrower than labels are close to a constant."
        alt = f"Histogram of measured and predicted {label} on the test split"
        both = {"measured": measured, "predicted": predicted}
        charts.append(_histogram(both, label, alt, f"Distribution on the test split. {see}"))
    return charts


def scatter_chart(measured: np.ndarray, predicted: np.ndarray, label: str, *, note: str = "") -> Chart:
    """Predicted against measured values, [n] each and finite, with the identity line, on equal axes with one range."""
    figure, (axes,) = new_figure((f"measured {label}", f"predicted {label}"), height=400)
    _draw_identity(axes, np.concatenate([measured, predicted]), "prediction = measurement")
    axes.set_aspect("equal")
    drawn = _draw_rows(axes, measured, predicted)
    _add_legend(figure)
    see = "The closer to the dashed line, the better; a flat cloud says little about the label."
    alt = f"Predicted against measured {label}, {len(measured):,} test rows"
    return Chart(figure, alt, f"Prediction against measurement, {drawn}. {see}{note}")


def _draw_identity(axes: Axes, values: np.ndarray, name: str) -> None:
    """One range for both axes, and where they are equal."""
    low, high = float(values.min()), float(values.max())
    room = 0.04 * (high - low) or 0.5
    axes.set(xlim=(low - room, high + room), ylim=(low - room, high + room))
    axes.plot(axes.get_xlim(), axes.get_xlim(), label=name, **DASHED)


def _draw_rows(axes: Axes, xs: np.ndarray, ys: np.ndarray) -> str:
    """Dots, or hexagons for many rows; returns what is drawn, for the caption."""
    if len(xs) <= MAX_DOTS:
        axes.scatter(xs, ys, s=26, color=FIRST, alpha=0.5, linewidths=0, zorder=2)
        return f"{len(xs):,} test row{'s' * (len(xs) > 1)}"
    from matplotlib.colors import ListedColormap, to_rgb

    # One hue in steps of equal ratio, so that the line above stays visible; the palest still shows a single row.
    shades = ListedColormap([(*to_rgb(FIRST), alpha) for alpha in np.linspace(0.22, 1, 6)])
    box = (*axes.get_xlim(), *axes.get_ylim())
    look: dict[str, Any] = {"cmap": shades, "edgecolors": "none", "linewidths": 0, "zorder": 2}
    cells = axes.hexbin(xs, ys, gridsize=36, bins="log", mincnt=1, extent=box, **look)
    most = int(np.max(np.asarray(cells.get_array())))
    return f"{len(xs):,} test rows in cells, stronger in colour with more rows (at most {most:,})"


def _calibration_chart(measured: np.ndarray, predicted: np.ndarray, label: str) -> Chart:
    """Means of up to ten parts of similar size, by prediction; equal predictions stay together."""
    num_parts = min(NUM_PARTS, len(predicted) // MIN_PART_ROWS)
    edges = np.unique(np.quantile(predicted, np.arange(1, num_parts) / num_parts))
    part_of_row = np.searchsorted(edges, predicted, side="right")
    parts = [part_of_row == number for number in np.unique(part_of_row)]
    centres, means = (np.array([values[part].mean() for part in parts]) for values in (predicted, measured))
    lows, highs = np.array([np.quantile(measured[part], (0.25, 0.75)) for part in parts]).T
    figure, (axes,) = new_figure((f"mean predicted {label}", f"measured {label}"))
    _draw_identity(axes, np.concatenate([centres, lows, highs]), "calibrated")
    axes.vlines(centres, lows, highs, label="middle half of the rows", color=FIRST, linewidth=7, alpha=0.35)
    axes.plot(centres, means, label="mean", color=FIRST, linewidth=2, marker="o", markersize=7)
    _add_legend(figure)
    see = (
        "On the dashed line they are right on average; flatter, they go too far from the mean; steeper, not far enough."
    )
    alt = f"Mean measured {label} in {len(parts)} parts of the rows, by prediction"
    return Chart(figure, alt, f"Calibration: rows in {len(parts)} parts of similar size by prediction. {see}")


def _histogram(columns: Mapping[str, np.ndarray], label: str, alt: str, caption: str) -> Chart:
    """Outlines of the counts of each column."""
    figure, (axes,) = new_figure((label, "rows"))
    together = np.concatenate([*columns.values()])
    edges = np.histogram_bin_edges(together, int(np.clip(2 * np.sqrt(len(together) / len(columns)), 10, 40)))
    for (name, values), colour in zip(columns.items(), SERIES):
        axes.stairs(np.histogram(values, edges)[0], edges, label=plain_name(name), color=colour, linewidth=2)
    _add_legend(figure)
    return Chart(figure, alt, caption)


def length_chart(columns: Mapping[str, Sequence[str]], names: Sequence[str]) -> Chart | None:
    """Histogram of residues per sequence column, over the test rows; None without columns or if no length varies."""
    lengths = {name: np.array([*map(len, columns[name])]) for name in names if name in columns}
    if all(values.min() == values.max() for values in lengths.values()):
        return None
    ranges = "; ".join(f"{name}: {values.min():,} to {values.max():,}" for name, values in lengths.items())
    alt = f"Histogram of sequence lengths on the test split. {ranges} residues"
    return _histogram(lengths, "residues", alt, f"Residues per sequence on the test split ({ranges}).")


def group_chart(groups: Mapping[str, Mapping[str, Any]], metric: str) -> Chart | None:
    """Values per group: by name for up to 30 groups, a histogram of more; None without any value."""
    known = {name: group for name, group in groups.items() if is_finite(group.get("value")) and group.get("n")}
    if not known:
        return None
    ordered = sorted(known, key=lambda name: known[name]["value"])
    values = np.array([known[name]["value"] for name in ordered])
    within, alt = f"{metric} within the group", f"{metric} of {len(ordered):,} groups"
    if len(ordered) > MAX_NAMED_GROUPS:
        return _histogram({"groups": values}, within, alt, f"{alt}. Small groups scatter by chance.")
    figure, (axes,) = new_figure((within, ""), height=64 + 20 * len(ordered))
    axes.axvline(0, **DASHED)
    axes.plot(values, range(len(ordered)), "o", color=FIRST, markersize=8)
    axes.set_yticks(range(len(ordered)), [f"{plain_name(name, 18)} ({known[name]['n']:,})" for name in ordered])
    return Chart(figure, alt, f"{metric} per group, with its number of rows. Small groups scatter by chance.")


# --- files ------------------------------------------------------------------------------------------------------------


def plot_loss(log_history: Log, path: str | os.PathLike[str], title: str = "Loss") -> Path:
    """Draws training and evaluation loss against the step.

    Every `eval_loss` and `eval_{dataset}_loss` gets its own line, its lowest value named. Entries logged twice for one
    step (a resumed run) count once, the later one. The axis turns logarithmic where the largest loss is over 30 times
    the smallest. Values that are not finite are left out and counted in the corner.

    Args:
        log_history: the Trainer's `state.log_history`.
        path: where the PNG goes; its folder is made.
        title: above the plot.

    Returns:
        `path`.

    Raises:
        DataError: no entry holds a loss and its `step`.
    """
    curves = collect_curves(log_history, "loss")
    if not any(curve.points for curve in curves):
        raise DataError(
            "log_history holds no finite 'loss' or 'eval_loss' with its 'step': log at least once (logging_steps), and "
            "pass trainer.state.log_history."
        )
    figure = curve_chart("loss", curves).figure
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
    predicted, measured = (
        np.asarray(values.tolist() if hasattr(values, "tolist") else values, np.float64).reshape(-1)
        for values in (predictions, references)
    )
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
    text = f"{score_text}\n{note}" if score_text else note
    axes.text(0.03, 0.97, text, transform=axes.transAxes, color=SOFT, fontsize=FONT, va="top", zorder=4, bbox=box)
    return write_png(figure, path)
