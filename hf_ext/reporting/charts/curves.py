"""Learning curves from the Trainer's log: training, evaluation of a subset, evaluation of all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..units import is_finite, less_is_better, tick
from .look import (
    FONT,
    LOG_RATIO,
    SERIES,
    SOFT,
    Chart,
    add_legend,
    new_figure,
    plain_name,
    set_log,
    set_range,
    style_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 400  # per curve; more are averaged, the drawing is not wider
FULL = "eval_full_"
Log = Sequence[Mapping[str, Any]]
# The training loss is one batch's or one logging window's, so it is noisy: thin, and behind the evaluation.
_LINES: dict[str, dict[str, Any]] = {
    "train": {"linewidth": 1.3, "alpha": 0.75},
    "eval": {"linewidth": 2.0, "markersize": 5},
    "full": {"linewidth": 1.5, "linestyle": "--", "marker": "D", "markersize": 6},
}


@dataclass
class Curve:
    """Finite values of one logged key by step: of training (`kind` "train"), of evaluation, or of full passes."""

    name: str
    kind: str
    points: dict[float, float] = field(default_factory=dict)
    left_out: set[float] = field(default_factory=set)  # steps whose value is not finite


@dataclass(frozen=True)
class Moments:
    """Steps worth a mark: of the best model, where training stopped early, where an alarm went off."""

    best: float | None = None
    stopped: float | None = None
    alarms: tuple[float, ...] = ()


def curve_charts(log: Log, results: Mapping[str, Any]) -> list[Chart]:
    """Loss, the metric that chose the best model, one more of the task's; those that were never logged are left out.

    Args:
        log: `log_history` of `trainer_state.json`.
        results: the run's record: what chose the best model, early stopping, alarms.
    """
    parts = [results.get(name) for name in ("best", "early_stopping")]
    best, stopping = (part if isinstance(part, Mapping) else {} for part in parts)
    chosen_by = next((name for name in best if name != "step"), "loss").removeprefix(FULL).removeprefix("eval_")
    steps = [alarm.get("step") for alarm in results.get("alarms") or [] if isinstance(alarm, Mapping)]
    alarms = tuple(sorted({float(step) for step in steps if is_finite(step)}))
    charts: list[Chart] = []
    for metric in dict.fromkeys(["loss", chosen_by, "spearman", "accuracy"]):
        curves = collect_curves(log, metric)
        if len(charts) < 3 and any(len(curve.points) > 1 for curve in curves):
            kept = best.get("step") if metric == chosen_by else None
            charts.append(curve_chart(metric, curves, log, Moments(kept, stopping.get("stopped_at_step"), alarms)))
    return charts


def collect_curves(log: Log, metric: str) -> list[Curve]:
    """Curves of a metric: training first (of the loss only), then evaluations, then full passes.

    Of entries logged twice for one step (a resumed run) the later counts; entries without a step are left out.
    """
    curves: dict[str, Curve] = {}
    has_full = any(key.startswith(FULL) for entry in log for key in entry)
    for entry in (entry for entry in log if is_finite(entry.get("step"))):
        for key, value in entry.items():
            named = name_curve(key, metric, has_full)
            if named and isinstance(value, (int, float)):
                curve, step = curves.setdefault(key, Curve(*named)), float(entry["step"])
                curve.points.pop(step, None)
                curve.left_out.add(step)
                if is_finite(value):
                    curve.points[step] = float(value)
                    curve.left_out.remove(step)
    order = ("train", "eval", "full")
    return sorted(curves.values(), key=lambda curve: (order.index(curve.kind), curve.name))


def name_curve(key: str, metric: str, has_full: bool = False) -> tuple[str, str] | None:
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


def curve_chart(metric: str, curves: Sequence[Curve], log: Log, moments: Moments) -> Chart:
    """Curves of one metric over steps, with epochs along the top, the best value of each evaluation named.

    Args:
        curves: with at least one point among them.
    """
    drawn = [curve for curve in curves if curve.points]
    values = [value for curve in drawn for value in curve.points.values()]
    title = metric.replace("_", " ")
    figure, (axes,) = new_figure(("step", title))
    set_range(axes, [step for curve in drawn for step in curve.points], values)
    is_log = metric == "loss" and min(values) > 0 and max(values) > LOG_RATIO * min(values)
    if is_log:
        set_log(axes, "y", values)
    # The first colour is training's, with or without it, so that colours agree between charts.
    first = 0 if drawn[0].kind == "train" else 1
    handles = [_draw_curve(axes, curve, metric, SERIES[i % len(SERIES)]) for i, curve in enumerate(drawn, first)]
    best = _best_point(drawn, moments.best)
    if best:
        look: dict[str, Any] = {"marker": "o", "markersize": 14, "markerfacecolor": "none", "markeredgewidth": 2}
        colour = handles[best[0]].get_color()
        handles += axes.plot(*best[1:], label="best", color=colour, linestyle="", **look)
    _mark_steps(axes, moments)
    _add_epochs(axes, log)
    if num_left_out := sum(len(curve.left_out) for curve in curves):
        note = f"{num_left_out} values not finite, not drawn"
        axes.text(0.01, 0.02, note, transform=axes.transAxes, color=SOFT, fontsize=FONT)
    add_legend(figure, handles, [str(handle.get_label()) for handle in handles])
    caption = (
        f"{title.capitalize()} by step{', on a logarithmic scale' if is_log else ''}.{_advice(metric, drawn, best)}"
    )
    return Chart(figure, f"{title} by step: {', '.join(curve.name for curve in drawn)}", caption)


def _advice(metric: str, curves: Sequence[Curve], best: tuple[int, float, float] | None) -> str:
    """What to look for, and how to read it."""
    text = ""
    if best:
        text = f" The best model, kept by this metric, is that of step {best[1]:,.0f} ({metric} {best[2]:.4g})."
    elif metric == "loss" and len(curves) > 1:
        text = " Where training goes on falling and validation rises, the model learns rows by heart."
    is_thinned = any(len(curve.points) > MAX_POINTS for curve in curves)
    return text + (f" Long curves are drawn as means of {MAX_POINTS} windows." if is_thinned else "")


def _draw_curve(axes: Axes, curve: Curve, metric: str, colour: str) -> Any:
    """The line; its name tells where an evaluation was best, which is marked, too."""
    steps, values = _thin(curve.points)
    look = dict(_LINES[curve.kind])
    if len(steps) == 1 or (curve.kind == "eval" and len(steps) <= 60):
        look.setdefault("marker", "o")
    name = plain_name(curve.name)
    if curve.kind != "train":
        word, choose = ("lowest", min) if less_is_better(metric) else ("highest", max)
        step, value = choose(curve.points.items(), key=lambda point: point[1])
        name += f" ({word}: {value:.4g} at step {step:,.0f})"
        if len(steps) > 1:
            mark: dict[str, Any] = {"marker": "o", "markersize": 8, "markerfacecolor": "none", "markeredgewidth": 1.5}
            axes.plot(step, value, color=colour, zorder=3, **mark)
    return axes.plot(steps, values, color=colour, label=name, **look)[0]


def _thin(points: Mapping[float, float]) -> tuple[list[float], list[float]]:
    """At most `MAX_POINTS` points by step, each the mean of a window."""
    ordered = np.array(sorted(points.items()))
    windows = np.array_split(ordered, min(len(ordered), MAX_POINTS))
    means = np.array([window.mean(0) for window in windows])
    return means[:, 0].tolist(), means[:, 1].tolist()


def _best_point(curves: Sequence[Curve], step: float | None) -> tuple[int, float, float] | None:
    """The curve's place, step and value of the best model: on full passes where there are any."""
    for i, curve in sorted(enumerate(curves), key=lambda pair: pair[1].kind != "full"):
        if step is not None and curve.kind != "train" and step in curve.points:
            return i, step, curve.points[step]
    return None


