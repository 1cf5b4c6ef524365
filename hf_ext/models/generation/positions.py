"""Where a token stands, as waves that are added to its embedding."""

from __future__ import annotations

import math

import torch

LONGEST_WAVE = 10_000.0  # tokens / 2 pi; Vaswani et al., arXiv:1706.03762


def sinusoids(positions: torch.Tensor, width: int) -> torch.Tensor:
    """(..., width), float32, for positions (...): half sines, half cosines, of wavelengths from 2 pi on."""
    steps = torch.arange(width // 2, device=positions.device, dtype=torch.float32) / (width // 2)
    angles = positions[..., None].float() * torch.exp(-math.log(LONGEST_WAVE) * steps)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
