"""Keeps the output folder within its limits: what a run deletes, by the rules of `checkpoints/retention.py`."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ..checkpoints import (
    GB,
    SMALL_FILES_BYTES,
    STAGING,
    CheckpointStore,
    Entry,
    Sizes,
    bound_sizes,
    check_budget,
    ends_nth_epoch,
    export_bytes,
    read_policy,
    steps_beyond_limit,
    steps_for_room,
)
from ..files import free_bytes, used_bytes
from ..plan import Plan
from ..training import Backend, Host

# As Trainer, accelerate (FSDP) and DeepSpeed call them.
OPTIMIZER_FILES = re.compile(r"optimizer(\.pt|\.bin|_0/.*)|global_step\d+/.*")

logger = logging.getLogger(__name__)


class Retention:
    """Keeps the output folder within `save_total_size_gb`, at the moment of writing too, and rotates checkpoints.

    For the main process; any process may ask for sizes and for the best checkpoint.

    Args:
        store: what is kept in order. carried_bytes: upper bound of what parts add to a checkpoint.

    Attributes:
        full_bytes: upper bound of what one checkpoint takes; None before `check`.
        best_saved: step of the best checkpoint that was saved.
    """

    def __init__(
        self, trainer: Host, backend: Backend, plan: Plan, carried_bytes: Callable[[], int], store: CheckpointStore
    ):
        self._trainer = trainer
        self._backend = backend
        self._plan = plan
        self._carried_bytes = carried_bytes
        self._store = store
        self.full_bytes: int | None = None
        self.best_saved: int | None = None

    def sizes(self) -> Sizes:
        """Returns upper bounds of what one checkpoint takes."""
        args = self._trainer.args
        model = self._trainer.model
        small_bytes = SMALL_FILES_BYTES + self._carried_bytes()
        of_library = self._backend.checkpoint_sizes(model, small_bytes)
        if of_library is not None:
            return of_library
        return bound_sizes(model, args, small_bytes, self._plan.applied("muon"))

    def check(self) -> None:
        """Computes, when training begins, how large checkpoints will be. Refuses a budget that cannot hold them.

        Raises:
            ArgumentError: see `check_budget`.
        """
        sizes = self.sizes()
        policy = read_policy(self._trainer.args)
        self.full_bytes = sizes.full_bytes
        if policy.budget_bytes is not None:
            check_budget(sizes, policy, self.other_bytes())

    def best_step(self) -> int | None:
        """Finds the best checkpoint there is: where the best step itself was not saved, that of the best before."""
        known = (self._trainer.state.best_global_step, self.best_saved)
        return next((step for step in known if self._store.locate(step)), None)

    def make_room(self) -> None:
        """Deletes, before anything is written, what budget or disk cannot hold beside the checkpoint of this step.

        Raises:
            OSError: the budget has no room for it, whatever is deleted.
        """
        full_bytes = self.full_bytes or 0
        entries = self._entries()
        policy = read_policy(self._trainer.args)
        # What was logged so far, and a large tokenizer, are in the newest one: the bound knows neither.
        like_newest = entries[-1].num_bytes + SMALL_FILES_BYTES // 2 if entries and entries[-1].is_resumable else 0
        new_bytes = max(full_bytes, like_newest)
        if policy.budget_bytes is not None:
            planned_bytes = self.other_bytes() + sum(entry.num_bytes for entry in entries) + new_bytes
            if not self._free(entries, planned_bytes - policy.budget_bytes):
                logger.error("save_total_size_gb=%g has no room for it.", policy.budget_bytes / GB)
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        free = free_bytes(self._store.folder)
        if free < full_bytes:
            self._free(self._entries(), new_bytes - free)

    def _free(self, entries: Sequence[Entry], excess_bytes: int) -> bool:
        """Frees so many bytes, and tells whether it could; where it cannot, nothing is deleted."""
        state = self._trainer.state
        is_new_best = state.best_global_step == state.global_step
        policy = read_policy(self._trainer.args)
        steps = steps_for_room(entries, excess_bytes, self.best_step(), policy, is_new_best)
        return steps is not None and all(self._store.delete(step) for step in steps)

    def rotate(self) -> None:
        """Deletes what is not to be kept, now that the newest checkpoint is in place."""
        best = self.best_step()
        for step in steps_beyond_limit(self._entries(), best, read_policy(self._trainer.args)):
            self._store.delete(step)
        self.best_saved = best

    def _entries(self) -> list[Entry]:
        return [
            Entry(
                stored.step,
                stored.num_bytes,
                is_pinned=self._store.is_pinned(stored.step),
                is_resumable=any(map(OPTIMIZER_FILES.fullmatch, stored.manifest.files)),
                is_kept=ends_nth_epoch(stored.manifest.epoch, self._trainer.args.keep_every_epochs),
            )
            for stored in self._store.checkpoints()
        ]

    def other_bytes(self) -> int:
        """Counts what the output folder holds beside checkpoints, with the model that is saved into it at the end.

        Less what pinned checkpoints take, which come on top of the budget.
        """
        folder = Path(self._trainer.args.output_dir).absolute()
        own = self._store.checkpoints()
        if folder == self._store.folder:
            kept = sum(stored.num_bytes for stored in own)
        else:  # copies of the local ones, made and deleted in the background
            copies = [*folder.glob("checkpoint-*"), *folder.glob(".*-checkpoint-*"), folder / STAGING]
            kept = sum(used_bytes(path) for path in copies)
        beside = used_bytes(folder) - kept + SMALL_FILES_BYTES // 2
        # Rounded up: a log that grows by a block must not make the budget that a refusal named too small.
        rounded = -(-beside // SMALL_FILES_BYTES) * SMALL_FILES_BYTES
        pinned = sum(stored.num_bytes for stored in own if self._store.is_pinned(stored.step))
        return rounded + export_bytes(self._trainer.model) - pinned
