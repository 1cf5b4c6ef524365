"""RMSE, for `evaluate.load`."""

from __future__ import annotations

from hf_ext.evaluation import metrics
from hf_ext.evaluation.modules import base


class Rmse(base.RegressionMetric):
    """Root mean squared error, in the unit of the labels."""

    key = "rmse"
    metric = staticmethod(metrics.rmse)
