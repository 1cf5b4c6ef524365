"""Sentences about labels whose unit, sign or scale is probably not what the user thinks: likely, never certain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ._arrays import FloatArray, as_column

MIN_ROWS = 30  # as in `guards`: below, shares and spreads say little
MIN_OTHER_ROWS = 10  # of a split that is held against train

MOLAR = (
    1e-3  # nobody's dissociation constants in M reach a millimolar; a pKd or a fitness in which all are smaller is none
)
DECADES = 1e3  # between the smallest and the largest concentration of one table
NANOMOLAR = 100.0  # tables in nM or pM go beyond; ratios to a wild type, which are skewed alike, mostly do not
SKEWED = 3.0  # mean over median: 1 of symmetric labels, above 3 where ln(label) has a standard deviation above 1.5
UNIT_GAP = 2.0  # decades without any label: units differ by three at least, and labels of one unit leave no such hole
MIN_SIDE = 0.02  # of the labels, on each side of the gap
LOGARITHMS = (2.0, 15.0)  # in which nearly all -log10 of a constant in M lie
ABOVE_LOGARITHMS = 50.0  # -log10 of a concentration never is
MIN_ISOLATED_GAP = 0.5  # of the range of all other labels, between them and a value that many rows share
MIN_DISTINCT = 10  # of the other labels: fewer are classes
FAR_MEANS = 5.0  # standard deviations, the larger of both; splits into low and high labels touch at 2 to 3
OTHER_SPREAD = 100.0  # times as wide; a skewed fitness, split into its low and high half, differs seventyfold


def unit_alarms(labels: FloatArray) -> list[str]:
    """Sentences about labels that read as concentrations, or as two units in one column.

    Args:
        labels: (n,) finite numbers; below 30 nothing is said.
    """
    if len(labels) < MIN_ROWS or labels.min() <= 0:
        return []
    if mixed := _mixed_units(labels):
        return [mixed]
    low, high, median = float(labels.min()), float(labels.max()), float(np.median(labels))
    advice = (
        "the weakest binders alone would decide the loss. Train on -log10 of the value in M (pKd = 9 - log10 of nM)."
    )
    if high < MOLAR:
        return [
            f"All labels are positive and below {MOLAR:g} ({low:.3g} to {high:.3g}), as concentrations in M: {advice}"
        ]
    if high >= NANOMOLAR and high >= DECADES * low and labels.mean() >= SKEWED * median:
        text = f"The labels are positive and spread from {low:.3g} to {high:.3g}, half of them below {median:.3g}"
        return [f"{text}, as concentrations in nM or pM: {advice}"]
    return []


def _mixed_units(labels: FloatArray) -> str:
    advice = "Convert all to one unit."
    logs = np.sort(np.log10(labels))
    least = max(2, round(MIN_SIDE * len(logs)))
    gaps = np.diff(logs)[least - 1 : len(logs) - least]  # between neighbours with that many labels on each side
    if len(gaps) and gaps.max() >= UNIT_GAP:
        edge = least + int(np.argmax(gaps))
        below, above = 10 ** logs[edge - 1], 10 ** logs[edge]
        return (
            f"{edge:,} labels are at most {below:.3g}, the other {len(logs) - edge:,} at least {above:.3g}, with none "
            f"between: two units in one column? {advice}"
        )
    num_logarithms = int(np.count_nonzero((labels >= LOGARITHMS[0]) & (labels <= LOGARITHMS[1])))
    beyond = labels[labels >= ABOVE_LOGARITHMS]
    if len(beyond) >= 2 and num_logarithms >= 0.8 * len(labels):
        return (
            f"{num_logarithms:,} labels lie between {LOGARITHMS[0]:g} and {LOGARITHMS[1]:g}, as pKd do, and "
            f"{len(beyond):,} at {beyond.min():.3g} and above: two units in one column, such as pKd and nM? {advice}"
        )
    return ""


def find_isolated(labels: FloatArray, sides: FloatArray) -> list[tuple[float, str]]:
    """Values at either end that several rows share, far from all other labels, each with a sentence.

    Args:
        labels: (n,) finite numbers; below 30 nothing is said.
        sides: (n,) of -1, 0, 1; a marked limit is none.
    """
    if len(labels) < MIN_ROWS:
        return []
    found = []
    for value in (float(labels.min()), float(labels.max())):
        rows = (labels == value) & (sides == 0)
        others = labels[labels != value]
        if np.count_nonzero(rows) < 2 or len(np.unique(others)) < MIN_DISTINCT:
            continue
        low, high = float(others.min()), float(others.max())
        if max(value - high, low - value) < MIN_ISOLATED_GAP * (high - low):
            continue
        num = int(np.count_nonzero(rows))
        limit = f"<={low:.3g}" if value < low else f">={high:.3g}"
        text = (
            f"{num:,} labels ({num / len(labels):.1%}) are exactly {value:g}, and all others lie between {low:g} and "
            f"{high:g}: written where nothing was measured? Leave these rows out (--filter), or write the limit "
            f"({limit})."
        )
        found.append((value, text))
    return found


def split_alarms(labels: Mapping[str, Any]) -> list[str]:
    """Sentences about splits whose labels cannot be of train's scale or sign.

    Args:
        labels: split name -> (n,) numbers; "train" needs 30, others are held against it from 10 rows on.
    """
    columns = {name: as_column(values, f"labels of {name}") for name, values in labels.items()}
    train = columns.pop("train", np.zeros(0))
    if len(train) < MIN_ROWS:
        return []
    return [text for name, other in columns.items() if (text := _compare(train, name, other))]


def _compare(train: FloatArray, name: str, other: FloatArray) -> str:
    if len(other) < MIN_OTHER_ROWS:
        return ""
    here, there = float(train.std()), float(other.std())
    means_differ = abs(train.mean() - other.mean()) > FAR_MEANS * max(here, there)
    narrow, wide = sorted((here, there))
    spreads_differ = narrow > 0 and wide > OTHER_SPREAD * narrow  # 0: all labels of one split are the same
    if not means_differ and not spreads_differ:
        return ""
    has_other_sign = (train.min() > 0 and other.max() < 0) or (train.max() < 0 and other.min() > 0)
    what = "sign" if has_other_sign else "scale"
    return (
        f"Labels of {name} ({_range(other)}) have another {what} than those of train ({_range(train)}): another unit, "
        "or the logarithm of one of them? Scores between them mean nothing; convert one."
    )


def _range(values: FloatArray) -> str:
    return f"{values.min():.3g} to {values.max():.3g}, mean {values.mean():.3g}"
