"""Linear layers that do not train, stored in the half precision that autocast would round them to anyway.

Autocast rounds a float32 weight at every use and keeps the rounded copy until the backward pass: 6 bytes per frozen
weight. Stored rounded, it takes 2, and the products are bit for bit the same.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear


class HalfLinear(nn.Linear):
    """A linear layer whose weight is stored in half precision.

    Under autocast it is `nn.Linear`. Without, it computes in the dtype of its input from the weight as it is stored,
    where `nn.Linear` would refuse two dtypes.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features)."""
        if torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return linear(input, self.weight.to(input.dtype), bias)


def narrow(layers: list[nn.Linear], dtype: torch.dtype) -> int:
    """Stores the weights of `layers` in `dtype`, in place; returns the bytes that this saves."""
    saved = 0
    for layer in layers:
        saved += layer.weight.nbytes
        layer.weight.data = layer.weight.data.to(dtype)
        saved -= layer.weight.nbytes
        layer.__class__ = HalfLinear
    return saved


def widen(model: nn.Module) -> int:
    """Stores what `narrow` stored in half precision in float32 again, rounded as it is; returns how many layers."""
    layers = half_layers(model)
    for layer in layers:
        layer.weight.data = layer.weight.data.float()
        layer.__class__ = nn.Linear  # type: ignore[assignment]
    return len(layers)


def half_layers(model: nn.Module) -> list[HalfLinear]:
    """Those of `model`."""
    return [module for module in model.modules() if isinstance(module, HalfLinear)]
