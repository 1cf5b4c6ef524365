"""From the files of runs to numbers per side, and to differences between sides."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError
from .intervals import NUM_RESAMPLES, RoundRates, resample_rates
from .running import SideRun

UNITS = ("residues", "tokens", "sequences")  # finest first
RATES = (*(f"{unit}_per_s" for unit in UNITS), "padded_tokens_per_s", "padding_share", "data_wait_share", "mfu")
SMOOTHED_SHARE = 0.1  # of a loss curve that each smoothed point, and the final loss, is the mean of


def common_unit(runs: Iterable[SideRun]) -> str:
    """The finest unit that all runs counted in full."""
    return max((run.throughput["unit"] for run in runs), key=UNITS.index)


def round_rates(runs: Sequence[SideRun], unit: str, seconds: str = "seconds") -> RoundRates:
    """Rates of one side's runs, in order of their rounds. The seed is one for all sides, as are the rounds.

    `seconds`: "cpu_seconds" takes time of the processor, without data workers, instead of that of the clock.
    """
    steps = [run.throughput["steps"] for run in runs]
    return resample_rates([np.array(s[unit]) for s in steps], [np.array(s[seconds]) for s in steps], seed=0)


def loop_rates(runs: Sequence[SideRun]) -> RoundRates:
    """Rows per second of the whole training loop: with evaluation, saves, compilation and the first steps.

    One number per run, so that intervals hold variation between rounds only.
    """
    rates = np.array([_count_rows(run.throughput) / _loop_seconds(run) for run in runs])
    return RoundRates(rates, np.tile(rates, (NUM_RESAMPLES, 1)))


def _count_rows(throughput: dict[str, Any]) -> float:
    """Of all steps; those before the measured ones are taken to be like them."""
    num_steps = throughput["measured_steps"] + throughput["warmup_steps"]
    return float(np.mean(throughput["steps"]["sequences"])) * num_steps


def _loop_seconds(run: SideRun) -> float:
    seconds = find_metric(run, "train_runtime")
    return run.wall_seconds if seconds is None else seconds


def describe_side(runs: Sequence[SideRun], metric: str) -> dict[str, Any]:
    """Medians over a side's rounds; memory is the largest; the metric with its mean, smallest and largest value."""
    throughputs = [run.throughput for run in runs]
    metrics = [value for run in runs if (value := find_metric(run, metric)) is not None]
    step = {name: _median([t["step_seconds"][name] for t in throughputs]) for name in ("q1", "median", "q3")}
    rates = {name: _median([t["rates"].get(name) for t in throughputs]) for name in RATES}
    return {
        **{name: value for name, value in rates.items() if value is not None},
        "step_seconds": step,
        "cpu_step_seconds": _median([_median(t["steps"].get("cpu_seconds", ())) for t in throughputs]),
        "loop_seconds": _median([_loop_seconds(run) for run in runs]),
        "final_loss": _spread([end_of_curve(run) for run in runs if loss_curve(run)]),
        "sequences_per_step": _median([float(np.median(t["steps"]["sequences"])) for t in throughputs]),
        "peak_memory_gib": max(t["peak_memory_gib"] for t in throughputs),
        "warmup_seconds": _median([t["warmup_seconds"] for t in throughputs]),
        "wall_seconds": _median([run.wall_seconds for run in runs]),
        "cpu_seconds": _median([run.cpu_seconds for run in runs]),
        "stolen_share": _median([run.stolen_share for run in runs]),
        "embedding_seconds": _median([_embedding_seconds(run) for run in runs]),
        "metric": _spread(metrics),
    }


def find_metric(run: SideRun, name: str) -> float | None:
    """A run's final metric: a dotted path in `all_results.json`, else the last value logged under that name."""
    found: Any = run.results
    for part in [name] if name in run.results else name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    if found is None:
        found = next((log[name] for log in reversed(run.throughput["log_history"]) if name in log), None)
    if found is not None and (isinstance(found, bool) or not isinstance(found, int | float)):
        raise ArgumentError(f"--metric {name}: {run.side.name} has {type(found).__name__} {found!r}, not a number.")
    return None if found is None else float(found)


def compare_losses(runs: Sequence[SideRun], baseline: Sequence[SideRun]) -> dict[str, float] | None:
    """Training-loss differences, run minus baseline; None where no step was logged by both.

    `final`: between the ends of the two curves (each over its last tenth), whatever their numbers of steps; with other
    rows per step, equal epochs end at other steps. `mean`: at steps that both logged. Both are means over rounds.
    `largest_gap`: between the two smoothed curves (trailing means over a tenth of the points) at such steps, wherever
    and in whichever round it is largest.
    """
    finals, means, gaps = [], [], []
    for run, other in zip(runs, baseline):
        mine, theirs = loss_curve(run), loss_curve(other)
        steps = sorted(mine.keys() & theirs.keys())
        if not steps:
            return None
        a, b = (smooth([curve[step] for step in steps]) for curve in (mine, theirs))
        finals.append(end_of_curve(run) - end_of_curve(other))
        means.append(statistics.fmean(mine[step] - theirs[step] for step in steps))
        gaps.append(np.abs(np.subtract(a, b)).max())  # NaN if one is, which Python's max would drop
    return {"final": statistics.fmean(finals), "mean": statistics.fmean(means), "largest_gap": float(np.max(gaps))}


def loss_curve(run: SideRun) -> dict[int, float]:
    """Step -> logged training loss."""
    return {int(log["step"]): float(log["loss"]) for log in run.throughput["log_history"] if "loss" in log}


def end_of_curve(run: SideRun) -> float:
    """Mean of the last tenth of the logged training losses; there must be one."""
    return smooth([*loss_curve(run).values()])[-1]


def smooth(values: Sequence[float]) -> list[float]:
    """Trailing means over a tenth of the values, at least one; shorter at the beginning."""
    width = max(1, round(len(values) * SMOOTHED_SHARE))
    return [statistics.fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def metric_drop(
    runs: Sequence[SideRun], baseline: Sequence[SideRun], name: str, greater_is_better: bool
) -> float | None:
    """By how much the metric is worse than the baseline's in the same round, mean over rounds; None if not measured."""
    pairs = [(find_metric(run, name), find_metric(other, name)) for run, other in zip(runs, baseline)]
    drops = [b - a if greater_is_better else a - b for a, b in pairs if a is not None and b is not None]
    return statistics.fmean(drops) if len(drops) == len(pairs) else None


def _embedding_seconds(run: SideRun) -> float | None:
    """Seconds in which the embedding cache was filled, before the first step."""
    evidence = [d["evidence"] for d in run.plan.get("decisions", []) if d["name"] == "embedding_cache"]
    return evidence[0].get("encoding_seconds") if evidence else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"mean": statistics.fmean(values), "smallest": float(np.min(values)), "largest": float(np.max(values))}
