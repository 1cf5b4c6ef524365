"""A step whose loss or gradient is NaN or infinite never reaches the weights: training stops, or leaves it out."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from ..data.columns import has_numbered_rows
from ..errors import NotFiniteError
from ..loss_scale import OverflowWatch
from ..overrides import find_override

MAX_SKIPPED_IN_A_ROW = 10  # then it is not a matter of some rows

logger = logging.getLogger(__name__)


class NanPolicyMixin:
    """Carries out `nan_policy`: "stop" raises before the optimizer steps, "skip" goes on without the step.

    A skipped step leaves weights, optimizer state and the logged loss as if its rows had not been there; the schedule
    moves on. A gradient that is not finite under a `GradScaler` is the scaler's affair until `OverflowWatch` says that
    it cannot be the scale; a loss that is not finite never is. A metric that is no number is never the best one.

    Raises (while training):
        NotFiniteError: with the step, the rows of the batches concerned, and the last checkpoint.

    Cost: one read from the device per optimizer step, none per micro-batch.
    """

    args: Any
    state: Any
    accelerator: Any
    callback_handler: Any
    model_wrapped: Any
    is_deepspeed_enabled: bool
    current_gradient_accumulation_steps: int
    _globalstep_last_logged: int

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._losses: list[torch.Tensor] = []
        self._loss_before: torch.Tensor | None = None
        self._grad_norm: Any = None
        self._num_skipped_in_a_row = 0
        self.num_left_out = 0  # of the run's steps, also before it was resumed
        self._overflows: OverflowWatch | None = None
        self._scale_before: float | None = None
        self._epoch, self._steps_per_epoch = 0, 1
        self.add_callback(NanPolicyCallback(self))  # type: ignore[attr-defined]

    def _run_epoch(self, **kwargs: Any) -> None:
        self._epoch, self._steps_per_epoch = kwargs["epoch"], kwargs["num_update_steps_per_epoch"]
        with self._unfiltered():
            super()._run_epoch(**kwargs)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer; the loss is that of all batches."""
        with self._unfiltered():
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _unfiltered(self) -> Iterator[None]:
        """Without Trainer's filter, which shows the mean of other steps in place of a loss that is not finite.

        It also waits for the device every batch. The arguments may be the caller's, who finds them as they were.
        """
        before, self.args.logging_nan_inf_filter = self.args.logging_nan_inf_filter, False
        try:
            yield
        finally:
            self.args.logging_nan_inf_filter = before

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As in Trainer; keeps the loss of each micro-batch, on the device, until the step is over."""
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self._losses.append(loss)
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)  # type: ignore[misc]
        self._grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # FSDP2: a part on each process
        return self._grad_norm

    def begin_step(self) -> None:
        """Forgets the step before."""
        self._losses = []
        self._loss_before = self._tr_loss.detach().clone()  # type: ignore[attr-defined]

    def check_step(self) -> None:
        """Before the optimizer steps, on all processes alike: goes on, raises, or takes the gradients away."""
        finite_loss, finite_gradient = self._read_finite()
        scaler = getattr(self.accelerator, "scaler", None)
        if not finite_loss or (scaler is None and not finite_gradient):
            self._leave_out(scaler)
            return
        self._num_skipped_in_a_row = 0
        if scaler is not None:
            self._watch_scale(scaler, finite_gradient)

    def restore_scale(self) -> None:
        """After the optimizer stepped: a loss that was not finite is no reason for a lower loss scale."""
        if self._scale_before is not None:
            self.accelerator.scaler.update(new_scale=self._scale_before)
            self._scale_before = None

    def _read_finite(self) -> tuple[bool, bool]:
        """Whether the losses of this step, and its gradients, are finite, on all processes. Cost: the one read."""
        # A subclass with a `training_step` of its own shows no more of its losses than their sum.
        losses = torch.isfinite(torch.stack(self._losses or [self._tr_loss])).all()  # type: ignore[attr-defined]
        norm = torch.as_tensor(self._grad_norm, device=losses.device)
        has_own_scale = self.is_deepspeed_enabled and self.args.fp16  # DeepSpeed ends a run at its lowest scale itself
        gradients = torch.ones_like(losses) if has_own_scale else torch.isfinite(norm)
        num_finite = torch.stack([losses, gradients]).int()
        if self.args.world_size > 1:
            num_finite = self.accelerator.reduce(num_finite)
        finite_loss, finite_gradient = (number == self.args.world_size for number in num_finite.tolist())
        return finite_loss, finite_gradient

    def _leave_out(self, scaler: Any) -> None:
        self._num_skipped_in_a_row += 1
        self.num_left_out += 1
        if self.args.nan_policy != "skip" or self._num_skipped_in_a_row > MAX_SKIPPED_IN_A_ROW:
            raise NotFiniteError(self._refusal())
        logger.warning("Left out: %s", self._description())
        self.model_wrapped.zero_grad()  # an optimizer leaves parameters without gradient alone, their decay too
        self._tr_loss.copy_(self._loss_before)  # type: ignore[attr-defined]
        self._globalstep_last_logged += 1  # Trainer divides by the steps since the last log
        self._scale_before = None if scaler is None else scaler.get_scale()

    def _watch_scale(self, scaler: Any, finite_gradient: bool) -> None:
        """Lets the scaler leave a step out and lower its scale, until that cannot be the cause any more."""
        if self._overflows is None or self._overflows.scaler is not scaler:
            self._overflows = OverflowWatch(scaler)
        if finite_gradient:
            self._overflows.note_finite()
            return
        too_many = self._overflows.note_overflow((self.state.global_step, self._epoch))
        if too_many:
            raise NotFiniteError(self._scale_refusal(too_many))
        if self.args.nan_policy == "skip":
            logger.warning("Left out by the loss scale, which is halved: %s", self._description())

    def _description(self) -> str:
        norm = float(self._grad_norm)
        num_batches = self.current_gradient_accumulation_steps
        losses = [float(loss) for loss in self._losses]
        bad = [i for i, loss in enumerate(losses) if not math.isfinite(loss)] or [*range(len(losses))]
        values = ", ".join(str(losses[i]) for i in bad)
        if len(losses) != num_batches:  # not one per call of `training_step`
            bad = [*range(num_batches)]
            values = str(float(self._tr_loss - self._loss_before))  # type: ignore[attr-defined]
        return (
            f"step {self.state.global_step + 1}: loss {values}, gradient norm {norm}; {self._name_rows(bad)} "
            f"(process {self.args.process_index})."
        )

    def _refusal(self) -> str:
        kept = self.name_last_good()  # type: ignore[attr-defined]
        skips = self.args.nan_policy == "skip"
        before = f" The {MAX_SKIPPED_IN_A_ROW} steps before were left out for the same reason." if skips else ""
        return (
            f"Not a finite number in {self._description()}{before} The weights were not touched; {kept}. Nothing was "
            "overwritten. Usual causes: a label that is not finite, a learning rate that is too high, float16. Look at "
            "these rows; --nan_policy skip leaves such steps out; --resume auto --allow_changed learning_rate goes on "
            "with a lower one."
        )

    def _scale_refusal(self, too_many: str) -> str:
        watch = self._overflows
        assert watch is not None
        batches = [*range(self.current_gradient_accumulation_steps)]
        last = ", ".join(f"{step + 1} ({self._name_rows(batches, step, epoch)})" for step, epoch in watch.steps)
        return (
            f"Gradients are not finite in {self._description()} The loss is, and it is not the loss scale either: "
            f"{too_many}. There were {watch.num_in_all} such steps, the last of them {last}; none touched the weights; "
            f"{self.name_last_good()}. Nothing was overwritten. Usual causes: a row that these steps share, weights or "  # type: ignore[attr-defined]
            "activations too large for float16, a learning rate that is too high. Look at these rows; --bf16, where "
            "the device has it, and float32 (--without precision) have no such limit; --resume auto --allow_changed "
            "learning_rate goes on with a lower one."
        )

    def _name_rows(self, batches: list[int], global_step: int | None = None, epoch: int | None = None) -> str:
        """Which rows of the training data micro-batches of a step hold. Cost: draws the epoch's order again.

        Args:
            batches: micro-batches of the step, from 0.
            global_step, epoch: number of steps before it and the epoch it belongs to; None: those of now.
        """
        global_step = self.state.global_step if global_step is None else global_step
        epoch = self._epoch if epoch is None else epoch
        first = (global_step - epoch * self._steps_per_epoch) * self.args.gradient_accumulation_steps
        if getattr(self, "_stream_sampler", None) is not None:
            world, size = self.args.world_size, self.args.per_device_train_batch_size
            starts = [((first + i) * world + self.args.process_index) * size for i in batches]
            return "rows " + ", ".join(f"{start} to {start + size - 1}" for start in starts) + " since the stream began"
        loader = self.callback_handler.train_dataloader
        if find_override(self, "get_train_dataloader") or not has_numbered_rows(loader.dataset):
            return f"micro-batches {', '.join(str(first + i) for i in batches)} of the epoch"
        loader.set_epoch(epoch)
        drawn = [*islice(loader.batch_sampler, first, first + batches[-1] + 1)]
        return "rows " + "; ".join(", ".join(map(str, drawn[i])) for i in batches) + " of the training data"

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        name = self._best_metric_key()  # type: ignore[attr-defined]  # of EvaluationMixin
        value = metrics.get(name)
        if value is not None and not math.isfinite(value):
            logger.warning("%s is %s at step %d: never the best.", name, value, self.state.global_step)
            return False
        return super()._determine_best_metric(metrics, trial)  # type: ignore[misc]


class NanPolicyCallback(TrainerCallback):
    """Brings Trainer's events to `NanPolicyMixin`."""

    def __init__(self, trainer: NanPolicyMixin):
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first micro-batch of a step comes next."""
        self.trainer.begin_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gradients are complete and clipped."""
        self.trainer.check_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step was made, or left out."""
        self.trainer.restore_scale()
