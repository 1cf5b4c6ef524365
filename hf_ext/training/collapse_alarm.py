"""An alarm, while training, when predictions collapse."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState

from ..evaluation.guards import Alarm, AlarmKind, examine_predictions
from ..evaluation.scores import PLAIN_METRICS
from .evaluation_passes import Evaluation
from .stopper import Stopper
from .team import Team

EARLY_SHARE = 0.1  # of all steps, in which a fresh head may still be nearly constant
SAID_EARLY = (AlarmKind.BFLOAT16, AlarmKind.NOT_FINITE, AlarmKind.UNDEFINED)  # that time does not mend

logger = logging.getLogger(__name__)


class CollapseAlarm(TrainerCallback):
    """Warns when a regression's predictions collapse while it trains: few values, little spread, bfloat16 rounding.

    Looks at every evaluation that the loop asks for, of one number per row with labels that are no classes. Each alarm
    is said once until it goes away, and stands in `alarms` ("step", "name" of the evaluation set, "alarms"). Within the
    learning rate's warm-up and the first tenth of the steps only rounding and values that are not finite are alarming;
    an alarm that still holds when training ends has been said. A metric that is NaN is named with its reason. Logged:
    `eval_num_distinct` and `eval_spread_ratio` (the predictions' standard deviation divided by the labels').

    Cost: two sorts per evaluation: 10 ms for 26,000 rows.
    """

    name = "collapse_alarm"
    missing = ""  # nothing was alarming

    def __init__(self, args: Any, team: Team, stopper: Stopper):
        self._args, self._team, self._stopper = args, team, stopper
        self.alarms: list[dict[str, Any]] = []
        self._said: dict[str, list[str]] = {}  # name of the evaluation set -> what holds, without numbers
        self._held: dict[str, list[str]] = {}  # -> what it is too early to say

    def see(
        self, evaluation: Evaluation, logs: Mapping[str, float], state: TrainerState, control: TrainerControl
    ) -> dict[str, float]:
        """Says what is alarming; returns how the predictions spread."""
        if not is_regression(evaluation):
            return {}
        prefix = f"eval_{evaluation.name}_" if evaluation.name else "eval_"
        report, alarms = examine_predictions(evaluation.predictions, evaluation.labels)
        self._note(evaluation.name, [*undefined_metrics(logs, prefix, evaluation), *alarms], state)
        spread = {"num_distinct": report["num_distinct"], "spread_ratio": report["spread_ratio"]}
        return {f"{prefix}{name}": float(value) for name, value in spread.items() if value is not None}

    def _note(self, name: str, alarms: list[Alarm], state: TrainerState) -> None:
        """Says what is new, holds back what is too early, and forgets what no longer holds."""
        warmup = self._args.get_warmup_steps(state.max_steps)
        is_early = state.global_step <= max(warmup, EARLY_SHARE * state.max_steps)
        due = [alarm.text for alarm in alarms if not is_early or alarm.kind in SAID_EARLY]
        self._held[name] = [alarm.text for alarm in alarms if is_early and alarm.kind not in SAID_EARLY]
        said = self._said.get(name, [])
        self._say(name, [text for text in due if without_numbers(text) not in said], state.global_step)
        if said and not alarms and self._team.is_main:
            logger.info("Step %d%s: the predictions are no longer alarming.", state.global_step, _of(name))
        self._said[name] = [without_numbers(text) for text in due]

    def _say(self, name: str, texts: list[str], step: int) -> None:
        if not texts:
            return
        self.alarms.append({"step": step, "name": name, "alarms": texts})
        if self._team.is_main:
            logger.warning("ALARM at step %d%s: %s", step, _of(name), " ".join(texts))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Says what was too early to say at the last evaluation; not where training was stopped and will be resumed."""
        if self._stopper.reason is not None:
            return
        for name, texts in self._held.items():
            self._say(name, texts, state.global_step)
        self._held = {}

    # --- checkpoints, and an evaluation that is given up -------------------------------------------------------------

    def snapshot(self) -> Any:
        """What an evaluation may change."""
        return list(self.alarms), dict(self._said), dict(self._held)

    def rollback(self, snapshot: Any) -> None:
        """As when the snapshot was taken."""
        self.alarms, self._said, self._held = snapshot

    def state(self) -> dict[str, Any] | None:
        """What was said, and what is held back; None where nothing was looked at."""
        return {"alarms": self.alarms, "said": self._said, "held": self._held} if self._said or self._held else None

    def load(self, tree: dict[str, Any] | None) -> None:
        """As the run was that gave this state; afresh without one."""
        tree = tree or {"alarms": [], "said": {}, "held": {}}
        self.alarms, self._said, self._held = tree["alarms"], tree["said"], tree["held"]


def is_regression(evaluation: Evaluation) -> bool:
    """Whether an evaluation is of one number per row, (n,) or (n, 1), and labels of more than two values."""
    columns = [np.asarray(evaluation.predictions), np.asarray(evaluation.labels)]
    if any(c.dtype.kind != "f" or not (c.ndim == 1 or c.shape[1:] == (1,)) for c in columns):
        return False
    return len(columns[0]) == len(columns[1]) and len(np.unique(columns[1])) > 2


def undefined_metrics(logs: Mapping[str, float], prefix: str, evaluation: Evaluation) -> list[Alarm]:
    """An alarm for each metric that is NaN because it has no value for these predictions."""
    alarms = []
    for name, metric in PLAIN_METRICS.items():
        value = logs.get(f"{prefix}{name}")
        if isinstance(value, float) and math.isnan(value):
            reason = metric(evaluation.predictions, evaluation.labels).undefined
            alarms += [Alarm(AlarmKind.UNDEFINED, f"{name} undefined: {reason}.")] if reason else []
    return alarms


def without_numbers(text: str) -> str:
    """What tells one alarm from another, whatever its numbers are; stands in checkpoints."""
    return re.sub(r"-?\d[\d,.]*(e[+-]?\d+)?", "#", text)


def _of(name: str) -> str:
    return f" ({name})" if name else ""
