"""The end of a save while training goes on: hashing, waiting for the disk, the rename; then rotation and copies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerState

from ..checkpoints.storage.additions import Look, look
from ..checkpoints.storage.staging import Staging
from ..disk import describe_failure
from ..errors import DiskFailure
from ..training_args import FastTrainingArguments
from .disk_space import DiskSpace
from .places import Places
from .stopper import Stopper
from .team import Team

SAVE_FAILURES_ALLOWED = (
    3  # in a row; then the disk is not going to recover, and a run without checkpoints is worth little
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Written:
    """A checkpoint whose files are written. `staging` and what it takes are the main process's.

    Attributes:
        step, epoch: optimizer steps and epochs done.
        began: `time.perf_counter()` when the save began.
        num_bytes: an upper bound of what it takes.
    """

    step: int
    epoch: float
    began: float
    staging: Staging | None = None
    num_bytes: int | None = None


@dataclass(frozen=True)
class Placed:
    """A checkpoint that has its name, into whose folder others may be writing; as its files were then."""

    step: int
    num_bytes: int | None
    before: Look = field(default_factory=dict)


class Committer:
    """Commits a checkpoint in the background during the optimizer step after it; the end of that step waits for it.

    So a process that is killed loses no step more than if the save had waited, and training stops only for writing.
    What others write into the checkpoint until `finish` becomes part of it before it is copied. All processes call
    each method.

    Attributes:
        saved_step: of the newest checkpoint of this run that is in place; None before the first.
    """

    def __init__(
        self, args: FastTrainingArguments, team: Team, places: Places, disk_space: DiskSpace, stopper: Stopper
    ):
        self._args, self._team, self._places, self._disk_space = args, team, places, disk_space
        self._stopper = stopper  # hears how long saves take; no other save makes up for one that fails while it stops
        self.saved_step: int | None = None
        self._facts: dict[str, Any] = {}
        self._num_failures = 0
        self._written: tuple[Written, Future | None] | None = None
        self._placed: Placed | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-commit")

    @property
    def has_placed(self) -> bool:
        """Whether a checkpoint is in place that `finish` has to conclude."""
        return self._placed is not None

    def has(self, step: int) -> bool:
        """Whether checkpoint `step` is saved, or on its way."""
        return step == self.saved_step or (self._written is not None and self._written[0].step == step)

    def begin_run(self, facts: dict[str, Any], saved_step: int | None) -> None:
        """Another run, or the same one continued.

        Args:
            facts: what its checkpoints' manifests say of it, JSON-able.
            saved_step: of the checkpoint in this run's folder that it continues from.
        """
        self._facts, self.saved_step = facts, saved_step

    def begin(self, written: Written) -> None:
        """Of a checkpoint whose files are all written, by all processes."""
        staging = written.staging
        done = None if staging is None else self._thread.submit(staging.commit, written.epoch, self._facts)
        self._written = written, done

    def place(self, state: TrainerState) -> None:
        """Waits until the last checkpoint has its name, and rotates.

        Raises:
            DiskFailure: too many checkpoints in a row could not be written.
        """
        if self._written is None:
            return
        written, done = self._written
        failure = self._together(done.result if done else None, written.num_bytes)
        self._written = None  # only now: a signal's exception may end the wait, and `leave` waits on
        self._stopper.note_save(time.perf_counter() - written.began)
        if failure is not None:
            if written.staging:
                written.staging.abandon()
            self.note_failure(written.step, failure)
            return
        self.saved_step = written.step
        self._num_failures = 0
        rotate = (lambda: self._disk_space.rotate(state)) if self._team.writes else None
        failure = self._together(rotate, written.num_bytes)
        if failure is not None:
            logger.error("Older checkpoints could not be deleted: %s", failure)
        before = look(self._places.store.path(written.step)) if self._team.writes else {}
        self._placed = Placed(written.step, written.num_bytes, before)

    def finish(self, state: TrainerState) -> int | None:
        """Waits until the last checkpoint is in place, with what others wrote into it, and begins its copy.

        Returns:
            Its step, the first time it is asked for: who pushes it can begin. None where nothing is new.

        Raises:
            DiskFailure: as `place`.
        """
        self.place(state)
        placed, self._placed = self._placed, None
        if placed is None:
            return None

        def conclude() -> None:
            self._places.store.take_in(placed.step, placed.before)
            self._disk_space.copy(state)

        failure = self._together(conclude if self._team.writes else None, placed.num_bytes)
        if failure is not None:
            logger.error("checkpoint-%d may lack what others wrote into it, or its copy: %s", placed.step, failure)
        return placed.step

    def note_failure(self, step: int, failure: str) -> None:
        """Says what happens now; raises DiskFailure where it was one failure too many."""
        self._num_failures += 1
        left = SAVE_FAILURES_ALLOWED - self._num_failures
        logger.error("Checkpoint %d was not written: %s", step, failure)
        if left <= 0 or self._stopper.reason is not None:
            raise DiskFailure(f"{self._num_failures} checkpoint(s) in a row were not written: {failure}")
        valid = self.saved_step
        before = "no checkpoint was saved yet" if valid is None else f"checkpoint-{valid} is valid"
        logger.error("Training goes on; %s. %d more such failure(s) end it.", before, left)

    def last_good(self) -> str:
        """What is left to continue from, for messages. After `finish`."""
        step = self.saved_step
        return "no checkpoint was saved" if step is None else f"checkpoint-{step} is the last good one"

    def leave(self) -> None:
        """After an exception, where other processes may not be here: waits for the commit that is under way."""
        if self._written is None:
            return
        (written, done), self._written = self._written, None
        error = done.exception() if done else None
        if error is not None and written.staging:
            logger.error("Checkpoint %d was not written: %s", written.step, error)
            written.staging.abandon()

    def _together(self, action: Callable[[], Any] | None, num_bytes: int | None) -> str | None:
        return self._team.together(action, lambda error: describe_failure(error, self._places.folder, num_bytes))
