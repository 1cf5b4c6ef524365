"""Labels that are names: a class per row, several labels per row, or a class for each residue."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from . import UNKNOWN, LabelKind
from .cells import (
    Judged,
    drop_zeros,
    is_missing,
    is_unknown,
    read_list,
    shorten,
    show_names,
    split_letters,
    unwrap,
    write_name,
)

FILL_IN = "Fill it in, or leave the row out."
SEPARATOR = ";"  # between the labels of a cell
NO_LABEL = "-"  # a cell without any of the labels, or a residue whose label nobody knows beside digits
JOINTS = "|/,"  # separate labels where what they join are names
YES = ("true", "yes", "1", "positive", "pos")
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


class Classes:
    """The class of a row, by its number among `kind.names`."""

    arrow_type: pa.DataType = pa.int64()

    def __init__(self, kind: LabelKind) -> None:
        self.kind = kind
        numbered = [*enumerate(kind.names)]
        self.numbers = {drop_zeros(name): number for number, name in numbered} | {name: i for i, name in numbered}

    def find(self, name: str) -> int | None:
        """Returns the number of a class, also of one that is written with other decimals (`1.0` for `1`)."""
        return self.numbers.get(name, self.numbers.get(drop_zeros(name)))

    def is_missing(self, cell: Any) -> bool:
        """Says whether a cell holds nothing: `NA` is a class where one is called so."""
        return is_missing(cell) and write_name(cell) not in self.numbers

    def names_of(self, cell: Any) -> list[str]:
        """Returns what a cell names, nothing where it is no name."""
        cell = unwrap(cell)
        return [] if self.is_missing(cell) or _is_several(cell) else [write_name(cell)]

    def judge(self, cell: Any) -> Judged:
        """Returns a cell as the number of its class."""
        cell = unwrap(cell)
        if self.is_missing(cell):
            return Judged(UNKNOWN, "the class is missing", FILL_IN)
        if _is_several(cell):
            remedy = "Name one class in each row; --task multilabel reads several."
            return Judged(UNKNOWN, "several classes in one cell", remedy)
        return self._number(write_name(cell))

    def _number(self, name: str, place: str = "") -> Judged:
        number = self.find(name)
        if number is not None:
            return Judged(number)
        rule = f"the model has no class '{shorten(name)}'{place}"
        return Judged(UNKNOWN, rule, f"It has {show_names(self.kind.names)}.")

    def facts(self, labels: np.ndarray) -> dict[str, Any]:
        """How many rows or residues there are, of each class, and the share of the largest.

        Args:
            labels: (n,), `UNKNOWN` is not known.
        """
        known = labels[labels != UNKNOWN]
        return self._facts(labels, np.bincount(known, minlength=self.kind.num_outputs), np.array(len(known)))

    def _facts(self, labels: np.ndarray, counts: np.ndarray, num_known: np.ndarray) -> dict[str, Any]:
        return {
            "n": len(labels),
            "counts": dict(zip(self.kind.names, counts.tolist())),
            "largest_share": float((counts / np.maximum(1, num_known)).max()),
            "num_known": num_known.tolist(),
            "num_unknown": labels.size - int(num_known.sum()),
        }

    def describe(self, facts: Mapping[str, Any]) -> str:
        """The same in words, for a log."""
        what = "residues" if self.kind.per_residue else "rows"
        counts = Counter(facts["counts"]).most_common()
        shown = ", ".join(f"{shorten(name)} in {num:,}" for name, num in counts[:5])
        more = f" and {len(counts) - 5:,} more" if len(counts) > 5 else ""
        unknown = f"; {facts['num_unknown']:,} not known" if facts["num_unknown"] else ""
        return f"{shown}{more}, of {facts['n']:,} {what}{unknown}"

    def why_useless(self, facts: Mapping[str, Any]) -> str:
        """Why nothing can be learned from training labels; "" where something can."""
        present = [name for name, num in facts["counts"].items() if num]
        if len(present) > 1:
            return ""
        what, called = ("residues", "known labels of") if self.kind.per_residue else ("rows", "labels of")
        which = f"are '{shorten(present[0])}'" if present else "are not known"
        return f"column {self.kind.columns[0]!r}: all {called} training {what} {which}, so there is nothing to learn."

    def compare(self, facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Warnings about classes that other splits have and training lacks."""
        said = []
        for split in facts.keys() - {"train"}:
            counts = facts[split]["counts"]
            lost = [name for name, num in counts.items() if num and not facts["train"]["counts"][name]]
            if lost:
                num, what = sum(counts[name] for name in lost), "residues" if self.kind.per_residue else "rows"
                said.append(
                    f"{len(lost):,} of {len(counts):,} classes ({show_names(lost)}) stand in {split} and not in "
                    f"training, so they are never predicted: {num:,} of {facts[split]['n']:,} {split} {what} count as "
                    "wrong. Split otherwise, or leave these rows out."
                )
        return sorted(said)


