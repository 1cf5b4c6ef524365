"""The order of rows of a run that is continued, also where a sampler draws it from generators that nobody seeds."""

from __future__ import annotations

import logging
from typing import Any

from ..checkpoints.rng import capture_rng, restore_rng
from ..checkpoints.stored import Stored
from ..data.random_states import put_back, state_of
from ..data.repeatable_loaders import RepeatableLoader, base_of, generators_behind
from ..data.seeded_batches import NumberedBatches
from ..data.streams import PassedRows

logger = logging.getLogger(__name__)


class RowOrderMixin:
    """Keeps in each checkpoint the random states that the epoch's order was drawn from.

    Trainer 5.23 draws the order of an epoch again, to drop what was trained on, from the states of the new process: a
    sampler that draws from Python's, NumPy's or torch's generator, or from one of its own, then gives another order.
    Exact for samplers that draw when an iteration begins; draws between two batches mix with those of training.
    """

    args: Any
    _resumed: Stored | None  # of ResumeMixin
    _epoch_began: dict[str, Any] | None = None
    _train_loader: Any = None

    def row_order(self) -> dict[str, Any]:
        """For a checkpoint: the states when the epoch began, and what samplers' own generators are at now."""
        return {"began": self._epoch_began, "held": self._held_states()}

    def _held_states(self) -> list[tuple[str, Any]]:
        return [(type(g).__name__, state_of(g)) for g in generators_behind(self._train_loader)]

    def _note_order(self) -> None:
        self._epoch_began = {"rng": capture_rng(), "held": self._held_states()}

    def _run_epoch(self, **kwargs: Any) -> None:
        self._train_loader = kwargs["train_dataloader"]
        base = base_of(self._train_loader)
        if isinstance(getattr(base, "batch_sampler", None), NumberedBatches):
            base.batch_sampler.epoch = kwargs["epoch"] + 1  # of a loader that Accelerate did not prepare, nobody else
        if isinstance(base, RepeatableLoader):
            base.when_begun = self._note_order
        else:
            self._note_order()
        if kwargs["resume_from_checkpoint"] is not None and kwargs["epoch"] == kwargs["epochs_trained"]:
            self._restore_order(kwargs["steps_trained_in_current_epoch"] > 0 and not self.args.ignore_data_skip)
        super()._run_epoch(**kwargs)  # type: ignore[misc]

    def _restore_order(self, is_within_epoch: bool) -> None:
        tree = None if self._resumed is None else self._own_tree()  # type: ignore[attr-defined]
        order = (tree or {}).get("row_order")
        is_stream = isinstance(getattr(self._train_loader, "dataset", None), PassedRows)
        # A stream is read on from its position: what its rows draw at random would be half repeated, and unnoticed.
        if order is None or is_stream or (is_within_epoch and order["began"] is None):
            return
        if is_within_epoch:
            self._epoch_began = order["began"]
            restore_rng(order["began"]["rng"])  # Trainer puts back those of the step when it has dropped batches
        held = order["began"]["held"] if is_within_epoch else order["held"]
        generators = generators_behind(self._train_loader)
        if [name for name, _ in held] != [type(generator).__name__ for generator in generators]:
            logger.warning("The samplers have other generators than in the checkpoint: rows may come in another order.")
            return
        for generator, (_, state) in zip(generators, held, strict=True):
            put_back(generator, state)
