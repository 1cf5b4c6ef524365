"""Attention layers of ESM-2 on CPUs, with one product and one rotation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.esm.modeling_esm import EsmSelfAttention, eager_attention_forward

from ..models import find_replaceable, replace_forward, restore_forwards
from .base import OTHER_FORWARD, Context, Decision, Run, Settings, Speedup, applied, are_weights_split, off, skipped
from .compile import Compile

# What a module has beside its weights, when calling it does more than its product.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class FusedQkv(Speedup):
    """Queries, keys and values of ESM-2 in one matrix product on CPUs, rotated in two passes over memory, not ten.

    Class I. Effect: the halves of queries and keys that a rotation mixes are put side by side, by the order in which
    rows of the weights are read, so that a rotation is a product of complex numbers, and so is its gradient; scores do
    not depend on that order. States are cast once instead of three times.
    Hardware: CPUs; on GPUs `compile` fuses the rotation with what stands beside it, and so it does on CPUs where it is
    on.
    Layers with adapters, hooks or code of somebody else's on a projection compute as transformers does.
    Cost: the weights of a layer are copied in each pass.
    Remove when transformers lets a model take another rotation without the hub (`use_kernelized_func`, 5.24).
    """

    NAME = "fused_qkv"
    predicts = True

    def decide(self, context: Context) -> Decision:
        """Applies to ESM encoders on CPUs, unless their blocks are compiled."""
        if not self.wanted(context):
            return off()
        if "esm" not in context.model.families:
            return skipped("no ESM encoder")
        if context.hardware.kind != "cpu":
            return skipped(f"made for CPUs, not for {context.hardware.name}")
        if are_weights_split(context.args):
            return skipped("FSDP and ZeRO bring the weights of a layer when it is called")
        if Compile().decide(context).status == "applied" or context.args.torch_compile:
            return skipped("compiled blocks fuse it")
        return applied("ESM's attention layers")

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Changes attention layers now, and those of encoders that the model loads later."""
        if run.change_encoders(fuse_qkv) == 0:
            return skipped(OTHER_FORWARD)
        run.on_end(partial(restore_forwards, run.model, EsmSelfAttention))
        return decision

    def change(self, model: nn.Module, settings: Settings) -> None:
        """Fuses all of its layers."""
        fuse_qkv(model)


def fuse_qkv(model: nn.Module) -> int:
    """Makes every attention layer of ESM in `model` with rotary positions do so; returns how many. Weights stay."""
    layers = [layer for layer, _ in find_replaceable(model, EsmSelfAttention)]
    layers = [layer for layer in layers if layer.position_embedding_type == "rotary"]
    for layer in layers:
        replace_forward(layer, _forward)
    return len(layers)


def _forward(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> Any:
    """Computes `EsmSelfAttention.forward`."""
    parts = (layer.query, layer.key, layer.value)
    if encoder_hidden_states is not None or not _are_plain(parts):
        others = (encoder_hidden_states, encoder_attention_mask, position_embeddings)
        return type(layer).forward(layer, hidden_states, attention_mask, *others, **kwargs)
    heads = layer.num_attention_heads
    size = layer.attention_head_size
    # Side by side, queries and keys interleaved: (..., width) -> (..., 3 * width).
    weight, bias = (_join([getattr(part, name) for part in parts], heads) for name in ("weight", "bias"))
    joined = linear(hidden_states, weight, bias).unflatten(-1, (3, heads, size))
    rotated, value = joined.split([2, 1], -3)
    cos, sin = (part[..., None, : size // 2].float() for part in position_embeddings)
    turn = torch.complex(cos, sin)
    turns = torch.stack([turn * size**-0.5, turn], -3)  # ESM scales queries before the rotation
    pairs = torch.view_as_complex(rotated.float().unflatten(-1, (-1, 2)))
    query, key = torch.view_as_real(pairs * turns).flatten(-2).to(joined.dtype).unbind(-3)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(layer.config._attn_implementation, eager_attention_forward)
    states = (part.transpose(1, 2) for part in (query, key, value.squeeze(-3)))
    dropout = layer.dropout if layer.training else 0.0
    output, weights = attend(layer, *states, attention_mask, dropout=dropout, scaling=layer.scaling, **kwargs)
    return output.reshape(*hidden_states.shape[:-1], -1).contiguous(), weights


def _are_plain(parts: Sequence[nn.Module]) -> bool:
    """Returns whether calling these is their product with a bias and no more."""
    if any(type(part) is not nn.Linear or part.bias is None for part in parts):
        return False
    return not any("forward" in vars(part) or any(getattr(part, name) for name in _HOOKS) for part in parts)


def _join(parts: Sequence[Tensor], heads: int) -> Tensor:
    """Joins rows of three: of the first two, the halves of each head in turn."""
    query, key, value = parts
    return torch.cat(
        [*(part.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2) for part in (query, key)), value]
    )
