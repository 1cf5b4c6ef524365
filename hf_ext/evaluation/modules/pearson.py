"""Pearson, for `evaluate.load`."""

from __future__ import annotations

from hf_ext.evaluation import metrics
from hf_ext.evaluation.modules import base


class Pearson(base.RegressionMetric):
    """Linear correlation; NaN where either side is constant."""

    key = "pearson"
    metric = staticmethod(metrics.pearson)
