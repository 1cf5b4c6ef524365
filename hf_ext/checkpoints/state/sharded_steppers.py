"""An optimizer's state that is spread over processes: its tensors in shards, all else as `state.py` has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, empty

from ...errors import CheckpointError
from ..format.shards import Spread, as_spread, load_shards, read_shapes

# Marks what stands for a tensor in shards: its name there; beside it the shape of the whole, and how it was split.
_SPREAD = "hf_ext:spread"


def take_out_spread(tree: Any, name: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """A tree in which marks stand for its spread tensors, and these by name. The same on all processes.

    Raises:
        CheckpointError: a spread tensor that is not plain: an optimizer of 8 bits and less, or unfinished sums.
    """
    taken: dict[str, torch.Tensor] = {}
    return _take(tree, name, taken), taken


def _take(value: Any, place: str, taken: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, DTensor):
        is_plain = type(value.to_local()) is torch.Tensor
        if not is_plain or not all(isinstance(p, Shard | Replicate) for p in value.placements):
            raise CheckpointError(
                f"Optimizer state {place} is a {type(value.to_local()).__name__} spread as {value.placements}, which a "
                "sharded checkpoint cannot hold. Under FSDP2 use --optim adamw_torch or --optim_ext muon."
            )
        taken[place] = value
        dims = [p.dim if isinstance(p, Shard) else None for p in value.placements]
        return {_SPREAD: place, "shape": list(value.shape), "dims": dims}
    if type(value) is dict:
        return {key: _take(item, f"{place}.{key}".lstrip("."), taken) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take(item, f"{place}.{i}".lstrip("."), taken) for i, item in enumerate(value))
    return value


def _marks(tree: Any) -> Iterator[dict[str, Any]]:
    if type(tree) is dict and _SPREAD in tree:
        yield tree
    elif type(tree) in (dict, list, tuple):
        for item in tree.values() if type(tree) is dict else tree:
            yield from _marks(item)


def put_back_spread(tree: dict[str, Any], optimizer: Any, folder: Path) -> dict[str, Any]:
    """An optimizer's tree as this process needs it: every tensor spread as its parameter is now, or whole.

    Args:
        tree: what `optimizer_tree` gave, of any number of processes; with marks, or without any.
        optimizer: the live one.
        folder: of the shards that marks stand for.

    Raises:
        CheckpointError: shards are missing or damaged, or state that is not spread as its parameter is, of another
            number of processes.
    """
    state = tree["state_dict"].get("state")
    is_live_spread = any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    shapes = {mark[_SPREAD]: mark["shape"] for mark in _marks(tree)}
    if state is None or not (is_live_spread or shapes):
        return tree
    there = read_shapes(folder, shapes)
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    targets: dict[str, torch.Tensor] = {}
    filled = {key: _place(value, parameters.get(key), there, targets) for key, value in state.items()}
    if targets:
        load_shards(targets, folder)
    return {**tree, "state_dict": {**tree["state_dict"], "state": filled}}


def _place(value: Any, like: Any, there: dict[str, Spread], targets: dict[str, torch.Tensor]) -> Any:
    if type(value) is dict and _SPREAD in value:
        name = value[_SPREAD]
        targets[name] = _make_target(name, there[name], like, value["dims"])
        return targets[name]
    if type(value) is dict:
        return {key: _place(item, like, there, targets) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_place(item, like, there, targets) for item in value)
    if isinstance(value, torch.Tensor) and isinstance(like, DTensor) and value.dim() > 0:
        if value.shape != like.shape:
            raise CheckpointError(_other_processes(f"of shape {tuple(value.shape)} of a parameter {tuple(like.shape)}"))
        return as_spread(value, like)
    return value


def _make_target(name: str, saved: Spread, like: Any, dims: list[int | None]) -> torch.Tensor:
    """An empty tensor for this process's part of one that was spread."""
    if not isinstance(like, DTensor):
        return torch.empty(saved.shape, dtype=saved.dtype, device=getattr(like, "device", "cpu"))
    if saved.shape == like.shape:
        return torch.empty_like(like, dtype=saved.dtype, requires_grad=False)
    if len(dims) != like.device_mesh.ndim:
        raise CheckpointError(_other_processes(name))
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    return empty(saved.shape, dtype=saved.dtype, device_mesh=like.device_mesh, placements=placements)


def _other_processes(what: str) -> str:
    return (
        f"Optimizer state {what} is not spread as its parameter is, and can only be loaded by processes like those "
        "that saved it: give the launcher the same config as before."
    )
