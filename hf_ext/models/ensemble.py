"""Heads of several kinds on the same frozen embeddings, weighed: linear ones and networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any, ClassVar, cast

import torch
from torch import nn

FEATURES = "features"  # what a member reads
DIRECTIONS = "directions"
PERCEPTRON = "mlp"  # forms of networks
PRODUCT = "product"
LINKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda outputs: outputs,
    "softmax": lambda outputs: outputs.softmax(-1),
    "sigmoid": torch.sigmoid,
}
LEAST = 1e-6  # of a probability
MAX_RANK = 64  # directions kept of an input
SMALLER_RANK = 16  # directions of the smaller of two inputs that are multiplied
MAX_PRODUCTS = 512  # of two inputs' directions, in all
NEGLIGIBLE = 1e-6  # of the largest variance: a direction below it is rounding


class NetworkStack(nn.Module):
    """Perceptrons of the same sizes side by side: Linear, GELU, dropout per hidden layer, LayerNorm between them.

    Args:
        number: of networks.
        shapes: inputs and outputs of each layer.
        dropout: probability in [0, 1).
    """

    form: ClassVar[str] = PERCEPTRON

    def __init__(self, number: int, shapes: Iterable[tuple[int, int]], dropout: float = 0.0):
        super().__init__()
        self.dropout = dropout
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for fan_in, fan_out in shapes:
            bound = 1 / math.sqrt(fan_in)  # as nn.Linear
            for parameters, rows in ((self.weights, fan_in), (self.biases, 1)):
                drawn = torch.empty(number, rows, fan_out).uniform_(-bound, bound)
                parameters.append(nn.Parameter(drawn))

    @classmethod
    def make(cls, ensemble: HeadEnsemble, view: str, number: int, sizes: Sequence[int], dropout: float) -> NetworkStack:
        """Makes networks with hidden layers of `sizes` that read `view`."""
        return cls(number, pairwise([ensemble.sizes[view], *sizes, ensemble.num_outputs]), dropout)

    @property
    def sizes(self) -> list[int]:
        """Of the hidden layers, as `make` takes them."""
        return [weight.shape[2] for weight in self.weights[:-1]]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Maps (number, n, inputs), or (n, inputs) for all of them, to (number, n, outputs)."""
        states = inputs.expand(len(self.weights[0]), *inputs.shape[-2:])
        layers = [*zip(self.weights, self.biases)]
        for i, (weight, bias) in enumerate(layers[:-1]):
            if i > 0:
                states = nn.functional.layer_norm(states, states.shape[-1:])
            states = nn.functional.gelu(torch.baddbmm(bias, states, weight))
            states = nn.functional.dropout(states, self.dropout, self.training)
        weight, bias = layers[-1]
        return torch.baddbmm(bias, states, weight)

    @torch.no_grad()
    def scale_outputs(self, factor: float, shift: float = 0.0) -> None:
        """Scales every output by `factor`, and adds `shift`."""
        self.weights[-1].mul_(factor)
        self.biases[-1].mul_(factor).add_(shift)


