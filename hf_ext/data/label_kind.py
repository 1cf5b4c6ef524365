"""What the labels of a table are: as `--task` says, or as their columns look; and whether they can be that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from ..errors import ArgumentError, DataError
from ..labels import (
    NUM_SEEN,
    STREAM_TASK,
    LabelKind,
    as_text,
    choose_task,
    is_missing,
    make_kind,
    shorten,
    show_names,
    write_name,
)
from .arguments import DataArguments
from .cleaning import MASKS
from .columns import Report, check_columns, read_table
from .formats import iter_tables
from .reading import SOURCE_ROW, Part


def find_kind(args: DataArguments, parts: Sequence[Part], report: Report, given: LabelKind | None = None) -> LabelKind:
    """Finds what the label columns hold, over all parts of a source.

    Args:
        report: gets `labels`: the kind's state, and `read_as` (a sentence) where `--task auto` decided; and `notes`.
        given: of a model, whose names are kept; columns are those of `args`.

    Raises:
        ArgumentError: a task that does not fit the columns that are named.
        DataError: no such column, classes that are names of rows, residues of which labels are the sequences.
    """
    columns = tuple(args.label_column)
    read_as = {}
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
    elif args.streaming:  # whose rows are not seen before training
        kind = make_kind(STREAM_TASK if args.task == "auto" else args.task, columns, columns)
        read_as = {"read_as": f"A stream: {', '.join(map(repr, columns))} is read as {kind.describe()}, unseen."}
    else:
        table = _read(args, parts)
        sequences = table.pop(args.mutation_column or args.sequence_columns[0])
        rows = table.pop(SOURCE_ROW)
        shown = None if args.mutation_column or len(args.sequence_columns) > 1 else sequences
        task, alternative = choose_task(table, shown, args.task)
        kind = make_kind(task, columns, columns)
        if len(columns) == 1:
            kind = kind.find_names(table[columns[0]], sequences, args, report["notes"])
        if args.task == "auto":
            named = f"Column {', '.join(map(repr, columns))} is read as {kind.describe()}"
            named += f" ({alternative})." if alternative else "."
            example = _show_example(kind, table[columns[0]], rows) if len(columns) == 1 else ""
            read_as = {"read_as": named + example}
    if args.label_hierarchy and not kind.takes_hierarchy:
        told = f"--label_hierarchy {args.label_hierarchy} is for one column whose cells list labels"
        raise ArgumentError(f"{told}: leave it out, or give --task multilabel.")
    kind.check(args)
    report["labels"] = kind.state() | read_as
    return kind


def add_masks(part: Part, path: str, id_column: str) -> Part:
    """Adds the column of masks of residues that a FASTA has for rows, by name; DataError where it lacks some."""
    masks: dict[str, str] = {}
    for _, table in iter_tables(Path(path).expanduser(), ["id", "sequence"]):
        masks |= zip(table["id"].to_pylist(), table["sequence"].to_pylist())
    found = [masks.get(str(name)) for name in part.data[id_column]]
    lacking = [str(row) for row, mask in zip(part.data[SOURCE_ROW], found) if not mask]
    if lacking:
        rows = f"rows {', '.join(lacking[:20])} ({len(lacking):,} in all)"
        raise DataError(f"{part.path}: {MASKS} {path} has no mask of {rows}. Add them, named as in {id_column!r}.")
    return replace(part, data=part.data.add_column(MASKS, found))


def _read(args: DataArguments, parts: Sequence[Part]) -> dict[str, pa.ChunkedArray]:
    """Reads label columns, the first sequence column and the rows' numbers, over all parts; text where types differ."""
    names = [*args.label_column, args.mutation_column or args.sequence_columns[0]]
    tables = []
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
    for row, cell in zip(rows.to_pylist(), column[:NUM_SEEN].to_pylist()):
        items = [] if is_missing(cell) else [*map(write_name, kind.read_items(cell))]
        if items and items != [write_name(cell)]:
            return f" For example, row {row}, {shorten(cell)}, is read as: {show_names(items)}."
    return ""
