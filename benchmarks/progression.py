"""Phases of a list of speed-ups, switched on one after another: what each brings, beside what was claimed of it.

    python benchmarks/progression.py benchmarks/progression_affinity.yaml --rounds 2 --singles \\
        --metric test.scores.model.rmse.value --output_dir outputs/phases -- --config recipes/configs/her2.yaml

Baseline, phase 1, phases 1 and 2, ...: all once per round, each in a fresh process, as `hf-ext compare` runs its
sides; `--singles` runs each phase alone on the baseline too. What stands after `--` goes to all runs. A phase that this
machine cannot run, or that fails, is left out of those that follow. Writes progression.json and progression.md.

The file has `name`, `source`, `claimed`, `recipe`, `common` (arguments of all runs), `baseline` and `phases`; of each
phase `name`, `arguments` (a list is added to the list so far, another value replaces the one before), `claimed` (a
factor or a range), `claimed_memory` (GB), `launch` (an Accelerate config, kept from then on), `needs`, `judged_by`
(`loop`: with evaluation, saves and compilation) and `note`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from hf_ext.comparing.comparison import describe_group, run_side
from hf_ext.comparing.measures import (
    common_unit,
    compare_values,
    final_loss,
    find_metric,
    paired_ratio,
    round_rates,
)
from hf_ext.comparing.running import ChildFailed, SideRun
from hf_ext.comparing.sides import CompareArguments, Side, read_launch
from hf_ext.errors import ArgumentError
from hf_ext.files import write_text
from hf_ext.optional import import_problem
from hf_ext.reporting.run_record import write_json
from hf_ext.reporting.tables import format_markdown_table
from hf_ext.reporting.units import MISSING, NOT_MEASURED

NEEDS = {  # what a phase may need -> whether it is here
    "cuda": torch.cuda.is_available,
    "ampere": lambda: torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0),
    "two_gpus": lambda: torch.cuda.device_count() >= 2,
    "faesm": lambda: import_problem("faesm.esm") is None,
}
KINDS = {"step": "steps by the clock", "cpu": "steps by CPU time", "loop": "the whole loop"}
OTHER = {"step": "by CPU time", "cpu": "by the clock"}  # the time that the phases are not judged by
Rates = dict[str, np.ndarray]  # by the names of KINDS; runs of today have no time of the processor


@dataclass
class Phase:
    """One phase of the file, and its runs on top of those before it and alone; `why_not` says why there are none."""

    entry: Mapping[str, Any]
    why_not: str = ""
    runs: list[SideRun] = field(default_factory=list)
    alone: list[SideRun] = field(default_factory=list)


def read_file(path: str | Path) -> dict[str, Any]:
    """The file, with each value as it would be typed: `no` stays `no`."""
    return yaml.load(Path(path).read_text(encoding="utf-8"), yaml.BaseLoader)


def as_flags(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The words of a command line."""
    values = {name: value if isinstance(value, list) else [value] for name, value in settings.items()}
    return tuple(word for name, value in values.items() for word in (f"--{name}", *value))


