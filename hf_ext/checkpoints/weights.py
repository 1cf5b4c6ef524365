"""What a checkpoint holds of the model, and how it comes back: the same bits in every entry, or not at all.

| model | files beside its configuration |
|---|---|
| `AffinityModel`, `PreTrainedModel` | `model.safetensors`, in the names of the modules |
| `PeftModel` | `adapter_model.safetensors` per adapter; `trainable.safetensors`: what trains beside them, and buffers |
| from a pretrained base, half of its bytes or more frozen | `trainable.safetensors`: what trains, and buffers |
| any other module | `model.safetensors` |

Frozen weights are not stored but known by their hash (`frozen.json`), those of `AffinityModel`'s towers by the
fingerprints in its configuration. `trainable.safetensors` alone is not a model: `from_pretrained` finds no weights in
such a folder and refuses it, instead of filling the rest at random; an export is written by `Trainer.save_model`.

Weights are those of one process: models sharded by FSDP or DeepSpeed ZeRO-3 are gathered by the caller.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils.save_and_load import get_peft_model_state_dict
from torch import nn
from transformers import PreTrainedModel

from ..errors import CheckpointError
from ..models.affinity import AffinityModel
from ..models.configuration import AffinityConfig
from .frozen import FROZEN, check_frozen, describe_frozen, read_base, write_frozen
from .matching import check_entries, match_names
from .tensor_files import describe_names, find_file, first_names, read_json, read_shards, read_tensors, write_tensors

logger = logging.getLogger(__name__)

TRAINABLE = "trainable.safetensors"
MODEL_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
# Entries that a pretrained base may lack: adapters, and modules that are made at random where it has none. Frozen or
# not, they are small, and would hash differently under every seed; so they are stored.
BESIDE_BASE = re.compile(r"(^|\.)(lora_\w+|contact_head|pooler|original_module)\.")
SLACK_BYTES = 32 * 1024  # a model card, an adapter's configuration, generation settings, an index
HEADER_BYTES = 160  # safetensors' description of one tensor, without its name


def save_weights(model: Any, folder: Path | str) -> None:
    """Writes what `load_weights` needs into `folder`: see this module's table. No pickle.

    Cost: what is stored is written once; the first save also hashes what is frozen, about 1 s per GB and core.

    Raises:
        CheckpointError: an entry of the state dict is not a tensor.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, PeftModel):
        # PEFT's own "auto" asks the Hub on every save whether the vocabulary has grown. Embeddings that train are
        # among the trainable rest; those that do not are in the hash.
        model.save_pretrained(str(folder), save_embedding_layers=False)
        _save_part(model, folder)
    elif _is_part(model):
        model.config.save_pretrained(folder)
        _save_part(model, folder)
    elif isinstance(model, PreTrainedModel) and not _has_injected_adapters(model):
        # transformers 5.23 writes ESM's LayerNorms as gamma/beta, which a raw `load_state_dict` does not know
        # (https://github.com/huggingface/transformers/issues/43701).
        model.save_pretrained(str(folder), save_original_format=False)
    else:
        write_tensors(model.state_dict(keep_vars=True), folder / MODEL_FILES[0])
        if isinstance(model, PreTrainedModel):
            model.config.save_pretrained(folder)


def load_weights(model: Any, folder: Path | str) -> None:
    """Gives every entry of the model's state dict the value it had when the checkpoint was saved.

    Reads what `save_weights` writes, and the weights of stock checkpoints: sharded ones, `pytorch_model.bin`
    (tensors only: nothing in it is run), ESM's gamma/beta, adapters. Everything is checked before the first tensor of
    the model changes. An `AffinityModel` also gets the label scale that its head was trained with.

    Cost: reads the files; the first time also hashes what is frozen, about 1 s per GB and core.

    Raises:
        CheckpointError: files are missing, damaged or lead out of the folder; entries are missing, unexpected or of
            another shape or dtype; frozen weights or encoders are not those of the checkpoint.
    """
    folder = Path(folder)
    is_adapted = isinstance(model, PeftModel)
    tensors = _read_adapters(model, folder) if is_adapted else {}
    part = find_file(folder, TRAINABLE)
    if part:
        tensors.update(read_tensors(part))
    elif not is_adapted:
        tensors = _read_model(model, folder)
    split = _split(model)
    required = _required(model, split, folder, part is not None)
    state = model.state_dict(keep_vars=True)
    found, unexpected = match_names(state, tensors)
    if part:
        unexpected += [name for name in found if name not in required]
    check_entries(folder, state, found, unexpected, required)
    if part or (is_adapted and find_file(folder, FROZEN)):
        check_frozen(model, split.frozen, folder)
    elif is_adapted:
        logger.warning("%s has no %s: that its frozen weights are this model's is not checked.", folder, FROZEN)
    scale = _read_scale(model, folder) if isinstance(model, AffinityModel) else {}
    model.load_state_dict(found, strict=False)
    for name, value in scale.items():
        setattr(model.config, name, value)


