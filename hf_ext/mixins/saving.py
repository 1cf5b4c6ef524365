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
from transformers import PreTrainedModel
from transformers.trainer import TRAINING_ARGS_NAME

from ..checkpoints.disk import describe_failure, follow_umask, is_disk_failure
from ..checkpoints.finished import describe_model
from ..checkpoints.weights import export_bytes
from ..errors import ArgumentError, DiskFailure
from ..models.lora import merged_copy
from ..whole_files import write_text

EXPORT_STAGING = ".staging-model"  # safetensors would leave files of random names


class SavingMixin:
    """Writes `training_args.json` instead of the pickled `training_args.bin`, which would hold `hub_token` in clear."""

    args: Any
    state: Any
    model: Any
    data_collator: Any
    processing_class: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    is_fsdp2: bool

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in Trainer; of weights that FSDP2 has split, whole ones, whatever checkpoints hold.

        To be called by all processes; the main one writes.

        Raises:
            DiskFailure: the disk is full, read-only or broken; the folder's model is not complete.
        """
        if _internal_call:  # for a checkpoint, which has its own rules
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        whole = self.gather_weights() if self.is_fsdp2 else None  # type: ignore[attr-defined]
        with self._named_disk_failure(output_dir, export_bytes(self.model)):
            if whole is None:
                super().save_model(output_dir)  # type: ignore[misc]
            else:
                self._save(output_dir, whole)
            self._describe(output_dir or self.args.output_dir)

    def _describe(self, folder: str | os.PathLike[str]) -> None:
        if self.args.should_save:
            describe_model(folder, self.state.global_step, float(self.state.epoch or 0))

    def save_state(self) -> None:
        """As in Trainer; raises as `save_model` does."""
        with self._named_disk_failure(None, None):
            super().save_state()  # type: ignore[misc]

    @contextmanager
    def _named_disk_failure(self, folder: str | os.PathLike[str] | None, needed_bytes: int | None) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            if not is_disk_failure(error):
                raise
            raise DiskFailure(
                f"{describe_failure(error, folder or self.args.output_dir, needed_bytes)} What is there of the trained "
                "model is not complete. Checkpoints are untouched: once there is room, the same command with --resume "
                "auto (the recipes' default) goes on from the newest."
            ) from error

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        if not isinstance(self.model, PreTrainedModel | PeftModel):
            super()._save(str(folder), state_dict)  # type: ignore[misc]
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
        elif self.args.should_save:
            self._save_pretrained(self.model, folder, state_dict)
        if self.args.should_save:
            self._save_companions(folder)

    def save_merged(self, folder: str | os.PathLike[str]) -> None:
        """Writes the model with its LoRA adapters merged into the weights; the folder loads without PEFT.

        `trainer.model` keeps its adapters. Predictions are the same up to rounding. Cost: memory for a second copy.

        Raises:
            ArgumentError: the model has no adapters, or its weights are spread over processes.
            DiskFailure: as `save_model`.
        """
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ArgumentError(
                "Weights are sharded over processes and cannot be merged here. Load the saved folder in one process "
                "and call `merge_adapters()` (AffinityModel) or `merge_and_unload()` (PeftModel)."
            )
        merged = merged_copy(self.model)
        if self.args.should_save:
            with self._named_disk_failure(folder, export_bytes(merged)), _made_whole(Path(folder)) as place:
                self._save_pretrained(merged, place, None)
                self._save_companions(place)
                self._describe(place)

    def _save_pretrained(self, model: Any, folder: Path, state_dict: dict | None) -> None:
        """As the model does, but whole files replace those of before; what a killed export left goes with the next."""
        staging = folder / EXPORT_STAGING
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            if (folder / "README.md").is_file():  # which PEFT adds to
                shutil.copy(folder / "README.md", staging)
            model.save_pretrained(str(staging), state_dict=state_dict, **_own_names(model))
            for path in [path for path in staging.rglob("*") if path.is_file()]:
                target = folder / path.relative_to(staging)
                target.parent.mkdir(parents=True, exist_ok=True)
                follow_umask(path)
                os.replace(path, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _save_companions(self, folder: Path) -> None:
        """What belongs to the weights: tokenizer, collator, and the arguments without tokens."""
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        parts: tuple[Any, ...] = (tokenizer, self.data_collator)
        for part in parts:
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(folder)
        # to_dict masks every field whose name ends in _token.
        text = json.dumps(self.args.to_dict(), indent=2, default=str)
        write_text(folder / "training_args.json", text + "\n")


@contextmanager
def _made_whole(folder: Path) -> Iterator[Path]:
    """Where to write what is to be in `folder`: one without files appears with its manifest, which says whose it is."""
    if folder.is_dir() and any(folder.iterdir()):
        yield folder
        return
    folder = folder.resolve()
    draft = folder.with_name(f".staging-{folder.name}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        if folder.is_dir():
            folder.rmdir()  # systems differ on renaming over an empty one
        os.rename(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _own_names(model: Any) -> dict[str, Any]:
    # transformers 5.23 writes ESM's LayerNorms as gamma/beta, which `Trainer`'s raw `load_state_dict` then drops
    # (https://github.com/huggingface/transformers/issues/43701). Remove when a resumed ESM keeps its LayerNorms.
    return {"save_original_format": False} if isinstance(model, PreTrainedModel) else {}
