"""From the files of runs to numbers per side, and to differences between sides, with 95 % intervals.

Values are medians over rounds; rounds are drawn again, and within each round its steps. Of three rounds such an
interval holds the true ratio in 8 of 10 simulated comparisons. Verdicts do not go by it, but by Student's interval of
the logarithms of rounds' ratios (`decision_interval`), which holds it in 19 of 20 (`tests/comparing/test_noise.py`
simulates both).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError
from .running import SideRun

UNITS = ("residues", "tokens", "sequences")  # finest first
RATES = (*(f"{unit}_per_s" for unit in UNITS), "padded_tokens_per_s", "padding_share", "data_wait_share", "mfu")
EPOCHS = (1, 10, 25, 50)  # of the timeline
SMOOTHED_SHARE = 0.1  # of a loss curve that each smoothed point, and the final loss, is the mean of
NUM_RESAMPLES = 1000
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A value, its 95 % interval, and the smallest and largest value of a round."""

    value: float
    low: float
    high: float
    smallest: float
    largest: float


@dataclass(frozen=True)
class RoundRates:
    """Rates of one side: `measured` (rounds,) and each round's rate on resampled steps, (resamples, rounds)."""

    measured: Floats
    resampled: Floats


def resample_rates(amounts: Sequence[Floats], seconds: Sequence[Floats], seed: int) -> RoundRates:
    """Rates per second of every round, and on steps drawn with replacement.

    Args:
        amounts, seconds: per round what each step did and how long it took, (steps,) each.
        seed: of the draws.
    """
    generator = np.random.default_rng(seed)
    columns = []
    for amount, time in zip(amounts, seconds):
        drawn = generator.integers(0, len(time), size=(NUM_RESAMPLES, len(time)))
        columns.append(amount[drawn].sum(1) / time[drawn].sum(1))
    measured = np.array([amount.sum() / time.sum() for amount, time in zip(amounts, seconds)])
    return RoundRates(measured, np.stack(columns, axis=1))


def rate_interval(rates: RoundRates) -> Interval:
    """The median rate over rounds."""
    return _interval(rates.measured, rates.resampled)


def ratio_interval(rates: RoundRates, baseline: RoundRates) -> Interval:
    """The median over rounds of rate / baseline's rate in the same round: what slows a round slows both sides."""
    return _interval(rates.measured / baseline.measured, rates.resampled / baseline.resampled)


def decision_interval(rates: RoundRates, baseline: RoundRates, num_looks: int = 1) -> tuple[float, float]:
    """Where the true ratio of rates lies, for a verdict: outside of it in 5 % of comparisons, over all looks.

    Args:
        rates, baseline: of the same rounds.
        num_looks: how often a verdict may be asked for while rounds are added; each look gets its share of the 5 %.

    Returns:
        Lower and upper end; 0 and infinity for one round, which does not say how rounds vary.
    """
    from scipy.special import stdtrit  # here, since scipy takes 0.2 s that most of a comparison does not need

    logs = np.log(rates.measured / baseline.measured)
    num = len(logs)
    if num < 2:
        return 0.0, float("inf")
    half = float(stdtrit(num - 1, 1 - 0.025 / num_looks) * logs.std(ddof=1) / np.sqrt(num))
    return float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half))


def _interval(measured: Floats, resampled: Floats) -> Interval:
    num_rounds = len(measured)
    drawn = np.random.default_rng(0).integers(0, num_rounds, size=resampled.shape)
    medians = np.median(np.take_along_axis(resampled, drawn, axis=1), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    value = float(np.median(measured))
    return Interval(value, float(low), float(high), float(measured.min()), float(measured.max()))


def common_unit(runs: Iterable[SideRun]) -> str:
    """The finest unit that all runs counted in full."""
    return max((run.throughput["unit"] for run in runs), key=UNITS.index)


def round_rates(runs: Sequence[SideRun], unit: str, seconds: str = "seconds") -> RoundRates:
    """Rates of one side's runs, in order of their rounds. The seed is one for all sides, as are the rounds.

    `seconds`: "cpu_seconds" takes time of the processor, without data workers, instead of that of the clock.
    """
    steps = [run.throughput["steps"] for run in runs]
    return resample_rates([np.array(s[unit]) for s in steps], [np.array(s[seconds]) for s in steps], seed=0)


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


def make_timeline(groups: Mapping[str, Sequence[SideRun]], baseline: str) -> dict[str, Any] | None:
    """Seconds from the start of a run to the end of each of `EPOCHS`, by side.

    A side takes its `one_off_seconds` (what came before the first step, such as embedding once, and what the first
    steps took above the others) and then its steps per epoch, as long as the measured ones; each is the median over its
    rounds. Evaluations and saves are in neither.

    Args:
        groups: the runs of each side.
        baseline: the side that `saved_seconds` are counted from.

    Returns:
        `epochs`, `baseline`, and per side what it rests on, `seconds` and, but for the baseline, `saved_seconds`; None
        where a run does not know how long an epoch is, as of a stream.
    """
    needed = ("rows_per_epoch", "steps_per_epoch")
    if not all(run.throughput.get(name) for group in groups.values() for run in group for name in needed):
        return None
    sides = {name: _describe_epochs(group) for name, group in groups.items()}
    first = sides[baseline]["seconds"]
    for name, side in sides.items():
        if name != baseline:
            side["saved_seconds"] = [slow - own for slow, own in zip(first, side["seconds"])]
    return {"epochs": [*EPOCHS], "baseline": baseline, "sides": sides}


def _describe_epochs(runs: Sequence[SideRun]) -> dict[str, Any]:
    throughputs = [run.throughput for run in runs]
    before = statistics.median(_one_off_seconds(t) for t in throughputs)
    epoch = statistics.median(t["steps_per_epoch"] * _step_seconds(t) for t in throughputs)
    return {
        "rows_per_epoch": int(throughputs[0]["rows_per_epoch"]),
        "rows_measured": int(sum(t["totals"]["sequences"] for t in throughputs)),
        "one_off_seconds": before,
        "epoch_seconds": epoch,
        "seconds": [before + epochs * epoch for epochs in EPOCHS],
    }


def _step_seconds(throughput: Mapping[str, Any]) -> float:
    return float(throughput["totals"]["seconds"] / throughput["measured_steps"])


def _one_off_seconds(throughput: Mapping[str, Any]) -> float:
    """Before the first step, and what the warm-up steps took above as many others."""
    steady = throughput["warmup_steps"] * _step_seconds(throughput)
    return throughput["seconds_before_training"] + max(0.0, throughput["warmup_seconds"] - steady)
