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

import hashlib
import os
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils.save_and_load import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import CheckpointError
from ..labels import list_some
from ..models import AffinityConfig, AffinityModel, unwrap_peft
from ..text import write_json
from .manifest import read_json

TRAINABLE = "trainable.safetensors"
FROZEN = "frozen.json"
MODEL = "model.safetensors"
ADAPTER = "adapter_model.safetensors"

# Entries that a pretrained base may lack: adapters, and modules that are made at random where it has none. Frozen or
# not, they are small, and would hash differently under every seed; so they are stored.
BESIDE_BASE = re.compile(r"(^|\.)(lora_\w+|contact_head|pooler|original_module)\.")
Tensors = dict[str, Tensor]  # by name
_ROUNDED = (torch.bfloat16, torch.float16, torch.int8, torch.uint8)


# --- which entries --------------------------------------------------------------------------------------------------


def stores_part(model: nn.Module) -> bool:
    """Returns whether only what trains is stored: the rest has a base to come from, and is most of the model."""
    if not isinstance(model, PreTrainedModel) or (isinstance(model, AffinityModel) and not model.config.save_full):
        return False
    if not read_base(model)["name_or_path"] and not isinstance(model, AffinityModel):
        return False
    parameters = list(model.parameters())
    frozen = sum(parameter.nbytes for parameter in parameters if not parameter.requires_grad)
    return 0 < sum(parameter.nbytes for parameter in parameters) <= 2 * frozen


def read_base(model: nn.Module) -> dict[str, Any]:
    """Returns where frozen weights came from: Hub id or folder ("" if made from a configuration) and commit."""
    base = unwrap_peft(model)
    revision = getattr(getattr(base, "config", None), "_commit_hash", None)
    return {"name_or_path": str(getattr(base, "name_or_path", "") or ""), "revision": revision}


def frozen_entries(model: nn.Module) -> Tensors:
    """Returns entries of the state dict that never train, by name.

    Layers in 8 or 4 bits by what they were made from.
    """
    state = model.state_dict(keep_vars=True)
    never_train = {name: p for name, p in state.items() if isinstance(p, nn.Parameter) and not p.requires_grad}
    return {name: parameter for name, parameter in never_train.items() if not BESIDE_BASE.search(name)}


def stored_entries(model: nn.Module) -> Tensors:
    """Returns the others: what `trainable.safetensors` holds."""
    frozen = frozen_entries(model)
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in frozen}


# --- writing --------------------------------------------------------------------------------------------------------


def save_weights(model: PreTrainedModel | PeftModel, folder: Path, state_dict: Tensors | None = None) -> None:
    """Writes all weights and the configuration of a `PreTrainedModel` or `PeftModel`, as for a model folder.

    Args:
        state_dict: whole weights where they are sharded over processes.
    """
    if isinstance(model, PeftModel):
        model.save_pretrained(str(folder), state_dict=state_dict)
        _add_unfrozen(model, folder, state_dict)
    else:
        # transformers 5.24 writes ESM's LayerNorms as gamma/beta, which `Trainer`'s raw `load_state_dict` then drops
        # (https://github.com/huggingface/transformers/issues/43701). Remove when a resumed ESM keeps its LayerNorms.
        model.save_pretrained(str(folder), state_dict=state_dict, save_original_format=False)


def save_checkpoint_weights(
    model: PreTrainedModel | PeftModel, folder: Path, state_dict: Tensors | None = None
) -> None:
    """Saves the same for a checkpoint: without what is frozen, of which it holds the hash; see this module's table.

    Cost: what is stored is written once; the first time also hashes what a checkpoint leaves out, 1 s per GB and core.
    """
    if stores_part(model):
        folder.mkdir(parents=True, exist_ok=True)
        model.config.save_pretrained(folder)
        _write_tensors(stored_entries(model), folder / TRAINABLE)
    elif isinstance(model, PeftModel):
        # PEFT's own "auto" asks the Hub on every save whether the vocabulary has grown.
        settings: dict[str, Any] = {"save_embedding_layers": False}
        model.save_pretrained(str(folder), state_dict=state_dict, **settings)
        _add_unfrozen(model, folder, state_dict)
    else:
        save_weights(model, folder, state_dict)
        return
    write_json(folder / FROZEN, {**read_base(model), "tensors": _digest_frozen(model)})


def _add_unfrozen(model: PeftModel, folder: Path, state_dict: Tensors | None) -> None:
    """Adds weights that the user let train beside the adapters: PEFT leaves them out of its files.

    Under their own names, as PEFT itself adds embeddings.
    """
    state = model.state_dict()
    written = {id(t) for a in model.peft_config for t in get_peft_model_state_dict(model, state, a).values()}
    # What is outside of the base trains to make what PEFT stores: the encoder of prompts.
    names = [n for n, p in model.named_parameters() if p.requires_grad and n.startswith("base_model.")]
    entries = {name: (state_dict or state)[name] for name in sorted(names) if id(state.get(name)) not in written}
    for path in folder.rglob(ADAPTER) if entries else ():
        _write_tensors({**entries, **_read_tensors(path)}, path)


def _write_tensors(tensors: Tensors, path: Path) -> None:
    """Writes safetensors, which takes no storage twice; of names for the same tensor, the first."""
    once = {name: tensor.detach().clone().contiguous() for name, tensor in drop_ties(tensors).items()}
    save_file(once, path, metadata={"format": "pt"})


