"""How rows of each kind of label that is a number are scored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import Facts, Json
from ..labels import Outputs
from ..text import format_cell
from .alarms import Examined, examine_numbers, label_audit
from .kind_rows import KindRows, Known, Names
from .metrics.arrays import Array, IntArray, as_pair
from .metrics.numbers import (
    PER_PROTEIN,
    RESIDUE_METRICS,
    ResidueRegression,
    SeveralNumbers,
    several_names,
)
from .metrics.regression import Regression
from .metrics.rows import (
    GROUP_METRIC,
    HIT_METRICS,
    MEAN_METRICS,
    PLAIN_METRICS,
    RATIO_METRICS,
    THRESHOLD_METRICS,
    Rows,
    Summed,
    is_ratio,
    score_names,
)

if TYPE_CHECKING:
    from datasets import Dataset


class NumberRows(KindRows):
    """Of one number per row."""

    decides = chooses = "rmse"
    by_loss = {
        "tobit": "loss",
        "ranking": "spearman",
    }  # tobit knows limits, which the RMSE of an evaluation does not
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
    def names(self) -> Names:
        return score_names(self.threshold)

    def verdict_metric(self, name: str, is_asked: bool) -> str | None:
        """Returns the metric that chooses checkpoints, where final scores have it; None where the loss decides."""
        return name if name in self.names else None

    def describe_verdict(self, metric: str) -> str:
        return f"verdict in {metric}."

    def rows(self, predictions: Outputs, labels: Outputs, metric: str = "") -> Rows:
        pair = as_pair(predictions, labels)
        return Summed(*pair) if is_ratio(metric) else Regression(*pair, self.threshold)

    def measure(self, rows: Rows) -> dict[str, float]:
        assert isinstance(rows, Regression)
        return {
            **super().measure(rows),
            "num_distinct": float(len(np.unique(rows.predicted))),
        }

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

    def audit(self, rows: Dataset, bounds: IntArray | None) -> Json:
        return label_audit(rows["label"][:], bounds)

    def describe_audit(self, audit: Facts) -> str:
        low, high, mean, deviation = (format_cell(audit[name]) for name in ("min", "max", "mean", "std"))
        return f"{low} to {high}, mean {mean}, deviation {deviation}"


class NumbersRows(KindRows):
    """Of several numbers per row."""

    decides = chooses = "nrmse"
    means = ("nrmse",)

    @property
    def names(self) -> Names:
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
        return ResidueRegression(
            known.values.astype(np.float64).reshape(-1),
            known.truth,
            known.row,
            known.num_rows,
        )

    def examine(self, predictions: Outputs, labels: Outputs) -> Examined:
        values, truth, *_ = self.known(predictions, labels)
        return examine_numbers(values[:, 0], truth)
