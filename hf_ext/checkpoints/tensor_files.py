"""Files of named tensors, and names and identities of tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError


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
    """Tensors by name, on the CPU, from a `.safetensors` file.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: damaged, not a safetensors file ({error}).") from error


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
