"""Rows of a run: what in them is probably a mistake, what was held out together, and which are new to training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset

from ..data import (
    SPLIT_CLUSTER,
    DataArguments,
    LoadedData,
    Variants,
    column_names,
    find_missing,
    has_numbered_rows,
    label_array,
    load_data,
    read_bounds,
    read_column,
    read_columns,
)
from ..embeddings import VectorFile
from ..errors import ArgumentError
from ..evaluation import ResamplingGroups, metrics_of
from ..files import Facts, Json
from ..labels import BoolArray
from ..models import AffinityModel
from ..reporting import summarize_data
from .arguments import AffinityArguments

ENERGIES = (-80.0, -4.0)  # between them is the median of log10 Kd in M, and of energies in kcal/mol or kJ/mol
EXACT_LOSSES = ("mse", "huber")  # which take a bound for a value
MIN_ROWS = 30  # new ones, and others: below this a score apart says nothing


def check_splits(splits: Facts) -> None:
    """Raises ArgumentError unless there are rows to train on, to choose the best model by, and to score it on."""
    missing = [name for name in ("train", "validation", "test") if name not in splits]
    if missing:
        raise ArgumentError(
            f"There is no {' and no '.join(missing)} split: the best model is chosen on validation rows and scored on "
            "test rows. Give --split_sizes a share for each, or a --split_column that names them."
        )


def load_rows(
    args: AffinityArguments,
    data_args: DataArguments,
    *,
    output_dir: Any,
    seed: int,
    table: Dataset | None = None,
) -> LoadedData:
    """Loads as `load_data` does; adds to its report where labels, splits and options do not fit each other.

    Leaves in `data_args.missing_chains` the columns that some training rows lack, which `report["missing_chains"]`
    counts.

    Args:
        args, data_args: as parsed.
        output_dir, seed, table: as in `load_data`.

    Raises:
        ArgumentError, DataError: as `load_data`; or a split is missing; or of a chain that rows may lack, training
            shows all or none (`find_missing`); or all training rows have the same sequences.
    """
    data = load_data(data_args, output_dir=output_dir, seed=seed, table=table)
    if data_args.fold and data_args.fold.tested is None:
        data.splits.setdefault("test", data.splits.get("validation"))  # none is tested, and none is scored
    check_splits(data.splits)
    if (args.loss == "focal" or args.class_weights) and "focal" not in data.kind.losses:
        told = f"--loss focal and --class_weights are for classes, and the label is {data.kind.describe()}"
        raise ArgumentError(f"{told}: leave them out, or give --task classification for names.")
    data.kind.check_options(args.loss, args.binder_threshold, args.pooling)
    if data_args.streaming:
        return data
    train = data.splits["train"]
    columns = data_args.sequence_columns
    data.variants = Variants.fit(train, **data.report["variants"])
    data.report["notes"] += data.variants.describe()
    data.kind.check_sequences(columns, [len(train.unique(column)) for column in columns])
    missing = find_missing(data.splits, data_args.missing_chains)
    unused = [column for column in data_args.missing_chains if column not in missing]
    data_args.missing_chains = [*missing]
    data.report["missing_chains"] = missing
    data.report["warnings"] += _ignored_bounds(args.loss, data_args.censor_column, data.splits["train"])
    if unused:
        data.report["warnings"].append(
            f"--missing_chains {' '.join(unused)}: no row lacks it, so the model does not learn to do without it, and "
            "will refuse rows that lack it."
        )
    if args.binder_threshold is not None:
        labels = np.concatenate([label_array(split) for split in data.splits.values()])
        check_threshold(args.binder_threshold, labels, data.report)
    return data


def bind_vectors(model: AffinityModel, path: str | None, splits: Facts, args: DataArguments) -> None:
    """Gives a model that has no encoder the vectors of the rows in `splits`, which `--embeddings` names.

    Raises:
        ArgumentError: there is no such file, or another width in it; or the model has encoders.
        DataError: rows without their vector.

    Cost: reads the vectors once.
    """
    if not model.config.reads_vectors:
        if path:
            raise ArgumentError(f"--embeddings {path}: this model reads sequences by its own encoders. Leave it out.")
        return
    if not path:
        model.attach_encoders()  # says what to do
    if args.streaming:
        raise ArgumentError("--embeddings: the vectors of all rows are looked up first. Leave --streaming out.")
    vectors = VectorFile(str(path))
    rank = {"rows": 1, "residues": 2}[model.config.kind.counted]
    vectors.bind(splits, [*model.config.input_columns], args.id_column, rank, str(args.dataset_name))
    model.set_vectors(vectors)  # known by what was bound: the cache never takes one pairing for another


def _ignored_bounds(loss: str, censor_column: str | None, train: Any) -> list[str]:
    """Bounds that the loss does not use, and a loss or column for bounds where there are none."""
    bounds = read_bounds(train)
    num_rows = len(train)
    num_bounds = 0 if bounds is None else int(np.count_nonzero(bounds))
    if num_bounds and loss in EXACT_LOSSES:
        return [
            f"{num_bounds:,} of {num_rows:,} training labels are bounds, which --loss {loss} takes for exact values: "
            "--loss tobit learns from them as bounds, --loss ranking from the order alone."
        ]
    asked = f"--censor_column {censor_column}" if censor_column else None
    if loss == "tobit":
        asked = asked or "--loss tobit"
    if num_bounds or asked is None:
        return []
    return [
        f"{asked}: none of the {num_rows:,} training labels is a bound. Write bounds as <=7; or in --censor_column <, "
        "<=, >, >=, or 1 where the true value is at or below the label."
    ]


def check_threshold(threshold: float, labels: np.ndarray, report: Json) -> None:
    """Says where `--binder_threshold` divides no labels into hits and others, or takes the weakest for hits."""
    low = labels.min()
    high = labels.max()
    if low < threshold <= high:
        if high < 0 and ENERGIES[0] <= float(np.median(labels)) <= ENERGIES[1]:
            report["notes"].append(
                f"all labels are negative ({low:.3g} to {high:.3g}), as log10 of a Kd or binding energies, of which "
                f"the lowest bind best: --binder_threshold {threshold:g} takes what is at or above it for hits, the "
                "weakest. Give labels that rise with binding: -log10 (pKd), energies times -1."
            )
        return
    side = "below" if high < threshold else "at or above"
    report["warnings"].append(
        f"--binder_threshold {threshold:g}: all {len(labels):,} labels ({low:.3g} to {high:.3g}) are {side} it, so "
        "recall, precision and F1 say nothing. Give one between them, or leave it out."
    )


def describe_rows(data: LoadedData) -> str:
    """Describes rows as the log does before training: `summarize_data`, and the audit of the training labels."""
    lines = [summarize_data(data.report)]
    lines += filter(None, [data.report["labels"].get("read_as")])
    if not data.report["streaming"]:
        metrics = metrics_of(data.kind)
        audit = metrics.audit(data.splits["train"], read_bounds(data.splits["train"]))
        lines.append(f"Training labels: {metrics.describe_audit(audit)}.")
        lines += [f"  ALARM: {alarm}" for alarm in audit["alarms"]]
    return "\n".join(lines)


def find_groups(args: DataArguments, splits: Any, name: str = "test") -> ResamplingGroups | None:
    """Finds the clusters of split `name` that were held out together: intervals resample them, folds never cut one.

    The column of `--split group:COLUMN`, the clusters of `--split cluster`, the positions of `--split position`. Of
    other splits, of `--group_column` and the sequence columns, the one with the fewest values among those of which
    several rows share a value and none is in training; a column with one value only if there is no other.

    Args:
        args: of the data.
        splits: train and `name`, map-style; streams have rows.
        name: of the split.

    Returns:
        None: rows, each by itself.

    Cost: one pass over the columns.
    """
    train = splits["train"]
    rows = splits[name]
    if not all(map(has_numbered_rows, (train, rows))):
        return None
    names = column_names(rows)
    columns = [name for name in (args.split_group_column, SPLIT_CLUSTER) if name in names][:1]
    if not columns:
        asked = [name for name in (args.group_column, *args.sequence_columns) if name in names]
        columns = [name for name in asked if not {*read_columns(train, [name])} & {*read_columns(rows, [name])}]
    values = {column: read_column(rows, column) for column in columns}
    kind = "position" if str(args.split).startswith("position") else "cluster"
    found = [ResamplingGroups.of(kind if name == SPLIT_CLUSTER else name, values[name]) for name in columns]
    repeated = [groups for groups in found if not groups.are_rows]
    return min(repeated, key=lambda groups: (groups.num_groups == 1, groups.num_groups), default=None)


def held_out_values(args: DataArguments, splits: Any) -> list[list[Any]] | None:
    """Returns the values that were held out whole, of training and of validation rows, for the folds of an ensemble."""
    groups = find_groups(args, splits, "validation")
    train = splits["train"]
    column = groups and (groups.column if groups.column in column_names(train) else SPLIT_CLUSTER)
    if column not in column_names(train):
        return None
    return [read_column(split, column) for split in (train, splits["validation"])]


def describe_groups(groups: ResamplingGroups | None) -> list[str]:
    """Describes what intervals speak about, and whether that is enough, in sentences; none where rows are resampled."""
    if groups is None:
        return []
    if few := groups.why_not_enough():
        return [f"{few} The verdict claims nothing from them."]
    rows = f"{len(groups.group_of_row):,} rows"
    return [f"Intervals resample the {groups.describe()} behind {rows}, and speak about further values of it."]


def find_slices(train: Any, asked: Any, columns: Sequence[str]) -> tuple[dict[str, BoolArray], list[str]]:
    """Finds rows of `asked` whose sequence is not in `train`, in each column and in all columns together.

    Args:
        train, asked: map-style datasets with these columns.
        columns: the sequence columns that the model reads.

    Returns:
        What rows have in common that deserve a score apart -> which these are, (n,) bool: where both the new rows and
        the others are 30 or more, each set of rows once. And a sentence that says how many rows are new in each column.

    Cost: one pass over the columns.
    """
    slices: dict[str, BoolArray] = {}
    counts = []
    parts = {name: [name] for name in columns}
    if len(columns) > 1:
        parts[f"{' + '.join(columns)} together"] = [*columns]
    for name, part in parts.items():
        known = set(read_columns(train, part))
        rows = read_columns(asked, part)
        is_new = np.array([row not in known for row in rows])
        num_new = int(is_new.sum())
        counts.append(f"{num_new:,} in {name}" + (" (all have the same)" if len(set(rows)) == 1 else ""))
        is_enough = min(num_new, len(rows) - num_new) >= MIN_ROWS
        if is_enough and not any(np.array_equal(one, is_new) for one in slices.values()):
            slices[f"rows whose {name} is not in training"] = is_new
    return slices, [
        f"Of {len(asked):,} rows these are new to training: {', '.join(counts)}. They are scored apart where they and "
        f"the others are {MIN_ROWS} or more."
    ]
