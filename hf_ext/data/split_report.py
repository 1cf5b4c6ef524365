"""What of test stands in training, which rows repeat sequences with other labels or lack a chain.

All of it is reported, never repaired silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import pandas as pd
from datasets import Dataset, DatasetDict

from ..errors import DataError
from ..labels import LabelKind, shorten
from ..startup import phase
from .columns import Report, column_names
from .near_copies import has_near
from .splits import draw_rows

LEAK_IDENTITY = (0.9, 0.7)  # from high to low
MAX_CHECKED = 2000  # rows, a seeded sample
MAX_PAIRS = 40_000_000  # of a checked row and a training row: 400 rows are checked beside 100,000
MAX_NAMED = 5
MAX_LISTED = 3  # groups of rows that repeat each other


@phase("leak report")
def leak_report(
    splits: DatasetDict,
    columns: Sequence[str],
    beside: Sequence[str] = (),
) -> Report:
    """Counts, per sequence column and for the whole row of sequences, what of test occurs in train.

    Args:
        splits: needs "train" and "test" ("validation" stands in where there is no test).
        columns: the sequence columns.
        beside: columns that tell rows of the same sequences apart.

    Returns:
        {"compared": "test" or "validation", "columns": {column: counts}, "row": counts, "repeated": [[row, training
        row], ...]}, or {} where there is nothing to compare. `repeated` names the first 5 rows that stand in train,
        too, by `source_row` where there is one. Counts: num_test_rows; num_test_sequences (distinct);
        num_test_rows_in_train and num_test_sequences_in_train (exact); num_checked (rows, a seeded sample of at most
        2,000, fewer beside more than 20,000 training rows); near, for the identities 0.9 and 0.7 (see `near_copies`):
        {"identity", "num_rows"}: how many checked rows have a sequence of train that is at least that identical (an
        exact copy too). A whole row counts as near where each of its sequences is, be it to sequences of different
        training rows.

    Cost: 131,072 rows of three columns take 0.7 s where they are variants of one protein, 6 s where all are unlike.
    """
    compared = "test" if "test" in splits else "validation"
    if "train" not in splits or compared not in splits or not len(splits[compared]) or not len(splits["train"]):
        return {}
    train = splits["train"]
    test = splits[compared]
    checked = draw_rows(len(test), 0, min(MAX_CHECKED, MAX_PAIRS // len(train) + 1))
    known = [train[column][:] for column in columns]
    asked = [test[column][:] for column in columns]
    # bool [columns, identities, checked rows]
    near = [_find_near([mine[i] for i in checked], theirs) for mine, theirs in zip(asked, known)]

    def count(mine: list[Any], theirs: list[Any], is_near: np.ndarray) -> Report:
        there = set(theirs)
        distinct = set(mine)
        return {
            "num_test_rows": len(mine),
            "num_test_sequences": len(distinct),
            "num_test_rows_in_train": sum(one in there for one in mine),
            "num_test_sequences_in_train": len(distinct & there),
            "num_checked": len(checked),
            "near": [{"identity": one, "num_rows": int(rows.sum())} for one, rows in zip(LEAK_IDENTITY, is_near)],
        }

    of_columns = {name: count(asked[i], known[i], near[i]) for i, name in enumerate(columns)}
    rows = list(zip(*asked, *(test[name][:] for name in beside)))
    training_rows = list(zip(*known, *(train[name][:] for name in beside)))
    first = dict(zip(reversed(training_rows), reversed(_row_numbers(train))))
    repeated = ([number, first[row]] for number, row in zip(_row_numbers(test), rows) if row in first)
    return {
        "compared": compared,
        "columns": of_columns,
        "row": count(rows, training_rows, np.all(near, axis=0)),
        "repeated": list(islice(repeated, MAX_NAMED)),
    }


def _find_near(asked: Sequence[str], known: Sequence[str]) -> np.ndarray:
    """Returns bool [identities, asked], from the highest to the lowest, so that who has a near copy is asked once."""
    references = list(dict.fromkeys(known))
    distinct = list(dict.fromkeys(asked))
    near: set[str] = set()
    found = []
    for identity in LEAK_IDENTITY:
        rest = [one for one in distinct if one not in near]
        near.update(one for one, is_near in zip(rest, has_near(rest, references, identity)) if is_near)
        found.append([one in near for one in asked])
    return np.array(found, dtype=bool)


def _row_numbers(rows: Dataset) -> Sequence[int]:
    if "source_row" in column_names(rows):
        return rows["source_row"][:]
    return range(1, len(rows) + 1)


def repeat_report(splits: Mapping[str, Dataset], columns: Sequence[str], kind: LabelKind) -> Report:
    """Finds rows with the same sequences and other labels, and what these say about the measurement's noise.

    The noise is the pooled standard deviation within repeats. Whoever predicts every true value is still that far off a
    single measurement (RMSE).

    Args:
        splits: name -> rows in memory with `label`; rows with a `bound` other than 0 are left out.
        columns: the sequence columns.
        kind: of the labels.

    Returns:
        num_rows (that repeat others' sequences), num_groups, num_disagreeing (groups), and where that is not 0: rows
        (of the first groups: [{"split", "row", "label"}]), and of numbers noise and share (of the labels' variance).
        {} of labels that are lists.

    Cost: one pass; 1 s for 131,072 rows of three sequences.
    """
    if not kind.repeats:
        return {}
    frames = []
    for name, split in splits.items():
        frame = pd.DataFrame({column: split[column][:] for column in (*columns, "label")})
        frame["split"] = name
        frame["row"] = _row_numbers(split)
        if "bound" in column_names(split):
            frame = frame[np.array(split["bound"][:]) == 0]
        frames.append(frame)
    table = pd.concat(frames)
    groups = table.groupby([*columns], sort=False)["label"]
    sizes = groups.size()
    disagrees = groups.transform("min") < groups.transform("max")
    report: Report = {
        "num_rows": int(sizes[sizes > 1].sum()),
        "num_groups": int((sizes > 1).sum()),
        "num_disagreeing": int((groups.min() < groups.max()).sum()),
    }
    if not disagrees.any():
        return report
    first = islice(table[disagrees].groupby([*columns], sort=False), MAX_LISTED)
    report["rows"] = [one[["split", "row", "label"]].to_dict("records") for _, one in first]
    for row in chain(*report["rows"]):
        row["label"] = kind.name_label(row["label"])
    # Repeats that agree count as well: they say that there is less noise.
    return report | kind.noise(table["label"], groups.transform("mean"), report["num_rows"] - report["num_groups"])


def describe_repeats(report: Mapping[str, Any]) -> str:
    """Describes repeats in one sentence or two, with the first rows and the ceiling; "" where no labels disagree."""
    if not report.get("num_disagreeing"):
        return ""
    listed = [
        ", ".join(f"{one['split']} row {one['row']} {_show(one['label'])}" for one in rows) for rows in report["rows"]
    ]
    text = (
        f"{report['num_disagreeing']:,} of {report['num_groups']:,} sequences that occur more than once "
        f"({report['num_rows']:,} rows) have labels that disagree: {'; '.join(listed)}."
    )
    what = "No model gets all of them right."
    remedy = "Write all labels of a sequence into one cell, joined by ; (--task multilabel), correct them"
    if "noise" in report:
        what = (
            f"Noise of {report['noise']:.3g} follows. If all rows are as noisy ({report['share']:.0%} of their "
            f"variance), no model's RMSE falls below it, no Pearson rises above {math.sqrt(1 - report['share']):.3f}."
        )
        remedy = "Average them"
    others = "--sequence_columns, --numeric_columns or --category_columns"
    return f"{text} {what} {remedy}, or name what tells them apart in {others}."


def _show(label: float | str) -> str:
    return shorten(label) if isinstance(label, str) else f"{label:g}"


def find_missing(splits: Mapping[str, Dataset], columns: Sequence[str]) -> dict[str, dict[str, int]]:
    """Counts rows that lack a chain, of columns that only some training rows lack: a model can learn from that.

    Args:
        splits: rows in memory, "train" among them.
        columns: sequence columns whose cells may be empty.

    Returns:
        {column: {split: rows without a sequence there}}; without columns that no row lacks.

    Raises:
        DataError: all training rows lack a chain, or none does but rows of another split do.
    """
    found = {}
    for column in columns:
        nums = {name: sum(not one for one in split[column][:]) for name, split in splits.items()}
        if any(nums.values()) and nums["train"] in (0, len(splits["train"])):
            lacking = [f"{num:,} of {len(splits[name]):,} {name} rows" for name, num in nums.items()]
            raise DataError(
                f"column {column!r}: {', '.join(lacking)} lack it. What a missing chain means is learned from training "
                "rows of both kinds: split otherwise (--split, --split_seed), leave out the rows that lack it, or the "
                "column (--sequence_columns, --missing_chains)."
            )
        if nums["train"]:
            found[column] = nums
    return found
