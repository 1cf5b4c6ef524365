"""Runs that draw the same random numbers with any number of data workers, and after they are continued."""

from __future__ import annotations

from typing import Any

from ..data.repeatable_loaders import make_repeatable
from ..data.seeded_batches import seed_batches


class RepeatableLoadingMixin:
    """Makes every loader a `RepeatableLoader`, so that dropout does not depend on how often a run was continued.

    Each epoch and evaluation takes one number from torch's generator, as in Trainer without persistent workers. Where
    nobody asked for `data_loading` and the user for persistent workers, it is the first alone, as in Trainer with them.

    What rows and collators draw in workers depends on seed, epoch and batch alone: other draws than in Trainer, whose
    workers, in the middle of an epoch, cannot be continued.
    """

    args: Any
    state: Any
    plan: Any
    _is_resumed: bool  # of StoppingMixin

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(*args, is_training=is_training, **kwargs)  # type: ignore[misc]
        seed_batches(loader, self.args.seed % 2**32, self.args.process_index, is_training)
        is_kept = is_training or (kwargs.get("dataloader_key") is not None and kwargs.get("rows") is None)
        as_trainer = is_kept and self.args.dataloader_persistent_workers and not self._has_applied("data_loading")  # type: ignore[attr-defined]
        return make_repeatable(loader, as_trainer, as_trainer and self._is_continued(is_training))

    def _is_continued(self, is_training: bool) -> bool:
        """Whether the run iterated over this loader before it was continued."""
        has_evaluated = any(name.startswith("eval_") for entry in self.state.log_history for name in entry)
        return self._is_resumed and (is_training or has_evaluated)
