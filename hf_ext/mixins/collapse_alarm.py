"""An alarm, while training, when predictions collapse."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from ..checkpoints.trees import load_tree, save_tree
from ..evaluation.guards import collapse_report
from ..evaluation.scores import PLAIN_METRICS
from .stopping import EvaluationGivenUp

TREE = "collapse_alarm"
EARLY_SHARE = 0.1  # of all steps, in which a fresh head may still be nearly constant
SAID_EARLY = ("bfloat16", "NaN or infinite", "undefined")  # words of alarms that time does not mend

logger = logging.getLogger(__name__)


class CollapseAlarmMixin:
    """Warns when a regression's predictions collapse while it trains: few values, little spread, bfloat16 rounding.

    Looks at every evaluation that the loop asks for, of one number per row with labels that are no classes. Each kind
    of alarm is said once until it goes away, and stands in `trainer.collapse_alarms` ("step", "name" of the evaluation
    set, "alarms"). Within the learning rate's warm-up and the first tenth of the steps only rounding and values that
    are not finite are alarming; an alarm that still holds when training ends has been said. A metric that is NaN is
    named with its reason. Logged: `eval_num_distinct` and `eval_spread_ratio` (the predictions' standard deviation
    divided by the labels').

    Cost: two sorts per evaluation: 10 ms for 26,000 rows.
    """

    args: Any
    state: Any
    is_in_train: bool
    compared_evaluation: Any  # of EvaluationMixin
    stop_reason: str | None  # of StoppingMixin
    _is_evaluating: bool  # of StoppingMixin
    _resumed: Any  # of ResumeMixin

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.collapse_alarms: list[dict[str, Any]] = []
        self._alarms_said: dict[str, list[str]] = {}  # name of the evaluation set -> kinds that hold
        self._alarms_held: dict[str, list[str]] = {}  # -> what it is too early to say
        self._last_examined: Any = None
        self.add_callback(CollapseAlarmCallback(self))  # type: ignore[attr-defined]

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        before = list(self.collapse_alarms), dict(self._alarms_said), dict(self._alarms_held)
        try:
            return super()._evaluate(*args, **kwargs)  # type: ignore[misc]
        except EvaluationGivenUp:  # one of several sets may have been looked at
            self.collapse_alarms, self._alarms_said, self._alarms_held = before
            raise

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in Trainer; with an evaluation's metrics goes how its predictions spread."""
        with extended(logs, self._examine_predictions(logs)):
            super().log(logs, start_time)  # type: ignore[misc]

    def _examine_predictions(self, logs: dict[str, float]) -> dict[str, float]:
        evaluation = self.compared_evaluation if self.is_in_train and self._is_evaluating else None
        if evaluation is None or evaluation is self._last_examined:
            return {}
        self._last_examined = evaluation
        if not is_regression(evaluation):
            return {}
        prefix = f"eval_{evaluation.name}_" if evaluation.name else "eval_"
        report = collapse_report(evaluation.predictions, evaluation.labels)
        self._note_alarms(evaluation.name, [*undefined_metrics(logs, prefix, evaluation), *report["alarms"]])
        spread = {"num_distinct": report["num_distinct"], "spread_ratio": report["spread_ratio"]}
        return {f"{prefix}{name}": float(value) for name, value in spread.items() if value is not None}

    def _note_alarms(self, name: str, alarms: list[str]) -> None:
        """Says what is new, holds back what is too early, and forgets what no longer holds."""
        warmup = self.args.get_warmup_steps(self.state.max_steps)
        is_early = self.state.global_step <= max(warmup, EARLY_SHARE * self.state.max_steps)
        due = [alarm for alarm in alarms if not is_early or any(words in alarm for words in SAID_EARLY)]
        self._alarms_held[name] = [alarm for alarm in alarms if alarm not in due]
        said = self._alarms_said.get(name, [])
        kinds = [kind_of(alarm) for alarm in due]
        self._say_alarms(name, [alarm for alarm, kind in zip(due, kinds) if kind not in said])
        if said and not alarms and self.is_world_process_zero():  # type: ignore[attr-defined]
            logger.info("Step %d%s: the predictions are no longer alarming.", self.state.global_step, _of(name))
        self._alarms_said[name] = kinds

    def _say_alarms(self, name: str, alarms: list[str]) -> None:
        if not alarms:
            return
        self.collapse_alarms.append({"step": self.state.global_step, "name": name, "alarms": alarms})
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            logger.warning("ALARM at step %d%s: %s", self.state.global_step, _of(name), " ".join(alarms))

    def say_held_alarms(self) -> None:
        """Says at the end of training what was too early to say at the last evaluation."""
        for name, alarms in self._alarms_held.items():
            self._say_alarms(name, alarms)
        self._alarms_held = {}

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save_watching(self, folder: Path) -> None:
        """Writes what was said; called by the main process for each checkpoint."""
        if self._alarms_said or self._alarms_held:
            said, held = self._alarms_said, self._alarms_held
            save_tree(folder, TREE, {"alarms": self.collapse_alarms, "said": said, "held": held})

    def restore_alarms(self) -> None:
        """Starts afresh, or, in a resumed run, with what its checkpoint knows."""
        tree: dict[str, Any] = {"alarms": [], "said": {}, "held": {}}
        if self._resumed is not None and f"{TREE}.json" in self._resumed.manifest.files:
            tree = load_tree(self._resumed.path, TREE)
        self.collapse_alarms, self._alarms_said, self._alarms_held = tree["alarms"], tree["said"], tree["held"]
        self._last_examined = None


class CollapseAlarmCallback(TrainerCallback):
    """Brings the beginning and the end of training to `CollapseAlarmMixin`."""

    def __init__(self, trainer: CollapseAlarmMixin):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before an evaluation that a stop interrupted is made up."""
        self.trainer.restore_alarms()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Also where training ended early; not where it was stopped and will be resumed."""
        if self.trainer.stop_reason is None:
            self.trainer.say_held_alarms()


@contextmanager
def extended(logs: dict[str, float], added: dict[str, float]) -> Iterator[None]:
    """`logs` with what it lacks of `added`, while it is logged.

    Afterwards without: Trainer sums what `evaluate` returns into the objective of a hyperparameter search.
    """
    new = {name: value for name, value in added.items() if name not in logs}
    logs.update(new)
    try:
        yield
    finally:
        for name in new:
            logs.pop(name, None)


def is_regression(evaluation: Any) -> bool:
    """Whether an evaluation is of one number per row, (n,) or (n, 1), and labels of more than two values."""
    columns = [np.asarray(evaluation.predictions), np.asarray(evaluation.labels)]
    if any(c.dtype.kind != "f" or not (c.ndim == 1 or c.shape[1:] == (1,)) for c in columns):
        return False
    return len(columns[0]) == len(columns[1]) and len(np.unique(columns[1])) > 2


def undefined_metrics(logs: dict[str, float], prefix: str, evaluation: Any) -> list[str]:
    """A sentence for each metric that is NaN because it has no value for these predictions."""
    sentences = []
    for name, metric in PLAIN_METRICS.items():
        value = logs.get(f"{prefix}{name}")
        if isinstance(value, float) and math.isnan(value):
            reason = metric(evaluation.predictions, evaluation.labels).undefined
            sentences += [f"{name} undefined: {reason}."] if reason else []
    return sentences


def kind_of(alarm: str) -> str:
    """The sentence without its numbers."""
    return re.sub(r"-?\d[\d,.]*(e[+-]?\d+)?", "#", alarm)


def _of(name: str) -> str:
    return f" ({name})" if name else ""
