"""What ends a run from outside, so that it can continue elsewhere: signals, limits of time, data workers that die."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.queues import Queue
from typing import Any

import psutil
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..checkpoints import CheckpointStore, ends_nth_epoch
from ..errors import DataWorkerDied, leave_terminal
from ..models import replaced
from ..processes import Team
from .host import Host

# torch 2.13 has no class for it: "DataLoader worker (pid 7) is killed by signal: Killed.", "... (pid(s) 7) exited ...".
_DEATH = re.compile(r"DataLoader worker \(pid(\(s\))? [\d, ]+\).*")
_BROKEN = (RuntimeError, ConnectionError, EOFError, FileNotFoundError)  # what a loader raises where a worker is gone
_ADVICE = (
    "Workers are killed mostly where memory or shared memory (/dev/shm) runs out, or `ulimit -f` is small: give fewer "
    "than dataloader_num_workers={}. Or code of the dataset or of the collator ended it (sys.exit, os._exit), which "
    "dataloader_num_workers=0 shows."
)
STOP_MARGIN_S = 300.0  # before max_hours; a tenth of it, where that is less
STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))

logger = logging.getLogger(__name__)


class EvaluationGivenUp(BaseException):
    """Leaves an evaluation that a stop interrupts. Not an `Exception`: a user's `evaluate` might swallow that."""


