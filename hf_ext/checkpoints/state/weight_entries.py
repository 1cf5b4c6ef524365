"""Which entries of a model's state dict a checkpoint holds, and which it knows by their hash alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.utils.save_and_load import get_peft_model_state_dict
from torch import nn
from transformers import PreTrainedModel

from ...models.affinity import AffinityModel
from ...models.quantization import quantized_weights
from .frozen_weights import read_base

# Entries that a pretrained base may lack: adapters, and modules that are made at random where it has none. Frozen or
# not, they are small, and would hash differently under every seed; so they are stored.
BESIDE_BASE = re.compile(r"(^|\.)(lora_\w+|contact_head|pooler|original_module)\.")


@dataclass(frozen=True)
class Split:
    """A model's state dict: what an adapter file holds, the rest of what a checkpoint holds, and what it does not."""

    adapted: set[str]
    stored: dict[str, Any]
    frozen: dict[str, torch.Tensor]


def split_entries(model: Any) -> Split:
    """Cost: no tensor is copied; of sharded models, each tensor is the DTensor."""
    adapted: set[str] = set()
    if isinstance(model, PeftModel):
        entries = [entry for adapter in model.peft_config for entry in adapter_entries(model, adapter).values()]
        adapted = {name for name, _ in entries if name is not None}
    # Layers in 8 or 4 bits have no weights in the state dict; they are known by those they were made from.
    state = {**model.state_dict(keep_vars=True), **quantized_weights(model)}
    rest = {name: tensor for name, tensor in state.items() if name not in adapted}
    frozen = {name: tensor for name, tensor in rest.items() if _is_frozen(name, tensor)}
    return Split(adapted, {name: tensor for name, tensor in rest.items() if name not in frozen}, frozen)


def _is_frozen(name: str, tensor: Any) -> bool:
    never_trains = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return never_trains and not BESIDE_BASE.search(name)


def stores_part(model: Any) -> bool:
    """Whether only what trains is stored: there is a base to take the rest from, and the rest is most of the model."""
    if not isinstance(model, PreTrainedModel) or (isinstance(model, AffinityModel) and not model.config.save_full):
        return False
    if not read_base(model)["name_or_path"] and not isinstance(model, AffinityModel):
        return False
    parameters = list(model.parameters())
    frozen = sum(parameter.nbytes for parameter in parameters if not parameter.requires_grad)
    return 0 < sum(parameter.nbytes for parameter in parameters) <= 2 * frozen


def adapter_entries(model: PeftModel, adapter: str) -> dict[str, tuple[str | None, torch.Tensor]]:
    """Name in the adapter's file -> name in the state dict, None for what PEFT computes from others; and tensor."""
    state = model.state_dict()
    names = {id(tensor): name for name, tensor in state.items()}
    # PEFT renames entries but hands the tensors of `state` through, which tells where each came from.
    written = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter, save_embedding_layers=False)
    return {name: (names.get(id(tensor)), tensor) for name, tensor in written.items()}


def has_injected_adapters(model: PreTrainedModel) -> bool:
    """Whether `save_pretrained` would write adapters alone, and of those only the active one."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def ignored_entries(model: Any) -> set[str]:
    """Names that `save_pretrained` leaves out."""
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def adapter_folder(adapter: str) -> tuple[str, ...]:
    """The folder in which PEFT saves an adapter."""
    return () if adapter == "default" else (adapter,)
