"""Heads of several kinds on the same frozen embeddings, weighed: linear ones and networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any, cast

import torch
from torch import nn

FEATURES, DIRECTIONS = "features", "directions"  # what a member reads
MAX_RANK = 64  # directions kept of an input,
SMALLER_RANK, MAX_PRODUCTS = 16, 512  # and products of two inputs' directions
NEGLIGIBLE = 1e-6  # of the largest variance: a direction below it is rounding


class NetworkStack(nn.Module):
    """Perceptrons of the same sizes side by side: Linear, GELU, dropout per hidden layer, LayerNorm between them.

    Args:
        number: of networks.
        input_size, hidden_sizes: of each.
        dropout: probability in [0, 1).
    """

    def __init__(self, number: int, input_size: int, hidden_sizes: Sequence[int], dropout: float = 0.0):
        super().__init__()
        self.dropout = dropout
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in pairwise([input_size, *hidden_sizes, 1]):
            bound = 1 / math.sqrt(fan_in)  # as nn.Linear
            self.weights.append(nn.Parameter(torch.empty(number, fan_in, fan_out).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(number, 1, fan_out).uniform_(-bound, bound)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(number, n, input_size), or (n, input_size) for all of them -> (number, n)."""
        states = inputs.expand(len(self.weights[0]), *inputs.shape[-2:])
        layers = [*zip(self.weights, self.biases)]
        for i, (weight, bias) in enumerate(layers[:-1]):
            if i > 0:
                states = nn.functional.layer_norm(states, states.shape[-1:])
            states = nn.functional.gelu(torch.baddbmm(bias, states, weight))
            states = nn.functional.dropout(states, self.dropout, self.training)
        weight, bias = layers[-1]
        return torch.baddbmm(bias, states, weight).squeeze(-1)

    @torch.no_grad()
    def scale_outputs(self, factor: float, shift: float = 0.0) -> None:
        """Every output becomes `factor` times what it was, plus `shift`."""
        self.weights[-1].mul_(factor)
        self.biases[-1].mul_(factor).add_(shift)


class HeadEnsemble(nn.Module):
    """The weighted sum of linear models and networks on standardised embeddings, in label units.

    They read these features, or directions: the principal ones of each input, and products of those of two inputs,
    which say what one is worth for the other. Weights are contained in the coefficients. Nothing here trains:
    `hf_ext.affinity.ensemble` fits it.

    Args:
        widths: of each input's embedding.
        ranks: directions of each input.
        networks: per `NetworkStack` its `view`, `number` and `sizes` of hidden layers.

    Buffers, float32: `basis_<i>` (width, rank), `scales` of the directions, `linear_features` and `linear_directions`,
    coefficients, and `intercept` ().
    """

    scales: torch.Tensor
    intercept: torch.Tensor

    def __init__(self, widths: Sequence[int], ranks: Sequence[int], networks: Sequence[Mapping[str, Any]]):
        super().__init__()
        self.widths = [*widths]
        self.kept = [*_products(ranks)]  # pairs of inputs, and how many directions of each are multiplied
        sizes = {FEATURES: sum(widths), DIRECTIONS: sum(ranks) + sum(a * b for *_, a, b in self.kept)}
        for i, (width, rank) in enumerate(zip(widths, ranks)):
            self.register_buffer(f"basis_{i}", torch.zeros(width, rank))
        self.register_buffer("scales", torch.ones(sizes[DIRECTIONS]))
        for view, size in sizes.items():
            self.register_buffer(f"linear_{view}", torch.zeros(size))
        self.register_buffer("intercept", torch.zeros(()))
        self.views = [str(one["view"]) for one in networks]
        stacks = [NetworkStack(one["number"], sizes[one["view"]], one["sizes"]) for one in networks]
        self.networks = nn.ModuleList(stacks).requires_grad_(False)

    def directions(self, features: torch.Tensor) -> torch.Tensor:
        """(n, sum of widths), standardised -> (n, directions)."""
        parts = features.split(self.widths, dim=1)
        along = [part @ getattr(self, f"basis_{i}") for i, part in enumerate(parts)]
        products = [(along[i][:, :a, None] * along[j][:, None, :b]).flatten(1) for i, j, a, b in self.kept]
        return torch.cat([*along, *products], dim=1) * self.scales

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(n, sum of widths), standardised as by the head, float32 -> (n,) float32, label units."""
        with torch.autocast(features.device.type, enabled=False):
            views = {FEATURES: features, DIRECTIONS: self.directions(features)}
            total = self.intercept.expand(len(features))
            for view, values in views.items():
                total = total + values @ getattr(self, f"linear_{view}")
            for view, stack in zip(self.views, self.networks):
                total = total + stack(views[view]).sum(0)
        return total

    @torch.no_grad()
    def fit_directions(self, bases: Sequence[torch.Tensor], features: torch.Tensor) -> None:
        """Takes over the bases, (width, rank) each, and scales each input's and each product's block by its size.

        Args:
            bases: from `principal_directions`.
            features: (n, sum of widths), standardised, of training rows; no labels are read.
        """
        for i, basis in enumerate(bases):
            getattr(self, f"basis_{i}").copy_(basis)
        sizes = [*(basis.shape[1] for basis in bases), *(a * b for *_, a, b in self.kept)]
        blocks = [block.square().sum(1).mean() for block in self.directions(features).split(sizes, dim=1)]
        num_blocks = sum(size > 0 for size in sizes)
        share = len(self.scales) / max(1, num_blocks)
        scales = [(share / block.clamp(min=1e-12)).sqrt().expand(size) for block, size in zip(blocks, sizes)]
        self.scales.copy_(torch.cat(scales))

    def shapes(self) -> dict[str, Any]:
        """What `AffinityConfig.ensemble` keeps: the arguments, besides `widths`."""
        ranks = [getattr(self, f"basis_{i}").shape[1] for i in range(len(self.widths))]
        networks = []
        for view, one in zip(self.views, self.networks):
            weights = cast(NetworkStack, one).weights
            sizes = [weight.shape[2] for weight in weights][:-1]
            networks.append({"view": view, "number": len(weights[0]), "sizes": sizes})
        return {"ranks": ranks, "networks": networks}


def _products(ranks: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Pairs of inputs with how many directions of each are multiplied; all of both where there are few."""
    found = []
    for i, j in combinations(range(len(ranks)), 2):
        smaller = min(ranks[i], ranks[j], SMALLER_RANK)
        most = MAX_PRODUCTS // max(1, smaller)
        a, b = (smaller, min(ranks[j], most)) if ranks[i] <= ranks[j] else (min(ranks[i], most), smaller)
        found.append((i, j, a, b))
    return found


def principal_directions(features: torch.Tensor) -> torch.Tensor:
    """At most `MAX_RANK` directions of an input in which its standardised embeddings, (n, width), vary most.

    Returns:
        (width, rank), float32, of length 1; none where nothing varies.

    Cost: one product of width x width, and its eigenvectors, in float64.
    """
    gram = torch.zeros(features.shape[1], features.shape[1], dtype=torch.float64)
    for chunk in features.split(8192):
        gram += chunk.double().T @ chunk.double()
    variances, vectors = torch.linalg.eigh(gram / len(features))
    rank = int((variances > NEGLIGIBLE * variances[-1].clamp(min=NEGLIGIBLE)).sum())
    return vectors.flip(1)[:, : min(rank, MAX_RANK)].float()
