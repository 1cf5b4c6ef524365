"""Which tensor of a checkpoint belongs to which entry of a model, and whether all of them fit."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ..format.tensor_files import as_bytes, describe_names, identity

# Names that transformers gives entries when it saves in a model's original format, and in its earlier releases.
_LEGACY = (
    (re.compile(r"LayerNorm\.gamma$"), "LayerNorm.weight"),
    (re.compile(r"LayerNorm\.beta$"), "LayerNorm.bias"),
    # ESM's one rotary table: per layer before transformers 5, under a literal "*" since.
    (re.compile(r"encoder\.layer\.(\d+|\*)\.attention\.self\.rotary_embeddings\."), "rotary_embeddings."),
)


def match_names(state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Finds each entry of a state dict among the tensors of a checkpoint, by its name or by a legacy name of it.

    Returns:
        State-dict name -> tensor, for those found; and the names of tensors that belong to no entry.

    Raises:
        CheckpointError: several legacy names stand for one entry, with different values.
    """
    legacy: dict[str, str] = {}
    found, used = {}, set()
    for name in sorted(tensors.keys() - state.keys()):
        other = legacy.setdefault(_modern(name), name)
        if not _same(tensors[other], tensors[name]):
            raise CheckpointError(f"{other} and {name} are one tensor in this model; the checkpoint holds two.")
    for name in state:
        if name in tensors:
            found[name] = tensors[name]
        elif _modern(name) in legacy:
            found[name] = tensors[legacy[_modern(name)]]
            used.add(_modern(name))
    return found, [name for name in sorted(tensors.keys() - state.keys()) if _modern(name) not in used]


def check_entries(
    folder: Path, state: dict[str, Any], found: dict[str, torch.Tensor], unexpected: list[str], required: set[str]
) -> None:
    """Checks that a checkpoint has everything required, nothing else, and in the model's shapes and dtypes.

    Of names for one tensor (tied weights) one is enough; where there are more, they must agree.

    Raises:
        CheckpointError: with everything that does not fit.
    """
    names_of = defaultdict(list)
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            names_of[identity(name, tensor)].append(name)
    missing, problems = [], []
    for names in names_of.values():
        given = [name for name in names if name in found]
        missing += [] if given else [name for name in names if name in required]
        if any(not _same(found[given[0]], found[name]) for name in given[1:]):
            problems.append(f"{' and '.join(given)} are one tensor in this model; the checkpoint holds two")
    if missing:
        problems.append(f"missing: {describe_names(missing)}")
    if unexpected:
        problems.append(f"not in this model, or frozen in it: {describe_names(unexpected)}")
    sizes = [
        f"{name} is {_kind(tensor)}, here {_kind(state[name])}"
        for name, tensor in found.items()
        if _kind(tensor) != _kind(state[name])
    ]
    if sizes:
        problems.append(f"of another size or dtype: {describe_names(sizes)}")
    if problems:
        text = "\n  ".join(problems)
        raise CheckpointError(
            f"{folder} does not fit this model; nothing was loaded.\n  {text}\nBuild the model with the arguments that "
            "the checkpoint was trained with: same class, sizes, dtype, and parts that train."
        )


def _modern(name: str) -> str:
    for pattern, replacement in _LEGACY:
        name = pattern.sub(replacement, name)
    return name


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{[*tensor.shape]}"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_meta or other.is_meta:  # of shards, where tied weights are one
        return one is other
    return one is other or (_kind(one) == _kind(other) and torch.equal(as_bytes(one), as_bytes(other)))
