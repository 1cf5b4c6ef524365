"""Charts of a run: each is drawn once with matplotlib's objects, and is a PNG file or SVG text inside a page.

No pyplot, and no setting of matplotlib changes; it is imported with the first chart.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import DataError
from ..files import Facts, Json, StrPath, replacing
from ..labels import Array, LabelKind
from ..text import is_finite, less_is_better

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The page's variables in its light mode; series after Okabe and Ito, told apart with every common colour blindness.
PAPER = "#ffffff"
SOFT = "#545d68"
EDGE = "#d5dbe1"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#b0578d", "#8a6500", "#3a86b0")
VARIABLES = {PAPER: "paper", SOFT: "soft", EDGE: "edge", **{colour: f"c{i}" for i, colour in enumerate(SERIES, 1)}}
FONT = 12  # points; the page shows its text as large
MAX_POINTS = 400  # of a curve; more are averaged, the drawing is not wider
MAX_DOTS = 1500  # more rows are drawn as density: dots would hide each other, and the page would grow
MAX_DRAWN_CLASSES = 20
FEW_CLASSES = 5  # with room for names side by side
LOG_RATIO = 30.0  # from here on an axis of losses is logarithmic
DASHED: Json = {"color": SERIES[1], "linewidth": 1.5, "linestyle": "--", "zorder": 3}
Log = Sequence[Facts]
Curves = dict[str, dict[float, float]]  # name -> step -> value


@dataclass(frozen=True)
class Chart:
    """A figure, what a reader hears who cannot see it, and a caption that says what to look for."""

    figure: Figure
    alt: str
    caption: str

    def svg(self) -> str:
        """Renders for a page: in the page's colours, without a script or a request; ids differ between charts."""
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


def write_png(figure: Figure, path: StrPath) -> Path:
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


def new_figure(across: str, up: str, height: float = 320) -> tuple[Figure, Axes]:
    """Makes a figure of this height in points, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(460 / 72, height / 72), dpi=72, layout="constrained", facecolor=PAPER)
    axes = figure.subplots()
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.grid(color=EDGE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel(plain_name(across, 80), color=SOFT, fontsize=FONT)
    axes.set_ylabel(plain_name(up, 80), color=SOFT, fontsize=FONT)
    axes.tick_params(which="both", length=0, labelcolor=SOFT, labelsize=FONT)
    return figure, axes


def plain_name(text: str, longest: int = 40) -> str:
    """Returns a name of the user's on one line, cut where it would leave no room for the chart."""
    text = " ".join(str(text).split())
    return text if len(text) <= longest else f"{text[: longest - 2]}.."


def _add_legend(figure: Figure) -> None:
    """Adds what has a label, above the axes."""
    look = {"frameon": False, "labelcolor": SOFT, "fontsize": FONT, "borderaxespad": 0.2}
    figure.legend(loc="outside upper left", **look)


# --- learning curves --------------------------------------------------------------------------------------------------


def curve_charts(log: Log, best: Facts) -> list[Chart]:
    """Draws loss, the metric that chose the best model, one more of the task's.

    Those that were never logged are left out.

    Args:
        log: `log_history` of `trainer_state.json`.
        best: of the run's record: the step of the best model, and what chose it.
    """
    chosen_by = next((name for name in best if name != "step"), "loss").removeprefix("eval_").removeprefix("full_")
    charts: list[Chart] = []
    for metric in dict.fromkeys(["loss", chosen_by, "spearman", "accuracy"]):
        curves = collect_curves(log, metric)
        if len(charts) < 3 and any(len(values) > 1 for values in curves.values()):
            charts.append(curve_chart(metric, curves, best.get("step") if metric == chosen_by else None))
    return charts


def collect_curves(log: Log, metric: str) -> Curves:
    """Collects finite values of a metric by step: of training (of the loss only), then of each evaluation.

    Of entries logged twice for one step (a resumed run) the later counts; entries without a step are left out.
    """
    curves: Curves = {"training": {}} if metric == "loss" else {}
    for entry in (entry for entry in log if is_finite(entry.get("step"))):
        for key, value in entry.items():
            name = _name_curve(key, metric)
            if name and is_finite(value):
                curves.setdefault(name, {})[float(entry["step"])] = float(value)
    return {name: values for name, values in curves.items() if values}


def _name_curve(key: str, metric: str) -> str:
    """Names a logged key in a legend; empty where it is another metric."""
    if key == metric == "loss":
        return "training"
    rest = key.removeprefix("eval_")
    if rest == key or not (rest == metric or rest.endswith(f"_{metric}")) or rest == "token_loss" != metric:
        return ""
    dataset = rest.removesuffix(metric).strip("_")
    return {"": "validation", "full": "all rows"}.get(dataset, dataset)


