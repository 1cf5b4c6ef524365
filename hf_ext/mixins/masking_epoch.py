"""Tells collators whose masks depend on the epoch which one it is."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback


class MaskingEpochCallback(TrainerCallback):
    """Calls `collator.set_epoch` before each epoch's first batch is made; for `Trainer` and `FastTrainer` alike.

    Counts passes from the one that the run starts or resumes in: `state.epoch` alone is not enough, because a stream
    that ends before `max_steps` begins its second pass while `state.epoch` is still below 1.
    """

    def __init__(self, collator: Any):
        self.collator = collator
        self._next = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to count; a resumed run has its `state.epoch` by now."""
        self._next = int(state.epoch)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer calls this before it asks its data loader for an iterator."""
        self.collator.set_epoch(self._next)
        self._next += 1


class MaskingEpochMixin:
    """Adds `MaskingEpochCallback` where the collator has `set_epoch`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if hasattr(self.data_collator, "set_epoch"):  # type: ignore[attr-defined]
            self.add_callback(MaskingEpochCallback(self.data_collator))  # type: ignore[attr-defined]
