"""The model's part of a checkpoint, written along Trainer's own chain of calls, in which users' classes have a say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..checkpoints.sharded_weights import describe_sharded
from ..checkpoints.weights import TRAINER_WEIGHTS, save_weights
from ..overrides import is_overridden
from .together import TogetherMixin


@dataclass
class ModelPart:
    """A model that is being written into a checkpoint, by this class or by the user's.

    Attributes:
        folder: of the checkpoint, staged.
        gathered: the whole state dict that `_save` was given, under FSDP2.
        is_written: whether this class has written its weights.
    """

    folder: Path
    gathered: dict[str, torch.Tensor] | None = None
    is_written: bool = False

    def is_in(self, output_dir: str | None) -> bool:
        """Whether `output_dir` is the checkpoint's folder."""
        return output_dir is not None and Path(output_dir) == self.folder


class CheckpointModelMixin(TogetherMixin):
    """Trainer calls `save_model` -> `_save`: what overrides of either add, or write instead, is in the checkpoint."""

    _part: ModelPart | None = None

    def _write_model(self, folder: Path) -> None:
        """Weights, configuration, tokenizer, and whatever the user's class adds to them or writes instead.

        Where it writes other weights, and has no loader of its own for them, ours are beside them, in a folder.
        """
        if self.is_fsdp2 and self.args.should_save:
            describe_sharded(self.stored_model, folder, self.args.world_size)
        if self.keeps_library_files and self.args.should_save:  # FSDP 1 with sharded states calls no `_save`
            self._save_companions(folder)  # type: ignore[attr-defined]
        self._part = ModelPart(folder)
        try:
            self.save_model(str(folder), _internal_call=True)
            has_weights = self._part.is_written or self.is_fsdp2 or self.keeps_library_files
        finally:
            self._part = None
        if self.args.should_save and not has_weights and not is_overridden(self, "_load_from_checkpoint"):
            save_weights(self.stored_model, folder / TRAINER_WEIGHTS)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in Trainer."""
        if self._part is None or not self._part.is_in(output_dir) or self.keeps_library_files:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        # Of weights that FSDP2 has split, only an override has a use for whole ones here.
        self._part.gathered = self.gather_weights() if self.is_fsdp2 and is_overridden(self, "_save") else None  # type: ignore[attr-defined]
        self._save(output_dir, self._part.gathered)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        part = self._part
        if part is None or not part.is_in(output_dir) or self.keeps_library_files or state_dict is not part.gathered:
            super()._save(output_dir, state_dict)  # type: ignore[misc]
            return
        part.is_written = True
        if self.args.should_save:
            self._save_companions(part.folder)  # type: ignore[attr-defined]
            if not self.is_fsdp2:
                save_weights(self.stored_model, part.folder)
