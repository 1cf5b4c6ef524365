"""Frozen, LoRA, full or likelihood: one command for each way to train encoders, and what their test rows show."""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import cast

from ..arguments import PRESETS, FastArgumentParser, name_nearest, read_config
from ..data import DataArguments
from ..errors import ArgumentError
from ..evaluation import metrics_of
from ..files import Facts, Json
from ..finished import compare, format_difference, load_test
from ..property import PREDICTIONS, TASK, EvaluateArguments, baseline_file, read_predictions
from ..text import format_markdown_table, units
from .running import ChildFailed, SideRun, run_child
from .sides import CompareArguments, Role, Side, make_command, number_names

logger = logging.getLogger(__name__)

FROZEN: Role = "frozen"
LIKELIHOOD: Role = "likelihood"
# In the order of what they cost -> what each trains by where neither flags nor a YAML file say so. Adapters begin at
# zero and take the step of a head; pretrained weights take a tenth of it. Validation rows choose the epoch of each.
TRAININGS: Mapping[str, Facts] = {
    FROZEN: {},
    "lora": {"num_train_epochs": 6, "per_device_train_batch_size": 16, "encoder_learning_rate": 1e-3},
    "full": {"num_train_epochs": 6, "per_device_train_batch_size": 16, "encoder_learning_rate": 1e-4},
    LIKELIHOOD: {},  # which has settings of its own
}
BY_SIDE = ("objective", "tower_training", "use_peft", "init_head_from", "output_dir")
OF_ROWS = {*(one.name for one in fields(DataArguments)), "seed", "config"}  # by which rows are read and split
OF_HEAD = {"init_head_from", "head", "head_sizes", "pooling", "encoders", "encoder_revisions", "tower_inputs"}


def compare_trainings(args: CompareArguments, shared: Sequence[str]) -> Json:
    """Runs each of `args.sides` once, scores their predictions for the same test rows, and says which one pays.

    A side that fails is named, and the others are compared without it; but the first one if it fails before it trains.

    Args:
        args: the sides, their seed, and where they go.
        shared: arguments of `hf-ext train` for all sides.

    Returns:
        JSON-able: `answer`, one sentence; `sides` that were run and `failed`, by name; of them and of the best
        baseline what `score_runs` returns.

    Raises:
        ArgumentError: as `make_training_sides`.
        ChildFailed: every side failed, or the first before it trained; with the end of the first one's log.
    """
    runs: list[SideRun] = []
    head: tuple[str, ...] = ()
    for side in make_training_sides(args, shared):
        is_usual = not OF_HEAD & _typed(side.arguments).keys()
        folder = Path(args.output_dir) / side.name
        if is_usual and side.role not in (FROZEN, LIKELIHOOD):
            side = replace(side, arguments=(*side.arguments, *head))
        logger.info("%s", side.name)
        try:
            runs.append(run_child(make_command(args, shared, side, folder, 0), side, 0, folder, is_timed=False))
        except ChildFailed as error:
            if is_usual and not runs and not (folder / "plan.json").is_file():
                raise  # before there was a model: by the rows, say, which all sides read alike
            logger.warning("%s", error)
            runs.append(SideRun(side, 0, error=str(error)))
        if is_usual and side.role == FROZEN and not runs[-1].error:
            head = ("--init_head_from", str(folder))
    done = [run for run in runs if not run.error]
    if not done:
        raise ChildFailed(f"Every side failed. {runs[0].error}")
    found = score_runs(done)
    return {
        **found,
        "answer": answer(found, done),
        "sides": {
            run.side.name: {
                "arguments": [*run.side.arguments],
                "wall_seconds": run.wall_seconds,
                "cpu_seconds": run.cpu_seconds,
                "peak_memory_gib": run.record.costs.peak_memory_gib,
                "num_trainable": run.record.model.num_trainable,
            }
            for run in done
        },
        "failed": {run.side.name: run.error for run in runs if run.error},
    }


