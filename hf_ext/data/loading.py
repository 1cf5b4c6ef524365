"""From arguments to clean, labelled, split rows and a report of everything that was done to them."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    IterableDatasetDict,
    Value,
    concatenate_datasets,
)

from ..errors import ArgumentError, DataError
from .arguments import DataArguments
from .clusters import CLUSTER_IDENTITY
from .columns import column_values
from .drawing import draw_rows
from .formats import text_array
from .proteins import format_located
from .reading import SOURCE_ROW, Part, read_parts
from .rows import REJECTED_FILE, Located, RowRules, StreamRows, count_rules, refuse_or_drop
from .split_report import describe_repeats, is_much_noise, leak_report, repeat_report
from .splits import SPLITS, check_sizes, split_by_column, split_rows, split_stream, unknown_splits, with_validation

logger = logging.getLogger(__name__)

_PART_SPLIT = "_part_split"  # never leaves this module
_TAKEN = "--split_sizes leaves no rows for validation, by which the best model is chosen; a tenth of train"
CHUNK_ROWS = 100_000  # per Arrow array, so that none reaches the 2 GiB of one text array


@dataclass
class LoadedData:
    """`splits` hold the sequence columns, `label` (float64), `bound` (int8, only where something is censored), the
    group, interval and id columns as text, and `source_row`; `report` is JSON-able and says what was read, changed,
    left out; with sentences for the user in `notes` and, about likely mistakes, in `warnings`."""

    splits: DatasetDict | IterableDatasetDict
    report: dict[str, Any] = field(default_factory=dict)


@dataclass
class LoadedSequences:
    """`table` holds the sequence columns, group, id and `source_row` in file order; `report` as in `LoadedData`.

    `as_read`, where it was asked for: the same rows with all columns of the source, in its order, as text; None of a
    stream.
    """

    table: Dataset | IterableDataset
    report: dict[str, Any] = field(default_factory=dict)
    as_read: Dataset | None = None


def load_data(
    args: DataArguments,
    *,
    output_dir: str | os.PathLike[str] | None,
    seed: int,
    needs_labels: bool = True,
    needs_validation: bool = False,
    looks_for_leaks: bool = True,
    may_lack_chains: bool | None = None,
    table: Dataset | None = None,
) -> LoadedData:
    """Reads, filters, cleans, labels and splits the rows, takes the training subset and looks for leaks.

    Args:
        args: see `DataArguments`.
        output_dir: where `rejected_rows.csv` goes with `bad_rows="drop"`; nothing else is written.
        seed: of the training subset; the split has its own, `args.split_seed`.
        needs_labels: False for masked-language-model training; no label column is read then.
        needs_validation: a seeded tenth of train becomes validation where `split_sizes` gives it no share (and no file,
            nor the split column, says which rows); a note says so.
        looks_for_leaks: False leaves the leak report, which takes most of the time, empty.
        may_lack_chains: whether the task can do without those of `missing_chains`; None: where labels are needed.
        table: rows in memory to use instead of `args.dataset_name` (the demo data).

    Returns:
        `LoadedData`. Streams give an `IterableDatasetDict`, always with `bound`, and a report without counts or leaks.

    Raises:
        ArgumentError: no source, or arguments that contradict the data (an unknown column in the filter) or the task.
        DataError: see `reading.read_parts`, `RowRules`, `split_rows`; also all labels of train equal, or a single row.
            What is wrong with single rows and with the values of the split column is one error.

    Cost: 131,072 rows with three sequence columns (56 MB) in about 6 s, of which 1 to 3 s are the leak report; about
    1 GB of memory at the peak. Streams read only the first record here.
    """
    if args.interval_by and not needs_labels:
        raise ArgumentError(f"interval_by={args.interval_by!r} is for scores of labels, which this task does not have.")
    may_lack_chains = needs_labels if may_lack_chains is None else may_lack_chains
    if args.missing_chains and not may_lack_chains:
        raise ArgumentError(
            f"missing_chains={args.missing_chains}: only affinity models and generators do without a chain; drop it."
        )
    rules = RowRules.from_arguments(args, needs_labels)
    rejected = Path(output_dir) / REJECTED_FILE if output_dir is not None else None
    parts = _open(args, rules, table)
    report: dict[str, Any] = {"source": args.dataset_name, "filter": args.filter, "streaming": args.streaming}
    report |= {"notes": [], "warnings": []}
    sizes = with_validation(args.split_sizes) if needs_validation else check_sizes(args.split_sizes)
    if any(isinstance(part.data, IterableDataset) for part in parts):
        return _load_stream(args, rules, parts, rejected, report, sizes)
    data = _prepare(args, rules, parts, rejected, report)
    if len(data) < 2:
        raise DataError(f"{parts[0].path}: one row is left, which cannot be split into train, validation and test.")
    splits, report["split"] = _split(args, data, len(parts) > 1, sizes)
    if needs_labels:
        report["labels"] = check_labels(splits["train"], args.label_column, parts[0].path)
    if args.max_train_samples is not None and args.max_train_samples < len(splits["train"]):
        chosen = draw_rows(len(splits["train"]), seed, args.max_train_samples)
        report["train_subset"] = {"num_rows": len(chosen), "of": len(splits["train"]), "seed": seed}
        splits["train"] = splits["train"].select(chosen)
        if needs_labels:
            check_labels(splits["train"], args.label_column, f"--max_train_samples {args.max_train_samples}")
    if needs_labels:
        report["repeats"] = repeat_report(splits, args.sequence_columns)
        if text := describe_repeats(report["repeats"]):
            report["warnings" if is_much_noise(report["repeats"]) else "notes"].append(text)
    report["sizes"] = {name: len(split) for name, split in splits.items()}
    leaks = leak_report(splits, args.sequence_columns) if looks_for_leaks else {}
    report["leaks"] = leaks
    return LoadedData(splits, report)


def load_sequences(
    args: DataArguments,
    *,
    output_dir: str | os.PathLike[str] | None = None,
    rejected_name: str = REJECTED_FILE,
    keeps_columns: bool = False,
    needs_labels: bool = False,
    table: Dataset | None = None,
) -> LoadedSequences:
    """Reads, filters and cleans one table for prediction: no splits, rows in file order.

    A folder's train, validation and test files follow each other. Arguments and errors as in `load_data`; a single row
    is fine here, `rejected_name` is that of the file in `output_dir`, `keeps_columns` asks for `as_read`, which
    takes the memory of the whole source, and `needs_labels` for `label`, `bound` and the column of `interval_by`.
    """
    rules = RowRules.from_arguments(args, needs_labels, needs_splits=False)
    rejected = Path(output_dir) / rejected_name if output_dir is not None else None
    keeps_columns = keeps_columns and not args.streaming
    parts = _open(args, rules, table, keeps_columns)
    report: dict[str, Any] = {"source": args.dataset_name, "filter": args.filter, "streaming": args.streaming}
    if any(isinstance(part.data, IterableDataset) for part in parts):
        streams = [_map_stream(args, rules, part, rejected) for part in parts]
        return LoadedSequences(streams[0] if len(streams) == 1 else concatenate_datasets(streams), report)
    as_read: list[pa.Table] = []
    prepared = _prepare(args, rules, parts, rejected, report, as_read if keeps_columns else None)
    whole = Dataset(pa.concat_tables(as_read, promote_options="default")) if keeps_columns else None
    return LoadedSequences(prepared, report, whole)


def _open(args: DataArguments, rules: RowRules, table: Dataset | None, all_columns: bool = False) -> list[Part]:
    if table is not None:
        if SOURCE_ROW not in table.column_names:
            table = table.add_column(SOURCE_ROW, pa.array(range(1, len(table) + 1), type=pa.int64()))
        return [Part(args.dataset_name or "the table in memory", table)]
    if args.dataset_name is None:
        raise ArgumentError("dataset_name is missing: name a Hub dataset, a file or a folder.")
    return read_parts(
        args.dataset_name,
        rules.needed,
        reads_all=all_columns,
        config_name=args.dataset_config_name,
        revision=args.dataset_revision,
        streaming=args.streaming,
    )


def _prepare(
    args: DataArguments,
    rules: RowRules,
    parts: Sequence[Part],
    rejected: Path | None,
    report: dict[str, Any],
    as_read: list[pa.Table] | None = None,
) -> Dataset:
    """Applies the row rules to every part, refuses or drops once for all of them, and fills report and `as_read`."""
    located: list[Located] = []
    tables: list[pa.Table] = []
    counts: Counter[str] = Counter()
    changes: dict[str, Counter[str]] = {}
    odd_splits: Counter[str] = Counter()
    for part in parts:
        source = part.data.select_columns([n for n in part.data.column_names if n in (*rules.needed, SOURCE_ROW)])
        arrow = source.with_format("arrow")[:]
        prepared = rules.apply({name: arrow.column(name).to_pylist() for name in arrow.column_names}, part.path)
        located += [(part.path, problem) for problem in prepared.problems]
        counts.update(read=prepared.num_read, filtered=prepared.num_filtered, rejected=prepared.num_rejected)
        for column, kinds in prepared.changes.items():
            changes.setdefault(column, Counter()).update(kinds)
        odd_splits.update(prepared.odd_splits)
        tables.append(_to_table(prepared.columns, part.split))
        if as_read is not None:
            as_read.append(_take_as_read(part.data, prepared.columns[SOURCE_ROW]))
    num_left = sum(len(one) for one in tables)
    if odd_splits and located and args.bad_rows == "error":  # alone, `split_by_column` refuses them
        located_text = format_located(located)
        raise DataError(f"{located_text}\n{unknown_splits(str(args.split_column), odd_splits)}")
    rejected_file = refuse_or_drop(located, args.bad_rows, rejected, num_left)
    if num_left == 0:
        raise DataError(f"filter {args.filter!r} leaves none of {counts['read']} rows of {parts[0].path}.")
    report |= {
        "rows_read": counts["read"],
        "rows_filtered_out": counts["filtered"],
        "rows_rejected": counts["rejected"],
        "rejected_by_rule": count_rules(problem for _, problem in located),
        "rejected_file": str(rejected_file) if rejected_file else None,
        "changes": {column: dict(kinds) for column, kinds in changes.items()},
    }
    _announce(report)
    table = pa.concat_tables(tables)
    if "bound" in table.column_names and not any(chunk.to_numpy().any() for chunk in table.column("bound").chunks):
        table = table.drop_columns(["bound"])
    return Dataset(table)


def _take_as_read(data: Dataset, source_rows: Sequence[int]) -> pa.Table:
    """All columns of these rows of a part, as text; numbers as Python writes them."""
    position = {row: i for i, row in enumerate(column_values(data, SOURCE_ROW))}
    taken = data.select([position[row] for row in source_rows])
    names = [name for name in taken.column_names if name != SOURCE_ROW]
    return pa.table({name: _to_text(column_values(taken, name)) for name in names})


def _to_text(values: Sequence[Any]) -> pa.ChunkedArray:
    chunks = [text_array(values[i : i + CHUNK_ROWS]) for i in range(0, len(values), CHUNK_ROWS)]
    return pa.chunked_array(chunks, type=pa.string())


def _announce(report: dict[str, Any]) -> None:
    for column, kinds in report["changes"].items():
        listed = ", ".join(f"{kind} in {num} rows" for kind, num in kinds.items())
        logger.warning("column %r: %s", column, listed)
    if report["rows_rejected"]:
        logger.warning("%d rows left out, listed in %s", report["rows_rejected"], report["rejected_file"])


def _to_table(columns: dict[str, Sequence[Any]], split: str | None) -> pa.Table:
    arrays = {name: _to_array(name, values) for name, values in columns.items()}
    if split is not None:
        arrays[_PART_SPLIT] = text_array([split] * len(columns[SOURCE_ROW]))
    return pa.table(arrays)


def _to_array(name: str, values: Sequence[Any]) -> pa.ChunkedArray:
    kind = {"label": pa.float64(), "bound": pa.int8(), SOURCE_ROW: pa.int64()}.get(name, pa.string())
    chunks = [pa.array(values[i : i + CHUNK_ROWS], type=kind) for i in range(0, len(values), CHUNK_ROWS)]
    return pa.chunked_array(chunks, type=kind)


def _split(
    args: DataArguments, data: Dataset, has_parts: bool, sizes: Sequence[float]
) -> tuple[DatasetDict, dict[str, Any]]:
    if has_parts and not (args.split or args.split_column):
        splits, report = split_by_column(data, _PART_SPLIT, sizes=sizes, seed=args.split_seed)
        return splits, report | {"rule": "files"}
    if has_parts:
        data = data.remove_columns(_PART_SPLIT)
    if args.split_column:
        return split_by_column(data, args.split_column, sizes=sizes, seed=args.split_seed)
    splits, report = split_rows(
        data,
        rule=args.split or "random",
        sizes=sizes,
        seed=args.split_seed,
        sequence_columns=args.sequence_columns,
        cluster_column=args.cluster_column,
        cluster_identity=CLUSTER_IDENTITY if args.cluster_identity is None else args.cluster_identity,
        cluster_file=args.cluster_file,
        id_column=args.id_column,
    )
    if tuple(sizes) != check_sizes(args.split_sizes):
        num = len(splits["validation"])
        report["notes"].append(f"{_TAKEN}: {num:,} rows ({sizes[1]:.0%} of all, seed {args.split_seed}) became it")
    return splits, report


def check_labels(train: Dataset, column: str, where: str) -> dict[str, Any]:
    """Least, largest and mean training label, and how many are bounds of which kind.

    Args:
        column: what the labels were called; where: file or option that an error names.

    Raises:
        DataError: fewer than two rows, or labels that are all equal.
    """
    labels = np.array(column_values(train, "label"), dtype=np.float64)
    if len(labels) < 2:
        raise DataError(
            f"{where}: there is {len(labels)} training row, from which nothing can be learned. Check the file, the "
            "filter and the split; some hundred rows are where learning begins."
        )
    if labels.min() == labels.max():
        raise DataError(
            f"column {column!r}: all {len(labels)} training labels are {labels[0]:g}, so there is nothing to learn. "
            f"Check the column, the filter and the split."
        )
    report = {"min": float(labels.min()), "max": float(labels.max()), "mean": float(labels.mean())}
    if "bound" in train.column_names:
        bounds = np.array(column_values(train, "bound"))
        report |= {"num_at_or_below": int((bounds < 0).sum()), "num_at_or_above": int((bounds > 0).sum())}
    return report


def _map_stream(args: DataArguments, rules: RowRules, part: Part, rejected: Path | None) -> IterableDataset:
    types = {name: Value("string") for name in rules.sequence_columns}
    if rules.label_column is not None:
        types |= {"label": Value("float64"), "bound": Value("int8")}
    types |= {name: Value("string") for name in rules.text_columns}
    types[SOURCE_ROW] = Value("int64")
    function = StreamRows(rules, part.path, args.bad_rows, rejected)
    return part.data.map(function, batched=True, remove_columns=[*rules.needed, SOURCE_ROW], features=Features(types))


def _load_stream(
    args: DataArguments,
    rules: RowRules,
    parts: Sequence[Part],
    rejected: Path | None,
    report: dict[str, Any],
    sizes: tuple[float, float, float],
) -> LoadedData:
    streams = {part.split: _map_stream(args, rules, part, rejected) for part in parts}
    if None not in streams and not (args.split or args.split_column):
        splits = IterableDatasetDict({name: streams[name] for name in SPLITS if name in streams})
        report["split"] = {"rule": "files", "notes": []}
    else:
        data = next(iter(streams.values())) if len(streams) == 1 else concatenate_datasets(list(streams.values()))
        splits, report["split"] = split_stream(
            data,
            rule=args.split or "random",
            split_column=args.split_column,
            sizes=sizes,
            seed=args.split_seed,
            sequence_columns=args.sequence_columns,
        )
        if sizes != check_sizes(args.split_sizes) and not args.split_column:
            report["split"]["notes"].append(f"{_TAKEN} ({sizes[1]:.0%} of all, seed {args.split_seed}) becomes it")
    if args.max_train_samples is not None:
        splits["train"] = splits["train"].take(args.max_train_samples)
        report["train_subset"] = {"num_rows": args.max_train_samples, "note": "the first rows of the stream"}
    report["leaks"] = {}
    return LoadedData(splits, report)
