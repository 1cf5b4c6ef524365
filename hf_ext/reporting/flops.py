"""Floating-point operations that training a transformer takes per token, from its configuration and what it trains.

Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B (6 N + 12 L H Q T, also nanoGPT's `estimate_mfu`), where
all N parameters train. Here each linear layer counts what autograd does for it: 2 forward, 2 more where a gradient
passes through it, 2 more where its weight trains: 6 when all trains, about 4 for the frozen layers under LoRA, 2 for
frozen ones. Recomputed activations are not counted, as in PaLM's model FLOPs utilisation.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from ..errors import ArgumentError

_LAYER = re.compile(r"\.(?:layers?|blocks?|h)\.(\d+)\.")


def flops_coefficients(model: nn.Module) -> tuple[float, float]:
    """FLOPs of one training step: per token for the linear layers, and per token and per token attended to.

    A token of a sequence of L costs the first and L times the second: forward, backward, no optimizer.

    Args:
        model: a transformer whose `config` names its layers and heads, such as ESM, BERT or a T5 encoder, with or
            without a head and PEFT adapters; `requires_grad` says what trains.

    Raises:
        ArgumentError: the configuration does not say how many layers and heads there are, or the model is an
            encoder-decoder, whose two sides see different numbers of tokens.

    Linear layers that run once per sequence (a pooler, a classification head) are counted as if they ran per token.
    Cost: one pass over the modules; nothing is computed.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ArgumentError(f"{type(model).__name__} is an encoder-decoder: FLOPs per token are not defined for it.")
    num_layers, width = _attention_shape(config, type(model).__name__)
    linear, has_gradient = 0.0, False
    with_gradient: dict[int, bool] = {}  # by layer, whether one passes through its attention
    for name, module in model.named_modules():  # in the order in which they are registered: that of the forward pass
        if isinstance(module, nn.Linear):
            # in_features x out_features: a sharded or quantised weight does not have this many elements.
            linear += 2.0 * module.in_features * module.out_features * (1 + has_gradient + module.weight.requires_grad)
        has_gradient = has_gradient or any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        if layer := _LAYER.search(f".{name}."):
            with_gradient[int(layer[1])] = has_gradient
    num_with_gradient = min(num_layers, sum(with_gradient.values()))
    # Scores and weighted values: 2 x 2 x width per pair of tokens forward, twice that backward.
    return linear, 4.0 * width * num_layers + 8.0 * width * num_with_gradient


def _attention_shape(config: Any, model_name: str) -> tuple[int, int]:
    """Number of layers, and heads x size of a head."""
    num_layers = getattr(config, "num_hidden_layers", None)
    num_heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not (num_layers and num_heads and hidden):
        raise ArgumentError(
            f"{model_name}: its configuration lacks num_hidden_layers, num_attention_heads or hidden_size, so FLOPs "
            "per token are not known."
        )
    head_size = getattr(config, "d_kv", None) or getattr(config, "head_dim", None) or hidden // num_heads
    return int(num_layers), int(num_heads * head_size)
