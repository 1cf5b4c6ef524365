"""Scores a reader can weigh, of one model and of two on the same rows: each with its interval, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..labels import Array, FloatArray, LabelKind
from ..text import less_is_better
from .kinds import metrics_of, rows_for
from .metrics.regression import GroupScore, defined_values, mean_of_groups, per_group_spearman
from .metrics.rows import DEFAULT_THRESHOLD, MetricValue
from .resampling import (
    ResamplingGroups,
    check_groups,
    group_facts,
    mean_loss_interval,
    percentile_interval,
    resample,
    resample_metrics,
)

Score = dict[str, Any]  # one metric, as results hold it: the record of every task, see `make_score`


def make_score(
    value: MetricValue,
    samples: FloatArray,
    num_rows: int,
    confidence: float = 0.95,
    groups: ResamplingGroups | None = None,
) -> Score:
    """Makes the record of a value, JSON-able.

    Args:
        value: NaN, or anything, where it says why it is undefined; then there is no interval.
        samples: (resamples,), the same of each resample; empty for no interval.
        num_rows: that it is of.
        groups: what was resampled; None: rows.

    Returns:
        `value`, None where `undefined` says why; `low` and `high`, None where there is no interval; `n` rows,
        `confidence`, `num_resamples`. `interval_by` is the column whose values were drawn
        for the interval, `num_units` how many there are; None and the number of rows where rows were drawn.
        `num_effective_units` is how many of like size would weigh as evenly; `is_trusted` is False where these are
        fewer than 10.

        `score_predictions` adds `threshold` and `base_rate` to metrics of binders; `groups` to the per-group metric,
        whose `n` counts the rows of all groups.
    """
    samples = np.empty(0) if value.undefined else samples
    low, high = percentile_interval(samples, confidence, groups)
    return {
        "value": value.known,
        "low": low,
        "high": high,
        "n": num_rows,
        "undefined": value.undefined,
        "confidence": float(confidence),
        "num_resamples": len(samples),
        **group_facts(groups, num_rows),
        "is_trusted": groups is None or groups.are_enough,
    }


def score_mean(
    values: Array,
    *,
    num_resamples: int = 1000,
    seed: int,
    confidence: float = 0.95,
    groups: ResamplingGroups | None = None,
    are_rows_groups: bool = False,
) -> Score:
    """Scores the mean of rows' own numbers, (n,) finite, n >= 1, with the interval of further rows or groups.

    A share (bool) that is 0 or 1 in all rows has the exact binomial interval (C. Clopper, E. Pearson, Biometrika 26,
    1934) of as many tries as there are rows, or effective groups: resamples of it would all be the same.

    Args:
        are_rows_groups: groups of one row each count as groups, of which there may be too few; else they are rows.
    """
    column = np.asarray(values, np.float64)
    drawn = check_groups(groups, len(column))
    groups = groups if are_rows_groups else drawn
    mean = MetricValue(float(column.mean()))
    num_tries = len(column) if groups is None else groups.num_effective
    if np.asarray(values).dtype == bool and num_tries > 1 and column.min() == column.max():
        score = make_score(mean, np.empty(0), len(column), confidence, groups)
        reach = ((1 - confidence) / 2) ** (1 / num_tries)
        score["low"], score["high"] = (reach, 1.0) if mean.value == 1 else (0.0, 1 - reach)
        return score
    samples = resample(
        lambda counts: counts @ column / counts.sum(axis=1),
        len(column),
        num_resamples,
        seed,
        drawn,
    )
    return make_score(mean, samples, len(column), confidence, groups)


def score_predictions(
    predictions: Any,
    references: Any,
    *,
    kind: LabelKind | None = None,
    group_names: Sequence[Any] | None = None,
    threshold: float | None = DEFAULT_THRESHOLD,
    num_resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
    groups: ResamplingGroups | None = None,
) -> dict[str, Score]:
    """Scores predictions with every metric of their kind, each with a percentile bootstrap interval, JSON-able.

    Rows are resampled one by one, so where rows share an antibody or an antigen the intervals are too narrow for a
    claim about new ones: then give `groups`. The per-group mean resamples the groups of that metric instead: its
    interval speaks about further ones.

    Args:
        predictions, references: (n,) or (n, 1) numbers in the unit of the labels; of another `kind` as `rows_for` takes
            them: probabilities of classes.
        kind: of label; None: numbers.
        group_names: (n,) group names, or None for no per-group metric; of numbers.
        threshold: rows at or above it count as binders; None leaves out the metrics of binders; of numbers.
        num_resamples: 0 for no intervals; lowered for more than 50,000 rows (each score says how many were drawn).
        confidence: between 0 and 1.
        seed: of the draws.
        groups: rows that are drawn together; None: each by itself. Intervals are wider where they are few.

    Returns:
        A score of each of `metrics_of`; of numbers these are "spearman", "pearson", "rmse", "mae", "r2"; with a
        threshold "recall", "precision", "f1", "average_precision"; with group names "per_group_spearman", over those of
        10 rows and more.

    Raises:
        DataError: shapes or lengths do not fit, or a row has no group.

    Cost: about 1.6 s for 26,000 rows and 1,000 resamples on two cores; below 4 s up to 250,000 rows.
    """
    metrics = metrics_of(kind, threshold)
    rows: Any = rows_for(kind, predictions, references, threshold)
    num_rows = rows.num_rows
    groups = check_groups(groups, rows.num_rows)
    names = metrics.names
    samples = dict.fromkeys(names, np.empty(0))
    if num_resamples and num_rows > 1:
        found = resample_metrics([rows], metrics.drawn, num_resamples, seed, groups)[0]
        samples |= {name: found[name] for name in metrics.drawn if name in found}
    scores = {name: make_score(rows.value(name), samples[name], num_rows, confidence, groups) for name in names}
    if groups is not None:
        for name in (name for name in rows.means if len(samples[name]) and less_is_better(name)):
            mean = rows.means[name]
            given = {"num_resamples": len(samples[name]), "seed": seed}
            if ends := mean_loss_interval(mean.sums, groups, mean.numbers, confidence=confidence, **given):
                scores[name]["low"], scores[name]["high"] = mean.apply(np.array(ends)).tolist()
    if threshold is not None:
        for name in metrics.of_threshold:
            base = float(np.mean(rows.measured >= threshold)) if rows.why_undefined("rmse") is None else None
            scores[name].update({"threshold": float(threshold), "base_rate": base})
    if group_names is not None:
        for name in metrics.of_groups:
            of_groups = per_group_spearman(rows.predicted, rows.measured, group_names)
            score = _score_groups(of_groups, num_rows, num_resamples, confidence, seed)
            scores[name] = {**score, "groups": of_groups}
    return scores


def _score_groups(
    of_groups: Mapping[str, GroupScore],
    num_rows: int,
    num_resamples: int,
    confidence: float,
    seed: int,
) -> Score:
    values = defined_values(of_groups)
    groups = ResamplingGroups.of("group", range(len(values)))
    samples = np.empty(0)
    if len(values) > 1 and num_resamples:
        samples = resample(
            lambda counts: counts @ values / len(values),
            len(values),
            num_resamples,
            seed,
        )
    return make_score(mean_of_groups(of_groups), samples, num_rows, confidence, groups)
