"""What members of an ensemble compute: networks of the same sizes side by side, in one pass, or the nearest rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

PERCEPTRON = "mlp"  # forms of networks
PRODUCT = "product"
NEAREST = "nearest"
DECAY = 3.0  # of the weight of the farthest of the nearest rows, as an exponent


class Views(Protocol):
    """What of a `HeadEnsemble` its members are made by: sizes of views, directions of inputs, outputs."""

    sizes: dict[str, int]
    ranks: list[int]
    num_outputs: int


class NetworkStack(nn.Module):
    """Perceptrons of the same sizes side by side: Linear, GELU, dropout per hidden layer, LayerNorm between them.

    Args:
        number: of networks.
        shapes: inputs and outputs of each layer.
        dropout: probability in [0, 1).
    """

    form: ClassVar[str] = PERCEPTRON
    generator: torch.Generator | None = None  # of dropout; None: torch's own

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
    def make(cls, ensemble: Views, view: str, number: int, sizes: Sequence[int], dropout: float) -> NetworkStack:
        """Makes networks with hidden layers of `sizes` that read `view`."""
        return cls(number, pairwise([ensemble.sizes[view], *sizes, ensemble.num_outputs]), dropout)

    @property
    def number(self) -> int:
        """Of networks."""
        return len(self.weights[0])

    @property
    def sizes(self) -> list[int]:
        """Of the hidden layers, as `make` takes them."""
        return [weight.shape[2] for weight in self.weights[:-1]]

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps (number, n, inputs), or (n, inputs) for all of them, to (number, n, outputs)."""
        states = inputs.expand(self.number, *inputs.shape[-2:])
        layers = [*zip(self.weights, self.biases)]
        for i, (weight, bias) in enumerate(layers[:-1]):
            if i > 0:
                states = nn.functional.layer_norm(states, states.shape[-1:])
            states = nn.functional.gelu(torch.baddbmm(bias, states, weight))
            states = self.drop(states)
        weight, bias = layers[-1]
        return torch.baddbmm(bias, states, weight)

    def drop(self, states: Tensor) -> Tensor:
        """Does to states in training what `nn.Dropout` does, by random numbers of this stack alone."""
        if not self.training or self.dropout == 0:
            return states
        kept = torch.empty_like(states).bernoulli_(1 - self.dropout, generator=self.generator)
        return states * kept.div_(1 - self.dropout)

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
    def make(cls, ensemble: Views, view: str, number: int, sizes: Sequence[int], dropout: float) -> NetworkStack:
        """Makes networks with one hidden layer, which read the directions of inputs."""
        return cls(number, ensemble.ranks, sizes[0], ensemble.num_outputs, dropout)

    @property
    def sizes(self) -> list[int]:
        return [self.weights[-2].shape[2]]

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps (number, n, inputs), or (n, inputs) for all of them, to (number, n, num_outputs)."""
        inputs = inputs[..., : sum(self.widths)].expand(self.number, -1, -1)
        blocks = [*inputs.split(self.widths, dim=-1), inputs]
        given = zip(blocks, self.weights, self.biases)
        *projected, hidden = [torch.baddbmm(bias, states, weight) for states, weight, bias in given]
        products = [one * other for one, other in combinations(projected, 2)]
        states = torch.cat([*products, nn.functional.gelu(hidden)], dim=-1)
        states = self.drop(states)
        return torch.baddbmm(self.biases[-1], states, self.weights[-1])


class NearestStack(nn.Module):
    """The mean label of the nearest training rows, the farthest of them weighed least.

    Args:
        rows: of training that are kept.
        width: columns of a view that are compared; those behind are not read.
        num_nearest: rows of the mean.

    Buffers, float32: `rows` (rows, width), `labels` (rows,), label units.
    """

    form: ClassVar[str] = NEAREST
    number = 1
    rows: Tensor
    labels: Tensor

    def __init__(self, rows: int, width: int, num_nearest: int):
        super().__init__()
        self.num_nearest = num_nearest
        self.register_buffer("rows", torch.zeros(rows, width))
        self.register_buffer("labels", torch.zeros(rows))

    @classmethod
    def make(cls, ensemble: Views, view: str, number: int, sizes: Sequence[int], dropout: float) -> NearestStack:
        """Makes one that compares rows by the directions of inputs; `sizes`: rows, and how many are nearest."""
        return cls(sizes[0], sum(ensemble.ranks), sizes[1])

    @property
    def sizes(self) -> list[int]:
        return [len(self.rows), self.num_nearest]

    def fill(self, rows: Tensor, labels: Tensor) -> NearestStack:
        """Takes over training rows, (rows, columns of the view), and their labels."""
        self.rows.copy_(rows[:, : self.rows.shape[1]])
        self.labels.copy_(labels)
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps (n, columns of the view) to (1, n, 1)."""
        inputs = inputs[:, : self.rows.shape[1]]
        away = torch.addmm(self.rows.square().sum(1), inputs, self.rows.T, alpha=-2)  # less the square of inputs
        away, nearest = away.topk(min(self.num_nearest, len(self.rows)), largest=False)
        squares = (away + inputs.square().sum(1, keepdim=True)).clamp(min=0)
        weights = (-DECAY * squares / squares[:, -1:].clamp(min=1e-12)).softmax(1)
        return (weights * self.labels[nearest]).sum(1)[None, :, None]


FORMS: dict[str, type[NetworkStack | NearestStack]] = {
    stack.form: stack for stack in (NetworkStack, ProductStack, NearestStack)
}
