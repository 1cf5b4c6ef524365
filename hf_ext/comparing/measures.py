"""From the files of runs to numbers per side, and to differences between sides, with 95 % intervals.

Sides are compared round by round, since what slows a round slows both. Intervals are Student's over rounds, of ratios
of their logarithms; `tests/comparing/test_noise.py` simulates how often they hold the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..labels import FloatArray
from .running import SideRun

UNITS = ("residues", "tokens", "sequences")  # finest first
SMOOTHED_FRACTION = 0.1  # of a loss curve that the final loss is the mean of


@dataclass(frozen=True)
class Interval:
    """A mean over rounds, and its 95 % interval."""

    value: float
    low: float
    high: float


def paired_ratio(rates: FloatArray, baseline: FloatArray) -> Interval:
    """Computes by what factor rates are higher, (rounds,) each: outside of the interval in 5 % of comparisons."""
    found = paired_difference(np.log(rates), np.log(baseline))
    return Interval(*np.exp([found.value, found.low, found.high]).tolist())


def paired_difference(values: FloatArray, baseline: FloatArray) -> Interval:
    """Computes by how much values are larger; one round does not say how rounds vary, so its interval has no ends."""
    from scipy.special import stdtrit  # here, since scipy takes 0.2 s that most of a comparison does not need

    differences = np.asarray(values) - np.asarray(baseline)
    mean = float(differences.mean())
    num = len(differences)
    if num < 2:
        return Interval(mean, -np.inf, np.inf)
    half = float(stdtrit(num - 1, 0.975) * differences.std(ddof=1) / np.sqrt(num))
    return Interval(mean, mean - half, mean + half)


def round_rates(runs: Sequence[SideRun], unit: str) -> FloatArray:
    """Rates per second of one side's runs, (rounds,)."""
    return np.array([run.throughput.totals[unit] / run.throughput.totals["seconds"] for run in runs])


def describe_side(runs: Sequence[SideRun], unit: str, metric: str) -> dict[str, Any]:
    """Describes a side: its settings, and medians over its rounds.

    Of rate, loss and metric also the smallest and the largest; memory is the largest.
    `one_off_seconds`: what came before the first step, such as embedding once, and what the warm-up steps took above
    the others. `skipped`: what the plan did not do, and why. `epoch_seconds`: of its steps alone; None where a run does
    not know how long an epoch is.
    """
    side = runs[0].side
    throughputs = [run.throughput for run in runs]
    steps = [t.totals["seconds"] / t.measured_steps for t in throughputs]
    once = [
        t.seconds_before_training + max(0.0, t.warmup_seconds - t.warmup_steps * step)
        for t, step in zip(throughputs, steps)
    ]
    epochs = [t.steps_per_epoch * step for t, step in zip(throughputs, steps) if t.steps_per_epoch]
    return {
        "role": side.role,
        "arguments": [*side.arguments],
        "launch": [*side.launch],
        "num_processes": throughputs[0].num_processes,
        "rate": _median_range(round_rates(runs, unit).tolist()),
        "skipped": [f"{one.name} skipped: {one.reason}" for one in runs[0].plan.decisions if one.status == "skipped"],
        "peak_memory_gib": max(t.peak_memory_gib for t in throughputs),
        "step_seconds": median(steps),
        "data_wait_share": median(t.rates["data_wait_share"] for t in throughputs),
        "one_off_seconds": median(once),
        "epoch_seconds": median(epochs) if len(epochs) == len(steps) else None,
        "wall_seconds": median(run.wall_seconds for run in runs),
        "sequences_per_step": median(t.totals["sequences"] / t.measured_steps for t in throughputs),
        "final_loss": _median_range([final_loss(run) for run in runs]),
        "metric": _median_range([find_metric(run, metric) for run in runs]),
    }


def find_metric(run: SideRun, name: str) -> float | None:
    """Finds a run's final metric: a dotted path in `all_results.json`, else the last value logged under that name."""
    found: Any = run.results
    for part in [name] if name in run.results else name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    if found is None:
        found = next((log[name] for log in reversed(run.throughput.log_history) if name in log), None)
    if found is not None and (isinstance(found, bool) or not isinstance(found, int | float)):
        raise ArgumentError(f"--metric {name}: {run.side.name} has {type(found).__name__} {found!r}, not a number.")
    return None if found is None else float(found)


def final_loss(run: SideRun) -> float | None:
    """Averages the last tenth of the logged training losses; None where none was logged."""
    losses = [float(log["loss"]) for log in run.throughput.log_history if "loss" in log]
    if losses:
        return fmean(losses[-max(1, round(len(losses) * SMOOTHED_FRACTION)) :])
    return None


def compare_values(values: Sequence[float | None], baseline: Sequence[float | None]) -> Interval | None:
    """Applies `paired_difference` to a loss or a metric by round; None where a round has none."""
    if not values or None in values or None in baseline:
        return None
    return paired_difference(np.array(values), np.array(baseline))


def _median_range(values: Sequence[float | None]) -> dict[str, float] | None:
    """Returns median, smallest and largest of what is known."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"value": float(np.median(known)), "smallest": min(known), "largest": max(known)}
