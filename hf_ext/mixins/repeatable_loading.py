"""Runs that draw the same random numbers with any number of data workers, and after they are continued."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from ..checkpoints.run_state import read_progress
from ..checkpoints.stored import Stored
from ..data.repeatable_loaders import RepeatableLoader, base_of, make_repeatable
from ..data.seeded_batches import seed_batches

TRAIN = "train"  # among the keys of loaders; the others are those that Trainer keeps evaluation loaders by

logger = logging.getLogger(__name__)


class RepeatableLoadingMixin:
    """Makes every loader a `RepeatableLoader`, so that dropout does not depend on how often a run was continued.

    Each epoch and evaluation takes one number from torch's generator, as in Trainer without persistent workers. Where
    nobody asked for `data_loading` and the user for persistent workers, it is the first alone, as in Trainer with them:
    `begun_loaders`, in each checkpoint, says which had theirs. Loaders that a subclass returns are looked at where they
    come to be used; of its evaluation loaders with persistent workers, each evaluation takes a number.

    What rows and collators draw in workers depends on seed, epoch and batch alone: other draws than in Trainer, whose
    workers, in the middle of an epoch, cannot be continued.
    """

    args: Any
    state: Any
    plan: Any
    eval_dataset: Any
    _is_resumed: bool  # of StoppingMixin
    _resumed: Stored | None  # of ResumeMixin

    def __init__(self, *args: Any, **kwargs: Any):
        self._kept_loaders: dict[str, Any] = {}
        self._read_of: Stored | None = None
        self._known: list[str] | None = None  # from `_read_of`
        super().__init__(*args, **kwargs)

    def begun_loaders(self) -> list[str]:
        """Keys of the loaders that the run iterated over, here or before it was continued; for JSON."""
        before = [key for key in self._begun_before() if key not in self._kept_loaders]
        here = [key for key, loader in self._kept_loaders.items() if getattr(base_of(loader), "has_begun", False)]
        return sorted({*before, *here})

    def _begun_before(self) -> list[str]:
        if not self._is_resumed:
            return []
        if self._resumed is not self._read_of:  # once: later saves of the run may delete the checkpoint
            self._read_of = self._resumed
            self._known = None if self._resumed is None else read_progress(self._resumed.path).get("begun_loaders")
        if self._known is not None:
            return self._known
        # Checkpoints of stock Trainer, and older ones, do not say.
        has_evaluated = any(name.startswith("eval_") for entry in self.state.log_history for name in entry)
        sets = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else ["eval"]
        return [TRAIN, *(sets if has_evaluated else [])]

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(*args, is_training=is_training, **kwargs)  # type: ignore[misc]
        key: Any = TRAIN if is_training else kwargs.get("dataloader_key")
        is_kept = key is not None and kwargs.get("rows") is None and self.args.dataloader_persistent_workers
        if not is_kept or self._has_applied("data_loading"):  # type: ignore[attr-defined]
            return self._make_repeatable(loader, is_training)
        # Trainer keeps one loader a key, also of rows that are handed to `evaluate`: another run of these is made anew.
        is_own = is_training or self.__dict__.get("_rows_of_eval_loaders", {}).get(key) is self._own_eval_rows(key)
        is_first = is_training or (is_own and key not in self._kept_loaders)
        known = is_first and key in self._begun_before()
        self._kept_loaders[key] = loader if is_own else None
        return self._make_repeatable(loader, is_training, True, known)

    def _own_eval_rows(self, key: Any) -> Any:
        return self.eval_dataset.get(key) if isinstance(self.eval_dataset, Mapping) else self.eval_dataset

    def _make_repeatable(
        self, loader: Any, is_training: bool, draws_once: bool = False, has_begun: bool = False
    ) -> Any:
        seed_batches(loader, self.args.seed % 2**32, self.args.process_index, is_training)
        return make_repeatable(loader, draws_once, has_begun)

    # --- loaders of a subclass --------------------------------------------------------------------------------------

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """As in Trainer; called with the loader that training will use."""
        base = base_of(dataloader)
        if not isinstance(base, RepeatableLoader):
            once = getattr(base, "persistent_workers", False) and not self._has_applied("data_loading")  # type: ignore[attr-defined]
            self._adopt(dataloader, True, once, once and self._is_resumed)
        return super().set_initial_training_values(args, dataloader)  # type: ignore[misc]

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer."""
        if not isinstance(base_of(dataloader), RepeatableLoader):
            self._adopt(dataloader, False)
        return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]

    def _adopt(self, loader: Any, *how: bool) -> None:
        base = base_of(loader)
        self._make_repeatable(loader, *how)
        if isinstance(base, DataLoader) and base.persistent_workers and not isinstance(base, RepeatableLoader):
            logger.warning(
                "%s has an __iter__ of its own and persistent workers: a continued run may draw other numbers "
                "(dropout) than one that was not killed. Give it persistent_workers=False.",
                type(base).__name__,
            )
