"""What all architectures share: where a token stands, the affinity asked for, and what encoders hand to decoders."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils import ModelOutput

LONGEST_WAVE = 10_000.0  # tokens / 2 pi; Vaswani et al., arXiv:1706.03762


def add_sinusoids(embedded: Tensor, positions: Tensor) -> Tensor:
    """Adds to (..., width) what positions (...) are known by: half sines, half cosines, of wavelengths from 2 pi on."""
    width = embedded.shape[-1]
    steps = torch.arange(width // 2, device=positions.device, dtype=torch.float32) / (width // 2)
    angles = positions[..., None].float() * torch.exp(-math.log(LONGEST_WAVE) * steps)
    return embedded + torch.cat([angles.sin(), angles.cos()], dim=-1).to(embedded.dtype)


class AffinityEmbedding(nn.Module):
    """A learned embedding of the standardised affinity, and one of "unknown".

    Args:
        width: of the vectors.
        mean, std: of affinities, in their units.
        unknown_dropout: probability in training that a row's affinity is taken as unknown.
    """

    def __init__(self, width: int, mean: float, std: float, unknown_dropout: float):
        super().__init__()
        self.mean = mean
        self.std = std
        self.unknown_dropout = unknown_dropout
        self.hidden = nn.Linear(1, width)
        self.output = nn.Linear(width, width)
        self.unknown = nn.Embedding(1, width)

    def forward(self, affinity: Tensor | None, num_rows: int) -> Tensor:
        """Returns (rows, width), for `affinity` (rows,), float, NaN where unknown; None: unknown in all rows.

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


@dataclass
class EncoderStates(ModelOutput):
    """Of k antigens; every entry has them first, so that `generate` may repeat them for beams and samples.

    `last_hidden_state`: (k, tokens, width). Of the LSTM, `memory`: (k, layers, 2 * hidden, 2), hidden states and cells
    after the last token; `mean`: (k, 2 * hidden), of the states of all tokens.
    """

    last_hidden_state: Tensor | None = None
    memory: Tensor | None = None
    mean: Tensor | None = None


class DecoderState:
    """A memory without keys and values, as transformers' `generate` asks of a cache that is not one of its own.

    A decoder's own adds `reorder_cache(beam_idx)`, which takes the rows at (rows,) in place, in beam search.

    Attributes:
        num_tokens: read so far.
    """

    # Of transformers' own caches: this one cannot be cut back by a token, so `generate` must not run ahead of itself.
    is_compileable = False
    is_croppable = False

    def __init__(self) -> None:
        self.num_tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Counts tokens read so far."""
        return self.num_tokens
