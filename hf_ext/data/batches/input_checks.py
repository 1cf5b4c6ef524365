"""Checks that each encoder's vocabulary and length limit fit the data, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from ...errors import DataError
from ...files import Facts, Json
from ...labels import list_some
from ..arguments import NUMBERS
from ..columns import iter_blocks, read_columns
from .tokenization import NO_LIMIT, count_letters
from .windows import limit_of

STREAM_CHECK_ROWS = 1000
MAX_LISTED = 10  # rows in a message


def check_inputs(collator: Any, splits: Facts, source: str | None = None) -> dict[str, Json]:
    """Checks that the vocabulary and the length limit of each encoder fit the data, before anything is computed.

    Args:
        collator: `SequenceCollator` or `MaskedLMCollator`.
        splits: name -> rows; of a stream the first `STREAM_CHECK_ROWS` stand for all.
        source: where the rows are from, for messages.

    Returns:
        Per input: the share of unknown residues; the longest row in residues; and where rows are cut `cut`, a sentence
        that says by what, how many sequences and rows, and how much is lost; where they are read in windows `windows`,
        one that says how many, and what it costs. Of columns beside sequences `cut` alone.

    Raises:
        DataError: more than 1 % unknown residues, or rows above the limit with `too_long="error"`, or of another length
            than a wild type: how many, and the first ones with file row and length; rows that lack a number that all
            training rows have.
    """
    numbers = getattr(collator, NUMBERS, None)
    report = numbers.check(splits, source) if numbers else {}
    for name, columns in collator.columns.items():
        tokenizer = collator.tokenizers[name]
        keys: list[int] = []  # of rows: the text of all of them is not held
        lengths: list[int] = []
        letters = np.zeros(256, np.int64)
        longest: tuple[int, Any] = (0, ())
        for block in chain(*(iter_blocks(split) for split in splits.values())):
            rows = read_columns(block, columns, STREAM_CHECK_ROWS)
            keys += map(hash, rows)
            counted = [sum(map(len, row)) for row in rows]
            lengths += counted
            letters += count_letters(chain(*{*rows}))
            longest = max([longest, *zip(counted, rows)])
        unknown = tokenizer.check_contract(letters, name)
        exact = getattr(collator, "num_residues", None)
        if exact and {*lengths} != {exact}:
            listed = _list_rows(splits, columns, exact.__ne__, "of another length")
            raise DataError(
                f"Input '{name}': variants of {exact:,} residues, by substitutions alone.\n{source or 'The data'}: "
                f"{listed}. Leave them out."
            )
        limit = tokenizer.max_residues or NO_LIMIT
        sizes = np.array(lengths)
        is_above = sizes > limit
        report[name] = {"unknown_share": unknown, "longest": max(lengths)}
        if is_above.any():
            try:
                collator.encode(name, *zip(longest[1]))  # raises unless allowed
            except DataError as error:
                listed = _list_rows(splits, columns, limit.__lt__, "too long")
                raise DataError(
                    f"{error}\n{source or 'The data'}: {listed}. Or leave them out: --too_long error --max_residues N "
                    "--bad_rows drop, N per column."
                ) from error
            read, _ = limit_of(collator, name).reads(sizes[is_above])
            more = read.sum() - sizes[is_above].sum()
            share = abs(more) / sizes.sum()
            distinct = dict(zip(keys, is_above))
            told = (
                f"longer than the {limit:,} residues that {tokenizer.limited_by}: {sum(distinct.values()):,} of "
                f"{len(distinct):,} sequences ({is_above.sum():,} of {len(keys):,} rows)."
            )
            overlap = limit_of(collator, name).overlap
            if overlap is not None:
                report[name]["windows"] = (
                    f"{told} They are read in windows that overlap by {overlap:,} residues or more, {share:.2%} more "
                    "residues in all."
                )
            else:
                report[name]["cut"] = (
                    f"{told} {collator.CUT}; {-more:,} residues, {share:.2%} of all, are not read. Instead: cut them "
                    "into domains, take an encoder for longer ones, or refuse them with --too_long error."
                )
    return report


def _list_rows(
    splits: Facts,
    columns: Sequence[str],
    is_listed: Callable[[int], bool],
    what: str,
) -> str:
    """Lists rows whose number of residues `is_listed`: how many are `what`, and the first ones."""
    found = []
    for split_name, split in splits.items():
        taken = split if hasattr(split, "__len__") else islice(split, STREAM_CHECK_ROWS)
        for number, row in enumerate(taken, 1):
            length = sum(len(row[column]) for column in columns)
            if is_listed(length):
                found.append(f"row {row.get('source_row', number)} of {split_name} ({length:,} residues)")
    total = f"{len(found):,} row{'s are' if len(found) > 1 else ' is'}"
    return f"{total} {what}: {list_some(found, MAX_LISTED)}"
