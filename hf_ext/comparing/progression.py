"""A progression: what each phase brings on top of those before it, beside what was claimed of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .arguments import CompareArguments
from .comparison import describe_group, run_side, write_result
from .criteria import check_criteria, is_too_noisy
from .intervals import RoundRates, decision_interval, multiply, rate_interval, ratio_interval
from .measures import common_unit, compare_losses, loop_rates, metric_drop, round_rates
from .phases import PhaseRuns, all_runs, run_phases
from .progression_file import Claim, Progression, as_flags, read_progression
from .progression_report import format_progression
from .running import SideRun
from .sides import Side

Rates = dict[str, dict[str, RoundRates]]  # name of a side -> kind of time -> its rates
STEPS = {"clock": "step", "processor": "cpu"}  # --timed_by -> kind of time
ONE_ROUND = "not shown: one round has one time of the loop"


def compare_phases(args: CompareArguments, shared: Sequence[str] = ()) -> dict[str, Any]:
    """Runs the progression of `args.progression`; writes what `compare` writes into `args.output_dir`.

    Args:
        args: the file, rounds, and criteria, which are for all phases together against the baseline.
        shared: arguments of the recipe for all runs; they win over the file's `common`, phases win over them.

    Returns:
        What `comparison.json` holds; `passed` says whether all criteria hold.

    Raises:
        ArgumentError: the file cannot be understood, or this machine can run no phase.
        ChildFailed: a run of the baseline failed; shows the end of its log. A phase that fails is reported.
    """
    assert args.progression is not None
    progression = read_progression(args.progression)
    words = [*as_flags(progression.common), *shared]

    def run_one(side: Side, round_: int) -> SideRun:
        if args.warmup_run and round_ == 0:
            run_side(args, words, side, -1)
        return run_side(args, words, side, round_)

    baseline, phases = run_phases(progression, args.rounds, run_one, args.singles)
    result = {"recipe": args.recipe, "arguments": words, "rounds": args.rounds}
    result |= analyze_phases(args, progression, baseline, phases)
    runs = [run for group in all_runs(baseline, phases).values() for run in group]
    write_result(Path(args.output_dir), result, format_progression(result), runs)
    return result


def analyze_phases(
    args: CompareArguments, progression: Progression, baseline: Sequence[SideRun], phases: Sequence[PhaseRuns]
) -> dict[str, Any]:
    """Numbers per phase, of all together, and the product of each alone, from runs that are there."""
    groups = all_runs(baseline, phases)
    unit = common_unit(run for group in groups.values() for run in group)
    rates: Rates = {name: _rates(group, unit) for name, group in groups.items()}
    sides = {
        name: describe_group(group, args.metric, rate_interval(rates[name]["step"])) for name, group in groups.items()
    }
    rows = []
    previous = "baseline"
    for phase in phases:
        rows.append(_describe_phase(args, phase, previous, baseline, sides, rates))
        previous = phase.phase.name if phase.runs else previous
    whole = _describe_whole(progression, phases, previous, rates)
    pair = _pair(args, groups[previous], baseline, rates)
    criteria = check_criteria(args, {"baseline": pair}, sides[previous]["peak_memory_gib"])
    throughput = baseline[0].throughput
    return {
        "format": 1,
        "progression": progression.name,
        "source": progression.source,
        "unit": unit,
        "timed_by": STEPS[args.timed_by],
        "metric": args.metric,
        "baseline": {
            "name": "baseline",
            "device": throughput["device"],
            "rates": {key: value for key, value in sides["baseline"].items() if key.endswith("s_per_s")},
            "batch": _batch(baseline[0]),
            "claimed_memory": progression.baseline.claimed_memory,
        },
        "optimized": previous,
        "sides": sides,
        "phases": rows,
        "whole": whole,
        "against": {"baseline": pair},
        "criteria": [{**asdict(one), "passed": one.passed, "line": str(one)} for one in criteria],
        "passed": all(criterion.passed for criterion in criteria),
        "too_noisy": is_too_noisy(criteria),
    }


def _rates(runs: Sequence[SideRun], unit: str) -> dict[str, RoundRates]:
    """By time of the clock in steps, by time of the processor in steps, and by time of the loop around them."""
    return {"step": round_rates(runs, unit), "cpu": round_rates(runs, unit, "cpu_seconds"), "loop": loop_rates(runs)}


def _describe_phase(
    args: CompareArguments,
    phase: PhaseRuns,
    previous: str,
    baseline: Sequence[SideRun],
    sides: dict[str, Any],
    rates: Rates,
) -> dict[str, Any]:
    """One row. `speedup` is against the phase before, `cumulative` and `alone` against the baseline."""
    spec, name = phase.phase, phase.phase.name
    row: dict[str, Any] = {
        "name": name,
        "arguments": spec.arguments,
        "launch": spec.launch,
        "judged_by": "loop" if spec.judged_by == "loop" else STEPS[args.timed_by],
        "claimed": spec.claimed,
        "claimed_memory": spec.claimed_memory,
        "note": spec.note,
        "why_not": phase.why or None,
    }
    if not phase.runs:
        return row
    speedup = _ratios(rates[name], rates[previous])
    rows_per_step = [sides[one]["sequences_per_step"] for one in (name, "baseline")]
    return {
        **row,
        "after": previous,
        "speedup": speedup,
        "cumulative": _ratios(rates[name], rates["baseline"]),
        "alone": _ratios(rates[phase.alone[0].side.name], rates["baseline"]) if phase.alone else None,
        "verdict": ONE_ROUND if row["judged_by"] == "loop" and args.rounds == 1 else judge(speedup[row["judged_by"]]),
        "batch": _batch(phase.runs[0]),
        "same_sequences_per_step": rows_per_step[0] == rows_per_step[1],
        "loss": compare_losses(phase.runs, baseline),
        "metric_drop": metric_drop(phase.runs, baseline, args.metric, args.greater_is_better),
        "left_out_by_plan": _left_out(phase),
    }


def judge(ratio: dict[str, float]) -> str:
    """What an interval says of a phase: a gain that is not shown does not pay."""
    if ratio["low"] > 1:
        return "pays here"
    return "does not pay here" + (": slower" if ratio["high"] < 1 else "")


def _ratios(rates: dict[str, RoundRates], baseline: dict[str, RoundRates]) -> dict[str, dict[str, float]]:
    return {kind: asdict(ratio_interval(rates[kind], baseline[kind])) for kind in rates}


def _left_out(phase: PhaseRuns) -> list[str]:
    """Speed-ups that the phase names and the run's plan did not apply, with the plan's reasons."""
    named = phase.phase.arguments.get("speedups", [])
    decisions = [one for one in phase.runs[0].plan.get("decisions", []) if one["name"] in named]
    return [f"{one['name']} {one['status']}: {one['reason']}" for one in decisions if one["status"] != "applied"]


def _batch(run: SideRun) -> list[int] | None:
    """Rows per device, passes per step, processes; None where the recipe's Trainer does not write its arguments."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if any(name not in run.settings for name in names):
        return None
    return [*(int(run.settings[name]) for name in names), int(run.throughput.get("num_processes", 1))]