def make_training_sides(args: CompareArguments, shared: Sequence[str]) -> list[Side]:
    """Makes the sides, in the order of `TRAININGS`: those that fine-tune start from the head of a frozen one.

    Raises:
        ArgumentError: a recipe without encoders, a flag that it does not have, one that sides set themselves or that
            must be the same for all; streamed rows; a side that is unknown, alone, or there twice.
    """
    if args.recipe != "train":
        raise ArgumentError(f"--sides with --recipe {args.recipe}: only train has encoders that need not train.")
    if len({*args.sides}) < max(2, len(args.sides)):
        raise ArgumentError(f"--sides {' '.join(map(repr, args.sides))}: give two or more that differ.")
    given = _typed(shared)
    if taken := [f"--{name}" for name in BY_SIDE if name in given]:
        raise ArgumentError(f"{', '.join(taken)} after --: every side of --sides has its own. Leave it out.")
    if "config" in given:
        given = {**read_config(given["config"]), **given}
    if "streaming" in given:
        raise ArgumentError("--sides compares test rows one by one: leave --streaming out.")
    sides = [_make_side(text, given) for text in args.sides]
    return number_names(sorted(sides, key=lambda side: [*TRAININGS].index(side.role)))


def _make_side(text: str, given: Facts) -> Side:
    kind, *own = shlex.split(text) or [""]
    if kind not in TRAININGS:
        near = name_nearest(kind, TRAININGS) or "."
        told = f"Sides are {', '.join(TRAININGS)}; the best baseline, a ridge say, stands beside them in any case"
        raise ArgumentError(f"--sides {kind!r}: unknown{near} {told}.")
    if moved := sorted(OF_ROWS & _typed(own).keys()):
        raise ArgumentError(
            f"--sides {text!r}: all sides train on the same rows, so --{', --'.join(moved)} stands after --, for all."
        )
    usual = [f"--{name}={value}" for name, value in TRAININGS[kind].items() if name not in given]
    is_lora = str(kind == "lora").lower()
    way = ["--tower_training", kind, "--use_peft", is_lora]
    if kind == LIKELIHOOD:
        way = ["--objective", kind]
    return Side(kind, cast(Role, kind), (*way, *usual, *own))


def _typed(words: Sequence[str]) -> Json:
    """Returns the arguments of `hf-ext train` that stand in words, by name. Errors: as `FastArgumentParser`."""
    parser = FastArgumentParser(TASK.all_arguments, presets=PRESETS, defaults=TASK.defaults)
    typed, _ = parser.parse_known_args([*words])
    return {name: value for name, value in vars(typed).items() if value is not None}


def score_runs(runs: Sequence[SideRun]) -> Json:
    """Scores the test predictions of runs on one split, and of the first one's best baseline, and compares all pairs.

    Returns:
        JSON-able: `metric` of the first run's verdict, Spearman beside a likelihood; `baseline`, its name; `rows`,
        `num_rows`, `notes` and `scores` as `affinity.comparing.compare` has them, from what costs least to what costs
        most; `verdicts`: each -> those that cost less -> `Verdict.as_dict`.

    Raises:
        DataError: predictions are of other rows.

    Cost: `compare` of each but the last with all that cost more.
    """
    folder = runs[0].folder
    record = runs[0].record
    data_args = DataArguments()
    own = EvaluateArguments(models=[])
    rows = load_test(str(folder), data_args, own, ())
    metric = record.verdict.comparison.get("metric", metrics_of(rows.kind).decides)
    ranking = [run.side.name for run in runs if run.side.role == LIKELIHOOD]
    if ranking:
        metric = "spearman"
    baseline = find_best({name: record.test.scores[name][metric].value for name in record.test.baselines}, metric)
    files = {baseline: baseline_file(folder, baseline)}
    files |= {run.side.name: run.folder / PREDICTIONS for run in runs}
    predictions = {name: read_predictions(path, rows.table, data_args, rows.kind) for name, path in files.items()}
    names = [*predictions]
    found = [
        compare({name: predictions[name] for name in names[i:]}, rows, metric=metric, seed=own.seed, ranking=ranking)
        for i in range(len(names) - 1)
    ]
    verdicts: dict[str, Json] = {name: {} for name in names[1:]}
    for first, one in zip(names, found):
        for name, verdict in one["verdicts"].items():
            verdicts[name][first] = verdict
    facts = {name: found[0][name] for name in ("rows", "num_rows", "scores", "notes")}
    return {"metric": metric, "baseline": baseline, **facts, "verdicts": verdicts}


