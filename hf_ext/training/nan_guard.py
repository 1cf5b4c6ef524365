"""A step whose loss or gradient is NaN or infinite never reaches the weights: training stops, or leaves it out."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from ..data.columns import has_numbered_rows
from ..errors import NotFiniteError, PlanRefused
from ..models.packing import PaddingWatch
from .overrides import find_override

MAX_SKIPPED_IN_A_ROW = 10  # then it is not a matter of some rows
# Nothing is scaled up any more: the gradients themselves are not finite. Scales start at 65536: 16 halvings.
LOWEST_SCALE = 1.0
LOWER_RATE = "--resume auto --allow_changed learning_rate goes on with a lower one."

logger = logging.getLogger(__name__)


class NanGuard(TrainerCallback):
    """Carries out `nan_policy`: "stop" raises before the optimizer steps, "skip" goes on without the step.

    A skipped step leaves weights, optimizer state and the logged loss as if its rows had not been there; the schedule
    moves on. A gradient that is not finite under a `GradScaler` is the scaler's affair: it leaves the step out and
    halves its scale, but does so for ever. Here that ends where nothing is scaled up any more. A loss that is
    not finite never is the scaler's.

    Raises (before the optimizer steps):
        NotFiniteError: with the step, the rows of the batches concerned, and the last checkpoint.
        PlanRefused: the loss reads padding, which packed encoders do not compute; with the last checkpoint.

    Cost: one read from the device per optimizer step, none per micro-batch.

    Args:
        trainer: whose `training_step` and `_get_grad_norm` show their results here.
        padding: watches it, where encoders are packed.

    Attributes:
        losses: of the micro-batches of the step at hand, on the device.
    """

    def __init__(self, trainer: Any, padding: PaddingWatch | None = None):
        self._trainer, self._padding = trainer, padding
        self.losses: list[torch.Tensor] = []
        self._loss_before = torch.zeros(())
        self._norm: Any = None
        self._num_skipped_in_a_row = 0
        self._scale_before: float | None = None

    def see_norm(self, norm: Any) -> Any:
        """Keeps the gradient's norm, which it returns whole: FSDP2 has a part of it on each process."""
        self._norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return self._norm

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Counts afresh."""
        self._num_skipped_in_a_row = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first micro-batch of a step comes next: forgets the step before."""
        if not self._trainer.is_in_train:  # a loop of the user's own
            return
        self.losses, self._norm = [], None
        self._loss_before = self._trainer._tr_loss.detach().clone()
        if self._padding is not None:
            self._padding.forget()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Gradients are complete and clipped: goes on, raises, or takes them away, on all processes alike."""
        if not self._trainer.is_in_train:
            return
        finite_loss, finite_gradient, is_unread = self._read()
        if not is_unread:
            raise PlanRefused(
                f"packing: the loss of step {state.global_step + 1} reads positions that the attention mask leaves out "
                "(a label there, or a mean without the mask), which packed encoders do not compute. The weights were "
                f"not touched; {self._trainer._ext_saver.last_good()}. Train without packing: --without packing."
            )
        scaler: Any = getattr(self._trainer.accelerator, "scaler", None)
        if not finite_loss or (scaler is None and not finite_gradient):
            self._leave_out(train_dataloader, scaler)
        else:
            self._num_skipped_in_a_row = 0
            if not finite_gradient:
                self._see_overflow(train_dataloader, scaler.get_scale())
        self._trainer._ext_backend.forget_overflow(optimizer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step was made, or left out: a loss that was not finite is no reason for a lower loss scale."""
        if self._scale_before is not None:
            self._trainer.accelerator.scaler.update(new_scale=self._scale_before)
            self._scale_before = None

    def _read(self) -> tuple[bool, bool, bool]:
        """Whether on all processes the losses of this step are finite, and its gradients, and none came to padding.

        Cost: the one read.
        """
        trainer, losses = self._trainer, self._trainer._tr_loss
        judges = self._norm is not None and not trainer._ext_backend.has_own_loss_scale
        norm = torch.as_tensor(self._norm if judges else 0.0).to(losses)
        unread = torch.ones_like(losses) if self._padding is None else self._padding.is_unread(losses.device)
        seen = torch.stack([losses, norm, unread.to(losses)])
        if trainer.args.world_size > 1:  # a sum is as finite as what it is of
            seen = trainer.accelerator.reduce(seen)
        loss, gradient, num_unread = seen.tolist()
        return math.isfinite(loss), math.isfinite(gradient), num_unread == trainer.args.world_size

    def _leave_out(self, loader: Any, scaler: Any) -> None:
        trainer = self._trainer
        self._num_skipped_in_a_row += 1
        skips = trainer.args.nan_policy == "skip"
        if not skips or self._num_skipped_in_a_row > MAX_SKIPPED_IN_A_ROW:
            before = f" The {MAX_SKIPPED_IN_A_ROW} steps before were left out for the same reason." if skips else ""
            raise NotFiniteError(
                f"Not a finite number in {self._describe(loader)}{before} The weights were not touched; "
                f"{trainer._ext_saver.last_good()}. Nothing was overwritten. Usual causes: a label that is not finite, "
                "a learning rate that is too high, float16. Look at these rows; --nan_policy skip leaves such steps "
                f"out; {LOWER_RATE}"
            )
        logger.warning("Left out: %s", self._describe(loader))
        trainer.model_wrapped.zero_grad()  # an optimizer leaves parameters without gradient alone, their decay too
        trainer._tr_loss.copy_(self._loss_before)
        trainer._globalstep_last_logged += 1  # it is none that Trainer divides the logged loss by
        self._scale_before = None if scaler is None else scaler.get_scale()

    def _see_overflow(self, loader: Any, scale: float) -> None:
        """Lets the scaler leave a step out and halve its scale, until that cannot be the cause any more."""
        if scale > LOWEST_SCALE:
            level = logging.WARNING if self._trainer.args.nan_policy == "skip" else logging.INFO
            logger.log(level, "Left out by the loss scale, which is halved: %s", self._describe(loader))
            return
        raise NotFiniteError(
            f"Gradients are not finite in {self._describe(loader)} The loss is, and it is not the loss scale either: "
            f"that is {scale:.12g} by now (it starts at 65536 and is halved at each step that is left out). No such "
            f"step touched the weights; {self._trainer._ext_saver.last_good()}. Nothing was overwritten. Usual causes: "
            "a row that these steps share, weights or activations too large for float16, too high a learning rate. "
            "Look at these rows; --bf16, where the device has it, and float32 (--without precision) have no such "
            f"limit; {LOWER_RATE}"
        )

    # --- what is said of it -----------------------------------------------------------------------------------------

    def _describe(self, loader: Any) -> str:
        trainer = self._trainer
        losses = [float(loss) for loss in self.losses]
        bad: Sequence[int] = [i for i, loss in enumerate(losses) if not math.isfinite(loss)] or range(len(losses))
        values = ", ".join(str(losses[i]) for i in bad)
        if len(losses) != trainer.current_gradient_accumulation_steps:  # of a subclass's own `training_step`
            bad = range(trainer.current_gradient_accumulation_steps)
            values = str(float(trainer._tr_loss - self._loss_before))
        norm = "not known" if self._norm is None else float(self._norm)
        return (
            f"step {trainer.state.global_step + 1}: loss {values}, gradient norm {norm}; "
            f"{self._name_rows(loader, bad)} (process {trainer.args.process_index})."
        )

    def _name_rows(self, loader: Any, batches: Sequence[int]) -> str:
        """Names the rows of some micro-batches of the step. Cost: draws the epoch's order again."""
        trainer, args = self._trainer, self._trainer.args
        dataset = getattr(loader, "dataset", None)
        epoch, share = divmod(trainer.state.epoch or 0.0, 1)  # before the step
        num_before = trainer.state.global_step * args.gradient_accumulation_steps
        first = round(share * len(loader)) if has_length(loader) else num_before
        if find_override(trainer, "get_train_dataloader") or not has_numbered_rows(dataset):
            return f"micro-batches {', '.join(str(first + i) for i in batches)} of the epoch"
        loader.set_epoch(int(epoch))
        drawn = [*islice(loader.batch_sampler, first, first + batches[-1] + 1)]
        return "rows " + "; ".join(", ".join(map(str, drawn[i])) for i in batches) + " of the training data"


def can_be_best(name: str, metrics: dict[str, float], step: int) -> bool:
    """Whether a metric can be the best one so far: None, or what is not finite, never is, which a warning says."""
    value = metrics.get(name, 0.0)  # of one that is missing, Trainer says so
    if value is not None and math.isfinite(value):
        return True
    logger.warning("%s is %s at step %d: never the best.", name, value, step)
    return False
