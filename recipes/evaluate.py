"""Score trained models on labelled rows, and compare them: folders, Hub ids, or predictions of any program in a CSV.

    hf-ext evaluate --models outputs/old outputs/new --dataset_name labelled.csv --label_column pKd \\
        --require "spearman>=0.60" "recall>=0.40" "rmse<=1.35"
    hf-ext evaluate --models outputs/affinity other_program.csv --test_of outputs/affinity

One table has every score with its interval and, beside the first model, by how much each later one is better, by a
paired bootstrap on the same rows; a verdict says what that shows, and predictions that collapsed to a few values are
called so. --test_of scores the rows that a run's own split held out, with its seed, threshold and slices: its model
then has the scores of its report to the bit, on the same machine and with its embedding cache. A .pth becomes a model
folder with recipes/resume_check.py --convert.

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

    from hf_ext.affinity.candidates import Candidate, find_candidates, settle_columns
    from hf_ext.affinity.evaluated_rows import (
        EvaluatedRows,
        load_labelled,
        load_test,
        read_trained_run,
        recorded_label,
        repeated_settings,
    )
    from hf_ext.affinity.evaluating import evaluate
    from hf_ext.affinity.measure import verdict_metric
    from hf_ext.affinity.prediction_file import PREDICTION
    from hf_ext.affinity.teacher import SPEEDUPS
    from hf_ext.arguments.checks import FINITE, check_ranges
    from hf_ext.arguments.parser import FastArgumentParser
    from hf_ext.checkpoints.run_lock import make_folder
    from hf_ext.data.arguments import DataArguments
    from hf_ext.errors import ArgumentError, exit_on_errors
    from hf_ext.evaluation.metrics import GROUP_METRIC, score_names
    from hf_ext.evaluation.requirements import REQUIRE, parse_requirements, raise_failed
    from hf_ext.evaluation.row_metrics import RowMetrics
    from hf_ext.evaluation.scores import PAIRED_METRICS
    from hf_ext.processes import refuse_several
    from hf_ext.reporting.report.run_files import RunFiles
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
        default=None, metadata={"help": "Of the verdict. Left out: that of the run of --test_of; else rmse."}
    )
    binder_threshold: Optional[float] = field(  # noqa: UP045
        default=9.0,
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
    run = read_trained_run(own.test_of) if own.test_of else None
    if run:
        refuse_other_rows(parser)
        defaults = {**DEFAULTS, **repeated_settings(run, parser.origins)}
        parser, (own, data_args, args) = parse_command(TYPES, defaults, __doc__, argv)
    parse_requirements(own.require, score_names(own.binder_threshold, data_args.group_column is not None))
    output = find_output(own.output)
    log = start_run_log(None)
    candidates = find_candidates(own.models, data_args.too_long if "too_long" in parser.explicit else None)
    settle_columns(candidates, data_args, run is not None or "sequence_columns" in parser.explicit)
    labels = {recorded_label(one.path) for one in candidates} - {None}
    if run is None and "label_column" not in parser.explicit and len(labels) == 1:
        (data_args.label_column,) = labels
        log.info("Labels: column '%s', as in training; --label_column names another.", data_args.label_column)

    rows = load_rows(run, own, data_args, args, parser)
    known = score_names(own.binder_threshold, data_args.group_column is not None)
    requirements = parse_requirements(own.require, known)
    by_rows = verdict_metric(args, RowMetrics(own.binder_threshold, data_args.group_column))
    metric = settle_metric(own.metric or by_rows, candidates, known)
    found = evaluate(
        {one.name: one.predict(rows, data_args, args, own.prediction_column) for one in candidates},
        rows,
        metric=metric,
        requirements=requirements,
        seed=args.seed,
        notes=[note for one in candidates for note in one.notes(rows)],
    )
    log.info("\n%s\n", found.text())
    result = {"models": {one.name: str(one.path) for one in candidates}, "seed": args.seed, **found.as_dict()}
    if output:
        write_json(output, result)
        log.info("All numbers are in %s.", output)
    raise_failed(found.failed(), f"All scores are in {output}." if output else "All scores stand above.")
    return result


def refuse_other_rows(parser: FastArgumentParser) -> None:
    """Raises ArgumentError where options of the data stand beside a run, which has its own."""
    own = {one.name for one in dataclasses.fields(DataArguments)} - {"dataset_name"}
    if given := sorted(own & parser.explicit):
        raise ArgumentError(
            f"--test_of reads the run's rows as the run did: leave out --{', --'.join(given)}. (--dataset_name says "
            "where its data are now.)"
        )


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
    run: RunFiles | None,
    own: EvaluateArguments,
    data_args: DataArguments,
    args: FastTrainingArguments,
    parser: FastArgumentParser,
) -> EvaluatedRows:
    """The rows to score; what `--bad_rows drop` leaves out is counted in the log."""
    if run:
        return load_test(run, data_args, own, args.seed)
    with tempfile.TemporaryDirectory() as scratch:
        return load_labelled(data_args, own, parser.explicit, Path(scratch))


def settle_metric(asked: str | None, candidates: Sequence[Candidate], known: Sequence[str]) -> str:
    """What verdicts compare in."""
    metric = asked or ("spearman" if any(one.is_scale_free for one in candidates) else "rmse")
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
