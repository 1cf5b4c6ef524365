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

Where the user's class writes weights of its own choice into a checkpoint, these files lie in `trainer_weights/`.

Of models that FSDP2 spreads over processes see `sharded_weights.py`; `load_weights` reads those too. What DeepSpeed
spreads, it writes itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from ...errors import CheckpointError
from ...models.affinity import AffinityModel
from ...models.configuration import AffinityConfig
from ..format.shards import is_spread, load_shards, own_slice
from ..format.tensor_files import (
    describe_names,
    find_file,
    first_names,
    read_json,
    read_shards,
    read_tensors,
    write_tensors,
)
from .entry_matching import check_entries, match_names
from .frozen_weights import FROZEN, check_frozen, describe_frozen, write_frozen
from .own_loader import has_own_loader, load_by_own
from .sharded_weights import SHARDED, WEIGHTS, find_unlisted, read_sharded, sharded_entries
from .weight_entries import (
    Split,
    adapter_entries,
    adapter_folder,
    has_injected_adapters,
    ignored_entries,
    split_entries,
    stores_part,
)

logger = logging.getLogger(__name__)

TRAINABLE = "trainable.safetensors"
TRAINER_WEIGHTS = "trainer_weights"  # folder, where the user's class fills the checkpoint's own with other weights
MODEL_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
SLACK_BYTES = 32 * 1024  # a model card, an adapter's configuration, generation settings, an index
HEADER_BYTES = 160  # safetensors' description of one tensor, without its name


def stored_model(model: Any) -> Any:
    """The model whose entries checkpoints hold: as it trains, but not the wrapper that torch.compile makes."""
    return getattr(model, "_orig_mod", model)


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
        _save_part(model, folder, adapters=[*model.peft_config])
    elif stores_part(model):
        model.config.save_pretrained(folder)
        _save_part(model, folder)
    elif isinstance(model, PreTrainedModel) and not has_injected_adapters(model):
        # transformers 5.23 writes ESM's LayerNorms as gamma/beta, which a raw `load_state_dict` does not know
        # (https://github.com/huggingface/transformers/issues/43701).
        model.save_pretrained(str(folder), save_original_format=False)
    else:
        write_tensors(model.state_dict(keep_vars=True), folder / MODEL_FILES[0])
        if isinstance(model, PreTrainedModel):
            model.config.save_pretrained(folder)


def remember_frozen(model: Any) -> None:
    """Hashes what a checkpoint will leave out, for when the model is spread over processes (FSDP2), which cannot.

    Cost: about 1 s per GB and core; nothing where nothing is left out, or the model is spread already.
    """
    is_whole = not any(map(is_spread, model.parameters()))
    if is_whole and (isinstance(model, PeftModel) or stores_part(model)):
        describe_frozen(model, split_entries(model).frozen)


def keep_source_digests(model: Any) -> None:
    """Hashes frozen weights before they are rounded, so that checkpoints know them by what they were made from.

    Cost: as `remember_frozen`.
    """
    model._source_digests = describe_frozen(model, split_entries(model).frozen)["tensors"]


def load_weights(model: Any, folder: Path | str, checks_frozen: bool = True) -> None:
    """Gives every entry of the model's state dict the value it had when the checkpoint was saved.

    Reads what `save_weights` writes, and the weights of stock checkpoints: sharded ones, `pytorch_model.bin`
    (tensors only: nothing in it is run), ESM's gamma/beta, adapters. Everything is checked before the first tensor of
    the model changes. An `AffinityModel` also gets the label scale that its head was trained with. A model that is
    spread over processes (FSDP2) gets each process's part; a checkpoint of such a run loads anywhere.

    Args:
        model: as it trains, or will.
        folder: of the checkpoint.
        checks_frozen: whether to compare frozen weights with those of the checkpoint. Where they are spread, only a
            process that hashed them while they were whole can.

    Cost: reads the files, of shards only what this process needs; the first time also hashes what is frozen, about
    1 s per GB and core.

    Raises:
        CheckpointError: files are missing, damaged or lead out of the folder; entries are missing, unexpected or of
            another shape or dtype; frozen weights or encoders are not those of the checkpoint.
    """
    folder = Path(folder)
    is_adapted = isinstance(model, PeftModel)
    tensors, is_part = _read_entries(model, folder)
    if has_own_loader(model) and not is_part and not find_file(folder, SHARDED):
        load_by_own(model, tensors, folder)
        return
    split = split_entries(model)
    required = _required(model, split, folder, is_part)
    state = model.state_dict(keep_vars=True)
    found, unexpected = match_names(state, tensors)
    if is_part:
        unexpected += [name for name in found if name not in required]
    check_entries(folder, state, found, unexpected, required)
    if (is_part or (is_adapted and find_file(folder, FROZEN))) and checks_frozen:
        check_frozen(model, split.frozen, folder)
    elif is_adapted and checks_frozen:
        logger.warning("%s has no %s: that its frozen weights are this model's is not checked.", folder, FROZEN)
    scale = _read_scale(model, folder) if isinstance(model, AffinityModel) else {}
    _fill(model, state, found, folder)
    for name, value in scale.items():
        setattr(model.config, name, value)


