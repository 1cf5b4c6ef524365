"""Metrics of numbers: one or several of each row, or one of each residue; and by which of them each kind is scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..labels import Outputs
from ..text import format_cell
from ._arrays import Array, FloatArray, IntArray, as_pair
from .alarms import Examined, examine_numbers, label_audit
from .kind_rows import KindRows, Known
from .metrics import (
    GROUP_METRIC,
    HIT_METRICS,
    MEAN_METRICS,
    PLAIN_METRICS,
    RATIO_METRICS,
    THRESHOLD_METRICS,
    Counted,
    GroupScore,
    Regression,
    Rows,
    Summed,
    is_ratio,
    mean_of_groups,
    per_group_spearman,
    score_names,
)
from .ranks import Once

if TYPE_CHECKING:
    from datasets import Dataset

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

    def __init__(self, predicted: FloatArray, measured: FloatArray, row: IntArray, num_rows: int) -> None:
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

    def __init__(self, predicted: FloatArray, measured: FloatArray, columns: Sequence[str]) -> None:
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
    return ("nrmse", *PLAIN_METRICS, *(f"{column}_{metric}" for column in columns for metric in PLAIN_METRICS))


class NumberRows(KindRows):
    """Of one number per row."""

    decides = chooses = "rmse"
    by_loss = {"tobit": "loss", "ranking": "spearman"}  # tobit knows limits, which the RMSE of an evaluation does not
    of_threshold = THRESHOLD_METRICS
    of_hits = HIT_METRICS
    of_groups = (GROUP_METRIC,)
    more_logged = ("num_distinct",)
    more_compared = (*RATIO_METRICS, *MEAN_METRICS)
    first = PLAIN_METRICS
    orders = "spearman"
    chance = " at ordering rows"
    beats_constant = "rmse"

    @property
    def names(self) -> tuple[str, ...]:
        return score_names(self.threshold)

    def verdict_metric(self, name: str, is_asked: bool) -> str | None:
        """Returns the metric that chooses checkpoints, where final scores have it; None where the loss decides."""
        return name if name in {*PLAIN_METRICS, *THRESHOLD_METRICS} & {*self.names} else None

    def describe_verdict(self, metric: str) -> str:
        return f"verdict in {metric}."

    def rows(self, predictions: Outputs, labels: Outputs, metric: str = "") -> Rows:
        pair = as_pair(predictions, labels)
        return Summed(*pair) if is_ratio(metric) else Regression(*pair, self.threshold)

    def measure(self, rows: Rows) -> dict[str, float]:
        assert isinstance(rows, Regression)
        return {**super().measure(rows), "num_distinct": float(len(np.unique(rows.predicted)))}

    def unpack(self, values: Any) -> Array:
        return np.asarray(super().unpack(values), np.float64).reshape(-1)

    def examine(self, predictions: Outputs, labels: Outputs) -> Examined:
        return examine_numbers(predictions, labels)

    def can_examine(self, predictions: Outputs, labels: Outputs) -> bool:
        """Says whether there is one number per row, (n,) or (n, 1), and labels of more than two values."""
        columns = [np.asarray(predictions), np.asarray(labels)]
        if any(c.dtype.kind != "f" or not (c.ndim == 1 or c.shape[1:] == (1,)) for c in columns):
            return False
        return len(columns[0]) == len(columns[1]) and len(np.unique(columns[1])) > 2

    def audit(self, rows: Dataset, bounds: IntArray | None) -> dict[str, Any]:
        return label_audit(rows["label"][:], bounds)

    def describe_audit(self, audit: Mapping[str, Any]) -> str:
        low, high, mean, deviation = (format_cell(audit[name]) for name in ("min", "max", "mean", "std"))
        return f"{low} to {high}, mean {mean}, deviation {deviation}"


class NumbersRows(KindRows):
    """Of several numbers per row."""

    decides = chooses = "nrmse"
    means = ("nrmse",)

    @property
    def names(self) -> tuple[str, ...]:
        return several_names(self.kind.names)

    def make_rows(self, known: Known) -> Rows:
        return SeveralNumbers(known.values.astype(np.float64), known.truth, self.kind.names)

    def examine(self, predictions: Outputs, labels: Outputs) -> Examined:
        """Returns the report of the first number, and the alarms of all."""
        values, truth, *_ = self.known(predictions, labels)
        columns = [(value, of, np.isfinite(of)) for value, of in zip(values.T, truth.T)]
        found = [examine_numbers(value[known], of[known]) for value, of, known in columns]
        named = [
            (name, about, text) for name, (_, alarms) in zip(self.kind.names, found) for about, text in alarms.items()
        ]
        return found[0][0], {f"{about} {name}": f"{name}: {text}" for name, about, text in named}


class ResidueNumberRows(KindRows):
    """Of a number per residue."""

    decides = chooses = "rmse"
    means = ("rmse", "mae", PER_PROTEIN)
    names = RESIDUE_METRICS

    def make_rows(self, known: Known) -> Rows:
        return ResidueRegression(known.values.astype(np.float64).reshape(-1), known.truth, known.row, known.num_rows)

    def examine(self, predictions: Outputs, labels: Outputs) -> Examined:
        values, truth, *_ = self.known(predictions, labels)
        return examine_numbers(values[:, 0], truth)
