"""Early stopping by a paired comparison: evaluations of the same rows, kept and compared."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from transformers import TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from ..errors import ArgumentError, DataError
from ..evaluation import (
    PLAIN_METRICS,
    RATIO_METRICS,
    THRESHOLD_METRICS,
    RowMetrics,
    StoppingDecision,
    StoppingRule,
    Summed,
)
from ..files import Json
from ..labels import Array
from ..processes import Team
from ..text import less_is_better
from ..training_args import FastTrainingArguments
from .host import Host, Rows

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

    predictions: Array
    labels: Array
    name: str


def make_comparable(output: EvalLoopOutput, name: str, compute_metrics: object) -> Evaluation | None:
    """Reads Trainer's `EvalLoopOutput`; None without predictions, or with some for every token that are no labels'.

    Those are left out because they would fill the memory until the next evaluation.
    """
    columns = output.predictions, output.label_ids
    predictions, labels = (column[0] if isinstance(column, tuple) else column for column in columns)
    if not isinstance(predictions, np.ndarray) or not isinstance(labels, np.ndarray):
        return None
    is_small = predictions.ndim <= 2 or bool(getattr(compute_metrics, "mean_metrics", ()))
    return Evaluation(predictions, labels, name) if is_small else None


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

    def __init__(self, trainer: Host, team: Team):
        self._trainer = trainer
        self._team = team
        self.decisions: list[Json] = []
        self._metric: str | None = None  # what is looked at, of the evaluation set of this name, "" of the only one
        self._set = ""
        self._rule: StoppingRule | None = None
        self._stored_rule: Json | None = None  # until the first evaluation has shown its rows
        if trainer.args.early_stopping_patience is not None:
            self._metric, self._set = choose_metric(trainer.args, trainer.eval_dataset, trainer.compute_metrics)

    # --- an evaluation ----------------------------------------------------------------------------------------------

    def see(self, evaluation: Evaluation) -> dict[str, float]:
        """Feeds the rule, and ends training where it says so; returns the interval of the improvement."""
        trainer = self._trainer
        step = trainer.state.global_step
        is_seen = self.decisions and self.decisions[-1]["step"] == step  # the same weights again
        if self._metric is None or evaluation.name != self._set or is_seen:
            return {}
        labels, predictions = comparable_columns(evaluation, self._metric, trainer.compute_metrics)
        rule = self._rule = self._rule or self._make_rule(labels)
        decision = rule.update(predictions, step=step)
        self.decisions.append(decision.as_dict())
        stops = self._team.agree([decision.should_stop])[0]
        if stops:
            trainer.control.should_training_stop = True
        if self._team.is_main:
            logger.log(logging.WARNING if stops else logging.INFO, describe(decision, rule))
        best = decision.against_best
        values = {} if best is None else {"": best.improvement, "_low": best.low, "_high": best.high}
        prefix = f"eval_{self._set}_" if self._set else "eval_"
        return {f"{prefix}improvement{end}": value for end, value in values.items() if value is not None}

    def _make_rule(self, labels: Array) -> StoppingRule:
        """Makes the rule of this run's rows, as the checkpoint has it where that is of the same rows."""
        args = self._trainer.args
        compute = self._trainer.compute_metrics
        metric = str(self._metric)
        rows = None
        if metric in getattr(compute, "mean_metrics", ()):
            rows = partial(Summed, of_mean=np.sqrt if metric in ("rmse", "nrmse") else None)
        rule = StoppingRule(
            labels,
            metric=metric,
            threshold=getattr(compute, "threshold", None) if metric in THRESHOLD_METRICS else None,
            rows=rows,
            patience=self._patience,
            warmup_steps=args.get_warmup_steps(self._trainer.state.max_steps),
            min_delta=args.early_stopping_min_delta,
        )
        stored = self._stored_rule
        self._stored_rule = None
        if stored is not None and not rule.load_state_dict(stored) and self._team.is_main:
            logger.warning(
                "Early stopping counts anew: predictions of other rows or labels, or in another metric, than before "
                "cannot be compared."
            )
        return rule

    @property
    def _patience(self) -> int:
        return self._trainer.args.early_stopping_patience or 0

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> Json | None:
        """Returns what was decided, and what a resumed run compares with."""
        if self._metric is None:
            return None
        rule = self._stored_rule if self._rule is None else self._rule.state_dict()
        return {"rule": rule, "decisions": self.decisions}

    def load(self, tree: Json | None) -> None:
        """Restores the run that gave this state; afresh without one. One that had stopped needs more patience."""
        self._rule = None
        self._stored_rule, self.decisions = (tree["rule"], tree["decisions"]) if tree and self._metric else (None, [])
        counted = self.decisions[-1]["num_without_improvement"] if self.decisions else 0
        if counted and counted >= self._patience:
            self._trainer.control.should_training_stop = True

    def num_bytes(self) -> int:
        """Bounds the arrays that this adds to a checkpoint, of all rows that evaluation can look at."""
        if self._metric is None:
            return 0
        sets = self._trainer.eval_dataset
        rows = sets[self._set] if self._set else sets
        num_rows = len(rows) if hasattr(rows, "__len__") else 0
        num_rows = max(num_rows, 0 if self._rule is None else len(self._rule.labels))
        return ROW_BYTES * num_rows * (self._patience + 1)


