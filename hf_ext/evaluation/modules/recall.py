"""Recall at a threshold, for `evaluate.load`."""

from __future__ import annotations

from hf_ext.evaluation import metrics
from hf_ext.evaluation.modules import base


class Recall(base.ThresholdMetric):
    """Share of the rows measured at or above the threshold that were predicted there."""

    key = "recall"
    ratio = staticmethod(metrics.ThresholdCounts.recall)
