"""Heads of several kinds on the same frozen embeddings and residues, weighed: linear ones, kernels and networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import combinations
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...data import RESIDUES
from ...errors import ArgumentError
from .kernel_map import KernelMap
from .stacks import FORMS, PERCEPTRON, NearestStack, NetworkStack

FEATURES = "features"  # what a member reads; or RESIDUES
COUNTS = "counts"  # of residues alone, where these have what variants substitute, too
DIRECTIONS = "directions"
COMPARED = {
    "kernel of features": [FEATURES],
    "kernel of residues": [RESIDUES],
    "kernel of counts": [COUNTS],
    "both kernels": [FEATURES, RESIDUES],
}
LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda outputs: outputs,
    "softmax": lambda outputs: outputs.softmax(-1),
    "sigmoid": torch.sigmoid,
}
LEAST = 1e-6  # of a probability
MAX_RANK = 64  # directions kept of an input
SMALLER_RANK = 16  # directions of the smaller of two inputs that are multiplied
MAX_PRODUCTS = 512  # of two inputs' directions, in all
NEGLIGIBLE = 1e-6  # of the largest variance: a direction below it is rounding


class HeadEnsemble(nn.Module):
    """The weighted sum of linear models and networks on standardised embeddings: of numbers, or of probabilities.

    They read these features, or directions: the principal ones of each input, and products of those of two inputs,
    which say what one is worth for the other; or counts of residues; or how near a row is to some of training, in
    features, in residues or in both. Nothing here trains: `hf_ext.heads.ensemble` fits it.

    Args:
        widths: of each input's embedding.
        ranks: directions of each input.
        networks: arguments of `make_stack` for each, besides `dropout`; of linear models too.
        num_outputs: of each member.
        link: from outputs to what is summed: "identity", "softmax" of classes, "sigmoid" of labels by themselves.
        num_residues: what is read off the sequences of a row, beside features; 0: nothing.
        num_counts: the last of these, if they are a view of their own, too.
        kernels: by what they compare rows in, arguments of a `KernelMap` besides its width.

    Buffers, float32: `basis_<i>` (width, rank), `scales` of the directions, `shares`, the weights of the networks,
    (m,), and `intercept`, (num_outputs,), what a constant adds to the sum.
    """

    kernels: MutableMapping[str, KernelMap]
    scales: Tensor
    shares: Tensor
    intercept: Tensor

    def __init__(
        self,
        widths: Sequence[int],
        ranks: Sequence[int],
        networks: Sequence[Mapping[str, Any]],
        num_outputs: int = 1,
        link: str = "identity",
        num_residues: int = 0,
        num_counts: int = 0,
        kernels: Mapping[str, Sequence[int]] | None = None,
    ):
        super().__init__()
        self.widths = [*widths]
        self.ranks = [*ranks]
        self.num_outputs = num_outputs
        self.link = link
        self.kept = [*_products(ranks)]  # pairs of inputs, and how many directions of each are multiplied
        num_products = sum(a * b for *_, a, b in self.kept)
        self.sizes = {FEATURES: sum(widths), DIRECTIONS: sum(ranks) + num_products}
        self.sizes |= {RESIDUES: num_residues, COUNTS: num_counts}
        self.kernels = cast(MutableMapping[str, KernelMap], nn.ModuleDict())
        for view, (rows, rank) in (kernels or {}).items():
            self.add_kernel(view, KernelMap(rows, self.sizes[view], rank))
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
    ) -> NetworkStack | NearestStack:
        """Makes networks of a form that read `view`, with hidden layers of `sizes`; or what `FORMS` has else."""
        return FORMS[form].make(self, view, number, sizes, dropout)

    def add(self, view: str, weight: float, stack: NetworkStack | NearestStack) -> None:
        """Adds a member: the mean of the stack's networks, with this weight."""
        self.views.append(view)
        self.networks.append(stack.requires_grad_(False).eval())
        self.shares = torch.cat([self.shares, self.shares.new_tensor([weight])])

    def add_kernel(self, view: str, kernel: KernelMap) -> None:
        """Adds how rows are compared in a view; members may read it from here on, and both kernels once there are."""
        self.kernels[view] = kernel
        for name, compared in COMPARED.items():
            if {*compared} <= {*self.kernels}:
                self.sizes[name] = sum(self.kernels[one].rank for one in compared)

    def read(self, view: str, features: Tensor, residues: Tensor | None) -> Tensor:
        """Maps what a row is to what members of `view` read: (n, size), float32.

        Raises:
            ArgumentError: `residues` are needed.
        """
        if view == FEATURES:
            return features
        if view == DIRECTIONS:
            return self.directions(features)
        if view in (RESIDUES, COUNTS):
            if residues is None:
                raise ArgumentError("No residues: some heads of this model read them; its collator counts them.")
            return residues[:, -self.sizes[view] :].float()
        blocks = [self.kernels[one](self.read(one, features, residues)) for one in COMPARED[view]]
        return torch.cat(blocks, dim=1)

    def directions(self, features: Tensor) -> Tensor:
        """Maps (n, sum of widths), standardised, to (n, directions)."""
        parts = features.split(self.widths, dim=1)
        along = [part @ getattr(self, f"basis_{i}") for i, part in enumerate(parts)]
        products = []
        for i, j, a, b in self.kept:
            product = along[i][:, :a, None] * along[j][:, None, :b]
            products.append(product.flatten(1))
        return torch.cat([*along, *products], dim=1) * self.scales

    def forward(self, features: Tensor, residues: Tensor | None = None) -> Tensor:
        """Maps (n, sum of widths), standardised as by the head, float32, and (n, num_residues), to float32: (n,) label
        units, or (n, num_outputs) logits, whose softmax or sigmoid is the sum of the members' probabilities."""
        return self.mix(features, residues)[0]

    def mix(self, features: Tensor, residues: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Maps as `forward` does, and says how far members are apart: (n,), their squared distance from the sum."""
        with torch.autocast(features.device.type, enabled=False):
            views = {view: self.read(view, features, residues) for view in dict.fromkeys(self.views)}
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
    def fit_directions(self, bases: Sequence[Tensor], features: Tensor) -> None:
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
            stack = cast(NetworkStack | NearestStack, one)
            shapes = {
                "view": view,
                "number": stack.number,
                "sizes": stack.sizes,
                "form": stack.form,
            }
            networks.append(shapes)
        return {
            "ranks": self.ranks,
            "networks": networks,
            "num_outputs": self.num_outputs,
            "link": self.link,
            "num_residues": self.sizes[RESIDUES],
            "num_counts": self.sizes[COUNTS],
            "kernels": {view: [len(kernel.landmarks), kernel.rank] for view, kernel in self.kernels.items()},
        }

    def drop_unread(self) -> None:
        """Drops kernels that no member reads; to be called once all are added."""
        read = {one for view in self.views for one in COMPARED.get(view, ())}
        for view in {*self.kernels} - read:
            del self.kernels[view]
        if not {RESIDUES, COUNTS} & ({*self.views} | read):
            self.sizes |= {RESIDUES: 0, COUNTS: 0}


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


def principal_directions(features: Tensor) -> Tensor:
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
