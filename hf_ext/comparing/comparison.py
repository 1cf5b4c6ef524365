"""The whole comparison: run, measure, judge, report."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..errors import show_text
from ..files import write_text
from ..reporting.run_record import write_json
from ..reporting.units import NOT_MEASURED
from .arguments import CompareArguments
from .measures import (
    Interval,
    common_unit,
    compare_losses,
    decision_interval,
    describe_side,
    make_timeline,
    metric_drop,
    rate_interval,
    ratio_interval,
    round_rates,
)
from .report import format_comparison, plot_comparison
from .running import SideRun, run_all, run_child
from .sides import Side, make_ablations, make_command, make_sides

logger = logging.getLogger(__name__)

NOISY = "TOO NOISY TO TELL"  # an interval that holds both what passes and what fails


def compare(args: CompareArguments, shared: Sequence[str] = ()) -> dict[str, Any]:
    """Runs all sides and writes `comparison.json`, `comparison.md` and `comparison.png` into `args.output_dir`.

    Args:
        args: sides, rounds and criteria.
        shared: arguments of the recipe for all sides.

    Returns:
        What `comparison.json` holds; `passed` says whether all criteria hold.

    Raises:
        ArgumentError: a side cannot be understood.
        ChildFailed: a baseline's or the optimized side's run failed; shows the end of its log.
    """
    sides, run_one = make_sides(args), partial(run_side, args, shared)
    ablations = (lambda run: make_ablations(run.side, run.plan)) if args.ablate else None
    runs: list[SideRun] = []
    for rounds in range(args.rounds, args.most_rounds + 1):
        runs = run_all(sides, rounds, run_one, ablations, runs)
        found = analyze(args, runs)
        if not found["too_noisy"]:
            break
        logger.info("after %d rounds, too noisy to tell", rounds)
    result = {"recipe": args.recipe, "arguments": [*shared], "rounds": rounds, **found}
    write_result(Path(args.output_dir), result, format_comparison(result), runs)
    return result


def run_side(args: CompareArguments, shared: Sequence[str], side: Side, round_: int) -> SideRun:
    """Runs one side in a folder of its own below `args.output_dir`. Errors: see `run_child`."""
    folder = Path(args.output_dir) / side.name.replace(" ", "_") / f"round_{round_}"
    logger.info("%s, round %d", side.name, round_)
    return run_child(make_command(args, shared, side, folder, round_), side, round_, folder)


def write_result(root: Path, result: dict[str, Any], text: str, runs: Sequence[SideRun]) -> None:
    """Writes `comparison.json`, `comparison.md` and `comparison.png`."""
    root.mkdir(parents=True, exist_ok=True)
    write_json(root / "comparison.json", result)
    write_text(root / "comparison.md", show_text(text) + "\n")
    plot_comparison(result, runs, root / "comparison.png")


def analyze(args: CompareArguments, runs: Sequence[SideRun]) -> dict[str, Any]:
    """Numbers per side, ratios per baseline, criteria, and what each speed-up brings, from runs that are there."""
    by_side: dict[str, list[SideRun]] = {}
    for run in runs:
        by_side.setdefault(run.side.name, []).append(run)
    failed = {run.side.name: run.error for run in runs if run.error}
    good = {name: group for name, group in by_side.items() if name not in failed}
    unit = common_unit(run for group in good.values() for run in group)
    num_looks = 1 + args.most_rounds - args.rounds
    rates = {name: round_rates(group, unit) for name, group in good.items()}
    roles = {name: group[0].side for name, group in by_side.items()}
    optimized = next(name for name, side in roles.items() if side.role == "optimized")
    baselines = [name for name, side in roles.items() if side.role == "baseline"]
    sides = {name: describe_group(group, args.metric, rate_interval(rates[name])) for name, group in good.items()}
    pairs = {
        name: {
            "ratio": asdict(ratio_interval(rates[optimized], rates[name])),
            "decided_by": decision_interval(rates[optimized], rates[name], num_looks),
            "loss": compare_losses(good[optimized], good[name]),
            "metric_drop": metric_drop(good[optimized], good[name], args.metric, args.greater_is_better),
            "same_sequences_per_step": sides[optimized]["sequences_per_step"] == sides[name]["sequences_per_step"],
        }
        for name in baselines
    }
    criteria = check_criteria(args, pairs, sides[optimized]["peak_memory_gib"])
    first = good[baselines[0]][0].throughput["device"]
    medians = {key: value for key, value in sides[baselines[0]].items() if key.endswith("s_per_s")}
    ablations = [side for side in roles.values() if side.role in ("without", "only")]
    ratios = {
        side.name: ratio_interval(rates[optimized], rates[side.name])
        if side.role == "without"
        else ratio_interval(rates[side.name], rates[baselines[0]])
        for side in ablations
        if side.name not in failed
    }
    timeline = make_timeline({name: good[name] for name in (*baselines, optimized)}, baselines[0])
    return {
        "format": 1,
        "unit": unit,
        "metric": args.metric,
        "baseline": {"name": baselines[0], "device": first, "rates": medians},
        "optimized": optimized,
        "sides": sides,
        "against": pairs,
        "criteria": [{**asdict(one), "passed": one.passed, "line": str(one)} for one in criteria],
        "passed": all(criterion.passed for criterion in criteria),
        "too_noisy": is_too_noisy(criteria),
        "timeline": timeline,
        "ablation": [_ablation_row(side, ratios, failed) for side in ablations],
    }


def describe_group(group: Sequence[SideRun], metric: str, rate: Interval) -> dict[str, Any]:
    """Settings and numbers of one side's runs."""
    side = group[0].side
    settings: dict[str, Any] = {"role": side.role, "config": side.config, "arguments": [*side.arguments]}
    if side.launch is not None:
        settings |= {"launch": str(side.launch), "num_processes": side.launch.num_processes}
    return {**settings, "rate": asdict(rate), **describe_side(group, metric)}


