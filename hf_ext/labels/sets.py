"""Labels of which a row has several or none: listed in a cell, or a column of 0 and 1 for each."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ..errors import DataError
from ..files import Json
from .cells import (
    JOINTS,
    NO_LABEL,
    SEPARATOR,
    Checked,
    as_bit,
    count_names,
    find_joints,
    is_missing,
    read_list,
    show_names,
    split_joined,
    write_name,
)
from .classes import NamedKind
from .kind import LabelKind, ReadArguments
from .numbers import ColumnKind
from .outputs import LABEL, PREDICTION, Array, Columns, Outputs

if TYPE_CHECKING:
    from datasets import Dataset

_TAGS = re.compile(r"^(id:|alt_id:|is_a:|relationship: part_of|is_obsolete:|replaced_by:) *(\S+)", re.MULTILINE).findall


def read_hierarchy(path: str) -> dict[str, list[str]]:
    """Returns for each id of an OBO file the terms that it stands for: its own, and all above it.

    Those that it is a, or is part of. Alternative ids stand for their term, obsolete ones for the term that replaces
    them, if one does. obonet, which reads all tags, would bring networkx along.

    Raises:
        DataError: the file cannot be read, holds no term, or terms stand above themselves.
    """
    parents: dict[str, list[str]] = {}
    renamed: dict[str, list[str]] = {}
    above: dict[str, list[str]] = {}
    try:
        for stanza in Path(path).read_text("utf-8").split("\n[Term]\n")[1:]:
            tags: defaultdict[str, list[str]] = defaultdict(list)
            for tag, word in _TAGS(stanza.partition("\n[")[0]):
                tags[tag].append(word)
            (term,) = tags["id:"]
            if "true" in tags["is_obsolete:"]:
                renamed[term] = tags["replaced_by:"]
            else:
                parents[term] = tags["is_a:"] + tags["relationship: part_of"]
                renamed |= {other: [term] for other in tags["alt_id:"]}
        for term in TopologicalSorter(parents).static_order():
            if term in parents:  # not of another file
                above[term] = sorted({term}.union(*(above.get(one, ()) for one in parents[term])))
        if not above:
            raise ValueError("no [Term] stands there")
    except (OSError, ValueError) as error:  # UnicodeDecodeError and CycleError are ValueErrors
        raise DataError(f"--label_hierarchy {path}: {error}. Give an OBO file, such as go-basic.obo.") from error
    return above | {other: above[one] for other, terms in renamed.items() for one in terms if one in above}


class SetKind(NamedKind):
    """Several labels of a row: 1 for those that it has, 0 for others, in a tensor."""

    task = "multilabel"
    takes_columns = True
    constant_name = "label frequencies"
    hub_name = "Labels of protein sequences, several at once"
    returns = "the names of a row's labels; predict_proba returns the probability of each"

    def facts(self, labels: Array) -> Json:
        """Returns how many rows there are, and how many have each label.

        Args:
            labels: (n, labels), NaN is not known.
        """
        return self._facts(labels, np.nansum(labels, 0).astype(int), np.isfinite(labels).sum(0))

    def why_useless(self, facts: Json) -> str:
        """Returns that no label tells training rows apart, or that one of them is known nowhere."""
        unknown = [name for name, known in zip(facts["counts"], facts["num_known"]) if not known]
        if unknown:
            which = show_names(unknown)
            return f"{which}: no training row says whether it has that label. Leave the column out, or fill it in."
        if any(0 < num < known for num, known in zip(facts["counts"].values(), facts["num_known"])):
            return ""
        where = ", ".join(map(repr, self.columns))
        return f"column {where}: all training rows have the same labels, so there is nothing to learn."

    def describe(self) -> str:
        return f"any of {len(self.names):,} labels ({show_names(self.names)})"

    def describe_limits(self) -> list[str]:
        return [f"It knows {self.num_outputs:,} labels and no others."]

    def decode(self, predictions: Outputs) -> Any:
        return [tuple(name for name, value in zip(self.names, row) if value > 0.5) for row in predictions]

    def prediction_columns(self, predictions: Outputs) -> Columns:
        probabilities = np.asarray(predictions, np.float32)
        named = {PREDICTION: [*map(join_set, self.decode(predictions))]}
        return {**named, **dict(zip(self.score_columns, probabilities.T))}

    def label_columns(self, labels: Array, predictions: Outputs) -> Columns:
        return {LABEL: [join_set(np.array(self.names)[row == 1]) for row in labels]}


@dataclass(frozen=True)
class LabelSets(SetKind):
    """Several labels of a row, by their numbers; in batches 1 for those that it has, 0 for others.

    Attributes:
        hierarchy: see `read_hierarchy`: a row has all labels above its own, and none is less probable than one below
            it. Empty without.
    """

    hierarchy: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)

    takes_hierarchy = True
    arrow_type = pa.list_(pa.int32())

    def names_of(self, cell: object) -> list[str]:
        """Returns the labels that a cell lists, also as a list of JSON, Python or Parquet."""
        items = read_list(cell, of_names=True)
        if items is None:
            items = cell.split(SEPARATOR) if isinstance(cell, str) else [cell]
        names = [write_name(item) for item in items if not self.is_missing(item)]
        found = [one for name in names if name != NO_LABEL for one in self._split(name)]
        return [*dict.fromkeys(one for name in found for one in self.hierarchy.get(name, (name,)))]

    def _split(self, name: str) -> list[str]:
        """Returns the labels that a name joins (`a|b`), itself where it is one."""
        for sign in JOINTS:
            joined = split_joined(name, sign)
            if self.find(name) is None and joined and all(self.find(one) is not None for one in joined):
                return joined
        return [name]

    def check_cell(self, cell: object) -> Checked:
        """Returns a cell as the numbers of its labels."""
        if self.is_missing(cell):
            remedy = (
                f"Write {NO_LABEL} for a row that has none of the labels; drop the row if the labels were not assessed."
            )
            return Checked([], "no label in this cell", remedy)
        found = [self.number_of(name) for name in self.names_of(cell)]
        for one in found:
            if one.rule:
                return one._replace(value=[])
        return Checked(sorted({one.value for one in found}))

    def state(self) -> Json:
        return super().state() | ({"hierarchy": self.hierarchy} if self.hierarchy else {})

    def find_names(
        self, cells: pa.ChunkedArray, sequences: pa.ChunkedArray, args: ReadArguments, notes: list[str]
    ) -> LabelKind:
        """Returns the kind with the names in cells, and with a hierarchy those above them.

        Raises:
            DataError: a name that the hierarchy does not have.
        """
        path = args.label_hierarchy
        if path is None:
            return super().find_names(cells, sequences, args, notes)
        every = read_hierarchy(path)
        found = NamedKind.find_names(replace(self, hierarchy=every), cells, sequences, args, notes)
        names = {*found.names}
        if unknown := sorted(names - every.keys()):
            raise DataError(
                f"column {self.columns[0]!r}: {len(unknown):,} labels are no terms of {path}, or obsolete without one "
                f"that replaces them ({show_names(unknown)}). Correct them, or take the file of their release."
            )
        notes.append(f"--label_hierarchy {path}: with all above those in cells there are {len(names):,} labels.")
        kept = {one: terms for one, terms in every.items() if names.issuperset(terms)}
        return replace(self, names=found.names, hierarchy=kept)

    def unpack(self, labels: Sequence[Any]) -> Array:
        found: Array = np.zeros((len(labels), self.num_outputs), self.dtype)
        for row, numbers in zip(found, labels):
            row[numbers] = 1
        return found

    @cached_property
    def _above(self) -> list[Array]:
        """Of each label the numbers of those that it implies."""
        return [np.array([self.numbers[one] for one in self.hierarchy[name]]) for name in self.names]

    def to_predictions(self, logits: Outputs) -> Any:
        return self.shape_outputs(super().to_predictions(logits))

    def shape_outputs(self, values: Array) -> Array:
        """Raises probabilities, (n, labels), to the highest of the labels below, with a hierarchy."""
        if not self.hierarchy:
            return values
        raised = values.T.copy()
        for below, above in zip(values.T, self._above):
            raised[above] = np.maximum(raised[above], below)
        return raised.T

    def _split_counts(self, counts: Counter[str], cells: Sequence[Any], nums: Sequence[int]) -> Counter[str]:
        """Counts `a|b` as a and b where it joins labels."""
        joints = find_joints(counts)
        if not joints:
            return counts
        joined = {one for name in counts for sign in joints if sign in name for one in split_joined(name, sign)}
        alone = [name for name in counts if not any(sign in name for sign in joints)]
        return count_names(replace(self, names=(*alone, *joined)).names_of, cells, nums)

    def _check_names(self, values: Sequence[Any], cells: pa.ChunkedArray, sequences: pa.ChunkedArray) -> None:
        joined = [one for one in self.names if any(sign in one for sign in JOINTS)]
        if joined and max(len(self.read_items(value)) for value in values) < 2:
            raise DataError(
                f"column {self.columns[0]!r}: --task multilabel reads labels separated by {SEPARATOR!r}, and no cell "
                f"names several ({show_names(joined)}). Write it between them; or give --task classification."
            )

    def facts_of(self, rows: Dataset) -> Json:
        column = rows.with_format("arrow")[:]["label"].combine_chunks()
        size = (len(column), self.num_outputs)
        counts = np.bincount(column.flatten(), minlength=size[1])
        return self._facts(np.broadcast_to(0, size), counts, np.full(size[1], size[0]))


class LabelColumns(ColumnKind, SetKind):
    """The same with a column of 1, 0 or nothing, not known, for each label."""

    arrow_type = pa.float64()

    @classmethod
    def fits(cls, columns: Sequence[str], names: Sequence[str]) -> bool:
        return len(columns) > 1

    def check_cell(self, cell: object) -> Checked:
        """Returns a cell as 1, 0 or NaN."""
        value = math.nan if is_missing(cell) else as_bit(cell)
        wrong = Checked(math.nan, "neither 0 nor 1", "Write 1 for yes, 0 for no, nothing for not known.")
        return wrong if value is None else Checked(value)


def join_set(names: Sequence[str]) -> str:
    """Returns the labels of a row, as a cell lists them: between `;`, as a JSON list where a name has one."""
    if any(SEPARATOR in name for name in names):
        return json.dumps([*names])
    return SEPARATOR.join(names) if len(names) else NO_LABEL
