"""The multilayer perceptron that turns pooled embeddings into one number, always in float32; or several of them."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from torch import nn


class RegressionHead(nn.Module):
    """Standardise each embedding feature, then Linear, GELU, Dropout, LayerNorm per hidden layer, then one output.

    Args:
        input_size: sum of the widths of all pooled embeddings.
        hidden_sizes: widths of hidden layers; empty gives a linear model. The last hidden layer has no LayerNorm.
        dropout: probability in [0, 1).
    """

    input_mean: torch.Tensor
    input_scale: torch.Tensor

    def __init__(self, input_size: int, hidden_sizes: list[int], dropout: float):
        super().__init__()
        self.register_buffer("input_mean", torch.zeros(input_size))
        self.register_buffer("input_scale", torch.ones(input_size))
        layers: list[nn.Module] = []
        for i, (fan_in, fan_out) in enumerate(pairwise([input_size, *hidden_sizes])):
            layers += [nn.Linear(fan_in, fan_out), nn.GELU(), nn.Dropout(dropout)]
            if i < len(hidden_sizes) - 1:
                layers.append(nn.LayerNorm(fan_out))
        layers.append(nn.Linear([input_size, *hidden_sizes][-1], 1))
        self.layers = nn.Sequential(*layers)

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """(n, input_size) float32 -> (n,) float32."""
        # A head in half precision rounds predictions to a few hundred values.
        with torch.autocast(embeddings.device.type, enabled=False):
            standardized = (embeddings.float() - self.input_mean) * self.input_scale
            return self.layers(standardized).squeeze(-1)

    @torch.no_grad()
    def fit_scaling(self, mean: torch.Tensor, std: torch.Tensor) -> None:
        """Stores the statistics; a feature that does not vary is centred and left unscaled."""
        self.input_mean.copy_(mean)
        varies = std > 1e-6 * (1 + mean.abs())
        self.input_scale.copy_(torch.where(varies, 1 / std.clamp(min=1e-12), torch.ones_like(std)))


class HeadEnsemble(nn.Module):
    """Heads that were trained apart, each with its own scaling of the embeddings.

    Args:
        size: number of heads.
        input_size, hidden_sizes, dropout: of each, as in `RegressionHead`.
    """

    def __init__(self, size: int, input_size: int, hidden_sizes: list[int], dropout: float):
        super().__init__()
        self.members = nn.ModuleList(RegressionHead(input_size, hidden_sizes, dropout) for _ in range(size))

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """(n, input_size) float32 -> (n, size) float32, a column per head."""
        return torch.stack([member(embeddings) for member in self.members], dim=1)

    def fit_scaling(self, mean: torch.Tensor, std: torch.Tensor) -> None:
        """As in `RegressionHead`, the same for all heads."""
        for member in self.members:
            cast(RegressionHead, member).fit_scaling(mean, std)
