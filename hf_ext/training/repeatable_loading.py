"""Runs that draw the same random numbers with any number of data workers, and after they are continued."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.data import DataLoader

from ..data.repeatable_loaders import RepeatableLoader, base_of, make_repeatable
from ..data.seeded_batches import seed_batches
from ..training_args import FastTrainingArguments
from .planned import PlannedRun

TRAIN = "train"  # among the keys of loaders; the others are those that Trainer keeps evaluation loaders by

logger = logging.getLogger(__name__)


class RepeatableLoading:
    """Makes every loader a `RepeatableLoader`, so that dropout does not depend on how often a run was continued.

    Each epoch and evaluation takes one number from torch's generator, as in Trainer without persistent workers. Where
    nobody asked for `data_loading` and the user for persistent workers, it is the first alone, as in Trainer with them:
    `state`, in each checkpoint, says which had theirs. Loaders that a subclass returns are looked at where they come to
    be used (`adopt`); of its evaluation loaders with persistent workers, each evaluation takes a number.

    What rows and collators draw in workers depends on seed, epoch and batch alone: other draws than in Trainer, whose
    workers, in the middle of an epoch, cannot be continued.
    """

    name = "begun_loaders"

    def __init__(self, args: FastTrainingArguments, planned: PlannedRun):
        self._args, self._planned = args, planned
        self._kept: dict[str, Any] = {}  # loaders of the run's own rows, by their keys
        self._rows: dict[str, Any] = {}  # that Trainer was last asked an evaluation loader for, by their keys
        self._before: list[str] | None = None

    def go_on(self, begun_before: list[str] | None) -> None:
        """Training begins, here or after the loaders of these keys were iterated over; None: it is not continued."""
        self._before = begun_before

    def state(self) -> list[str]:
        """Keys of the loaders that the run iterated over, here or before it was continued; for JSON."""
        before = [key for key in self._before or [] if key not in self._kept]
        here = [key for key, loader in self._kept.items() if getattr(base_of(loader), "has_begun", False)]
        return sorted({*before, *here})

    def load(self, tree: list[str] | None) -> None:
        """Takes what `state` said in the checkpoint that the run continues; None where it did not say."""
        self._before = self._before if tree is None else list(tree)

    def look_at(self, key: str, rows: Any, kept: dict[str, Any]) -> None:
        """Before Trainer is asked for the evaluation loader of `key`: forgets in `kept`, Trainer's, one of other rows.

        With persistent workers, transformers 5.23 hands out the first loader, also where the rows are others now.
        """
        if rows is not self._rows.get(key):
            kept.pop(key, None)
        self._rows[key] = rows

    def take_train(self, loader: Any) -> Any:
        """A training loader just made, repeatable."""
        return self._keep(TRAIN, loader, True, True) if self._lives_on() else self._make(loader, True)

    def take_evaluation(self, loader: Any, key: str | None, own_rows: Any) -> Any:
        """An evaluation loader just made, repeatable.

        Args:
            loader: to be iterated over once and again.
            key: that Trainer keeps it by; None for one that it does not keep.
            own_rows: the run's own of that key.
        """
        if key is None or not self._lives_on():
            return self._make(loader, False)
        # Trainer keeps one loader a key, also of rows that are handed to `evaluate`: another run of these is made anew.
        is_own = self._rows.get(key) is own_rows
        return self._keep(key, loader, False, is_own)

    def _lives_on(self) -> bool:
        """Whether the user asked for persistent workers, and the plan does not."""
        return self._args.dataloader_persistent_workers and not self._planned.applied("data_loading")

    def _keep(self, key: str, loader: Any, is_training: bool, is_own: bool) -> Any:
        is_first = is_training or (is_own and key not in self._kept)
        known = is_first and key in (self._before or [])
        self._kept[key] = loader if is_own else None
        return self._make(loader, is_training, True, known)

    def _make(self, loader: Any, is_training: bool, draws_once: bool = False, has_begun: bool = False) -> Any:
        seed_batches(loader, self._args.seed % 2**32, self._args.process_index, is_training)
        return make_repeatable(loader, draws_once, has_begun)

    # --- loaders of a subclass --------------------------------------------------------------------------------------

    def adopt(self, loader: Any, is_training: bool) -> None:
        """Makes a loader that comes to be used repeatable, where it is not already."""
        base = base_of(loader)
        if isinstance(base, RepeatableLoader):
            return
        lives_on = is_training and getattr(base, "persistent_workers", False)
        once = lives_on and not self._planned.applied("data_loading")
        self._make(loader, is_training, once, once and self._before is not None)
        if isinstance(base, DataLoader) and base.persistent_workers and not isinstance(base, RepeatableLoader):
            logger.warning(
                "%s has an __iter__ of its own and persistent workers: a continued run may draw other numbers "
                "(dropout) than one that was not killed. Give it persistent_workers=False.",
                type(base).__name__,
            )
