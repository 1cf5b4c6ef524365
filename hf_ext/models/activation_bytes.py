"""How much one layer keeps for its backward pass under each policy of `activation_checkpointing.py`, and what all will.

Counted are the storages that a forward pass leaves alive, whoever holds them: autograd, a checkpoint, or a cache of
what is not computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

from .activation_checkpointing import POLICIES, Policy, set_policy, unset_policy
from .ledger import OTHER, Ledger

MEASURED: tuple[Policy, ...] = ("none", "pointwise", "attention", "full")  # `half` is made of two of them


@dataclass(frozen=True)
class LayerCost:
    """Of one layer on one batch: bytes kept per policy, and the share of its forward FLOPs that it does again."""

    bytes_kept: Mapping[str, int]
    recomputed: Mapping[str, float]


def measure_layer(
    model: nn.Module,
    layer: nn.Module,
    args: Any,
    kwargs: Any,
    autocast: Any = nullcontext,
    pattern: str | None = None,
) -> LayerCost:
    """Runs `layer` forward and backward under each policy; the model is left without one, and without gradients.

    Args:
        model: whose layer it is, in training mode.
        args, kwargs: what the layer is called with.
        autocast: makes the context that it is called in.
        pattern: as of `set_policy`.

    Cost: four forward and four backward passes of one layer, with random states put back.
    """
    kept, flops = {}, {}
    args = [x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
    device = next(layer.parameters()).device
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    known = [*layer.parameters(), *layer.buffers(), *given]
    for policy in MEASURED:
        set_policy(model, policy, pattern)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            kept[policy], flops[policy] = _run(lambda: layer(*args, **kwargs), autocast, layer, known)
    unset_policy(model)
    model.zero_grad(set_to_none=True)
    forward = flops["none"][0]
    again = {policy: round((flops[policy][1] - flops["none"][1]) / max(1, forward), 3) for policy in MEASURED}
    kept["half"], again["half"] = (kept["none"] + kept["full"]) // 2, round(again["full"] / 2, 3)
    return LayerCost({name: kept[name] for name in POLICIES}, {name: again[name] for name in POLICIES})


def weight_shapes(module: nn.Module) -> set[tuple[int, ...]]:
    """Of a module's weights, and of matrices transposed: copies that autocast rounds are no activations."""
    return {tuple(shape) for p in module.parameters() for shape in (p.shape, p.T.shape if p.dim() == 2 else p.shape)}


def _run(
    call: Callable[[], Any], autocast: Callable[[], AbstractContextManager], layer: nn.Module, known: list[torch.Tensor]
) -> tuple[int, tuple[int, int]]:
    """Bytes that are kept after the forward pass; FLOPs of it, and with the backward pass."""
    ledger = Ledger(1, left_out=weight_shapes(layer))
    ledger.know(known)
    counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION_FLOPS)
    with counter, torch.enable_grad():
        with ledger, autocast():
            output = call()
        forward, kept = counter.get_total_flops(), ledger.current[OTHER]
        states = output if isinstance(output, torch.Tensor) else output[0]
        states.float().sum().backward()
    return kept, (forward, counter.get_total_flops())


def _sdpa_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop(query, key, value)


def _blocked_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop(*((1, *shape) for shape in (query, key, value)))


# What torch's counter does not know.
_ATTENTION_FLOPS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_flops,
    torch.ops.hf_ext.blocked_attention: _blocked_flops,
}


def predict_bytes(policy: str, bytes_kept: Mapping[str, int], num_layers: int) -> int:
    """Most bytes that layers hold at a time: what all of them keep, and all of one while it is computed again.

    Args:
        bytes_kept: of one layer for each policy, as in `LayerCost`.
    """
    if policy == "none":
        return num_layers * bytes_kept["none"]
    if policy == "half":
        skipped = num_layers // 2
        return (num_layers - skipped) * bytes_kept["full"] + (skipped + 1) * bytes_kept["none"]
    return num_layers * bytes_kept[policy] + bytes_kept["none"]
