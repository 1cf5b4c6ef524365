"""Embeddings and labels of rows as one search sees them, and which rows it holds out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ...data.columns import read_columns
from ...models.head import RegressionHead
from ..baselines import pooled_features
from ..rows import label_array, read_bounds

# With fewer in validation, training rows are held out in turn too.
ENOUGH_ROWS = 250
ENOUGH_UNITS = 10  # antibodies, antigens or clusters, where these were held out
NUM_PARTS = 5  # of training, of which one is held out at a time
MAX_FURTHER = 3  # of these parts, at most


@dataclass(frozen=True)
class HeadRows:
    """Rows of a split.

    Attributes:
        features: (n, sum of embedding widths) float32, standardised, on the device that trains.
        labels: (n,) float64, label units, on the CPU.
        bounds: (n,) of -1, 0, 1, see `regression_loss`; on the CPU.
    """

    features: torch.Tensor
    labels: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: np.ndarray) -> HeadRows:
        """The rows of these numbers."""
        index = torch.from_numpy(rows).to(self.features.device)
        return HeadRows(self.features[index], self.labels[rows], self.bounds[rows])


def read_rows(trainer: Any, splits: Mapping[str, Any]) -> tuple[HeadRows, HeadRows]:
    """Training and validation rows of map-style splits, features standardised as a head does with the training rows'.

    Features of an input that a row lacks are 0.

    Called by all processes. Cost: with the embedding cache, a look-up.
    """
    train, validation = (_read(trainer, splits[name]) for name in ("train", "validation"))
    mean, std = train.features.mean(0), train.features.std(0, unbiased=False)
    lacking = [_lacking_blocks(trainer, splits[name]) for name in ("train", "validation")]
    for block, absent in lacking[0]:  # measured on the rows that have the input, as in a run
        present = train.features[~absent, block]
        if len(present):
            mean[block], std[block] = present.mean(0), present.std(0, unbiased=False)
    scaling = RegressionHead(train.features.shape[1], [], 0.0).to(train.features.device)
    scaling.fit_scaling(mean, std)
    for rows, blocks in zip((train, validation), lacking):  # in place: these may be a gigabyte
        rows.features.sub_(scaling.input_mean).mul_(scaling.input_scale)
        for block, absent in blocks:
            rows.features[absent, block] = 0.0
    return train, validation


def _lacking_blocks(trainer: Any, split: Any) -> list[tuple[slice, torch.Tensor]]:
    """Of each input that rows may lack, its features, and which rows do: (n,) bool, on the device that trains."""
    collator, widths, blocks = trainer.data_collator, trainer.model.embedding_sizes, []
    for name, end in zip(widths, accumulate(widths.values())):
        if name in collator.optional_inputs:
            absent = [not any(row) for row in read_columns(split, collator.columns[name])]
            blocks.append((slice(end - widths[name], end), torch.tensor(absent, device=trainer.args.device)))
    return blocks


def _read(trainer: Any, split: Any) -> HeadRows:
    features = torch.from_numpy(pooled_features(trainer, split)).to(trainer.args.device)
    bounds = read_bounds(split)
    return HeadRows(features, label_array(split), np.zeros(len(split), np.int64) if bounds is None else bounds)


def make_folds(
    train: HeadRows, validation: HeadRows, units: tuple[Sequence[Any], Sequence[Any]] | None, seed: int
) -> list[tuple[HeadRows, HeadRows]]:
    """Rows to train on and rows held out from them: first the validation rows; where these are few, parts of training.

    Args:
        train, validation: splits of a run.
        units: of each training and of each validation row what was held out together, such as its antibody: a part has
            whole ones. None: rows.
        seed: of the parts.
    """
    folds = [(train, validation)]
    units_lacking = 0 if units is None else ENOUGH_UNITS - len(set(units[1]))
    rows_lacking = ENOUGH_ROWS - len(validation)
    number = np.arange(len(train)) if units is None else np.unique(np.asarray(units[0]), return_inverse=True)[1]
    for part in _parts(number, seed):
        held_out, rest = np.flatnonzero(part), np.flatnonzero(~part)
        if max(rows_lacking, units_lacking) <= 0 or not len(held_out) or not len(rest) or len(folds) > MAX_FURTHER:
            break
        folds.append((train.take(rest), train.take(held_out)))
        rows_lacking -= len(held_out)
        units_lacking -= len(np.unique(number[held_out]))
    return folds


def _parts(number: np.ndarray, seed: int) -> Iterator[np.ndarray]:
    """Masks, (n,) bool, that share no row and no unit; `number`: of each row's unit, from 0."""
    order = np.random.default_rng(seed).permutation(int(number.max()) + 1)
    part_of_unit = np.empty(len(order), np.int64)
    part_of_unit[order] = np.arange(len(order)) % NUM_PARTS
    for part in range(NUM_PARTS):
        yield part_of_unit[number] == part
