"""One GELU kernel in ESM's feed-forward layers instead of five element-wise ones.

Class I. Effect: `transformers` computes ESM's GELU as x * 0.5 * (1 + erf(x / sqrt(2))), with an intermediate of four
times the hidden width per operation; torch's own GELU is the same function in one pass, and in training it keeps one
of those intermediates instead of four. A comment in transformers warns that torch's GELU gave slightly other results;
on ESM-2 8M in float32 the last hidden states differ by 6e-6 at most.
Remove when `EsmIntermediate` calls `torch.nn.functional.gelu` (modeling_esm.py, transformers 5.23).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from transformers.models.esm.modeling_esm import EsmIntermediate

from ..models.replaced_forwards import find_replaceable, replace_forward, restore_forward
from .base import OTHER_FORWARD, Context, Decision, Kind, Run, off

NAME = "fused_gelu"
KIND: Kind = "I"


def fuse_gelu(model: nn.Module) -> int:
    """Makes every ESM feed-forward layer in `model` use torch's GELU; returns how many. Weights are untouched."""
    layers = find_replaceable(model, EsmIntermediate)
    for layer, _ in layers:
        replace_forward(layer, _forward)
    return len(layers)


def unfuse_gelu(model: nn.Module) -> None:
    """Gives the layers that `fuse_gelu` changed their own forward functions back."""
    for module in model.modules():
        if isinstance(module, EsmIntermediate):
            restore_forward(module)


def _forward(layer: EsmIntermediate, hidden_states: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(layer.dense(hidden_states))


def decide(context: Context) -> Decision:
    """Applies to models with ESM encoders."""
    if not context.wants(NAME, KIND):
        return off(NAME, KIND)
    if context.replicas:
        return Decision(NAME, KIND, "skipped", context.replicas)
    if "esm" not in context.model.families:
        return Decision(NAME, KIND, "skipped", "no ESM encoder")
    return Decision(NAME, KIND, "applied", "ESM's feed-forward layers")


def apply(decision: Decision, run: Run) -> Decision:
    """Fuses now, and in encoders that the model loads later."""
    if run.change_encoders(fuse_gelu) == 0:
        return Decision(NAME, KIND, "skipped", OTHER_FORWARD)
    run.on_end(partial(unfuse_gelu, run.model))
    return decision