def check_listed(folder: Path, listed: Container[str]) -> None:
    """Refuses weights that were put into a checkpoint later: `load_weights` would prefer them to those it verified.

    Args:
        listed: names of the files that the checkpoint's manifest vouches for.

    Raises:
        CheckpointError: there are such weights.
    """
    if TRAINABLE not in listed and find_file(folder, TRAINABLE):
        raise CheckpointError(f"{folder / TRAINABLE}: not in its manifest, so it was put there later. Remove it.")


def weights_bytes(model: Any) -> int:
    """Upper bound of the bytes of the files that `save_weights` writes. Cost: none; nothing is hashed."""
    split = _split(model)
    is_part = isinstance(model, PeftModel) or _is_part(model)
    named = split.stored if is_part else {**split.stored, **split.frozen}
    entries = first_names({name: tensor for name, tensor in named.items() if is_part or name not in _ignored(model)})
    if isinstance(model, PeftModel):
        for adapter in model.peft_config:
            written = _adapter_entries(model, adapter)
            entries.update({f"{adapter}.{name}": tensor for name, (_, tensor) in written.items()})
    total = sum(len(name) + HEADER_BYTES + tensor.nbytes for name, tensor in entries.items())
    if is_part:
        total += sum(len(name) + HEADER_BYTES for name in split.frozen)  # their hashes
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        total += len(config.to_json_string(use_diff=False).encode())
    return total + SLACK_BYTES * (1 + len(getattr(model, "peft_config", None) or ()))


def export_bytes(model: Any) -> int:
    """Upper bound of the bytes of the files that `Trainer.save_model` writes: frozen weights too, but for adapters."""
    if isinstance(model, PeftModel) or not _is_part(model):
        return weights_bytes(model)
    frozen = first_names(_split(model).frozen)
    return weights_bytes(model) + sum(tensor.nbytes for tensor in frozen.values())


def frozen_digest(model: Any) -> str:
    """sha256 over names, shapes, dtypes and bytes of the model's frozen weights that are in memory.

    Cost: about 1 s per GB and core, once per model; a weight changed in place or moved is hashed again.
    """
    return describe_frozen(model, _split(model).frozen)["sha256"]


@dataclass(frozen=True)
class _Split:
    """A model's state dict: what an adapter file holds, the rest of what a checkpoint holds, and what it does not."""

    adapted: set[str]
    stored: dict[str, Any]
    frozen: dict[str, torch.Tensor]


def _split(model: Any) -> _Split:
    adapted: set[str] = set()
    if isinstance(model, PeftModel):
        entries = [entry for adapter in model.peft_config for entry in _adapter_entries(model, adapter).values()]
        adapted = {name for name, _ in entries if name is not None}
    rest = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in adapted}
    frozen = {name: tensor for name, tensor in rest.items() if _is_frozen(name, tensor)}
    return _Split(adapted, {name: tensor for name, tensor in rest.items() if name not in frozen}, frozen)


def _is_frozen(name: str, tensor: Any) -> bool:
    never_trains = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return never_trains and not BESIDE_BASE.search(name)


def _save_part(model: Any, folder: Path) -> None:
    split = _split(model)
    if split.stored:
        write_tensors(split.stored, folder / TRAINABLE)
    write_frozen(model, split.frozen, folder)


def _is_part(model: Any) -> bool:
    """Whether only what trains is stored: there is a base to take the rest from, and the rest is most of the model."""
    if not isinstance(model, PreTrainedModel) or (isinstance(model, AffinityModel) and not model.config.save_full):
        return False
    if not read_base(model)["name_or_path"] and not isinstance(model, AffinityModel):
        return False
    parameters = list(model.parameters())
    frozen = sum(parameter.nbytes for parameter in parameters if not parameter.requires_grad)
    return 0 < sum(parameter.nbytes for parameter in parameters) <= 2 * frozen


