"""From arguments to clean, labelled, split rows and a report of everything that was done to them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, concatenate_datasets

from ..errors import ArgumentError, DataError
from ..labels import LabelKind, Number, as_text
from .arguments import KEPT, DataArguments
from .batches.number_columns import NumberColumns
from .cleaning import MASKS, REJECTED_FILE, RowSchema, clean_stream, count_rules, format_errors, refuse, write_rejected
from .columns import SET, VALIDATION, Report, as_dataset, check_columns, iter_blocks, read_table
from .label_kind import add_masks, find_kind
from .reading import SOURCE_ROW, Part, local_files, peek_columns, read_parts
from .split_report import describe_repeats, leak_report, repeat_report
from .splits import SPLIT_FILE, draw_rows, keep_rows, split_rows, split_stream
from .variants.features import Variants
from .variants.wild_type import find_variants

logger = logging.getLogger(__name__)


@dataclass
class LoadedData:
    """`splits` hold the sequence columns, `label` as `kind` has it (a number is float64), `bound` (int8, only where
    something is censored), the group, interval and id columns as text, and `source_row`; `report` is JSON-able and says
    what was read, changed, left out; with sentences for the user in `notes` and, about likely mistakes, in `warnings`.
    `kind` says nothing where no labels were read; `numbers`: of columns beside sequences, as training rows have them;
    `variants`: what training rows substitute in one protein, if anything.
    """

    splits: DatasetDict | IterableDatasetDict
    report: Report = field(default_factory=dict)
    kind: LabelKind = field(default_factory=Number)
    numbers: NumberColumns = field(default_factory=NumberColumns)
    variants: Variants = field(default_factory=Variants)


@dataclass
class LoadedSequences:
    """`table` holds the sequence columns, group, id and `source_row` in file order; `report` as in `LoadedData`.

    `as_read`, where it was asked for: the same rows with all columns of the source, in its order, as text; None of a
    stream.
    """

    table: Dataset | IterableDataset
    report: Report = field(default_factory=dict)
    as_read: Dataset | None = None
    kind: LabelKind = field(default_factory=Number)


def load_data(
    args: DataArguments,
    *,
    output_dir: Path | str | None,
    seed: int,
    needs_labels: bool = True,
    looks_for_leaks: bool = True,
    table: Dataset | None = None,
) -> LoadedData:
    """Reads, cleans, labels and splits the rows, takes the training subset and looks for leaks.

    Args:
        args: see `DataArguments`.
        output_dir: where `rejected_rows.csv` goes with `bad_rows="drop"`; nothing else is written.
        seed: of the training subset; the split has its own, `args.split_seed`.
        needs_labels: False for masked-language-model training; no label column is read then.
        looks_for_leaks: False leaves the leak report, which takes most of the time, empty.
        table: rows in memory to use instead of `args.dataset_name` (the demo data).

    Returns:
        `LoadedData`. Streams give an `IterableDatasetDict`, always with `bound`, and a report without counts or leaks.

    Raises:
        ArgumentError: no source, or arguments that contradict the task.
        DataError: see `reading.read_parts`, `find_kind`, `RowSchema`, `split_rows`; also labels of train from which
            nothing can be learned, or a single row. All rows that cannot be used are one error.

    Cost: 131,072 rows with three sequence columns (56 MB): reading, 1 s of CPU for the rest, and the leak report; about
    1 GB of memory at the peak. Streams read only the first record here.
    """
    schema = RowSchema(args, needs_labels)
    rejected = None if output_dir is None else Path(output_dir) / REJECTED_FILE
    parts, report = _open(schema, table, rejected)
    report["notes"] += _describe_unread(schema)
    if needs_labels:
        schema = replace(schema, kind=find_kind(args, parts, report))
    kind = schema.kind
    if args.number_columns and not needs_labels:
        raise ArgumentError(f"{' '.join(args.number_columns)}: nothing reads these without labels; leave them out.")
    if isinstance(parts[0].data, IterableDataset):
        streams = [clean_stream(schema, part.data, part.path, rejected) for part in parts]
        if all(part.split for part in parts) and not (args.split or args.split_column):
            splits = IterableDatasetDict({str(part.split): one for part, one in zip(parts, streams)})
            report["split"] = {"rule": "files", "notes": []}
        else:
            splits, report["split"] = split_stream(concatenate_datasets(streams), args)
        if args.max_train_samples is not None:
            splits["train"] = splits["train"].take(args.max_train_samples)
            report["train_subset"] = {"num_rows": args.max_train_samples}
        return LoadedData(splits, report | {"leaks": {}}, kind)
    tables = _clean(schema, parts, rejected, report)
    if len(parts) > 1:
        names = [pa.array([part.split] * len(one), pa.string()) for part, one in zip(parts, tables)]
        tables = [one.append_column(SPLIT_FILE, name) for one, name in zip(tables, names)]
    data = as_dataset(_join_bounds(tables))
    if len(data) < 2:
        raise DataError(f"{parts[0].path}: one row is left, which cannot be split into train, validation and test.")
    splits, report["split"] = split_rows(data, args)
    if one := args.read_filters().get("filter_train"):
        splits["train"] = _keep(splits["train"], splits["train"][KEPT][:], f"{one.told}, training rows", report)
        splits = splits.remove_columns(KEPT)
    if needs_labels:
        check_labels(splits["train"], kind, parts[0].path)
    num_train = len(splits["train"])
    if args.max_train_samples is not None and args.max_train_samples < num_train:
        chosen = np.isin(range(num_train), draw_rows(num_train, seed, args.max_train_samples))
        report["train_subset"] = {"num_rows": args.max_train_samples, "of": num_train}
        splits["train"] = keep_rows(splits["train"], chosen)
        if needs_labels:
            check_labels(splits["train"], kind, f"--max_train_samples {args.max_train_samples}")
    if needs_labels:
        report["warnings"] += kind.compare_splits({name: kind.facts_of(one) for name, one in splits.items()})
        report["repeats"] = repeat_report(splits, [*args.sequence_columns, *args.number_columns], kind)
        report["notes"] += filter(None, [describe_repeats(report["repeats"])])
    report["sizes"] = splits.num_rows
    report["variants"] = find_variants(data, args)
    report["leaks"] = leak_report(splits, args.sequence_columns, args.number_columns) if looks_for_leaks else {}
    numbers = NumberColumns.fit(splits["train"], args.numeric_columns, args.category_columns)
    report["notes"] += numbers.describe()
    return LoadedData(splits, report, kind, numbers)


def load_sequences(
    args: DataArguments,
    *,
    rejected: Path | None = None,
    keeps_columns: bool = False,
    needs_labels: bool = False,
    kind: LabelKind | None = None,
    table: Dataset | None = None,
) -> LoadedSequences:
    """Reads and cleans one table for prediction: no splits, rows in file order.

    A folder's train, validation and test files follow each other. Arguments and errors as in `load_data`; a single row
    is fine here, `rejected` is the CSV that lists what `bad_rows="drop"` leaves out, `keeps_columns` asks for
    `as_read`, which takes the memory of the whole source, and `needs_labels` for `label` and `bound`. With `kind`, that
    of a model, labels are read as that model has them, whatever `args.task` says; a class that it lacks is refused.
    With `args.fold` the columns that folds need are there, too.
    """
    schema = RowSchema(args, needs_labels, needs_splits=args.fold is not None)
    keeps_columns = keeps_columns and not args.streaming
    parts, report = _open(schema, table, rejected, keeps_columns)
    if needs_labels:
        schema = replace(schema, kind=find_kind(args, parts, report, kind))
    else:  # no kind of labels looks at all rows of a part
        parts = [replace(part, data=block) for part in parts for block in iter_blocks(part.data)]
    if isinstance(parts[0].data, IterableDataset):
        streams = [clean_stream(schema, part.data, part.path, rejected) for part in parts]
        return LoadedSequences(concatenate_datasets(streams), report, kind=schema.kind)
    tables = _clean(schema, parts, rejected, report)
    as_read = None
    if keeps_columns:
        found = [_take_as_read(part.data, one[SOURCE_ROW]) for part, one in zip(parts, tables)]
        as_read = as_dataset(pa.concat_tables(found, promote_options="default"))
    return LoadedSequences(as_dataset(_join_bounds(tables)), report, as_read, schema.kind)


def _open(
    schema: RowSchema, table: Dataset | None, rejected: Path | None, reads_all: bool = False
) -> tuple[list[Part], Report]:
    """Opens the tables to read, and begins a report."""
    args = schema.args
    report: Report = {"source": args.dataset_name, "streaming": args.streaming, "notes": [], "warnings": []}
    if args.bad_rows == "drop" and rejected is None:
        raise ArgumentError(f"bad_rows='drop' needs an output folder for {REJECTED_FILE}.")
    if table is not None:
        if SOURCE_ROW not in table.column_names:
            table = table.add_column(SOURCE_ROW, pa.array(range(1, len(table) + 1), type=pa.int64()))
        return _filter(schema, [Part(args.dataset_name or "the table in memory", table)], report), report
    if args.dataset_name is None:
        raise ArgumentError("dataset_name is missing: name a Hub dataset, a file or a folder.")
    parts = read_parts(
        args.dataset_name,
        None if reads_all else [name for name in schema.needed if name != MASKS],
        config_name=args.dataset_config_name,
        revision=args.dataset_revision,
        streaming=args.streaming,
    )
    if args.mask_file and not args.streaming:
        parts = [add_masks(part, args.mask_file, str(args.id_column)) for part in parts]
    return _filter(schema, parts, report), report


def _filter(schema: RowSchema, parts: list[Part], report: Report) -> list[Part]:
    """Leaves out rows that `--filter` does not keep, before labels are looked at; those of a stream, `clean` does."""
    if isinstance(parts[0].data, IterableDataset):
        return parts
    report["rows_read"] = sum(len(part.data) for part in parts)
    one = schema.args.read_filters().get("filter")
    if one is None:
        return parts
    filtered = []
    for part in parts:
        check_columns(part.data.column_names, one.columns, part.path)
        table = read_table(part.data, [*{*one.columns, SOURCE_ROW}])
        answers = one.find(table, table[SOURCE_ROW].to_numpy(), part.path).to_pylist()
        filtered.append(replace(part, data=_keep(part.data, answers, f"{one.told}, {part.path}", report)))
    return filtered


def _keep(data: Dataset, answers: Sequence[bool | None], told: str, report: Report) -> Dataset:
    """Keeps the rows whose answer is true, and notes how many; raises DataError where there is none."""
    kept = np.array([one is True for one in answers])
    unknown = f"of {answers.count(None):,} it is not known, since a cell is empty"
    text = f"{told}: {kept.sum():,} of {len(kept):,} rows are used; {unknown}"
    if not kept.any():
        raise DataError(f"{text}. Ask for less, or check what these columns hold.")
    report["notes"].append(text)
    return keep_rows(data, kept)


def _describe_unread(schema: RowSchema) -> list[str]:
    """Says what became of a column `validation` of a local file without a chosen split, as FLIP and biotrainer have
    it beside `set`: a sentence, or none."""
    args = schema.args
    first = [] if args.split else local_files(args.dataset_name)[:1]
    columns = [name for path in first for name in peek_columns(str(path)).get(path, ())]
    unread = [name for name in columns if name.lower() == VALIDATION and name not in schema.needed]
    if str(args.split_column).lower() == SET and unread and first[0].suffix != ".parquet":
        return [f"training rows in which column {unread[0]!r} is true validate"]
    where = repr(args.split_column) if args.split_column else "that column"
    return [
        f"column {name!r} is not read: --split_column names one column, with train, validation or test in each row. "
        f"Write validation into {where} wherever {name!r} is true."
        for name in unread
    ]


def _clean(schema: RowSchema, parts: Sequence[Part], rejected: Path | None, report: Report) -> list[pa.Table]:
    """Cleans each part; the other rows of all are refused or dropped at once. Fills `report`."""
    cleaned = [schema.clean(part.data, part.path) for part in parts]
    located = [(part.path, error) for part, rows in zip(parts, cleaned) for error in rows.errors]
    refuse(located, schema.args.bad_rows)
    if located and not any(len(rows.table) for rows in cleaned):
        raise DataError(f"--bad_rows drop would leave no row.\n{format_errors(located)}")
    num_rejected = len({(path, error.row) for path, error in located})
    if located and rejected is not None:
        write_rejected(rejected, located)
        logger.warning("%d rows left out, listed in %s", num_rejected, rejected)
    changes: dict[str, Counter[str]] = {}
    for rows in cleaned:
        for column, kinds in rows.changes.items():
            changes.setdefault(column, Counter()).update(kinds)
    for column, kinds in changes.items():
        logger.warning("column %r: %s", column, ", ".join(f"{kind} in {num} rows" for kind, num in kinds.items()))
    report |= {
        "rows_rejected": num_rejected,
        "rejected_by_rule": count_rules(error for _, error in located),
        "changes": {column: dict(kinds) for column, kinds in changes.items()},
    }
    return [rows.table for rows in cleaned]


def _join_bounds(tables: Sequence[pa.Table]) -> pa.Table:
    """Joins tables, without `bound` where no label is one."""
    table = pa.concat_tables(tables)
    if "bound" in table.column_names and not any(chunk.to_numpy().any() for chunk in table["bound"].chunks):
        table = table.drop_columns(["bound"])
    return table


def _take_as_read(data: Dataset, source_rows: pa.ChunkedArray) -> pa.Table:
    """Takes all columns of these rows of a part, as text; numbers as Python writes them."""
    table = read_table(data, data.column_names)
    if len(source_rows) < len(table):
        table = table.filter(pc.is_in(table[SOURCE_ROW], source_rows.combine_chunks()))
    return pa.table({name: as_text(table[name]) for name in table.column_names if name != SOURCE_ROW})


def check_labels(train: Dataset, kind: LabelKind, where: str) -> None:
    """Refuses training labels from which nothing can be learned.

    Args:
        kind: of the labels; where: file or option that an error names.

    Raises:
        DataError: fewer than two rows, or labels that are all equal.
    """
    if len(train) < 2:
        raise DataError(
            f"{where}: there is {len(train)} training row, from which nothing can be learned. Check the file and the "
            "split; some hundred rows are where learning begins."
        )
    if problem := kind.why_useless(kind.facts_of(train)):
        raise DataError(f"{problem} Check the column and the split.")
