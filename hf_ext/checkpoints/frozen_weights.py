"""Frozen weights: not stored in a checkpoint, known by their hash."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError
from .tensor_files import as_bytes, describe_names, find_file, first_names, read_json

FROZEN = "frozen.json"
_ROUNDED = (torch.bfloat16, torch.float16, torch.int8)


def describe_frozen(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """sha256 of each tensor and over all of them, their number and bytes. Kept on the model until a tensor changes.

    Of tensors spread over processes, what was found here while they were whole.

    Cost: reads every byte once, about 1 s per GB and core; a change through `.data` is not noticed.

    Raises:
        CheckpointError: they are spread, and were never described before.
    """
    tensors = first_names(tensors)
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        return _description_before_spreading(model, tensors)
    key = [(name, id(t), t.data_ptr(), t._version) for name, t in tensors.items()]
    kept = getattr(model, "_frozen_description", None)
    if kept and kept[0] == key:
        return kept[1]
    # Of weights that were rounded in memory, those of what they were rounded from: see `keep_source_digests`.
    sources = getattr(model, "_source_digests", {})
    rounded = {name: sources[name] for name, t in tensors.items() if name in sources and t.dtype in _ROUNDED}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = dict(zip(tensors, pool.map(lambda name: rounded.get(name) or _digest(tensors[name]), tensors)))
    description = {
        "sha256": hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest(),
        "num_tensors": len(tensors),
        "num_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "tensors": digests,
    }
    model._frozen_description = (key, description)
    return description


def _description_before_spreading(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """That of the whole tensors, which no process holds any more."""
    kept = getattr(model, "_frozen_description", None)
    if kept is None or kept[1]["tensors"].keys() != tensors.keys():
        raise CheckpointError(
            f"{describe_names([*tensors])} are frozen and spread over processes, and were not hashed while they were "
            "whole. What is frozen must be so before training begins."
        )
    return kept[1]


def read_base(model: Any) -> dict[str, Any]:
    """Where frozen weights came from: Hub id or folder ("" for a model made from its configuration) and commit."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(base, "config", None)
    return {
        "name_or_path": str(getattr(base, "name_or_path", "") or ""),
        "revision": getattr(config, "_commit_hash", None),
    }


def write_frozen(model: Any, tensors: dict[str, torch.Tensor], folder: Path, **facts: Any) -> None:
    """Writes `frozen.json`: base, revision, hashes, and `facts`."""
    content = {"format": 1, **read_base(model), **facts, **describe_frozen(model, tensors)}
    (folder / FROZEN).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def check_frozen(model: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Checks that the model's frozen weights are those that the checkpoint was trained on.

    Raises:
        CheckpointError: they are not, or the checkpoint does not say which they were.
    """
    saved = read_json(find_file(folder, FROZEN) or folder / FROZEN)
    before = saved.get("tensors")
    now = describe_frozen(model, tensors)
    if saved.get("sha256") == now["sha256"]:
        return
    if not isinstance(before, dict):
        raise CheckpointError(f"{folder / FROZEN}: no hashes of tensors in it; it is damaged.")
    others = [name for name, digest in now["tensors"].items() if before.get(name) != digest]
    others += [name for name in before if name not in now["tensors"]]
    base = f"{saved.get('name_or_path') or 'unknown'}@{saved.get('revision') or 'no revision'}"
    raise CheckpointError(
        f"{folder} was trained on frozen weights with sha256 {saved.get('sha256')}, those of this model hash to "
        f"{now['sha256']}; different: {describe_names(others)}. Nothing was loaded. The checkpoint does not hold them: "
        f"build the model on the same base ({base}), with the same seed if parts of it are made at random."
    )


def _digest(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype}{[*tensor.shape]}".encode())
    digest.update(as_bytes(tensor).numpy().data)
    return digest.hexdigest()