def _adapter_entries(model: PeftModel, adapter: str) -> dict[str, tuple[str | None, torch.Tensor]]:
    """Name in the adapter's file -> name in the state dict, None for what PEFT computes from others; and tensor."""
    state = model.state_dict()
    names = {id(tensor): name for name, tensor in state.items()}
    # PEFT renames entries but hands the tensors of `state` through, which tells where each came from.
    written = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter, save_embedding_layers=False)
    return {name: (names.get(id(tensor)), tensor) for name, tensor in written.items()}


def _has_injected_adapters(model: PreTrainedModel) -> bool:
    """Whether `save_pretrained` would write adapters alone, and of those only the active one."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def _ignored(model: Any) -> set[str]:
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def _required(model: Any, split: _Split, folder: Path, is_part: bool) -> set[str]:
    """Entries that the checkpoint must have."""
    if not isinstance(model, PeftModel):
        return set(split.stored) if is_part else {*split.stored, *split.frozen} - _ignored(model)
    is_stock = not find_file(folder, FROZEN)  # adapters alone: no buffers, nor the untrained twins of trained heads
    rest = [name for name, t in split.stored.items() if not is_stock or getattr(t, "requires_grad", False)]
    return split.adapted.union(rest)


def _read_model(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    for name in MODEL_FILES:
        path = find_file(folder, name)
        if path:
            return read_shards(folder, name) if name.endswith(".json") else read_tensors(path)
    if any(find_file(folder, name) for name in ADAPTER_FILES):
        raise CheckpointError(
            f"{folder} holds adapters, but {type(model).__name__} is no PeftModel: resume with --use_peft, as it began."
        )
    raise CheckpointError(f"{folder} holds no weights: none of {', '.join((TRAINABLE, *MODEL_FILES))}.")


def _read_adapters(model: PeftModel, folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of all adapters under the names of the state dict; unknown ones keep the names of their file."""
    there = _adapters_in(folder)
    if there != set(model.peft_config):
        raise CheckpointError(
            f"{folder} holds adapters {sorted(there)}, this model has {sorted(model.peft_config)}. Build the model "
            "with the same ones."
        )
    tensors: dict[str, torch.Tensor] = {}
    for adapter in model.peft_config:
        entries = _adapter_entries(model, adapter)
        path = next(path for name in ADAPTER_FILES if (path := find_file(folder, *_below(adapter), name)))
        for name, tensor in read_tensors(path).items():
            own = entries[name][0] if name in entries else name
            if own is not None:  # else computed by PEFT from what is in trainable.safetensors
                tensors[own] = tensor
    return tensors


def _adapters_in(folder: Path) -> set[str]:
    places: Iterable[str] = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else ()
    return {
        adapter
        for adapter in ("default", *places)
        if any(find_file(folder, *_below(adapter), name) for name in ADAPTER_FILES)
    }


def _below(adapter: str) -> tuple[str, ...]:
    """The folder in which PEFT saves an adapter."""
    return () if adapter == "default" else (adapter,)


def _read_scale(model: AffinityModel, folder: Path) -> dict[str, Any]:
    """The label scale; refuses a checkpoint whose encoders are others, by their fingerprints."""
    path = find_file(folder, "config.json")
    if path is None:
        raise CheckpointError(f"{folder / 'config.json'}: missing; it names the encoders and the label scale.")
    config = read_json(path)
    saved, own = config.get("encoders") or [], model.config.encoders or []
    changed = [] if len(saved) == len(own) else [f"{len(saved)} encoders, this model has {len(own)}"]
    for index, (old, new) in enumerate(zip(saved, own)):
        for key in ("fingerprint", "training", "lora"):
            before, now = (json.loads(json.dumps(spec.get(key))) for spec in (old, new))
            if before != now:
                changed.append(f"encoder {index} ({new.get('name_or_path')}): {key} {before}, now {now}")
    if changed:
        raise CheckpointError(f"{folder} was trained with {describe_names(changed)}. Use the same encoders.")
    # A configuration file leaves out what is as the class has it.
    return {name: config.get(name, getattr(AffinityConfig, name)) for name in ("label_mean", "label_std", "is_scaled")}