def curve_chart(metric: str, curves: Curves, best: object = None) -> Chart:
    """Draws curves of one metric over steps, the best value of each evaluation named.

    Args:
        curves: at least one, each with a value.
        best: the step of the model that was kept; None: it is not known.
    """
    title = metric.replace("_", " ")
    figure, axes = new_figure("step", title)
    values = [value for curve in curves.values() for value in curve.values()]
    if metric == "loss" and min(values) > 0 and max(values) > LOG_RATIO * min(values):
        axes.set_yscale("log")
    # The first colour is training's, with or without it, so that colours agree between charts.
    for i, (name, curve) in enumerate(curves.items(), 0 if "training" in curves else 1):
        _draw_curve(axes, plain_name(name), curve, metric, SERIES[i % len(SERIES)])
    caption = f"{title.capitalize()} by step."
    if is_finite(best):
        axes.axvline(best, label="best", **DASHED)
        caption += f" The best model, kept by this metric, is that of step {best:,.0f}."
    elif metric == "loss" and len(curves) > 1:
        caption += " Where training goes on falling and validation rises, the model learns rows by heart."
    _add_legend(figure)
    return Chart(figure, f"{title} by step: {', '.join(curves)}", caption)


def _draw_curve(axes: Axes, name: str, curve: Mapping[float, float], metric: str, colour: str) -> None:
    """Draws the line, of at most `MAX_POINTS` means of windows; its name tells where an evaluation was best."""
    ordered = np.array(sorted(curve.items()))
    steps, values = np.array([part.mean(0) for part in np.array_split(ordered, min(len(ordered), MAX_POINTS))]).T
    if name == "training":  # of one batch or one logging window each, so it is noisy: thin, and behind the evaluation
        axes.plot(steps, values, color=colour, label=name, linewidth=1.3, alpha=0.75)
        return
    word, choose = ("lowest", min) if less_is_better(metric) else ("highest", max)
    step, value = choose(curve.items(), key=lambda point: point[1])
    name += f" ({word}: {value:.4g} at step {step:,.0f})"
    axes.plot(steps, values, color=colour, label=name, marker="o", markersize=4)


# --- rows -------------------------------------------------------------------------------------------------------------


def scatter_chart(measured: Array, predicted: Array, label: str) -> Chart | None:
    """Draws predicted against measured values, [n] each, on equal axes with the identity line; None if none are finite.

    Up to 1,500 rows are dots; more are hexagons coloured by the number of rows, on a logarithmic scale.
    """
    finite = np.isfinite(measured) & np.isfinite(predicted)
    measured = measured[finite]
    predicted = predicted[finite]
    left_out = int((~finite).sum())
    if not len(measured):
        return None
    figure, axes = new_figure(f"measured {label}", f"predicted {label}", height=400)
    ends = [min(measured.min(), predicted.min()), max(measured.max(), predicted.max())]
    room = 0.04 * (ends[1] - ends[0]) or 0.5
    axes.set(xlim=(ends[0] - room, ends[1] + room), ylim=(ends[0] - room, ends[1] + room), aspect="equal")
    axes.plot(axes.get_xlim(), axes.get_xlim(), label="prediction = measurement", **DASHED)
    drawn = _draw_rows(axes, measured, predicted)
    _add_legend(figure)
    note = f" {left_out:,} rows without a finite label and prediction are left out." if left_out else ""
    see = "The closer to the dashed line, the better; a flat cloud says little about the label."
    alt = f"Predicted against measured {label}, {len(measured):,} test rows"
    return Chart(figure, alt, f"Prediction against measurement, {drawn}. {see}{note}")


def _draw_rows(axes: Axes, xs: Array, ys: Array) -> str:
    """Draws dots, or hexagons for many rows; returns what is drawn, for the caption."""
    if len(xs) <= MAX_DOTS:
        axes.scatter(xs, ys, s=26, color=SERIES[0], alpha=0.5, linewidths=0, zorder=2)
        return f"{len(xs):,} test row" if len(xs) == 1 else f"{len(xs):,} test rows"
    # In steps of equal ratio, so that the line above stays visible; the palest still shows a single row.
    box = (*axes.get_xlim(), *axes.get_ylim())
    look: dict[str, Any] = {"cmap": _shades(0.22, 6), "edgecolors": "none", "linewidths": 0, "zorder": 2}
    cells = axes.hexbin(xs, ys, gridsize=36, bins="log", mincnt=1, extent=box, **look)
    most = int(np.max(np.asarray(cells.get_array())))
    return f"{len(xs):,} test rows in cells, stronger in colour with more rows (at most {most:,})"


