"""Metrics of numbers: several of each row, or one of each residue."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np

from .arrays import FloatArray, IntArray
from .ranks import Once
from .regression import GroupScore, Regression, mean_of_groups, per_group_spearman
from .rows import PLAIN_METRICS, Counted, Rows, Summed

PER_PROTEIN = "per_protein_spearman"
RESIDUE_METRICS = ("rmse", "mae", "r2", "pearson", PER_PROTEIN)


class ResidueRegression(Regression):
    """One number per residue beside its label; proteins are the rows, and are drawn whole.

    Errors and Pearson are over all residues, whichever protein they are of; Spearman is the mean over proteins of 10
    known residues and more.

    Args:
        predicted, measured: (residues,) float64, of residues whose label is known.
        row: (residues,) int64, the protein of each.
        num_rows: proteins.

    Cost: that of as many rows as there are proteins, and 0.1 ms per protein for Spearman.
    """

    def __init__(self, predicted: FloatArray, measured: FloatArray, row: IntArray, num_rows: int):
        super().__init__(predicted, measured)
        self.num_rows = num_rows
        self._row = row

    def _by_row(self, values: FloatArray) -> FloatArray:
        columns = values.reshape(len(values), -1).T
        sums = [np.bincount(self._row, column, self.num_rows) for column in columns]
        table = np.stack(sums, axis=1).astype(np.float64)
        return table.reshape(self.num_rows, *values.shape[1:])

    def why_undefined(self, name: str) -> str | None:
        reason = super().why_undefined(name)
        if reason is None and name == PER_PROTEIN:
            return mean_of_groups(self._groups).undefined
        return reason

    @cached_property
    def _groups(self) -> dict[str, GroupScore]:
        return per_group_spearman(self.predicted, self.measured, self._row)

    @cached_property
    def means(self) -> dict[str, Summed]:
        values, has = np.zeros((2, self.num_rows))
        for protein, score in self._groups.items():
            if score["value"] is not None:
                values[int(protein)] = score["value"]
                has[int(protein)] = 1.0
        return {**super().means, PER_PROTEIN: Summed(values, has)}


class SeveralNumbers(Rows):
    """Several numbers per row beside their labels, each of which may be unknown.

    A metric is its mean over the columns; COLUMN_METRIC is that of a column. `nrmse` is the one to decide by where
    columns have different units: the root of the mean over columns of (RMSE / the labels' standard deviation)^2, 1 for
    the labels' own means.

    Args:
        predicted: (n, k) float64.
        measured: (n, k) float64, NaN where it is not known. A column without any label counts nowhere.
        columns: k names.

    Cost: that of k regressions.
    """

    def __init__(self, predicted: FloatArray, measured: FloatArray, columns: Sequence[str]):
        super().__init__(len(measured))
        self._rows: dict[str, IntArray] = {}
        self._parts: dict[str, Regression] = {}
        for j, name in enumerate(columns):
            if len(rows := np.flatnonzero(~np.isnan(measured[:, j]))):
                self._rows[name] = rows
                self._parts[name] = Regression(predicted[rows, j], measured[rows, j])
        self._take = {name: Once(partial(np.take, indices=rows, axis=1)) for name, rows in self._rows.items()}

    def why_undefined(self, name: str) -> str | None:
        if not self._parts:
            return "no row has a known label"
        column, metric = self._split(name)
        metric = "r2" if metric == "nrmse" else metric
        for part in self._parts if column is None else [column]:
            if part not in self._parts:
                return "no rows"
            if reason := self._parts[part].why_undefined(metric):
                return f"{part}: {reason}" if column is None else reason
        return None

    def metric(self, name: str) -> Counted:
        column, metric = self._split(name)
        if metric == "nrmse":
            return self.means[metric].metric(metric)
        parts = [*self._parts] if column is None else [column]

        def mean(counts: FloatArray) -> FloatArray:
            values = []
            for part in parts:
                of_part = self._parts[part].metric(metric)
                values.append(of_part(self._take[part](counts)))
            return np.mean(values, axis=0)

        return mean

    def _split(self, name: str) -> tuple[str | None, str]:
        column, _, metric = name.rpartition("_")
        return column or None, metric

    @cached_property
    def means(self) -> dict[str, Summed]:
        squares = np.zeros(self.num_rows)
        for name, part in self._parts.items():
            ratio = (part.predicted - part.measured) / part.measured.std()
            squares[self._rows[name]] += ratio**2 * self.num_rows / len(ratio) / len(self._parts)
        return {"nrmse": Summed(squares, np.ones(self.num_rows), np.sqrt)}


def several_names(columns: Sequence[str]) -> tuple[str, ...]:
    """Returns what `SeveralNumbers` scores of such columns."""
    return (
        "nrmse",
        *PLAIN_METRICS,
        *(f"{column}_{metric}" for column in columns for metric in PLAIN_METRICS),
    )