def _is_several(cell: Any) -> bool:
    return SEPARATOR in str(cell) or read_list(cell) is not None


class LabelSets(Classes):
    """Several labels of a row: 1 for those that it has, 0 for others, NaN where it is not known."""

    def __init__(self, kind: LabelKind) -> None:
        super().__init__(kind)
        self.has_columns = len(kind.columns) > 1
        self.arrow_type = pa.float64() if self.has_columns else pa.list_(pa.float64())

    def names_of(self, cell: Any) -> list[str]:
        """Returns the labels that a cell lists, also as a list of JSON, Python or Parquet."""
        items = read_list(cell, of_names=True)
        if items is None:
            items = cell.split(SEPARATOR) if isinstance(cell, str) else [cell]
        names = [write_name(item) for item in items if not self.is_missing(item)]
        return [part for name in names if name != NO_LABEL for part in self._split(name)]

    def _split(self, name: str) -> list[str]:
        """Returns the labels that a name joins (`a|b`), itself where it is one."""
        for sign in JOINTS:
            parts = split_joined(name, sign)
            if self.find(name) is None and parts and all(self.find(part) is not None for part in parts):
                return parts
        return [name]

    def judge(self, cell: Any) -> Judged:
        """A cell of one of several columns as 1, 0 or NaN; one that lists labels, as 1 or 0 for each name."""
        if self.has_columns:
            value = math.nan if is_missing(cell) else as_bit(cell)
            wrong = Judged(math.nan, "neither 0 nor 1", "Write 1 for yes, 0 for no, nothing for not known.")
            return wrong if value is None else Judged(value)
        if self.is_missing(cell):
            remedy = f"Write {NO_LABEL} for a row that has none of the labels; leave it out if that was not examined."
            return Judged([], "no label in this cell", remedy)
        found = [self._number(name) for name in self.names_of(cell)]
        for one in found:
            if one.rule:
                return one._replace(value=[])
        return Judged(np.isin(range(self.kind.num_outputs), [one.value for one in found]).astype(np.float64))

    def facts(self, labels: np.ndarray) -> dict[str, Any]:
        """How many rows there are, and how many have each label.

        Args:
            labels: (n, labels), NaN is not known.
        """
        return self._facts(labels, np.nansum(labels, 0).astype(int), np.isfinite(labels).sum(0))

    def why_useless(self, facts: Mapping[str, Any]) -> str:
        """Where no label tells training rows apart, or nobody knows one of them."""
        unknown = [name for name, known in zip(facts["counts"], facts["num_known"]) if not known]
        if unknown:
            which = show_names(unknown)
            return f"{which}: no training row says whether it has that label. Leave the column out, or fill it in."
        if any(0 < num < known for num, known in zip(facts["counts"].values(), facts["num_known"])):
            return ""
        where = ", ".join(map(repr, self.kind.columns))
        return f"column {where}: all training rows have the same labels, so there is nothing to learn."


class ResidueClasses(Classes):
    """A class for each residue: a letter, or a name in a list; `UNKNOWN` where it is not known."""

    arrow_type = pa.list_(pa.int64())

    def names_of(self, cell: Any) -> list[str]:
        """Returns the classes that stand in a cell."""
        if is_missing(cell):
            return []
        return [name for name in map(write_name, {*split_letters(cell)}) if not is_unknown(name)]

    def _is_unknown(self, name: str) -> bool:
        """Says whether the label is not known: `-` too beside classes that are digits, as CAID's references have it."""
        return is_unknown(name) or (name == NO_LABEL and all(map(str.isdigit, self.kind.names)))

    def judge(self, cell: Any) -> Judged:
        """A cell as a list of numbers of classes."""
        if is_missing(cell):
            return Judged([], "the labels are missing", "Fill them in, or leave the row out.")
        items = split_letters(cell)
        numbers: dict[Any, int] = {}
        for item in {*items}:
            name = write_name(item)
            number = self.find(name)
            if number is None and not self._is_unknown(name):
                place = f" as at position {items.index(item) + 1} of {len(items)}"
                return self._number(name, place)._replace(value=[])
            numbers[item] = UNKNOWN if number is None else number
        return Judged([numbers[item] for item in items])
