"""Plain safetensors of a sharded checkpoint: a model folder that `from_pretrained` loads, without the processes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..errors import CheckpointError
from .format.manifest import MANIFEST
from .format.shards import Spread, load_shards, read_shapes
from .format.stored import Stored
from .format.tensor_files import find_file
from .state.sharded_weights import OPTIMIZER, SHARDED, WEIGHTS, read_sharded
from .state.weight_entries import adapter_folder

FILE_BYTES = 5 * 10**9
# What belongs to the run; all else in a checkpoint (configuration, tokenizer) belongs to the model.
_OF_RUN = re.compile(
    rf"{re.escape(MANIFEST)}|{re.escape(SHARDED)}|({WEIGHTS}|{OPTIMIZER})/.*|frozen\.json|progress\.json|"
    r"(optimizer|scheduler|scaler|early_stopping|rank_\d+)\.(json|safetensors)|(trainer_state|training_args)\.json"
)


def check_mergeable(folder: Path) -> None:
    """Raises CheckpointError if the sharded checkpoint leaves out weights that are not an adapter's base."""
    content = read_sharded(folder)
    if content["is_part"] and not content["adapters"]:
        raise CheckpointError(
            f"{folder} holds what trains of the model; the rest stayed frozen and is not in it. Resume the run (also "
            "in one process) and save_model, which writes all."
        )


def write_merged(stored: Stored, target: Path) -> int:
    """Writes the model of a verified sharded checkpoint into `target`, bit for bit, as `save_pretrained` would.

    Of adapters (PEFT), the folder that `PeftModel.from_pretrained` loads on their base. Returns the number of tensors.
    Memory for one file, at most 5 GB or the largest tensor.
    """
    folder = stored.path
    check_mergeable(folder)
    content = read_sharded(folder)
    shapes = read_shapes(folder / WEIGHTS, content["shapes"])
    for name in stored.manifest.files:
        if not _OF_RUN.fullmatch(name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(find_file(folder, *name.split("/")) or folder / name, target / name)
    if not content["adapters"]:
        _write(folder, target, "model", {name: name for name in shapes}, shapes, FILE_BYTES)
        return len(shapes)
    for adapter, names in content["adapters"].items():
        place = target.joinpath(*adapter_folder(adapter))
        _write(folder, place, "adapter_model", names, shapes, None)
    return sum(map(len, content["adapters"].values()))


def _write(
    folder: Path, place: Path, stem: str, names: dict[str, str], shapes: dict[str, Spread], max_bytes: int | None
) -> None:
    """Writes entries (name in the file -> name in the shards), in as many files as `max_bytes` asks for."""
    absent = [own for own in names.values() if own not in shapes]
    if absent:
        raise CheckpointError(f"{folder}: {absent[0]} and {len(absent) - 1} more are not in {WEIGHTS}.")
    groups: list[dict[str, str]] = [{}]
    filled = 0
    for name, own in names.items():
        num_bytes = shapes[own].num_bytes
        if max_bytes is not None and groups[-1] and filled + num_bytes > max_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = own
        filled += num_bytes
    index: dict[str, str] = {}
    for i, group in enumerate(groups, start=1):
        file = f"{stem}.safetensors" if len(groups) == 1 else f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors"
        tensors = {own: torch.empty(shapes[own].shape, dtype=shapes[own].dtype) for own in group.values()}
        load_shards(tensors, folder / WEIGHTS)
        save_file({name: tensors[own] for name, own in group.items()}, place / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(group, file))
    if len(groups) > 1:
        size = sum(shapes[own].num_bytes for own in names.values())
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2, sort_keys=True)
        (place / f"{stem}.safetensors.index.json").write_text(text + "\n")
