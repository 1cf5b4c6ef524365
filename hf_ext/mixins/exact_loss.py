"""Losses over the whole effective batch, so that accumulation, processes and variable batches give one gradient."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import torch
from peft import PeftModel

from ..models.exact_loss import LossKind, exact_loss, find_loss_kind

logger = logging.getLogger(__name__)


class ExactLossMixin:
    """Sets Trainer's `compute_loss_func` for the models of `LOSS_KINDS`, in a PEFT wrapper too.

    Left alone: a `compute_loss_func` of the user's; label smoothing, whose loss is Trainer's own; `DataParallel`, under
    which Trainer scales such a loss by the number of devices once too often; all other models, with a warning where
    it matters and the model does not say itself that it divides by `num_items_in_batch`.
    """

    args: Any
    model: Any
    compute_loss_func: Any
    label_smoother: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.compute_loss_func is not None or self.label_smoother is not None or self.args.n_gpu > 1:
            return
        model = _unwrap(self.model)
        if getattr(model, "accepts_loss_kwargs", None) is True:  # divides by num_items_in_batch itself
            return
        if find_loss_kind(model) is not None:
            self.compute_loss_func = self._exact_loss
        elif self._splits_batches():
            logger.warning(
                "The loss of %s may be averaged over each micro-batch instead of the effective batch: give a "
                "compute_loss_func(outputs, labels, num_items_in_batch), or have its forward divide by "
                "num_items_in_batch and set accepts_loss_kwargs = True.",
                type(model).__name__,
            )

    def _splits_batches(self) -> bool:
        """Whether an optimizer step sees more than one batch, or batches vary in size."""
        several = self.args.gradient_accumulation_steps * self.args.world_size > 1
        return several or self.args.max_tokens_per_batch is not None

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As in Trainer."""
        # Trainer takes the labels away, from which an encoder-decoder would have made its decoder's input.
        make_decoder_ids = getattr(_unwrap(self.model), "prepare_decoder_input_ids_from_labels", None)
        is_exact = self.compute_loss_func == self._exact_loss
        if is_exact and make_decoder_ids and "labels" in inputs and "decoder_input_ids" not in inputs:
            inputs = {**inputs, "decoder_input_ids": make_decoder_ids(labels=inputs["labels"])}
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def _exact_loss(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model = _unwrap(self.model)
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        return exact_loss(cast(LossKind, find_loss_kind(model)), model.config, logits, labels, num_items_in_batch)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        # Trainer leaves -100 out of the count; as a measurement it is a label like any other.
        labels = [batch.get("labels") for batch in batch_samples if isinstance(batch, Mapping)]
        measured = [label for label in labels if isinstance(label, torch.Tensor) and label.is_floating_point()]
        if measured and len(measured) == len(batch_samples):
            batch_samples = [{"labels": torch.zeros_like(label)} for label in measured]
        return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]


def _unwrap(model: Any) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model