def _ablation_row(side: Side, ratios: dict[str, Interval], failed: dict[str, str]) -> dict[str, Any]:
    """`ratio`: with against without this speed-up; for one alone, against the first baseline."""
    row: dict[str, Any] = {"speedup": side.speedup, "how": side.role, "ratio": None}
    if side.name in failed:
        return {**row, "verdict": f"failed: {failed[side.name].splitlines()[-1]}"}
    ratio = ratios[side.name]
    verdict = "pays here" if ratio.low > 1 else "does not pay here" if ratio.value <= 1 else "not shown to pay here"
    return {**row, "ratio": asdict(ratio), "verdict": verdict}


@dataclass(frozen=True)
class Criterion:
    """One line of the verdict."""

    text: str
    measured: float | None
    verdict: Literal["PASS", "FAIL", "TOO NOISY TO TELL"]
    interval: tuple[float, float] | None = None  # that the verdict goes by

    @property
    def passed(self) -> bool:
        return self.verdict == "PASS"

    def __str__(self) -> str:
        found = NOT_MEASURED if self.measured is None else f"{self.measured:.4g}"
        held = "" if self.interval is None else f" [{self.interval[0]:.4g}, {self.interval[1]:.4g}]"
        return f"{self.verdict}  {self.text}: {found}{held}"


def check_criteria(args: CompareArguments, pairs: dict[str, dict[str, Any]], peak_memory_gib: float) -> list[Criterion]:
    """Checks the criteria that were given.

    Args:
        args: the limits.
        pairs: per baseline `ratio` (an interval as a dictionary), `decided_by` (see `decision_interval`), `loss` (see
            `compare_losses`) and `metric_drop`.
        peak_memory_gib: of the optimized side.
    """
    found = []
    for name, pair in pairs.items():
        if args.min_speedup is not None:
            text = f"speed against {name} at least {args.min_speedup:g}x"
            low, high = pair["decided_by"]
            verdict: Any = "PASS" if low >= args.min_speedup else "FAIL" if high < args.min_speedup else NOISY
            found.append(Criterion(text, pair["ratio"]["value"], verdict, (low, high)))
        if args.max_loss_delta is not None:
            delta = pair["loss"]["final"] if pair["loss"] else None
            text = f"final training loss above that of {name} by at most {args.max_loss_delta:g}"
            found.append(Criterion(text, delta, _judge(delta, args.max_loss_delta)))
        if args.max_metric_drop is not None:
            drop = pair["metric_drop"]
            text = f"{args.metric} worse than that of {name} by at most {args.max_metric_drop:g}"
            found.append(Criterion(text, drop, _judge(drop, args.max_metric_drop)))
    if args.max_memory_gib is not None:
        text = f"peak memory at most {args.max_memory_gib:g} GiB"
        found.append(Criterion(text, peak_memory_gib, _judge(peak_memory_gib, args.max_memory_gib)))
    return found


def is_too_noisy(criteria: Sequence[Criterion]) -> bool:
    """Whether more rounds may yet decide: one criterion is too noisy, and none fails."""
    verdicts = [criterion.verdict for criterion in criteria]
    return NOISY in verdicts and "FAIL" not in verdicts


def _judge(measured: float | None, most: float) -> Literal["PASS", "FAIL"]:
    return "PASS" if measured is not None and measured <= most else "FAIL"
