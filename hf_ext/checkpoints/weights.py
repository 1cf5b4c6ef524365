"""What a checkpoint holds of the model where stock Trainer would write too much, or could not read it back.

| model | files beside its configuration |
|---|---|
| `AffinityModel`, `PreTrainedModel`, any other module | `model.safetensors`, in the names of the modules |
| `PeftModel` | `adapter_model.safetensors` per adapter, with what the user let train beside it |
| from a pretrained base, half of its bytes or more frozen | `trainable.safetensors`: what trains, and buffers |

Frozen weights that are not stored are known by their hash (`frozen.json`). `trainable.safetensors` alone is not a
model: `from_pretrained` finds no weights in such a folder and refuses it, instead of filling the rest at random.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils.save_and_load import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from ..errors import CheckpointError
from ..models.affinity import AffinityModel
from ..models.configuration import AffinityConfig
from ..models.quantization import quantized_weights
from .frozen_weights import FROZEN, check_frozen, describe_frozen, read_base, write_frozen
from .tensor_files import describe_names, first_names, identity, read_json, read_tensors, write_tensors

TRAINABLE = "trainable.safetensors"
MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"
SLACK_BYTES = 32 * 1024  # a model card, an adapter's configuration, generation settings, an index
HEADER_BYTES = 160  # safetensors' description of one tensor, without its name

# Entries that a pretrained base may lack: adapters, and modules that are made at random where it has none. Frozen or
# not, they are small, and would hash differently under every seed; so they are stored.
BESIDE_BASE = re.compile(r"(^|\.)(lora_\w+|contact_head|pooler|original_module)\.")


# --- which entries --------------------------------------------------------------------------------------------------


def stores_part(model: Any) -> bool:
    """Whether only what trains is stored: there is a base to take the rest from, and the rest is most of the model."""
    if not isinstance(model, PreTrainedModel) or (isinstance(model, AffinityModel) and not model.config.save_full):
        return False
    if not read_base(model)["name_or_path"] and not isinstance(model, AffinityModel):
        return False
    parameters = list(model.parameters())
    frozen = sum(parameter.nbytes for parameter in parameters if not parameter.requires_grad)
    return 0 < sum(parameter.nbytes for parameter in parameters) <= 2 * frozen


def frozen_entries(model: Any) -> dict[str, torch.Tensor]:
    """Entries of the state dict that never train, by name; layers in 8 or 4 bits by what they were made from."""
    state = {**model.state_dict(keep_vars=True), **quantized_weights(model)}
    never_train = {name: p for name, p in state.items() if isinstance(p, nn.Parameter) and not p.requires_grad}
    return {name: parameter for name, parameter in never_train.items() if not BESIDE_BASE.search(name)}


def stored_entries(model: Any) -> dict[str, torch.Tensor]:
    """The others: what `trainable.safetensors` holds."""
    frozen = frozen_entries(model)
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in frozen}


def keep_source_digests(model: Any) -> None:
    """Hashes frozen weights before they are rounded, so that checkpoints know them by what they were made from.

    Cost: about 1 s per GB and core.
    """
    model._source_digests = describe_frozen(model, frozen_entries(model))["tensors"]


# --- writing --------------------------------------------------------------------------------------------------------


def save_weights(
    model: Any, folder: Path, state_dict: dict[str, Any] | None = None, is_checkpoint: bool = True
) -> None:
    """Writes weights and configuration; see this module's table. Of a model folder that is no checkpoint, all weights.

    Args:
        model: a `PreTrainedModel` or `PeftModel`.
        state_dict: whole weights where they are spread over processes.

    Cost: what is stored is written once; the first time also hashes what a checkpoint leaves out, 1 s per GB and core.
    """
    if is_checkpoint and stores_part(model):
        folder.mkdir(parents=True, exist_ok=True)
        model.config.save_pretrained(folder)
        write_tensors(stored_entries(model), folder / TRAINABLE)
    elif isinstance(model, PeftModel):
        # PEFT's own "auto" asks the Hub on every save whether the vocabulary has grown.
        embeddings: dict[str, Any] = {"save_embedding_layers": False} if is_checkpoint else {}
        model.save_pretrained(str(folder), state_dict=state_dict, **embeddings)
        _add_unfrozen(model, folder, state_dict)
    else:
        # transformers 5.24 writes ESM's LayerNorms as gamma/beta, which `Trainer`'s raw `load_state_dict` then drops
        # (https://github.com/huggingface/transformers/issues/43701). Remove when a resumed ESM keeps its LayerNorms.
        model.save_pretrained(str(folder), state_dict=state_dict, save_original_format=False)
        return
    if is_checkpoint:
        write_frozen(model, frozen_entries(model), folder)


def _add_unfrozen(model: PeftModel, folder: Path, state_dict: dict[str, Any] | None) -> None:
    """Weights that the user let train beside the adapters: PEFT leaves them out of its files, and reads them there.

    Under their own names, as PEFT itself adds embeddings.
    """
    state = model.state_dict()
    written = {id(t) for a in model.peft_config for t in get_peft_model_state_dict(model, state, a).values()}
    # What is outside of the base trains to make what PEFT stores: the encoder of prompts.
    names = [n for n, p in model.named_parameters() if p.requires_grad and n.startswith("base_model.")]
    entries = {name: (state_dict or state)[name] for name in sorted(names) if id(state.get(name)) not in written}
    for path in folder.rglob(ADAPTER) if entries else ():
        write_tensors({**entries, **read_tensors(path)}, path)


# --- loading --------------------------------------------------------------------------------------------------------


def load_weights(model: Any, folder: Path) -> bool:
    """Loads what stock Trainer cannot read back; False, and nothing done, where it can.

    So what trains of a model that is mostly frozen, ESM under the names of its original format, which a stock run has
    written, and adapters, of which Trainer also takes those that others put into folders of the checkpoint. In any
    case, frozen weights are compared with the checkpoint's.

    Raises:
        CheckpointError: they are others, or entries are missing, unexpected or of another shape.
    """
    if (folder / FROZEN).is_file():
        check_frozen(model, frozen_entries(model), folder)
    if (folder / TRAINABLE).is_file():
        own = stored_entries(model)
        check_loaded(model, folder, model.load_state_dict(read_tensors(folder / TRAINABLE), strict=False), own)
    elif isinstance(model, PeftModel) and all(path.is_file() for path in _adapter_files(model, folder).values()):
        for adapter, path in _adapter_files(model, folder).items():
            of_adapter = [name for name in model.state_dict() if f".{adapter}." in name]
            outcome = set_peft_model_state_dict(model, read_tensors(path), adapter_name=adapter)
            check_loaded(model, folder, outcome, of_adapter)
    elif (folder / MODEL).is_file() and _has_original_names(model, folder / MODEL):
        renamed = {_modern(name): tensor for name, tensor in read_tensors(folder / MODEL).items()}
        check_loaded(model, folder, model.load_state_dict(renamed, strict=False))
    else:
        return False
    return True


def check_loaded(model: Any, folder: Path | str, outcome: Any, required: Any = None) -> None:
    """Refuses what `load_state_dict` took in part, where Trainer would go on with a line in the log.

    Args:
        outcome: what it returned. required: names that must have been there; None: all.
    """
    missing, unexpected = getattr(outcome, "missing_keys", ()), getattr(outcome, "unexpected_keys", ())
    state = model.state_dict(keep_vars=True)
    loaded = {identity(name, tensor) for name, tensor in state.items() if name not in missing}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    lacking = [
        name
        for name in missing
        if name in (state if required is None else required) and name not in ignored
        if identity(name, state[name]) not in loaded  # tied to one that was there
    ]
    if lacking or unexpected:
        problems = [f"missing: {describe_names(lacking)}"] if lacking else []
        problems += [f"not in this model: {describe_names(list(unexpected))}"] if unexpected else []
        raise CheckpointError(
            f"{folder} does not fit this model.\n  " + "\n  ".join(problems) + "\nBuild the model with the arguments "
            "that the checkpoint was trained with: same class, sizes, and parts that train."
        )


def load_scale(model: Any, folder: Path) -> None:
    """Gives an `AffinityModel` the label scale that its head was trained with; it stands in the configuration."""
    path = folder / "config.json"
    if isinstance(model, AffinityModel) and path.is_file():
        config = read_json(path)
        for name in ("label_mean", "label_std", "is_scaled"):  # a configuration leaves out what is as the class has it
            setattr(model.config, name, config.get(name, getattr(AffinityConfig, name)))


def _adapter_files(model: PeftModel, folder: Path) -> dict[str, Path]:
    return {name: (folder if name == "default" else folder / name) / ADAPTER for name in model.peft_config}


def _has_original_names(model: Any, path: Path) -> bool:
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
    known = set(model.state_dict())
    return any(name not in known and _modern(name) in known for name in names)


def _modern(name: str) -> str:
    """What an entry of ESM in its original format is called here."""
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return re.sub(r"encoder\.layer\.(\d+|\*)\.attention\.self\.rotary_embeddings\.", "rotary_embeddings.", name)


# --- sizes ----------------------------------------------------------------------------------------------------------


def weights_bytes(model: Any) -> int:
    """Upper bound of the bytes of what `save_weights` writes into a checkpoint. Cost: none; nothing is hashed."""
    is_part = isinstance(model, PeftModel) or stores_part(model)
    entries = first_names(stored_entries(model) if is_part else model.state_dict(keep_vars=True))
    total = sum(len(name) + HEADER_BYTES + tensor.nbytes for name, tensor in entries.items())
    if is_part:
        total += sum(len(name) + HEADER_BYTES for name in frozen_entries(model))  # their hashes
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        total += len(config.to_json_string(use_diff=False).encode())
    return total + SLACK_BYTES * (1 + len(getattr(model, "peft_config", None) or ()))


def export_bytes(model: Any) -> int:
    """Upper bound of the bytes of what `Trainer.save_model` writes: frozen weights too, but for adapters."""
    if isinstance(model, PeftModel) or not stores_part(model):
        return weights_bytes(model)
    return weights_bytes(model) + sum(tensor.nbytes for tensor in first_names(frozen_entries(model)).values())
