"""Passes over parts of an evaluation set, and what two of them make of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_concat
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

from ..errors import DataError
from ..evaluation.dataset_subset import ChosenRows
from ..evaluation.row_metrics import RowMetrics

PADDING = -100  # as Trainer pads rows of unequal width
FIELDS = ("predictions", "label_ids", "inputs", "losses")  # of `EvalPrediction`


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


@dataclass(frozen=True)
class Pass:
    """What one pass over some rows gave.

    `prediction` is what `compute_metrics` got, if there is one; `num_items` weighs the loss; `seconds` it took.
    """

    output: Any  # `EvalLoopOutput`, whose fields transformers declares optional
    prediction: EvalPrediction | None
    num_items: float
    seconds: float = 0.0


class NotingMetrics:
    """In the place of `compute_metrics` during a pass: keeps what it is called with. All else of it is the original's.

    Args:
        with_metrics: whether the original is called; of a part of the rows, it is not.
    """

    def __init__(self, compute: Any, with_metrics: bool):
        vars(self).update(_compute=compute, _with_metrics=with_metrics, _seen=[])

    def __call__(self, prediction: EvalPrediction, **kwargs: Any) -> dict[str, float]:
        self._seen.append(prediction)
        return self._compute(prediction, **kwargs) if self._with_metrics else {}

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get("_compute"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._compute, name, value)


def knowing_rows(compute: Any, dataset: Any, rows: Any = None) -> Any:
    """`compute_metrics` for these rows of `dataset` (None: all): another where it is a `RowMetrics` with groups."""
    return compute.of_rows(dataset, rows) if isinstance(compute, RowMetrics) else compute


def last_prediction(noting: NotingMetrics | None) -> EvalPrediction | None:
    """What `compute_metrics` was called with, if it was."""
    return None if noting is None or not noting._seen else noting._seen[-1]


def predictions_of(output: EvalLoopOutput) -> EvalPrediction | None:
    """What `compute_metrics` got of predictions and labels, if both are there, as Trainer asks before it calls it."""
    if output.predictions is None or output.label_ids is None:
        return None
    return EvalPrediction(output.predictions, output.label_ids)


def make_comparable(
    prediction: EvalPrediction | None, name: str, is_full: bool, groups: np.ndarray | None = None
) -> Evaluation | None:
    """The predictions, for comparison with those of another step; None where there are none, or some for every token.

    Those are left out because they would fill the memory until the next evaluation.
    """
    if prediction is None:
        return None
    predictions, labels = _first(prediction.predictions), _first(prediction.label_ids)
    is_small = isinstance(predictions, np.ndarray) and predictions.ndim <= 2
    if not is_small or not isinstance(labels, np.ndarray):
        return None
    return Evaluation(predictions, labels, name, is_full, groups)


def _first(values: Any) -> Any:
    return values[0] if isinstance(values, tuple) else values


def check_number(done: Pass, num_rows: int) -> None:
    """Raises DataError unless there is one prediction per row."""
    if done.prediction is None:
        return
    num_predictions = len(_first(done.prediction.predictions))
    if num_predictions != num_rows:
        raise DataError(
            f"{num_predictions} predictions for {num_rows} evaluation rows: eval_subset needs one per row. Have "
            "the model return that, or leave eval_subset out."
        )


def join_passes(first: Pass, rest: Pass, chosen: ChosenRows, prefix: str) -> Pass:
    """Both passes as if they had been one over all rows, in their order; of the metrics, the loss alone.

    Args:
        first, rest: over `chosen.rows` and `chosen.rest`.
        prefix: of the metric names.
    """
    order = np.argsort(np.concatenate([chosen.rows, chosen.rest]))
    prediction = None
    if first.prediction is not None and rest.prediction is not None:
        check_number(rest, len(chosen.rest))
        pairs = {name: (getattr(first.prediction, name), getattr(rest.prediction, name)) for name in FIELDS}
        joined = {
            name: None if a is None else _take(nested_concat(a, b, PADDING), order) for name, (a, b) in pairs.items()
        }
        prediction = EvalPrediction(**joined)  # type: ignore[arg-type]
    key, num_items = f"{prefix}_loss", first.num_items + rest.num_items
    losses = [done.output.metrics.get(key) for done in (first, rest)]
    metrics = {}
    if None not in losses and num_items:
        metrics[key] = (losses[0] * first.num_items + losses[1] * rest.num_items) / num_items
    predictions, labels = (None, None) if prediction is None else (prediction.predictions, prediction.label_ids)
    return Pass(EvalLoopOutput(predictions, labels, metrics, chosen.num_rows), prediction, num_items)  # type: ignore[arg-type]


def _take(values: Any, order: np.ndarray) -> Any:
    if isinstance(values, list | tuple):
        return type(values)(_take(value, order) for value in values)
    if isinstance(values, Mapping):
        return {name: _take(value, order) for name, value in values.items()}
    return values[order]


def prefix_metrics(metrics: dict[str, Any], prefix: str) -> dict[str, float]:
    """Metrics of `compute_metrics` under the names and as the plain numbers that Trainer makes of them."""
    plain = denumpify_detensorize(metrics)
    return {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in plain.items()}


def choose_metrics(metrics: dict[str, float], are_full: bool) -> dict[str, float]:
    """Metrics of one kind under Trainer's names: of all rows where `are_full` and there are such, or of the subset."""
    full_keys = {full_key(key) for key in metrics}
    return {
        key: metrics.get(full_key(key), value) if are_full else value
        for key, value in metrics.items()
        if key not in full_keys
    }


def full_key(key: str) -> str:
    """`eval_spearman` of all rows: `eval_full_spearman`; `eval_NAME_spearman`: `eval_full_NAME_spearman`."""
    head, _, tail = key.partition("_")
    return f"{head}_full_{tail}"


def gives_states(model: Any) -> bool:
    """Whether a model returns the states of all layers with its logits, by its configuration."""
    return any(
        getattr(getattr(model, "config", None), f"output_{name}", False) for name in ("hidden_states", "attentions")
    )


def without_states(logits: Any, labels: Any) -> Any:
    """Those, which are tuples of a tensor a layer, left empty: for all rows they would fill the memory."""
    return tuple(() if isinstance(part, tuple) else part for part in logits) if isinstance(logits, tuple) else logits
