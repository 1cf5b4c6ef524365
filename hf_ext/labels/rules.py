"""Kinds of labels, one class for each, and which of them a column has.

`--task auto` goes by rules on what its cells have in common, which also say why a column is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from ..errors import DataError
from .cells import SEPARATOR, as_bit, beside_minus_1, drop_zeros, shorten
from .classes import Classes
from .facts import Facts
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
STREAMED = {"auto", *(kind.task for kind in KINDS if kind.can_stream)}  # tasks of which rows may be a stream
ONE_NUMBER = Number()  # what a model predicts that says nothing else


def make_kind(task: str, columns: Sequence[str], names: Sequence[str], **more: Any) -> LabelKind:
    """Returns the kind of `--task` with these label columns, whose outputs have these names, and its other fields.

    Raises:
        KeyError: there is no such task.
    """
    for kind in KINDS:
        if kind.task == task and kind.fits(columns, names):
            return kind(tuple(columns), tuple(names), **more)
    raise KeyError(task)


def kind_from_state(state: Mapping[str, Any] | None) -> LabelKind:
    """Returns the kind with this `state()`; None is one number. What a report says of it besides is left out.

    Raises:
        KeyError, TypeError: no state of a kind.
    """
    fields = {name: value for name, value in (state or {}).items() if name != "read_as"}
    return make_kind(**fields) if fields else ONE_NUMBER


AMOUNTS = "--task regression if they are amounts"
ONE_NAME = "--task classification if each cell is one name"


class Rule(NamedTuple):
    """Where it `holds`, a column is of `task`, and `says` what to give if it is not; or without a task, why not."""

    holds: Callable[[Facts], bool]
    task: str | None
    says: str


# The first that holds counts. A sentence of refusal shows the first cell.
RESIDUE_RULES = (
    Rule(lambda facts: pa.types.is_dictionary(facts.column.type), "classification", ""),  # the file says so
    Rule(
        Facts.have_blanks,
        None,
        "labels that are as long as the sequences only if blanks count, as in DSSP, where they are coil (such as "
        "'{cell}'). Write - or C for each blank.",
    ),
    Rule(
        Facts.have_decimal_commas,
        None,
        "a number for each residue with a decimal comma (such as '{cell}'). Write a point: 0.7.",
    ),
    Rule(
        Facts.are_shortened,
        None,
        "lists that numpy wrote with '...' in place of their middle (such as '{cell}'). Write them whole, as "
        "array.tolist() gives them.",
    ),
    Rule(
        Facts.have_minus_1,
        None,
        "-1 beside 0 and others. If it means not known, write ? for a residue, or leave the row out; if it is a class "
        "or an amount, give --task.",
    ),
    Rule(
        Facts.are_residue_classes,
        "residue_classification",
        f"--task residue_regression for amounts in lists, {ONE_NAME}",
    ),
    Rule(Facts.are_residue_numbers, "residue_regression", ""),
)
ROW_RULES = (
    Rule(
        Facts.are_bit_vectors,
        None,
        "a list of 0 and 1 in each cell (such as '{cell}'), which names no labels. Write a column of 0 and 1 for each "
        "label and name all of them: --label_column A B C.",
    ),
    Rule(Facts.are_lists_of_numbers, "regression", ""),
    Rule(
        Facts.are_decimals,
        None,
        "several numbers in a cell (such as '{cell}'). Write a column for each, or lists of as many: [0.26, 0.68].",
    ),
    Rule(lambda facts: pa.types.is_boolean(facts.column.type), "classification", ""),
    Rule(
        Facts.are_bits_but_few,
        None,
        "0 and 1 in nearly all cells, and others such as '{odd}'. Correct these, or leave them empty; give --task "
        "regression if all are amounts, --task classification if all are classes.",
    ),
    Rule(Facts.are_counted_classes, "classification", AMOUNTS),
    Rule(Facts.are_numbers, "regression", "--task classification if they name classes"),
    Rule(Facts.are_sets, "multilabel", ONE_NAME),
    Rule(
        lambda facts: True,
        "classification",
        f"--task multilabel if a cell may name several, separated by {SEPARATOR}",
    ),
)


STREAM_TASK = "regression"  # of rows that are not seen before
# By `--task`, which says what -1 is: where not even that form can be read. Other tasks are read as they are asked for.
REFUSING = {
    "multilabel": (*RESIDUE_RULES, *ROW_RULES),
    "residue_classification": RESIDUE_RULES,
    "residue_regression": RESIDUE_RULES,
}


def choose_task(
    columns: Mapping[str, pa.ChunkedArray], sequences: pa.ChunkedArray | None, asked: str
) -> tuple[str, str]:
    """Returns the task of the cells, and what to give if they are not meant for it ("" where nothing else fits).

    Args:
        columns: n cells each, by name.
        sequences: n; None where residues cannot have labels, since several columns hold sequences.
        asked: `--task`; what it says is returned unless it is "auto".

    Raises:
        DataError: labels in a form that cannot be read, by these rules; -1 among several columns of 0 and 1.

    Cost: form and lengths of the first 1,000 labels; the distinct ones of whole columns where these are numbers.
    """
    if asked != "auto" and asked not in REFUSING:
        return asked, ""
    if len(columns) > 1:
        found = {drop_zeros(name) for column in columns.values() for name in Facts.of(column, None).distinct}
        if {*map(as_bit, beside_minus_1(found))} == {0.0, 1.0}:
            raise DataError(
                f"columns {', '.join(map(repr, columns))} hold 0, 1 and -1. If -1 means not known, leave these cells "
                "empty (0 and 1 are labels then); if it is an amount, give --task regression."
            )
        chosen = ("multilabel", AMOUNTS) if {*map(as_bit, found)} <= {0.0, 1.0} else ("regression", "")
        return chosen if asked == "auto" else (asked, "")
    ((name, column),) = columns.items()
    facts = Facts.of(column, sequences)
    rules = REFUSING.get(asked, (*RESIDUE_RULES, *ROW_RULES))
    may_hold = (rule for rule in rules if asked == "auto" or rule.holds is not Facts.have_minus_1)
    rule = next((rule for rule in may_hold if rule.holds(facts)), ROW_RULES[-1])
    if rule.task is None:
        odd = next((cell for cell in facts.cells if as_bit(cell) is None), "")
        told = rule.says.format(cell=shorten(facts.cells[0]), odd=shorten(odd))
        raise DataError(f"column {name!r} has {told}")
    return (rule.task, rule.says) if asked == "auto" else (asked, "")
