"""Which metric early stopping looks at, and what of an evaluation it is computed from, row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..evaluation.paired import RATIO_METRICS
from ..evaluation.scores import PLAIN_METRICS
from ..units import less_is_better
from .evaluation_passes import Evaluation
from .evaluation_schedule import is_evaluated

COMPARABLE = (*PLAIN_METRICS, *RATIO_METRICS)
SUM_COLUMN = {"token_loss": 0, "perplexity": 0, "accuracy": 1}  # of what `masked_lm.results.sum_rows` returns


@dataclass(frozen=True)
class Watched:
    """What early stopping looks at: a metric, and the key of a dict of evaluation sets, or "".

    `row_values` gives each row's own number from the metric and the predictions; None of a metric of `COMPARABLE`.
    """

    metric: str
    name: str
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
    if metric not in (own or COMPARABLE):
        hint = "; rmse orders models as a mean squared loss does" if metric == "loss" else ""
        known = f"{', '.join(PLAIN_METRICS)}, or, over masked residues, {', '.join(RATIO_METRICS)}{hint}"
        raise ArgumentError(
            f"early_stopping_patience={args.early_stopping_patience} with metric_for_best_model={given!r}: models are "
            f"compared row by row, in {', '.join(own) or known}. Give one of these, or transformers' "
            "EarlyStoppingCallback, which takes any metric."
        )
    if args.greater_is_better == less_is_better(metric):
        raise ArgumentError(
            f"metric_for_best_model={given!r} with greater_is_better={args.greater_is_better}: the worst model would "
            f"be kept as the best. Give --greater_is_better {not less_is_better(metric)}."
        )
    lacking = "an --eval_strategy" if not is_evaluated(args) else "an evaluation set" if eval_dataset is None else None
    if compute_metrics is None or args.prediction_loss_only or args.batch_eval_metrics:
        lacking = "predictions: compute_metrics, without prediction_loss_only and batch_eval_metrics"
    if lacking:
        raise ArgumentError(f"early_stopping_patience={args.early_stopping_patience} needs {lacking}.")
    return Watched(metric, name, compute_metrics.row_values if own else None)


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