def drop_ties(tensors: Tensors) -> Tensors:
    """Returns `tensors`, of a state dict with `keep_vars`, without further names for tied weights."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    return {name: tensors[name] for name in first.values()}


# --- frozen weights -------------------------------------------------------------------------------------------------


def keep_source_digests(model: Any) -> None:
    """Hashes frozen weights before they are rounded, so that checkpoints know them by what they were made from.

    Cost: about 1 s per GB and core.
    """
    model._source_digests = _digest_frozen(model)


def _digest_frozen(model: Any) -> dict[str, str]:
    """Hashes each frozen tensor by sha256; keeps the hashes on the model until one changes.

    Cost: reads every byte once, about 1 s per GB and core; a change through `.data` is not noticed.
    """
    tensors = drop_ties(frozen_entries(model))
    key = [(name, id(tensor), tensor.data_ptr(), tensor._version) for name, tensor in tensors.items()]
    kept = getattr(model, "_frozen_digests", None)
    if kept and kept[0] == key:
        return kept[1]
    # Of weights that were rounded in memory, those of what they were rounded from.
    sources = getattr(model, "_source_digests", {})
    rounded = {name: sources[name] for name, t in tensors.items() if name in sources and t.dtype in _ROUNDED}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = dict(zip(tensors, pool.map(lambda name: rounded.get(name) or _digest(tensors[name]), tensors)))
    model._frozen_digests = (key, digests)
    return digests


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype}{[*tensor.shape]}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_frozen(model: nn.Module, folder: Path) -> None:
    """Refuses frozen weights that are not those that the checkpoint was trained on."""
    saved = read_json(folder / FROZEN)
    now = _digest_frozen(model)
    before = saved["tensors"]  # which the manifest vouches for
    others = [name for name in {**now, **before} if now.get(name) != before.get(name)]
    if not others:
        return
    base = f"{saved['name_or_path'] or 'unknown'}@{saved['revision'] or 'no revision'}"
    raise CheckpointError(
        f"{folder} was trained on other frozen weights than this model has: {list_some(others)}. Nothing was loaded. "
        f"The checkpoint does not hold them: build the model on the same base ({base}), with the same seed if parts of "
        "it are made at random."
    )


# --- loading --------------------------------------------------------------------------------------------------------


def load_weights(model: nn.Module, folder: Path) -> bool:
    """Loads the weights of a checkpoint, also of stock Trainer; False, and nothing done, where they lie elsewhere.

    What stock Trainer would go on without is refused, and it could not read what trains of a model that is mostly
    frozen, nor ESM under the names of its original format, which a stock run has written; of adapters it would also
    take those that others put into folders of the checkpoint. Frozen weights are compared with the checkpoint's.

    Raises:
        CheckpointError: they are others, or entries are missing, unexpected or of another shape.
    """
    if (folder / FROZEN).is_file():
        _check_frozen(model, folder)
    try:
        is_loaded = _load(model, folder)
    except RuntimeError as error:  # of torch, which names tensors of another size
        raise CheckpointError(f"{folder} does not fit this model: {error}") from error
    config = folder / "config.json"
    if isinstance(model, AffinityModel) and config.is_file():  # the scale that its head was trained with
        saved = read_json(config)
        for name in ("label_mean", "label_std", "is_scaled"):  # a configuration leaves out what is as the class has it
            setattr(model.config, name, saved.get(name, getattr(AffinityConfig, name)))
    return is_loaded


def _load(model: nn.Module, folder: Path) -> bool:
    if (folder / TRAINABLE).is_file():
        outcome = model.load_state_dict(_read_tensors(folder / TRAINABLE), strict=False)
        _check_loaded(model, folder, outcome, stored_entries(model))
        return True
    if isinstance(model, PeftModel):
        files = {name: (folder if name == "default" else folder / name) / ADAPTER for name in model.peft_config}
        if not all(path.is_file() for path in files.values()):
            return False
        for adapter, path in files.items():
            outcome = set_peft_model_state_dict(model, _read_tensors(path), adapter_name=adapter)
            _check_loaded(model, folder, outcome, [name for name in model.state_dict() if f".{adapter}." in name])
        return True
    if not (folder / MODEL).is_file():
        return False
    known = model.state_dict()
    tensors = {n if n in known else _modern(n): t for n, t in _read_tensors(folder / MODEL).items()}
    _check_loaded(model, folder, model.load_state_dict(tensors, strict=False), known)
    return True


def _check_loaded(model: nn.Module, folder: Path, outcome: object, required: Collection[str]) -> None:
    """Refuses what `load_state_dict` took in part: `required` are names that must have been there."""
    missing = getattr(outcome, "missing_keys", ())
    unexpected = getattr(outcome, "unexpected_keys", ())
    state = model.state_dict(keep_vars=True)
    loaded = {id(tensor) for name, tensor in state.items() if name not in missing}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    # One that is tied to another was there under the other's name.
    lacking = [n for n in missing if n in required and n not in ignored and id(state[n]) not in loaded]
    if lacking or unexpected:
        problems = [f"missing: {list_some(lacking)}"] if lacking else []
        problems += [f"not in this model: {list_some(list(unexpected))}"] if unexpected else []
        raise CheckpointError(
            f"{folder} does not fit this model.\n  " + "\n  ".join(problems) + "\nBuild the model with the arguments "
            "that the checkpoint was trained with: same class, sizes, and parts that train."
        )


def _read_tensors(path: Path) -> Tensors:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: damaged, not a safetensors file ({error}).") from error


def _modern(name: str) -> str:
    """Returns what an entry of ESM in its original format is called here."""
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return re.sub(r"encoder\.layer\.(\d+|\*)\.attention\.self\.rotary_embeddings\.", "rotary_embeddings.", name)
