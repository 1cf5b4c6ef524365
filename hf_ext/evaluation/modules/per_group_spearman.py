"""Spearman inside every group, for `evaluate.load`."""

from __future__ import annotations

from hf_ext.evaluation import metrics
from hf_ext.evaluation.modules import base


class PerGroupSpearman(base.GroupMetric):
    """Rank correlation inside every group, and its mean over the groups that have one."""

    key = "per_group_spearman"
    metric = staticmethod(metrics.spearman)
