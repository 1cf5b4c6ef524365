"""What an affinity model is made of, and what is asked of a trained one, as command-line arguments."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Annotated, Literal

from ..arguments import COUNT, FINITE, REQUIRE, SEED, check_ranges, option, ranges_in_types
from ..models import ModelArguments


@dataclass
class AffinityArguments(ModelArguments):
    """Encoders, how they are used, and the head; what is scored.

    Raises:
        ArgumentError: a value out of range, or two that contradict each other.
    """

    _argument_group_name = "model"  # in --help
    _argument_groups = {"evaluation": ("require",)}
    _first_flags = (
        *("dataset_name", "sequence_columns", "label_column", "split", "folds", "num_seeds"),
        *("encoders", "tower_inputs", "tower_training"),
        *("use_peft", "layer", "head", "binder_threshold", "preset", "metric_for_best_model"),
        *("output_dir", "num_train_epochs", "learning_rate", "per_device_train_batch_size", "seed", "report_to"),
        *("resume", "max_hours", "push_to_hub", "hub_model_id"),
    )

    binder_threshold: Annotated[float, FINITE] | None = option(
        None,
        "Labels at or above this count as hits: recall, precision, F1 and average precision are then in every "
        "evaluation. 9 is usual of pKd.",
    )
    require: list[str] = field(default_factory=list, metadata=REQUIRE)
    folds: str | None = option(
        None,
        "Test each fold once, with a model that has not seen it: a column, whose values are the folds; or how many to "
        "make at random, or by --split of whole groups or clusters (a whole number is never a column). Validation rows "
        "are drawn from the other folds by --split, with their share in --split_sizes.",
    )
    num_seeds: Annotated[int, COUNT] = option(
        1, "Train so many models on the same rows, with --seed, --seed + 1 and so on; their mean predicts."
    )
    final_model: Literal["mean", "all"] = option(
        "mean",
        "With --folds, what predicts new rows: the mean of all models, or models that are trained on all rows "
        "besides, which nothing scores.",
    )


@dataclass
class PredictArguments:
    """Which model, and where predictions go."""

    _argument_group_name = "prediction"  # in --help
    _only_reads = "predict"

    model: str = option(MISSING, "Folder that hf-ext train wrote, or Hub id.")
    output: str = option(
        "predictions.csv",
        "CSV to write. Rows that --bad_rows drop leaves out are listed beside, in NAME.rejected_rows.csv.",
    )
    revision: str | None = option(None, "Commit, tag or branch of a Hub model.")
    keep_columns: bool = option(
        True, "Write all columns of the input too, in its order and as read (not those of a stream)."
    )
    interval: float | None = option(
        None,
        "Also write prediction_low and prediction_high, between which this share of measured values is expected: 0.9, "
        "say. From the validation rows of the training run; no labels are read.",
    )


@dataclass
class EvaluateArguments:
    """Which models, on which rows, and what they must reach."""

    _argument_group_name = "scoring"  # in --help
    _only_reads = "evaluate"

    models: list[str] = option(
        MISSING, "Model folders, Hub ids, or CSVs with a column prediction; later ones are compared with the first."
    )
    test_of: str | None = option(None, "Output folder of a run of hf-ext train, whose test rows are scored.")
    require: list[str] = field(default_factory=list, metadata=REQUIRE)
    metric: str | None = option(
        None, "Of the verdict. Left out: that of the labels, rmse of numbers; spearman where a model only ranks."
    )
    binder_threshold: Annotated[float, FINITE] | None = option(
        None,
        "Labels at or above this count as hits for recall and the other metrics of binders. Left out: that of the "
        "first model's training, if it had one.",
    )
    output: str | None = option(None, "JSON file to write, with all numbers.")
    seed: Annotated[int, SEED] = option(42, "Of the bootstrap behind intervals.")

    def __post_init__(self) -> None:
        check_ranges(self, ranges_in_types(EvaluateArguments))
