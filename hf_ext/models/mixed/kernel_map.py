"""How near rows are to some of training, as numbers that a linear model reads: a kernel ridge by one that is plain."""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_LANDMARKS = 512  # rows that others are compared with; where training has no more, the kernel is exact
NEGLIGIBLE = 1e-6  # of the largest eigenvalue: rounding in float32


class KernelMap(nn.Module):
    """Maps rows to features whose inner product is exp(-distance squared / its mean), along the span of landmarks.

    A ridge regression on them is a kernel ridge regression (a Gaussian process's mean), exact where all training rows
    are landmarks, else by C. Williams and M. Seeger, Using the Nystroem method (2001); a logistic one likewise.

    Args:
        rows: landmarks.
        width: of what is compared.
        rank: features.

    Buffers, float32: `landmarks` (rows, width), `projection` (rows, rank), and `closeness`, (), one over the mean.
    """

    landmarks: Tensor
    projection: Tensor
    closeness: Tensor

    def __init__(self, rows: int, width: int, rank: int):
        super().__init__()
        self.register_buffer("landmarks", torch.zeros(rows, width))
        self.register_buffer("projection", torch.zeros(rows, rank))
        self.register_buffer("closeness", torch.ones(()))

    @classmethod
    def fit(cls, landmarks: Tensor) -> KernelMap:
        """Makes the map of these rows, (m, width), float32; no labels are read. Cost: eigenvectors of m x m."""
        made = cls(len(landmarks), landmarks.shape[1], 0)
        made.landmarks.copy_(landmarks)
        mean = 2 * landmarks.var(0, unbiased=False).sum()  # of all pairs
        made.closeness.fill_(1 / mean.clamp(min=NEGLIGIBLE))
        values, vectors = torch.linalg.eigh(made._compare(landmarks).double())
        kept = values > NEGLIGIBLE * values[-1]
        made.projection = (vectors[:, kept] / values[kept].sqrt()).float()
        return made

    @property
    def rank(self) -> int:
        """Features of a row."""
        return self.projection.shape[1]

    def forward(self, rows: Tensor) -> Tensor:
        """Maps (n, width) to (n, rank)."""
        return self._compare(rows) @ self.projection

    def _compare(self, rows: Tensor) -> Tensor:
        squares = [one.square().sum(1) for one in (rows, self.landmarks)]
        distances = squares[0][:, None] + squares[1] - 2 * rows @ self.landmarks.T
        return (-self.closeness * distances.clamp(min=0)).exp()
