"""A run that would train nothing is refused by the name of what leaves it nothing; so is a word that means nothing."""

from __future__ import annotations

import math
from typing import Any

from transformers.trainer_utils import has_length

from ..argument_checks import check_choices
from ..data.columns import has_numbered_rows
from ..errors import ArgumentError, DataError
from ..overrides import find_override


class TrainingLengthMixin:
    """Trainer 5.23 reports success for runs of no step, and trains one where `max_steps` is 0.

    Raises (from `train`):
        ArgumentError: the arguments ask for no step, or `dataloader_drop_last` leaves no batch; a word that is no
            choice was assigned to an argument after they were built.
        DataError: the training set has no rows.
    """

    args: Any

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer. Evaluation and prediction need no steps and are not asked."""
        check_choices(self.args)
        rows = getattr(self, "train_dataset", None)
        if not find_override(self, "get_train_dataloader") and has_numbered_rows(rows) and len(rows) == 0:  # type: ignore[arg-type]
            refuse_empty(self.args, 0)  # torch's sampler would speak of num_samples
        check_length(self.args.num_train_epochs, self.args.max_steps)
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """As in Trainer, for a loader that has batches."""
        if has_length(dataloader) and len(dataloader) == 0:
            rows = getattr(dataloader, "dataset", None)
            refuse_empty(args, len(rows) if has_length(rows) else 0)
        return super().set_initial_training_values(args, dataloader)  # type: ignore[misc]


def check_length(num_train_epochs: float, max_steps: int) -> None:
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


def refuse_empty(args: Any, num_rows: int) -> None:
    """Raises what says why there is no batch."""
    if num_rows == 0:
        raise DataError("The training set has no rows: nothing can be trained.")
    rows = args.train_batch_size * args.world_size
    raise ArgumentError(
        f"dataloader_drop_last leaves no batch: {num_rows} training rows are fewer than the {rows} of one batch "
        f"(per_device_train_batch_size={args.per_device_train_batch_size}, {args.world_size} process(es)). Leave "
        "dataloader_drop_last out, or lower per_device_train_batch_size."
    )
