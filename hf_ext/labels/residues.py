"""Labels of the residues of a sequence; a class for each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ArgumentError, DataError
from .cells import (
    NO_LABEL,
    UNKNOWN,
    Checked,
    as_bit,
    drop_dash,
    is_missing,
    is_unknown,
    shorten,
    split_letters,
    write_name,
)
from .classes import Classes, NamedKind, name_numbers
from .columns import LabelTable, Read, RowError, as_text
from .kind import LabelKind, ReadArguments, Steps
from .outputs import LABEL, PREDICTION, Array, Columns, FloatArray, IntArray, Outputs

if TYPE_CHECKING:
    from torch import Tensor

MISSING = Checked([], "the labels are missing", "Fill them in, or leave the row out.")
MOST = 0.5


class ResidueKind(LabelKind):
    """A label for each residue, in one column of lists or words as long as the sequences of another."""

    unknown: ClassVar[float] = UNKNOWN  # in the column `label`
    takes_columns = False
    takes_teacher = False
    per_residue = True
    baselines = ()
    repeats = False
    label_shape = ()
    counted = "residues"
    steps = Steps(16, 1500, 6000, 3)
    head_sizes = (256,)  # each residue passes through it, hundreds in a row
    or_pooling = ""
    why_one_head = "here each row has a label for each residue"
    why_last_layer = "each residue has a label"

    def read(self, table: LabelTable) -> Read:
        """Returns a list for each row, unknown where the mask is 0; refuses one of another length than its sequence."""
        (name,) = self.columns
        found, checked, errors = table.check(name, self.check_cell)
        masks = [None] * len(table.rows)
        if mask_name := table.mask_column or "":
            given, checked_masks, refused = table.check(mask_name, _check_mask)
            masks = [checked_masks[number].value for number in given.number]
            errors = [*errors, *refused]
        named = {error.row for error in errors}
        labels = []
        lengths = map(len, table.sequences.to_pylist())
        for place, (row, number, mask, length) in enumerate(zip(table.rows.tolist(), found.number, masks, lengths)):
            values = np.array(checked[number].value)
            rule = ""
            if row not in named and length:
                values, rule = self._match(values, mask, length)
            if rule:
                column = mask_name if rule.startswith("a mask") else name
                shown = shorten(table.table[column][place].as_py())
                remedy = "Give each residue one (a stop * has none), or leave the row out."
                errors.append(RowError(row, column, shown, rule, remedy))
            labels.append(values)
        errors += self.find_wrong(labels, name, table.rows)
        return {"label": pa.array(labels, self.arrow_type)}, errors

    def _match(self, values: Array, mask: Array | None, length: int) -> tuple[Array, str]:
        """Returns the labels that the mask leaves, and the rule that refuses them."""
        if len(values) != length:
            return values, f"{len(values)} labels for a sequence of {length} residues"
        if mask is not None and len(mask) != length:
            return values, f"a mask of {len(mask)} for {length} labels"
        values = values if mask is None else np.where(mask, values, self.unknown)
        is_known = np.isfinite(values) & (values != UNKNOWN)
        return values, "" if is_known.any() else "no residue's label is known"

    def _check_columns(self, args: ReadArguments, told: str) -> None:
        names = [*args.sequence_columns, *args.number_columns]
        if len(names) > 1:
            raise ArgumentError(f"{told}: residues of one sequence have labels; name one of {' '.join(names)}.")

    def check_options(self, loss: str, binder_threshold: float | None, pooling: Sequence[str]) -> None:
        if [*pooling] != ["mean"]:
            raise ArgumentError(f"--pooling {' '.join(pooling)}: leave it out where each residue has a label.")
        super().check_options(loss, binder_threshold, pooling)

    def check_sequences(self, columns: Sequence[str], nums: Sequence[int]) -> None:
        """Allows one sequence: its residues differ."""

    def check_inputs(self, inputs: Sequence[str]) -> None:
        if len(inputs) > 1 or "+" in "".join(inputs):
            raise ArgumentError(
                f"Encoder inputs {[*inputs]} with {self.task}: the residues of one sequence column have labels. Give "
                "one column and one encoder."
            )

    def stack(self, values: Sequence[Any], longest: int | None = None) -> Tensor:
        import torch

        rows = [torch.from_numpy(np.array(value[:longest], self.dtype)) for value in values]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.unknown)
        return self._mark_unknown(padded)

    def flatten(self, labels: Outputs) -> FloatArray:
        return np.concatenate([np.empty(0), *(np.asarray(row, np.float64) for row in labels)])

    def line_up(
        self, predictions: Outputs, labels: Outputs, as_array: Callable[[Any], Array]
    ) -> tuple[Array, FloatArray, IntArray]:
        truth = [as_array(row).astype(np.float64) for row in labels]
        values = [as_array(row) for row in predictions]
        for i, (row, of_row) in enumerate(zip(values, truth)):
            if len(row) < len(of_row) and (of_row[len(row) :] != UNKNOWN).any():
                raise DataError(
                    f"row {i}: predictions of {len(row)} residues for labels of {len(of_row)}: one each is needed."
                )
        lengths = [min(len(row), len(of_row)) for row, of_row in zip(values, truth)]
        row = np.repeat(np.arange(len(truth)), lengths)
        if not len(row):
            return np.empty((0, self.num_outputs)), np.empty(0), row
        joined = np.concatenate([each[:length] for each, length in zip(truth, lengths)])
        known = np.isfinite(joined) & (joined != UNKNOWN)
        found = np.concatenate([each[:length] for each, length in zip(values, lengths)])[known]
        return found.reshape(-1, self.num_outputs), joined[known], row[known]

    def split_rows(self, logits: Outputs, lengths: Sequence[int]) -> Any:
        return [row[:length] for row, length in zip(logits, lengths, strict=True)]

    def read_outputs(self, outputs: Array) -> Any:
        is_real = (outputs != UNKNOWN).reshape(*outputs.shape[:2], -1).any(2)
        lengths = np.where(is_real, np.arange(1, 1 + is_real.shape[1]), 0).max(1, initial=0).tolist()
        return self.to_predictions(self.split_rows(outputs, lengths))

    def covers(self, scored: str, sequence: str) -> bool:
        """Says whether a line is of this sequence: of one that a run cut, what it scored."""
        return scored.startswith(sequence)


class ResidueClasses(ResidueKind, Classes):
    """A class for each residue: a letter, or a name in a list."""

    task = "residue_classification"
    arrow_type = pa.list_(pa.int64())
    chart = ""
    hub_task = "token-classification"
    hub_name = "Classification of residues"
    returns = "a class for each residue of a row; predict_proba returns the probability of each"

    @property
    def of_rows(self) -> LabelKind:
        return Classes(self.columns, self.names)

    def names_of(self, cell: object) -> list[str]:
        if is_missing(cell):
            return []
        return [name for name in map(write_name, {*split_letters(cell)}) if not is_unknown(name)]

    def read_items(self, cell: object) -> list[Any]:
        return split_letters(cell)

    def check_cell(self, cell: object) -> Checked:
        """Returns a cell as a list of numbers of classes."""
        if is_missing(cell):
            return MISSING
        items = split_letters(cell)
        is_dash_unknown = NO_LABEL not in drop_dash([*self.names, NO_LABEL])
        numbers = {}
        for item in {*items}:
            name = write_name(item)
            number = self.find(name)
            if number is None and not is_unknown(name) and not (name == NO_LABEL and is_dash_unknown):
                place = f" as at position {items.index(item) + 1} of {len(items)}"
                return self.number_of(name, place)._replace(value=[])
            numbers[item] = UNKNOWN if number is None else number
        return Checked([numbers[item] for item in items])

    def _count(self, cells: Sequence[Any], nums: Sequence[int], args: ReadArguments, notes: list[str]) -> Counter[str]:
        counts = super()._count(cells, nums, args, notes)
        for name in counts.keys() - drop_dash(counts):
            num = counts.pop(name)
            notes.append(f"column {self.columns[0]!r}: {name!r} beside digits is read as not known, in {num:,} rows.")
        return counts

    def _check_names(self, values: Sequence[Any], cells: pa.ChunkedArray, sequences: pa.ChunkedArray) -> None:
        if pc.mean(pc.equal(as_text(cells), as_text(sequences))).as_py() > MOST:
            raise DataError(f"column {self.columns[0]!r} holds the sequences themselves. Name that of labels.")

    def _doubt_names(self, counts: Mapping[str, int], num_rows: int) -> list[str]:
        return NamedKind._doubt_names(self, counts, num_rows)

    def describe(self) -> str:
        return f"{super().describe()} for each residue"

    def decode(self, predictions: Outputs) -> Any:
        names = np.array(self.names)
        found = [names[np.argmax(row, axis=-1)] for row in predictions]
        return ["".join(row) for row in found] if all(len(name) == 1 for name in self.names) else found

    def prediction_columns(self, predictions: Outputs) -> Columns:
        return {PREDICTION: [*map(join_letters, self.decode(predictions))]}

    def label_columns(self, labels: Array, predictions: Outputs) -> Columns:
        rows = self.split_rows(name_numbers(self, labels), [*map(len, predictions)])
        return {LABEL: [*map(join_letters, rows)]}

    def join_cells(self, values: Sequence[Any]) -> Any:
        return [np.eye(self.num_outputs)[value] for value in values]


def _check_mask(cell: object) -> Checked:
    """Returns a mask as bools, one for each residue; None where nothing is said: all labels are known."""
    if is_missing(cell):
        return Checked(None)
    items = split_letters(cell)
    known = {item: as_bit(item) for item in {*items}}
    if wrong := [item for item, bit in known.items() if bit is None]:
        rule = f"a mask that is neither 0 nor 1 at position {items.index(wrong[0]) + 1} of {len(items)}"
        return Checked(None, rule, "Write 1 where the label is known, 0 where it is not.")
    return Checked(np.array([known[item] for item in items]) == 1)


def join_letters(names: Sequence[str]) -> str:
    """Returns the classes of residues as one text: spaces between longer names; a JSON list where one has a space."""
    if any(" " in name for name in names):
        return json.dumps([*names])
    return ("" if all(len(name) == 1 for name in names) else " ").join(names)
