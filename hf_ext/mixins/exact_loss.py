"""Losses over the whole effective batch and the whole evaluation set, however they are split into batches."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from peft import PeftModel

from ..data.even_batches import RepeatedRows
from ..models.exact_loss import IGNORED, LossKind, exact_loss, find_loss_kind, sum_loss_rows
from ..overrides import EVALUATION_LOSS, TRAINING_LOSS, find_override

logger = logging.getLogger(__name__)


class ExactLossMixin:
    """Makes a loss of its own Trainer's `compute_loss_func` for the models of `LOSS_KINDS`, in a PEFT wrapper too.

    Left alone: a `compute_loss_func` of the user's, whenever it is set; every trainer in which somebody overrides a
    method of `TRAINING_LOSS`, which Trainer's own arithmetic has to fit; label smoothing, whose loss is Trainer's own;
    `DataParallel`, under which Trainer scales such a loss by the number of devices once too often; all other models.
    There is a warning where that matters and the model does not say itself that it divides by `num_items_in_batch`.

    The loss of an evaluation is the sum over its items by their number: for the models of `LOSS_KINDS`, and for those
    with `row_losses` (AffinityModel, but for its ranking loss), unless the loss is the user's or smoothed, logits are
    to be ignored, or somebody overrides a method of `EVALUATION_LOSS`. For all others it is Trainer's, a mean of batch
    means, which depends on the eval batch size and on the number of processes. Cost: the loss once more, and 8 bytes a
    row.
    """

    args: Any
    model: Any
    accelerator: Any
    label_smoother: Any
    model_accepts_loss_kwargs: bool
    loss_is_scaled_for_ga: bool | None
    num_loss_items: float | None = None  # in the evaluation before; None where its loss is Trainer's
    _loss_rows: list[torch.Tensor] | None = None  # per batch of the evaluation at hand: (n, 2), loss and items
    _given_loss: Any = None
    _is_loss_given = True  # until Trainer is made: what it reads meanwhile is what it was given

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._is_loss_given = self._given_loss is not None
        if self.compute_loss_func is None and self.label_smoother is None and self.args.n_gpu <= 1:
            self._warn_of_means()

    @property
    def compute_loss_func(self) -> Any:
        """What was given or assigned; else the exact loss where it is used; else None, as in Trainer."""
        return self._exact_loss if not self._is_loss_given and self._uses_exact_loss() else self._given_loss

    @compute_loss_func.setter
    def compute_loss_func(self, function: Any) -> None:
        self._given_loss, self._is_loss_given = function, True

    def _uses_exact_loss(self) -> bool:
        """Asked for every batch, since a method can be assigned at any time. Cost: 10 microseconds."""
        if self.label_smoother is not None or self.args.n_gpu > 1:
            return False
        model = unwrap_peft(self.model)
        divides = getattr(model, "accepts_loss_kwargs", None) is True  # by num_items_in_batch, itself
        return not divides and find_loss_kind(model) is not None and find_override(self, *TRAINING_LOSS) is None

    def _warn_of_means(self) -> None:
        """Where an optimizer step sees several batches, or batches of any size, and the loss may not count that."""
        several = self.args.gradient_accumulation_steps * self.args.world_size > 1
        if self.loss_is_scaled_for_ga is not None or not (several or self.args.max_tokens_per_batch is not None):
            return
        model, override = unwrap_peft(self.model), find_override(self, *TRAINING_LOSS)
        if override is None and getattr(model, "accepts_loss_kwargs", None) is not True:
            logger.warning(
                "The loss of %s may be averaged over each micro-batch instead of the effective batch: give a "
                "compute_loss_func(outputs, labels, num_items_in_batch), or have its forward divide by "
                "num_items_in_batch and set accepts_loss_kwargs = True.",
                type(model).__name__,
            )
        elif override is not None:
            logger.warning(
                "%s decides the loss, so it is taken as Trainer takes it: %s over the batches of a step. Set "
                "loss_is_scaled_for_ga in the class: False if it returns the mean of a batch, True if it divides by "
                "num_items_in_batch.",
                override,
                "summed" if self.model_accepts_loss_kwargs else "averaged",
            )

    def loss_counts_items(self) -> bool:
        """Whether the loss is a sum over items by their number in the step, so that batches may vary in size."""
        if not self.args.average_tokens_across_devices or self.label_smoother is not None:
            return False
        if self.compute_loss_func is not None:
            return bool(self.compute_loss_func == self._exact_loss)
        divides = getattr(unwrap_peft(self.model), "accepts_loss_kwargs", None) is True
        return divides and find_override(self, *TRAINING_LOSS) is None

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As in Trainer; rows that another process trains on count nothing."""
        if isinstance(inputs, RepeatedRows):
            return self.compute_loss(model, dict(inputs), *args, **kwargs) * 0.0
        # Trainer takes the labels away, from which an encoder-decoder would have made its decoder's input.
        make_decoder_ids = getattr(unwrap_peft(self.model), "prepare_decoder_input_ids_from_labels", None)
        is_exact = self.compute_loss_func == self._exact_loss
        if is_exact and make_decoder_ids and "labels" in inputs and "decoder_input_ids" not in inputs:
            inputs = {**inputs, "decoder_input_ids": make_decoder_ids(labels=inputs["labels"])}
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def _exact_loss(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model = unwrap_peft(self.model)
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        return exact_loss(cast(LossKind, find_loss_kind(model)), model.config, logits, labels, num_items_in_batch)

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As in Trainer, with the loss over all items; `num_loss_items` says how many there were."""
        self._loss_rows = []
        try:
            output = super().evaluation_loop(  # type: ignore[misc]
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            per_batch = self._loss_rows
        finally:
            self._loss_rows = None
        self.num_loss_items = None
        if per_batch:
            rows = torch.cat(per_batch).cpu().double().numpy()
            finite = np.isfinite(rows[:, 0])
            if self.args.logging_nan_inf_filter and finite.any():  # as Trainer does with batches
                rows = rows[finite]
            total, self.num_loss_items = rows[:, 0].sum(), float(rows[:, 1].sum())
            output.metrics[f"{metric_key_prefix}_loss"] = float(total / max(self.num_loss_items, 1.0))
        return output

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """As in Trainer."""
        if self._loss_rows is None or not self._knows_rows() or self._ignores_logits(ignore_keys):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        loss, logits, labels = super().prediction_step(model, inputs, False, ignore_keys)  # type: ignore[misc]
        rows = None if loss is None else self._sum_rows(logits, labels, inputs.get("bounds"))
        if rows is not None:
            # Leaves out the rows that fill the last batch where there are several processes, as Trainer does later.
            self._loss_rows.append(self.accelerator.gather_for_metrics(rows))
        return (loss, None, None) if prediction_loss_only else (loss, logits, labels)

    def _knows_rows(self) -> bool:
        """Whether the loss of single rows can be had, and adds up to that of a batch."""
        if self.label_smoother is not None or self.compute_loss_func not in (None, self._exact_loss):
            return False
        if self.args.use_liger_kernel or self.label_names != ["labels"]:  # type: ignore[attr-defined]
            return False
        if find_override(self, *EVALUATION_LOSS) is not None:
            return False
        model = unwrap_peft(self.model)
        return hasattr(model, "row_losses") or find_loss_kind(model) is not None

    def _ignores_logits(self, ignore_keys: list[str] | None) -> bool:
        """Whether Trainer hands on other outputs alone: the first of them would be taken for the logits."""
        if ignore_keys is None:
            ignore_keys = getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", None)
        return "logits" in (ignore_keys or ())

    def _sum_rows(self, logits: Any, labels: torch.Tensor, bounds: torch.Tensor | None) -> torch.Tensor | None:
        """Loss and number of items per row, (n, 2); None where a row has no loss of its own."""
        model = unwrap_peft(self.model)
        logits = logits[0] if isinstance(logits, tuple) else logits
        kind = find_loss_kind(model)
        if kind is not None:
            return sum_loss_rows(kind, model.config, logits, labels)
        losses = model.row_losses(logits, labels, None if bounds is None else bounds.to(logits.device))
        return None if losses is None else torch.stack([losses, torch.ones_like(losses)], dim=1)

    # --- training ---------------------------------------------------------------------------------------------------

    def _counts_measurements(self) -> bool:
        """Whether the loss is ours, for which -100 is a measurement like any other."""
        if self.compute_loss_func is not None:
            return bool(self.compute_loss_func == self._exact_loss)
        return hasattr(unwrap_peft(self.model), "row_losses") and find_override(self, *TRAINING_LOSS) is None

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        batch_samples = [_without_labels(b) if isinstance(b, RepeatedRows) else b for b in batch_samples]
        labels = [batch.get("labels") for batch in batch_samples if isinstance(batch, Mapping)]
        measured = [label for label in labels if isinstance(label, torch.Tensor) and label.is_floating_point()]
        if measured and len(measured) == len(batch_samples) and self._counts_measurements():
            batch_samples = [
                batch if isinstance(batch, RepeatedRows) else {"labels": torch.zeros_like(label)}
                for batch, label in zip(batch_samples, measured)
            ]
        return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]


def _without_labels(batch: RepeatedRows) -> RepeatedRows:
    return RepeatedRows(labels=torch.full_like(batch["labels"], IGNORED)) if "labels" in batch else batch


def unwrap_peft(model: Any) -> Any:
    """The model under PEFT's wrapper, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model
