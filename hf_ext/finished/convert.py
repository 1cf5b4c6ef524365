"""Converts a .pth of another script to the model that `hf-ext train` would make: `hf-ext resume --convert`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..arguments import parse_command
from ..checkpoints import check_finite
from ..data import DataArguments
from ..errors import ArgumentError, CheckpointError
from ..labels import list_some
from ..models import AffinityModel, build_config
from ..property import AffinityArguments, build_collator, model_settings, read_towers, resolve_training
from ..speedups import lora_settings
from ..training_args import FastTrainingArguments

WEIGHT_KEYS = ("model_state_dict", "state_dict", "model")
# The standardisation of a head's inputs, which is the identity until it is measured.
_STANDARDISATION = ("head.input_mean", "head.input_scale")
# What SciPy and NumPy return as a metric, which scripts save beside the weights, is pickled by this function.
_NUMBERS: list[Any] = [np.dtype, type(np.dtype("f4")), type(np.dtype("f8"))]
_NUMBERS += [(np.float64(0).__reduce__()[0], f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]


def convert(
    old: Path, config: str, output_dir: Path, rename: Sequence[tuple[str, str]] = (), drop: Sequence[str] = ()
) -> None:
    """Writes the weights of `old` as the model that `hf-ext train --config` would train; loads no other weights.

    Args:
        old: of tensors, numbers and dictionaries of them; nothing in it is run.
        rename: (old prefix, new prefix) of names; of several that fit a name, the first. "" stands for every name.
        drop: prefixes, after renaming, of entries to leave out.

    Raises:
        ArgumentError: `output_dir` is not empty, or weights are not finite.
        CheckpointError: the file cannot be read, or its entries are not those of the model; names them.
    """
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise ArgumentError(f"--output_dir {output_dir}: not empty. Nothing is overwritten: give a new folder.")
    tensors = {}
    for name, tensor in _read_weights(old).items():
        before, after = next((pair for pair in rename if name.startswith(pair[0])), ("", ""))
        tensors[after + name.removeprefix(before)] = tensor
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(drop))}
    check_finite(old, tensors)
    types = (AffinityArguments, DataArguments, FastTrainingArguments)
    _, (args, data_args, training_args) = parse_command(types, {}, None, ["--config", config])
    is_other = data_args.task not in ("auto", "regression") or len(data_args.label_column) > 1
    if is_other or data_args.number_columns:
        told = "--convert makes models of one number per row, of sequences alone, and this file asks for others"
        raise ArgumentError(f"{config}: {told}.")
    args.tower_training, _ = resolve_training(args, training_args.use_peft)
    encoders, towers = read_towers(args, data_args.sequence_columns, lora_settings(training_args))
    model = AffinityModel(build_config(encoders, towers, **model_settings(args)))
    model.config.label_mean = 0.0
    model.config.label_std = 1.0
    model.config.is_scaled = True
    try:
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:  # of another shape: names them, with both shapes
        raise CheckpointError(f"{old} does not fit this model; nothing was written. {error}") from error
    missing = [name for name in missing if name not in _STANDARDISATION]
    if missing or unexpected:
        raise CheckpointError(
            f"{old} does not fit this model; nothing was written.\n  missing: {list_some(missing)}\n  not in this "
            f"model: {list_some(unexpected)}\n--rename OLD=NEW changes the beginning of names, --drop PREFIX leaves "
            "entries out. Frozen encoders are named by an affinity model, not stored in it: drop them, unless they "
            "were trained; then give a file whose towers train (tower_training: full)."
        )
    model.save_pretrained(str(output_dir))
    build_collator(model, data_args, args.max_length).save_pretrained(str(output_dir))
    print(f"{old}: {len(tensors)} tensors are now the model in {output_dir}.")


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Reads tensors by name, without the prefixes that torch.compile and DataParallel (DDP too) put before names."""
    try:
        with torch.serialization.safe_globals(_NUMBERS):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch.load raises for a damaged or hostile file has no common class
        raise CheckpointError(
            f"{path}: not there, damaged, or more than tensors and numbers; nothing was run. If you made this file "
            "yourself, load it where it was made and save its tensors alone: "
            "torch.save({'model_state_dict': model.state_dict()}, NEW)."
        ) from error
    for weights in [content, *map(content.get, WEIGHT_KEYS)] if isinstance(content, Mapping) else []:
        if isinstance(weights, Mapping) and weights and all(map(torch.is_tensor, weights.values())):
            return {name.replace("_orig_mod.", "").removeprefix("module."): t for name, t in weights.items()}
    raise CheckpointError(
        f"{path}: expected names and tensors, as model.state_dict(), alone or as one of {', '.join(WEIGHT_KEYS)}. Save "
        "such a file where it was made: torch.save({'model_state_dict': model.state_dict()}, NEW)."
    )