def add_settings(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` on top of `below`: lists grow by what they do not hold yet, other values are replaced."""
    both = dict(below)
    for name, value in above.items():
        grown = isinstance(value, list) and isinstance(both.get(name), list)
        both[name] = [*both[name], *(one for one in value if one not in both[name])] if grown else value
    return both


def as_range(claim: Any) -> tuple[float, float] | None:
    """A claim of the file, least and most."""
    if claim is None:
        return None
    ends = [float(end) for end in (claim if isinstance(claim, list) else [claim])]
    return ends[0], ends[-1]


def run_phases(
    file: Mapping[str, Any], args: CompareArguments, words: Sequence[str], singles: bool
) -> tuple[list[SideRun], list[Phase]]:
    """Runs everything, in turns; the runs of the baseline, and the phases in the order of the file."""
    base = file["baseline"]
    start = base["arguments"], base.get("launch")
    phases = [Phase(entry) for entry in file["phases"]]
    baseline: list[SideRun] = []
    for round_ in range(args.rounds):
        baseline.append(run_side(args, words, make_side("baseline", *start), round_))
        settings, launch = start
        for phase in phases:
            entry = phase.entry
            needs = entry.get("needs", [])
            lacking = [name for name in ([needs] if isinstance(needs, str) else needs) if not NEEDS[name]()]
            phase.why_not = phase.why_not or (f"needs {' and '.join(lacking)}" if lacking else "")
            if phase.why_not:
                continue
            added = add_settings(settings, entry["arguments"]), entry.get("launch", launch)
            own = add_settings(start[0], entry["arguments"]), entry.get("launch", start[1])
            try:
                phase.runs.append(run_side(args, words, make_side(entry["name"], *added), round_))
                if singles and settings is not start[0]:
                    phase.alone.append(run_side(args, words, make_side(f"only {entry['name']}", *own), round_))
            except (ArgumentError, ChildFailed) as error:
                phase.why_not = f"failed: {str(error).splitlines()[-1]}"
                phase.runs, phase.alone = [], []  # of rounds that are not all there, no ratio is taken
                continue
            phase.alone = phase.alone if not singles or settings is not start[0] else phase.runs
            settings, launch = added
    return baseline, phases


def make_side(name: str, settings: Mapping[str, Any], launch: str | None) -> Side:
    """One side, as `hf-ext compare` runs it."""
    started = read_launch(launch, "launch") if launch else ()
    return Side(name, "baseline" if name == "baseline" else "optimized", as_flags(settings), launch=started)


def measure_rates(runs: Sequence[SideRun], unit: str) -> Rates:
    """Rates per second of steps, and rows per second of the whole loop, one per run."""
    loops = []
    for run in runs:
        totals, measured = run.throughput["totals"], run.throughput["measured_steps"]
        rows = totals["sequences"] / measured * (measured + run.throughput["warmup_steps"])
        loops.append(rows / (find_metric(run, "train_runtime") or run.wall_seconds))
    return {"step": round_rates(runs, unit), "loop": np.array(loops)}


def ratios(rates: Rates, baseline: Rates) -> dict[str, dict[str, float]]:
    """Of each kind of time, as a dictionary of an `Interval`."""
    return {kind: asdict(paired_ratio(rates[kind], baseline[kind])) for kind in rates}


def multiply(factors: Sequence[Rates], baseline: Rates) -> dict[str, dict[str, float]]:
    """The product of ratios to one baseline, within each round: what there would be, were gains independent."""
    product = {kind: np.prod([rates[kind] / base for rates in factors], axis=0) for kind, base in baseline.items()}
    return {kind: asdict(paired_ratio(found, np.ones_like(found))) for kind, found in product.items()}


def analyze(
    file: Mapping[str, Any], args: CompareArguments, baseline: list[SideRun], phases: Sequence[Phase]
) -> dict[str, Any]:
    """Numbers per phase, of all together, and the product of each alone."""
    measured = [phase for phase in phases if phase.runs]
    groups = {"baseline": baseline, **{phase.entry["name"]: phase.runs for phase in measured}}
    unit = common_unit(run for group in groups.values() for run in group)
    rates = {name: measure_rates(group, unit) for name, group in groups.items()}
    single = {phase.entry["name"]: measure_rates(phase.alone, unit) for phase in measured if phase.alone}
    sides = {name: describe_group(group, unit, args.metric) for name, group in groups.items()}
    rows, previous = [], "baseline"
    for phase in phases:
        entry, name = phase.entry, phase.entry["name"]
        memory = entry.get("claimed_memory")
        row = {
            "name": name,
            "judged_by": "loop" if entry.get("judged_by") == "loop" else "step",
            "claimed": as_range(entry.get("claimed")),
            "claimed_memory": float(memory) if memory else None,
            "note": entry.get("note", ""),
            "why_not": phase.why_not or None,
        }
        if phase.runs:
            speedup = ratios(rates[name], rates[previous])
            interval = speedup[row["judged_by"]]
            slower = ": slower" if interval["high"] < 1 else ""
            one_round = row["judged_by"] == "loop" and args.rounds == 1
            verdict = "pays here" if interval["low"] > 1 else f"does not pay here{slower}"
            row |= {
                "speedup": speedup,
                "cumulative": ratios(rates[name], rates["baseline"]),
                "alone": ratios(single[name], rates["baseline"]) if name in single else None,
                "verdict": "not shown: one round has one time of the loop" if one_round else verdict,
                "batch": describe_batch(phase.runs[0]),
                "same_sequences_per_step": sides[name]["sequences_per_step"] == sides["baseline"]["sequences_per_step"],
                "loss": compare_losses(phase.runs, baseline),
                "left_out_by_plan": list_left_out(phase),
            }
            previous = name
        rows.append(row)
    claims = [as_range(phase.entry.get("claimed")) for phase in phases]
    here = [claim for claim, phase in zip(claims, phases) if claim and phase.runs]
    whole = {
        "phases": len(measured),
        "speedup": ratios(rates[previous], rates["baseline"]),
        "product_of_singles": multiply([*single.values()], rates["baseline"]) if len(single) == len(measured) else None,
        "claimed": as_range(file.get("claimed")),
        "product_of_claims": multiply_claims([claim for claim in claims if claim]) if any(claims) else None,
        "product_of_claims_measured_here": multiply_claims(here),
    }
    memory = file["baseline"].get("claimed_memory")
    base = {
        "device": baseline[0].throughput["device"],
        "batch": describe_batch(baseline[0]),
        "claimed_memory": float(memory) if memory else None,
    }
    return {
        **{"progression": file["name"], "source": file.get("source", ""), "unit": unit, "timed_by": "step"},
        **{"metric": args.metric, "baseline": base, "sides": sides, "phases": rows, "whole": whole},
    }


def compare_losses(runs: Sequence[SideRun], baseline: Sequence[SideRun]) -> dict[str, float] | None:
    """By how much the final training loss is larger."""
    found = compare_values(*([final_loss(run) for run in group] for group in (runs, baseline)))
    return {"final": found.value} if found else None


def multiply_claims(claims: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The product of ranges."""
    return math.prod(claim[0] for claim in claims), math.prod(claim[1] for claim in claims)


def describe_batch(run: SideRun) -> list[int] | None:
    """Rows per device, passes per step, processes; None where the recipe's Trainer does not write its arguments."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if any(name not in run.settings for name in names):
        return None
    return [*(int(run.settings[name]) for name in names), int(run.throughput.get("num_processes", 1))]


def list_left_out(phase: Phase) -> list[str]:
    """Speed-ups that the phase names and the run's plan did not apply, with the plan's reasons."""
    named = phase.entry["arguments"].get("speedups", [])
    decisions = [one for one in phase.runs[0].plan.get("decisions", []) if one["name"] in named]
    return [f"{one['name']} {one['status']}: {one['reason']}" for one in decisions if one["status"] != "applied"]


def describe_runs(result: dict[str, Any]) -> str:
    """What was run, where and how often, and what the numbers are."""
    rounds = f"{result['rounds']} interleaved rounds" if result["rounds"] > 1 else "one round"
    text = (
        f"{result['recipe']} on {result['baseline']['device']}, {rounds} in fresh processes. Medians over rounds, with "
    )
    text += (
        "95 % intervals (rounds and steps drawn again). Evaluation, saving, compilation and the first steps are in the "
    )
    text += "loop, not in the steps."
    if result["timed_by"] == "cpu":
        text += " Steps are timed by the processor, as other programs shared the machine."
    if result["rounds"] == 1:
        text += " One round only: the intervals hold variation between steps, none between runs."
    return text


def phases_table(result: dict[str, Any]) -> str:
    """One row for the baseline, one per phase, and one for all that were measured."""
    base, sides, main = result["baseline"], result["sides"], result["timed_by"]
    other = "step" if main == "cpu" else "cpu"
    unknown = [MISSING] * 4
    measured = _measured(sides["baseline"], base["batch"], base["claimed_memory"], None)
    rows = [["baseline", MISSING, MISSING, MISSING, "1.00x", "1.00x", MISSING, *measured, ""]]
    for phase in result["phases"]:
        claimed = format_claim(phase["claimed"])
        if phase["why_not"]:
            memory = f"- / {phase['claimed_memory']:g}" if phase["claimed_memory"] else MISSING
            rows.append(
                [phase["name"], claimed, *unknown[:4], MISSING, MISSING, MISSING, memory, MISSING, MISSING, _why(phase)]
            )
            continue
        judged, alone = phase["judged_by"], phase["alone"]
        rows.append(
            [
                phase["name"],
                claimed,
                _interval(phase["speedup"][judged]) + (", of the loop" if judged == "loop" else ""),
                _times(phase["speedup"].get(other)),
                _interval(phase["cumulative"][main]),
                _times(phase["cumulative"]["loop"]),
                _interval(alone[judged]) if alone else MISSING,
                *_measured(sides[phase["name"]], phase["batch"], phase["claimed_memory"], phase["loss"]),
                _why(phase),
            ]
        )
    rows.append(_whole_row(result))
    headers = ["phase", "claimed", "this phase", OTHER[main], "so far", "loop, so far", "alone", "step / CPU, ms"]
    headers += ["rows per step", "peak GiB / claimed GB", "loss", result["metric"], "verdict"]
    return format_markdown_table(rows, headers)


def _measured(
    side: dict[str, Any], batch: list[int] | None, claimed_gb: float | None, loss: dict[str, float] | None
) -> list[str]:
    """Step, batch, memory, loss and metric of one side."""
    step = side["step_seconds"]
    times = (step["median"] if isinstance(step, dict) else step, side.get("cpu_step_seconds"))
    rows = f"{side['sequences_per_step']:g}" + (f" = {' x '.join(map(str, batch))}" if batch else "")
    final = f"{_center(side['final_loss']):.4g}" if side["final_loss"] else NOT_MEASURED
    return [
        " / ".join(MISSING if time is None else f"{1000 * time:,.0f}" for time in times),
        rows,
        f"{side['peak_memory_gib']:.2f} / {claimed_gb:g}" if claimed_gb else f"{side['peak_memory_gib']:.2f}",
        final + (f" ({loss['final']:+.2g})" if loss else ""),
        f"{_center(side['metric']):.4g}" if side["metric"] else NOT_MEASURED,
    ]


def _whole_row(result: dict[str, Any]) -> list[str]:
    whole, main = result["whole"], result["timed_by"]
    product = whole["product_of_singles"]
    cells = [f"**{whole['phases']} phases together**", format_claim(whole["claimed"]), MISSING, MISSING]
    cells += [_interval(whole["speedup"][main]), _times(whole["speedup"]["loop"])]
    cells += [f"product {_times(product[main])}" if product else MISSING, *[MISSING] * 5]
    return [*cells, f"{OTHER[main]} {_times(whole['speedup'].get('step' if main == 'cpu' else 'cpu'))}"]


def _why(phase: dict[str, Any]) -> str:
    """The verdict, and all that makes a row another one than its name says."""
    if phase["why_not"]:
        why = phase["why_not"]
        return why if why.startswith("failed") else f"not measured: {why}"
    parts = [phase["verdict"], *phase["left_out_by_plan"]]
    if not phase["same_sequences_per_step"]:
        parts.append("other rows per step than the baseline")
    return "; ".join([*parts, *([phase["note"]] if phase["note"] else [])])


def summarize(result: dict[str, Any]) -> list[str]:
    """The whole beside the products of its parts, and what may not be compared."""
    whole = result["whole"]
    lines = []
    for kind, name in KINDS.items():
        if kind not in whole["speedup"]:
            continue
        product = whole["product_of_singles"]
        text = f"In {name}, all {whole['phases']} measured phases together: {_interval(whole['speedup'][kind])}"
        text += f"; the product of each alone on the baseline: {_interval(product[kind])}" if product else ""
        lines.append(text + ".")
    if whole["product_of_claims"]:
        text = f"Claimed: {format_claim(whole['claimed'])} in all; the product of the claims is "
        text += f"{format_claim(whole['product_of_claims'])}, of those measured here "
        lines.append(f"{text}{format_claim(whole['product_of_claims_measured_here'])}.")
    other = [row["name"] for row in result["phases"] if row.get("same_sequences_per_step") is False]
    if other:
        names = ", ".join(other)
        lines.append(f"NOT at the baseline's rows per optimizer step, so that losses by step differ: {names}.")
    else:
        lines.append("All phases take the same rows per optimizer step.")
    return lines


def format_claim(claim: list[float] | tuple[float, float] | None) -> str:
    """A claimed speed-up: 1.5x, 1.5-2x, or "-"."""
    if claim is None:
        return MISSING
    low, high = (f"{end:.3g}" for end in claim)
    return f"{low}x" if low == high else f"{low}-{high}x"


def _interval(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _times(ratio: dict[str, float] | None) -> str:
    return MISSING if ratio is None else f"{ratio['value']:.2f}x"


def _center(spread: dict[str, float]) -> float:
    """Of numbers of all rounds; stored results may have means."""
    return spread["value"] if "value" in spread else spread["mean"]


def main() -> None:
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--output_dir", default="outputs/progression")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--singles", action="store_true", help="also run each phase alone")
    parser.add_argument("--metric", default="eval_loss", help="as of hf-ext compare")
    own = parser.parse_args(words[:end])
    file = read_file(own.file)
    args = CompareArguments(recipe=file["recipe"], output_dir=own.output_dir, rounds=own.rounds, metric=own.metric)
    shared = [*as_flags(file.get("common", {})), *words[end + 1 :]]
    result = {"recipe": args.recipe, "arguments": shared, "rounds": args.rounds}
    result |= analyze(file, args, *run_phases(file, args, shared, own.singles))
    lines = [f"# {result['progression']}", "", describe_runs(result), f"Claimed: {result['source']}", ""]
    lines += [phases_table(result), "", *(f"- {line}" for line in summarize(result))]
    write_json(Path(own.output_dir) / "progression.json", result)
    write_text(Path(own.output_dir) / "progression.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
