"""What an affinity model is made of, and what is asked of a trained one, as command-line arguments."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Annotated, Literal

from ..arguments import COUNT, FINITE, FIRST_FLAGS, NOT_NEGATIVE, REQUIRE, SEED, check_choices, check_ranges, option
from ..errors import ArgumentError
from ..models import EMBEDDINGS, ModelArguments


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
        *("use_peft", "layer", "head", "binder_threshold", "metric_for_best_model"),
        *FIRST_FLAGS,
    )

    binder_threshold: Annotated[float, FINITE] | None = option(
        None,
        "Labels at or above this count as hits: recall, precision, F1 and average precision are then in every "
        "evaluation. 9 is usual of pKd.",
    )
    require: list[str] = option([], REQUIRE)
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
    embeddings: str | None = option(None, f"{EMBEDDINGS} For a model that was trained on such vectors.")
    keep_columns: bool = option(
        True, "Write all columns of the input too, in its order and as read (not those of a stream)."
    )
    interval: float | None = option(
        None,
        "Also write prediction_low and prediction_high, between which this share of measured values is expected: 0.9, "
        "say. From the validation rows of the training run; no labels are read.",
    )
    rank: Annotated[int, COUNT] | None = option(
        None,
        "Write only so many rows, those to measure next, the first one first, with columns rank and acquisition. The "
        "table should hold no row that is measured already.",
    )
    by: Literal["ucb", "greedy", "thompson"] = option(
        "ucb",
        "With --rank, what acquisition is: ucb prediction + beta * prediction_std, greedy the prediction, thompson a "
        "draw from the normal distribution of both.",
    )
    beta: Annotated[float, NOT_NEGATIVE] = option(1.0, "With --rank --by ucb: weight of prediction_std.")
    minimize: bool = option(False, "With --rank: low values are good. acquisition then has the other sign.")
    diverse: bool = option(
        False,
        "With --rank: of twice as many rows, the best by acquisition, take each time the one with the most edits to "
        "the nearest that is taken.",
    )
    seed: Annotated[int, SEED] = option(42, "With --rank --by thompson: of the draws.")

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(self)


@dataclass
class EmbedArguments:
    """Which encoder, what it embeds, and where vectors go."""

    _argument_group_name = "embedding"  # in --help
    _only_reads = "embed"

    output: str = option(MISSING, "File to write: .h5, .npz or .parquet; without a suffix a folder of our own parts.")
    encoder: str | None = option(None, "Hub id or folder of a pretrained encoder.")
    model: str | None = option(
        None, "Instead: folder that hf-ext train wrote, or Hub id, for its encoders; LoRA adapters are merged in."
    )
    revision: str | None = option(None, "Commit, tag or branch on the Hub.")
    sequence_columns: list[str] = option(
        ["sequence"],
        "Columns with sequences; the vectors of several stand side by side. A model reads those of its training.",
    )
    per: Literal["protein", "residue"] = option("protein", "A vector for each protein, or for each residue.")
    pooling: str = option("mean", "Of each protein: mean or max over residues, mean_tokens, or cls, the first token.")
    layer: list[Annotated[int, COUNT]] = option(
        [],
        "Layers to read, from 1; left out: the last. Those of several stand side by side, the lowest first. The final "
        "norm acts on each, as hf-ext train --layer has it.",
    )
    dtype: Literal["float32", "float16"] = option(
        "float32", "Of the numbers that are written. --bf16 and --fp16 say what encoders compute in."
    )
    names: Literal["auto", "id", "hash"] = option(
        "auto",
        "Names in the file: id, or hash of the sequence as biotrainer 1.4 reads it, once each. auto: id with "
        "--id_column or a column id, else hash.",
    )
    dry_run: bool = option(False, "Say how many sequences, residues and bytes it is, and end.")

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(self)
        if bool(self.encoder) == bool(self.model):
            raise ArgumentError("Which encoder? Give --encoder, or --model with the folder of a finished run.")
        if self.model and (self.layer or self.pooling != "mean" or self.sequence_columns != ["sequence"]):
            raise ArgumentError("--model has a layer, pooling and columns of its own. Leave yours out.")
        if self.per == "residue" and self.pooling != "mean":
            raise ArgumentError(
                f"--pooling {self.pooling} makes one vector of a protein. Leave it, or --per residue, out."
            )


@dataclass
class EvaluateArguments:
    """Which models, on which rows, and what they must reach."""

    _argument_group_name = "scoring"  # in --help
    _only_reads = "evaluate"

    models: list[str] = option(
        MISSING, "Model folders, Hub ids, or CSVs with a column prediction; later ones are compared with the first."
    )
    embeddings: str | None = option(None, f"{EMBEDDINGS} For models that were trained on such vectors.")
    test_of: str | None = option(None, "Output folder of a run of hf-ext train, whose test rows are scored.")
    require: list[str] = option([], REQUIRE)
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
        check_ranges(self)
