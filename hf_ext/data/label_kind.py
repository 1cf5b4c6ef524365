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
from ..labels.cells import show_names
from ..labels.choosing import choose_task
from ..labels.classes import SEPARATOR, Classes, order_names
from ..labels.kinds import describe_kind, reader_of
from .arguments import DataArguments
from .columns import as_text, check_columns, distinct
from .reading import Part

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
        cells, sequences = _read(args, parts)
        task, alternative = args.task, ""
        if task == "auto":
            task, alternative = choose_task(cells, sequences if len(args.sequence_columns) == 1 else None)
        kind = LabelKind(task, columns, columns)
        if len(columns) == 1 and not kind.is_numeric:
            kind = replace(kind, names=_collect_names(kind, cells[columns[0]], sequences, report["notes"]))
        if args.task == "auto":
            named = f"Column {', '.join(map(repr, columns))} is read as {describe_kind(kind)}"
            read_as = {"read_as": f"{named}{f' ({alternative})' * bool(alternative)}."}
    check_kind(kind, args)
    report["labels"] = kind.state() | read_as
    return kind


def _read(args: DataArguments, parts: Sequence[Part]) -> tuple[dict[str, pa.ChunkedArray], pa.ChunkedArray]:
    """Label columns by name, and the first sequence column, over all parts; text where types differ."""
    names, tables = [*args.label_column, args.sequence_columns[0]], []
    for part in parts:
        check_columns(part.data.column_names, names, part.path)
        tables.append(part.data.select_columns(names).with_format("arrow")[:])
    columns = {}
    for name in names:
        found = [table[name] for table in tables]
        found = [*map(as_text, found)] if len({column.type for column in found}) > 1 else found
        columns[name] = pa.chunked_array([chunk for column in found for chunk in column.chunks], found[0].type)
    return columns, columns.pop(names[-1])


def _collect_names(
    kind: LabelKind, cells: pa.ChunkedArray, sequences: pa.ChunkedArray, notes: list[str]
) -> tuple[str, ...]:
    """Names of the classes that stand in a column, in their order."""
    reader, found = reader_of(kind), distinct(cells)
    assert isinstance(reader, Classes)
    counts: Counter[str] = Counter()
    for cell, num in zip(found.cells.to_pylist(), np.bincount(found.number).tolist()):
        counts.update(dict.fromkeys(reader.names_of(cell), num))
    if not counts:
        raise DataError(f"column {kind.columns[0]!r}: no cell names a class. Check --label_column and --task.")
    if kind.per_residue and pc.mean(pc.equal(as_text(cells), as_text(sequences))).as_py() > MOST:
        raise DataError(f"column {kind.columns[0]!r} holds the sequences themselves. Name that of labels.")
    names = order_names(counts)
    joined = [name for name in names if any(sign in name for sign in ",|")]
    named = map(reader.names_of, found.cells.to_pylist())
    if kind.task == "multilabel" and joined and max(map(len, named)) < 2:
        raise DataError(
            f"column {kind.columns[0]!r}: --task multilabel reads labels separated by {SEPARATOR!r}, and no cell names "
            f"several ({show_names(joined)}). Write it between them; or give --task classification."
        )
    if not kind.per_residue:
        notes += _doubt_names(replace(kind, names=names), counts, len(cells))
    return names


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
            "residue_classification for a letter per residue."
        )
    notes = []
    if (single := sum(count == 1 for count in counts.values())) > num / 2:
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