class Stopper(TrainerCallback):
    """Stops and saves on SIGTERM, SIGINT, SIGHUP and before `max_hours`; also saves every `save_minutes`.

    A run stops after the optimizer step at hand, on which its processes agree by one reduction of a few numbers per
    step and per evaluation batch. An evaluation is given up (see `Evaluator.evaluate`). The save of a step that ends
    an epoch waits for what is due with the epoch, which a run resumed from that step would miss.

    A third signal raises KeyboardInterrupt, but not a third SIGTERM. People press Ctrl-C again; machines repeat
    themselves: where a scheduler signals every process, a rank hears of one stop from there, and twice from torch
    elastic. What is written to a terminal that was closed (SIGHUP) is dropped. Signals that the process ignores (under
    nohup, or after `&` in a script) stay ignored.

    Attributes:
        reason: why training stopped, for people; None where nothing but training itself ends it.
    """

    def __init__(self, trainer: Host, team: Team):
        self._trainer = trainer
        self._team = team
        self.reason: str | None = None
        self.process_began = time.monotonic() - (time.time() - psutil.Process().create_time())
        self._received: signal.Signals | None = None
        self._num_signals = 0
        self._longest_save_s = 0.0
        self._last_save = time.monotonic()
        self._saved_step: int | None = None
        self._is_epoch_over = self._save_is_postponed = False
        self._is_evaluating = False

    @contextlib.contextmanager
    def during_training(self) -> Iterator[None]:
        """Watches for signals while entered; one that came when nothing was left to stop is raised at the end."""
        self.reason = self._received = self._saved_step = None
        self._num_signals = 0
        self._save_is_postponed = False
        self._last_save = time.monotonic()
        previous: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in STOPPING}
            previous = {
                number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)
            }
        else:
            logger.info("Training runs in a thread: signals will not save a checkpoint.")
        receive = partial(self._receive, os.getpid(), previous)
        try:
            for number in previous:
                signal.signal(number, receive)
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self._received is not None and self.reason is None:
            signal.raise_signal(self._received)

    def _receive(self, pid: int, previous: dict[signal.Signals, Any], number: int, frame: object) -> None:
        received = signal.Signals(number)
        if os.getpid() != pid:  # a process forked from this one: as if this handler were not there
            signal.signal(number, previous.get(received, signal.SIG_DFL))
            signal.raise_signal(number)
            return
        self._num_signals += 1
        if received.name == "SIGHUP":
            leave_terminal()
        if self._num_signals == 1:
            self._received = received
            _say(f"{received.name}: training stops after this step and saves a checkpoint.")
        elif self._num_signals == 2:
            _say(f"{received.name}: the stop is under way; a third signal (not SIGTERM) ends the process, unsaved.")
        elif received.name != "SIGTERM":
            for other in STOPPING:
                signal.signal(other, signal.default_int_handler if other == signal.SIGINT else signal.SIG_DFL)
            raise KeyboardInterrupt

    # --- what others ask, or say ------------------------------------------------------------------------------------

    def is_at_end(self) -> bool:
        """Tells whether training ends with the step at hand, other than by a signal or a time limit."""
        state = self._trainer.state
        is_ended = self._trainer.control.should_training_stop and self.reason is None
        return bool(state.global_step >= state.max_steps or is_ended)

    def note_save(self, seconds: float) -> None:
        """Records how long a save took, so that `max_hours` leaves time for two of the longest."""
        self._longest_save_s = max(self._longest_save_s, seconds)

    def during_evaluation(self) -> contextlib.AbstractContextManager[Any]:
        """Lets an evaluation that Trainer's loop asked for be given up where the run stops."""
        return replaced(self, _is_evaluating=True)

    def check_evaluation(self) -> None:
        """Raises EvaluationGivenUp where the run stops; a hyperparameter search, though, is to get its number."""
        if self.reason is not None and not self._trainer.state.is_hyper_param_search:
            raise EvaluationGivenUp

    # --- noticing ---------------------------------------------------------------------------------------------------

    def _notice(self) -> bool:
        """Asks all processes whether one wishes to stop or to save; returns whether to save because of the time."""
        if self.reason is not None:
            return False
        args = self._trainer.args
        now = time.monotonic()
        hours = args.max_hours
        minutes = args.save_minutes
        is_time_up = hours is not None and now - self.process_began >= self._stop_after_s(hours * 3600)
        is_save_due = minutes is not None and now - self._last_save >= minutes * 60
        wishes = [*(self._received == number for number in STOPPING), is_time_up, is_save_due]
        *signalled, is_time_up, is_save_due = self._team.agree(wishes)
        names = [f"received {number.name}" for number, came in zip(STOPPING, signalled, strict=True) if came]
        if names or is_time_up:
            self.reason = names[0] if names else f"max_hours={hours} is near"
            logger.warning("Stopping at step %d: %s.", self._trainer.state.global_step, self.reason)
        return is_save_due

    def _stop_after_s(self, limit_s: float) -> float:
        """Returns a time early enough for the last checkpoint, which may take as long as two of the longest so far."""
        return limit_s - max(min(STOP_MARGIN_S, limit_s / 10), 2 * self._longest_save_s)

    # --- events -----------------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Stops a resumed run that had come to its end, also by early stopping of transformers'."""
        callbacks = self._trainer.callback_handler.callbacks
        stoppers = [callback for callback in callbacks if isinstance(callback, EarlyStoppingCallback)]
        has_stopped = any(one.early_stopping_patience_counter >= one.early_stopping_patience for one in stoppers)
        if state.global_step > 0 and (state.global_step >= state.max_steps or has_stopped):
            control.should_training_stop = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Looks for a stop once all other callbacks have said what is due."""
        is_last = control.should_training_stop or control.should_epoch_stop
        self._is_epoch_over = float(state.epoch or 0.0).is_integer() or is_last
        control.should_save |= self._notice()
        if self.reason is not None:
            control.should_training_stop = True
        if self._is_epoch_over or self.reason is not None:
            self._save_is_postponed = control.should_save
            control.should_save = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Takes up a save that waited for the epoch's end, and those of `keep_every_epochs`.

        Trainer calls it where it leaves an epoch early, too.
        """
        control.should_save |= self._save_is_postponed or ends_nth_epoch(
            state.epoch or 0.0, self._trainer.args.keep_every_epochs
        )
        self._save_is_postponed = False
        if self.reason is not None:
            control.should_evaluate &= self._is_epoch_over
            control.should_log &= self._is_epoch_over
            control.should_save = self._saved_step != state.global_step

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Starts to count `save_minutes` anew."""
        self._last_save = time.monotonic()
        self._saved_step = state.global_step

    def on_prediction_step(self, *event: object, **kwargs: object) -> None:
        """Looks for a stop after each batch of an evaluation that Trainer's loop asked for, not of a user's own."""
        if self._is_evaluating:
            self._notice()
            self.check_evaluation()


def _say(text: str) -> None:
    # Logging from a signal handler fails where the signal interrupted a write to the same stream.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


def _end_worker(error: Exception, batch: object) -> None:
    _say(f"A data worker could not hand over a batch. {type(error).__name__}: {error}")
    os._exit(DataWorkerDied.exit_code)


def _begin_worker(init: Callable[[int], None] | None, worker_id: int) -> None:
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    # Else the training process waits for ever for a batch that shared memory, or pickle, refused (torch 2.13).
    Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]
    if init is not None:
        init(worker_id)


def keep_from_workers(loader: DataLoader) -> DataLoader:
    """Returns the loader, whose workers, if it has any, get no signals that are sent to this process's group.

    A terminal, `timeout` or `kill -- -PID` would kill them, and torch raises an error in a process whose workers die.
    They still end with the process that started them, or, saying why, where they cannot hand over a batch. Not
    covered: the milliseconds until a worker has its group.
    """
    if getattr(loader, "num_workers", 0):
        init = partial(_begin_worker, loader.worker_init_fn)
        loader.worker_init_fn = init  # of loaders made from it, where a resumed run drops batches
        getattr(loader, "base_dataloader", loader).worker_init_fn = init  # of Accelerate's, which iterates
    return loader


# --- data workers that die --------------------------------------------------------------------------------------------


def name_dead_workers(run: Callable[[], Any], store: CheckpointStore, num_workers: int) -> Any:
    """Returns what `run` does; names data workers that were killed, or whose processes ended, in one error.

    Raises:
        DataWorkerDied: with what it died of, and where the run can go on.
    """
    try:
        return _hear_death(lambda: _hear_death(run))  # of workers of training, and of those of an evaluation
    except _BROKEN as error:
        raised: list[BaseException] = [error]
        while (before := raised[-1].__context__) is not None:
            raised.append(before)
        said = next(filter(None, (_DEATH.match(str(one)) for one in raised)), None)
        # A worker that a fork server started is not a child, whose death torch would hear of: only its pipe breaks.
        place = traceback.extract_tb(error.__traceback__)[-1].filename
        if said is None and (not num_workers or isinstance(error, RuntimeError) or "multiprocessing" not in place):
            raise
        words = said[0].strip().rstrip(".") if said else f"DataLoader worker (pid not known) is gone: {error}"
        own = store.checkpoints()
        newest = f"{own[-1].path.name} is the last one saved, and valid." if own else "No checkpoint was saved yet."
        raise DataWorkerDied(
            f"{words}. {newest} The same command with --resume auto (the recipes' default) goes "
            f"on. {_ADVICE.format(num_workers)}"
        ) from error


def _hear_death(run: Callable[[], Any]) -> Any:
    """Takes an error that torch raises, once per loader, in a signal handler, so between any two lines.

    That comes just after a broken pipe. Waits a quarter of a second, so that nothing is raised where the run is left.
    Not a context manager: whose `__exit__` is such a line.
    """
    try:
        return run()
    except _BROKEN:
        time.sleep(0.25)
        raise
