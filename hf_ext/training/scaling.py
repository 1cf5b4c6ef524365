"""Before the first step: the scale of labels and of embeddings, measured once on the training data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Any

import datasets
import numpy as np
import torch

from ..data.columns import read_columns
from ..embeddings.dataset import join_parts, number_inputs
from ..errors import DataError

SAMPLE = 2048  # distinct sequences per input: enough for a mean and a spread per feature
LIVE_SAMPLE = 256  # where encoders train: each costs a forward pass, and their embeddings move anyway


def fit_scaling(
    model: Any,
    rows: Any,
    columns: Mapping[str, Sequence[str]],
    encode: Callable[[str, list[str]], torch.Tensor],
    seed: int,
    embed: Callable[[Any], Any] | None = None,
    optional: Collection[str] = (),
) -> None:
    """Measures mean and spread of labels over all rows, of embeddings over a sample of sequences per input.

    Cost: with the embedding cache, nothing that training would not need anyway; without, 256 sequences per input.

    Args:
        model: gets them by its `fit_scaling`; the same numbers on every rank.
        rows: with a column `label`; of a stream, the first 2048 are read.
        columns: of each input, the columns whose text it joins.
        encode: of an input and sequences, their embeddings, (n, width).
        seed: of the choice of sequences.
        embed: embeds all rows first, so that shards are cut from the whole set; None where there is no cache.
        optional: inputs that rows may lack; scales are those of the rows that have them.

    Raises:
        DataError: no row has an input.
    """
    if not hasattr(rows, "__len__"):
        rows = datasets.Dataset.from_list(list(islice(rows, SAMPLE)))
    labels = np.array(read_columns(rows, ["label"]), np.float64)
    if embed is not None:
        embed(rows)
    size = LIVE_SAMPLE if embed is None else SAMPLE
    samples = {name: _sample(rows, columns[name], size, seed, name in optional) for name in model.embedding_sizes}
    for name, sample in samples.items():
        if not sample:
            raise DataError(
                f"None of {len(rows):,} training rows has input '{name}', so its scale cannot be measured, and nothing "
                "can be learned from it. Leave its columns out, or train on rows of which some have it."
            )
    embeddings = {name: encode(name, sample) for name, sample in samples.items()}
    model.fit_scaling(float(labels.mean()), float(labels.std()), embeddings)


def _sample(rows: Any, columns: Sequence[str], size: int, seed: int, is_optional: bool) -> list[str]:
    """Some of the distinct inputs of `columns`, shortest first."""
    distinct = sorted(join_parts(parts) for parts in number_inputs(read_columns(rows, columns), is_optional)[1])
    order = np.random.default_rng(seed).permutation(len(distinct))
    return sorted((distinct[i] for i in order[:size]), key=len)
