"""Early stopping by a paired comparison on the same rows; its state is part of every checkpoint."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from ..checkpoints.trees import load_tree, save_tree
from ..errors import ArgumentError, CheckpointError
from ..evaluation.paired import LOWER_IS_BETTER, RATIO_METRICS, PairedComparison
from ..evaluation.scores import PLAIN_METRICS
from ..evaluation.stopping_rule import StoppingDecision, StoppingRule
from .collapse_alarm import extended
from .stopping import EvaluationGivenUp

TREE = "early_stopping"
COMPARABLE = (*PLAIN_METRICS, *RATIO_METRICS)
SUM_COLUMN = {"token_loss": 0, "perplexity": 0, "accuracy": 1}  # of what `masked_lm.results.sum_rows` returns
SETTINGS = ("early_stopping_patience", "early_stopping_min_delta", "metric_for_best_model", "max_eval_samples")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Watched:
    """What early stopping looks at: a metric of `COMPARABLE`, and the key of a dict of evaluation sets, or ""."""

    metric: str
    name: str


class EarlyStoppingMixin:
    """Ends training after `early_stopping_patience` evaluations that exclude an improvement; see `StoppingRule`.

    Each evaluation that the loop asks for is compared with the best and with a recent one on the same rows
    (`compared_evaluation`); evaluations within the learning rate's warm-up count for nothing. The interval against the
    best is logged as `eval_improvement`, `eval_improvement_low` and `eval_improvement_high`, positive where the model
    got better, in the unit of the metric; left out where there is none. `trainer.stopping_decisions` has every
    decision. A checkpoint holds what was decided and compared with, so that a resumed run decides as it would have.

    Raises (from the constructor, or in the first evaluation):
        ArgumentError: `metric_for_best_model` cannot be compared row by row, or nothing is evaluated.

    Cost: two comparisons per evaluation (0.2 s for 1,300 rows, 6 s at most), and 8 bytes per row for each of
    `patience` + 1 evaluations, in memory and in a checkpoint. Nothing without `early_stopping_patience`.
    """

    args: Any
    state: Any
    control: Any
    eval_dataset: Any
    compute_metrics: Any
    is_in_train: bool
    compared_evaluation: Any  # of EvaluationMixin
    _is_evaluating: bool  # of StoppingMixin, as `_agree`
    _resumed: Any  # of ResumeMixin

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.stopping_decisions: list[dict[str, Any]] = []
        self._watched: Watched | None = None
        self._rule: StoppingRule | None = None
        # Of a checkpoint, until the first evaluation has shown its rows.
        self._stored_rule: dict[str, Any] | None = None
        self._last_compared: Any = None
        if self.args.early_stopping_patience is not None:
            self._watched = choose_watched(self.args, self.eval_dataset, self.compute_metrics)
            self.add_callback(EarlyStoppingStateCallback(self))  # type: ignore[attr-defined]

    # --- an evaluation ----------------------------------------------------------------------------------------------

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        before = copy.copy(self._rule), self._stored_rule, list(self.stopping_decisions)
        try:
            return super()._evaluate(*args, **kwargs)  # type: ignore[misc]
        except EvaluationGivenUp:  # one of several sets may have been looked at
            self._rule, self._stored_rule, self.stopping_decisions = before
            raise

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in Trainer; with an evaluation's metrics goes the interval of its improvement."""
        with extended(logs, self._decide_stopping()):
            super().log(logs, start_time)  # type: ignore[misc]

    def _decide_stopping(self) -> dict[str, float]:
        """Feeds the rule, if there is a new evaluation for it; returns what to log of its decision."""
        watched, evaluation = self._watched, self.compared_evaluation
        if watched is None or evaluation is None or not (self.is_in_train and self._is_evaluating):
            return {}
        if evaluation is self._last_compared or evaluation.name != watched.name:
            return {}
        self._last_compared = evaluation
        step = self.state.global_step
        if self.stopping_decisions and self.stopping_decisions[-1]["step"] == step:
            return {}  # the same weights again
        labels, predictions = comparable_columns(evaluation, watched.metric)
        rule = self._rule_of(labels)
        decision = rule.update(predictions, step=step)
        self.stopping_decisions.append(decision.as_dict())
        stops = self._agree([decision.should_stop])[0]  # type: ignore[attr-defined]
        if stops:
            self.control.should_training_stop = True
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            logger.log(logging.WARNING if stops else logging.INFO, describe(decision, rule))
        return improvement_logs(decision.against_best, f"eval_{evaluation.name}_" if evaluation.name else "eval_")

    def _rule_of(self, labels: np.ndarray) -> StoppingRule:
        """The rule of these rows: the one there is, that of the checkpoint, or a new one."""
        if self._rule is not None and self._rule.is_of(labels):
            return self._rule
        assert self._watched is not None
        rule = StoppingRule(
            labels,
            metric=self._watched.metric,
            patience=self.args.early_stopping_patience,
            warmup_steps=self.args.get_warmup_steps(self.state.max_steps),
            min_delta=self.args.early_stopping_min_delta,
        )
        problem = None if self._rule is None else "The evaluation has other rows or labels than before"
        if self._stored_rule is not None:
            try:
                rule.load_state_dict(self._stored_rule)
            except CheckpointError as error:
                problem = str(error)
        if problem and self.is_world_process_zero():  # type: ignore[attr-defined]
            logger.warning("Early stopping counts anew. %s", problem)
        self._rule, self._stored_rule = rule, None
        return rule

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save_watching(self, folder: Path) -> None:
        """Writes what a resumed run compares with; called by the main process for each checkpoint."""
        super().save_watching(folder)  # type: ignore[misc]
        rule = self._stored_rule if self._rule is None else self._rule.state_dict()
        if self._watched is not None:
            settings = {name: getattr(self.args, name) for name in SETTINGS}
            save_tree(folder, TREE, {"settings": settings, "rule": rule, "decisions": self.stopping_decisions})

    def early_stopping_bytes(self) -> int:
        """Upper bound of the arrays that this adds to a checkpoint, from the rows that evaluation can look at."""
        if self._watched is None:
            return 0
        rows = self.eval_dataset[self._watched.name] if self._watched.name else self.eval_dataset
        num_rows, most = len(rows) if hasattr(rows, "__len__") else 0, self.args.max_eval_samples
        if most is not None:
            num_rows = min(num_rows or math.inf, math.ceil(most if most > 1 else most * num_rows))
        num_rows = max(num_rows, 0 if self._rule is None else len(self._rule.labels))
        return 8 * num_rows * (self.args.early_stopping_patience + 1)

    def restore_early_stopping(self) -> bool:
        """Takes over what the checkpoint holds, if training is resumed; returns whether that run had stopped early."""
        self._rule, self._stored_rule, self._last_compared, self.stopping_decisions = None, None, None, []
        if self._resumed is None:
            return False
        if f"{TREE}.json" not in self._resumed.manifest.files:
            logger.info("%s has no state of early stopping: counting starts anew.", self._resumed.path)
            return False
        tree = load_tree(self._resumed.path, TREE)
        self._stored_rule, self.stopping_decisions = tree["rule"], tree["decisions"]
        has_stopped = bool(self.stopping_decisions) and self.stopping_decisions[-1]["should_stop"]
        return has_stopped and tree["settings"] == {name: getattr(self.args, name) for name in SETTINGS}


