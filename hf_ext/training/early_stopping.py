"""Early stopping by a paired comparison on the same rows; its state is part of every checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ArgumentError, DataError
from ..evaluation.metrics import PLAIN_METRICS, RATIO_METRICS, THRESHOLD_METRICS
from ..evaluation.row_metrics import RowMetrics
from ..evaluation.scores import PairedComparison
from ..evaluation.stopping_rule import StoppingDecision, StoppingRule
from ..reporting.units import less_is_better

ROW_BYTES = 26  # of a float64 as JSON has it
COMPARABLE = (*PLAIN_METRICS, *RATIO_METRICS)
SUM_COLUMN = {"token_loss": 0, "perplexity": 0, "accuracy": 1}  # of what `masked_lm.results.sum_rows` returns

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """What the model said of rows that are the same in every evaluation of a run.

    Attributes:
        predictions, labels: row by row, as `compute_metrics` gets them: (n,) or (n, columns); the first of a tuple.
        name: key of a dictionary of evaluation sets, or "".
    """

    predictions: np.ndarray
    labels: np.ndarray
    name: str


def make_comparable(output: Any, name: str) -> Evaluation | None:
    """Of Trainer's `EvalLoopOutput`; None where there are no predictions, or some for every token.

    Those are left out because they would fill the memory until the next evaluation.
    """
    columns = output.predictions, output.label_ids
    predictions, labels = (column[0] if isinstance(column, tuple) else column for column in columns)
    is_small = isinstance(predictions, np.ndarray) and predictions.ndim <= 2
    if not is_small or not isinstance(labels, np.ndarray):
        return None
    return Evaluation(predictions, labels, name)


class EarlyStopping:
    """Ends training after `early_stopping_patience` evaluations that exclude an improvement; see `StoppingRule`.

    Each evaluation that the loop asks for is compared with the best and with a recent one on the same rows; evaluations
    within the learning rate's warm-up count for nothing. The interval against the best is logged as `eval_improvement`,
    `eval_improvement_low` and `eval_improvement_high`, positive where the model got better, in the unit of the metric;
    left out where there is none. A checkpoint holds what was decided and compared with, so that a resumed run decides
    as it would have. Without `early_stopping_patience` nothing is looked at, decided or stored.

    Attributes:
        decisions: every decision, as `StoppingDecision.as_dict`.

    Raises (from the constructor, or from `see`):
        ArgumentError: `metric_for_best_model` cannot be compared row by row, or nothing is evaluated.

    Cost: two comparisons per evaluation (0.2 s for 1,300 rows, 6 s at most), and 8 bytes per row for each of
    `patience` + 1 evaluations, in memory and in a checkpoint. Nothing without `early_stopping_patience`.
    """

    name = "early_stopping"

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.decisions: list[dict[str, Any]] = []
        self._metric: str | None = None  # what is looked at, of the evaluation set of this name, "" of the only one
        self._set = ""
        self._rule: StoppingRule | None = None
        self._stored_rule: dict[str, Any] | None = None  # until the first evaluation has shown its rows
        if trainer.args.early_stopping_patience is not None:
            self._metric, self._set = choose_metric(trainer.args, trainer.eval_dataset, trainer.compute_metrics)

    # --- an evaluation ----------------------------------------------------------------------------------------------

    def see(self, evaluation: Evaluation) -> dict[str, float]:
        """Feeds the rule, and ends training where it says so; returns the interval of the improvement."""
        trainer, step = self._trainer, self._trainer.state.global_step
        is_seen = self.decisions and self.decisions[-1]["step"] == step  # the same weights again
        if self._metric is None or evaluation.name != self._set or is_seen:
            return {}
        labels, predictions = comparable_columns(evaluation, self._metric, trainer.compute_metrics)
        rule = self._rule_of(labels)
        decision = rule.update(predictions, step=step)
        self.decisions.append(decision.as_dict())
        stops = trainer._ext_team.agree([decision.should_stop])[0]
        if stops:
            trainer.control.should_training_stop = True
        if trainer._ext_team.is_main:
            logger.log(logging.WARNING if stops else logging.INFO, describe(decision, rule))
        best = decision.against_best
        values = {} if best is None else {"": best.improvement, "_low": best.low, "_high": best.high}
        prefix = f"eval_{self._set}_" if self._set else "eval_"
        return {f"{prefix}improvement{end}": value for end, value in values.items() if value is not None}

    def _rule_of(self, labels: np.ndarray) -> StoppingRule:
        """The rule of these rows: the one there is, that of the checkpoint, or a new one."""
        if self._rule is not None and self._rule.is_of(labels):
            return self._rule
        args, metric = self._trainer.args, str(self._metric)
        rule = StoppingRule(
            labels,
            metric=metric,
            threshold=self._trainer.compute_metrics.threshold if metric in THRESHOLD_METRICS else None,
            patience=args.early_stopping_patience,
            warmup_steps=args.get_warmup_steps(self._trainer.state.max_steps),
            min_delta=args.early_stopping_min_delta,
        )
        is_new = self._rule is not None
        if self._stored_rule is not None:
            is_new = not rule.load_state_dict(self._stored_rule)
        if is_new and self._trainer._ext_team.is_main:
            logger.warning(
                "Early stopping counts anew: predictions of other rows or labels, or in another metric, than before "
                "cannot be compared."
            )
        self._rule, self._stored_rule = rule, None
        return rule

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """What was decided, and what a resumed run compares with."""
        if self._metric is None:
            return None
        rule = self._stored_rule if self._rule is None else self._rule.state_dict()
        return {"rule": rule, "decisions": self.decisions}

    def load(self, tree: dict[str, Any] | None) -> None:
        """As the run was that gave this state; afresh without one. A run that had stopped needs more patience."""
        self._rule = None
        self._stored_rule, self.decisions = (tree["rule"], tree["decisions"]) if tree and self._metric else (None, [])
        counted = self.decisions[-1]["num_without_improvement"] if self.decisions else 0
        if counted and counted >= self._trainer.args.early_stopping_patience:
            self._trainer.control.should_training_stop = True

    def num_bytes(self) -> int:
        """Upper bound of the arrays that this adds to a checkpoint, of all rows that evaluation can look at."""
        if self._metric is None:
            return 0
        sets = self._trainer.eval_dataset
        rows = sets[self._set] if self._set else sets
        num_rows = len(rows) if hasattr(rows, "__len__") else 0
        num_rows = max(num_rows, 0 if self._rule is None else len(self._rule.labels))
        return ROW_BYTES * num_rows * (self._trainer.args.early_stopping_patience + 1)


def choose_metric(args: Any, eval_dataset: Any, compute_metrics: Any) -> tuple[str, str]:
    """Reads `metric_for_best_model` as a metric whose difference on the same rows has an interval.

    A `compute_metrics` whose metrics are means over rows, of errors that are not those of `COMPARABLE`, names them as
    `row_metrics` and has `row_values(metric, predictions)`, (n,): then these are compared.

    Returns:
        The metric, and the key of the evaluation set, "" where there is one.

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
    if metric not in (own or COMPARABLE) and not (metric in THRESHOLD_METRICS and metric in known):
        hint = "; rmse orders models as a mean squared loss does" if metric == "loss" else ""
        usual = (
            f"{', '.join(PLAIN_METRICS)}, or, over masked residues, {', '.join(RATIO_METRICS)}{hint}; in "
            f"{', '.join(THRESHOLD_METRICS)} where compute_metrics is a RowMetrics that computes it"
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
    lacking = None
    if compute_metrics is None or args.prediction_loss_only or args.batch_eval_metrics:
        lacking = "predictions: compute_metrics, without prediction_loss_only and batch_eval_metrics"
    elif args.eval_strategy == "no" or eval_dataset is None:
        lacking = "an evaluation set and an --eval_strategy"
    if lacking:
        raise ArgumentError(f"early_stopping_patience={args.early_stopping_patience} needs {lacking}.")
    return metric, name


def check_metric_on_rows(args: Any, compute_metrics: Any, dataset: Any, name: str, rows: Any) -> None:
    """Refuses a `metric_for_best_model` that has no value on the rows of the evaluations, whatever is predicted.

    Args:
        dataset, name: an evaluation set, and its name where there are several.
        rows: numbers of those that evaluations look at; None: all.

    Raises:
        DataError: the labels do not allow the metric.
    """
    if not isinstance(compute_metrics, RowMetrics):
        return
    metric = (args.metric_for_best_model or "").removeprefix("eval_").removeprefix(f"{name}_" if name else "")
    if problem := compute_metrics.why_undefined(metric, dataset, rows):
        where = "" if rows is None else f" ({len(rows):,} of --eval_subset)"
        raise DataError(
            f"metric_for_best_model={args.metric_for_best_model!r}: {problem}{where}. Take another metric"
            + (", more rows" if rows is not None else "")
            + " or another threshold."
        )


def comparable_columns(evaluation: Evaluation, metric: str, compute_metrics: Any) -> tuple[np.ndarray, np.ndarray]:
    """An evaluation's labels and predictions as `StoppingRule` takes them, (n,) each.

    Raises:
        ArgumentError: the predictions are neither one number per row nor, where the metric needs them, sums per row.
    """
    predictions = np.asarray(evaluation.predictions)
    if metric in getattr(compute_metrics, "row_metrics", ()):
        return np.ones(len(predictions)), compute_metrics.row_values(metric, predictions)
    if metric in RATIO_METRICS:
        if predictions.shape[1:] == (3,):
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


def describe(decision: StoppingDecision, rule: StoppingRule) -> str:
    """The decision as a sentence, with the interval that made it."""
    start, best = f"Early stopping, step {decision.step}:", decision.against_best
    if best is None:
        return f"{start} the first model with a score, the best so far."
    if best.undefined:
        return f"{start} cannot tell, {best.undefined}."
    text = f"{start} {rule.metric} {_interval(best)} against the best"
    if decision.verdict == "improved":
        return f"{text} before: certainly better, and the new best."
    text += f" (step {decision.best_step})"
    if decision.verdict == "undecided":
        return f"{text}: cannot tell, counting restarts."
    if not best.excludes_improvement(rule.min_delta) and decision.against_recent is not None:
        text += f", but {_interval(decision.against_recent)} against {rule.patience} evaluations ago"
    text += f": excludes an improvement of {rule.min_delta:g}"
    if decision.is_warmup:
        return f"{text}; in warm-up this does not count."
    if decision.should_stop:
        return f"{text}, as {decision.num_without_improvement} evaluations in a row have done. Training stops."
    return f"{text}, {decision.num_without_improvement} of {rule.patience} before training stops."


def _interval(comparison: PairedComparison) -> str:
    return f"{comparison.improvement:+.4f} [{comparison.low:.4f}, {comparison.high:.4f}]"
