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
    name = _plain_name(args)
    return name if name in PLAIN_METRICS else None


def describe_measure(args: FastTrainingArguments, loss: str) -> str:
    """Which weights the run keeps, and what its verdict compares in, as one line; after `settle_measure`."""
    verdict = f"verdict in {verdict_metric(args) or ('spearman' if loss == 'ranking' else 'rmse')}."
    if not args.load_best_model_at_end:
        return f"Best checkpoint: not asked for, the last weights are kept (--load_best_model_at_end); {verdict}"
    end = "highest" if args.greater_is_better else "lowest"
    return f"Best checkpoint: {end} validation {_plain_name(args)} (--metric_for_best_model); {verdict}"


def _plain_name(args: FastTrainingArguments) -> str:
    return (args.metric_for_best_model or "").removeprefix("eval_").removeprefix("full_")
