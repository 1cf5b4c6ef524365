"""Early stopping by a paired comparison on the same rows; its state is part of every checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..evaluation.paired import PairedComparison
from ..evaluation.stopping_rule import StoppingDecision, StoppingRule
from .comparable import Evaluation, Watched, choose_watched, comparable_columns

ROW_BYTES = 26  # of a float64 as JSON has it
SETTINGS = ("early_stopping_patience", "early_stopping_min_delta", "metric_for_best_model", "eval_subset")

logger = logging.getLogger(__name__)


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
        self._watched: Watched | None = None
        self._rule: StoppingRule | None = None
        self._stored_rule: dict[str, Any] | None = None  # until the first evaluation has shown its rows
        if trainer.args.early_stopping_patience is not None:
            self._watched = choose_watched(trainer.args, trainer.eval_dataset, trainer.compute_metrics)

    # --- an evaluation ----------------------------------------------------------------------------------------------

    def see(self, evaluation: Evaluation, metrics: Mapping[str, float]) -> dict[str, float]:
        """Feeds the rule, and ends training where it says so; returns the interval of the improvement."""
        trainer, watched, step = self._trainer, self._watched, self._trainer.state.global_step
        if watched is None or evaluation.name != watched.name:
            return {}
        if self.decisions and self.decisions[-1]["step"] == step:
            return {}  # the same weights again
        labels, predictions = comparable_columns(evaluation, watched)
        rule = self._rule_of(labels, watched, evaluation.groups)
        decision = rule.update(predictions, step=step)
        self.decisions.append(decision.as_dict())
        stops = trainer._ext_team.agree([decision.should_stop])[0]
        if stops:
            trainer.control.should_training_stop = True
        if trainer._ext_team.is_main:
            logger.log(logging.WARNING if stops else logging.INFO, describe(decision, rule))
        return improvement_logs(decision.against_best, f"eval_{evaluation.name}_" if evaluation.name else "eval_")

    def _rule_of(self, labels: np.ndarray, watched: Watched, groups: np.ndarray | None) -> StoppingRule:
        """The rule of these rows: the one there is, that of the checkpoint, or a new one."""
        if self._rule is not None and self._rule.is_of(labels):
            return self._rule
        args = self._trainer.args
        rule = StoppingRule(
            labels,
            metric=watched.metric,
            threshold=watched.threshold,
            groups=groups,
            patience=args.early_stopping_patience,
            warmup_steps=args.get_warmup_steps(self._trainer.state.max_steps),
            min_delta=args.early_stopping_min_delta,
        )
        problem = None if self._rule is None else "The evaluation has other rows or labels than before"
        if self._stored_rule is not None:
            try:
                rule.load_state_dict(self._stored_rule)
            except CheckpointError as error:
                problem = str(error)
        if problem and self._trainer._ext_team.is_main:
            logger.warning("Early stopping counts anew. %s", problem)
        self._rule, self._stored_rule = rule, None
        return rule

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """What a resumed run compares with, and the settings that it was decided by."""
        if self._watched is None:
            return None
        rule = self._stored_rule if self._rule is None else self._rule.state_dict()
        return {"settings": self._settings(), "rule": rule, "decisions": self.decisions}

    def load(self, tree: dict[str, Any] | None) -> None:
        """As the run was that gave this state; afresh without one.

        A run that had stopped does not train on, unless a setting of early stopping has changed.
        """
        trainer, resumed = self._trainer, self._trainer._ext_resumer.resumed
        self._rule, self._stored_rule, self.decisions = None, None, []
        if self._watched is None:
            return
        if tree is None:
            if resumed is not None:
                logger.info("%s has no state of early stopping: counting starts anew.", resumed.folder)
            return
        self._stored_rule, self.decisions = tree["rule"], tree["decisions"]
        has_stopped = bool(self.decisions) and self.decisions[-1]["should_stop"]
        if has_stopped and tree["settings"] == self._settings():
            trainer.control.should_training_stop = True

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self._trainer.args, name) for name in SETTINGS}

    def num_bytes(self) -> int:
        """Upper bound of the arrays that this adds to a checkpoint, from the rows that evaluation can look at."""
        if self._watched is None:
            return 0
        args, sets = self._trainer.args, self._trainer.eval_dataset
        rows = sets[self._watched.name] if self._watched.name else sets
        num_rows, most = len(rows) if hasattr(rows, "__len__") else 0, args.eval_subset
        if most is not None:
            num_rows = min(num_rows or math.inf, math.ceil(most if most > 1 else most * num_rows))
        num_rows = max(num_rows, 0 if self._rule is None else len(self._rule.labels))
        return ROW_BYTES * num_rows * (args.early_stopping_patience + 1)


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
