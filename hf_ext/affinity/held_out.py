"""What was held out together: what intervals resample and folds never cut: antibodies, antigens, clusters, or rows."""

from __future__ import annotations

from typing import Any

from ..data.arguments import DataArguments
from ..data.columns import column_names, has_numbered_rows, read_columns
from ..data.splits import SPLIT_CLUSTER
from ..errors import ArgumentError
from ..evaluation.resampling import ResamplingUnits


def find_units(args: DataArguments, splits: Any, name: str = "test", min_units: int = 2) -> ResamplingUnits | None:
    """The units of split `name`; None: its rows.

    `--interval_by COLUMN` decides, or `rows`. Left out: the column of `--split group:COLUMN`, or the clusters of
    `--split cluster`; of other splits, of `--group_column` and the sequence columns, the one with the fewest values
    among those of which several rows share a value and none is in training. A column with fewer values than
    `min_units` is passed over.

    Args:
        args: of the data.
        splits: train and `name`, map-style; streams have rows.
        name: of the split.
        min_units: 2 for intervals, which cannot be had from one value, and where all rows have the same say nothing
            of further ones. 1 for folds, which then cannot be drawn, rather than cut through the one value.

    Raises:
        ArgumentError: `--interval_by` names a column with fewer values in the split.

    Cost: one pass over the columns.
    """
    rows = splits[name]
    if args.interval_by == "rows" or not all(map(has_numbered_rows, (splits["train"], rows))):
        return None
    if args.interval_by:
        units = _units(rows, args.interval_by)
        if units.num_units < min_units:
            raise ArgumentError(
                f"--interval_by {args.interval_by}: all {len(rows):,} {name} rows have the same value, and one "
                "value cannot be resampled. Name another column, or rows."
            )
    else:
        found = [_units(rows, column) for column in _held_out_columns(args, splits["train"], rows)]
        enough = [units for units in found if units.num_units >= min_units and not units.are_rows]
        if not enough:
            return None
        units = min(enough, key=lambda units: units.num_units)
    return None if units.are_rows else units


def held_out_values(args: DataArguments, splits: Any) -> tuple[list[Any], list[Any]] | None:
    """Of training and of validation rows the value that was held out whole, such as the antibody; None: rows were.

    Parts of training that are held out by it in turn are as new to the rest as validation is.

    Args:
        args: of the data.
        splits: train and validation, map-style; streams have None.
    """
    train, rows = splits["train"], splits["validation"]
    if args.interval_by == "rows" or not all(map(has_numbered_rows, (train, rows))):
        return None
    columns = [args.interval_by] if args.interval_by else _held_out_columns(args, train, rows)
    found = [(_units(rows, name), name) for name in columns if name in column_names(train)]
    several = [(units.num_units, name) for units, name in found if not units.are_rows]
    if not several:
        return None
    _, column = min(several)
    of_train, of_rows = ([value for (value,) in read_columns(split, [column])] for split in (train, rows))
    return of_train, of_rows


def find_lone_value(args: DataArguments, splits: Any) -> str | None:
    """The column that was held out and has one value in all test rows, as messages name it; None: there is none."""
    train, rows = splits["train"], splits["test"]
    if args.interval_by or not all(map(has_numbered_rows, (train, rows))):
        return None
    found = [_units(rows, column) for column in _held_out_columns(args, train, rows)]
    several = [units for units in found if units.num_units > 1 and not units.are_rows]
    lone = [units.column for units in found if units.num_units == 1 and len(rows) > 1]
    return lone[0] if lone and not several else None


def describe_units(units: ResamplingUnits | None) -> list[str]:
    """What intervals speak about, and whether that is enough, as sentences; none where rows are resampled."""
    if units is None:
        return []
    basis = (
        f"Intervals resample the {units.describe()} behind {len(units.unit_of_row):,} rows, and speak about further "
        f"values of it (--interval_by rows: about further rows)."
    )
    few = units.why_not_enough()
    return [basis] if few is None else [basis, f"{few} The verdict claims nothing from them."]


def _units(rows: Any, column: str) -> ResamplingUnits:
    name = "cluster" if column == SPLIT_CLUSTER else column
    return ResamplingUnits.of(name, [value for (value,) in read_columns(rows, [column])])


def _held_out_columns(args: DataArguments, train: Any, rows: Any) -> list[str]:
    """The column that the split went by, or else those whose values in `rows` are all new to training."""
    names = column_names(rows)
    if args.split_group_column in names:
        return [str(args.split_group_column)]
    if SPLIT_CLUSTER in names:
        return [SPLIT_CLUSTER]
    asked = [*([args.group_column] if args.group_column else []), *args.sequence_columns]
    known = {column: set(read_columns(train, [column])) for column in asked if column in names}
    return [column for column in known if not known[column] & set(read_columns(rows, [column]))]
