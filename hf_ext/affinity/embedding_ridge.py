"""Ridge regressions on embeddings: one of all rows, and, where one side has few values, one for each of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..evaluation.baselines import RidgeBaseline
from ..models.affinity import AffinityModel
from ..models.postprocess import StackedRidge
from .partners import Columns, FloatArray, PartnerRidges, find_partner, fit_partner_ridges


@dataclass(frozen=True)
class EmbeddingRidge:
    """`pooled`: of all rows. `by_partner`: of the rows of each partner; None where there are no partners."""

    pooled: RidgeBaseline
    by_partner: PartnerRidges | None

    def stacks(self, model: AffinityModel, columns: Sequence[str], read: Mapping[str, Sequence[str]]) -> list[Stack]:
        """What a model can keep beside its head: the pooled ridge, and two or more by partner if embeddings show it.

        Args:
            model: whose embeddings were fitted on.
            columns: of the sequences that partners were found in.
            read: input of the model -> its columns.
        """
        assert self.pooled.weights is not None  # it is fitted
        weights, intercepts = self.pooled.weights[None], np.array([self.pooled.intercept])
        alone = model.new_ridge()
        alone.fill(torch.from_numpy(weights), torch.from_numpy(intercepts))
        stacks = [Stack(alone, {})]
        ridges = self.by_partner
        inputs = [] if ridges is None else _inputs_of(ridges, columns, read)
        if ridges is not None and len(ridges.fitted) > 1 and inputs:
            keys = sorted(ridges.fitted)
            own = np.array([ridges.fitted[key].weights for key in keys])
            own_intercepts = [ridges.fitted[key].intercept for key in keys]
            partners = {"inputs": inputs, "number": len(keys)}
            each = model.new_ridge(inputs, len(keys))
            each.fill(
                torch.from_numpy(np.concatenate([weights, own])),
                torch.from_numpy(np.concatenate([intercepts, own_intercepts])),
                torch.from_numpy(np.array([ridges.examples[key] for key in keys])),
            )
            stacks.append(Stack(each, {"partners": partners}))
        return stacks


@dataclass(frozen=True)
class Stack:
    """A filled ridge, and what a calibration that stacks it says of it."""

    ridge: StackedRidge
    described: dict[str, Any]


def fit_embedding_ridge(
    features: Sequence[NDArray[np.floating]], labels: Sequence[FloatArray], sequences: Sequence[Columns]
) -> EmbeddingRidge:
    """Fits on training, penalties on validation: (n, d) embeddings, (n,) labels, sequences by column, of both."""
    pooled = RidgeBaseline().fit(features[0], labels[0], features[1], labels[1])
    partner = find_partner(sequences[0])[0]
    if partner is None:
        return EmbeddingRidge(pooled, None)
    return EmbeddingRidge(pooled, fit_partner_ridges(partner, features, labels, sequences, standardize=True))


def _inputs_of(ridges: PartnerRidges, columns: Sequence[str], read: Mapping[str, Sequence[str]]) -> list[str]:
    """Inputs whose embeddings tell partners apart, and nothing else; none where one reads another column too."""
    own, others = ({columns[i] for i in chosen} for chosen in (ridges.partner.columns, ridges.partner.main))
    inputs = [name for name, parts in read.items() if own & {*parts}]
    return [] if any(others & {*read[name]} for name in inputs) else inputs
