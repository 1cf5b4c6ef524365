"""Files of named tensors: safetensors, and what stock checkpoints hold besides. Nothing in a file is ever run."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from ...errors import CheckpointError


def find_file(folder: Path, *parts: str) -> Path | None:
    """The regular file at `parts` below `folder`; None if nothing is there.

    Raises:
        CheckpointError: a part is not a plain name, or a link leads out of the folder.
    """
    for part in parts:
        if part in ("", ".", "..") or any(sign in part for sign in "/\\\0"):
            raise CheckpointError(f"{folder}: {part!r} is not the plain name of a file in this folder.")
    path = folder.joinpath(*parts)
    if not path.is_symlink() and not path.exists():
        return None
    if not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{path}: a link to {path.resolve()}, outside the checkpoint. Copy the file into it.")
    if not path.is_file():
        raise CheckpointError(f"{path}: not a regular file.")
    return path


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Tensors by name, on the CPU, from a `.safetensors` file or from a state dict written by `torch.save`.

    Raises:
        CheckpointError: the file is damaged, or holds anything but named tensors; nothing in it was executed.
    """
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: damaged, not a safetensors file ({error}).") from error
    content = read_torch_file(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not tensors by name.")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{path}: entry {name!r} is a {type(value).__name__}, not a tensor.")
    return dict(content)


def read_torch_file(path: Path) -> Any:
    """What `torch.save` wrote, on the CPU, as far as it is tensors and plain values; nothing else is ever built.

    Raises:
        CheckpointError: damaged, or more than that; says what it asks for. Nothing in it was executed.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch.load raises for a damaged or hostile file has no common class
        is_damage = not isinstance(error, OSError | MemoryError) or getattr(error, "errno", None) == errno.EINVAL
        if not is_damage:  # EINVAL is a seek beyond the end of a file that was cut off
            raise
        refused = re.search(r"GLOBAL (\S+) ", str(error))
        reason = f"asks for {refused[1]}" if refused else (str(error) or type(error).__name__).splitlines()[0]
        reason = type(error).__name__ if "weights_only" in reason else reason  # torch's advice to run it anyway
        raise CheckpointError(f"{path}: damaged, or more than tensors; nothing was run ({reason}).") from error


def read_shards(folder: Path, index_name: str) -> dict[str, torch.Tensor]:
    """All tensors of the files that a `*.index.json` names.

    Raises:
        CheckpointError: the index is malformed, names a file outside the folder or one that is not there, or a file
            does not hold exactly the tensors that the index says.
    """
    index = read_json(folder / index_name)
    where = index.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise CheckpointError(f"{folder / index_name}: no weight_map of tensor name to file name.")
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(set(where.values())):
        path = find_file(folder, shard)
        if path is None:
            raise CheckpointError(f"{folder / shard}: missing, but {index_name} names it.")
        found = read_tensors(path)
        listed = {name for name, file in where.items() if file == shard}
        if found.keys() != listed:
            wrong = sorted(found.keys() ^ listed)
            raise CheckpointError(f"{path}: not the tensors of {index_name}: {describe_names(wrong)}.")
        tensors.update(found)
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: not there, not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, FileNotFoundError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(f"{path}: missing or damaged, not JSON ({error}).") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not an object.")
    return content


def write_tensors(tensors: Mapping[str, Any], path: Path) -> None:
    """Writes tensors as safetensors; of names for the same tensor, the first.

    Raises:
        CheckpointError: an entry is not a tensor.
    """
    kept: dict[str, torch.Tensor] = {}
    storages = set()
    for name, tensor in first_names(tensors).items():
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        # Other parts of a storage that is written already: safetensors takes none that overlap.
        kept[name] = tensor.detach().clone() if storage in storages else tensor.detach()
        kept[name] = kept[name].contiguous()
        storages.add(storage)
    save_file(kept, path, metadata={"format": "pt"})


def first_names(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """`tensors` without further names for tensors that are there already (tied weights).

    Raises:
        CheckpointError: an entry is not a tensor.
    """
    first: dict[Any, str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"State-dict entry {name!r} is a {type(tensor).__name__}; a checkpoint holds tensors. Register it as "
                "a buffer, or keep it out of the state dict (get_extra_state)."
            )
        first.setdefault(identity(name, tensor), name)
    return {name: tensors[name] for name in first.values()}


def identity(name: str, tensor: torch.Tensor) -> Any:
    """Equal for two names of one tensor, different for different tensors; spread ones are one if the object is."""
    if tensor.numel() == 0 or tensor.device.type == "meta":  # no address
        return name
    if isinstance(tensor, DTensor):  # an address of a part, which is no process's own where parts are empty
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own bytes, (bytes,), uint8, on the CPU; unlike values, they compare where there are NaNs."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def describe_names(names: list[str], limit: int = 5) -> str:
    """The first names, and how many there are."""
    return f"{', '.join(names[:limit])}{', ...' if len(names) > limit else ''} ({len(names)} in all)"
