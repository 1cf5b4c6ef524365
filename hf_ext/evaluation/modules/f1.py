"""F1 at a threshold, for `evaluate.load`."""

from __future__ import annotations

from hf_ext.evaluation import metrics
from hf_ext.evaluation.modules import base


class F1(base.ThresholdMetric):
    """Harmonic mean of recall and precision at the threshold."""

    key = "f1"
    ratio = staticmethod(metrics.ThresholdCounts.f1)
