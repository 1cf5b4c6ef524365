"""Kinds of labels: what a cell may hold, what the head puts out, the loss, what is predicted, scored, and said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

TaskName = Literal["regression", "classification", "multilabel", "residue_classification", "residue_regression"]
UNKNOWN = -100  # in tensors of labels: no loss, no score


@dataclass(frozen=True)
class LabelKind:
    """What a model predicts, with the names that training found; saved as `AffinityConfig.label_kind`.

    Attributes:
        task: as `--task` has it.
        columns: label columns of the table.
        names: what each output stands for: classes in their order, labels of a multilabel task, or value columns.
    """

    task: TaskName
    columns: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def num_outputs(self) -> int:
        """Of the head, for each row or residue."""
        return len(self.names)

    @property
    def is_one_number(self) -> bool:
        """Whether a row has one label, a number: then each counts, -100 too, and it may be a bound."""
        return self.task == "regression" and self.num_outputs == 1

    @property
    def per_residue(self) -> bool:
        """Whether each residue of the sequence has a label, instead of each row."""
        return self.task.startswith("residue")

    @property
    def is_numeric(self) -> bool:
        """Whether labels are numbers on a scale, which the model standardises."""
        return self.task.endswith("regression")

    @property
    def has_values(self) -> bool:
        """Whether a row has a value, or none, for each output: several numbers, or columns of 0 and 1."""
        return (self.task == "regression" and self.num_outputs > 1) or (
            self.task == "multilabel" and len(self.columns) > 1
        )

    @property
    def of_rows(self) -> LabelKind:
        """The same label, one for each row."""
        return replace(self, task=self.task.removeprefix("residue_"))  # type: ignore[arg-type]

    def state(self) -> dict[str, Any]:
        """JSON-able."""
        return {"task": self.task, "columns": [*self.columns], "names": [*self.names]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> LabelKind:
        """From `state()`."""
        return cls(state["task"], tuple(state["columns"]), tuple(state["names"]))


ONE_NUMBER = LabelKind("regression", ("label",), ("label",))  # what a model predicts that says nothing else
