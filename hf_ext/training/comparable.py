"""What of an evaluation is compared with that of another step, row by row, and in which metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ArgumentError, DataError
from ..evaluation.metrics import DEFAULT_THRESHOLD, MIN_GROUP_ROWS
from ..evaluation.paired import RATIO_METRICS
from ..evaluation.resampling import MIN_UNITS
from ..evaluation.row_metrics import RowMetrics
from ..evaluation.scores import GROUP_METRIC, PLAIN_METRICS, THRESHOLD_METRICS
from ..reporting.units import less_is_better

COMPARABLE = (*PLAIN_METRICS, *RATIO_METRICS)
BY_ROW_METRICS = (*THRESHOLD_METRICS, GROUP_METRIC)  # need a threshold or groups, which `RowMetrics` knows
SUM_COLUMN = {"token_loss": 0, "perplexity": 0, "accuracy": 1}  # of what `masked_lm.results.sum_rows` returns


@dataclass(frozen=True)
class Evaluation:
    """What the model said of rows that are the same in every evaluation of a run.

    Attributes:
        predictions, labels: row by row, as `compute_metrics` gets them: (n,) or (n, columns); the first of a tuple.
        name: key of a dictionary of evaluation sets, or "".
        is_full: whether these are all rows of the set.
        groups: of the rows, (n,), where `compute_metrics` is a `RowMetrics` that scores by groups.
    """

    predictions: np.ndarray
    labels: np.ndarray
    name: str
    is_full: bool
    groups: np.ndarray | None = None


def make_comparable(output: Any, name: str, is_full: bool, groups: np.ndarray | None) -> Evaluation | None:
    """Of Trainer's `EvalLoopOutput`; None where there are no predictions, or some for every token.

    Those are left out because they would fill the memory until the next evaluation.
    """
    columns = output.predictions, output.label_ids
    predictions, labels = (column[0] if isinstance(column, tuple) else column for column in columns)
    is_small = isinstance(predictions, np.ndarray) and predictions.ndim <= 2
    if not is_small or not isinstance(labels, np.ndarray):
        return None
    return Evaluation(predictions, labels, name, is_full, groups)


@dataclass(frozen=True)
class Watched:
    """What early stopping looks at.

    Attributes:
        metric: one that `compare_paired` knows.
        name: the key of a dict of evaluation sets, or "".
        threshold: of metrics of binders, in the unit of the labels.
        row_values: each row's own number from the metric and the predictions; None of a metric of `COMPARABLE`.
    """

    metric: str
    name: str
    threshold: float = DEFAULT_THRESHOLD
    row_values: Callable[[str, np.ndarray], np.ndarray] | None = None


def choose_watched(args: Any, eval_dataset: Any, compute_metrics: Any) -> Watched:
    """Reads `metric_for_best_model` as a metric whose difference on the same rows has an interval.

    A `compute_metrics` whose metrics are means over rows, of errors that are not those of `COMPARABLE`, names them as
    `row_metrics` and has `row_values(metric, predictions)`, (n,): then these are compared.

    Raises:
        ArgumentError: there is none, its direction contradicts `greater_is_better`, or predictions are not kept.
    """
    given = args.metric_for_best_model
    metric, name = (given or "").removeprefix("eval_"), ""
    if isinstance(eval_dataset, Mapping):
        name = max((key for key in eval_dataset if metric.startswith(f"{key}_")), key=len, default="")
        metric = metric.removeprefix(f"{name}_")
        if not name:
            raise ArgumentError(
                f"metric_for_best_model={given!r}: of several evaluation sets, early stopping looks at one, whose name "
                f"comes first, such as {next(iter(eval_dataset), 'NAME')}_spearman."
            )
    own = tuple(getattr(compute_metrics, "row_metrics", ()))
    known = compute_metrics.names if isinstance(compute_metrics, RowMetrics) else ()
    if metric not in (own or COMPARABLE) and not (metric in BY_ROW_METRICS and metric in known):
        hint = "; rmse orders models as a mean squared loss does" if metric == "loss" else ""
        usual = (
            f"{', '.join(PLAIN_METRICS)}, or, over masked residues, {', '.join(RATIO_METRICS)}{hint}; in "
            f"{', '.join(BY_ROW_METRICS)} where compute_metrics is a RowMetrics that computes it"
        )
        raise ArgumentError(
            f"early_stopping_patience={args.early_stopping_patience} with metric_for_best_model={given!r}: models are "
            f"compared row by row, in {', '.join(own) or usual}. Give one of these, or transformers' "
            "EarlyStoppingCallback, which takes any metric."
        )
    if args.greater_is_better == less_is_better(metric):
        raise ArgumentError(
            f"metric_for_best_model={given!r} with greater_is_better={args.greater_is_better}: the worst model would "
            f"be kept as the best. Give --greater_is_better {not less_is_better(metric)}."
        )
    lacking = (
        "an --eval_strategy" if args.eval_strategy == "no" else "an evaluation set" if eval_dataset is None else None
    )
    if compute_metrics is None or args.prediction_loss_only or args.batch_eval_metrics:
        lacking = "predictions: compute_metrics, without prediction_loss_only and batch_eval_metrics"
    if lacking:
        raise ArgumentError(f"early_stopping_patience={args.early_stopping_patience} needs {lacking}.")
    if metric in THRESHOLD_METRICS:
        return Watched(metric, name, compute_metrics.threshold)
    return Watched(metric, name, row_values=compute_metrics.row_values if own else None)


def spell_out_best(args: Any, compute_metrics: Any) -> str | None:
    """`metric_for_best_model`, with the threshold or the groups that decide its value too."""
    name = args.metric_for_best_model
    return compute_metrics.spell_out(name) if name and isinstance(compute_metrics, RowMetrics) else name


def check_metric_on_rows(args: Any, compute_metrics: Any, dataset: Any, name: str, rows: Any) -> None:
    """Refuses a `metric_for_best_model` that has no value on the rows of the evaluations, whatever is predicted.

    Args:
        dataset, name: an evaluation set, and its name where there are several.
        rows: numbers of those that evaluations look at; None: all.

    Raises:
        DataError: labels or groups do not allow the metric, or, for early stopping, too few groups; no group column.
    """
    if not isinstance(compute_metrics, RowMetrics):
        return
    metric = (args.metric_for_best_model or "").removeprefix("eval_").removeprefix(f"{name}_" if name else "")
    num_groups = compute_metrics.count_groups(dataset, rows)
    problem = compute_metrics.why_undefined(metric, dataset, rows)
    stops = metric == GROUP_METRIC and args.early_stopping_patience is not None
    if problem is None and stops and num_groups < MIN_UNITS:
        problem = f"early stopping needs {MIN_UNITS} groups of {MIN_GROUP_ROWS} rows and more, here are {num_groups}"
    if problem:
        where = "" if rows is None else f" ({len(rows):,} of --eval_subset)"
        raise DataError(
            f"metric_for_best_model={args.metric_for_best_model!r}: {problem}{where}. Take another metric"
            + (", more rows" if rows is not None else "")
            + (" or another threshold." if metric in THRESHOLD_METRICS else ".")
        )


def name_undefined(compute_metrics: Any, dataset: Any, rows: Any) -> list[str]:
    """Metrics that were asked for and have no value on these rows, whatever is predicted, with the reason."""
    if not isinstance(compute_metrics, RowMetrics):
        return []
    asked = {"recall": "recall and what else needs binders", GROUP_METRIC: "Spearman within groups"}
    found = {
        name: compute_metrics.why_undefined(name, dataset, rows) for name in asked if name in compute_metrics.names
    }
    return [f"{asked[name]} will have no value: {reason}." for name, reason in found.items() if reason]


def comparable_columns(evaluation: Evaluation, watched: Watched) -> tuple[np.ndarray, np.ndarray]:
    """An evaluation's labels and predictions as `StoppingRule` takes them, (n,) each.

    Raises:
        ArgumentError: the predictions are neither one number per row nor, where the metric needs them, sums per row.
    """
    predictions, metric = np.asarray(evaluation.predictions), watched.metric
    if watched.row_values is not None:
        return np.ones(len(predictions)), watched.row_values(metric, predictions)
    if metric in RATIO_METRICS:
        if _are_row_sums(predictions):
            return predictions[:, 2], predictions[:, SUM_COLUMN[metric]]
        needed = "a summed loss, a number of right predictions and a number of predictions per row, (n, 3)"
    elif predictions.ndim == 1 or predictions.shape[1:] == (1,):
        return np.asarray(evaluation.labels), predictions
    else:
        needed = "one number per row, (n,) or (n, 1)"
    raise ArgumentError(
        f"early_stopping_patience with metric_for_best_model={metric}: needs {needed}, but predictions have shape "
        f"{predictions.shape}. Let preprocess_logits_for_metrics return that, or give another metric."
    )


def _are_row_sums(predictions: np.ndarray) -> bool:
    if predictions.ndim != 2 or predictions.shape[1] != 3:
        return False
    right, number = predictions[:, 1], predictions[:, 2]
    return bool(np.all((right == np.floor(right)) & (number == np.floor(number)) & (right >= 0) & (right <= number)))
