"""Ridge regressions on the embeddings, kept beside a head: one of all rows, and one of each partner's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

# Of the distance between the two most alike partners: as far as an embedding may be from a partner's to be taken for
# it. Cached in half precision, or computed on another machine, it is not the same to the bit.
TOLERANCE = 0.1


class StackedRidge(nn.Module):
    """Predicts from embeddings; a row whose partner (such as its antigen) has weights of its own by these.

    Args:
        width: of the embeddings of all inputs together.
        blocks: (first, width) of those among them that tell partners apart; empty without partners.
        num_partners: how many have weights of their own: none, or two or more.

    Buffers, float32: `weights` (1 + partners, width) and `intercepts` (1 + partners,), label units, those of all rows
    first; `partners` (partners, widths of the blocks), the embedding of each; `reach`, how near another has to be.
    """

    weights: torch.Tensor
    intercepts: torch.Tensor
    partners: torch.Tensor
    reach: torch.Tensor

    def __init__(self, width: int, blocks: Sequence[tuple[int, int]] = (), num_partners: int = 0):
        super().__init__()
        self.blocks = [*blocks]
        self.register_buffer("weights", torch.zeros(1 + num_partners, width))
        self.register_buffer("intercepts", torch.zeros(1 + num_partners))
        if num_partners:
            self.register_buffer("partners", torch.zeros(num_partners, sum(size for _, size in blocks)))
            self.register_buffer("reach", torch.zeros(()))

    @property
    def num_partners(self) -> int:
        """How many have weights of their own."""
        return len(self.weights) - 1

    @torch.no_grad()
    def fill(self, weights: torch.Tensor, intercepts: torch.Tensor, examples: torch.Tensor | None = None) -> None:
        """Takes over what was fitted: see the buffers; `examples`, (partners, width), embeddings of a row of each."""
        self.weights.copy_(weights)
        self.intercepts.copy_(intercepts)
        if examples is not None:
            self.partners.copy_(self._own(examples))
            self.reach.copy_(TOLERANCE * torch.pdist(self.partners.double()).min())

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """(n, width), float32 or float64 -> (n,) of that dtype, label units."""
        weights, intercepts = self.weights.to(embeddings), self.intercepts.to(embeddings)
        with torch.autocast(embeddings.device.type, enabled=False):
            if not self.num_partners:
                return embeddings @ weights[0] + intercepts[0]
            number = self._find(embeddings)
            return (embeddings * weights[number]).sum(1) + intercepts[number]

    def _find(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Of each row the number of its weights: 0 where its partner has none, (n,)."""
        # Distances by a product of matrices round away what tells near partners apart.
        exactly = "donot_use_mm_for_euclid_dist"
        distances = torch.cdist(self._own(embeddings), self.partners.to(embeddings), compute_mode=exactly)
        nearest = distances.min(1)
        return torch.where(nearest.values <= self.reach, nearest.indices + 1, 0)

    def _own(self, embeddings: torch.Tensor) -> torch.Tensor:
        return torch.cat([embeddings.narrow(1, first, size) for first, size in self.blocks], dim=1)
