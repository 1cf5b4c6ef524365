"""What `--objective likelihood` means for a run: its settings, and the wild type that its rows are variants of.

The masked language model ranks variants by what their substitutions do to the likelihood, given the wild type, and
trains by the order of labels in a batch. What that is worth beside a head: benchmarks/README.md, few labels.
Source: A. Hawkins-Hooker et al., "Likelihood-based fine-tuning of protein language models for few-shot fitness
prediction and design" (2024), with the wild-type marginals that they use for ESM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..data import DataArguments, SequenceCollator
from ..errors import ArgumentError
from ..models import LIKELIHOOD, AffinityModel, ModelArguments
from ..training_args import FastTrainingArguments
from .resolving import PLAIN

# What a head on embeddings reads or begins with, or what comes before rows are compared with a wild type.
NOT_READ = {
    *("embeddings", "pooling", "layer", "init_head_from", "head", "head_sizes", "head_dropout", "class_weights"),
    *("distill_from", "stock_trainer", "numeric_columns", "category_columns", "missing_chains", "streaming"),
}
# By how encoders train, for some hundred labels.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "full": {"learning_rate": 1e-4, "num_train_epochs": 15},
    "lora": {"learning_rate": 1e-3, "num_train_epochs": 15},
}


def resolve_likelihood(
    args: ModelArguments,
    training: FastTrainingArguments,
    data_args: DataArguments,
) -> str:
    """Sets what goes with `--objective likelihood` where the user did not: encoders that train, loss, learning rate.

    Args:
        args, training: as parsed; changed in place.
        data_args: of the rows.

    Returns:
        What was set, as a sentence; "" without this objective.

    Raises:
        ArgumentError: something is asked for that does not go with it, or there are no rows of one sequence column.
    """
    if args.objective != LIKELIHOOD:
        return ""
    explicit = training.explicit_fields
    told = f"--objective {LIKELIHOOD}"
    if given := sorted(explicit & NOT_READ):
        raise ArgumentError(f"{told}: --{given[0]} goes with a head on embeddings alone. Leave one of the two out.")
    if "loss" in explicit and args.loss != "ranking":
        raise ArgumentError(f"{told} learns the order of rows: leave --loss {args.loss} out, or say ranking.")
    if "frozen" in args.tower_training:
        raise ArgumentError(f"{told}: nothing would train. Say --tower_training full or lora, or leave it out.")
    if data_args.dataset_name is None or len(data_args.sequence_columns) != 1:
        raise ArgumentError(f"{told} is for a --dataset_name of variants in one sequence column: name both.")
    args.loss = "ranking"
    args.head = PLAIN
    args.head_sizes = []
    if not args.tower_training:
        args.tower_training = ["lora" if training.use_peft else "full"]
    if not explicit & {"bf16", "fp16"}:
        training.without = [*training.without, "precision"]  # a score is a small difference, of one cheap pass
    settings = SETTINGS[args.tower_training[0]]
    for name in settings.keys() - explicit:
        setattr(training, name, settings[name])
    used = ", ".join(f"--{name} {getattr(training, name):g}" for name in settings)
    return f"Likelihood: {used}, and the loss ranks the rows of a batch."


def set_wild_type(
    model: AffinityModel,
    collator: SequenceCollator,
    wild_type: str,
) -> None:
    """Gives a model the wild type of the rows, and its collator the length.

    Raises:
        ArgumentError: there is none, or it is longer than the encoder takes at once.
    """
    if not wild_type:
        raise ArgumentError(f"--objective {LIKELIHOOD}: rows are no variants of one protein. Name it by --wild_type.")
    ((name, _),) = collator.columns.items()
    most = collator.tokenizers[name].max_residues
    if most is not None and len(wild_type) > most:
        raise ArgumentError(
            f"--objective {LIKELIHOOD}: the wild type has {len(wild_type):,} residues, and "
            f"{collator.tokenizers[name].limited_by} {most:,}. Cut rows to a domain, or raise --max_length."
        )
    model.config.wild_type = collator.encode(name, [wild_type])["input_ids"][0].tolist()
    collator.num_residues = len(wild_type)
