"""What a checkpoint holds of a model that is spread over processes (FSDP2): the entries `weights.py` names, in shards.

| file | holds |
|---|---|
| `sharded.json` | shapes, number of processes, whether frozen weights are left out, an adapter's own names |
| `sharded_weights/`, `sharded_optimizer/` | each process's parts, see `shards.py`; weights by the modules' names |
| `config.json`, `adapter_config.json`, `frozen.json` | as in other checkpoints |

`merging.py` makes plain files of it, which `from_pretrained` reads.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ...errors import CheckpointError
from ..format.shards import read_shapes, save_shards
from ..format.tensor_files import first_names, read_json
from .frozen_weights import write_frozen
from .weight_entries import adapter_entries, adapter_folder, ignored_entries, split_entries, stores_part

SHARDED = "sharded.json"
WEIGHTS, OPTIMIZER = "sharded_weights", "sharded_optimizer"
FORMAT = 1


def unsharded_class(model: Any) -> type:
    """The class that a model had before FSDP2 put its own in front."""
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


def describe_sharded(model: Any, folder: Path, num_processes: int) -> None:
    """Writes what belongs to the shards: `sharded.json`, configuration, hashes of frozen weights. One process does.

    Raises:
        CheckpointError: frozen weights are left out and were never hashed, see `describe_frozen`.
    """
    adapters: dict[str, Any] = {}
    if isinstance(model, PeftModel):
        for name, adapter in model.peft_config.items():
            adapters[name] = {entry: own for entry, (own, _) in adapter_entries(model, name).items() if own is not None}
            saved = copy.deepcopy(adapter)
            saved.inference_mode = True  # as PEFT writes it
            saved.save_pretrained(str(folder.joinpath(*adapter_folder(name))))
    elif isinstance(model, PreTrainedModel):
        config = copy.deepcopy(model.config)
        config.architectures = [unsharded_class(model).__name__]
        config.save_pretrained(folder)
    is_part = isinstance(model, PeftModel) or stores_part(model)
    if is_part:
        write_frozen(model, split_entries(model).frozen, folder)
    shapes = {name: list(tensor.shape) for name, tensor in _stored_tensors(model).items()}
    content = {"format": FORMAT, "num_processes": num_processes, "is_part": is_part, "adapters": adapters}
    content["shapes"] = shapes
    (folder / SHARDED).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def save_sharded_weights(model: Any, folder: Path) -> None:
    """Writes this process's parts of what is to be stored. All processes call it; raises as `save_shards`."""
    save_shards(_stored_tensors(model), folder / WEIGHTS)


def _stored_tensors(model: Any) -> dict[str, torch.Tensor]:
    """By name, of tied weights the first; spread ones as they are."""
    split, state = split_entries(model), model.state_dict(keep_vars=True)
    if isinstance(model, PeftModel) or stores_part(model):
        names = {*split.adapted, *split.stored}
    else:
        names = {*split.stored, *split.frozen} - ignored_entries(model)
    return first_names({name: tensor for name, tensor in state.items() if name in names})


def read_sharded(folder: Path) -> dict[str, Any]:
    """`sharded.json`.

    Raises:
        CheckpointError: missing, damaged, or of a later version.
    """
    content = read_json(folder / SHARDED)
    if content.get("format") != FORMAT or not {"is_part", "adapters", "shapes"} <= content.keys():
        raise CheckpointError(f"{folder / SHARDED}: expected format {FORMAT}, found {content.get('format')!r}.")
    return content


def sharded_entries(folder: Path) -> dict[str, torch.Tensor]:
    """Name -> shape and dtype of every stored entry, as a tensor without values. Raises as `read_shapes`."""
    spread = read_shapes(folder / WEIGHTS, read_sharded(folder)["shapes"])
    return {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in spread.items()}


def find_unlisted(folder: Path, listed: Any) -> list[str]:
    """Files that would be read as shards but are not among `listed`, the manifest's."""
    places = [folder / SHARDED, *(file for part in (WEIGHTS, OPTIMIZER) for file in (folder / part).glob("*"))]
    names = [place.relative_to(folder).as_posix() for place in places if place.exists() or place.is_symlink()]
    return [name for name in names if name not in listed]
