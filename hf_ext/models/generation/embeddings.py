"""What is added to the embedding of each token: the affinity that is asked for, and waves that say where it stands."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

LONGEST_WAVE = 10_000.0  # tokens / 2 pi; Vaswani et al., arXiv:1706.03762


class AffinityEmbedding(nn.Module):
    """A learned embedding of the standardised affinity, and one of "unknown".

    Args:
        width: of the vectors.
        mean, std: of affinities, in their units.
        unknown_dropout: probability in training that a row's affinity is taken as unknown.
    """

    def __init__(self, width: int, mean: float, std: float, unknown_dropout: float):
        super().__init__()
        self.mean, self.std, self.unknown_dropout = mean, std, unknown_dropout
        self.hidden = nn.Linear(1, width)
        self.output = nn.Linear(width, width)
        self.unknown = nn.Embedding(1, width)

    def forward(self, affinity: torch.Tensor | None, num_rows: int) -> torch.Tensor:
        """(rows, width), for `affinity` (rows,), float, NaN where unknown; None: unknown in all rows.

        Both embeddings are always computed, so that a batch of unknowns leaves no weight without a gradient.
        """
        weight = self.unknown.weight
        if affinity is None:
            affinity = weight.new_full((num_rows,), torch.nan)
        affinity = affinity.to(weight.device, torch.float32)
        is_unknown = affinity.isnan()
        standardised = torch.where(is_unknown, 0.0, (affinity - self.mean) / self.std)
        if self.training and self.unknown_dropout:
            is_unknown = is_unknown | (torch.rand_like(standardised) < self.unknown_dropout)
        known = self.output(functional.gelu(self.hidden(standardised[:, None].to(weight.dtype))))
        return torch.where(is_unknown[:, None], weight.to(known.dtype), known)


def sinusoids(positions: torch.Tensor, width: int) -> torch.Tensor:
    """(..., width), float32, for positions (...): half sines, half cosines, of wavelengths from 2 pi on."""
    steps = torch.arange(width // 2, device=positions.device, dtype=torch.float32) / (width // 2)
    angles = positions[..., None].float() * torch.exp(-math.log(LONGEST_WAVE) * steps)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
