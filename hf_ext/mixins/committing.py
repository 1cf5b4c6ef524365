"""The end of a save while training goes on: hashing, waiting for the disk, the rename; then rotation and upload."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from ..checkpoints.additions import Look, look
from ..checkpoints.staging import Staging
from ..errors import DiskFailure
from ..overrides import is_overridden
from .together import TogetherMixin

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Commit:
    """A checkpoint whose files are written. `staging` and `done` are the main process's."""

    step: int
    began: float
    staging: Staging | None = None
    done: Future | None = None


class CommitMixin(TogetherMixin):
    """Commits a checkpoint in the background during the optimizer step after it; the end of that step waits for it.

    So a process that is killed loses no step more than if the save had waited, and training stops only for writing.
    A save is waited for at once where something reads it: a `_save_checkpoint` or a callback with `on_save` of the
    user's, an upload, a stop. What those write into the checkpoint becomes part of it before it is copied or pushed.
    """

    args: Any
    callback_handler: Any
    checkpoints: Any
    stop_reason: str | None
    _facts: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.longest_save_s = 0.0
        self._saved_step: int | None = None
        self._num_save_failures = 0
        self._commit: Commit | None = None
        self._placed: tuple[int, Look] | None = None  # the step whose folder others may be writing into
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-commit")
        self.add_callback(CommitCallback(self))  # type: ignore[attr-defined]

    def begin_commit(self, step: int, epoch: float, began: float, staging: Staging | None) -> None:
        """Of a checkpoint whose files are all written, by all processes."""
        done = None if staging is None else self._committer.submit(staging.commit, epoch, self._facts)
        self._commit = Commit(step, began, staging, done)

    def is_commit_awaited(self) -> bool:
        """Whether something reads the checkpoint as soon as it is saved, on any process; all of them call it.

        A callback may be one process's alone. Who then waited for a commit would wait for the others, who train on.
        """
        return bool(self._agree([self._is_read_at_once()])[0])  # type: ignore[attr-defined]  # of StoppingMixin

    def _is_read_at_once(self) -> bool:
        if (self.args.push_to_hub and self.args.hub_strategy != "end") or self.stop_reason:
            return True
        if is_overridden(self, "_save_checkpoint"):
            return True
        hooks = [type(callback).on_save for callback in self.callback_handler.callbacks]
        return any(h is not TrainerCallback.on_save and not h.__module__.startswith("hf_ext.") for h in hooks)

    def finish_save(self) -> None:
        """Waits until the last checkpoint is in place, with what others wrote into it; copies and pushes it.

        All processes call it.

        Raises:
            DiskFailure: too many checkpoints in a row could not be written.
        """
        self.place_save()
        placed, self._placed = self._placed, None
        if placed is None:
            return
        step, before = placed

        def conclude() -> None:
            self.checkpoints.take_in(step, before)
            self.copy_checkpoints()  # type: ignore[attr-defined]

        failure = self._together(conclude if self.args.should_save else None)
        if failure is not None:
            logger.error("checkpoint-%d may lack what others wrote into it, or its copy: %s", step, failure)
        if self.args.push_to_hub:
            self._push_checkpoint(step)  # type: ignore[attr-defined]

    def place_save(self) -> None:
        """Waits until the last checkpoint has its name, and rotates. All processes call it.

        Raises:
            DiskFailure: too many checkpoints in a row could not be written.
        """
        commit, self._commit = self._commit, None
        if commit is None:
            return
        failure = self._together(commit.done.result if commit.done else None)
        self.longest_save_s = max(self.longest_save_s, time.perf_counter() - commit.began)
        if failure is not None:
            if commit.staging:
                commit.staging.abandon()
            self.note_failed_save(commit.step, failure)
            return
        self._saved_step = commit.step
        self._num_save_failures = 0
        failure = self._together(self.rotate if self.args.should_save else None)  # type: ignore[attr-defined]
        if failure is not None:
            logger.error("Older checkpoints could not be deleted: %s", failure)
        self._placed = (commit.step, look(self.checkpoints.path(commit.step)) if self.args.should_save else {})

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        if self._placed is not None:  # a save that was waited for, and that `on_save` has seen
            self.finish_save()

    def name_last_good(self) -> str:
        """What is left to continue from, for messages; waits until it is in place."""
        self.finish_save()
        step = self._saved_step
        return "no checkpoint was saved" if step is None else f"checkpoint-{step} is the last good one"

    def note_failed_save(self, step: int, failure: str) -> None:
        """Says what happens now; raises DiskFailure where it was one failure too many."""
        self._num_save_failures += 1
        left = self.args.save_failures_allowed - self._num_save_failures
        logger.error("Checkpoint %d was not written: %s", step, failure)
        if left <= 0 or self.stop_reason:
            raise DiskFailure(f"{self._num_save_failures} checkpoint(s) in a row were not written: {failure}")
        valid = self._saved_step
        before = "no checkpoint was saved yet" if valid is None else f"checkpoint-{valid} is valid"
        logger.error("Training goes on; %s. %d more such failure(s) end it.", before, left)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
        finally:
            if self._commit is not None:  # an exception ended the run; the other processes may not be here
                self._leave(self._commit)
                self._commit = None

    def _leave(self, commit: Commit) -> None:
        error = commit.done.exception() if commit.done else None
        if error is not None and commit.staging:
            logger.error("Checkpoint %d was not written: %s", commit.step, error)
            commit.staging.abandon()


class CommitCallback(TrainerCallback):
    """Bounds how far training runs ahead of a commit."""

    def __init__(self, trainer: CommitMixin):
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After one optimizer step at most, a checkpoint is whole."""
        self.trainer.finish_save()
