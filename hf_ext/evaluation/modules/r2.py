"""R2, for `evaluate.load`."""

from __future__ import annotations

from hf_ext.evaluation import metrics
from hf_ext.evaluation.modules import base


class R2(base.RegressionMetric):
    """Share of the references' variance explained; below 0 is worse than their own mean."""

    key = "r2"
    metric = staticmethod(metrics.r2)
