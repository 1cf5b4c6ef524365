"""What the labels of a table are: as `--task` says, or as their columns look; and whether they can be that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ArgumentError, DataError
from ..labels import LabelKind
from ..labels.cells import drop_zeros, is_missing, shorten, show_names, write_name
from ..labels.choosing import NUM_SEEN, choose_task, vector_length
from ..labels.classes import JOINTS, NO_LABEL, SEPARATOR, Classes, find_joints, order_names, split_joined
from ..labels.kinds import describe_kind, read_items, reader_of
from .arguments import DataArguments
from .columns import as_text, check_columns, distinct, read_table
from .reading import SOURCE_ROW, Part

MOST = 0.5


def find_kind(
    args: DataArguments, parts: Sequence[Part], report: dict[str, Any], given: LabelKind | None = None
) -> LabelKind:
    """What the label columns hold, over all parts of a source.

    Args:
        report: gets `labels`: the kind's state, and `read_as` (a sentence) where `--task auto` decided; and `notes`.
        given: of a model, whose names are kept; columns are those of `args`.

    Raises:
        ArgumentError: a task that does not fit the columns that are named.
        DataError: no such column, classes that are names of rows, residues of which labels are the sequences.
    """
    columns, read_as = tuple(args.label_column), {}
    if given:
        if len(columns) != len(given.columns):
            raise ArgumentError(
                f"--label_column {' '.join(columns)}: the model was trained on {len(given.columns)} "
                f"({' '.join(given.columns)}); name as many, in that order."
            )
        if {*columns} == {*given.columns}:  # in any order
            columns = given.columns
            args.label_column = [*columns]
        kind = replace(given, columns=columns)
    elif args.streaming:  # whose rows nobody has seen
        kind = LabelKind("regression" if args.task == "auto" else args.task, columns, columns)
        read_as = {"read_as": f"A stream: {', '.join(map(repr, columns))} is read as {describe_kind(kind)}, unseen."}
    else:
        table = _read(args, parts)
        sequences = table.pop(args.sequence_columns[0])
        rows = table.pop(SOURCE_ROW)
        task, alternative = args.task, ""
        if task not in ("regression", "classification"):  # others are refused in the same forms
            found, alternative = choose_task(table, sequences if len(args.sequence_columns) == 1 else None, task)
            task = found if task == "auto" else task
        kind = LabelKind(task, columns, columns)
        if len(columns) == 1:
            kind = replace(kind, names=_find_names(kind, args, table[columns[0]], sequences, report["notes"]))
        if args.task == "auto":
            named = f"Column {', '.join(map(repr, columns))} is read as {describe_kind(kind)}"
            named += f" ({alternative})." if alternative else "."
            example = _show_example(kind, table[columns[0]], rows) if len(columns) == 1 else ""
            read_as = {"read_as": named + example}
    check_kind(kind, args)
    report["labels"] = kind.state() | read_as
    return kind


def _read(args: DataArguments, parts: Sequence[Part]) -> dict[str, pa.ChunkedArray]:
    """Label columns, the first sequence column and the rows' numbers, over all parts; text where types differ."""
    names, tables = [*args.label_column, args.sequence_columns[0]], []
    for part in parts:
        check_columns(part.data.column_names, names, part.path)
        tables.append(read_table(part.data, [*names, SOURCE_ROW]))
    columns = {}
    for name in tables[0].column_names:
        found = [table[name] for table in tables]
        found = [*map(as_text, found)] if len({column.type for column in found}) > 1 else found
        columns[name] = pa.chunked_array([chunk for column in found for chunk in column.chunks], found[0].type)
    return columns


def _show_example(kind: LabelKind, column: pa.ChunkedArray, rows: pa.ChunkedArray) -> str:
    """Returns a sentence that shows how the first cell is read that is not just its own name or number."""
    reader = reader_of(kind)
    for row, cell in zip(rows.to_pylist(), column[:NUM_SEEN].to_pylist()):
        items = [] if is_missing(cell) else read_items(reader, cell)
        if items and items != [write_name(cell)]:
            return f" For example, row {row}, {shorten(cell)}, is read as: {show_names(items)}."
    return ""


def _find_names(
    kind: LabelKind,
    args: DataArguments,
    cells: pa.ChunkedArray,
    sequences: pa.ChunkedArray,
    notes: list[str],
) -> tuple[str, ...]:
    """Returns what the outputs stand for: classes of a column in their order, or the numbers that its cells list."""
    name = kind.columns[0]
    if kind.is_numeric:
        num = 1 if kind.per_residue else vector_length(cells)
        return (name,) if num == 1 else tuple(f"{name}_{i}" for i in range(1, num + 1))
    found = distinct(cells)
    values = found.cells.to_pylist()
    counts = _count_classes(kind, args, values, np.bincount(found.number).tolist(), notes)
    if not counts:
        raise DataError(f"column {name!r}: no cell names a class. Check --label_column and --task.")
    if kind.per_residue and pc.mean(pc.equal(as_text(cells), as_text(sequences))).as_py() > MOST:
        raise DataError(f"column {name!r} holds the sequences themselves. Name that of labels.")
    names = order_names(counts)
    joined = [one for one in names if any(sign in one for sign in JOINTS)]
    kind = replace(kind, names=names)
    reader = reader_of(kind)
    if kind.task == "multilabel" and joined and max(len(read_items(reader, value)) for value in values) < 2:
        raise DataError(
            f"column {name!r}: --task multilabel reads labels separated by {SEPARATOR!r}, and no cell names "
            f"several ({show_names(joined)}). Write it between them; or give --task classification."
        )
    notes += _doubt_names(kind, counts, len(cells))
    return names


