"""Score trained models on labelled rows, and compare them: folders, Hub ids, or predictions of any program in a CSV.

    hf-ext evaluate --models outputs/old outputs/new --dataset_name labelled.csv --label_column pKd \\
        --require "spearman>=0.60" "recall>=0.40" "rmse<=1.35"
    hf-ext evaluate --models outputs/affinity other_program.csv --test_of outputs/affinity

One table has every score with its interval and, beside the first model, by how much each later one is better, by a
paired bootstrap on the same rows; a verdict says what that shows, and predictions that collapsed to a few values are
called so. --test_of scores the test rows of a run, as its predictions.csv lists them, with its threshold, groups and
resampled units; that file among the models has the scores of the run's report to the bit. A .pth becomes a model folder
with recipes/resume_check.py --convert.

A CSV has a column `prediction`, and `source_row` as predict.py writes it, or a line per row in their order; sequences
and labels that it has too must be those of the rows. Requirements hold for every model but the first, or for a single
one. Exit status: 0; 3 if a requirement fails; 1 for what cannot be scored.
"""

from __future__ import annotations

import dataclasses

from hf_ext.cli import quick_imports

with quick_imports():
    import importlib
    import json
    import sys
    import tempfile
    from collections.abc import Sequence
    from dataclasses import dataclass, field
    from pathlib import Path
    from typing import Any, Optional

    from hf_ext.affinity.comparing import LabelledRows, compare, describe, describe_unmet, load_labelled, load_test
    from hf_ext.affinity.prediction_file import PREDICTION
    from hf_ext.affinity.predictor import SPEEDUPS
    from hf_ext.affinity.scored_models import ScoredModel, check_reads, find_models, read_all_columns
    from hf_ext.arguments.checks import FINITE, check_ranges
    from hf_ext.arguments.parser import FastArgumentParser
    from hf_ext.checkpoints.run_lock import make_folder
    from hf_ext.data.arguments import DataArguments
    from hf_ext.errors import ArgumentError, exit_on_errors
    from hf_ext.evaluation.metrics import GROUP_METRIC, score_names
    from hf_ext.evaluation.requirements import REQUIRE, parse_requirements, raise_failed
    from hf_ext.evaluation.scores import PAIRED_METRICS
    from hf_ext.processes import refuse_several
    from hf_ext.reporting.run_log import start_run_log
    from hf_ext.reporting.run_record import write_json
    from hf_ext.running import parse_command
    from hf_ext.training_args import FastTrainingArguments

DEFAULTS = {"speedups": SPEEDUPS, "per_device_eval_batch_size": 256, "report_to": "none"}


@dataclass
class EvaluateArguments:
    """Which models, on which rows, and what they must reach."""

    _argument_group_name = "scoring"  # in --help
    _first_flags = (
        *("models", "test_of", "require", "metric", "binder_threshold", "prediction_column", "output"),
        *("dataset_name", "sequence_columns", "label_column", "censor_column", "group_column", "interval_by"),
        *("filter", "bad_rows", "too_long", "seed", "use_cpu", "embedding_cache_dir", "per_device_eval_batch_size"),
    )

    models: list[str] = field(
        metadata={"help": "Model folders, Hub ids, or files with predictions; later ones are compared with the first."}
    )
    test_of: Optional[str] = field(  # noqa: UP045 (HfArgumentParser reads these types)
        default=None, metadata={"help": "Output folder of a run of max_speed.py, whose test rows are scored."}
    )
    require: list[str] = field(default_factory=list, metadata=REQUIRE)
    metric: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "Of the verdict. Left out: rmse; spearman where a model only ranks."}
    )
    binder_threshold: Optional[float] = field(  # noqa: UP045
        default=None,
        metadata={"help": "Labels at or above this count as hits for recall and the other metrics of binders."},
    )
    prediction_column: str = field(default=PREDICTION, metadata={"help": "Column with predictions in such a file."})
    output: Optional[str] = field(default=None, metadata={"help": "JSON file to write, with all numbers."})  # noqa: UP045

    def __post_init__(self) -> None:
        check_ranges(self, {"binder_threshold": FINITE})


