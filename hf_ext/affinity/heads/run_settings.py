"""What the arguments of a run say to a search: where it starts, how it trains, what an error is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...evaluation.metrics import PLAIN_METRICS, value_of
from ...reporting.units import less_is_better
from ...training_args import FastTrainingArguments
from ..arguments import AffinityArguments, Head
from ..measure import verdict_metric
from .candidates import HeadSettings
from .rows import HeadRows
from .training import Measure, Recipe

PLAIN: Head = "mlp"


def make_start(training: FastTrainingArguments, args: AffinityArguments) -> HeadSettings:
    """The head and the rates of a run without a search."""
    epochs = float(training.num_train_epochs)
    settings = training.learning_rate, training.weight_decay, int(epochs) if epochs.is_integer() else epochs
    return HeadSettings(PLAIN, tuple(args.head_sizes), args.head_dropout, *settings)


def make_recipe(trainer: Any, args: AffinityArguments, mean: float, std: float) -> Recipe:
    """What all candidates share with the run: rows per step, schedule, loss, and the metric that chooses checkpoints.

    Args:
        trainer: before training, with its plan applied.
        args: of the model.
        mean, std: of the training labels.
    """
    training, config = trainer.args, trainer.model.config
    metric = metric_of(training)

    def loss(predicted: np.ndarray, rows: HeadRows) -> float:
        outputs, labels = (torch.from_numpy((values - mean) / std) for values in (predicted, rows.labels))
        return float(recipe.loss_sum(outputs, labels, torch.from_numpy(rows.bounds))) / len(rows)

    recipe = Recipe(
        widths=tuple(trainer.model.embedding_sizes.values()),
        rows_per_step=training.train_batch_size * training.gradient_accumulation_steps * training.world_size,
        warmup=float(training.warmup_steps),
        scheduler=training.lr_scheduler_type,
        max_grad_norm=float(training.max_grad_norm or 0.0),
        max_steps=max(0, training.max_steps),
        loss=args.loss,
        huber_delta=config.huber_delta,
        tobit_scale=config.tobit_scale,
        measure=_error_of(metric) if metric in PLAIN_METRICS else loss,
        seed=training.seed,
    )
    return recipe


def metric_of(training: FastTrainingArguments) -> str:
    """What the best checkpoint is chosen by, and so the best head: one of `PLAIN_METRICS`, or "loss"."""
    return verdict_metric(training) or "loss"


def _error_of(metric: str) -> Measure:
    """A metric of predictions in label units; one of which more is better, such as Spearman, as 1 - metric."""

    def error(predicted: np.ndarray, rows: HeadRows) -> float:
        value = float(value_of(metric, predicted, rows.labels).value)
        return value if less_is_better(metric) else 1 - value

    return error