def _describe_whole(progression: Progression, phases: Sequence[PhaseRuns], last: str, rates: Rates) -> dict[str, Any]:
    """All measured phases together, the product of each alone, what is claimed, and the product of what is."""
    measured = [phase for phase in phases if phase.runs]
    claims = [phase.claimed for phase in progression.phases if phase.claimed]
    whole: dict[str, Any] = {
        "phases": len(measured),
        "speedup": _ratios(rates[last], rates["baseline"]),
        "product_of_singles": None,
        "claimed": progression.claimed,
        "product_of_claims": _multiply_claims(claims) if claims else None,
        "product_of_claims_measured_here": _multiply_claims([p.phase.claimed for p in measured if p.phase.claimed]),
    }
    if measured and all(phase.alone for phase in measured):
        sides = [rates[phase.alone[0].side.name] for phase in measured]
        whole["product_of_singles"] = {
            kind: asdict(multiply([side[kind] for side in sides], rates["baseline"][kind]))
            for kind in rates["baseline"]
        }
    return whole


def _multiply_claims(claims: Sequence[Claim]) -> Claim:
    return math.prod(claim[0] for claim in claims), math.prod(claim[1] for claim in claims)


def _pair(args: CompareArguments, runs: Sequence[SideRun], baseline: Sequence[SideRun], rates: Rates) -> dict[str, Any]:
    """All measured phases against the baseline, as `analyze` has it of a pair of sides."""
    ours, before = (rates[name][STEPS[args.timed_by]] for name in (runs[0].side.name, "baseline"))
    return {
        "ratio": asdict(ratio_interval(ours, before)),
        "decided_by": decision_interval(ours, before),
        "loss": compare_losses(runs, baseline),
        "metric_drop": metric_drop(runs, baseline, args.metric, args.greater_is_better),
    }
