"""Names in cells: their order, what separates several, which mean yes, no, or that nothing is known."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from .cells import drop_zeros, write_name

SEPARATOR = ";"  # between the labels of a cell
NO_LABEL = "-"  # a cell without any of the labels, or a residue whose label is not known beside digits
JOINTS = "|/,"  # separate labels where what they join are names
YES = ("true", "yes", "1", "positive", "pos")
_IS_DIGITS = re.compile("[0-9]+").fullmatch
BITS = {"0": 0.0, "false": 0.0, "f": 0.0, "no": 0.0, "1": 1.0, "true": 1.0, "t": 1.0, "yes": 1.0}


def order_names(names: Iterable[str]) -> tuple[str, ...]:
    """Numbers by size, else by the alphabet; of two the one that means yes, or to which the other adds `non-`, last."""
    found = sorted({*names})
    try:
        return tuple(sorted(found, key=lambda name: (float(name), name)))
    except ValueError:
        if len(found) == 2 and (found[0].lower() in YES or found[1].lower().endswith(found[0].lower())):
            found.reverse()
        return tuple(found)


def as_bit(cell: Any) -> float | None:
    """1 or 0 of a cell that says yes or no; None of others."""
    return BITS.get(drop_zeros(write_name(cell)).lower())


def split_joined(name: str, sign: str) -> list[str]:
    """Returns what `sign` joins."""
    return [part for part in map(str.strip, name.split(sign)) if part]


def find_joints(names: Collection[str]) -> str:
    """Returns those signs of `|/,` that separate labels: what they join are mostly names that also stand alone.

    None where `+` joins names, too: `a/b` beside `a+b`, as SCOP has it, is another class, not both.
    """
    if any("+" in name and all(part in names for part in split_joined(name, "+")) for name in names):
        return ""
    found = ""
    for sign in JOINTS:
        joined = [split_joined(name, sign) for name in names if sign in name]
        known = [all(part in names for part in parts) for parts in joined]
        if known and sum(known) * 2 >= len(known):
            found += sign
    return found


def drop_dash(names: Collection[str]) -> set[str]:
    """Returns labels of residues without `-` where all others are digits: CAID's references write it for not known."""
    rest = {*names} - {NO_LABEL}
    return rest if all(map(_IS_DIGITS, rest)) else {*names}


def beside_minus_1(names: Collection[str]) -> set[str]:
    """Returns the names beside -1, which may be a label or mean that it is not known; none where there is no -1."""
    rest = {*names} - {"-1"}
    return rest if len(rest) < len(names) else set()


def count_names(names_of: Callable[[Any], list[str]], cells: Sequence[Any], nums: Sequence[int]) -> Counter[str]:
    """Returns in how many rows each name stands, of distinct cells and how many rows have each."""
    counts: Counter[str] = Counter()
    for cell, num in zip(cells, nums):
        counts.update(dict.fromkeys(names_of(cell), num))
    return counts


def join_decimals(counts: Counter[str]) -> None:
    """Adds the rows of `1.0` to those of `1`, where both are names."""
    for name in [*counts]:
        whole = drop_zeros(name)
        if whole != name and whole in counts:
            counts[whole] += counts.pop(name)
