"""Labels that are names; one class of each row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import DataError
from ..files import Json
from .cells import (
    SEPARATOR,
    UNKNOWN,
    Checked,
    count_names,
    drop_zeros,
    is_missing,
    is_number,
    join_decimals,
    list_some,
    order_names,
    read_list,
    shorten,
    show_names,
    unwrap,
    write_name,
)
from .columns import distinct
from .kind import LabelKind, ReadArguments
from .outputs import LABEL, PREDICTION, PROBABILITY, Array, BoolArray, Columns, FloatArray, IntArray, Outputs

FILL_IN = "Fill it in, or leave the row out."
NOT_KNOWN = "?"  # in tables of predictions
MAX_PROBABILITIES = 20  # classes of which each has a column; of more the predicted one's probability stands alone


class NamedKind(LabelKind):
    """What names in cells stand for, by their number among `names`."""

    losses = ("mse", "focal")
    hub_task = "text-classification"

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Returns the number of each name, also without its decimals."""
        numbered = [*enumerate(self.names)]
        return {drop_zeros(name): number for number, name in numbered} | {name: number for number, name in numbered}

    def find(self, name: str) -> int | None:
        """Returns the number of a name, also of one that is written with other decimals (`1.0` for `1`)."""
        return self.numbers.get(name, self.numbers.get(drop_zeros(name)))

    def is_missing(self, cell: object) -> bool:
        """Says whether a cell holds nothing: `NA` is a class where one is called so."""
        return is_missing(cell) and write_name(cell) not in self.numbers

    def names_of(self, cell: object) -> list[str]:
        """Returns what a cell names, nothing where it is no name."""
        raise NotImplementedError

    def read_items(self, cell: object) -> list[Any]:
        return self.names_of(cell)

    def number_of(self, name: str, place: str = "") -> Checked:
        """Returns the number of a name, or that there is none, `place` in the cell."""
        number = self.find(name)
        if number is not None:
            return Checked(number)
        rule = f"the model has no class '{shorten(name)}'{place}"
        return Checked(UNKNOWN, rule, f"It has {show_names(self.names)}.")

    # Names.

    def find_names(
        self, cells: pa.ChunkedArray, sequences: pa.ChunkedArray, args: ReadArguments, notes: list[str]
    ) -> LabelKind:
        (column,) = self.columns
        found = distinct(cells)
        values = found.cells.to_pylist()
        counts = self._count(values, np.bincount(found.number).tolist(), args, notes)
        if not counts:
            raise DataError(f"column {column!r}: no cell names a class. Check --label_column and --task.")
        kind = replace(self, names=order_names(counts))
        kind._check_names(values, cells, sequences)
        notes += kind._doubt_names(counts, len(cells))
        return kind

    def _count(self, cells: Sequence[Any], nums: Sequence[int], args: ReadArguments, notes: list[str]) -> Counter[str]:
        """Returns in how many rows each name stands, `1.0` as 1 beside it, of distinct cells and rows that have each.

        Raises:
            DataError: cells say `NA` or the like, and nothing says whether this is a class.
        """
        markers = [*args.marker_classes]
        if not self.per_residue:  # where a cell is a name
            markers += self._find_markers(cells, nums, args, notes)
        counts = count_names(replace(self, names=tuple(markers)).names_of, cells, nums)
        counts = self._split_counts(counts, cells, nums)
        join_decimals(counts)
        return counts

    def _split_counts(self, counts: Counter[str], cells: Sequence[Any], nums: Sequence[int]) -> Counter[str]:
        return counts

    def _find_markers(
        self, cells: Sequence[Any], nums: Sequence[int], args: ReadArguments, notes: list[str]
    ) -> list[str]:
        """Returns names such as `NA` that are classes here: beside names, where `--task` says that all cells are.

        Raises:
            DataError: these read as no value, and no argument says that bad rows are dropped.
        """
        found: Counter[str] = Counter()
        for cell, num in zip(cells, nums):
            if isinstance(cell, str) and cell.strip() and is_missing(cell) and cell.strip() not in args.marker_classes:
                found[cell.strip()] += num
        if not found:
            return []
        said = f"column {self.columns[0]!r}: {found.total():,} cells say {' or '.join(map(repr, sorted(found)))}"
        others = [cell for cell in cells if not is_missing(cell)]
        if args.task == Classes.task and args.bad_rows == "error" and not all(map(is_number, others)):
            notes.append(f"{said}: classes, since --task says so; --bad_rows drop leaves these rows out.")
            return [*found]
        told = f"{said}, which reads as no value. If these are classes, give --marker_classes {' '.join(sorted(found))}"
        if args.bad_rows == "error":
            raise DataError(f"{told}; if not, leave these rows out: --bad_rows drop.")
        notes.append(f"{told}.")
        return []

    def _check_names(self, values: Sequence[Any], cells: pa.ChunkedArray, sequences: pa.ChunkedArray) -> None:
        """Raises DataError where distinct `values` cannot be what these names stand for."""

    def _doubt_names(self, counts: Mapping[str, int], num_rows: int) -> list[str]:
        """Returns sentences about names that are probably none."""
        folded: dict[str, list[str]] = {}
        for name in self.names:
            folded.setdefault("".join(name.casefold().replace("_", " ").split()), []).append(repr(name))
        same = [" and ".join(names) for names in folded.values() if len(names) > 1]
        where = f"column {self.columns[0]!r}"
        notes = []
        if same:
            notes.append(f"{where}: classes that differ in spelling only: {show_names(same)}. Spell them alike.")
        single = sum(count == 1 for count in counts.values())
        num = len(counts)
        if single > num / 2 and not self.per_residue:
            told = f"{single:,} of {num:,} classes have a single row: these may be names of rows, not classes."
            notes.append(f"{where}: {told}")
        return notes

    # Facts.

    def facts(self, labels: Array) -> Json:
        """Returns how many rows or residues there are, of each class, and the share of the largest.

        Args:
            labels: (n,), `UNKNOWN` is not known.
        """
        known = labels[labels != UNKNOWN]
        return self._facts(labels, np.bincount(known, minlength=self.num_outputs), np.array(len(known)))

    def _facts(self, labels: Array, counts: Array, num_known: Array) -> Json:
        return {
            "n": len(labels),
            "counts": dict(zip(self.names, counts.tolist())),
            "largest_share": float((counts / np.maximum(1, num_known)).max()),
            "num_known": num_known.tolist(),
            "num_unknown": labels.size - int(num_known.sum()),
        }

    def describe_facts(self, facts: Json) -> str:
        counts = Counter[str](facts["counts"]).most_common()
        shown = list_some([f"{shorten(name)} in {num:,}" for name, num in counts])
        unknown = f"; {facts['num_unknown']:,} not known" if facts["num_unknown"] else ""
        return f"{shown}, of {facts['n']:,} {self.counted}{unknown}"

    def why_useless(self, facts: Json) -> str:
        present = [name for name, num in facts["counts"].items() if num]
        if len(present) > 1:
            return ""
        called = "known labels of" if self.per_residue else "labels of"
        which = f"are '{shorten(present[0])}'" if present else "are not known"
        return (
            f"column {self.columns[0]!r}: all {called} training {self.counted} {which}, so there is nothing to learn."
        )

    def compare_splits(self, facts: Mapping[str, Json]) -> list[str]:
        """Returns warnings about classes that other splits have and training lacks."""
        said = []
        for split in facts.keys() - {"train"}:
            counts = facts[split]["counts"]
            lost = [name for name, num in counts.items() if num and not facts["train"]["counts"][name]]
            if lost:
                num = sum(counts[name] for name in lost)
                said.append(
                    f"{len(lost):,} of {len(counts):,} classes ({show_names(lost)}) stand in {split} and not in "
                    f"training, so they are never predicted: {num:,} of {facts[split]['n']:,} {split} {self.counted} "
                    "count as wrong. Split otherwise, or leave these rows out."
                )
        return sorted(said)

    def describe_limits(self) -> list[str]:
        return [f"It knows {self.num_outputs:,} classes and no others: whatever it reads gets one of them."]


