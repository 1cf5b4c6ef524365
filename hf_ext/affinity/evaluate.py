"""Score trained models on labelled rows, and compare them: folders, Hub ids, or predictions of any program in a CSV.

    hf-ext evaluate --models outputs/old outputs/new --dataset_name labelled.csv --require "spearman>=0.60" "rmse<=1.35"

One table has every score with its interval and, beside the first model, by how much each later one is better, by a
paired bootstrap on the same rows; a verdict says what that shows, and predictions that collapsed to a few values are
called so. Label column, group column and binder threshold are those that the first model was trained by, unless you
name others. --test_of scores the test rows of a run, as its predictions.csv lists them, with its threshold, groups and
resampled units; that file among the models has the scores of the run's report to the bit. A .pth becomes a model folder
with hf-ext resume --convert.

A CSV has a column `prediction`, and `source_row` as hf-ext predict writes it, or a line per row in their order;
sequences and labels that it has too must be those of the rows. Requirements hold for every model but the first, or for
a single one. Exit status: 0; 3 if a requirement fails; 1 for what cannot be scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from ..arguments.checks import FINITE, SEED, check_ranges, ranges_in_types
from ..arguments.parser import parse_command
from ..arguments.predicting_fields import PredictingArguments
from ..arguments.training_fields import option
from ..cli import quick_imports
from ..data.arguments import LabelledArguments
from ..evaluation.requirements import REQUIRE
from ..processes import refuse_several


@dataclass
class EvaluateArguments:
    """Which models, on which rows, and what they must reach."""

    _argument_group_name = "scoring"  # in --help
    _only_reads = "evaluate"

    models: list[str] = field(
        metadata={"help": "Model folders, Hub ids, or files with predictions; later ones are compared with the first."}
    )
    test_of: str | None = option(None, "Output folder of a run of hf-ext train, whose test rows are scored.")
    require: list[str] = field(default_factory=list, metadata=REQUIRE)
    metric: str | None = option(None, "Of the verdict. Left out: rmse; spearman where a model only ranks.")
    binder_threshold: Annotated[float, FINITE] | None = option(
        None,
        "Labels at or above this count as hits for recall and the other metrics of binders. Left out: that of the "
        "first model's training, if it had one.",
    )
    prediction_column: str = option("prediction", "Column with predictions in such a file.")
    output: str | None = option(None, "JSON file to write, with all numbers.")
    seed: Annotated[int, SEED] = option(42, "Of the bootstrap behind intervals.")

    def __post_init__(self) -> None:
        check_ranges(self, ranges_in_types(EvaluateArguments))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the command; returns what the JSON holds.

    Raises:
        RequirementsFailed: a score is not as required; everything was said and written before.
    """
    refuse_several("evaluate")
    types = (EvaluateArguments, LabelledArguments, PredictingArguments)
    parser, parsed = parse_command(types, {}, __doc__, argv)
    with quick_imports():
        from .evaluating import evaluate_models

    return evaluate_models(*parsed, parser.explicit)