def _mark_steps(axes: Axes, moments: Moments) -> None:
    """Vertical lines; a step outside of the axes stands on their edge."""
    marks = [(moments.stopped, "stopped early")] if is_finite(moments.stopped) else []
    marks += [(step, "" if i else "alarm") for i, step in enumerate(moments.alarms[:20])]
    low, high = axes.get_xlim()
    for step, word in marks:
        at = min(max(step or 0.0, low), high)
        axes.axvline(at, color=SOFT, linewidth=1.2, linestyle=":", zorder=1)
        is_late = at > (low + high) / 2
        side, text = ("right", f"{word} ") if is_late else ("left", f" {word}")
        axes.text(at, 1, text, transform=axes.get_xaxis_transform(), ha=side, va="top", color=SOFT, fontsize=FONT)


def _add_epochs(axes: Axes, log: Log) -> None:
    """Epochs along the top, by the last entry's epochs per step; without one there is nothing to put."""
    known = [entry for entry in log if entry.get("step") and entry.get("epoch")]
    if known:
        rate = float(known[-1]["epoch"]) / float(known[-1]["step"])
        as_epochs: Any = (lambda step: step * rate, lambda epoch: epoch / rate)
        top = axes.secondary_xaxis("top", functions=as_epochs)
        style_axis(top.xaxis, "epoch")
        top.xaxis.set_major_formatter(tick)
        top.spines["top"].set_visible(False)
