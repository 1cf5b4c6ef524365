"""Learning curves from the Trainer's log: training, evaluation of a subset, evaluation of all rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .blocks import Figure
from .svg import Plot, Scale
from .values import as_dict, is_finite

MAX_POINTS = 400  # per curve; more are averaged, the drawing is not wider
LOG_RATIO = 30.0
FULL = "eval_full_"
Log = Sequence[Mapping[str, Any]]


@dataclass
class Curve:
    """Values of one logged key by step: of training (`kind` "train"), of evaluation, or of full passes."""

    name: str
    kind: str
    points: dict[float, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Moments:
    """Steps worth a mark: of the best model, where training stopped early, where an alarm went off."""

    best: float | None = None
    stopped: float | None = None
    alarms: tuple[float, ...] = ()


def read_moments(results: Mapping[str, Any]) -> Moments:
    """The marks from a run's record."""
    best, stopping = as_dict(results.get("best")), as_dict(results.get("early_stopping"))
    alarms = [alarm.get("step") for alarm in results.get("alarms") or [] if isinstance(alarm, dict)]
    steps = {step for alarm in alarms if (step := _step(alarm)) is not None}
    return Moments(_step(best.get("step")), _step(stopping.get("stopped_at_step")), tuple(sorted(steps)))


def curve_figures(log: Log, results: Mapping[str, Any], png: str | None = None) -> list[Figure]:
    """Loss, the metric that chose the best model, one more of the task's; those that were never logged are left out.

    Args:
        log: `log_history` of `trainer_state.json`.
        results: the run's record.
        png: a file beside the report that shows the loss, or None.
    """
    moments = read_moments(results)
    best = next((name for name in as_dict(results.get("best")) if name != "step"), "loss")
    best = best.removeprefix(FULL).removeprefix("eval_")
    figures: list[Figure] = []
    for metric in dict.fromkeys(["loss", best, "spearman", "accuracy"]):
        curves = collect_curves(log, metric)
        if len(figures) < 3 and any(len(curve.points) > 1 for curve in curves):
            figures.append(_draw(metric, curves, moments if metric == best else Moments(None, *_rest(moments)), log))
    if figures and png:
        figures[0] = Figure(figures[0].svg, figures[0].caption, png)
    return figures


def collect_curves(log: Log, metric: str) -> list[Curve]:
    """Curves of a metric: training first (of the loss only), then evaluations, then full passes.

    Finite values only; of entries logged twice for one step (a resumed run) the later counts.
    """
    curves: dict[str, Curve] = {}
    has_full = any(key.startswith(FULL) for entry in log for key in entry)
    for entry in log:
        if not is_finite(entry.get("step")):
            continue
        for key, value in entry.items():
            named = _name(key, metric, has_full)
            if named and is_finite(value):
                curves.setdefault(key, Curve(*named)).points[float(entry["step"])] = float(value)
    order = {"train": 0, "eval": 1, "full": 2}
    return sorted(curves.values(), key=lambda curve: (order[curve.kind], curve.name))


def _name(key: str, metric: str, has_full: bool) -> tuple[str, str] | None:
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


def _draw(metric: str, curves: list[Curve], moments: Moments, log: Log) -> Figure:
    values = [value for curve in curves for value in curve.points.values()]
    steps = [step for curve in curves for step in curve.points]
    is_log = metric == "loss" and min(values) > 0 and max(values) > LOG_RATIO * min(values)
    plot = Plot(
        Scale.around(steps, margin=0.02), Scale.around(values, log=is_log), f"step{_epochs(log)}", _title(metric)
    )
    drawn = _with_series(curves)
    for curve, series in drawn:
        plot.name(curve.name, series, {"train": "thin", "eval": "dot", "full": "diamond"}[curve.kind])
    ring = _best_point(drawn, moments.best)
    if ring:
        plot.name("best", ring[2], "ring")
    for curve, series in drawn:
        _draw_curve(plot, curve, series)
    if ring:
        plot.dots([ring[0]], [ring[1]], ring[2], "ring")
    if moments.stopped is not None:
        plot.upright(moments.stopped, "stopped early")
    for step in moments.alarms[:20]:
        plot.upright(step, "alarm" if step == moments.alarms[0] else "")
    text = f"{_title(metric).capitalize()} by step{', on a logarithmic scale' if is_log else ''}."
    if ring:
        text += f" The best model, kept by this metric, is that of step {ring[0]:,.0f} ({metric} {ring[1]:.4g})."
    elif metric == "loss" and len(curves) > 1:
        text += " Where training goes on falling and validation rises, the model learns rows by heart."
    averaged = any(len(curve.points) > MAX_POINTS for curve in curves)
    text += f" Long curves are drawn as means of {MAX_POINTS} windows." if averaged else ""
    return Figure(plot.render(f"{_title(metric)} by step: {', '.join(curve.name for curve in curves)}"), text)


def _draw_curve(plot: Plot, curve: Curve, series: int) -> None:
    steps, values = _thin(curve.points)
    plot.line(steps, values, series, {"train": "thin", "eval": "line", "full": "dash"}[curve.kind])
    if curve.kind == "full":
        plot.dots(steps, values, series, "diamond")
    elif len(steps) == 1 or (curve.kind == "eval" and len(steps) <= 60):
        plot.dots(steps, values, series)


def _thin(points: Mapping[float, float]) -> tuple[list[float], list[float]]:
    """At most `MAX_POINTS` points by step, each the mean of a window."""
    ordered = np.array(sorted(points.items()))
    windows = np.array_split(ordered, min(len(ordered), MAX_POINTS))
    means = np.array([window.mean(0) for window in windows])
    return means[:, 0].tolist(), means[:, 1].tolist()


def _with_series(curves: Sequence[Curve]) -> list[tuple[Curve, int]]:
    """Curves and their colours: the first is training's, with or without it, so that colours agree between figures."""
    first = 1 if curves[0].kind == "train" else 2
    return [(curve, number) for number, curve in enumerate(curves, first)]


def _best_point(drawn: Sequence[tuple[Curve, int]], step: float | None) -> tuple[float, float, int] | None:
    """Step, value and series of the best model, on full passes where there are any."""
    for curve, series in sorted(drawn, key=lambda pair: pair[0].kind != "full"):
        if step is not None and curve.kind != "train" and step in curve.points:
            return step, curve.points[step], series
    return None


def _epochs(log: Log) -> str:
    known = [entry for entry in log if entry.get("step") and is_finite(entry.get("epoch")) and entry["epoch"] > 0]
    if not known:
        return ""
    return f" ({math.ceil(known[-1]['step'] / known[-1]['epoch'] - 1e-6):,} are one epoch)"


def _rest(moments: Moments) -> tuple[float | None, tuple[float, ...]]:
    return moments.stopped, moments.alarms


def _title(metric: str) -> str:
    return metric.replace("_", " ")


def _step(value: Any) -> float | None:
    return float(value) if is_finite(value) else None
