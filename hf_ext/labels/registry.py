"""Kinds of labels: what a cell may hold, what the head puts out, what is predicted, and said. One class for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from .classes import Classes
from .kind import LabelKind
from .number import Number
from .numbers import Numbers
from .residue_numbers import ResidueNumbers
from .residues import ResidueClasses
from .sets import LabelColumns, LabelSets

# Of a task the first that `fits` its columns and names.
KINDS: tuple[type[LabelKind], ...] = (
    Number,
    Numbers,
    Classes,
    LabelColumns,
    LabelSets,
    ResidueClasses,
    ResidueNumbers,
)
if TYPE_CHECKING:
    TaskChoice = str
else:  # what `--task` may be
    TaskChoice = Literal[("auto", *dict.fromkeys(kind.task for kind in KINDS))]

STREAMED = {"auto", *(kind.task for kind in KINDS if kind.can_stream)}  # tasks of which rows may be a stream
ONE_NUMBER = Number()  # what a model predicts that says nothing else


def make_kind(task: str, columns: Sequence[str], names: Sequence[str]) -> LabelKind:
    """Returns the kind of `--task` with these label columns, whose outputs have these names.

    Raises:
        KeyError: there is no such task.
    """
    for kind in KINDS:
        if kind.task == task and kind.fits(columns, names):
            return kind(tuple(columns), tuple(names))
    raise KeyError(task)


def kind_from_state(state: Mapping[str, Any] | None) -> LabelKind:
    """Returns the kind with this `state()`; None is one number.

    Raises:
        KeyError: no state of a kind.
    """
    return make_kind(state["task"], state["columns"], state["names"]) if state else ONE_NUMBER
