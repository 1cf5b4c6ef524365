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
from transformers import PreTrainedModel, TrainerState
from transformers.trainer import TRAINING_ARGS_NAME

from ..checkpoints.finished_model import write_model_manifest
from ..checkpoints.weights import export_bytes, save_weights
from ..disk import describe_failure, follow_umask, is_disk_failure
from ..errors import ArgumentError, DiskFailure
from ..models.lora import merged_copy
from ..training_args import FastTrainingArguments
from ..whole_files import write_text

EXPORT_STAGING = ".staging-model"  # safetensors would leave files of random names

Folder = str | os.PathLike[str]


class Exporter:
    """Writes `training_args.json` instead of the pickled `training_args.bin`, which would hold `hub_token` in clear.

    Args:
        is_spread: whether FSDP or DeepSpeed spreads the weights over processes.

    Raises (where it says "names failures"):
        DiskFailure: the disk is full, read-only or broken; the folder's model is not complete.
    """

    def __init__(self, args: FastTrainingArguments, is_spread: bool = False):
        self._args, self._is_spread = args, is_spread

    @contextmanager
    def exporting(self, model: Any, folder: Folder | None, state: TrainerState) -> Iterator[None]:
        """Names failures while the model is written, then adds what says whose it is. None: the output folder."""
        with self.naming_failures(folder, export_bytes(model)):
            yield
            self._describe(folder or self._output_dir, state)

    @contextmanager
    def naming_failures(self, folder: Folder | None = None, needed_bytes: int | None = None) -> Iterator[None]:
        """Says what the disk refused, where, and what is left, instead of an error without a name."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            if not is_disk_failure(error):
                raise
            raise DiskFailure(
                f"{describe_failure(error, folder or self._output_dir, needed_bytes)} What is there of the trained "
                "model is not complete. Checkpoints are untouched: once there is room, the same command with --resume "
                "auto (the recipes' default) goes on from the newest."
            ) from error

    def save_merged(self, model: Any, folder: Folder, state: TrainerState, *inputs: Any) -> None:
        """Writes a copy of the model with its LoRA adapters merged into the weights; names failures.

        Args:
            model: with adapters, which it keeps.
            inputs: as for `save_companions`.

        Raises:
            ArgumentError: the model has no adapters, or its weights are spread over processes.
        """
        if self._is_spread:
            raise ArgumentError(
                "Weights are sharded over processes and cannot be merged here. Load the saved folder in one process "
                "and call `merge_adapters()` (AffinityModel) or `merge_and_unload()` (PeftModel)."
            )
        merged = merged_copy(model)
        if not self._args.should_save:
            return
        with self.naming_failures(folder, export_bytes(merged)), _made_whole(Path(folder)) as place:
            save_pretrained(merged, place)
            self.save_companions(place, *inputs)
            self._describe(place, state)

    def save_companions(self, folder: Path, tokenizer: Any, collator: Any) -> None:
        """What belongs to the weights: tokenizer (None: the collator's), collator, and the arguments without tokens."""
        parts: tuple[Any, ...] = (tokenizer or getattr(collator, "tokenizer", None), collator)
        for part in parts:
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(folder)
        # to_dict masks every field whose name ends in _token.
        text = json.dumps(self._args.to_dict(), indent=2, default=str)
        write_text(folder / "training_args.json", text + "\n")

    def drop_pickle(self, folder: Path) -> None:
        """Takes away the arguments that Trainer writes beside a model that it saves itself."""
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)

    def _describe(self, folder: Folder, state: TrainerState) -> None:
        if self._args.should_save:
            write_model_manifest(folder, state.global_step, float(state.epoch or 0))

    @property
    def _output_dir(self) -> str:
        return str(self._args.output_dir)


def can_save_itself(model: Any) -> bool:
    """Whether `save_pretrained` is for it."""
    return isinstance(model, PreTrainedModel | PeftModel)


def save_pretrained(model: Any, folder: Path, state_dict: dict[str, Any] | None = None) -> None:
    """As the model does, but whole files replace those of before; what a killed export left goes with the next."""
    staging = folder / EXPORT_STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        if (folder / "README.md").is_file():  # which PEFT adds to
            shutil.copy(folder / "README.md", staging)
        save_weights(model, staging, state_dict)
        for path in [path for path in staging.rglob("*") if path.is_file()]:
            target = folder / path.relative_to(staging)
            target.parent.mkdir(parents=True, exist_ok=True)
            follow_umask(path)
            os.replace(path, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


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
