"""Saving and stopping by signal and by time, so that a run which must leave its machine can continue elsewhere."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import psutil
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..distributed import Team
from .now import Training
from .signals import STOPPING, SignalWatch
from .watcher import Watcher

STOP_MARGIN_S = 300.0  # before max_hours; a tenth of it, where that is less

logger = logging.getLogger(__name__)

Due = Callable[[], TrainerControl]


class EvaluationGivenUp(BaseException):
    """Leaves an evaluation that a stop interrupts. Not an `Exception`: a user's `evaluate` might swallow that."""


class StopCause(Enum):
    """What makes a run leave before its end."""

    SIGNAL = "a signal"
    TIME = "max_hours"


@dataclass(frozen=True)
class StopReason:
    """Why a run left before its end; `text` says it to people."""

    cause: StopCause
    text: str


class Stopper(TrainerCallback):
    """Stops and saves on SIGTERM, SIGINT, SIGHUP and before `max_hours`; also saves every `save_minutes`.

    A run stops after the optimizer step at hand, on which its processes agree by one reduction of a few numbers per
    step and per evaluation batch. An evaluation is given up: it is as if it had not
    begun, and `evaluation_pending`, which checkpoints carry, says so.

    Args:
        args: `FastTrainingArguments`, of which those of time are read when they are needed.

    Attributes:
        reason: why training stopped, once it has; None where nothing but training itself ends it.
        is_evaluating: whether an evaluation that the loop asked for is under way; a user's own is none of the run's.
        is_resumed: whether the training at hand, or the last, continues a checkpoint.
        ignore_keys: what the evaluations of the training at hand leave out of a model's outputs.
        process_began: of the process, on the clock of `time.monotonic`.
    """

    name = "evaluation_pending"

    def __init__(self, args: Any, team: Team):
        self._args, self._team = args, team
        self.reason: StopReason | None = None
        self.evaluation_pending = False
        self.is_evaluating = False
        self.is_resumed = False
        self.ignore_keys: list[str] | None = None
        self.process_began = time.monotonic() - (time.time() - psutil.Process().create_time())
        self._signals = SignalWatch()
        self._longest_save_s = 0.0
        self._last_save = time.monotonic()
        self._at_epoch_end = False  # Trainer asks what is due twice: after a step, and at the end of an epoch
        self._epoch_was_over = False  # when the stop was noticed
        self._save_is_postponed = False

    @contextmanager
    def during_training(self, is_resumed: bool, ignore_keys: list[str] | None = None) -> Iterator[None]:
        """While entered, signals are noted; one that came when nothing was left to stop is raised at the end."""
        self.reason, self.evaluation_pending = None, False
        self._at_epoch_end = self._save_is_postponed = False
        self.is_resumed, self.ignore_keys = is_resumed, ignore_keys
        self._last_save = time.monotonic()
        with self._signals:
            yield
        if self._signals.received is not None and self.reason is None:
            signal.raise_signal(self._signals.received)

    def end_if_finished(self, state: TrainerState, control: TrainerControl, callbacks: Sequence[Any]) -> None:
        """A resumed run that had come to its end, also by one of transformers' `callbacks`, does not train on."""
        stoppers = [c for c in callbacks if isinstance(c, EarlyStoppingCallback)]
        has_stopped_early = any(c.early_stopping_patience_counter >= c.early_stopping_patience for c in stoppers)
        if self.is_resumed and (state.global_step >= state.max_steps or has_stopped_early):
            control.should_training_stop = True

    def is_at_end(self, state: TrainerState, control: TrainerControl) -> bool:
        """Whether training ends with the step at hand, other than by a signal or a time limit."""
        return state.global_step >= state.max_steps or (control.should_training_stop and self.reason is None)

    # --- noticing ---------------------------------------------------------------------------------------------------

    def notice(self, state: TrainerState, control: TrainerControl) -> bool:
        """Asks all processes whether one wishes to stop or to save; returns whether to save because of the time."""
        if self.reason is not None:
            return False
        *signalled, time_up, save = self._team.agree(self._wishes())
        if any(signalled) or time_up:
            names = [f"received {number.name}" for number, came in zip(STOPPING, signalled, strict=True) if came]
            is_by_signal = StopReason(StopCause.SIGNAL, names[0]) if names else None
            self.reason = is_by_signal or StopReason(StopCause.TIME, f"max_hours={self._args.max_hours} is near")
            self._epoch_was_over = self._at_epoch_end or _ends_epoch(state, control)
            control.should_training_stop = True
            logger.warning("Stopping at step %d: %s.", state.global_step, self.reason.text)
        return save

    def _wishes(self) -> list[bool]:
        now, received = time.monotonic(), self._signals.received
        hours, minutes = self._args.max_hours, self._args.save_minutes
        is_time_up = hours is not None and now - self.process_began >= self._stop_after_s(hours * 3600)
        is_save_due = minutes is not None and now - self._last_save >= minutes * 60
        return [*(received == number for number in STOPPING), is_time_up, is_save_due]

    def _stop_after_s(self, limit_s: float) -> float:
        """Early enough for the last checkpoint, which may take as long as two of the longest so far."""
        return limit_s - max(min(STOP_MARGIN_S, limit_s / 10), 2 * self._longest_save_s)

    def note_save(self, seconds: float) -> None:
        """That a save took so long: before `max_hours`, time for two of the longest is left."""
        self._longest_save_s = max(self._longest_save_s, seconds)

    def left_s(self) -> float | None:
        """Seconds that `max_hours` leaves a run which it has stopped; None for any other."""
        if self.reason is None or self.reason.cause is not StopCause.TIME:
            return None
        return self._args.max_hours * 3600 - (time.monotonic() - self.process_began)

    # --- what is due after a step and at the end of an epoch ---------------------------------------------------------

    def do_due(self, due: Due, state: TrainerState, control: TrainerControl) -> None:
        """Does what is due, a save and an evaluation among it, with what a stop and the clock make of it.

        Args:
            due: Trainer's `_maybe_log_save_evaluate`; returns the control of afterwards.
        """
        (self._finish_epoch if self._at_epoch_end else self._finish_step)(due, state, control)

    def _finish_step(self, due: Due, state: TrainerState, control: TrainerControl) -> None:
        is_epoch_over = _ends_epoch(state, control)
        if self.notice(state, control):
            control.should_save = True
        if is_epoch_over or self.reason:
            # What is due at the end of the epoch comes first: a run resumed from this step would miss it.
            self._save_is_postponed, control.should_save = control.should_save, False
        if is_epoch_over and self._args.save_strategy == SaveStrategy.BEST:  # saves with the evaluation: log before
            control.should_log |= self._args.logging_strategy == IntervalStrategy.EPOCH
        self._do_and_notice(due, state, control)

    def _finish_epoch(self, due: Due, state: TrainerState, control: TrainerControl) -> None:
        self.notice(state, control)
        control.should_save |= self._save_is_postponed or self.reason is not None
        self._save_is_postponed = False
        if self.reason and not self._epoch_was_over:  # Trainer left the epoch early
            control.should_log = control.should_evaluate = False
        was_stopped = self.reason is not None
        control = self._do_and_notice(due, state, control)
        if self.reason and not was_stopped:
            control.should_save = True
            due()

    def _do_and_notice(self, due: Due, state: TrainerState, control: TrainerControl) -> TrainerControl:
        """Does what is due, but an evaluation that a stop holds back; looks for a stop again after what took long."""
        if self.reason and control.should_evaluate:
            control.should_evaluate, self.evaluation_pending = False, True
        took_long = control.should_evaluate or control.should_save
        control = due()
        if took_long:
            self.notice(state, control)
        return control

    # --- evaluation -------------------------------------------------------------------------------------------------

    @contextmanager
    def interruptible(self, now: Training, watchers: Sequence[Watcher] = ()) -> Iterator[None]:
        """Around an evaluation that the loop asked for. Given up, it is as if it had not begun, and is pending."""
        handler, log_history = now.callback_handler, now.state.log_history
        num_logs = len(log_history)
        exported = [(c, c.state()["attributes"]) for c in handler.callbacks if isinstance(c, ExportableState)]
        watched = [(watcher, watcher.snapshot()) for watcher in watchers]
        self.is_evaluating = True
        try:
            yield
        except EvaluationGivenUp:
            # With several datasets, some were evaluated, logged and shown to early stopping.
            del log_history[num_logs:]
            for callback, attributes in exported:
                vars(callback).update(attributes)
            for watcher, snapshot in watched:
                watcher.rollback(snapshot)
            end = getattr(handler.eval_dataloader, "end", None)
            if end is not None:
                end()  # else Accelerate takes the loader for the one in use
            self.evaluation_pending = True
        finally:
            self.is_evaluating = False

    def hold_back(self, control: TrainerControl) -> None:
        """After an evaluation that was given up: neither it nor a save is due, and training ends."""
        control.should_evaluate = control.should_save = False
        control.should_training_stop |= self.reason is not None

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> bool:
        """Whether an evaluation is pending."""
        return self.evaluation_pending

    def load(self, tree: bool | None) -> None:
        """Takes over that an evaluation is pending."""
        self.evaluation_pending = bool(tree)

    # --- events -----------------------------------------------------------------------------------------------------

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What is due next is due after a step."""
        self._at_epoch_end = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What is due next is due at the end of the epoch, or of what Trainer ran of it."""
        self._at_epoch_end = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From here `save_minutes` counts."""
        self._last_save = time.monotonic()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After each batch of an evaluation that Trainer's loop asked for; a user's own evaluation runs to its end."""
        if self.is_evaluating:
            self.notice(state, control)
            if self.reason is not None:
                raise EvaluationGivenUp


def _ends_epoch(state: TrainerState, control: TrainerControl) -> bool:
    """Whether an epoch ends with the step at hand, stop or no stop."""
    is_last = control.should_training_stop or control.should_epoch_stop
    return float(state.epoch or 0.0).is_integer() or is_last
