"""What was held out together, and so is what an interval has to resample: antibodies, antigens, clusters, or rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..data.arguments import DataArguments
from ..data.columns import column_names, read_columns
from ..data.splits import SPLIT_CLUSTER
from ..errors import ArgumentError
from ..evaluation.resampling import ResamplingUnits


def find_units(args: DataArguments, splits: Any) -> ResamplingUnits | None:
    """The units of `splits["test"]` that its intervals resample; None: its rows.

    `--interval_by COLUMN` decides, or `rows`. Left out: the column of `--split group:COLUMN`, or the clusters of
    `--split cluster`; of other splits, of `--group_column` and the sequence columns, the one with the fewest values
    among those of which several test rows share a value and none is in training. A column with one value in all test
    rows is passed over: further values of it cannot be spoken of.

    Args:
        args: of the data.
        splits: train and test, map-style; streams have rows.

    Raises:
        ArgumentError: `--interval_by` names a column with one value in all test rows.

    Cost: one pass over the columns.
    """
    if args.interval_by == "rows" or not all(hasattr(splits[name], "__len__") for name in ("train", "test")):
        return None
    if args.interval_by:
        units = _units(splits["test"], args.interval_by)
        if units.num_units < 2:
            raise ArgumentError(
                f"--interval_by {args.interval_by}: all {len(splits['test']):,} test rows have the same value, and one "
                "value cannot be resampled. Name another column, or rows."
            )
    else:
        found = [_units(splits["test"], column) for column in _held_out_columns(args, splits)]
        several = [units for units in found if units.num_units > 1 and not units.are_rows]
        if not several:
            return None
        units = min(several, key=lambda units: units.num_units)
    return None if units.are_rows else units


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
    return ResamplingUnits.of(_spoken(column), [value for (value,) in read_columns(rows, [column])])


def _spoken(column: str) -> str:
    return "cluster" if column == SPLIT_CLUSTER else column


def _held_out_columns(args: DataArguments, splits: Any) -> list[str]:
    """The column that the split went by, or else those whose values in test are all new to training."""
    names = column_names(splits["test"])
    if args.split_group_column in names:
        return [str(args.split_group_column)]
    if SPLIT_CLUSTER in names:
        return [SPLIT_CLUSTER]
    asked = [*([args.group_column] if args.group_column else []), *args.sequence_columns]
    return [column for column in asked if column in names and _is_held_out(splits, column)]


def _is_held_out(splits: Any, column: str) -> bool:
    known: Sequence[Any] = read_columns(splits["train"], [column])
    return not set(known) & set(read_columns(splits["test"], [column]))
