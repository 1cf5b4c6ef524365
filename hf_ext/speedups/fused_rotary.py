"""Rotary positions of ESM-2 and ESM C in a few passes over memory, where no compiler fuses them.

Class I. Effect: queries and keys are rotated half by half in place, and so are their gradients (`models/rotary.py`);
transformers' own way took 31 ms a layer forward and backward where this takes 9, of a step of 1.65 s with six of them
(ESM-2 8M's shape in bf16, 5,732 tokens, one core with AVX512-BF16; `benchmarks/cpu_step.py` has the step).
Hardware: CPUs. On GPUs `compile` fuses the rotation with what stands beside it, and so it does on CPUs where it is on.
Remove when transformers lets a model take another rotation without the hub (`use_kernelized_func`, 5.24).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.esm import modeling_esm
from transformers.models.esmc import modeling_esmc

from ..models.replaced_forwards import find_replaceable, replace_forward, restore_forward
from ..models.rotary import rotate
from . import compile
from .base import OTHER_FORWARD, Context, Decision, Kind, Run, off

NAME = "fused_rotary"
KIND: Kind = "I"
FAMILIES = ("esm", "esmc")


def decide(context: Context) -> Decision:
    """Applies to ESM-2 and ESM C on CPUs, unless their blocks are compiled."""
    if not context.wants(NAME, KIND):
        return off(NAME, KIND)
    problem = _problem(context)
    if problem:
        return Decision(NAME, KIND, "skipped", problem)
    return Decision(NAME, KIND, "applied", "queries and keys are rotated in place")


def _problem(context: Context) -> str | None:
    if context.replicas:
        return context.replicas
    if not set(FAMILIES) & set(context.model.families):
        return "no ESM-2 or ESM C encoder"
    if context.hardware.kind != "cpu":
        return f"made for CPUs; on {context.hardware.name} compiled blocks fuse it"
    if compile.decide(context).status == "applied" or context.args.torch_compile:
        return "compiled blocks fuse it"
    if context.args.attention == "faesm":
        return "faesm rotates by itself"
    return None


def apply(decision: Decision, run: Run) -> Decision:
    """Changes attention layers now, and those of encoders that the model loads later."""
    if run.change_encoders(fuse_rotary) == 0:
        return Decision(NAME, KIND, "skipped", OTHER_FORWARD)
    run.on_end(partial(unfuse_rotary, run.model))
    return decision


def fuse_rotary(model: nn.Module) -> int:
    """Makes every attention layer of ESM-2 and ESM C in `model` rotate in place; returns how many. Weights stay."""
    layers = find_replaceable(model, *_FORWARDS)
    for layer, family in layers:
        replace_forward(layer, _FORWARDS[family])
    return len(layers)


def unfuse_rotary(model: nn.Module) -> None:
    """Gives the layers that `fuse_rotary` changed their own forward functions back."""
    for module in model.modules():
        if isinstance(module, tuple(_FORWARDS)):
            restore_forward(module)


def _esm_forward(
    layer: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> Any:
    """`EsmSelfAttention.forward`; without rotary positions, or across to other states, that itself."""
    others = (encoder_hidden_states, encoder_attention_mask)
    if encoder_hidden_states is not None or layer.position_embedding_type != "rotary":
        given = (hidden_states, attention_mask, *others, position_embeddings)
        return type(layer).forward(layer, *given, **kwargs)
    shape = (*hidden_states.shape[:-1], -1, layer.attention_head_size)
    query, key, value = (part(hidden_states).view(shape) for part in (layer.query, layer.key, layer.value))
    cos, sin = position_embeddings
    query, key = rotate(query, cos, sin, layer.attention_head_size**-0.5), rotate(key, cos, sin)
    dropout = layer.dropout if layer.training else 0.0
    eager = modeling_esm.eager_attention_forward
    return _attend(layer, (query, key, value), attention_mask, dropout, eager, **kwargs)


def _esmc_forward(
    layer: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> Any:
    """`EsmcAttention.forward`."""
    shape, dtype = (*hidden_states.shape[:-1], -1, layer.head_dim), hidden_states.dtype
    query = layer.q_norm(layer.q_proj(hidden_states)).to(dtype).view(shape)
    key = layer.k_norm(layer.k_proj(hidden_states)).to(dtype).view(shape)
    cos, sin = position_embeddings
    parts = (rotate(query, cos, sin), rotate(key, cos, sin))
    value = layer.v_proj(hidden_states).view(shape)
    dropout = layer.attention_dropout if layer.training else 0.0
    eager = modeling_esmc.eager_attention_forward
    output, weights = _attend(layer, (*parts, value), attention_mask, dropout, eager, **kwargs)
    return layer.o_proj(output), weights


def _attend(layer: Any, parts: Any, mask: Any, dropout: float, eager: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What the chosen attention makes of queries, keys and values, (..., tokens, heads, head size)."""
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(layer.config._attn_implementation, eager)
    heads_first = (part.transpose(1, 2) for part in parts)
    output, weights = interface(layer, *heads_first, mask, dropout=dropout, scaling=layer.scaling, **kwargs)
    return output.reshape(*parts[0].shape[:-2], -1).contiguous(), weights


_FORWARDS: dict[type[nn.Module], Any] = {
    modeling_esm.EsmSelfAttention: _esm_forward,
    modeling_esmc.EsmcAttention: _esmc_forward,
}
