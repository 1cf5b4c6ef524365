"""Losses over the whole effective batch and the whole evaluation set, however they are split into batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from ..data.even_batches import RepeatedRows
from ..held import replaced
from ..models.exact_loss import IGNORED, LossKind, exact_loss, find_loss_kind, sum_loss_rows
from ..models.lora import unwrap_peft
from ..models.replaced_forwards import has_foreign_forward
from ..training_args import FastTrainingArguments
from ..whose_code import is_from

logger = logging.getLogger(__name__)

LossFunction = Callable[..., torch.Tensor]
_OWN = ("hf_ext", "transformers", "peft")  # losses that are tested where they are written


@dataclass(frozen=True, eq=False)
class ExactLoss:
    """The loss of a model of `LOSS_KINDS` over the whole effective batch, as a `compute_loss_func` of Trainer's.

    Args:
        model: without PEFT's wrapper.
    """

    model: Any

    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        """The sum of the loss over its items, by `num_items_in_batch`, or by how many there are here."""
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        kind = cast(LossKind, find_loss_kind(self.model))
        return exact_loss(kind, self.model.config, logits, labels, num_items_in_batch)


@dataclass(frozen=True)
class DecidedLoss:
    """Which loss a trainer has at this moment. A caller can assign each part of it at any time.

    Attributes:
        model: without PEFT's wrapper.
        function: what Trainer calls with outputs and labels, the user's or `ExactLoss`; None: the model's own loss.
        is_smoothed: whether Trainer smooths labels, with a loss of its own.
        override: who overrides a method of `TRAINING_LOSS`; None where nobody does.
    """

    model: Any
    function: LossFunction | None
    is_smoothed: bool
    override: str | None

    @property
    def is_exact(self) -> bool:
        """Whether it is ours."""
        return isinstance(self.function, ExactLoss) and self.function.model is self.model

    @property
    def is_users(self) -> bool:
        """Whether the user gave the function."""
        return self.function is not None and not self.is_exact

    @property
    def is_foreign(self) -> bool:
        """Whether neither hf_ext nor transformers nor PEFT wrote it."""
        if self.is_users or self.override is not None or has_foreign_forward(self.model):
            return True
        return not is_from(type(self.model).forward, _OWN)

    @property
    def name(self) -> str:
        """For messages."""
        if self.is_users:
            return f"compute_loss_func ({getattr(self.function, '__qualname__', self.function)})"
        return f"The loss of {self.override or type(self.model).__name__}"

    @property
    def model_divides(self) -> bool:
        """Whether the model says that it divides by `num_items_in_batch` itself."""
        return getattr(self.model, "accepts_loss_kwargs", None) is True

    @property
    def is_said_to_divide(self) -> bool:
        """Whether Trainer adds up the losses of a step's batches because somebody else's code should divide."""
        return self.is_users or (self.function is None and self.model_divides and self.override is None)

    @property
    def predicts_next(self) -> bool:
        """Whether each label is predicted from what stands before it; of the user's function nobody knows."""
        return not self.is_users and find_loss_kind(self.model) == "next_tokens"

    @property
    def counts_measurements(self) -> bool:
        """Whether the loss is ours or that of our model, for which -100 is a measurement like any other."""
        return self.is_exact or (self.function is None and self._knows_rows and self.override is None)

    @property
    def has_rows(self) -> bool:
        """Whether the model is one of which the loss of single rows can be had, and adds up to that of a batch."""
        is_known = self._knows_rows or find_loss_kind(self.model) is not None
        return is_known and not self.is_smoothed and not self.is_users

    @property
    def _knows_rows(self) -> bool:
        """Whether the model has `row_losses`, and no forward was written after them, which may have another loss."""
        classes = [vars(base) for base in type(self.model).__mro__]
        order = [name for base in classes for name in ("row_losses", "forward") if name in base]
        return order[:1] == ["row_losses"] and not has_foreign_forward(self.model)

    def sum_rows(self, logits: Any, labels: torch.Tensor, bounds: torch.Tensor | None) -> torch.Tensor | None:
        """Loss and number of items per row, (n, 2); None where a row has no loss of its own."""
        logits = logits[0] if isinstance(logits, tuple) else logits
        kind = find_loss_kind(self.model)
        if kind is not None:
            return sum_loss_rows(kind, self.model.config, logits, labels)
        losses = self.model.row_losses(logits, labels, None if bounds is None else bounds.to(logits.device))
        return None if losses is None else torch.stack([losses, torch.ones_like(losses)], dim=1)

    def add_decoder_ids(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The input of an encoder-decoder's decoder, which it makes from the labels; Trainer takes those away."""
        make = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        if self.is_exact and make and "labels" in inputs and "decoder_input_ids" not in inputs:
            return {**inputs, "decoder_input_ids": make(labels=inputs["labels"])}
        return inputs


class Losses:
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

    Attributes:
        given: the function that the user gave or assigned.
        is_given: whether that counts; also until Trainer is made, since what it reads meanwhile is what it was given.
    """

    def __init__(self, args: FastTrainingArguments):
        self._args = args
        self.given: LossFunction | None = None
        self.is_given = True
        self._rows: list[torch.Tensor] | None = None  # per batch of the evaluation at hand: (n, 2), loss and items
        self._ignored: list[str] | None = None

    def give(self, function: LossFunction | None) -> None:
        """Takes the user's function, or that there shall be none."""
        self.given, self.is_given = function, True

    def settle(self) -> None:
        """Trainer is made: where it was given no function, there may be one of ours."""
        self.is_given = self.given is not None

    def decide(self, model: Any, is_smoothed: bool, override: str | None) -> DecidedLoss:
        """The loss of the moment; see `DecidedLoss` for the arguments. `model` may be in PEFT's wrapper."""
        loss = DecidedLoss(unwrap_peft(model), self.given if self.is_given else None, is_smoothed, override)
        if self.is_given or is_smoothed or override or loss.model_divides or self._args.n_gpu > 1:
            return loss
        if find_loss_kind(loss.model) is None or self._args.use_liger_kernel:  # its loss has no logits
            return loss
        return DecidedLoss(loss.model, ExactLoss(loss.model), is_smoothed, override)

    def warn_of_means(self, loss: DecidedLoss, is_summed: bool) -> None:
        """Where an optimizer step sees several batches, or batches of any size, and the loss may not count that.

        Args:
            is_summed: whether Trainer takes the loss for one that divides by `num_items_in_batch`.
        """
        args = self._args
        if loss.function is not None or loss.is_smoothed or args.n_gpu > 1:
            return
        if args.gradient_accumulation_steps * args.world_size == 1 and args.max_tokens_per_batch is None:
            return
        if loss.override is not None:
            logger.warning(
                "%s decides the loss, so it is taken as Trainer takes it: %s over the batches of a step. Set "
                "loss_is_scaled_for_ga in the class: False if it returns the mean of a batch, True if it divides by "
                "num_items_in_batch.",
                loss.override,
                "summed" if is_summed else "averaged",
            )
        elif not loss.model_divides:
            logger.warning(
                "The loss of %s may be averaged over each micro-batch instead of the effective batch: give a "
                "compute_loss_func(outputs, labels, num_items_in_batch), or have its forward divide by "
                "num_items_in_batch and set accepts_loss_kwargs = True.",
                type(loss.model).__name__,
            )

    # --- training ---------------------------------------------------------------------------------------------------

    def counts_items(self, loss: DecidedLoss) -> bool:
        """Whether the loss is a sum over items by their number in the step, so that batches may vary in size."""
        if not self._args.average_tokens_across_devices or loss.is_smoothed:
            return False
        return loss.is_exact or (loss.function is None and loss.model_divides and loss.override is None)

    # --- evaluation -------------------------------------------------------------------------------------------------

    @contextmanager
    def rows(self, ignored: list[str] | None) -> Iterator[list[torch.Tensor]]:
        """While an evaluation lasts, takes what `keep` keeps; `finish` sums it.

        Args:
            ignored: outputs that Trainer leaves out of the predictions; None for what the model says.
        """
        rows: list[torch.Tensor] = []
        with replaced(self, _rows=rows, _ignored=ignored):
            yield rows

    def keep(self, loss: DecidedLoss, outputs: Any, labels: Any, bounds: Any, trainer: Any) -> None:
        """Keeps the losses of a batch's rows in an evaluation, of all processes, where they are known.

        Args:
            outputs: of the model, the loss among them.
        """
        if self._rows is None or labels is None or not loss.has_rows or self._args.use_liger_kernel:
            return
        config = getattr(loss.model, "config", None)
        ignored = getattr(config, "keys_to_ignore_at_inference", None) if self._ignored is None else self._ignored
        if trainer.label_names != ["labels"] or "logits" in (ignored or ()):
            return
        rows = loss.sum_rows(outputs["logits"] if isinstance(outputs, Mapping) else outputs[1], labels, bounds)
        if rows is not None:
            # Without the rows that fill the last batch where there are several processes.
            self._rows.append(trainer.accelerator.gather_for_metrics(rows))

    def finish(self, per_batch: list[torch.Tensor], metrics: dict[str, float], prefix: str) -> None:
        """Puts the loss over all items among the metrics, where its rows are known."""
        if not per_batch:
            return
        rows = torch.cat(per_batch).cpu().double().numpy()
        finite = np.isfinite(rows[:, 0])
        if self._args.logging_nan_inf_filter and finite.any():  # as Trainer does with batches
            rows = rows[finite]
        metrics[f"{prefix}_loss"] = float(rows[:, 0].sum() / max(float(rows[:, 1].sum()), 1.0))


def countable(batches: list[Any], loss: DecidedLoss) -> list[Any]:
    """What `Trainer._get_num_items_in_batch` counts right: rows that another process trains on as none.

    So it does measurements, each as one, where -100 is one like any other; and next tokens, of which a row's first
    label is none: transformers 5.23 leaves it out for classes named `...ForCausalLM` alone.
    """
    batches = [_without_labels(batch) if isinstance(batch, RepeatedRows) else batch for batch in batches]
    if loss.predicts_next:
        return [_with_next_labels(batch) for batch in batches]
    labels = [batch.get("labels") for batch in batches if isinstance(batch, Mapping)]
    measured = [label for label in labels if isinstance(label, torch.Tensor) and label.is_floating_point()]
    if not measured or len(measured) < len(batches) or not loss.counts_measurements:
        return batches
    return [
        batch if isinstance(batch, RepeatedRows) else {"labels": torch.zeros_like(label)}
        for batch, label in zip(batches, measured)
    ]


def _with_next_labels(batch: Any) -> Any:
    if not isinstance(batch, Mapping) or not isinstance(batch.get("labels"), torch.Tensor) or "shift_labels" in batch:
        return batch
    return {"labels": batch["labels"], "shift_labels": batch["labels"][..., 1:]}


def _without_labels(batch: RepeatedRows) -> RepeatedRows:
    return RepeatedRows(labels=torch.full_like(batch["labels"], IGNORED)) if "labels" in batch else batch