def position_chart(errors: Array, sequences: Sequence[str], wild_type: str) -> Chart | None:
    """Draws the mean absolute error of rows by the position that they substitute in a wild type; None where none does.

    Args:
        errors: (n,) prediction less measurement; rows where it is not finite are left out.
        sequences: n; those of another length than the wild type are left out.
    """
    found: dict[int, list[float]] = {}
    for error, sequence in zip(np.abs(errors), sequences):
        if len(sequence) == len(wild_type) and np.isfinite(error):
            for place, (own, other) in enumerate(zip(wild_type, sequence)):
                if own != other:
                    found.setdefault(place, []).append(error)
    if not found:
        return None
    figure, axes = new_figure("position in the wild type", "mean absolute error")
    places = sorted(found)
    nums = np.array([len(found[place]) for place in places])
    means = [np.mean(found[place]) for place in places]
    shades = _shades(0.25, 6)
    axes.bar(np.array(places) + 1, means, color=shades(nums / nums.max()))
    see = (
        f"Stronger in colour with more rows ({nums.min():,} to {nums.max():,}); a row counts at each of its positions."
    )
    caption = f"Mean absolute error of test rows by the position that they substitute. {see}"
    return Chart(figure, f"Mean absolute error by position, {len(errors):,} test rows", caption)


def is_drawn(kind: LabelKind) -> bool:
    """Says whether there are classes that are few enough for `confusion_chart`."""
    return kind.chart == "confusion" and len(kind.names) <= MAX_DRAWN_CLASSES


def confusion_chart(measured: Sequence[str], predicted: Sequence[str], names: Sequence[str]) -> Chart:
    """Draws how many rows of each class, [n] names, were taken for which: measured down, predicted across."""
    places = {name: i for i, name in enumerate(names)}
    counts = np.zeros((len(names), len(names)), int)
    np.add.at(counts, tuple([places[name] for name in side] for side in (measured, predicted)), 1)
    figure, axes = new_figure("predicted class", "measured class", height=400)
    axes.grid(visible=False)
    ticks = range(len(names)), [plain_name(name, 12) for name in names]
    axes.set_xticks(*ticks, rotation=90 if len(names) > FEW_CLASSES else 0)
    axes.set_yticks(*ticks)
    edges = np.arange(-0.5, len(names))
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.pcolormesh(edges, edges, 0.7 * shares, cmap=_shades(0.0, 16), vmin=0, vmax=1, edgecolors=EDGE, linewidth=0.5)
    axes.invert_yaxis()
    for i, j in np.argwhere(counts):
        size = FONT if len(names) <= FEW_CLASSES else 6
        axes.text(j, i, f"{counts[i, j]:,}", ha="center", va="center", color=SOFT, fontsize=size)
    alt = f"Measured against predicted classes, {len(measured):,} test rows"
    see = "The stronger a cell, the larger its share of the measured class; on the diagonal both agree."
    return Chart(figure, alt, f"Measured classes and what was predicted for them, {len(measured):,} test rows. {see}")


def _shades(palest: float, num: int) -> Any:
    """Returns one hue in steps, as matplotlib takes colours."""
    from matplotlib.colors import ListedColormap, to_rgb

    return ListedColormap([(*to_rgb(SERIES[0]), alpha) for alpha in np.linspace(palest, 1, num)])


# --- files ------------------------------------------------------------------------------------------------------------


def plot_loss(log_history: Log, path: StrPath) -> Path:
    """Draws training and evaluation loss against the step.

    Every `eval_loss` and `eval_{dataset}_loss` gets its own line, its lowest value named. Entries logged twice for one
    step (a resumed run) count once, the later one. The axis turns logarithmic where the largest loss is over 30 times
    the smallest. Values that are not finite are left out.

    Args:
        log_history: the Trainer's `state.log_history`.
        path: where the PNG goes; its folder is made.

    Returns:
        `path`.

    Raises:
        DataError: no entry holds a loss and its `step`.
    """
    curves = collect_curves(log_history, "loss")
    if not curves:
        raise DataError(
            "log_history holds no finite 'loss' or 'eval_loss' with its 'step': log at least once (logging_steps), and "
            "pass trainer.state.log_history."
        )
    return write_png(curve_chart("loss", curves).figure, path)


def plot_scatter(
    predictions: ArrayLike,
    references: ArrayLike,
    path: StrPath,
    title: str = "",
    score_text: str = "",
    *,
    axis_label: str = "pKd",
) -> Path:
    """Draws predicted against measured values; see `scatter_chart`. Rows that are not finite are counted in the corner.

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
    chart = scatter_chart(measured, predicted, axis_label)
    if chart is None:
        raise DataError(f"none of the {len(measured)} rows has a finite prediction and a finite reference to draw.")
    axes = chart.figure.axes[0]
    num = int((np.isfinite(measured) & np.isfinite(predicted)).sum())
    axes.set_title(title, loc="left", color=SOFT, fontweight="bold")
    note = f"n = {num:,}" + (f" ({len(measured) - num:,} not finite, not drawn)" if num < len(measured) else "")
    text = f"{score_text}\n{note}" if score_text else note
    axes.text(0.03, 0.97, text, transform=axes.transAxes, color=SOFT, fontsize=FONT, va="top", zorder=4)
    return write_png(chart.figure, path)