class Classes(NamedKind):
    """A class of each row."""

    task = "classification"
    takes_teacher = True
    arrow_type = pa.int64()
    dtype = np.int64
    label_shape = ()
    repeats = True
    chart = "confusion"
    hub_name = "Classification of protein sequences"
    returns = "the name of a class per row; predict_proba returns the probability of each"

    @property
    def num_classes(self) -> int:
        return len(self.names)

    def names_of(self, cell: object) -> list[str]:
        cell = unwrap(cell)
        return [] if self.is_missing(cell) or is_several(cell) else [write_name(cell)]

    def check_cell(self, cell: object) -> Checked:
        """Returns a cell as the number of its class."""
        cell = unwrap(cell)
        if self.is_missing(cell):
            return Checked(UNKNOWN, "the class is missing", FILL_IN)
        if is_several(cell):
            remedy = "Name one class in each row; --task multilabel reads several."
            return Checked(UNKNOWN, "several classes in one cell", remedy)
        return self.number_of(write_name(cell))

    def _doubt_names(self, counts: Mapping[str, int], num_rows: int) -> list[str]:
        """Raises DataError where classes are the rows' own names."""
        where = f"column {self.columns[0]!r}"
        num = len(counts)
        shown = show_names(self.names)
        if num == num_rows > 2:
            raise DataError(
                f"{where}: each of the {num:,} rows has a class of its own ({shown}): these are names of rows, from "
                "which nothing can be learned. Name another --label_column, or give --task regression for amounts, "
                "residue_classification for a letter per residue; separate several labels in a cell by ';'."
            )
        notes = super()._doubt_names(counts, num_rows)
        if sum(any(sign in name for sign in ",|") for name in self.names) > num / 2:
            notes.append(
                f"{where}: most classes hold a comma or a | ({shown}). If each cell names several labels, separate "
                "them by ';' for --task multilabel."
            )
        return notes

    def describe(self) -> str:
        return f"one of {len(self.names):,} classes ({show_names(self.names)})"

    def name_label(self, label: Any) -> Any:
        return self.names[label]

    def code(self, labels: FloatArray) -> tuple[FloatArray, IntArray]:
        return np.eye(self.num_outputs), labels.astype(np.int64)

    def as_columns(self, labels: Array, most: int, least: float) -> tuple[FloatArray, BoolArray]:
        names, counts = np.unique(labels, return_counts=True)
        chosen = labels[:, None] == names[np.argsort(-counts, kind="stable")[:most]]
        return chosen.astype(np.float64), np.ones(chosen.shape, bool)

    def decode(self, predictions: Outputs) -> Any:
        return np.array(self.names)[np.argmax(predictions, axis=-1)]

    def prediction_columns(self, predictions: Outputs) -> Columns:
        probabilities = np.asarray(predictions, np.float32)
        named = {PREDICTION: self.decode(predictions).tolist()}
        if self.num_outputs > MAX_PROBABILITIES:
            return {**named, PROBABILITY: probabilities.max(1)}
        return {**named, **dict(zip(self.score_columns, probabilities.T))}

    def label_columns(self, labels: Array, predictions: Outputs) -> Columns:
        return {LABEL: name_numbers(self, labels).tolist()}

    def join_cells(self, values: Sequence[Any]) -> Any:
        return np.stack([np.eye(self.num_outputs)[value] for value in values])


def is_several(cell: object) -> bool:
    """Says whether a cell lists several names."""
    return SEPARATOR in str(cell) or read_list(cell) is not None


def name_numbers(kind: LabelKind, labels: Array) -> Array:
    """Returns the names of numbers of classes, of their shape; `?` where one is not known."""
    return np.array([*kind.names, NOT_KNOWN])[np.where(labels == UNKNOWN, -1, labels)]