def choose_metric(args: FastTrainingArguments, eval_dataset: object, compute_metrics: object) -> tuple[str, str]:
    """Reads `metric_for_best_model` as a metric whose difference on the same rows has an interval.

    A `compute_metrics` whose metrics are means over rows, of errors that are not those of `COMPARABLE`, names them as
    `row_metrics` and has `row_values(metric, predictions)`, (n,): then these are compared.

    Returns:
        The metric, and the key of the evaluation set, "" where there is one.

    Raises:
        ArgumentError: there is none, its direction contradicts `greater_is_better`, or predictions are not kept.
    """
    given = args.metric_for_best_model
    metric = (given or "").removeprefix("eval_")
    name = ""
    if isinstance(eval_dataset, Mapping):
        name = max((key for key in eval_dataset if metric.startswith(f"{key}_")), key=len, default="")
        metric = metric.removeprefix(f"{name}_")
        if not name:
            raise ArgumentError(
                f"metric_for_best_model={given!r}: of several evaluation sets, early stopping looks at one, whose name "
                f"comes first, such as {next(iter(eval_dataset), 'NAME')}_spearman."
            )
    own = tuple(getattr(compute_metrics, "row_metrics", ()) or getattr(compute_metrics, "mean_metrics", ()))
    known = compute_metrics.names if isinstance(compute_metrics, RowMetrics) and not own else ()
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


def check_metric_on_rows(
    args: TrainingArguments, compute_metrics: object, dataset: Rows, name: str, rows: Array | None
) -> None:
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


def comparable_columns(evaluation: Evaluation, metric: str, compute_metrics: Any) -> tuple[Array, Array]:
    """Returns an evaluation's labels and predictions as `StoppingRule` takes them, (n,) each.

    Raises:
        ArgumentError: the predictions are neither one number per row nor, where the metric needs them, sums per row.
    """
    predictions = np.asarray(evaluation.predictions)
    if metric in getattr(compute_metrics, "row_metrics", ()):
        return np.ones(len(predictions)), compute_metrics.row_values(metric, predictions)
    if metric in getattr(compute_metrics, "mean_metrics", ()):
        return compute_metrics.summed(metric, predictions, evaluation.labels)
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
    """Describes the decision in a sentence, with the interval that made it."""
    start = f"Early stopping, step {decision.step}:"
    best = decision.against_best
    if best is None:
        return f"{start} the first model with a score, the best so far."
    if best.undefined:
        return f"{start} cannot tell, {best.undefined}."
    interval = f"{best.improvement:+.4f} [{best.low:.4f}, {best.high:.4f}]"
    text = f"{start} {rule.metric} {interval} against the best before"
    if decision.verdict != "no improvement":
        return f"{text}: {'certainly better' if decision.verdict == 'improved' else 'cannot tell, counting restarts'}."
    counted = f"{decision.num_without_improvement} of {rule.patience} evaluations in a row"
    end = " Training stops." if decision.should_stop else ""
    return f"{text}: excludes an improvement of {rule.min_delta:g}, as {counted} have done.{end}"
