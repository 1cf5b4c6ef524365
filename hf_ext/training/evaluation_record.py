"""What a run remembers of its evaluations, in every checkpoint: counts, seconds, the score of the best."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState


@dataclass
class SetRecord:
    """Of one evaluation set: its rows, how often it was looked at, in full or not, and how long that took.

    `rest_s` are the seconds of those passes over the rows outside the subset that were made, `num_rest` how many.
    """

    subset_rows: int = 0
    full_rows: int = 0
    num_evaluations: int = 0
    num_full: int = 0
    seconds: float = 0.0
    rest_s: float = 0.0
    num_rest: int = 0

    def seconds_saved(self) -> float | None:
        """What the passes over the rest that were not made would have taken; None where none was ever measured."""
        num_left_out = self.num_evaluations - self.num_full
        if num_left_out == 0:
            return 0.0
        return num_left_out * self.rest_s / self.num_rest if self.num_rest else None


class EvaluationRecord(TrainerCallback, ExportableState):
    """Goes into `trainer_state.json` with the other callbacks; Trainer makes a new one from there. Seconds do not.

    Attributes:
        sets: `SetRecord` fields by name of the evaluation set ("" where there is but one), without the seconds.
        seconds: `seconds` and `rest_s` of each set.
        best_on_subset: what the best model so far scored on the subset, or None.
        best_is_of: which subset and metric that was, as text.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """As before the first evaluation."""
        self.sets: dict[str, dict[str, int]] = {}
        self.seconds: dict[str, dict[str, float]] = {}
        self.best_on_subset: float | None = None
        self.best_is_of: str | None = None

    def state(self) -> dict[str, Any]:
        """For the checkpoint, and for taking back an evaluation that was given up: a copy."""
        stored = {name: value for name, value in vars(self).items() if name != "seconds"}
        return {"args": {}, "attributes": copy.deepcopy(stored)}

    def of(self, name: str) -> SetRecord:
        """The record of a set."""
        fields: dict[str, Any] = {**self.sets.get(name, {}), **self.seconds.get(name, {})}
        return SetRecord(**fields)

    def _keep(self, name: str, record: SetRecord) -> None:
        fields = asdict(record)
        self.seconds[name] = {part: fields.pop(part) for part in ("seconds", "rest_s")}
        self.sets[name] = fields

    def add_pass(self, name: str, subset_rows: int, full_rows: int, is_full: bool, seconds: float) -> None:
        """Notes an evaluation of a set: of its subset, or (`is_full`) of all rows in one pass."""
        record = self.of(name)
        record.subset_rows, record.full_rows = subset_rows, full_rows
        record.num_evaluations, record.num_full = record.num_evaluations + 1, record.num_full + is_full
        record.seconds += seconds
        self._keep(name, record)

    def add_rest(self, name: str, seconds: float) -> None:
        """Notes that the rest followed, which made the evaluation one of all rows."""
        record = self.of(name)
        record.num_full, record.num_rest = record.num_full + 1, record.num_rest + 1
        record.seconds, record.rest_s = record.seconds + seconds, record.rest_s + seconds
        self._keep(name, record)

    def facts(self) -> dict[str, Any]:
        """Sums over the sets, for `evaluation_facts` of the trainer."""
        records = [self.of(name) for name in self.sets]
        if not records:
            return {}
        saved = [record.seconds_saved() for record in records]
        summed = ("subset_rows", "full_rows", "num_evaluations", "num_full", "seconds")
        facts: dict[str, Any] = {name: sum(getattr(record, name) for record in records) for name in summed}
        if not facts["subset_rows"]:
            del facts["subset_rows"]
        elif None not in saved:
            facts["seconds_saved"] = round(sum(filter(None, saved), 0.0), 3)
        facts["seconds"] = round(facts["seconds"], 3)
        return facts


def record_of(callbacks: Iterable[Any]) -> EvaluationRecord:
    """The record among a trainer's callbacks, where Trainer puts another one when it resumes.

    An empty one where a user has removed it.
    """
    return next((callback for callback in callbacks if isinstance(callback, EvaluationRecord)), EvaluationRecord())
