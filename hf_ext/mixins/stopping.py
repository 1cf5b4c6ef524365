"""Saving and stopping by signal and by time, so that a run which must leave its machine can continue elsewhere."""

from __future__ import annotations

import logging
import signal
import time
from functools import partial
from typing import Any

import psutil
import torch
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..data.repeatable_loaders import base_of
from ..errors import ArgumentError
from .signals import STOPPING, SignalWatch, leave_group

logger = logging.getLogger(__name__)


class EvaluationGivenUp(BaseException):
    """Leaves an evaluation that a stop interrupts. Not an `Exception`: a user's `evaluate` might swallow that."""


class StoppingMixin:
    """Stops and saves on SIGTERM, SIGINT, SIGHUP and before `max_hours`; also saves every `save_minutes`.

    One process stops after the micro-batch at hand, several after the optimizer step at hand, on which they agree by
    one reduction of a few numbers per step and per evaluation batch. An evaluation is given up: it is as if it had not
    begun, and `evaluation_pending` says so. After the loop `stop_reason` says why training stopped, or None.

    Raises (from the constructor):
        ArgumentError: `max_hours` leaves no time before `stop_margin_minutes`.
    """

    args: Any
    state: Any
    control: Any
    accelerator: Any
    callback_handler: Any
    model_wrapped: Any
    longest_save_s: float  # of CheckpointMixin

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.stop_reason: str | None = None
        self.evaluation_pending = False
        self._signals = SignalWatch()
        self._process_began = time.monotonic() - (time.time() - psutil.Process().create_time())
        self._last_save = time.monotonic()
        self._at_epoch_end = False  # Trainer asks what is due twice: after a step, and at the end of an epoch
        self._epoch_was_over = False  # when the stop was noticed
        self._save_is_postponed = False
        self._is_evaluating = False
        self._is_resumed = False
        self._trial: Any = None
        self._ignore_keys: Any = None
        hours, margin = self.args.max_hours, self.args.stop_margin_minutes
        if hours is not None and hours * 60 <= margin:
            raise ArgumentError(
                f"max_hours={hours} ends before training begins: the last checkpoint is begun "
                f"stop_margin_minutes={margin} before it. Give more hours or a smaller margin."
            )
        self.add_callback(StoppingCallback(self))  # type: ignore[attr-defined]

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.stop_reason, self.evaluation_pending = None, False
        self._at_epoch_end = self._save_is_postponed = False
        self._is_resumed = kwargs.get("resume_from_checkpoint") is not None
        self._trial, self._ignore_keys = kwargs.get("trial"), kwargs.get("ignore_keys_for_eval")
        self._last_save = time.monotonic()
        with self._signals:
            output = super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
        if self._signals.received is not None and self.stop_reason is None:
            signal.raise_signal(self._signals.received)  # it came when nothing was left to stop
        return output

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # transformers 5.23 trains one more step in a run that is resumed at its last.
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(*args, **kwargs)  # type: ignore[misc]
        if getattr(loader, "num_workers", 0):
            init = partial(leave_group, loader.worker_init_fn)
            loader.worker_init_fn = init  # of loaders made from it, where a resumed run drops batches
            base_of(loader).worker_init_fn = init  # of Accelerate's, which iterates
        return loader

    # --- noticing ---------------------------------------------------------------------------------------------------

    def notice_stop(self, in_cycle: bool = False) -> bool:
        """Asks all processes whether one wishes to stop or to save; returns whether to save because of the time.

        Args:
            in_cycle: micro-batches since the last optimizer step are given up if this stops the run.
        """
        if self.stop_reason is not None:
            return False
        *signalled, time_up, save = self._agree(self._wishes())
        if any(signalled) or time_up:
            names = [f"received {number.name}" for number, came in zip(STOPPING, signalled, strict=True) if came]
            self.stop_reason = names[0] if names else f"max_hours={self.args.max_hours} is near"
            self._epoch_was_over = not in_cycle and (self._at_epoch_end or self._epoch_is_over())
            self.control.should_training_stop = True
            logger.warning("Stopping at step %d: %s.", self.state.global_step, self.stop_reason)
        return save

    def _wishes(self) -> list[bool]:
        now, received = time.monotonic(), self._signals.received
        hours, minutes = self.args.max_hours, self.args.save_minutes
        margin_s = max(self.args.stop_margin_minutes * 60, 2 * self.longest_save_s)
        is_time_up = hours is not None and now - self._process_began >= hours * 3600 - margin_s
        is_save_due = minutes is not None and now - self._last_save >= minutes * 60
        return [*(received == number for number in STOPPING), is_time_up, is_save_due]

    def _agree(self, wishes: list[bool]) -> list[bool]:
        """Which wishes any process has. The same on all of them, which is what keeps them in step."""
        if self.args.world_size == 1:
            return wishes
        counts = self.accelerator.reduce(torch.tensor(wishes, dtype=torch.int32, device=self.accelerator.device))
        return [count > 0 for count in counts.tolist()]

    def _epoch_is_over(self) -> bool:
        """Whether an epoch ends with the step at hand, stop or no stop."""
        control = self.control
        return float(self.state.epoch).is_integer() or control.should_training_stop or control.should_epoch_stop

    # --- what is due after a step and at the end of an epoch ---------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        due = partial(super()._maybe_log_save_evaluate, *args, **kwargs)  # type: ignore[misc]
        (self._finish_epoch if self._at_epoch_end else self._finish_step)(due)

    def _finish_step(self, due: Any) -> None:
        control, is_epoch_over = self.control, self._epoch_is_over()
        if self.notice_stop():
            control.should_save = True
        if is_epoch_over or self.stop_reason:
            # What is due at the end of the epoch comes first: a run resumed from this step would miss it.
            self._save_is_postponed, control.should_save = control.should_save, False
        if is_epoch_over and self.args.save_strategy == SaveStrategy.BEST:  # saves with the evaluation: log before
            control.should_log |= self.args.logging_strategy == IntervalStrategy.EPOCH
        self._hold_evaluation()
        took_long = control.should_evaluate or control.should_save
        due()
        if took_long:
            self.notice_stop()

    def _finish_epoch(self, due: Any) -> None:
        control = self.control
        self.notice_stop()
        control.should_save |= self._save_is_postponed or self.stop_reason is not None
        self._save_is_postponed = False
        if self.stop_reason and not self._epoch_was_over:  # Trainer left the epoch early
            control.should_log = control.should_evaluate = False
        self._hold_evaluation()
        took_long = control.should_evaluate or control.should_save
        was_stopped = self.stop_reason is not None
        due()
        if took_long:
            self.notice_stop()
        if self.stop_reason and not was_stopped:
            control.should_save = True
            due()

    def _hold_evaluation(self) -> None:
        if self.stop_reason and self.control.should_evaluate:
            self.control.should_evaluate, self.evaluation_pending = False, True

    # --- evaluation -------------------------------------------------------------------------------------------------

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if self._is_resumed and kwargs.get("skip_scheduler"):
            return {}  # of `eval_on_start`, which transformers 5.23 would do, and log, once more in a continued run
        num_logs = len(self.state.log_history)
        callbacks = [c for c in self.callback_handler.callbacks if isinstance(c, ExportableState)]
        before = [(callback, callback.state()["attributes"]) for callback in callbacks]
        self._is_evaluating = True
        try:
            return super()._evaluate(*args, **kwargs)  # type: ignore[misc]
        except EvaluationGivenUp:
            # With several datasets, some were evaluated, logged and shown to early stopping.
            del self.state.log_history[num_logs:]
            for callback, attributes in before:
                vars(callback).update(attributes)
            end = getattr(self.callback_handler.eval_dataloader, "end", None)
            if end is not None:
                end()  # else Accelerate takes the loader for the one in use
            self.control.should_evaluate = self.control.should_save = False
            self.evaluation_pending = True
            return {}
        finally:
            self._is_evaluating = False

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        return not self.evaluation_pending and super()._determine_best_metric(metrics, trial)  # type: ignore[misc]

    def evaluate_pending(self) -> None:
        """Does what the evaluation that a stop interrupted would have done: logs, callbacks, best checkpoint, save.

        To be called at the beginning of a resumed run, with the random state in which the evaluation would have begun.
        A stop gives it up again; it is then still pending.
        """
        metrics = self._evaluate(self._trial, self._ignore_keys)
        if self.evaluation_pending:
            return
        is_best = self._determine_best_metric(metrics, self._trial)
        strategy = self.args.save_strategy
        if is_best or strategy not in (SaveStrategy.NO, SaveStrategy.BEST):
            self._save_checkpoint(self.model_wrapped, self._trial)  # type: ignore[attr-defined]
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)


class StoppingCallback(TrainerCallback):
    """Brings Trainer's events to `StoppingMixin`."""

    def __init__(self, trainer: StoppingMixin):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A resumed run that had come to its end does not train on."""
        trainer = self.trainer
        stoppers = [c for c in trainer.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback)]
        has_stopped_early = any(c.early_stopping_patience_counter >= c.early_stopping_patience for c in stoppers)
        if trainer._is_resumed and (state.global_step >= state.max_steps or has_stopped_early):
            control.should_training_stop = True

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What is due next is due after a step."""
        self.trainer._at_epoch_end = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What is due next is due at the end of the epoch, or of what Trainer ran of it."""
        self.trainer._at_epoch_end = True

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Between two micro-batches of one process: several could leave each other waiting in a gradient's sum."""
        if args.world_size == 1:
            self.trainer.notice_stop(in_cycle=True)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From here `save_minutes` counts."""
        self.trainer._last_save = time.monotonic()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After each batch of an evaluation that Trainer's loop asked for; a user's own evaluation runs to its end."""
        trainer = self.trainer
        if trainer._is_evaluating:
            trainer.notice_stop()
            if trainer.stop_reason is not None:
                raise EvaluationGivenUp
