"""Score trained models on labelled rows, and compare them: folders, Hub ids, or predictions of any program in a CSV.

    hf-ext evaluate --models outputs/old outputs/new --dataset_name labelled.csv --require "spearman>=0.60" "rmse<=1.35"

One table has every score with its interval and, beside the first model, by how much each later one is better, by a
paired bootstrap on the same rows; a verdict says what that shows, and predictions that collapsed to a few values are
called so. Label column and binder threshold are those that the first model was trained by, unless you name others.
--test_of scores the test rows of a run, as its predictions.csv lists them, with its threshold, groups and resampled
units; that file among the models has the scores of the run's report to the bit. A .pth becomes a model folder with
hf-ext resume --convert.

A CSV has a column `prediction` (other labels than numbers: see docs/labels.md), and `source_row` as hf-ext predict
writes it, or a line per row in their order; sequences that it has too must be those of the rows. Requirements hold for
every model but the first, or for a single one. Exit status: 0; 3 if a requirement fails; 1 for what cannot be scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from ..arguments import PredictingArguments, parse_command
from ..data import DataArguments, LabelledArguments
from ..errors import ArgumentError
from ..files import Json
from ..property import EvaluateArguments
from ..startup import quick_imports
from ..text import write_json


def main(argv: Sequence[str] | None = None) -> Json:
    """Scores all models on the same rows; returns what the JSON holds.

    Raises:
        ArgumentError, DataError: what cannot be scored.
        RequirementsFailed: a score is not as required; everything was said and written before.
    """
    types = (EvaluateArguments, LabelledArguments, PredictingArguments)
    parser, (own, labelled, computing) = parse_command(types, {}, __doc__, argv)
    with quick_imports():  # here, so that --help waits for no model code
        from ..evaluation import metrics_of, parse_requirements, raise_failed
        from ..processes import refuse_several
        from ..property import scored_names, training_arguments
        from ..text import start_run_log
        from .comparing import compare, describe, describe_unmet, load_labelled, load_test
        from .scored_models import cut_behind, find_common_kind, find_models, find_output, take_from_training

    refuse_several("evaluate")
    data_args = DataArguments(**vars(labelled))
    output = find_output(own.output)
    log = start_run_log(None)
    models = find_models(
        own.models, labelled.too_long if "too_long" in parser.explicit else None, labelled.max_residues
    )
    if own.test_of is None:
        take_from_training(models, own, data_args, parser.explicit)
        rows = load_labelled(data_args, own.binder_threshold, find_common_kind(models))
    else:
        names = {one.name for one in fields(LabelledArguments)} - {"too_long"}
        if given := sorted(names & {*parser.explicit}):
            raise ArgumentError(f"--test_of has rows and columns of its own: leave out --{', --'.join(given)}.")
        rows = load_test(own.test_of, data_args, own, parser.explicit)
    kind = rows.kind
    find_common_kind([*models, rows])
    requirements = parse_requirements(
        own.require, scored_names(kind, rows.threshold, rows.groups is not None), trains=False
    )
    ranking = [one.name for one in models if one.is_scale_free]
    decides = "spearman" if ranking else metrics_of(kind).decides
    metric = own.metric or decides
    if metric not in (allowed := scored_names(kind, rows.threshold, has_groups=False)):
        raise ArgumentError(f"--metric {metric}: allowed here are {', '.join(allowed)}.")
    args = training_arguments(computing, parser.explicit, seed=own.seed)
    predictions = {
        one.name: one.predict(rows.table, rows.source, data_args, args, kind, own.embeddings) for one in models
    }
    if kind.per_residue:
        predictions, rows = cut_behind(predictions, rows)
    found = compare(
        predictions,
        rows,
        metric=metric,
        requirements=requirements,
        seed=own.seed,
        ranking=ranking,
    )
    log.info("\n%s\n", describe(found))
    result = {"models": {one.name: str(one.path) for one in models}, "seed": own.seed, **found}
    if output:
        write_json(output, result)
        log.info("All numbers are in %s.", output)
    raise_failed(describe_unmet(found), f"All scores are in {output}." if output else "All scores stand above.")
    return result
