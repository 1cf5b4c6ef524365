"""The library of heads: a constant, linear models, near rows and networks, each fitted without each fold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ..data import draw_rows
from ..labels import Float32Array
from ..models import (
    DIRECTIONS,
    FEATURES,
    LINKS,
    NEAREST,
    PERCEPTRON,
    PRODUCT,
    HeadEnsemble,
    NearestStack,
    NetworkStack,
)
from ..training_args import FastTrainingArguments
from .networks import side_by_side, train_networks
from .objectives import FloatArray, Folds, IntArray, Objective

# Form of networks, what they read, and factors of the run's learning rate and dropout: no choice is right for all sets.
NETWORKS = (
    (PERCEPTRON, FEATURES, 1.0, 0.0),
    (PERCEPTRON, FEATURES, 0.3, 1.0),
    (PERCEPTRON, DIRECTIONS, 1.0, 1.0),
    (PRODUCT, DIRECTIONS, 1.0, 1.0),  # where two inputs vary
)
PRODUCT_SIZE = 64
NUM_SEEDS = 2  # of each network, and fold
NEIGHBOURS = (3, 10, 30)
MAX_COMPARED = 4_000_000  # numbers of the rows that others are compared with: 16 MB of a model
COMPARED_ROWS = 512  # at a time


@dataclass(frozen=True)
class Member:
    """A head of the library.

    Attributes:
        name: for tables.
        view: what it reads.
        scored: (entries,) of the rows of all folds, by the fits without their fold; see `Objective.entries`.
        fitted: networks, near rows, or a linear model, the mean of those of all folds, as one; or a constant,
            (num_outputs,).
    """

    name: str
    view: str
    scored: FloatArray
    fitted: NetworkStack | NearestStack | FloatArray

    @property
    def kind(self) -> str:
        """Its name without its settings."""
        return self.name.split(",")[0]


def fit_members(
    ensemble: HeadEnsemble,
    views: Mapping[str, Tensor],
    objective: Objective,
    folds: Folds,
    sizes: Sequence[int],
    dropout: float,
    args: FastTrainingArguments,
) -> list[Member]:
    """Fits all; a constant is the first.

    Args:
        ensemble: without members; makes networks.
        views: what members read: (n, size), float32, on the CPU.
        objective: of the n labels.
        folds: numbers of rows that are held out together.
        sizes, dropout: of networks.
        args: of their training.
    """
    rest = [np.setdiff1d(np.arange(len(objective.labels)), fold) for fold in folds]
    constants = [objective.constant(rows) for rows in rest]
    scored = [objective.entries(np.tile(one, (len(fold), 1)), fold) for one, fold in zip(constants, folds)]
    members = [Member("constant", FEATURES, np.concatenate(scored), np.mean(constants, axis=0))]
    for view, values in views.items():
        if view != DIRECTIONS or ensemble.kept:  # without products a linear model of all features says as much
            members += _fit_linear(ensemble, view, values.numpy(), objective, folds, rest)
    if objective.link == "identity":
        members += _fit_nearest(ensemble, views[DIRECTIONS], objective, folds, rest)
    networks = []
    with torch.random.fork_rng([]):
        for form, view, rate, share in NETWORKS:
            if form == PRODUCT and not ensemble.kept:
                continue
            layers = [PRODUCT_SIZE] if form == PRODUCT else sizes
            torch.default_generator.manual_seed(args.seed)
            number = len(folds) * NUM_SEEDS
            stack = cast(NetworkStack, ensemble.make_stack(view, number, layers, form, share * dropout))
            networks.append((view, rate, stack))
    tasks = [
        partial(train_networks, stack, views[view], objective, folds, args, rate) for view, rate, stack in networks
    ]
    for (view, rate, stack), found in zip(networks, side_by_side(tasks, args.device)):
        kind = "products" if stack.form == PRODUCT else "networks"
        name = f"{kind} on {view}, rate {args.learning_rate * rate:.2g}, dropout {stack.dropout:g}"
        members.append(Member(name, view, found, stack))
    return members


def _fit_linear(
    ensemble: HeadEnsemble,
    view: str,
    values: Float32Array,
    objective: Objective,
    folds: Folds,
    rest: Folds,
) -> list[Member]:
    scored: list[list[FloatArray]] = [[] for _ in objective.alphas]
    weights = np.zeros(())
    intercepts = np.zeros(())
    for fold, rows in zip(folds, rest):
        # Validation rows stand last: what is left of them is a view, not a copy of a gigabyte.
        features = values[: len(rows)] if rows[-1] == len(rows) - 1 else values[rows]
        fitted = objective.fit_linear(features, rows)
        for found, weight, intercept in zip(scored, *fitted):
            outputs = torch.from_numpy(values[fold] @ weight + intercept)
            found.append(objective.entries(LINKS[objective.link](outputs).numpy(), fold))
        weights = weights + fitted[0] / len(folds)
        intercepts = intercepts + fitted[1] / len(folds)
    members = []
    kind = "ridge" if objective.link == "identity" else "logistic regression"
    for alpha, found, weight, intercept in zip(objective.alphas, scored, weights, intercepts):
        stack = cast(NetworkStack, ensemble.make_stack(view, 1, []))
        stack.weights[0].data.copy_(torch.from_numpy(weight))
        stack.biases[0].data.copy_(torch.from_numpy(intercept))
        members.append(
            Member(
                f"{kind} on {view}, penalty {alpha:g}",
                view,
                np.concatenate(found),
                stack,
            )
        )
    return members


def _fit_nearest(
    ensemble: HeadEnsemble, values: Tensor, objective: Objective, folds: Folds, rest: Folds
) -> list[Member]:
    """Scores the nearest rows, and keeps those of all folds together: what a fold lacked is not left out of them."""
    labels = torch.from_numpy(objective.labels).float()

    def make(rows: IntArray, num: int) -> NearestStack:
        rows = rows[draw_rows(len(rows), 0, MAX_COMPARED // sum(ensemble.ranks))]
        stack = cast(NearestStack, ensemble.make_stack(DIRECTIONS, 1, [len(rows), num], NEAREST))
        return stack.fill(values[rows], labels[rows])

    every = np.unique(np.concatenate(rest))
    members = []
    for num in NEIGHBOURS:
        found = []
        for fold, rows in zip(folds, rest):
            stack = make(rows, num)
            outputs = torch.cat([stack(part)[0] for part in values[fold].split(COMPARED_ROWS)])
            found.append(objective.entries(outputs.numpy(), fold))
        members.append(Member(f"nearest rows, {num}", DIRECTIONS, np.concatenate(found), make(every, num)))
    return members
