"""Compare two or more ways to run training: speed, memory, loss, metric, with intervals and pass/fail criteria.

    hf-ext compare --baseline baseline --optimized max_speed -- --num_train_epochs 3
    hf-ext compare --recipe mlm --baseline stock mlm_stock_best.yaml --optimized max_speed \\
        --rounds 5 --min_speedup 3 --max_loss_delta 0.001 --max_memory_gib 50 --ablate -- --max_steps 200
    hf-ext compare --baseline "baseline --mixed_precision fp16" --baseline_launch "ddp.yaml --num_processes 2" \\
        --optimized max_speed --optimized_launch "ddp.yaml --num_processes 2" -- --effective_batch_size 64
    hf-ext compare --progression progression_affinity.yaml --dollars_per_hour 1.89 -- --config her2.yaml
    hf-ext compare --sides frozen lora full -- --dataset_name data.csv --sequence_columns sequence --label_column y

Every run is a fresh process, or as many as its side's Accelerate config file starts, with a folder of its own; sides
take turns (A B A B) on the same data and seeds. What stands after `--` goes to all sides. Writes comparison.json and
comparison.md. Killed and started again, the same command keeps the runs that it had finished.
With more --rounds it adds to them: give more where a speed's interval holds both what passes and what fails.
--progression runs the phases of a YAML file, each on top of those before it, beside what is claimed of each.
--sides asks which way to train encoders scores better: each runs once on one split, and all are compared on its test
rows, beside the best baseline of the first side. Fine-tuning starts from the head of the frozen side.
Exit status: 0 if all criteria hold, 3 if one does not, 4 if none fails and one is too noisy to tell, 1 if a run failed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..arguments import FastArgumentParser
from ..errors import show_text
from ..files import Json, write_text
from ..processes import refuse_several
from ..text import NOT_MEASURED, start_run_log, write_json
from .measures import UNITS, compare_values, describe_side, final_loss, find_metric, paired_ratio, round_rates
from .progression import read_progression
from .report import format_comparison
from .running import SideRun, run_all, run_child
from .sides import CompareArguments, Side, make_ablations, make_command, make_sides

logger = logging.getLogger(__name__)

CRITERIA_FAILED = 3
TOO_NOISY = 4
_show = "{value:.4g} [{low:.4g}, {high:.4g}]".format_map  # of an interval
USAGE = "%(prog)s [--FLAG VALUE ...] -- [flags of the recipe, for all sides]"
NOISY = "TOO NOISY TO TELL"  # an interval that holds both what passes and what fails


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    refuse_several("compare")
    end = words.index("--") if "--" in words else len(words)
    parser = FastArgumentParser(CompareArguments, description=__doc__, usage=USAGE)
    (args,) = parser.parse_args_into_dataclasses(words[:end])
    log = start_run_log(args.output_dir)
    result = compare(args, words[end + 1 :])
    log.info("\n%s\n", (Path(args.output_dir) / "comparison.md").read_text())
    if args.sides:
        return 1 if result["failed"] else 0
    if result["too_noisy"]:
        return TOO_NOISY
    return 0 if result["passed"] else CRITERIA_FAILED


def compare(args: CompareArguments, shared: Sequence[str] = ()) -> Json:
    """Runs all sides and writes `comparison.json` and `comparison.md` into `args.output_dir`.

    Args:
        args: sides, rounds and criteria.
        shared: arguments of the recipe for all sides.

    Returns:
        What `comparison.json` holds; `passed` says whether all criteria hold. Of `--sides` see `compare_trainings`.

    Raises:
        ArgumentError: a side cannot be understood.
        ChildFailed: a baseline's or the optimized side's run failed, or all of `--sides`; shows the end of its log.
    """
    if args.sides:
        from .fine_tuning import compare_trainings, format_trainings  # here: models are imported for these alone

        return _write(args, shared, compare_trainings(args, shared), format_trainings)
    phases: list[Side] = []
    if args.progression:
        phases, shared = read_progression(args.progression, args.recipe, shared)
    sides = [phase for phase in phases if phase.role != "left out"] or make_sides(args, shared)

    def run_one(side: Side, round_: int) -> SideRun:
        folder = Path(args.output_dir) / side.name.replace(" ", "_") / f"round_{round_}"
        logger.info("%s, round %d", side.name, round_)
        return run_child(make_command(args, shared, side, folder, round_), side, round_, folder)

    ablations = (lambda run: make_ablations(run.side, run.plan)) if args.ablate else None
    runs = run_all(sides, args.rounds, run_one, ablations)
    found = analyze(args, runs)
    if phases:
        found["phases"] = [asdict(phase) for phase in phases[1:]]
    asked = {"rounds": args.rounds, "dollars_per_hour": args.dollars_per_hour}
    return _write(args, shared, {**asked, **found}, format_comparison)


def _write(args: CompareArguments, shared: Sequence[str], found: Json, as_page: Callable[[Json], str]) -> Json:
    result = {"format": 2, "recipe": args.recipe, "arguments": [*shared], **found}
    root = Path(args.output_dir)
    root.mkdir(parents=True, exist_ok=True)
    write_json(root / "comparison.json", result)
    write_text(root / "comparison.md", show_text(as_page(result)) + "\n")
    return result


def analyze(args: CompareArguments, runs: Sequence[SideRun]) -> Json:
    """Computes numbers per side, ratios per baseline, criteria, and what each speed-up brings.

    A phase also has its `factor` over the one before it, `so_far` over the base, and what the plan skipped anew.
    """
    by_side: dict[str, list[SideRun]] = {}
    for run in runs:
        by_side.setdefault(run.side.name, []).append(run)
    failed = {run.side.name: run.error for run in runs if run.error}
    good = {name: group for name, group in by_side.items() if name not in failed}
    unit = max((run.throughput.unit for group in good.values() for run in group), key=UNITS.index)
    rates = {name: round_rates(group, unit) for name, group in good.items()}
    roles = {name: group[0].side for name, group in by_side.items()}
    *_, optimized = (name for name, side in roles.items() if side.role == "optimized")  # the last of a progression
    baselines = [name for name, side in roles.items() if side.role == "baseline"]
    sides = {name: describe_side(group, unit, args.metric) for name, group in good.items()}
    phases = [name for name in sides if args.progression and roles[name].role != "without"]
    for before, name in pairwise(phases):
        skipped = [one for one in sides[name]["skipped"] if one not in sides[before]["skipped"]]
        over = {"factor": rates[before], "so_far": rates[baselines[0]]}
        sides[name] |= {key: asdict(paired_ratio(rates[name], others)) for key, others in over.items()}
        sides[name]["newly_skipped"] = skipped
    pairs: dict[str, Json] = {}
    for name in baselines:
        own = good[optimized]
        others = good[name]
        loss = compare_values([final_loss(run) for run in own], [final_loss(run) for run in others])
        worse, better = (others, own) if args.greater_is_better else (own, others)
        scores = [find_metric(run, args.metric) for run in worse]
        drop = compare_values(scores, [find_metric(run, args.metric) for run in better])
        pairs[name] = {
            "ratio": asdict(paired_ratio(rates[optimized], rates[name])),
            "loss": loss and asdict(loss),
            "metric_drop": drop and asdict(drop),
            "metric": sides[name]["metric"],
            "same_sequences_per_step": sides[optimized]["sequences_per_step"] == sides[name]["sequences_per_step"],
        }
    criteria = check_criteria(args, pairs, sides[optimized]["peak_memory_gib"])
    verdicts = {criterion["verdict"] for criterion in criteria}
    ablation = [
        _ablation_row(side, failed.get(name), rates[optimized], rates.get(name))
        for name, side in roles.items()
        if side.role == "without"
    ]
    return {
        "unit": unit,
        "metric": args.metric,
        "device": good[optimized][0].throughput.device,
        "optimized": optimized,
        "sides": sides,
        "against": pairs,
        "criteria": criteria,
        "passed": verdicts <= {"PASS"},
        "too_noisy": NOISY in verdicts and "FAIL" not in verdicts,  # so that more rounds may decide
        "ablation": ablation,
    }


def _ablation_row(side: Side, error: str | None, optimized: Any, without: Any) -> Json:
    """Makes a row of the ablation; `ratio`: with against without this speed-up."""
    row: Json = {"speedup": side.speedup, "ratio": None}
    if error is not None:
        return {**row, "verdict": f"failed: {error.splitlines()[-1]}"}
    ratio = paired_ratio(optimized, without)
    verdict = "not shown to pay here"
    if ratio.low > 1:
        verdict = "pays here"
    elif ratio.value <= 1:
        verdict = "does not pay here"
    return {**row, "ratio": asdict(ratio), "verdict": verdict}


def check_criteria(args: CompareArguments, pairs: dict[str, Json], peak_memory_gib: float) -> list[Json]:
    """Checks the criteria that were given.

    Args:
        args: the limits.
        pairs: per baseline `ratio`, `loss` and `metric_drop`, intervals as dictionaries.
        peak_memory_gib: of the optimized side.

    Returns:
        Of each the `verdict`, PASS, FAIL or `NOISY`, and a `line` that says it with what was measured.
    """
    found = []
    for name, pair in pairs.items():
        if (least := args.min_speedup) is not None:
            ratio = pair["ratio"]
            text = f"speed against {name} at least {least:g}x: {_show(ratio)}"
            found.append(_judge(ratio["low"] >= least, ratio["high"] >= least, text))
        loss = pair["loss"] and pair["loss"]["value"]
        found += _check_most(args.max_loss_delta, loss, f"final training loss above that of {name} by at most", "")
        most = args.max_metric_drop
        drop = pair["metric_drop"]
        text = f"{args.metric} worse than that of {name} by at most"
        if args.drop_is_share and drop:
            size = abs(pair["metric"]["value"])
            text += f" {most:.4g} of its {size:.4g}: {_show(drop)}"
            found.append(_judge(drop["high"] <= most * size, drop["low"] <= most * size, text))
        else:
            found += _check_most(most, drop and drop["value"], text, "")
    return [*found, *_check_most(args.max_memory_gib, peak_memory_gib, "peak memory at most", " GiB")]


def _judge(holds: bool, may_hold: bool, text: str) -> Json:
    """Judges what `text` says of an interval: it holds of all of it, or may of some."""
    verdict = NOISY if may_hold else "FAIL"
    if holds:
        verdict = "PASS"
    return {"verdict": verdict, "line": f"{verdict}  {text}"}


def _check_most(most: Any, measured: float | None, text: str, unit: str) -> list[Json]:
    """Checks a criterion, where there is one, that holds for a number up to `most`."""
    if most is None:
        return []
    holds = measured is not None and measured <= most
    shown = NOT_MEASURED if measured is None else f"{measured:.4g}"
    return [_judge(holds, holds, f"{text} {most:g}{unit}: {shown}")]
