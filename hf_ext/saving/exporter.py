"""What a saved model folder holds: weights, config, what turns text into inputs, and arguments as JSON. No pickle."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..checkpoints import export_bytes, save_checkpoint_weights, save_weights, write_model_manifest
from ..errors import ArgumentError, DiskFailure
from ..files import StrPath, describe_failure, follow_umask, is_disk_failure, write_text
from ..models import merged_copy
from ..training import Backend, Host

EXPORT_STAGING = ".staging-model"


class Exporter:
    """Writes `training_args.json` instead of the pickled `training_args.bin`, which would hold `hub_token` in clear."""

    def __init__(self, trainer: Host, backend: Backend):
        self._trainer = trainer
        self._backend = backend

    @contextmanager
    def exporting(self, folder: StrPath | None, model: nn.Module | None = None) -> Iterator[None]:
        """Wraps the writing of a model folder, None for the output folder; then adds what says whose it is.

        Raises:
            DiskFailure: the disk is full, read-only or broken; the folder's model is not complete.
        """
        trainer = self._trainer
        folder = folder or trainer.args.output_dir
        try:
            yield
            if trainer.args.should_save:
                write_model_manifest(folder, trainer.state.global_step, float(trainer.state.epoch or 0))
        except (OSError, SafetensorError) as error:
            if not is_disk_failure(error):
                raise
            needed_bytes = export_bytes(trainer.model if model is None else model)
            raise DiskFailure(
                f"{describe_failure(error, folder, needed_bytes)} What is there of the trained model is not complete. "
                "Checkpoints are untouched: once there is room, the same command with --resume auto (the recipes' "
                "default) goes on from the newest."
            ) from error

    def write(
        self,
        folder: Path,
        model: PreTrainedModel | PeftModel,
        state_dict: dict[str, Tensor] | None = None,
        is_checkpoint: bool = False,
    ) -> None:
        """Writes all files of a model that can save itself into a staging folder, then replaces the old ones.

        Args:
            state_dict: whole weights where they are sharded over processes.
            is_checkpoint: as of `save_weights`.
        """
        staging = folder / EXPORT_STAGING
        shutil.rmtree(staging, ignore_errors=True)  # what a killed export left
        staging.mkdir(parents=True)
        try:
            if (folder / "README.md").is_file():  # which PEFT adds to
                shutil.copy(folder / "README.md", staging)
            (save_checkpoint_weights if is_checkpoint else save_weights)(model, staging, state_dict)
            self.save_companions(staging)
            for path in [path for path in staging.rglob("*") if path.is_file()]:
                target = folder / path.relative_to(staging)
                target.parent.mkdir(parents=True, exist_ok=True)
                follow_umask(path)
                os.replace(path, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def save_companions(self, folder: Path) -> None:
        """Writes what belongs to the weights: tokenizer (None: the collator's), collator, arguments without tokens."""
        collator = self._trainer.data_collator
        parts: tuple[Any, ...] = (self._trainer.processing_class or getattr(collator, "tokenizer", None), collator)
        for part in parts:
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(folder)
        # to_dict masks every field whose name ends in _token.
        text = json.dumps(self._trainer.args.to_dict(), indent=2, default=str)
        write_text(folder / "training_args.json", text + "\n")

    def save_merged(self, folder: StrPath) -> None:
        """Writes a copy of the model with its LoRA adapters merged into the weights; see `FastTrainer.save_merged`."""
        if self._backend.is_sharded:
            raise ArgumentError(
                "Weights are sharded over processes and cannot be merged here. Load the saved folder in one process "
                "and call `merge_adapters()` (AffinityModel) or `merge_and_unload()` (PeftModel)."
            )
        merged = merged_copy(self._trainer.model)
        if self._trainer.args.should_save:
            with self.exporting(folder, merged):
                self.write(Path(folder), merged)
