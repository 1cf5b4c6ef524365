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
from typing import Any

from ..arguments import PredictingArguments, parse_command
from ..data import LabelledArguments
from ..property import EvaluateArguments
from ..startup import quick_imports


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the command; returns what the JSON holds.

    Raises:
        RequirementsFailed: a score is not as required; everything was said and written before.
    """
    types = (EvaluateArguments, LabelledArguments, PredictingArguments)
    parser, (own, data_args, computing) = parse_command(types, {}, __doc__, argv)
    with quick_imports():
        from ..processes import refuse_several
        from .evaluating import evaluate_models

    refuse_several("evaluate")
    return evaluate_models(own, data_args, computing, parser.explicit)
