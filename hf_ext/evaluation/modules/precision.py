"""Precision at a threshold, for `evaluate.load`."""

from __future__ import annotations

from hf_ext.evaluation import metrics
from hf_ext.evaluation.modules import base


class Precision(base.ThresholdMetric):
    """Share of the rows predicted at or above the threshold that were measured there."""

    key = "precision"
    ratio = staticmethod(metrics.ThresholdCounts.precision)
