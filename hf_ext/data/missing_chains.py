"""Rows that lack a chain, such as antibodies without a light one: where that is allowed, and how many there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ArgumentError, DataError
from .columns import column_values
from .proteins import LEAVE_OUT

NAME_COLUMN = "Fill it in, leave the row out, or name the column in --missing_chains if rows may lack this chain."
NOT_LEARNED = f"{LEAVE_OUT} Only models trained with --missing_chains, on rows that lack this chain, do without it."


def remedy_if_missing(columns: Sequence[str], needs_labels: bool, needs_splits: bool) -> str:
    """What to do about an empty cell in one of these sequence columns.

    A masked language model (splits without labels) does without no chain; a model that is trained already (no splits)
    has learned to do so, or has not.
    """
    if len(columns) < 2 or (needs_splits and not needs_labels):
        return LEAVE_OUT
    return NAME_COLUMN if needs_splits else NOT_LEARNED


def check_columns(missing_chains: Sequence[str], sequence_columns: Sequence[str]) -> None:
    """Raises ArgumentError unless `--missing_chains` names sequence columns, of which there are several."""
    unknown = [name for name in missing_chains if name not in sequence_columns]
    if unknown or len(set(missing_chains)) < len(missing_chains):
        allowed = ", ".join(sequence_columns)
        raise ArgumentError(f"missing_chains={[*missing_chains]}: name sequence columns, each once: {allowed}.")
    if missing_chains and len(sequence_columns) < 2:
        raise ArgumentError(
            f"missing_chains={[*missing_chains]}: {sequence_columns[0]!r} is the only sequence column, and a row "
            "without any sequence cannot be used. Leave it out."
        )


def count_missing(splits: Mapping[str, Any], columns: Sequence[str]) -> dict[str, dict[str, int]]:
    """{column: {split: rows without a sequence there}} of map-style splits. Cost: one pass over the columns."""
    return {
        column: {name: sum(not one for one in column_values(split, column)) for name, split in splits.items()}
        for column in columns
    }


def settle_missing(counts: Mapping[str, Mapping[str, int]], sizes: Mapping[str, int]) -> list[str]:
    """Columns that some training rows lack and others have, of those in `counts`: what a model can learn to do without.

    Args:
        counts: from `count_missing`.
        sizes: rows of each split.

    Raises:
        DataError: all training rows lack a chain; or none does, but rows of another split do.
    """
    for column, by_split in counts.items():
        if by_split["train"] == sizes["train"]:
            raise DataError(
                f"column {column!r}: all {sizes['train']:,} training rows lack it, so nothing can be learned from it. "
                "Leave it out of --sequence_columns and --missing_chains, or split otherwise."
            )
        others = {name: num for name, num in by_split.items() if num and name != "train"}
        if others and not by_split["train"]:
            listed = " and ".join(f"{num:,} of {sizes[name]:,} {name} rows" for name, num in others.items())
            raise DataError(
                f"column {column!r}: {listed} lack it, but none of {sizes['train']:,} training rows: what a missing "
                "chain means cannot be learned from them. Split otherwise, so that training has such rows (--split, "
                "--split_seed), or leave these rows out."
            )
    return [column for column, by_split in counts.items() if by_split["train"]]


def describe_missing(counts: Mapping[str, Mapping[str, int]], sizes: Mapping[str, int]) -> list[str]:
    """As "rows without light: 12 of 60 in train, 0 of 8 in test"; a line per column."""
    return [
        f"rows without {column}: "
        + ", ".join(f"{num:,} of {sizes[name]:,} in {name}" for name, num in by_split.items())
        for column, by_split in counts.items()
    ]
