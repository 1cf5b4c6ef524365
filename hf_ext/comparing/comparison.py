"""The whole comparison: run, measure, judge, report."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import show_text
from ..files import write_text
from ..reporting.run_record import write_json
from .arguments import CompareArguments
from .criteria import check_criteria, is_too_noisy
from .intervals import Interval, decision_interval, rate_interval, ratio_interval
from .measures import common_unit, compare_losses, describe_side, metric_drop, round_rates
from .plot import plot_comparison
from .report import format_comparison
from .running import SideRun, run_all, run_child
from .sides import Side, make_ablations, make_command, make_sides
from .timeline import make_timeline

logger = logging.getLogger(__name__)

STEP_SECONDS = {"clock": "seconds", "processor": "cpu_seconds"}  # --timed_by -> column of throughput.json's steps


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
    if args.warmup_run:
        for side in sides:
            run_one(side, -1)
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
    """Runs one side in a folder of its own below `args.output_dir`; round -1 is a warm-up. Errors: see `run_child`."""
    name = f"round_{round_}" if round_ >= 0 else "warmup"
    folder = Path(args.output_dir) / side.name.replace(" ", "_") / name
    logger.info("%s, %s", side.name, name.replace("_", " "))
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
    failed = {name: next(run.error for run in group if run.error) for name, group in by_side.items() if _failed(group)}
    good = {name: group for name, group in by_side.items() if name not in failed}
    unit = common_unit(run for group in good.values() for run in group)
    seconds, num_looks = STEP_SECONDS[args.timed_by], 1 + args.most_rounds - args.rounds
    rates = {name: round_rates(group, unit, seconds) for name, group in good.items()}
    roles = {name: group[0].side for name, group in by_side.items()}
    optimized = next(name for name, side in roles.items() if side.role == "optimized")
    baselines = [name for name, side in roles.items() if side.role == "baseline"]
    sides = {name: describe_group(group, args.metric, rate_interval(rates[name])) for name, group in good.items()}
    pairs = {
        name: {
            "ratio": asdict(ratio_interval(rates[optimized], rates[name])),
            "decided_by": decision_interval(rates[optimized], rates[name], num_looks),
            "loss": None if roles[name].script else compare_losses(good[optimized], good[name]),  # of a sample
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
        "timed_by": args.timed_by,
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


def _failed(group: Sequence[SideRun]) -> bool:
    return any(run.error for run in group)


def describe_group(group: Sequence[SideRun], metric: str, rate: Interval) -> dict[str, Any]:
    """Settings and numbers of one side's runs."""
    side = group[0].side
    settings: dict[str, Any] = {"role": side.role, "config": side.config, "arguments": [*side.arguments]}
    if side.launch is not None:
        settings |= {"launch": side.launch.file, "num_processes": side.launch.num_processes}
    return {**settings, "rate": asdict(rate), **describe_side(group, metric)}


def _ablation_row(side: Side, ratios: dict[str, Interval], failed: dict[str, str]) -> dict[str, Any]:
    """`ratio`: with against without this speed-up; for one alone, against the first baseline."""
    row: dict[str, Any] = {"speedup": side.speedup, "how": side.role, "ratio": None}
    if side.name in failed:
        return {**row, "verdict": f"failed: {failed[side.name].splitlines()[-1]}"}
    ratio = ratios[side.name]
    verdict = "pays here" if ratio.low > 1 else "does not pay here" if ratio.value <= 1 else "not shown to pay here"
    return {**row, "ratio": asdict(ratio), "verdict": verdict}