def _read_entries(model: Any, folder: Path) -> tuple[dict[str, torch.Tensor], bool]:
    """Tensors by name, those in shards without values; and whether the checkpoint leaves out what is frozen."""
    if find_file(folder, SHARDED):
        return sharded_entries(folder), bool(read_sharded(folder)["is_part"])
    is_adapted = isinstance(model, PeftModel)
    tensors = _read_adapters(model, folder) if is_adapted else {}
    part = find_file(folder, TRAINABLE)
    if part:
        tensors.update(read_tensors(part))
    elif not is_adapted:
        tensors = _read_model(model, folder)
    return tensors, part is not None


def _fill(model: Any, state: dict[str, Any], found: dict[str, torch.Tensor], folder: Path) -> None:
    """Gives the entries of `state` their values; where they are spread over processes, this process's part."""
    if find_file(folder, SHARDED):
        load_shards({name: state[name] for name in found}, folder / WEIGHTS)
    elif any(map(is_spread, state.values())):
        with torch.no_grad():
            for name, tensor in found.items():
                own = state[name].to_local() if is_spread(state[name]) else state[name]
                own.copy_(own_slice(tensor, state[name]))
    else:
        model.load_state_dict(found, strict=False)


def check_listed(folder: Path, listed: Container[str]) -> None:
    """Refuses weights that were put into a checkpoint later: `load_weights` would prefer them to those it verified.

    Args:
        listed: names of the files that the checkpoint's manifest vouches for.

    Raises:
        CheckpointError: there are such weights.
    """
    if TRAINABLE not in listed and find_file(folder, TRAINABLE):
        raise CheckpointError(f"{folder / TRAINABLE}: not in its manifest, so it was put there later. Remove it.")
    for name in find_unlisted(folder, listed):
        raise CheckpointError(f"{folder / name}: not in its manifest, so it was put there later. Remove it.")


def weights_bytes(model: Any) -> int:
    """Upper bound of the bytes of the files that `save_weights` writes. Cost: none; nothing is hashed."""
    split = split_entries(model)
    is_part = isinstance(model, PeftModel) or stores_part(model)
    named = split.stored if is_part else {**split.stored, **split.frozen}
    entries = first_names(
        {name: tensor for name, tensor in named.items() if is_part or name not in ignored_entries(model)}
    )
    if isinstance(model, PeftModel):
        for adapter in model.peft_config:
            written = adapter_entries(model, adapter)
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
    if isinstance(model, PeftModel) or not stores_part(model):
        return weights_bytes(model)
    frozen = first_names(split_entries(model).frozen)
    return weights_bytes(model) + sum(tensor.nbytes for tensor in frozen.values())


def _save_part(model: Any, folder: Path, **facts: Any) -> None:
    split = split_entries(model)
    if split.stored:
        write_tensors(split.stored, folder / TRAINABLE)
    write_frozen(model, split.frozen, folder, **facts)


def _required(model: Any, split: Split, folder: Path, is_part: bool) -> set[str]:
    """Entries that the checkpoint must have."""
    if not isinstance(model, PeftModel):
        return set(split.stored) if is_part else {*split.stored, *split.frozen} - ignored_entries(model)
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
        entries = adapter_entries(model, adapter)
        path = next(path for name in ADAPTER_FILES if (path := find_file(folder, *adapter_folder(adapter), name)))
        for name, tensor in read_tensors(path).items():
            own = entries[name][0] if name in entries else name
            if own is not None:  # else computed by PEFT from what is in trainable.safetensors
                tensors[own] = tensor
    return tensors


def _adapters_in(folder: Path) -> set[str]:
    frozen = find_file(folder, FROZEN)
    named = read_json(frozen).get("adapters") if frozen else None
    if isinstance(named, list):  # there may be more that a callback of the user's put there
        return {*named}
    places: Iterable[str] = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else ()
    return {
        adapter
        for adapter in ("default", *places)
        if any(find_file(folder, *adapter_folder(adapter), name) for name in ADAPTER_FILES)
    }


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
