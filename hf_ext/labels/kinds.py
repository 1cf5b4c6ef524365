"""The readers of all kinds of labels, and a kind in words."""

from __future__ import annotations

from typing import Any

from . import LabelKind
from .cells import show_names, split_items, split_letters, unwrap, write_name
from .classes import Classes, LabelSets, ResidueClasses
from .numbers import Numbers, ResidueNumbers

READERS: dict[str, type[Numbers] | type[Classes]] = {
    "regression": Numbers,
    "classification": Classes,
    "multilabel": LabelSets,
    "residue_classification": ResidueClasses,
    "residue_regression": ResidueNumbers,
}


def reader_of(kind: LabelKind) -> Numbers | Classes:
    """What reads, counts and explains labels of this kind."""
    return READERS[kind.task](kind)


def describe_kind(kind: LabelKind) -> str:
    """What the labels are, for a sentence."""
    num, names = f"{len(kind.names):,}", show_names(kind.names)
    return {
        "regression": "a number" if len(kind.names) == 1 else f"{num} numbers",
        "classification": f"one of {num} classes ({names})",
        "multilabel": f"any of {num} labels ({names})",
        "residue_classification": f"one of {num} classes ({names}) for each residue",
        "residue_regression": "a number for each residue",
    }[kind.task]


def read_items(reader: Numbers | Classes, cell: Any) -> list[str]:
    """Returns what a cell is read as, in the order in which it stands there."""
    kind = reader.kind
    if kind.is_one_number:
        items = [unwrap(cell)]
    elif isinstance(reader, Classes) and not kind.per_residue:
        items = reader.names_of(cell)
    else:
        items = split_items(cell) if kind.is_numeric else split_letters(cell)
    return [*map(write_name, items)]
