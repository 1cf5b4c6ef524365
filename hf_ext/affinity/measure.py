"""One measure of what is best: the checkpoint that is kept, early stopping and the verdict go by the same metric."""

from __future__ import annotations

from ..evaluation.scores import PLAIN_METRICS
from ..training_args import FastTrainingArguments
from ..units import less_is_better

# By loss. A tobit loss knows that some labels are limits, which the RMSE of an evaluation does not.
BEST_BY_LOSS = {"mse": "rmse", "huber": "rmse", "tobit": "loss", "ranking": "spearman"}


def settle_measure(args: FastTrainingArguments, loss: str) -> None:
    """Makes `metric_for_best_model` the one that fits the loss, unless the user named one."""
    explicit = args.explicit_fields
    if "metric_for_best_model" in explicit:
        return
    args.metric_for_best_model = BEST_BY_LOSS[loss]
    if "greater_is_better" not in explicit:
        args.greater_is_better = not less_is_better(args.metric_for_best_model)


def verdict_metric(args: FastTrainingArguments) -> str | None:
    """What the verdict compares models and baselines in: `metric_for_best_model` where both have it, else its own."""
    name = (args.metric_for_best_model or "").removeprefix("eval_").removeprefix("full_")
    return name if name in PLAIN_METRICS else None
