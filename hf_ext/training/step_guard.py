"""A step whose loss or gradient is NaN or infinite never reaches the weights: training stops, or leaves it out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerState

from ..errors import NotFiniteError, PlanRefused
from ..held import replaced
from ..loss_scale import OverflowWatch
from ..models.padding_watch import PaddingWatch
from ..training_args import FastTrainingArguments
from .backends import Backend
from .named_rows import name_rows

MAX_SKIPPED_IN_A_ROW = 10  # then it is not a matter of some rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GuardedEpoch:
    """What the steps of an epoch have in common.

    Attributes:
        number: from 0; `num_steps`: optimizer steps of an epoch.
        accelerator: as it trains; `model`: in what wraps it for several processes.
        loss: the sum of the losses that were not logged yet, to which Trainer adds in place.
        is_own_loader: whether the user's own class made the data loader.
    """

    number: int
    num_steps: int
    accelerator: Any
    model: Any
    loss: torch.Tensor
    is_own_loader: bool = False

    @property
    def scaler(self) -> Any:
        """The `GradScaler`; None without loss scaling."""
        return getattr(self.accelerator, "scaler", None)


class StepGuard(TrainerCallback):
    """Carries out `nan_policy`: "stop" raises before the optimizer steps, "skip" goes on without the step.

    A skipped step leaves weights, optimizer state and the logged loss as if its rows had not been there; the schedule
    moves on. A gradient that is not finite under a `GradScaler` is the scaler's affair until `OverflowWatch` says that
    it cannot be the scale; a loss that is not finite never is.

    Raises (from `epoch`):
        NotFiniteError: with the step, the rows of the batches concerned, and the last checkpoint.
        PlanRefused: the loss reads padding, which packed encoders do not compute; with the last checkpoint.

    Cost: one read from the device per optimizer step, none per micro-batch.

    Steps outside `epoch`, of a loop of the user's own, are left alone; the first one is warned of.

    Attributes:
        num_left_out: of the run's steps, also before it was resumed; `Stateful` under that name.
    """

    name = "num_left_out"

    def __init__(self, args: FastTrainingArguments, backend: Backend, padding: PaddingWatch | None = None):
        self._args = args
        self._backend = backend
        self._padding = padding
        self.num_left_out = 0
        self._epoch: GuardedEpoch | None = None
        self._losses: list[torch.Tensor] = []
        self._loss_before: torch.Tensor | None = None
        self._norm: Any = None
        self._num_batches = 0
        self._num_skipped_in_a_row = 0
        self._num_not_taken_up = 0
        self._overflows: OverflowWatch | None = None
        self._scale_before: float | None = None
        self._has_warned = False

    def state(self) -> int:
        """For a checkpoint."""
        return self.num_left_out

    def load(self, tree: int | None) -> None:
        """Goes on counting from what `state` gave; None of a checkpoint that does not say."""
        self.num_left_out, self._num_not_taken_up = tree or 0, 0

    # --- what Trainer computes --------------------------------------------------------------------------------------

    @contextmanager
    def epoch(self, epoch: GuardedEpoch, name_last_good: Callable[[], str]) -> Iterator[None]:
        """Guards the steps of an epoch; `name_last_good` says what is left to continue from, on all processes."""
        self._epoch = epoch
        try:
            with unfiltered(self._args):
                yield
        except _NotFinite as problem:
            before, after = problem.args
            raise NotFiniteError(f"{before}; {name_last_good()}. Nothing was overwritten. {after}") from None
        except _ReadsPadding as problem:
            (step,) = problem.args
            raise PlanRefused(
                f"packing: the loss of step {step} reads positions that the attention mask leaves out (a label there, "
                "or a mean without the mask), which packed encoders do not compute. The weights were not touched; "
                f"{name_last_good()}. Train without packing: --without packing."
            ) from None
        finally:
            self._epoch = None

    def see_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Keeps the loss of a micro-batch, on the device, until the step is over."""
        self._losses.append(loss)
        return loss

    def see_again(self, losses: list[torch.Tensor]) -> None:
        """The micro-batches of this step so far were computed again: their losses."""
        self._losses = list(losses)

    def see_norm(self, norm: Any, num_batches: int) -> Any:
        """Keeps the gradient's norm, which it returns whole: FSDP2 has a part of it on each process.

        Args:
            num_batches: micro-batches of the step.
        """
        self._norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self._num_batches = num_batches
        return self._norm

    def take_left_out(self) -> int:
        """Steps that were left out since this was asked before, for whoever divides by the number of steps."""
        number, self._num_not_taken_up = self._num_not_taken_up, 0
        return number

    # --- the step ---------------------------------------------------------------------------------------------------

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first micro-batch of a step comes next: forgets the step before."""
        self._losses = []
        if self._padding is not None:
            self._padding.forget()
        if self._epoch is not None:
            self._loss_before = self._epoch.loss.detach().clone()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gradients are complete and clipped: goes on, raises, or takes them away, on all processes alike."""
        if self._epoch is None:
            self._warn_once()
            return
        finite_loss, finite_gradient, is_unread = self._read()
        if not is_unread:
            raise _ReadsPadding(state.global_step + 1)
        scaler, loader = self._guarded().scaler, kwargs.get("train_dataloader")
        if not finite_loss or (scaler is None and not finite_gradient):
            self._leave_out(state, loader)
        else:
            self._num_skipped_in_a_row = 0
            if scaler is not None:
                self._watch_scale(scaler, finite_gradient, state, loader)
        self._backend.forget_overflow(kwargs["optimizer"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step was made, or left out: a loss that was not finite is no reason for a lower loss scale."""
        if self._scale_before is not None:
            self._guarded().scaler.update(new_scale=self._scale_before)
            self._scale_before = None

    def _warn_once(self) -> None:
        if not self._has_warned:
            logger.warning(
                "These steps are not of FastTrainer's `_run_epoch`: nan_policy does not guard them, and a run that "
                "continues may train on other rows. A class that overrides `_run_epoch` calls super()._run_epoch()."
            )
        self._has_warned = True

    def _guarded(self) -> GuardedEpoch:
        assert self._epoch is not None
        return self._epoch

    def _read(self) -> tuple[bool, bool, bool]:
        """Whether on all processes the losses of this step are finite, and its gradients, and none came to padding.

        Cost: the one read.
        """
        epoch, num_processes = self._guarded(), self._args.world_size
        # A subclass with a `training_step` of its own shows no more of its losses than their sum.
        losses = torch.isfinite(torch.stack(self._losses or [epoch.loss])).all()
        norm = torch.as_tensor(self._norm, device=losses.device)
        gradients = torch.ones_like(losses) if self._backend.has_own_loss_scale else torch.isfinite(norm)
        unread = torch.ones_like(losses) if self._padding is None else self._padding.is_unread(losses.device)
        good = torch.stack([losses, gradients, unread]).int()
        if num_processes > 1:
            good = epoch.accelerator.reduce(good)
        finite_loss, finite_gradient, is_unread = (number == num_processes for number in good.tolist())
        return finite_loss, finite_gradient, is_unread

    def _leave_out(self, state: TrainerState, loader: Any) -> None:
        epoch = self._guarded()
        self._num_skipped_in_a_row += 1
        self.num_left_out += 1
        if self._args.nan_policy != "skip" or self._num_skipped_in_a_row > MAX_SKIPPED_IN_A_ROW:
            raise self._not_finite(state, loader)
        logger.warning("Left out: %s", self._description(state, loader))
        epoch.model.zero_grad()  # an optimizer leaves parameters without gradient alone, their decay too
        assert self._loss_before is not None
        epoch.loss.copy_(self._loss_before)
        self._num_not_taken_up += 1
        self._scale_before = None if epoch.scaler is None else epoch.scaler.get_scale()

    def _watch_scale(self, scaler: Any, finite_gradient: bool, state: TrainerState, loader: Any) -> None:
        """Lets the scaler leave a step out and lower its scale, until that cannot be the cause any more."""
        if self._overflows is None or self._overflows.scaler is not scaler:
            self._overflows = OverflowWatch(scaler)
        if finite_gradient:
            self._overflows.note_finite()
            return
        too_many = self._overflows.note_overflow((state.global_step, self._guarded().number))
        if too_many:
            raise self._not_the_scale(self._overflows, too_many, state, loader)
        if self._args.nan_policy == "skip":
            logger.warning("Left out by the loss scale, which is halved: %s", self._description(state, loader))

    # --- what is said of it -----------------------------------------------------------------------------------------

    def _description(self, state: TrainerState, loader: Any) -> str:
        losses = [float(loss) for loss in self._losses]
        bad = [i for i, loss in enumerate(losses) if not math.isfinite(loss)] or [*range(len(losses))]
        values = ", ".join(str(losses[i]) for i in bad)
        if len(losses) != self._num_batches:  # not one per call of `training_step`
            assert self._loss_before is not None
            bad = [*range(self._num_batches)]
            values = str(float(self._guarded().loss - self._loss_before))
        rows = self._name_rows(loader, bad, state.global_step, self._guarded().number)
        return (
            f"step {state.global_step + 1}: loss {values}, gradient norm {float(self._norm)}; {rows} "
            f"(process {self._args.process_index})."
        )

    def _not_finite(self, state: TrainerState, loader: Any) -> _NotFinite:
        skips = self._args.nan_policy == "skip"
        before = f" The {MAX_SKIPPED_IN_A_ROW} steps before were left out for the same reason." if skips else ""
        return _NotFinite(
            f"Not a finite number in {self._description(state, loader)}{before} The weights were not touched",
            "Usual causes: a label that is not finite, a learning rate that is too high, float16. Look at these rows; "
            "--nan_policy skip leaves such steps out; --resume auto --allow_changed learning_rate goes on with a lower "
            "one.",
        )

    def _not_the_scale(self, watch: OverflowWatch, too_many: str, state: TrainerState, loader: Any) -> _NotFinite:
        batches = [*range(self._num_batches)]
        last = ", ".join(f"{step + 1} ({self._name_rows(loader, batches, step, epoch)})" for step, epoch in watch.steps)
        return _NotFinite(
            f"Gradients are not finite in {self._description(state, loader)} The loss is, and it is not the loss scale "
            f"either: {too_many}. There were {watch.num_in_all} such steps, the last of them {last}; none touched the "
            "weights",
            "Usual causes: a row that these steps share, weights or activations too large for float16, a learning rate "
            "that is too high. Look at these rows; --bf16, where the device has it, and float32 (--without precision) "
            "have no such limit; --resume auto --allow_changed learning_rate goes on with a lower one.",
        )

    def _name_rows(self, loader: Any, batches: list[int], global_step: int, epoch: int) -> str:
        guarded = self._guarded()
        first = (global_step - epoch * guarded.num_steps) * self._args.gradient_accumulation_steps
        return name_rows(self._args, loader, batches, first, epoch, guarded.is_own_loader)


class _NotFinite(Exception):
    """What is said before and after the checkpoint that is left to continue from."""


class _ReadsPadding(Exception):
    """In the step that it names."""


def unfiltered(args: FastTrainingArguments) -> AbstractContextManager[None]:
    """Without Trainer's filter, which shows the mean of other steps in place of a loss that is not finite.

    It also waits for the device every batch. The arguments may be the caller's, who finds them as they were.
    """
    return replaced(args, logging_nan_inf_filter=False)


def can_be_best(name: str, metrics: dict[str, float], step: int) -> bool:
    """Whether a metric can be the best one so far: None, or what is not finite, never is, which a warning says."""
    value = metrics.get(name, 0.0)  # of one that is missing, Trainer says so
    if value is not None and math.isfinite(value):
        return True
    logger.warning("%s is %s at step %d: never the best.", name, value, step)
    return False
