"""The order of rows of a run that is continued, also where a sampler draws it from generators that nobody seeds."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..checkpoints.state.rng import capture_rng, restore_rng
from ..data.random_states import put_back, state_of
from ..data.repeatable_loaders import RepeatableLoader, base_of, generators_behind
from ..data.seeded_batches import NumberedBatches
from ..data.streams import PassedRows

logger = logging.getLogger(__name__)


class RowOrder:
    """Keeps for each checkpoint the random states that the epoch's order was drawn from.

    Trainer 5.23 draws the order of an epoch again, to drop what was trained on, from the states of the new process: a
    sampler that draws from Python's, NumPy's or torch's generator, or from one of its own, then gives another order.
    Exact for samplers that draw when an iteration begins; draws between two batches mix with those of training.
    """

    name = "row_order"

    def __init__(self) -> None:
        self._loader: Any = None
        self._began: dict[str, Any] | None = None
        self._to_restore: Mapping[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the states when the epoch began, and what samplers' own generators are at now."""
        return {"began": self._began, "held": self._held_states()}

    def load(self, tree: Mapping[str, Any] | None) -> None:
        """Takes what `state` said in the checkpoint; None where it did not: the order is then drawn anew."""
        self._to_restore = tree

    def _held_states(self) -> list[tuple[str, Any]]:
        return [(type(g).__name__, state_of(g)) for g in generators_behind(self._loader)]

    def _note(self) -> None:
        self._began = {"rng": capture_rng(), "held": self._held_states()}

    def begin_epoch(self, loader: Any, epoch: int) -> None:
        """Before Trainer iterates over `loader` for this epoch."""
        self._loader, base = loader, base_of(loader)
        if isinstance(getattr(base, "batch_sampler", None), NumberedBatches):
            base.batch_sampler.epoch = epoch + 1  # of a loader that Accelerate did not prepare, nobody else
        if isinstance(base, RepeatableLoader):
            base.when_begun = self._note
        else:
            self._note()

    def restore(self, is_within_epoch: bool) -> None:
        """After `begin_epoch`: the epoch's order, and what was drawn since, are those of the run that is continued.

        Args:
            is_within_epoch: whether Trainer is to drop batches of it, rather than to begin it.
        """
        order = self._to_restore
        is_stream = isinstance(getattr(self._loader, "dataset", None), PassedRows)
        # A stream is read on from its position: what its rows draw at random would be half repeated, and unnoticed.
        if order is None or is_stream or (is_within_epoch and order["began"] is None):
            return
        if is_within_epoch:
            self._began = order["began"]
            restore_rng(order["began"]["rng"])  # Trainer puts back those of the step when it has dropped batches
        held = order["began"]["held"] if is_within_epoch else order["held"]
        generators = generators_behind(self._loader)
        if [name for name, _ in held] != [type(generator).__name__ for generator in generators]:
            logger.warning("The samplers have other generators than in the checkpoint: rows may come in another order.")
            return
        for generator, (_, state) in zip(generators, held, strict=True):
            put_back(generator, state)
