"""The model's part of a checkpoint, written along Trainer's own chain of calls, in which users' classes have a say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.state.sharded_weights import describe_sharded
from ..checkpoints.state.weights import TRAINER_WEIGHTS, save_weights, stored_model
from .backends import Backend
from .team import Team

Companions = Callable[[Path], None]


class CheckpointModel:
    """Trainer calls `save_model` -> `_save`: what overrides of either add, or write instead, is in the checkpoint.

    `write` starts that chain; `takes_model` and `takes` say, at each of its ends, whether it is a checkpoint's model
    that is written there, by us, with `save`.
    """

    def __init__(self, team: Team, backend: Backend):
        self._team, self._backend = team, backend
        self._folder: Path | None = None  # of the checkpoint, staged, while its model is being written
        self._gathered: dict[str, torch.Tensor] | None = None  # the whole state dict that `_save` is given, of FSDP2
        self._is_written = False

    def write(
        self,
        model: Any,
        folder: Path,
        save_model: Callable[[str], None],
        save_companions: Companions,
        has_own_loader: bool,
    ) -> None:
        """Weights, configuration, tokenizer, and whatever the user's class adds to them or writes instead.

        Args:
            model: as it trains.
            folder: of the checkpoint, staged.
            save_model: `Trainer.save_model`, as overridden.
            save_companions: writes what belongs to the weights.
            has_own_loader: whether the user's class reads what it writes; else, where it writes other weights, ours
                are beside them, in a folder.
        """
        backend, writes = self._backend, self._team.writes
        if backend.writes_parts and writes:
            describe_sharded(stored_model(model), folder, self._team.size)
        if backend.keeps_library_files and writes:  # FSDP 1 with sharded states calls no `_save`
            save_companions(folder)
        self._folder, self._is_written = folder, False
        try:
            save_model(str(folder))
        finally:
            self._folder = self._gathered = None
        has_weights = self._is_written or backend.writes_parts or backend.keeps_library_files
        if writes and not has_weights and not has_own_loader:
            save_weights(stored_model(model), folder / TRAINER_WEIGHTS)

    def takes_model(self, output_dir: str | None) -> bool:
        """Whether `save_model(output_dir)` is that of a checkpoint, which `_save` writes from what `gather` gives."""
        is_here = self._folder is not None and output_dir is not None and Path(output_dir) == self._folder
        return is_here and not self._backend.keeps_library_files

    def gather(self, model: Any, is_used: bool) -> dict[str, torch.Tensor] | None:
        """The state dict that `_save` is handed: None, or whole weights of those that are split, if there is a use."""
        self._gathered = self._backend.whole_weights(model) if is_used else None
        return self._gathered

    def takes(self, output_dir: str | None, state_dict: dict | None) -> bool:
        """Whether `_save` was reached with what `gather` gave: it is ours, then, to `save`."""
        return self.takes_model(output_dir) and state_dict is self._gathered

    def save(self, model: Any, save_companions: Companions) -> None:
        """Writes the model and what belongs to it into the checkpoint, as checkpoints hold it."""
        assert self._folder is not None
        self._is_written = True
        if self._team.writes:
            save_companions(self._folder)
            if not self._backend.writes_parts:
                save_weights(stored_model(model), self._folder)
