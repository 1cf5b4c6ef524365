"""The way of one save: stock Trainer's own files, staged, committed and rotated, or a failure that loses nothing."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..checkpoints import PROGRESS, CheckpointStore, MirroredStore, check_unlisted, local_folder, not_finite
from ..errors import CheckpointError, DiskFailure, NotFiniteError
from ..files import Json, describe_failure
from ..models import is_from
from ..processes import Team, own_shard
from ..training import Backend, Carried, Host, Stopper, find_override
from .rotation import Retention

SAVE_FAILURES_ALLOWED = 3  # in a row; then the disk will not recover, and a run without checkpoints is worth little

logger = logging.getLogger(__name__)


class Saver:
    """Replaces Trainer's in-place checkpoints: staged beside the target, hashed, renamed, then rotated.

    Trainer writes them as it always does, so that `transformers.Trainer` continues from one too. Hashing, and waiting
    for the disk, happen during the optimizer step after it, at whose end the checkpoint has its name; at once where the
    run stops or where others may write into it (a user's `_save_checkpoint`, a callback's `on_save`), which becomes
    part of it. One that cannot be written leaves the one before it valid; training goes on without, until three in a
    row have failed. All processes call each method.

    Args:
        carried: the parts whose states are in each checkpoint.
        keep: makes the rules of a store. push: begins the push of a checkpoint that is in place.

    Attributes:
        store: what training saves into.
        retention: what stays there.
        saved_step: of the newest checkpoint of this run that is in place; None before the first.
        staging_root: where Trainer is to write, while it writes a checkpoint.
    """

    def __init__(
        self,
        trainer: Host,
        team: Team,
        backend: Backend,
        stopper: Stopper,
        carried: Sequence[Carried],
        keep: Callable[[CheckpointStore], Retention],
        push: Callable[[int], None],
    ):
        self._trainer = trainer
        self._team = team
        self._backend = backend
        self._stopper = stopper
        self._carried = carried
        self._keep = keep
        self._push = push
        self.saved_step: int | None = None
        self.staging_root: str | None = None
        self._folders: tuple[str, str | None] = ("", None)
        self._facts: Json = {}
        self._num_failures = 0
        self._unlogged: list[float] = []  # of each process, the loss since the last log
        self._begun: tuple[int, float, Future | None] | None = None  # step, when, and the commit on the main process
        self._open_step: int | None = None  # of a checkpoint that has its name, and is neither copied nor pushed yet
        self._others_write = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-commit")
        self.open_folders()

    def open_folders(self) -> None:
        """Goes to the folders of the arguments; stays, with what it knows, where they are the same."""
        args = self._trainer.args
        folders = args.output_dir, args.local_checkpoint_dir
        if folders != self._folders:
            self._folders = folders
            (output, local) = folders
            stored = MirroredStore(local_folder(local, output), output) if local is not None else None
            self.store: CheckpointStore = stored or CheckpointStore(output)
            self.retention = self._keep(self.store)

    def begin_run(self, facts: Json, saved_step: int | None, best_step: int | None) -> None:
        """Starts another run, or the same one continued.

        Args:
            facts: what its checkpoints' manifests say of it, JSON-able.
            saved_step: of the checkpoint in this run's folder that it continues from. best_step: of the best one there.
        """
        self._facts = facts
        self.saved_step = saved_step
        self.retention.best_saved = best_step

    # --- saving -----------------------------------------------------------------------------------------------------

    def save(self, write: Callable[[], None]) -> None:
        """Makes a checkpoint of the last optimizer step by `write`, Trainer's own saving.

        Raises:
            DiskFailure: too many checkpoints in a row could not be written.
            NotFiniteError: weights or optimizer states are NaN or infinite.
        """
        self.finish()
        step = self._trainer.state.global_step
        began = time.perf_counter()
        if step == self.saved_step:
            return
        self.check_finite(with_optimizer=True)
        # Of all processes, before what may fail on one of them.
        self._unlogged = self._trainer.accelerator.gather(self._trainer._tr_loss).reshape(-1).tolist()
        mine = self._team.writes
        for action in (self._prepare if mine else None, partial(self._write_files, write)):
            failure = self._team.together(action, self.describe_failure)
            if failure is not None:
                self._give_up(step, failure)
                return
        epoch = self._trainer.state.epoch or 0
        self._begun = step, began, self._thread.submit(self._commit, step, epoch) if mine else None
        # Who waits alone would wait for the others, who train on: if one process waits, all do.
        stops = self._stopper.reason is not None
        self._others_write, stops = self._team.agree([self._may_others_write(), stops])
        if self._others_write or stops:
            self._wait()

    def _may_others_write(self) -> bool:
        hooks = [type(callback).on_save for callback in self._trainer.callback_handler.callbacks]
        stock = TrainerCallback.on_save  # integrations of transformers have one of their own, which reads the folder
        are_others = any(hook is not stock and not is_from(hook, ("hf_ext",)) for hook in hooks)
        return are_others or find_override(self._trainer, "_save_checkpoint") is not None

    def _wait(self) -> None:
        """Blocks until the pending checkpoint is renamed into place."""
        if self._begun is None:
            return
        step, began, commit = self._begun
        failure = self._team.together(None if commit is None else commit.result, self.describe_failure)
        self._begun = None  # only now: a signal's exception may end the wait, and `leave` waits on
        if failure is not None:
            self._give_up(step, failure)
            return
        self.saved_step = step
        self._num_failures = 0
        self._open_step = step
        self._stopper.note_save(time.perf_counter() - began)

    def leave(self) -> None:
        """Waits for the commit that is under way after an exception, where other processes may not be here."""
        begun = self._begun
        self._begun = None
        if begun is not None and begun[2] is not None and begun[2].exception() is not None:
            self.store.abandon(begun[0])

    def _prepare(self) -> None:
        self.retention.make_room()
        self.store.stage(self._trainer.state.global_step)

    def _write_files(self, write: Callable[[], None]) -> None:
        trainer = self._trainer
        state = trainer.state
        folder = self.store.staging_path(state.global_step)
        if not folder.is_dir():  # made by the main process
            raise CheckpointError(
                f"Process {self._team.rank} does not see {folder}. Several machines need an output_dir (and "
                "local_checkpoint_dir) on a disk that they share."
            )
        # What JSON does not hold as a list or as text: a checkpoint is worth more than a log.
        history = json.dumps(state.log_history, default=lambda value: getattr(value, "tolist", lambda: str(value))())
        state.log_history[:] = json.loads(history)
        # Trainer adds to the lists of before, and fails where the checkpoint that the run continues lacks a callback.
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        names = Counter(type(callback).__name__ for callback in callbacks if isinstance(callback, ExportableState))
        made: dict[str, object] = {name: [] if number > 1 else {} for name, number in names.items()}
        state.stateful_callbacks = made  # type: ignore[assignment]
        self.staging_root = str(folder.parent)
        try:
            write()
        finally:
            self.staging_root = None
        best = self.retention.best_step()
        is_best = state.best_global_step == state.global_step
        path = self.store.path(state.global_step) if is_best else self.store.locate(best)
        if path is not None:  # else it stays in the folder that the run was continued from, if anywhere
            state.best_model_checkpoint = str(path)
        if self._team.writes:
            state.save_to_json(str(folder / "trainer_state.json"))  # again: Trainer took the staged one for the best
            progress: Json = {"best_saved_step": best, "only_model": trainer.args.save_only_model}
            progress["losses"] = {"unlogged": self._unlogged, "last_logged_step": trainer._globalstep_last_logged}
            progress |= {part.name: part.state() for part in self._carried}
            (folder / PROGRESS).write_text(json.dumps(progress, default=lambda array: array.tolist()) + "\n")

    def _commit(self, step: int, epoch: float) -> None:
        """Finishes a save in the thread, during the next step: nothing else changes what is best, or what stays."""
        self.store.commit(step, epoch, self._facts)
        try:
            self.retention.rotate()
        except OSError as error:
            logger.error("Older checkpoints could not be deleted: %s", self.describe_failure(error))

    def finish(self, waits: bool = True) -> None:
        """Makes what others wrote into the last checkpoint part of it; begins its copy and its push.

        Args:
            waits: for a commit that is under way; else one that is not in place yet is left for later.

        Raises:
            DiskFailure: too many checkpoints in a row could not be written.
        """
        if waits:
            self._wait()
        step = self._open_step
        self._open_step = None
        if step is None:
            return
        if self._team.writes:
            try:
                if self._others_write:
                    self.store.take_in(step)
            except OSError as error:
                logger.error("checkpoint-%d may lack what others wrote into it: %s", step, error)
            self.store.begin_copies(self.retention.best_step())
        if self._trainer.args.push_to_hub:
            self._push(step)

    def choose_best(self) -> None:
        """Names, at the end of a run, the best checkpoint that there is in the state; on all processes the same one."""
        state = self._trainer.state
        best = self._team.on_main(self.retention.best_step)  # as all see it: copies come and go meanwhile
        place = self.store.locate(best) or Path(state.best_model_checkpoint or os.devnull)
        state.best_model_checkpoint = str(place) if place.is_dir() else None
        is_it = state.best_global_step == best or (best is None and place.is_dir())
        if self._trainer.args.load_best_model_at_end and not is_it:
            taken = "the last weights are kept" if best is None else f"checkpoint-{best} is taken"
            logger.warning("No checkpoint of the best step, %s, was saved: %s.", state.best_global_step, taken)

    def verify_best(self) -> None:
        """Verifies the best checkpoint before it is loaded; raises CheckpointError on all processes."""

        def verify() -> None:
            stored = self.store.open(str(self._trainer.state.best_model_checkpoint))
            if stored is not None:
                check_unlisted(stored)

        self._team.on_main(verify)

    def finish_copies(self) -> str | None:
        """Waits for copies at the end of a run, deletes what was kept for them; returns what is not copied, or None."""
        if not self._team.writes:
            return None
        lacking = self.store.finish_copies(self.retention.best_step())
        if lacking is not None:
            return lacking
        self.retention.rotate()
        return self.store.finish_copies(self.retention.best_step())

    def _give_up(self, step: int, failure: str) -> None:
        """Says what happens now; raises DiskFailure where it was one failure too many."""
        if self._team.writes:
            self.store.abandon(step)
        self._num_failures += 1
        left = SAVE_FAILURES_ALLOWED - self._num_failures
        logger.error("Checkpoint %d was not written: %s", step, failure)
        if left <= 0 or self._stopper.reason is not None:
            raise DiskFailure(f"{self._num_failures} checkpoint(s) in a row were not written: {failure}")
        before = "no checkpoint was saved yet" if self.saved_step is None else f"checkpoint-{self.saved_step} is valid"
        logger.error("Training goes on; %s. %d more such failure(s) end it.", before, left)

    def describe_failure(self, error: Exception) -> str:
        """Describes what the disk refused, with bytes needed and free, and what to do."""
        return describe_failure(error, self.store.folder, self.retention.full_bytes)

    # --- what must not be saved -------------------------------------------------------------------------------------

    def is_staged(self, folder: Path) -> bool:
        """Tells whether a model that is written to `folder` is a checkpoint's."""
        return self.staging_root is not None and folder.is_relative_to(self.staging_root)

    def last_good(self) -> str:
        """Names what is left to continue from, for messages; waits until it is in place."""
        self._wait()
        step = self.saved_step
        return "no checkpoint was saved" if step is None else f"checkpoint-{step} is the last good one"

    def check_finite(self, with_optimizer: bool = False) -> None:
        """Raises NotFiniteError if a trainable weight, or optimizer state, is NaN or infinite.

        Cost: one pass over them and one device synchronisation.
        """
        trainer = self._trainer
        backend = self._backend
        tensors = [(name, own_shard(p)) for name, p in trainer.model.named_parameters() if p.requires_grad]
        is_stored = with_optimizer and not (backend.is_zero or trainer.args.save_only_model)
        if is_stored and trainer.optimizer is not None:
            tensors += _optimizer_tensors(trainer.optimizer, trainer.model.named_parameters())
        names = not_finite(tensors)
        if backend.is_sharded:  # each process looked at its shard
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


def _optimizer_tensors(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of an optimizer's state, as "exp_avg of head.weight"."""
    known = {id(parameter): name for name, parameter in named_parameters}
    owners = [known.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]
    for index, states in optimizer.state_dict()["state"].items():
        for key, value in states.items():
            if isinstance(value, Tensor):
                yield f"{key} of {owners[index]}", value
