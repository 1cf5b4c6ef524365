"""Spearman, for `evaluate.load`."""

from __future__ import annotations

from hf_ext.evaluation import metrics
from hf_ext.evaluation.modules import base


class Spearman(base.RegressionMetric):
    """Rank correlation with average ranks for ties; NaN where either side is constant."""

    key = "spearman"
    metric = staticmethod(metrics.spearman)
