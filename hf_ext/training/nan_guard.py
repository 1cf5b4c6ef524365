"""A step whose loss or gradient is NaN or infinite never reaches the weights: training stops, or leaves it out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from ..data import has_numbered_rows
from ..errors import ArgumentError, NotFiniteError, PlanRefused
from ..speedups import Run
from .backends import Backend
from .fitting.halving import Halving
from .host import Host, find_override

# Nothing is scaled up any more: the gradients themselves are not finite. Scales start at 65536: 16 halvings.
LOWEST_SCALE = 1.0
SKIPPED = "skipped_step"  # in the log

logger = logging.getLogger(__name__)


class NanGuard(TrainerCallback):
    """Raises before the optimizer takes a step whose loss or gradient is not finite; weights stay as they are.

    With `nan_policy` "skip" up to `nan_skip_limit` such steps in a row are left out: the optimizer makes none, buffers
    are as before, the schedule and the order of rows move on. Each is in the log as `skipped_step`, from which a
    continued run counts on.

    A gradient that is not finite under a `GradScaler` is the scaler's affair: it leaves the step out and halves its
    scale, but does so for ever. Here that ends where nothing is scaled up any more. A loss that is not finite never is
    the scaler's.

    Raises (from the constructor):
        ArgumentError: "skip" under DeepSpeed, which steps before anything can be looked at.

    Raises (before the optimizer steps):
        NotFiniteError: with the step, the rows of the batches concerned, and the last checkpoint.
        PlanRefused: the loss reads padding, which packed encoders do not compute; with the last checkpoint.

    Cost: one read from the device per optimizer step, none per micro-batch.

    Args:
        trainer: whose `training_step` and `_get_grad_norm` show their results here.
        run: whose `padding` is watched. last_good: says what is left to continue from.
        halving: shared by all processes where one has begun to compute in parts.

    Attributes:
        losses: of the micro-batches of the step at hand, on the device.
    """

    def __init__(self, trainer: Host, run: Run, backend: Backend, last_good: Callable[[], str], halving: Halving):
        if trainer.args.nan_policy == "skip" and backend.is_zero:
            raise ArgumentError("--nan_policy skip: DeepSpeed takes its step before it can be looked at. Leave it out.")
        self._trainer = trainer
        self._run = run
        self._backend = backend
        self._last_good = last_good
        self._halving = halving
        self.losses: list[Tensor] = []
        self._norm: Tensor | float | None = None
        self._before: list[tuple[Tensor, Tensor]] = []

    def see_norm(self, norm: Tensor | float | None) -> Tensor | float | None:
        """Keeps the gradient's norm, which it returns whole: FSDP2 has a shard of it on each process."""
        self._norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return self._norm

    def on_step_begin(self, *event: object, model: Any = None, **kwargs: object) -> None:
        """Forgets the step before: the first micro-batch of a step comes next."""
        self.losses = []
        self._norm = None
        if self._trainer.is_in_train and self._trainer.args.nan_policy == "skip":  # such as means of a batch norm
            self._before = [(one, one.detach().clone()) for one in (self._trainer._tr_loss, *model.buffers())]
        if self._run.padding is not None:  # where encoders are packed
            self._run.padding.forget()

    def on_pre_optimizer_step(
        self, *event: object, train_dataloader: DataLoader | None = None, **kwargs: object
    ) -> None:
        """Checks the complete and clipped gradients: goes on, or raises on all processes alike."""
        trainer = self._trainer
        state = trainer.state
        if not trainer.is_in_train:  # a loop of the user's own
            return
        finite_loss, finite_gradient, is_unread = self._read()
        if not is_unread:
            raise PlanRefused(
                f"packing: the loss of step {state.global_step + 1} reads positions that the attention mask leaves out "
                "(a label there, or a mean without the mask), which packed encoders do not compute. The weights were "
                f"not touched; {self._last_good()}. Train without packing: --without packing."
            )
        scaler: Any = getattr(trainer.accelerator, "scaler", None)
        if finite_loss and (finite_gradient or (scaler is not None and scaler.get_scale() > LOWEST_SCALE)):
            return
        left_out = {entry[SKIPPED] for entry in state.log_history if SKIPPED in entry}
        before = range(state.global_step - trainer.args.nan_skip_limit + 1, state.global_step + 1)
        if trainer.args.nan_policy == "skip" and not left_out.issuperset(before):
            self._leave_out(self._describe(train_dataloader))
            return
        scaled = "" if scaler is None else f" The loss scale is {scaler.get_scale():.12g}, which is not the cause."
        raise NotFiniteError(
            f"Not a finite number in {self._describe(train_dataloader)}{scaled} The weights were not touched; "
            f"{self._last_good()}. Nothing was overwritten. Usual causes: a label that is not finite, a "
            "learning rate that is too high, float16 (--bf16, where the device has it, or --without precision). Look "
            "at these rows; --resume auto --allow_changed learning_rate goes on with a lower rate; --nan_policy skip "
            "leaves such steps out."
        )

    def _leave_out(self, description: str) -> None:
        """Has the optimizer make no step, and takes back what its rows did to buffers and to the logged loss."""
        trainer = self._trainer
        logger.warning("Left out: %s", description)
        trainer.log({SKIPPED: trainer.state.global_step + 1})
        trainer.accelerator.gradient_state._set_sync_gradients(False)  # where it is, Accelerate's optimizer makes none
        with torch.no_grad():
            for now, before in self._before:
                now.copy_(before)
        if (scaler := trainer.accelerator.scaler) is not None:
            scaler.update(scaler.get_scale())  # forgets that gradients were unscaled, and keeps the scale
        trainer._globalstep_last_logged += 1  # it is none that Trainer divides the logged loss by

    def on_optimizer_step(self, *event: object, **kwargs: object) -> None:
        """Lets the optimizer make the next step."""
        self._trainer.accelerator.gradient_state._set_sync_gradients(True)

    def _read(self) -> tuple[bool, bool, bool]:
        """Reads whether on all processes this step's losses and gradients are finite, and none came to padding.

        Cost: the one read.
        """
        trainer = self._trainer
        losses = trainer._tr_loss
        judges = self._norm is not None and not self._backend.has_own_loss_scale
        norm = torch.as_tensor(self._norm if judges else 0.0).to(losses)
        padding = self._run.padding
        unread = torch.ones_like(losses) if padding is None else padding.is_unread(losses.device)
        seen = torch.stack([losses, norm, unread.to(losses), torch.full_like(losses, self._halving.is_new)])
        if trainer.args.world_size > 1:  # a sum is as finite as what it is of
            seen = trainer.accelerator.reduce(seen)
        loss, gradient, num_unread, num_halved = seen.tolist()
        if num_halved:
            self._halving.share()
        return math.isfinite(loss), math.isfinite(gradient), num_unread == trainer.args.world_size

    # --- what is said of it -----------------------------------------------------------------------------------------

    def _describe(self, loader: DataLoader | None) -> str:
        trainer = self._trainer
        losses = [float(loss) for loss in self.losses]
        if len(losses) != trainer.current_gradient_accumulation_steps:  # of a subclass's own `training_step`
            losses = [float(trainer._tr_loss)] * trainer.current_gradient_accumulation_steps
        bad: Sequence[int] = [i for i, loss in enumerate(losses) if not math.isfinite(loss)] or range(len(losses))
        values = ", ".join(dict.fromkeys(str(losses[i]) for i in bad))
        norm = "not known" if self._norm is None else float(self._norm)
        return (
            f"step {trainer.state.global_step + 1}: loss {values}, gradient norm {norm}; "
            f"{self._name_rows(loader, bad)} (process {trainer.args.process_index})."
        )

    def _name_rows(self, loader: Any, batches: Sequence[int]) -> str:
        """Names the rows of some micro-batches of the step. Cost: draws the epoch's order again."""
        trainer = self._trainer
        args = trainer.args
        dataset = getattr(loader, "dataset", None)
        epoch, fraction = divmod(trainer.state.epoch or 0.0, 1)  # before the step
        num_before = trainer.state.global_step * args.gradient_accumulation_steps
        first = round(fraction * len(loader)) if has_length(loader) else num_before
        if find_override(trainer, "get_train_dataloader") or not has_numbered_rows(dataset):
            return f"micro-batches {', '.join(str(first + i) for i in batches)} of the epoch"
        loader.set_epoch(int(epoch))
        drawn = [*islice(loader.batch_sampler, first, first + batches[-1] + 1)]
        return "rows " + "; ".join(", ".join(map(str, drawn[i])) for i in batches) + " of the training data"


def can_be_best(name: str, metrics: dict[str, float], step: int) -> bool:
    """Tells whether a metric can be the best one so far: warns of None and of what is not finite, which never is."""
    value = metrics.get(name, 0.0)  # of one that is missing, Trainer says so
    if value is not None and math.isfinite(value):
        return True
    logger.warning("%s is %s at step %d: never the best.", name, value, step)
    return False
