"""Rows that repeat the same sequences with other labels, and the ceiling that this noise sets to every score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .columns import column_names, column_values, factorize

MAX_LISTED = 3
# Of the labels' variance: below, the ceiling is a Pearson correlation above 0.95, which few models meet.
MUCH_NOISE = 0.1
MANY_REPEATS = 0.05  # of the rows: fewer, such as a wild type measured on each plate, say little about the others


def repeat_report(splits: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """Finds rows with the same sequences and other labels, and what their spread says about the measurement's noise.

    The noise is the pooled standard deviation within repeats. Whoever predicts every true value is still that far off a
    single measurement (RMSE), and reaches a Pearson correlation of sqrt(1 - noise^2 / variance of the labels). The
    Spearman correlation beside it is that of a bivariate normal distribution, 6 / pi * asin(r / 2).

    Args:
        splits: name -> rows in memory with `label`; rows with a `bound` other than 0 are left out.
        columns: the sequence columns.

    Returns:
        num_all (rows with exact labels), num_rows (that repeat others' sequences), num_groups, num_disagreeing
        (groups), and where that is not 0: noise, max_pearson, max_spearman, share (of the labels' variance), rows (of
        the first groups: [{"split", "row", "label"}]).

    Cost: one pass; 1 s for 131,072 rows of three sequences.
    """
    keys = _number_rows(splits, columns)
    labels = np.concatenate([np.array(column_values(split, "label"), dtype=np.float64) for split in splits.values()])
    is_exact = np.concatenate([_exact_rows(split) for split in splits.values()])
    places = [(name, row) for name, split in splits.items() for row in _file_rows(split)]
    is_repeated = is_exact & (np.bincount(keys[is_exact], minlength=len(keys))[keys] > 1)
    groups: dict[int, list[tuple[str, int, float]]] = {}
    for index in np.flatnonzero(is_repeated).tolist():
        groups.setdefault(int(keys[index]), []).append((*places[index], float(labels[index])))
    differing = [group for group in groups.values() if len({label for _, _, label in group}) > 1]
    report: dict[str, Any] = {
        "num_all": int(is_exact.sum()),
        "num_rows": int(is_repeated.sum()),
        "num_groups": len(groups),
        "num_disagreeing": len(differing),
    }
    if differing:  # so the labels have a variance
        report |= _ceiling([*groups.values()], float(labels[is_exact].var()))
        names = ("split", "row", "label")
        report["rows"] = [[dict(zip(names, one)) for one in group] for group in differing[:MAX_LISTED]]
    return report


def _number_rows(splits: Mapping[str, Any], columns: Sequence[str]) -> np.ndarray:
    """Returns int64 [n] over all splits: rows with the same sequences have the same number, below n."""
    keys = np.zeros(sum(map(len, splits.values())), dtype=np.int64)
    for column in columns:
        codes, _ = factorize(value for split in splits.values() for value in column_values(split, column))
        keys = np.unique(keys * (int(codes.max(initial=0)) + 1) + codes, return_inverse=True)[1]
    return keys


def _exact_rows(split: Any) -> np.ndarray:
    if "bound" not in column_names(split):
        return np.ones(len(split), dtype=bool)
    return np.array(column_values(split, "bound"), dtype=np.int8) == 0


def _file_rows(split: Any) -> Sequence[int]:
    return column_values(split, "source_row") if "source_row" in column_names(split) else range(1, len(split) + 1)


def _ceiling(repeated: Sequence[Sequence[tuple[str, int, float]]], variance: float) -> dict[str, float]:
    """Repeats that agree count as well: they say that there is less noise."""
    squares = sum(float(np.var([label for _, _, label in group])) * len(group) for group in repeated)
    noise = math.sqrt(squares / sum(len(group) - 1 for group in repeated))
    share = min(1.0, noise**2 / variance)
    pearson = math.sqrt(1 - share)
    return {
        "noise": noise,
        "share": share,
        "max_pearson": pearson,
        "max_spearman": 6 / math.pi * math.asin(pearson / 2),
    }


def describe_repeats(report: Mapping[str, Any]) -> str:
    """One sentence or two, with the first rows and the ceiling; "" where no labels disagree."""
    if "noise" not in report:
        return ""
    shown = "; ".join(_describe_group(group) for group in report["rows"])
    disagreeing = f"{report['num_disagreeing']:,} of {report['num_groups']:,} sequences that occur more than once"
    ceiling = f"above {report['max_pearson']:.3f}, no Spearman much above {report['max_spearman']:.3f}"
    return (
        f"{disagreeing} ({report['num_rows']:,} rows) have labels that disagree: {shown}. Noise of "
        f"{report['noise']:.3g} follows. If all rows are as noisy ({report['share']:.0%} of their variance), no "
        f"model's RMSE falls below it, no Pearson rises {ceiling}. Average them, or name what tells them apart in "
        "--sequence_columns."
    )


def is_much_noise(report: Mapping[str, Any]) -> bool:
    """Whether repeats are so many, and so far apart, that the whole set is in doubt."""
    return report["num_rows"] >= MANY_REPEATS * report["num_all"] and report.get("share", 0.0) > MUCH_NOISE


def _describe_group(group: Sequence[Mapping[str, Any]]) -> str:
    listed = [f"{one['split']} row {one['row']} {one['label']:g}" for one in group[:MAX_LISTED]]
    more = len(group) - MAX_LISTED
    return ", ".join(listed) + (f" and {more:,} more" if more > 0 else "")
