"""Dictionaries that other scripts saved with `torch.save`: where their weights are, and what else they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import CheckpointError
from ..format.tensor_files import describe_names, read_torch_file

WEIGHT_KEYS = ("model_state_dict", "state_dict", "model", "model_state", "net", "network", "weights", "module")
OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer", "optimizer_state", "optim", "optim_state_dict")
# torch.compile and DataParallel (DDP too) put a module of their own around the model.
COMPILED, PARALLEL = "_orig_mod.", "module."

# What SciPy and NumPy return as a metric is pickled by these functions; they build numbers and arrays of numbers.
_SCALAR, _ARRAY = np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0]
_NUMBERS: list[Any] = [np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in "?bhilqBHILQefd"}]
_NUMBERS += [(_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
_NUMBERS += [(_ARRAY, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]


@dataclass(frozen=True)
class OldFile:
    """What such a file holds.

    Attributes:
        weights: name -> tensor, without the wrappers' prefixes, in the file's order.
        weights_key: under which they were; "" where they are the whole file.
        prefixes: wrappers' prefixes that were taken off.
        optimizer: `Optimizer.state_dict()`, or None.
        values: numbers beside them, such as epoch and best metric.
        others: names of entries that are none of these -> their type.
    """

    weights: dict[str, torch.Tensor]
    weights_key: str = ""
    prefixes: tuple[str, ...] = ()
    optimizer: Mapping[str, Any] | None = None
    values: dict[str, Any] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)


def read_old_file(path: Path, weights_key: str | None = None) -> OldFile:
    """Reads a `.pth`, `.pt` or `.bin` of tensors, numbers and dictionaries of them; builds nothing else.

    Args:
        weights_key: the entry with the weights; None looks for it.

    Raises:
        CheckpointError: not there, damaged, more than tensors and numbers (nothing was run), or no weights found.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a file that torch.save wrote, found {_what_is_there(path)}.")
    try:
        with torch.serialization.safe_globals(_NUMBERS):
            content = read_torch_file(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} If you made this file yourself, load it where it was made and save its tensors alone: "
            "torch.save({'model_state_dict': model.state_dict(), 'optimizer_state_dict': optimizer.state_dict(), "
            "'epoch': epoch}, NEW)."
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, expected a dictionary with weights.")
    if weights_key is None and _is_state_dict(content):
        weights, prefixes = _unwrapped(path, content)
        return OldFile(weights, "", prefixes)
    key = _find_weights(path, content, weights_key)
    weights, prefixes = _unwrapped(path, content[key])
    optimizer_key = next((k for k in OPTIMIZER_KEYS if isinstance(content.get(k), Mapping)), None)
    rest = {str(k): value for k, value in content.items() if k not in (key, optimizer_key)}
    values = {name: plain for name, value in rest.items() if (plain := _plain(value)) is not None}
    others = {name: type(value).__name__ for name, value in rest.items() if name not in values}
    optimizer = None if optimizer_key is None else content[optimizer_key]
    return OldFile(weights, str(key), prefixes, optimizer, values, others)


def _what_is_there(path: Path) -> str:
    return "a folder" if path.is_dir() else "nothing"


def _is_state_dict(value: Any) -> bool:
    """Whether `value` is name -> tensor, as `Module.state_dict()` returns it."""
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in value.items())
    )


def _find_weights(path: Path, content: Mapping[Any, Any], weights_key: str | None) -> Any:
    found = [key for key, value in content.items() if _is_state_dict(value)]
    if weights_key is not None:
        if weights_key in found:
            return weights_key
        raise CheckpointError(f"{path}: --weights_key {weights_key}: no weights there. Entries with weights: {found}.")
    known = [key for key in WEIGHT_KEYS if key in found]
    if known or len(found) == 1:
        return known[0] if known else found[0]
    if found:
        raise CheckpointError(f"{path}: several entries hold tensors: {found}. Name the weights with --weights_key.")
    listed = describe_names([f"{key!r} ({type(value).__name__})" for key, value in content.items()])
    raise CheckpointError(f"{path}: no entry is a dictionary of names and tensors, as model.state_dict(); it {listed}.")


def _unwrapped(path: Path, weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """The weights by the names that they have in the model itself, and the prefixes that were taken off."""
    names, prefixes = list(weights), []
    if any(COMPILED in name for name in names):  # compiled submodules have it in the middle
        names, prefixes = [name.replace(COMPILED, "") for name in names], [COMPILED]
    while names and all(name.startswith(PARALLEL) for name in names):
        names, prefixes = [name.removeprefix(PARALLEL) for name in names], [*prefixes, PARALLEL]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(f"{path}: without {prefixes} two entries have one name: {describe_names(twice)}.")
    return dict(zip(names, weights.values())), tuple(prefixes)


def _plain(value: Any) -> Any:
    """A number of Python, NumPy or torch as JSON has it, text where JSON has none; None for anything else."""
    if isinstance(value, torch.Tensor | np.generic | np.ndarray):
        value = value.item() if value.ndim == 0 else None
    if isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else str(value)
    return None
