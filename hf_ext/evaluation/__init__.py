"""Metrics, scores with intervals, baselines, a verdict, alarms. Nothing is imported before its first use."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .alarms import label_audit
    from .case import CONSTANT, CONSTANTS, MODEL, Verdict
    from .comparison import PairedComparison, compare_paired
    from .evaluate_metrics import METRIC_NAMES, load_metric
    from .kinds import collapse_report, metrics_of, rows_for
    from .metrics.arrays import (
        FloatArray,
        as_column,
        as_groups,
        as_pair,
        count_not_finite,
        places_of,
    )
    from .metrics.classes import find_shares
    from .metrics.rows import (
        HIT_METRICS,
        PLAIN_METRICS,
        RATIO_METRICS,
        THRESHOLD_METRICS,
        MetricValue,
        Summed,
    )
    from .requirements import (
        Requirement,
        check_requirements,
        describe_failed,
        format_checked,
        parse_requirements,
        raise_failed,
    )
    from .resampling import MIN_GROUPS, ResamplingGroups, check_groups, group_facts, resample_metrics
    from .row_metrics import ChosenRows, RowMetrics, choose_rows, unpack_labelled, unpack_std
    from .scores import Score, make_score, score_mean, score_predictions
    from .stopping_rule import StoppingDecision, StoppingRule
    from .verdict import find_hardest, judge, judge_pair
else:
    __getattr__, __dir__, __all__ = offer(__name__)
