"""MAE, for `evaluate.load`."""

from __future__ import annotations

from hf_ext.evaluation import metrics
from hf_ext.evaluation.modules import base


class Mae(base.RegressionMetric):
    """Mean absolute error, in the unit of the labels."""

    key = "mae"
    metric = staticmethod(metrics.mae)
