"""How much of the test set the training set already contains, exactly or nearly; reported, never repaired silently."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from datasets import DatasetDict

from .columns import column_values
from .similarity import WorkLimit, find_near

LEAK_IDENTITY = (0.9, 0.7)
MAX_CHECKED = 2000
MAX_NAMED = 5
MAX_WORK = 1_000_000_000  # per column and identity: seconds to tens of seconds


def leak_report(
    splits: DatasetDict,
    columns: Sequence[str],
    *,
    identities: Sequence[float] = LEAK_IDENTITY,
    max_checked: int = MAX_CHECKED,
    seed: int = 0,
    max_work: int = MAX_WORK,
) -> dict[str, Any]:
    """Counts, per sequence column and for the whole row of sequences, what of test occurs in train.

    Args:
        splits: needs "train" and "test" ("validation" stands in where there is no test).
        columns: the sequence columns.
        identities: 0.7 to 1; percent identity as in `identity`: 1 - edit distance / length of the longer sequence. A
            row is as identical to another as the least alike of its columns.
        max_checked: near copies are looked for among at most this many test rows, a seeded sample.
        seed: of that sample.
        max_work: per column and identity, see `similarity.WorkLimit`.

    Returns:
        {"compared": "test" or "validation", "columns": {column: counts}, "row": counts, "repeated": [[row, training
        row], ...]}, or {} where there is nothing to compare. `repeated` names the first 5 rows that stand in train,
        too, by `source_row` where there is one. Counts: num_test_rows; num_test_sequences (distinct);
        num_test_rows_in_train and num_test_sequences_in_train (exact); num_checked (rows); near, for each identity,
        highest first: {"identity", "num_rows", "is_lower_bound"}: how many checked rows have a sequence of train that
        is at least that identical (an exact copy too), all of them unless the search was cut short by `max_work`.

    Cost: one to ten seconds for 2,000 checked rows against 54,000 mini-proteins, or 105,000 variants of 200 residues;
    memory goes with the residues of train.
    """
    compared = "test" if "test" in splits else "validation"
    if "train" not in splits or compared not in splits or not len(splits[compared]) or not len(splits["train"]):
        return {}
    train = [column_values(splits["train"], column) for column in columns]
    test = [column_values(splits[compared], column) for column in columns]
    num_rows = len(test[0])
    checked = np.arange(num_rows)
    if num_rows > max_checked:
        checked = np.sort(np.random.default_rng(seed).choice(num_rows, max_checked, replace=False))
    options = (checked, sorted(identities, reverse=True), max_work)
    per_column = {name: _compare(train[i : i + 1], test[i : i + 1], *options) for i, name in enumerate(columns)}
    row = _compare(train, test, *options) if len(columns) > 1 else dict(per_column[columns[0]])
    repeated = _name_repeated(splits["train"], splits[compared], list(zip(*train)), list(zip(*test)))
    return {"compared": compared, "columns": per_column, "row": row, "repeated": repeated}


def _name_repeated(
    train: Any, test: Any, train_cells: list[tuple[str, ...]], test_cells: list[tuple[str, ...]]
) -> list[list[int]]:
    first: dict[tuple[str, ...], int] = {}
    for index, cells in enumerate(train_cells):
        first.setdefault(cells, index)
    pairs = ((index, first[cells]) for index, cells in enumerate(test_cells) if cells in first)
    there, here = _row_numbers(test), _row_numbers(train)
    return [[there[index], here[other]] for index, other in islice(pairs, MAX_NAMED)]


def _row_numbers(rows: Any) -> Sequence[int]:
    return column_values(rows, "source_row") if "source_row" in rows.column_names else range(1, len(rows) + 1)


def _compare(
    train: list[list[str]], test: list[list[str]], checked: np.ndarray, identities: Sequence[float], max_work: int
) -> dict[str, Any]:
    train_rows, test_rows = dict.fromkeys(zip(*train)), list(zip(*test))
    distinct = dict.fromkeys(test_rows)
    counts: dict[str, Any] = {
        "num_test_rows": len(test_rows),
        "num_test_sequences": len(distinct),
        "num_test_rows_in_train": sum(row in train_rows for row in test_rows),
        "num_test_sequences_in_train": sum(row in train_rows for row in distinct),
        "num_checked": len(checked),
        "near": [],
    }
    asked = [test_rows[index] for index in checked]
    near = {row for row in asked if row in train_rows}
    references = [list(column) for column in zip(*train_rows)]
    for identity in identities:
        new = [row for row in dict.fromkeys(asked) if row not in near]
        is_complete = True
        if new:
            found, is_complete = find_near([list(c) for c in zip(*new)], references, identity, WorkLimit(max_work))
            near.update(row for row, is_near in zip(new, found) if is_near)
        num_near = sum(row in near for row in asked)
        counts["near"].append({"identity": identity, "num_rows": num_near, "is_lower_bound": not is_complete})
    return counts