class ProductStack(NetworkStack):
    """Networks side by side that multiply projections of inputs, two at a time, beside a hidden layer on all of them.

    What an antibody is worth for an antigen is learned with few weights, also where a third chain varies.

    Args:
        number: of networks.
        widths: of each input; columns of a view beyond their sum are not read.
        rank: projections of each input, and width of the hidden layer.
        num_outputs: of each network.
        dropout: probability in [0, 1).
    """

    form = PRODUCT

    def __init__(
        self,
        number: int,
        widths: Sequence[int],
        rank: int,
        num_outputs: int,
        dropout: float = 0.0,
    ):
        varying = [width for width in widths if width > 0]
        num_blocks = 1 + math.comb(len(varying), 2)
        shapes = [(width, rank) for width in (*varying, sum(varying))]
        shapes.append((rank * num_blocks, num_outputs))
        super().__init__(number, shapes, dropout)
        self.widths = varying

    @classmethod
    def make(cls, ensemble: HeadEnsemble, view: str, number: int, sizes: Sequence[int], dropout: float) -> NetworkStack:
        """Makes networks with one hidden layer, which read the directions of inputs."""
        return cls(number, ensemble.ranks, sizes[0], ensemble.num_outputs, dropout)

    @property
    def sizes(self) -> list[int]:
        return [self.weights[-2].shape[2]]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Maps (number, n, inputs), or (n, inputs) for all of them, to (number, n, num_outputs)."""
        inputs = inputs[..., : sum(self.widths)].expand(len(self.weights[0]), -1, -1)
        blocks = [*inputs.split(self.widths, dim=-1), inputs]
        given = zip(blocks, self.weights, self.biases)
        *projected, hidden = [torch.baddbmm(bias, states, weight) for states, weight, bias in given]
        products = [one * other for one, other in combinations(projected, 2)]
        states = torch.cat([*products, nn.functional.gelu(hidden)], dim=-1)
        states = nn.functional.dropout(states, self.dropout, self.training)
        return torch.baddbmm(self.biases[-1], states, self.weights[-1])


FORMS: dict[str, type[NetworkStack]] = {stack.form: stack for stack in (NetworkStack, ProductStack)}


class HeadEnsemble(nn.Module):
    """The weighted sum of linear models and networks on standardised embeddings: of numbers, or of probabilities.

    They read these features, or directions: the principal ones of each input, and products of those of two inputs,
    which say what one is worth for the other. Nothing here trains: `hf_ext.heads.ensemble` fits it.

    Args:
        widths: of each input's embedding.
        ranks: directions of each input.
        networks: arguments of `make_stack` for each, besides `dropout`; of linear models too.
        num_outputs: of each member.
        link: from outputs to what is summed: "identity", "softmax" of classes, "sigmoid" of labels by themselves.

    Buffers, float32: `basis_<i>` (width, rank), `scales` of the directions, `shares`, the weights of the networks,
    (m,), and `intercept`, (num_outputs,), what a constant adds to the sum.
    """

    scales: torch.Tensor
    shares: torch.Tensor
    intercept: torch.Tensor

    def __init__(
        self,
        widths: Sequence[int],
        ranks: Sequence[int],
        networks: Sequence[Mapping[str, Any]],
        num_outputs: int = 1,
        link: str = "identity",
    ):
        super().__init__()
        self.widths = [*widths]
        self.ranks = [*ranks]
        self.num_outputs = num_outputs
        self.link = link
        self.kept = [*_products(ranks)]  # pairs of inputs, and how many directions of each are multiplied
        num_products = sum(a * b for *_, a, b in self.kept)
        self.sizes = {FEATURES: sum(widths), DIRECTIONS: sum(ranks) + num_products}
        for i, (width, rank) in enumerate(zip(widths, ranks)):
            self.register_buffer(f"basis_{i}", torch.zeros(width, rank))
        self.register_buffer("scales", torch.ones(self.sizes[DIRECTIONS]))
        self.register_buffer("shares", torch.zeros(len(networks)))
        self.register_buffer("intercept", torch.zeros(num_outputs))
        self.views = [str(one["view"]) for one in networks]
        self.networks = nn.ModuleList(self.make_stack(**one) for one in networks).requires_grad_(False)

    def make_stack(
        self,
        view: str,
        number: int,
        sizes: Sequence[int],
        form: str = PERCEPTRON,
        dropout: float = 0.0,
    ) -> NetworkStack:
        """Makes networks of a form that read `view`, with hidden layers of `sizes`."""
        return FORMS[form].make(self, view, number, sizes, dropout)

    def add(self, view: str, weight: float, stack: NetworkStack) -> None:
        """Adds a member: the mean of the stack's networks, with this weight."""
        self.views.append(view)
        self.networks.append(stack.requires_grad_(False).eval())
        self.shares = torch.cat([self.shares, self.shares.new_tensor([weight])])

    def directions(self, features: torch.Tensor) -> torch.Tensor:
        """Maps (n, sum of widths), standardised, to (n, directions)."""
        parts = features.split(self.widths, dim=1)
        along = [part @ getattr(self, f"basis_{i}") for i, part in enumerate(parts)]
        products = []
        for i, j, a, b in self.kept:
            product = along[i][:, :a, None] * along[j][:, None, :b]
            products.append(product.flatten(1))
        return torch.cat([*along, *products], dim=1) * self.scales

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Maps (n, sum of widths), standardised as by the head, float32, to float32: (n,) label units, or (n,
        num_outputs) logits, whose softmax or sigmoid is the sum of the members' probabilities."""
        return self.mix(features)[0]

    def mix(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps as `forward` does, and says how far members are apart: (n,), their squared distance from the sum."""
        with torch.autocast(features.device.type, enabled=False):
            views = {FEATURES: features, DIRECTIONS: self.directions(features)}
            total = self.intercept.expand(features.shape[0], -1)
            members = []
            for view, weight, stack in zip(self.views, self.shares, self.networks):
                outputs = LINKS[self.link](stack(views[view])).mean(0)
                total = total + weight * outputs
                members.append(outputs)
            squares = [weight * (one - total).square().mean(-1) for weight, one in zip(self.shares, members)]
            apart = sum(squares, total.new_zeros(total.shape[0]))
            if self.link == "identity":
                return total.squeeze(-1), apart
            if self.link == "softmax":
                return total.clamp(min=LEAST).log(), apart
            return total.logit(eps=LEAST), apart

    @torch.no_grad()
    def fit_directions(self, bases: Sequence[torch.Tensor], features: torch.Tensor) -> None:
        """Takes over the bases, (width, rank) each, and scales each input's and each product's block by its size.

        Args:
            bases: from `principal_directions`.
            features: (n, sum of widths), standardised, of training rows; no labels are read.
        """
        for i, basis in enumerate(bases):
            getattr(self, f"basis_{i}").copy_(basis)
        sizes = [
            *(basis.shape[1] for basis in bases),
            *(a * b for *_, a, b in self.kept),
        ]
        num_blocks = sum(size > 0 for size in sizes)
        share = len(self.scales) / max(1, num_blocks)
        scales = []
        for block in self.directions(features).split(sizes, dim=1):
            square = block.square().sum(1).mean().clamp(min=1e-12)
            scale = (share / square).sqrt()
            scales.append(scale.expand(block.shape[1]))
        self.scales.copy_(torch.cat(scales))

    def shapes(self) -> dict[str, Any]:
        """Returns what `AffinityConfig.ensemble` keeps: the arguments, besides `widths`."""
        networks = []
        for view, one in zip(self.views, self.networks):
            stack = cast(NetworkStack, one)
            shapes = {
                "view": view,
                "number": len(stack.weights[0]),
                "sizes": stack.sizes,
                "form": stack.form,
            }
            networks.append(shapes)
        return {
            "ranks": self.ranks,
            "networks": networks,
            "num_outputs": self.num_outputs,
            "link": self.link,
        }


def _products(ranks: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Chooses pairs of inputs that vary, with how many directions of each are multiplied; all where there are few."""
    found = []
    pairs = [*combinations([i for i, rank in enumerate(ranks) if rank > 0], 2)]
    for i, j in pairs:
        smaller = min(ranks[i], ranks[j], SMALLER_RANK)
        most = MAX_PRODUCTS // (len(pairs) * smaller)
        if ranks[i] <= ranks[j]:
            found.append((i, j, smaller, min(ranks[j], most)))
        else:
            found.append((i, j, min(ranks[i], most), smaller))
    return found


def principal_directions(features: torch.Tensor) -> torch.Tensor:
    """Returns at most `MAX_RANK` directions of an input in which its standardised embeddings, (n, width), vary most.

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
