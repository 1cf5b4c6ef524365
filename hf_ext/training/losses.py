"""Losses over the whole effective batch and the whole evaluation set, however they are split into batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data import RepeatedRows
from ..labels import UNKNOWN
from ..models import (
    LossKind,
    exact_loss,
    find_loss_kind,
    has_foreign_forward,
    is_from,
    replaced,
    sum_loss_rows,
    unwrap_peft,
)
from .host import TRAINING_LOSS, Host, find_override

logger = logging.getLogger(__name__)

LossFunction = Callable[..., Tensor]
_OWN = ("hf_ext", "transformers", "peft")  # losses that are tested where they are written


@dataclass(frozen=True, eq=False)
class ExactLoss:
    """The loss of a model of `LOSS_KINDS` over the whole effective batch, as a `compute_loss_func` of Trainer's.

    Args:
        model: without PEFT's wrapper; `kind`: of its loss.
    """

    model: Any
    kind: LossKind

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """The sum of the loss over its items, by `num_items_in_batch`, or by how many there are here."""
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        return exact_loss(self.kind, self.model.config, logits, labels, num_items_in_batch)


@dataclass(frozen=True)
class DecidedLoss:
    """Which loss a trainer has at this moment. A caller can assign each part of it at any time.

    Attributes:
        model: without PEFT's wrapper.
        function: what Trainer calls with outputs and labels, the user's or `ExactLoss`; None: the model's own loss.
        kind: of the model's loss, see `find_loss_kind`.
        is_smoothed: whether Trainer smooths labels, with a loss of its own.
        override: who overrides a method of `TRAINING_LOSS`; None where none is overridden.
    """

    model: Any
    function: LossFunction | None
    kind: LossKind | None
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
    def is_models(self) -> bool:
        """Whether it is what the model returns, untouched."""
        return self.function is None and self.override is None and not self.is_smoothed

    @property
    def is_foreign(self) -> bool:
        """Whether neither hf_ext nor transformers nor PEFT wrote it."""
        if self.is_users or self.override is not None or has_foreign_forward(self.model):
            return True
        return not is_from(type(self.model).forward, _OWN)

    @property
    def has_rows(self) -> bool:
        """Whether the model is one of which the loss of single rows can be had, and adds up to that of a batch."""
        return (self.kind is not None or self.knows_rows) and not self.is_smoothed and not self.is_users

    @property
    def knows_rows(self) -> bool:
        """Whether the model has `row_losses`, and no forward was written after them, which may have another loss."""
        classes = [vars(base) for base in type(self.model).__mro__]
        order = [name for base in classes for name in ("row_losses", "forward") if name in base]
        return order[:1] == ["row_losses"] and not has_foreign_forward(self.model)

    @property
    def skips_unknown(self) -> bool:
        """Whether the model says that it leaves labels of -100 out, of numbers too."""
        return getattr(self.model, "skips_unknown", False)

    def sum_rows(self, logits: Tensor | tuple, labels: Tensor, bounds: Tensor | None) -> Tensor | None:
        """Returns loss and number of items per row, (n, 2); None where a row has no loss of its own."""
        logits = logits[0] if isinstance(logits, tuple) else logits
        if self.kind is not None:
            return sum_loss_rows(self.kind, self.model.config, logits, labels)
        losses = self.model.row_losses(logits, labels, None if bounds is None else bounds.to(logits.device))
        if losses is None:
            return None
        known = labels.to(losses.device).ne(UNKNOWN) if self.skips_unknown else torch.ones_like(losses)
        return torch.stack([losses, known.reshape(len(losses), -1).sum(1)], dim=1)

    def add_decoder_ids(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Adds the input of an encoder-decoder's decoder, which it makes from the labels; Trainer takes those away."""
        make = self.is_exact and getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        if make and "labels" in inputs and "decoder_input_ids" not in inputs:
            return {**inputs, "decoder_input_ids": make(labels=inputs["labels"])}
        return inputs