def _count_classes(
    kind: LabelKind, args: DataArguments, cells: Sequence[Any], nums: Sequence[int], notes: list[str]
) -> Counter[str]:
    """Returns in how many rows each class stands: `a|b` is a and b where it joins classes, `1.0` is 1 beside it."""
    if not kind.per_residue:
        _check_markers(kind.columns[0], args, cells, nums, notes)
    counts = _count_names(replace(kind, names=tuple(args.marker_classes)), cells, nums)
    if kind.task == "multilabel" and (joints := find_joints(counts)):
        parts = {part for name in counts for sign in joints if sign in name for part in split_joined(name, sign)}
        alone = [name for name in counts if not any(sign in name for sign in joints)]
        counts = _count_names(replace(kind, names=(*alone, *parts)), cells, nums)
    for name in [*counts]:
        whole = drop_zeros(name)
        if whole != name and whole in counts:
            counts[whole] += counts.pop(name)
    if kind.per_residue and NO_LABEL in counts and all(map(str.isdigit, counts.keys() - {NO_LABEL})):
        num = counts.pop(NO_LABEL)
        notes.append(f"column {kind.columns[0]!r}: {NO_LABEL!r} beside digits is read as not known, in {num:,} rows.")
    return counts


def _count_names(kind: LabelKind, cells: Sequence[Any], nums: Sequence[int]) -> Counter[str]:
    """Returns in how many rows each class stands, as they are read where `kind.names` are known."""
    reader = reader_of(kind)
    assert isinstance(reader, Classes)
    counts: Counter[str] = Counter()
    for cell, num in zip(cells, nums):
        counts.update(dict.fromkeys(reader.names_of(cell), num))
    return counts


def _check_markers(name: str, args: DataArguments, cells: Sequence[Any], nums: Sequence[int], notes: list[str]) -> None:
    """Raises DataError, or notes where bad rows are dropped, that names such as `NA` read as no value."""
    found: Counter[str] = Counter()
    for cell, num in zip(cells, nums):
        if isinstance(cell, str) and cell.strip() and is_missing(cell) and cell.strip() not in args.marker_classes:
            found[cell.strip()] += num
    if found:
        told = (
            f"column {name!r}: {found.total():,} cells say {' or '.join(map(repr, sorted(found)))}, which reads as no "
            f"value. If these are classes, give --marker_classes {' '.join(sorted(found))}"
        )
        if args.bad_rows == "error":
            raise DataError(f"{told}; if not, leave these rows out: --bad_rows drop.")
        notes.append(f"{told}.")


def check_kind(kind: LabelKind, args: DataArguments) -> None:
    """Raises ArgumentError where other arguments do not go with what the labels are."""
    told, num = f"--task {kind.task}", len(kind.columns)
    if num > 1 and kind.task not in ("regression", "multilabel"):
        raise ArgumentError(f"{told}: name one label column, not {num}; regression and multilabel take several.")
    if kind.per_residue and len(names := args.sequence_columns) > 1:
        raise ArgumentError(f"{told}: residues of one sequence have labels; name one of {' '.join(names)}.")
    if (name := args.mask_column) and not kind.per_residue:
        raise ArgumentError(f"--mask_column {name} says which residues have a label; {told} has one per row.")
    if (name := args.censor_column) and not kind.is_one_number:
        raise ArgumentError(f"--censor_column {name} is for one column of numbers; leave it out.")


def _doubt_names(kind: LabelKind, counts: Mapping[str, int], num_rows: int) -> list[str]:
    """Sentences about classes that are probably none; refuses those that are the rows' own names."""
    where, num, shown = f"column {kind.columns[0]!r}", len(counts), show_names(kind.names)
    if kind.task == "classification" and num == num_rows > 2:
        raise DataError(
            f"{where}: each of the {num:,} rows has a class of its own ({shown}): these are names of rows, from which "
            "nothing can be learned. Name another --label_column, or give --task regression for amounts, "
            "residue_classification for a letter per residue; separate several labels in a cell by ';'."
        )
    notes = []
    if not kind.per_residue and (single := sum(count == 1 for count in counts.values())) > num / 2:
        notes.append(
            f"{where}: {single:,} of {num:,} classes have a single row: these may be names of rows, not classes."
        )
    folded: dict[str, list[str]] = {}
    for name in kind.names:
        folded.setdefault("".join(name.casefold().replace("_", " ").split()), []).append(repr(name))
    if same := [" and ".join(names) for names in folded.values() if len(names) > 1]:
        notes.append(f"{where}: classes that differ in spelling only: {show_names(same)}. Spell them alike.")
    if kind.task == "classification" and sum(any(sign in name for sign in ",|") for name in kind.names) > num / 2:
        notes.append(
            f"{where}: most classes hold a comma or a | ({shown}). If each cell names several labels, separate them by "
            "';' for --task multilabel."
        )
    return notes
