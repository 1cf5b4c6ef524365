"""What a model of a property is made of, as command-line arguments: encoders, how they are used, the head, the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ..arguments import (
    ABOVE_ZERO,
    COUNT,
    SHARE_BELOW_ONE,
    WIDTH,
    check_choices,
    check_ranges,
    option,
)
from ..errors import ArgumentError

AUTO_LAYER = "auto"
LAST_LAYER = "last"
Head = Literal["auto", "mlp", "product", "gated"]
EMBEDDINGS = (
    "File with the vector of each row, or of each of its residues, that another program or hf-ext embed wrote: HDF5, "
    ".npz or Parquet, by --id_column, sequence, or hash of the sequence."
)
# What means nothing where vectors are read.
OF_ENCODERS = (
    *("encoders", "encoder_revisions", "tower_inputs", "pooling", "layer", "max_length", "save_full"),
    *("stock_trainer", "distill_from"),
)


@dataclass
class ModelArguments:
    """Encoders, how they are used, and the head.

    Raises:
        ArgumentError: a value out of range, or two that contradict each other.
    """

    _argument_group_name = "model"  # in --help

    encoders: list[str] = option(
        [], "One encoder per tower: Hub ids or folders. Towers that name the same encoder share its weights."
    )
    embeddings: str | None = option(None, f"{EMBEDDINGS} No encoder is loaded then.")
    encoder_revisions: list[str] = option([], "A commit, tag or branch per encoder; one is used for all.")
    tower_inputs: list[str] = option(
        [],
        "Sequence columns per tower: 'heavy,light' encodes each by itself, 'heavy+light' as one pair. Left out: one "
        "tower reads all columns, as many towers as columns read one each.",
    )
    pooling: list[str] = option(
        ["mean"],
        "How each tower makes one vector of its tokens: mean or max over residues, mean_tokens (special tokens count "
        "too) or cls (the first token; T5 encoders have none). One is used for all.",
    )
    layer: str = option(
        LAST_LAYER,
        "Whose states are pooled: a number, from 1; last; or auto, of frozen encoders the layer whose embeddings "
        "predict held-out rows better than the last's, beyond chance, else the last. Layers above are dropped. Left "
        "out with --init_head_from: that of its run.",
    )
    max_length: Annotated[int, COUNT] | None = option(
        None,
        "Longest encoder input in tokens, special ones included; --too_long says what becomes of longer ones. Left "
        "out: as the encoder allows.",
    )
    tower_training: list[str] = option(
        [],
        "frozen, lora or full per tower; one is used for all. Left out: lora with --use_peft, else frozen. Frozen "
        "towers are embedded once.",
    )
    init_head_from: str | None = option(
        None, "Model folder of a run with frozen encoders; training starts from its head and its scales."
    )
    objective: Literal["head", "likelihood"] = option(
        "head",
        "What is learned: head, on embeddings; or likelihood, of variants of one protein with few labels: a masked "
        "language model ranks them by the likelihood of their substitutions, and trains in full or by --use_peft.",
    )
    head: Head = option(
        "auto",
        "auto: on frozen encoders the mean of linear models and small networks, weighed by rows that they were not "
        "fitted on; else mlp. mlp: a perceptron of --head_sizes. product: a product of the towers' projections beside "
        "a hidden layer. gated: one hidden layer with gates. Both take one --head_sizes, 64 if left out.",
    )
    head_sizes: list[Annotated[int, WIDTH]] = option(
        [1024, 512, 256, 128],
        "Widths of the head's hidden layers. Without --head they mean --head mlp. Left out, a network for residues of "
        "frozen encoders has 256.",
    )
    head_dropout: Annotated[float, SHARE_BELOW_ONE] = option(0.3, "Dropout after each hidden layer of the head.")
    loss: Literal["mse", "huber", "tobit", "ranking", "focal"] = option(
        "mse",
        "huber turns linear one standard deviation from the label; tobit uses --censor_column; ranking learns order "
        "alone; focal, of classes, whose loss is cross entropy otherwise, counts less what is predicted well.",
    )
    focal_gamma: Annotated[float, ABOVE_ZERO] = option(
        2.0, "With --loss focal: the loss is multiplied by (1 - probability of the truth) to this power."
    )
    class_weights: Literal["balanced"] | None = option(
        None,
        "balanced: each class weighs as much as others in the loss, however few its training rows are; of several "
        "labels having one weighs as much as lacking it. Probabilities are then those of balanced classes.",
    )
    distill_from: str | None = option(
        None,
        "Folder or Hub id of a trained model of the same labels, numbers or classes: what it predicts for training "
        "rows is learned, too. Validation and test keep to their labels.",
    )
    unlabelled: str | None = option(
        None,
        "With --distill_from: rows without labels, as --dataset_name, of which the predictions alone are learned.",
    )
    distill_weight: Annotated[float, SHARE_BELOW_ONE] = option(
        0.5, "With --distill_from: weight of the teacher in the loss; that of the label is 1 less it."
    )
    distill_temperature: Annotated[float, ABOVE_ZERO] = option(
        2.0,
        "With --distill_from, of classes: what the logits of both are divided by in the teacher's part of the loss.",
    )
    save_full: bool = option(False, "Save frozen encoders' weights too, not only their id.")
    stock_trainer: bool = option(
        False, "Train with transformers.Trainer itself, the control of comparisons: frozen encoders run in every step."
    )

    def __post_init__(self) -> None:
        check_choices(self)
        if 0 in self.head_sizes:
            raise ArgumentError(
                f"--head_sizes {' '.join(map(str, self.head_sizes))}: a hidden layer of 0 units lets nothing through. "
                "For a head without hidden layers, a linear one, write head_sizes: [] in the YAML file of --config."
            )
        check_ranges(self)
        if self.layer not in (AUTO_LAYER, LAST_LAYER) and not self.layer_number:
            raise ArgumentError(f"--layer {self.layer}: give a number, from 1, {LAST_LAYER} or {AUTO_LAYER}.")

        if self.embeddings:
            usual = ModelArguments()
            given = [name for name in OF_ENCODERS if getattr(self, name) != getattr(usual, name)]
            if given:
                told = f"--embeddings {self.embeddings}: without an encoder --{given[0]} means nothing"
                raise ArgumentError(f"{told}. Leave one of the two out.")

    @property
    def measured_loss(self) -> str:
        """The loss as `KindRows.by_loss` names it."""
        return "weighted" if self.class_weights else self.loss

    @property
    def trains_encoders(self) -> bool:
        """Whether an encoder has weights that train."""
        return bool({*self.tower_training} - {"frozen"})

    @property
    def layer_number(self) -> int | None:
        """The layer that is asked for by its number."""
        return int(self.layer) if self.layer.isdecimal() else None

    def per_tower(self, name: str) -> list[str]:
        """Returns the values of a list argument, one per encoder.

        Raises:
            ArgumentError: neither one value nor one per encoder.
        """
        values = getattr(self, name)
        if len(values) not in (1, len(self.encoders)):
            raise ArgumentError(
                f"--{name} has {len(values)} values for {len(self.encoders)} encoders: give 1 or as many."
            )
        return values * len(self.encoders) if len(values) == 1 else values
