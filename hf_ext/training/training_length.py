"""A run that would train nothing is refused by the name of what leaves it nothing; so is a word that means nothing.

Trainer 5.23 reports success for runs of no step, and trains one where `max_steps` is 0.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import has_length

from ..argument_checks import check_choices
from ..data.columns import has_numbered_rows
from ..errors import ArgumentError, DataError


def check_training(args: TrainingArguments, rows: Any) -> None:
    """Before training, and not before an evaluation, which needs no steps.

    Args:
        args: of the trainer.
        rows: that it will train on; None where somebody else makes its loader.

    Raises:
        ArgumentError: the arguments ask for no step; a word that is no choice was assigned to one after they were
            built.
        DataError: there are no rows.
    """
    check_choices(args)
    if has_numbered_rows(rows) and len(rows) == 0:
        _refuse_empty(args, 0)  # torch's sampler would speak of num_samples
    _check_length(args.num_train_epochs, args.max_steps)


def check_batches(args: TrainingArguments, loader: Any) -> None:
    """Raises ArgumentError where `dataloader_drop_last` leaves `loader` no batch, DataError where it has no rows."""
    if has_length(loader) and len(loader) == 0:
        rows = getattr(loader, "dataset", None)
        _refuse_empty(args, len(rows) if rows is not None and has_length(rows) else 0)


def _check_length(num_train_epochs: float, max_steps: int) -> None:
    """Raises ArgumentError where they come to no optimizer step."""
    if max_steps == 0:
        raise ArgumentError(
            "max_steps=0 trains nothing. Give a number of optimizer steps, or leave it out (-1) to train for "
            "num_train_epochs. To score a model as it is, call `evaluate` or `predict`."
        )
    if max_steps < 0 and not (num_train_epochs > 0 and math.isfinite(num_train_epochs)):
        raise ArgumentError(
            f"num_train_epochs={num_train_epochs:g}: must be a number above 0, or nothing is trained; fractions are "
            "allowed. To score a model as it is, call `evaluate` or `predict`."
        )


def _refuse_empty(args: TrainingArguments, num_rows: int) -> None:
    """Raises what says why there is no batch."""
    if num_rows == 0:
        raise DataError("The training set has no rows: nothing can be trained.")
    rows = args.train_batch_size * args.world_size
    raise ArgumentError(
        f"dataloader_drop_last leaves no batch: {num_rows} training rows are fewer than the {rows} of one batch "
        f"(per_device_train_batch_size={args.per_device_train_batch_size}, {args.world_size} process(es)). Leave "
        "dataloader_drop_last out, or lower per_device_train_batch_size."
    )