class EarlyStoppingStateCallback(TrainerCallback):
    """Starts afresh, or where the checkpoint was, before an evaluation that a stop interrupted is made up."""

    def __init__(self, trainer: EarlyStoppingMixin):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A run that had stopped does not train on, unless a setting of early stopping has changed."""
        if self.trainer.restore_early_stopping():
            control.should_training_stop = True


def choose_watched(args: Any, eval_dataset: Any, compute_metrics: Any) -> Watched:
    """Reads `metric_for_best_model` as a metric whose difference on the same rows has an interval.

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
    if metric not in COMPARABLE:
        hint = "; rmse orders models as a mean squared loss does" if metric == "loss" else ""
        raise ArgumentError(
            f"early_stopping_patience={args.early_stopping_patience} with metric_for_best_model={given!r}: models are "
            f"compared row by row, in {', '.join(PLAIN_METRICS)}, or, over masked residues, {', '.join(RATIO_METRICS)}"
            f"{hint}. Give one of these, or transformers' EarlyStoppingCallback, which takes any metric."
        )
    if args.greater_is_better == (metric in LOWER_IS_BETTER):
        raise ArgumentError(
            f"metric_for_best_model={given!r} with greater_is_better={args.greater_is_better}: the worst model would "
            f"be kept as the best. Give --greater_is_better {metric not in LOWER_IS_BETTER}."
        )
    never = str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "no" and args.eval_minutes is None
    lacking = "an --eval_strategy" if never else "an evaluation set" if eval_dataset is None else None
    if compute_metrics is None or args.prediction_loss_only or args.batch_eval_metrics:
        lacking = "predictions: compute_metrics, without prediction_loss_only and batch_eval_metrics"
    if lacking:
        raise ArgumentError(f"early_stopping_patience={args.early_stopping_patience} needs {lacking}.")
    return Watched(metric, name)


def comparable_columns(evaluation: Any, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """An evaluation's labels and predictions as `StoppingRule` takes them, (n,) each.

    Raises:
        ArgumentError: the predictions are neither one number per row nor, where the metric needs them, sums per row.
    """
    predictions = np.asarray(evaluation.predictions)
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


def improvement_logs(comparison: PairedComparison | None, prefix: str) -> dict[str, float]:
    """What is logged of the comparison with the best: three numbers, without those that have no value."""
    if comparison is None:
        return {}
    values = {"": comparison.improvement, "_low": comparison.low, "_high": comparison.high}
    return {f"{prefix}improvement{end}": value for end, value in values.items() if value is not None}


def describe(decision: StoppingDecision, rule: StoppingRule) -> str:
    """The decision as a sentence, with the interval that made it."""
    start, best = f"Early stopping, step {decision.step}:", decision.against_best
    if best is None:
        return f"{start} the first model with a score, the best so far."
    if best.undefined:
        return f"{start} cannot tell, {best.undefined}."
    text = f"{start} {rule.metric} {_interval(best)} against step {decision.best_step}"
    if decision.verdict == "improved":
        return f"{start} {rule.metric} {_interval(best)}: certainly better than the best before, and the new best."
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
