"""Compare two or more ways to run training: speed, memory, loss, metric, with intervals and pass/fail criteria.

    hf-ext compare --baseline baseline --optimized max_speed -- --num_train_epochs 3
    hf-ext compare --recipe mlm --baseline stock mlm_stock_best.yaml --optimized max_speed \\
        --rounds 5 --min_speedup 3 --max_loss_delta 0.001 --max_memory_gib 50 --ablate -- --max_steps 200
    hf-ext compare --baseline "baseline --mixed_precision fp16" --baseline_launch "ddp.yaml --num_processes 2" \\
        --optimized max_speed --optimized_launch "ddp.yaml --num_processes 2" -- --effective_batch_size 64
    hf-ext compare --sides frozen lora full -- --dataset_name data.csv --sequence_columns sequence --label_column y

Every run is a fresh process, or as many as its side's Accelerate config file starts, with a folder of its own; sides
take turns (A B A B) on the same data and seeds. What stands after `--` goes to all sides. Writes comparison.json and
comparison.md. Killed and started again, the same command keeps the runs that it had finished.
While a speed's interval holds both what passes and what fails, rounds are added, up to --max_rounds.
--sides asks which way to train encoders scores better: each runs once on one split, and all are compared on its test
rows, beside the best baseline of the first side. Fine-tuning starts from the head of the frozen side.
Exit status: 0 if all criteria hold, 3 if one does not, 4 if none fails and one is too noisy to tell, 1 if a run failed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..arguments.parser import FastArgumentParser
from ..errors import show_text
from ..files import write_text
from ..processes import refuse_several
from ..reporting.progress import start_run_log
from ..reporting.run_record import write_json
from ..reporting.units import NOT_MEASURED
from .measures import (
    common_unit,
    compare_values,
    describe_side,
    final_loss,
    find_metric,
    paired_ratio,
    round_rates,
)
from .report import format_comparison
from .running import SideRun, run_all, run_child
from .sides import CompareArguments, Side, make_ablations, make_command, make_sides

logger = logging.getLogger(__name__)

CRITERIA_FAILED = 3
TOO_NOISY = 4
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


def compare(args: CompareArguments, shared: Sequence[str] = ()) -> dict[str, Any]:
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
    sides, run_one = make_sides(args, shared), partial(run_side, args, shared)
    ablations = (lambda run: make_ablations(run.side, run.plan)) if args.ablate else None
    runs: list[SideRun] = []
    for rounds in range(args.rounds, args.most_rounds + 1):
        runs = run_all(sides, rounds, run_one, ablations, runs)
        found = analyze(args, runs)
        if not found["too_noisy"]:
            break
        logger.info("after %d rounds, too noisy to tell", rounds)
    return _write(args, shared, {"rounds": rounds, **found}, format_comparison)


def _write(
    args: CompareArguments, shared: Sequence[str], found: dict[str, Any], as_page: Callable[[dict[str, Any]], str]
) -> dict[str, Any]:
    result = {"format": 2, "recipe": args.recipe, "arguments": [*shared], **found}
    root = Path(args.output_dir)
    root.mkdir(parents=True, exist_ok=True)
    write_json(root / "comparison.json", result)
    write_text(root / "comparison.md", show_text(as_page(result)) + "\n")
    return result


def run_side(args: CompareArguments, shared: Sequence[str], side: Side, round_: int) -> SideRun:
    """Runs one side in a folder of its own below `args.output_dir`. Errors: see `run_child`."""
    folder = Path(args.output_dir) / side.name.replace(" ", "_") / f"round_{round_}"
    logger.info("%s, round %d", side.name, round_)
    return run_child(make_command(args, shared, side, folder, round_), side, round_, folder)


def analyze(args: CompareArguments, runs: Sequence[SideRun]) -> dict[str, Any]:
    """Numbers per side, ratios per baseline, criteria, and what each speed-up brings, from runs that are there."""
    by_side: dict[str, list[SideRun]] = {}
    for run in runs:
        by_side.setdefault(run.side.name, []).append(run)
    failed = {run.side.name: run.error for run in runs if run.error}
    good = {name: group for name, group in by_side.items() if name not in failed}
    unit = common_unit(run for group in good.values() for run in group)
    rates = {name: round_rates(group, unit) for name, group in good.items()}
    roles = {name: group[0].side for name, group in by_side.items()}
    optimized = next(name for name, side in roles.items() if side.role == "optimized")
    baselines = [name for name, side in roles.items() if side.role == "baseline"]
    sides = {name: describe_side(group, unit, args.metric) for name, group in good.items()}
    num_looks = 1 + args.most_rounds - args.rounds
    pairs: dict[str, dict[str, Any]] = {}
    for name in baselines:
        own, others = good[optimized], good[name]
        worse, better = (others, own) if args.greater_is_better else (own, others)
        loss = compare_values(*([final_loss(run) for run in side] for side in (own, others)))
        drop = compare_values(*([find_metric(run, args.metric) for run in side] for side in (worse, better)))
        pairs[name] = {
            "ratio": asdict(paired_ratio(rates[optimized], rates[name])),
            "decided_by": asdict(paired_ratio(rates[optimized], rates[name], num_looks)),
            "loss": loss and asdict(loss),
            "metric_drop": drop and asdict(drop),
            "same_sequences_per_step": sides[optimized]["sequences_per_step"] == sides[name]["sequences_per_step"],
        }
    criteria = check_criteria(args, pairs, sides[optimized]["peak_memory_gib"])
    verdicts = {criterion.verdict for criterion in criteria}
    ablation = [
        _ablation_row(side, failed.get(name), rates[optimized], rates.get(name))
        for name, side in roles.items()
        if side.role == "without"
    ]
    return {
        "unit": unit,
        "metric": args.metric,
        "device": good[optimized][0].throughput["device"],
        "optimized": optimized,
        "sides": sides,
        "against": pairs,
        "criteria": [{**asdict(one), "passed": one.passed, "line": str(one)} for one in criteria],
        "passed": verdicts <= {"PASS"},
        "too_noisy": NOISY in verdicts and "FAIL" not in verdicts,  # so more rounds may yet decide
        "ablation": ablation,
    }


def _ablation_row(side: Side, error: str | None, optimized: Any, without: Any) -> dict[str, Any]:
    """`ratio`: with against without this speed-up."""
    row: dict[str, Any] = {"speedup": side.speedup, "ratio": None}
    if error is not None:
        return {**row, "verdict": f"failed: {error.splitlines()[-1]}"}
    ratio = paired_ratio(optimized, without)
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
        pairs: per baseline `ratio`, `decided_by`, `loss` and `metric_drop`, intervals as dictionaries.
        peak_memory_gib: of the optimized side.
    """
    found = []
    for name, pair in pairs.items():
        if args.min_speedup is not None:
            text = f"speed against {name} at least {args.min_speedup:g}x"
            low, high = pair["decided_by"]["low"], pair["decided_by"]["high"]
            verdict: Any = "PASS" if low >= args.min_speedup else "FAIL" if high < args.min_speedup else NOISY
            found.append(Criterion(text, pair["ratio"]["value"], verdict, (low, high)))
        if args.max_loss_delta is not None:
            delta = pair["loss"]["value"] if pair["loss"] else None
            text = f"final training loss above that of {name} by at most {args.max_loss_delta:g}"
            found.append(Criterion(text, delta, _judge(delta, args.max_loss_delta)))
        if args.max_metric_drop is not None:
            drop = pair["metric_drop"]["value"] if pair["metric_drop"] else None
            text = f"{args.metric} worse than that of {name} by at most {args.max_metric_drop:g}"
            found.append(Criterion(text, drop, _judge(drop, args.max_metric_drop)))
    if args.max_memory_gib is not None:
        text = f"peak memory at most {args.max_memory_gib:g} GiB"
        found.append(Criterion(text, peak_memory_gib, _judge(peak_memory_gib, args.max_memory_gib)))
    return found


def _judge(measured: float | None, most: float) -> Literal["PASS", "FAIL"]:
    return "PASS" if measured is not None and measured <= most else "FAIL"
