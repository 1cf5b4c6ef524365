"""One measure of what is best: the checkpoint that is kept, early stopping and the verdict go by the same metric."""

from __future__ import annotations

from typing import Any

from ..arguments import check_metric_name
from ..errors import ArgumentError
from ..evaluation import HIT_METRICS, RowMetrics, metrics_of
from ..labels import LabelKind
from ..text import less_is_better
from ..training import check_metric_on_rows
from ..training_args import FastTrainingArguments


def scored_names(kind: LabelKind, threshold: float | None, has_groups: bool) -> tuple[str, ...]:
    """Returns metrics that final scores have, which `--require` may name."""
    return metrics_of(kind, threshold).scored(has_groups)


def resolve_measure(args: FastTrainingArguments, loss: str, kind: LabelKind) -> None:
    """Makes `metric_for_best_model` the one that fits labels and loss, unless the user named one."""
    explicit = args.explicit_fields
    if "metric_for_best_model" in explicit:
        return
    metrics = metrics_of(kind)
    args.metric_for_best_model = metrics.by_loss.get(loss, metrics.chooses)
    if "greater_is_better" not in explicit:
        args.greater_is_better = not less_is_better(args.metric_for_best_model)


def check_measure(args: FastTrainingArguments, loss: str, metrics: RowMetrics, validation: Any) -> None:
    """Refuses a `metric_for_best_model` that evaluations do not compute, or that has no value, whatever is predicted.

    Args:
        metrics: what evaluations compute; once rows were loaded, with the threshold that is left.
        validation: rows, once they were loaded.

    Raises:
        ArgumentError: names it, and what is missing.
        DataError: the validation rows do not allow it.
    """
    name = _plain_name(args)
    given = args.metric_for_best_model
    if name in metrics_of(metrics.kind).of_threshold and name not in metrics.names:
        raise ArgumentError(
            f"--metric_for_best_model {given} needs a --binder_threshold that divides the labels: a number within "
            "their range."
        )
    if name in HIT_METRICS and loss == "ranking":
        raise ArgumentError(
            f"--metric_for_best_model {given} with --loss ranking: its predictions have no unit in which they could "
            "reach a threshold. Give average_precision, which goes by their order."
        )
    check_metric_name(given, metrics.names)
    if validation is not None:
        check_metric_on_rows(args, metrics, validation, "", None)


def verdict_metric(args: FastTrainingArguments, metrics: RowMetrics) -> str | None:
    """Returns the metric of the verdict: `metric_for_best_model` where models and baselines have it, else its own.

    Of classes it is the user's choice alone: the log loss, which chooses checkpoints, is no reader's question.
    """
    is_asked = "metric_for_best_model" in args.explicit_fields
    return metrics_of(metrics.kind, metrics.threshold).verdict_metric(_plain_name(args), is_asked)


def describe_measure(args: FastTrainingArguments, loss: str, metrics: RowMetrics) -> str:
    """Describes which weights the run keeps, and what its verdict compares in, as one line; after `resolve_measure`."""
    decides = verdict_metric(args, metrics) or ("spearman" if loss == "ranking" else "rmse")
    verdict = metrics_of(metrics.kind).describe_verdict(decides)
    if not args.load_best_model_at_end:
        return f"Best checkpoint: not asked for, the last weights are kept (--load_best_model_at_end); {verdict}"
    end = "highest" if args.greater_is_better else "lowest"
    return f"Best checkpoint: {end} validation {_plain_name(args)} (--metric_for_best_model); {verdict}"


def _plain_name(args: FastTrainingArguments) -> str:
    return (args.metric_for_best_model or "").removeprefix("eval_").removeprefix("full_")