def find_best(scores: Mapping[str, float | None], metric: str) -> str:
    """Returns the name of what scores best by a metric; one without a score never does."""
    sign = -1 if units.less_is_better(metric) else 1
    known = {name: -math.inf if score is None else sign * score for name, score in scores.items()}
    return max(known, key=known.__getitem__)


def answer(found: Facts, runs: Sequence[SideRun]) -> str:
    """Returns one sentence: what was shown to be better than all that costs less, or that nothing was.

    Args:
        found: from `score_runs`.
        runs: that it is of.
    """
    verdicts = found["verdicts"]
    by_name = {run.side.name: run for run in runs}
    chosen = found["baseline"]
    than = None
    for name in verdicts:
        if verdicts[name][chosen]["is_better"]:
            than = chosen
            chosen = name
    later = [name for name in verdicts if chosen in verdicts[name]]
    lead = f"Nothing was shown to be better than {chosen}"
    if than is not None:
        later = [name for name in later if by_name[name].side.role != FROZEN]
        lead = "Fine-tuning was not shown to pay"
        if by_name[chosen].side.role != FROZEN or not later:
            ratio = by_name[chosen].wall_seconds / by_name[than].wall_seconds if than in by_name else None
            return _sentence(verdicts[chosen][than]) + (f", in {ratio:.1f} times the time." if ratio else ".")
    metric = found["metric"]
    best = find_best({name: found["scores"][name][metric]["value"] for name in later}, metric)
    text = _sentence(verdicts[best][chosen])
    return f"{lead} on these {found['num_rows']:,} rows: {text[:1].lower()}{text[1:]}."


def _sentence(verdict: Facts) -> str:
    """Returns the first of a verdict, without its end; what the interval rests on stands after it."""
    return str(verdict["text"]).partition(". ")[0].removesuffix(".")


def format_trainings(result: Facts) -> str:
    """Formats the page: the answer, a table from what costs least to what costs most, all pairs, what failed."""
    metric = result["metric"]
    baseline = result["baseline"]
    sides = result["sides"]
    shown = [one for one in dict.fromkeys((metric, "spearman")) if one in result["scores"][baseline]]
    headers = ["side", *map(units.metric_name, shown), f"{units.metric_name(metric)} better than {baseline} by"]
    headers = [*headers, "whole run", "CPU time", "peak GiB", "trained parameters"]
    rows = []
    for name, scores in result["scores"].items():
        compared = result["verdicts"].get(name, {}).get(baseline, {}).get("comparison")
        row = [name, *(units.score(scores[one]) for one in shown), format_difference(compared)]
        if one := sides.get(name):
            row += [units.seconds(one["wall_seconds"]), units.seconds(one["cpu_seconds"])]
            row += [f"{one['peak_memory_gib']:.3f}", f"{one['num_trainable']:,}"]
        rows.append([*row, *[units.MISSING] * (len(headers) - len(row))])
    lines = [f"# {', '.join(sides)}", "", result["answer"], ""]
    lines += [f"Each side ran once, in a fresh process. Scores are of {result['rows']}.", ""]
    lines += [format_markdown_table(rows, headers), "", "* the interval of the difference excludes 0.", ""]
    lines += [f"- {one['text']}" for against in result["verdicts"].values() for one in against.values()]
    lines += [f"- {name} FAILED: {error.splitlines()[-1]}" for name, error in result["failed"].items()]
    return "\n".join([*lines, "", *result["notes"]]).rstrip()