class Losses:
    """Makes a loss of its own Trainer's `compute_loss_func` for the models of `LOSS_KINDS`, in a PEFT wrapper too.

    Left alone: a `compute_loss_func` of the user's, whenever it is set; every trainer in which a method of
    `TRAINING_LOSS` is overridden, which Trainer's own arithmetic has to fit; label smoothing, whose loss is Trainer's;
    `DataParallel`, under which Trainer scales such a loss by the number of devices once too often; all other models.
    There is a warning where that matters and the loss does not divide by `num_items_in_batch`.

    The loss of an evaluation is the sum over its items by their number: for the models of `LOSS_KINDS`, and for those
    with `row_losses` (AffinityModel, but for its ranking loss), unless the loss is the user's or smoothed, logits are
    to be ignored, or a method of `EVALUATION_LOSS` is overridden. For all others it is Trainer's, a mean of batch
    means, which depends on the eval batch size and on the number of processes. Cost: the loss once more, and 8 bytes a
    row.

    Attributes:
        given: the function that the user gave or assigned; None without one.
        at_hand: what was decided for the micro-batch at hand; None outside of one.
    """

    def __init__(self, trainer: Host):
        self._trainer = trainer
        self.given: LossFunction | None = None
        self.at_hand: DecidedLoss | None = None
        self._rows: list[Tensor] | None = None  # per batch of the evaluation at hand: (n, 2), loss and items
        self._ignored: list[str] | None = None

    def decide(self) -> DecidedLoss:
        """Returns the loss of the moment, since a method can be assigned at any time, but within a micro-batch."""
        if self.at_hand is not None:
            return self.at_hand
        trainer = self._trainer
        args = trainer.args
        model = unwrap_peft(trainer.model)
        override = find_override(trainer, *TRAINING_LOSS)
        is_smoothed = trainer.label_smoother is not None
        kind = find_loss_kind(model)
        function = self.given
        is_left = args.n_gpu > 1 or args.use_liger_kernel or _divides(model)  # the loss of liger has no logits
        if kind is not None and function is None and override is None and not (is_smoothed or is_left):
            function = ExactLoss(model, kind)
        return DecidedLoss(model, function, kind, is_smoothed, override)

    def warn_of_means(self) -> None:
        """Warns where an optimizer step sees several batches, or batches of any size, and the loss may not count that.

        A `compute_loss_func` of the user's is taken at its word.
        """
        trainer = self._trainer
        args = trainer.args
        loss = self.decide()
        is_one = args.gradient_accumulation_steps * args.world_size == 1 and args.max_tokens_per_batch is None
        is_known = loss.is_exact or loss.is_smoothed or args.n_gpu > 1 or trainer.loss_is_scaled_for_ga is not None
        if is_one or is_known or (loss.override is None and (loss.is_users or _divides(loss.model))):
            return
        logger.warning(
            "The loss of %s may be averaged over each micro-batch instead of the effective batch: give a "
            "compute_loss_func(outputs, labels, num_items_in_batch), or divide by num_items_in_batch and set "
            "accepts_loss_kwargs = True in the model, or loss_is_scaled_for_ga = True in the trainer's class.",
            loss.override or type(loss.model).__name__,
        )

    # --- training ---------------------------------------------------------------------------------------------------

    def counts_items(self) -> bool:
        """Tells whether the loss is a sum over items by their number in the step, so that batches may vary in size."""
        loss = self.decide()
        counts = loss.is_exact or (loss.is_models and _divides(loss.model))
        return counts and bool(self._trainer.args.average_tokens_across_devices)

    def countable(self, batches: list[Any]) -> list[Any]:
        """Returns what `Trainer._get_num_items_in_batch` counts right: rows that another process trains on as none.

        So it does measurements, each as one, where -100 is one like any other, unless the model `skips_unknown`; rows
        with a teacher's predictions, whose labels need not be known; and
        next tokens, of which a row's first label is none: transformers 5.24 leaves it out for classes named
        `...ForCausalLM` alone.
        """
        loss = self.decide()
        counted = []
        counts_all = loss.is_exact or (loss.is_models and loss.knows_rows)  # and for whom -100 is a measurement
        counts_all = counts_all and not loss.skips_unknown
        shifts = not loss.is_users and loss.kind == "next_tokens"
        for batch in batches:
            labels = batch.get("labels") if isinstance(batch, Mapping) else None
            if isinstance(labels, Tensor):
                if isinstance(batch, RepeatedRows):
                    labels = torch.full_like(labels, UNKNOWN)
                elif "teacher" in batch or (labels.is_floating_point() and counts_all):
                    labels = torch.zeros_like(labels)
                batch = {**batch, "labels": labels}
                if shifts and "shift_labels" not in batch:
                    batch["shift_labels"] = labels[..., 1:]
            counted.append(batch)
        return counted

    # --- evaluation -------------------------------------------------------------------------------------------------

    @contextmanager
    def rows(self, ignored: list[str] | None) -> Iterator[list[Tensor]]:
        """Collects what `keep` keeps while an evaluation lasts; `finish` sums it.

        Args:
            ignored: outputs that Trainer leaves out of the predictions; None for what the model says.
        """
        rows: list[Tensor] = []
        with replaced(self, _rows=rows, _ignored=ignored):
            yield rows

    def keep(self, outputs: Any, labels: Tensor | None, bounds: Tensor | None) -> None:
        """Keeps the losses of a batch's rows in an evaluation, of all processes, where they are known.

        Args:
            outputs: of the model, the loss among them.
        """
        trainer = self._trainer
        if self._rows is None or labels is None or trainer.args.use_liger_kernel:
            return
        loss = self.decide()
        config = getattr(loss.model, "config", None)
        ignored = getattr(config, "keys_to_ignore_at_inference", None) if self._ignored is None else self._ignored
        if not loss.has_rows or trainer.label_names != ["labels"] or "logits" in (ignored or ()):
            return
        rows = loss.sum_rows(outputs["logits"] if isinstance(outputs, Mapping) else outputs[1], labels, bounds)
        if rows is not None:
            # Without the rows that fill the last batch where there are several processes.
            self._rows.append(trainer.accelerator.gather_for_metrics(rows))

    def finish(self, per_batch: list[Tensor], metrics: dict[str, float], prefix: str) -> None:
        """Puts the loss over all items among the metrics, where its rows are known."""
        if not per_batch:
            return
        rows = torch.cat(per_batch).cpu().double().numpy()
        finite = np.isfinite(rows[:, 0])
        if self._trainer.args.logging_nan_inf_filter and finite.any():  # as Trainer does with batches
            rows = rows[finite]
        metrics[f"{prefix}_loss"] = float(rows[:, 0].sum() / max(float(rows[:, 1].sum()), 1.0))


def _divides(model: object) -> bool:
    """Tells whether the model says that it divides by `num_items_in_batch` itself."""
    return getattr(model, "accepts_loss_kwargs", None) is True
