"""Checkpoints of a run: stock Trainer's own files, whole or absent, within a budget of disk."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..checkpoints.format.manifest import PROGRESS
from ..checkpoints.state.finite import not_finite, optimizer_tensors
from ..checkpoints.storage.additions import Look, look
from ..checkpoints.storage.staging import Staging
from ..disk import describe_failure
from ..errors import CheckpointError, DiskFailure, NotFiniteError
from ..overrides import is_overridden
from ..zero import own_part
from .disk_space import DiskSpace
from .places import Places
from .stopper import Stopper

SAVE_FAILURES_ALLOWED = 3  # in a row; then the disk will not recover, and a run without checkpoints is worth little

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Written:
    """A checkpoint whose files all processes have written, and whose commit the main process has begun."""

    step: int
    began: float
    num_bytes: int | None = None
    staging: Staging | None = None
    commit: Future | None = None


@dataclass(frozen=True)
class Placed:
    """A checkpoint that has its name, into whose folder others may be writing; as its files were then."""

    step: int
    num_bytes: int | None
    before: Look = field(default_factory=dict)


class Saver:
    """Replaces Trainer's in-place checkpoints: staged beside the target, hashed, renamed, then rotated.

    Trainer writes them as it always does, so that `transformers.Trainer` continues from one too. Hashing and waiting
    for the disk happen during the optimizer step after it, at whose end the checkpoint has its name: a process that is
    killed loses no step more than if the save had waited. What others write into it until then (a callback's `on_save`)
    becomes part of it. One that cannot be written leaves the one before it valid; training goes on without, until
    three in a row have failed. All processes call each method.

    Args:
        trainer: the `FastTrainer`.
        parts: what has a state that checkpoints carry, by their `name` in `progress.json`.

    Attributes:
        saved_step: of the newest checkpoint of this run that is in place; None before the first.
        staging_root: where Trainer is to write, while it writes a checkpoint.
    """

    def __init__(
        self, trainer: Any, places: Places, disk_space: DiskSpace, stopper: Stopper, parts: Sequence[Any]
    ) -> None:
        self._trainer, self._team = trainer, trainer._ext_team
        self._places, self._disk_space, self._stopper, self._parts = places, disk_space, stopper, parts
        self.saved_step: int | None = None
        self.staging_root: str | None = None
        self._facts: dict[str, Any] = {}
        self._num_failures = 0
        self._written: Written | None = None
        self._placed: Placed | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-commit")

    def begin_run(self, facts: dict[str, Any], saved_step: int | None) -> None:
        """Another run, or the same one continued.

        Args:
            facts: what its checkpoints' manifests say of it, JSON-able.
            saved_step: of the checkpoint in this run's folder that it continues from.
        """
        self._facts, self.saved_step = facts, saved_step

    # --- saving -----------------------------------------------------------------------------------------------------

    def save(self, write: Callable[[], None]) -> None:
        """Writes the checkpoint of the last optimizer step by `write`, Trainer's own saving, and begins its commit.

        Raises:
            DiskFailure: too many checkpoints in a row could not be written.
            NotFiniteError: weights or optimizer states are NaN or infinite.
        """
        step = self._trainer.state.global_step
        if step == self.saved_step or (self._written is not None and self._written.step == step):
            return
        self.finish()
        self.check_finite(with_optimizer=True)
        failure = self._write(step, write)
        if failure is not None:
            self._note_failure(step, failure)
        # Who waits for the commit alone would wait for the others, who train on: if one process waits, all do.
        elif self._team.agree([self._is_read_at_once()])[0]:
            self._place()

    def _write(self, step: int, write: Callable[[], None]) -> str | None:
        """Why the disk refused, the same on all processes, or None."""
        store, began = self._places.store, time.perf_counter()
        prepared: list[tuple[int, Staging]] = []

        def prepare() -> None:
            sizes = self._trainer.checkpoint_sizes()
            self._disk_space.make_room(self._trainer, sizes)
            prepared.append((sizes.full_bytes, store.stage(step)))

        for action in (prepare if self._team.writes else None, lambda: self._write_files(step, write)):
            failure = self._team.together(action, self._describe)
            if failure is not None:
                for _, staging in prepared:
                    staging.abandon()
                return failure
        self._written = Written(step, began)
        for num_bytes, staging in prepared:
            epoch = float(self._trainer.state.epoch or 0)
            commit = self._thread.submit(staging.commit, epoch, self._facts)
            self._written = Written(step, began, num_bytes, staging, commit)
        return None

    def _write_files(self, step: int, write: Callable[[], None]) -> None:
        folder, state = self._places.store.staging_path(step), self._trainer.state
        if not folder.is_dir():  # made by the main process
            raise CheckpointError(
                f"Process {self._team.rank} does not see {folder}. Several machines need an output_dir (and "
                "local_checkpoint_dir) on a disk that they share."
            )
        # What JSON does not hold as a list or as text: a checkpoint is worth more than a log.
        history = json.dumps(state.log_history, default=lambda value: getattr(value, "tolist", lambda: str(value))())
        state.log_history[:] = json.loads(history)
        callbacks = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        exported = [callback for callback in callbacks if isinstance(callback, ExportableState)]
        # Trainer asks for each by name, also where the checkpoint that the run continues had none of it.
        state.stateful_callbacks = dict.fromkeys(type(callback).__name__ for callback in exported)
        self.staging_root = str(folder.parent)
        try:
            write()
        finally:
            self.staging_root = None
        for name in state.stateful_callbacks:  # and keeps the last of several
            states = [callback.state() for callback in exported if type(callback).__name__ == name]
            state.stateful_callbacks[name] = states[0] if len(states) == 1 else states
        unlogged = self._trainer.accelerator.reduce(self._trainer._tr_loss, "mean").item()
        best = self._disk_space.best_saved_step(state)
        is_best = state.best_global_step == step
        path = self._places.store.path(step) if is_best else None if best is None else self._places.path(best)
        state.best_model_checkpoint = None if path is None else str(path)
        if self._team.writes:
            state.save_to_json(str(folder / "trainer_state.json"))  # again: Trainer took the staged one for the best
            progress: dict[str, Any] = {"best_saved_step": best, "only_model": self._trainer.args.save_only_model}
            progress["losses"] = {"unlogged": unlogged, "last_logged_step": self._trainer._globalstep_last_logged}
            progress |= {part.name: part.state() for part in self._parts}
            (folder / PROGRESS).write_text(json.dumps(progress, default=lambda array: array.tolist()) + "\n")

    def is_staged(self, folder: Path) -> bool:
        """Whether a model that is written to `folder` is a checkpoint's."""
        return self.staging_root is not None and folder.is_relative_to(self.staging_root)

    def _is_read_at_once(self) -> bool:
        """Whether something on this process reads a checkpoint as soon as it is saved."""
        if self._stopper.reason is not None:
            return True
        if is_overridden(self._trainer, "_save_checkpoint"):
            return True
        hooks = [type(callback).on_save for callback in self._trainer.callback_handler.callbacks]
        return any(h is not TrainerCallback.on_save and not h.__module__.startswith("hf_ext.") for h in hooks)

    # --- the end of a save ------------------------------------------------------------------------------------------

    @property
    def has_placed(self) -> bool:
        """Whether a checkpoint is in place that `finish` has to conclude."""
        return self._placed is not None

    def _place(self) -> None:
        """Waits until the last checkpoint has its name, and rotates."""
        written = self._written
        if written is None:
            return
        failure = self._team.together(written.commit.result if written.commit else None, self._describe)
        self._written = None  # only now: a signal's exception may end the wait, and `leave` waits on
        self._stopper.note_save(time.perf_counter() - written.began)
        if failure is not None:
            if written.staging:
                written.staging.abandon()
            self._note_failure(written.step, failure)
            return
        self.saved_step, self._num_failures = written.step, 0
        state, writes = self._trainer.state, self._team.writes
        failure = self._team.together((lambda: self._disk_space.rotate(state)) if writes else None, self._describe)
        if failure is not None:
            logger.error("Older checkpoints could not be deleted: %s", failure)
        before = look(self._places.store.path(written.step)) if writes else {}
        self._placed = Placed(written.step, written.num_bytes, before)

    def finish(self) -> None:
        """Waits until the last checkpoint is in place, with what others wrote into it; begins its copy and its push.

        Raises:
            DiskFailure: too many checkpoints in a row could not be written.
        """
        self._place()
        placed, self._placed = self._placed, None
        if placed is None:
            return

        def conclude() -> None:
            self._places.store.take_in(placed.step, placed.before)
            self._disk_space.copy(self._trainer.state)

        failure = self._team.together(conclude if self._team.writes else None, self._describe)
        if failure is not None:
            logger.error("checkpoint-%d may lack what others wrote into it, or its copy: %s", placed.step, failure)
        if self._trainer.args.push_to_hub:
            self._trainer._push_from_checkpoint(str(self._places.store.path(placed.step)))

    def leave(self) -> None:
        """After an exception, where other processes may not be here: waits for the commit that is under way."""
        written, self._written = self._written, None
        error = written.commit.exception() if written is not None and written.commit else None
        if written is not None and written.staging and error is not None:
            logger.error("Checkpoint %d was not written: %s", written.step, error)
            written.staging.abandon()

    def _note_failure(self, step: int, failure: str) -> None:
        """Says what happens now; raises DiskFailure where it was one failure too many."""
        self._num_failures += 1
        left = SAVE_FAILURES_ALLOWED - self._num_failures
        logger.error("Checkpoint %d was not written: %s", step, failure)
        if left <= 0 or self._stopper.reason is not None:
            raise DiskFailure(f"{self._num_failures} checkpoint(s) in a row were not written: {failure}")
        valid = self.saved_step
        before = "no checkpoint was saved yet" if valid is None else f"checkpoint-{valid} is valid"
        logger.error("Training goes on; %s. %d more such failure(s) end it.", before, left)

    def _describe(self, error: Exception) -> str:
        return describe_failure(error, self._places.folder, self._trainer.checkpoint_sizes().full_bytes)

    # --- what must not be saved -------------------------------------------------------------------------------------

    def last_good(self) -> str:
        """What is left to continue from, for messages; waits until it is in place."""
        self.finish()
        step = self.saved_step
        return "no checkpoint was saved" if step is None else f"checkpoint-{step} is the last good one"

    def check_finite(self, with_optimizer: bool = False) -> None:
        """Raises NotFiniteError if a trainable weight, or optimizer state, is NaN or infinite.

        Cost: one pass over them and one device synchronisation.
        """
        trainer, backend = self._trainer, self._trainer._ext_backend
        tensors = [(name, own_part(p)) for name, p in trainer.model.named_parameters() if p.requires_grad]
        if with_optimizer and not (backend.is_zero or trainer.args.save_only_model):
            tensors += optimizer_tensors(trainer.optimizer, trainer.model.named_parameters())
        names = not_finite(tensors)
        if backend.is_spread:  # each process looked at its part
            count = torch.tensor(len(names), device=trainer.accelerator.device)
            names = names or (["in another process's part"] if trainer.accelerator.reduce(count).item() else [])
        if not names:
            return
        raise NotFiniteError(
            f"{len(names)} of the weights and optimizer states are NaN or infinite at step {trainer.state.global_step} "
            f"(first: {names[0]}); {self.last_good()}. "
            "Nothing was overwritten. Usual causes: a learning rate that is too high, labels that are not finite, "
            "float16 without loss scaling. Continue with --resume auto --allow_changed learning_rate and a lower rate."
        )