TYPES = (EvaluateArguments, DataArguments, FastTrainingArguments)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs the recipe; returns what the JSON holds.

    Raises:
        RequirementsFailed: a score is not as required; everything was said and written before.
    """
    refuse_several("evaluate")
    parser, (own, data_args, args) = parse_command(TYPES, DEFAULTS, __doc__, argv)
    known = score_names(own.binder_threshold, data_args.group_column is not None)
    parse_requirements(own.require, known)  # before rows are read, which may leave the threshold out
    output = find_output(own.output)
    log = start_run_log(None)
    models = find_models(own.models, data_args.too_long if "too_long" in parser.explicit else None)
    rows = load_rows(own, data_args, args, models, parser)
    for one in models:
        if one.collator is not None:
            check_reads(one.name, one.collator, data_args)
    known = score_names(rows.threshold, rows.groups is not None)
    requirements = parse_requirements(own.require, known)
    metric = settle_metric(own.metric, models, known)
    found = compare(
        {one.name: one.predict(rows.table, rows.source, data_args, args, own.prediction_column) for one in models},
        rows,
        metric=metric,
        requirements=requirements,
        seed=args.seed,
        notes=[note for one in models for note in one.notes(rows.table)],
    )
    log.info("\n%s\n", describe(found))
    result = {"models": {one.name: str(one.path) for one in models}, "seed": args.seed, **found}
    if output:
        write_json(output, result)
        log.info("All numbers are in %s.", output)
    raise_failed(describe_unmet(found), f"All scores are in {output}." if output else "All scores stand above.")
    return result


def find_output(name: str | None) -> Path | None:
    """The JSON to write; refused where there is one of somebody else's."""
    if name is None:
        return None
    path = Path(name).expanduser()
    if path.exists() and not is_evaluation(path):
        raise ArgumentError(f"--output {name!r} is there and was not written by evaluate.py. Name another file.")
    make_folder(path.parent, "--output")
    return path


def is_evaluation(path: Path) -> bool:
    """Whether a file is what this recipe writes."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["task"] == "evaluation"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def load_rows(
    own: EvaluateArguments,
    data_args: DataArguments,
    args: FastTrainingArguments,
    models: Sequence[ScoredModel],
    parser: FastArgumentParser,
) -> LabelledRows:
    """The rows to score: of a run, or of a table; what `--bad_rows drop` leaves out is counted in the log."""
    if own.test_of:
        names = {one.name for one in dataclasses.fields(DataArguments)} - {"too_long"}
        if given := sorted(names & parser.explicit):
            raise ArgumentError(f"--test_of has rows and columns of its own: leave out --{', --'.join(given)}.")
        return load_test(own.test_of, data_args, own, args, parser.explicit)
    if "sequence_columns" not in parser.explicit:
        read_all_columns(models, data_args)
    with tempfile.TemporaryDirectory() as scratch:
        return load_labelled(data_args, own, Path(scratch))


def settle_metric(asked: str | None, models: Sequence[ScoredModel], known: Sequence[str]) -> str:
    """What verdicts compare in."""
    metric = asked or ("spearman" if any(one.is_scale_free for one in models) else "rmse")
    allowed = [name for name in known if name in (*PAIRED_METRICS, GROUP_METRIC)]
    if metric not in allowed:
        raise ArgumentError(f"--metric {metric}: allowed here are {', '.join(allowed)}.")
    return metric


def give_way_to_the_library() -> None:
    """Lets a script beside this one import the library `evaluate`, of which this file has the name."""
    folder, path = Path(__file__).resolve().parent, sys.path
    del sys.modules["evaluate"]
    sys.path = [one for one in path if Path(one).resolve() != folder]
    try:
        importlib.import_module("evaluate")
    finally:
        sys.path = path


if __name__ == "evaluate":
    give_way_to_the_library()
elif __name__ == "__main__":
    with exit_on_errors():
        main()
