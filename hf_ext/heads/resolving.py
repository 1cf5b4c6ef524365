"""What `--head auto` means for a run: heads of several kinds, or why a single one is trained."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import CONFIG_NAME

from ..errors import ArgumentError
from ..evaluation import metrics_of
from ..labels import LabelKind
from ..models import (
    ONE_LAYER,
    AffinityConfig,
    Head,
    ModelArguments,
)
from ..pretrained import reading
from ..training_args import FastTrainingArguments

AUTO: Head = "auto"
PLAIN: Head = "mlp"
ONE_LAYER_SIZE = 64
SIZES = (256, 64)  # of the ensemble's networks, the run's own among them
DROPOUT = 0.1  # of these
IDLE_EPOCHS = 8  # without a lower error, after which a network ends
UNUSED_EPOCHS = 3  # of a network that neither predicts nor is kept
MAX_LABELS = 1_000  # of which each member keeps the probability, for every row


def resolve_head(
    args: ModelArguments,
    training: FastTrainingArguments,
    explicit: Collection[str],
    is_stream: bool,
    kind: LabelKind,
) -> str:
    """Resolves what `--head` and `--head_sizes` mean before a model is built; `args.head` is "auto" if heads are mixed.

    Args:
        args: as parsed, towers resolved; changed in place.
        training: of the run.
        explicit: names of the arguments that the user set.
        is_stream: whether rows are.
        kind: of the labels.

    Returns:
        Why a single network is trained although `--head auto` was meant; else "".

    Raises:
        ArgumentError: `--head auto` with sizes.
    """
    if "head_sizes" not in explicit:
        if args.head in ONE_LAYER:
            args.head_sizes = [ONE_LAYER_SIZE]
        elif kind.head_sizes and not args.trains_encoders:
            args.head_sizes = [*kind.head_sizes]
    if args.head != AUTO:
        return ""
    if "head_sizes" in explicit:
        if "head" in explicit:
            raise ArgumentError(
                "--head auto has sizes of its own: leave --head_sizes out, or give --head mlp (product, gated) with it."
            )
        args.head = PLAIN
        return "Head: one mlp, as --head_sizes asks for; without it, several heads are mixed (--head auto)."
    if args.init_head_from:
        _take_head_of(args, Path(args.init_head_from))
        return f"Head: one {args.head}, begun from the network of {args.init_head_from}; it is not mixed with others."
    if reason := _why_single(args, training, is_stream, kind):
        args.head = PLAIN
        return f"Head: mlp {'-'.join(map(str, args.head_sizes))}. --head auto mixes several heads, but {reason}."
    args.head_sizes = [*SIZES]
    if "head_dropout" not in explicit:
        args.head_dropout = DROPOUT
    if args.stock_trainer:
        args.head = PLAIN
        return "Head: one mlp 256-64, which --head auto trains too; stock Trainer mixes it with no others."
    return ""


def _take_head_of(args: ModelArguments, folder: Path) -> None:
    """Takes the form of a trained network; `carry_head` names what is wrong with a folder that has none."""
    args.head = PLAIN
    if found := read_config_of(folder):
        config = AffinityConfig.from_dict(found)
        args.head = cast(Head, config.head_form or PLAIN)
        args.head_sizes = list(config.head_sizes or [])
        args.head_dropout = config.head_dropout


def read_config_of(folder: Path) -> dict[str, Any]:
    """Reads the `AffinityConfig` in a folder; nothing where there is none."""
    with reading(f"Model {folder} cannot be loaded", folder, "Copy it, or download it, again."):
        found = AffinityConfig.get_config_dict(folder)[0] if (folder / CONFIG_NAME).is_file() else {}
    return found if found.get("model_type") == AffinityConfig.model_type else {}


def _why_single(
    args: ModelArguments,
    training: FastTrainingArguments,
    is_stream: bool,
    kind: LabelKind,
) -> str | None:
    metric = str(training.metric_for_best_model).removeprefix("eval_")
    if kind.why_one_head:
        return kind.why_one_head
    if kind.num_classes is None and kind.num_outputs > MAX_LABELS:
        return f"what all of them predict of {kind.num_outputs:,} labels would not fit into memory"
    if args.distill_from:
        return "they are fitted on labels alone, and here is a teacher, too"
    if args.loss != "mse":
        measure = "log loss" if args.loss == "focal" else "least squares"
        return f"they are fitted by {measure}, not by --loss {args.loss}"
    if args.class_weights:
        return f"they are fitted and weighed with all rows alike, not with --class_weights {args.class_weights}"
    if metric in metrics_of(kind).of_hits:
        return f"their mean seldom reaches the threshold of --metric_for_best_model {metric}"
    return why_not_fitted(args, training, is_stream)


class StopIdle(TrainerCallback):
    """Ends the training of a network after `IDLE_EPOCHS` without a better score of validation rows.

    What it goes by is in the trainer's state, so that a continued run ends where it would have.

    Args:
        is_unused: others predict, and the best of these is kept: it ends after `UNUSED_EPOCHS`.
    """

    def __init__(self, is_unused: bool) -> None:
        self.is_unused = is_unused

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.on_save(args, state, control)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        epochs = state.epoch or 0.0
        until_best = epochs * (state.best_global_step or state.global_step) / max(1, state.global_step)
        if epochs - until_best >= IDLE_EPOCHS or (self.is_unused and epochs >= UNUSED_EPOCHS):
            control.should_training_stop = True


def may_stop(args: ModelArguments, explicit: Collection[str]) -> bool:
    """Returns whether encoders are frozen, and the user left open how long a network trains, saves and evaluates."""
    said = {"num_train_epochs", "max_steps", "early_stopping_patience", "eval_strategy", "save_strategy"}
    return not args.trains_encoders and not said & {*explicit}


def why_not_fitted(args: ModelArguments, training: Any, is_stream: bool) -> str | None:
    """Returns why nothing can be fitted on the embeddings of all rows, beside the network that trains."""
    if args.trains_encoders:
        return "here encoders train"
    if is_stream:
        return "here rows are a stream"
    return f"here are {training.world_size} processes" if training.world_size > 1 else None
