"""What FSDP2 shards one at a time, what it must leave whole or in float32, and which weights never get a gradient."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..errors import ArgumentError
from .affinity import AffinityModel
from .blocks import find_blocks
from .head import RegressionHead


def block_classes(model: nn.Module, pattern: str | None = None) -> list[str]:
    """Class names of `find_blocks`, each once, in the model's order."""
    return list(dict.fromkeys(type(block).__name__ for block in find_blocks(model, pattern)))


def choose_classes(model: nn.Module, asked: list[str] | None, pattern: str | None = None) -> list[str]:
    """The classes to shard by: those asked for, else `block_classes`.

    Raises:
        ArgumentError: the model has no module of a class that was asked for.
    """
    if asked is None:
        return block_classes(model, pattern)
    there = {type(module).__name__ for module in model.modules()}
    if lacking := [name for name in asked if name not in there]:
        blocks = ", ".join(block_classes(model, pattern)) or "no repeated layers"
        raise ArgumentError(
            f"fsdp_transformer_layer_cls_to_wrap {', '.join(lacking)}: the model has no such module. Its layers are "
            f"{blocks}: name these, or leave the option out."
        )
    return list(asked)


def unused_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable weights that no loss of ours or of transformers reaches: those of ESM's contact heads."""
    named = model.named_parameters()
    return {name: p for name, p in named if p.requires_grad and "contact_head" in name.split(".")}


def exact_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that compute in the dtype of their weights, also where training is in half precision.

    Heads of an `AffinityModel`, which round predictions otherwise, and its frozen encoders, whose live embeddings are
    to agree with cached ones.
    """
    if not isinstance(model, AffinityModel):
        return []
    frozen = [
        encoder
        for encoder in model.encoders.values()
        if not any(parameter.requires_grad for parameter in encoder.parameters())
    ]
    return [*frozen, *(module for module in model.modules() if isinstance(module, RegressionHead))]


def find_base_layers(model: nn.Module) -> list[nn.Linear]:
    """Frozen float32 linear layers of encoders that have adapters, in their repeated layers.

    Without those of DoRA, whose norms are taken from the weights themselves, and quantised ones, which are no plain
    `nn.Linear`.
    """
    dora = {id(m.get_base_layer()) for m in model.modules() if isinstance(m, BaseTunerLayer) and _uses_dora(m)}
    return [
        module
        for block in find_blocks(model)
        if any(isinstance(module, BaseTunerLayer) for module in block.modules())
        for module in block.modules()
        if type(module) is nn.Linear
        and id(module) not in dora
        and not module.weight.requires_grad
        and module.weight.dtype == torch.float32
    ]


def _uses_dora(layer: Any) -> bool:
    return bool(getattr(layer, "lora_magnitude_vector", None))
