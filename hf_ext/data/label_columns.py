"""Label columns of a table, read as their kind says: numbers with bounds, classes, lists as long as sequences.

What stands for no value is refused, and so is what does not fit its sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

from ..labels import UNKNOWN, LabelKind
from ..labels.cells import SIGNS, Judged, is_missing, judge_label, shorten, split_items, split_letters, unwrap
from ..labels.classes import as_bit
from ..labels.kinds import reader_of
from ..labels.numbers import LIST_REMEDY
from .arguments import DataArguments
from .columns import as_array
from .reading import SOURCE_ROW
from .row_errors import RowError, judge_cells

UNSAID = 2  # by a mark: whether its label is a bound
# 1 marks a label the assay could not go below, so the true value is at or below it.
MARKS = {"": UNSAID, "0": 0, "0.0": 0, "false": 0, "1": -1, "1.0": -1, "true": -1, **SIGNS}

# Numbers that other programs write where nothing was measured.
NINES = (99.0, 999.0, 9999.0, 99999.0, 999999.0, 99.9, 99.99, 999.9, 999.99, 9999.9, 9999.99)
MIN_OTHERS = 3  # distinct labels, which say where measurements lie
FAR = 10.0  # ranges of the other labels between them and a placeholder
MAX_RATIO = 100.0  # of positive labels: where they spread further, such as Kd in nM, 999 may be measured


def read_labels(
    table: pa.Table, kind: LabelKind, args: DataArguments, sequences: pa.ChunkedArray
) -> tuple[dict[str, Any], list[RowError]]:
    """The column `label` of rows, of one number per row also `bound`, and an error for each row that is refused.

    Args:
        table: n rows with the columns of `kind`, those that `args` name beside it, and `source_row`.
        sequences: n, cleaned: residues have as many labels. "" where the sequence was refused.

    Cost: each distinct cell is judged once, see `_read_numbers`.
    """
    rows, name = table[SOURCE_ROW].to_numpy(), kind.columns[0]
    if kind.is_one_number:
        return _read_numbers(table, name, args.censor_column, rows)
    if kind.has_values:
        label, errors = _read_several(table, kind, rows)
    elif kind.per_residue:
        label, errors = _read_residues(table, kind, args, sequences, rows)
    else:
        reader = reader_of(kind)
        found, judged, errors = judge_cells(table[name], reader.judge, name, rows)
        label = found.spread([one.value for one in judged], reader.arrow_type)
    return {"label": label}, errors


def _read_several(table: pa.Table, kind: LabelKind, rows: np.ndarray) -> tuple[Any, list[RowError]]:
    """A value for each column, or each number that the cells of a column list; NaN where it is not known."""
    values: list[np.ndarray] = []
    errors: list[RowError] = []
    columns = [(name, table[name]) for name in kind.columns]
    if len(columns) < kind.num_outputs:
        columns, errors = _split_lists(columns[0][1], kind, rows)
    for name, column in columns:
        found, judged, refused = judge_cells(column, reader_of(kind).judge, name, rows)
        values.append(np.array([one.value for one in judged], np.float64)[found.number])
        errors += refused
        if kind.is_numeric:
            errors += find_placeholders(values[-1], np.zeros(len(rows)), name, rows)
    labels, named = np.stack(values, 1), {error.row for error in errors}
    rule, remedy = "no label of the row is known", "Fill in one of them, or leave the row out."
    bare = [row for row in rows[np.isnan(labels).all(1)].tolist() if row not in named]
    errors += [RowError(row, kind.columns[0], "", rule, remedy) for row in bare]
    return pa.array([*labels], pa.list_(pa.float64())), errors


def _split_lists(
    column: pa.ChunkedArray, kind: LabelKind, rows: np.ndarray
) -> tuple[list[tuple[str, pa.ChunkedArray]], list[RowError]]:
    """Returns a column for each number that cells list, by its name, and an error for each list of other length."""
    lists, errors = [], []
    for row, cell in zip(rows.tolist(), column.to_pylist()):
        items = [None] * kind.num_outputs if is_missing(cell) else split_items(cell)
        if len(items) != kind.num_outputs:
            rule = f"{len(items)} numbers, not {kind.num_outputs}"
            errors.append(RowError(row, kind.columns[0], shorten(cell), rule, "Write nan where one is not known."))
            items = [None] * kind.num_outputs
        lists.append(items)
    return [(name, pa.chunked_array([as_array(cells)])) for name, cells in zip(kind.names, zip(*lists))], errors


def _read_residues(
    table: pa.Table, kind: LabelKind, args: DataArguments, sequences: pa.ChunkedArray, rows: np.ndarray
) -> tuple[Any, list[RowError]]:
    """A label for each residue, not known where the mask is 0."""
    reader, name, mask_name = reader_of(kind), kind.columns[0], args.mask_column or ""
    found, judged, errors = judge_cells(table[name], reader.judge, name, rows)
    masks: list[Any] = [None] * len(rows)
    unknown = np.nan if kind.is_numeric else UNKNOWN
    if mask_name:
        given, judged_masks, refused = judge_cells(table[mask_name], _judge_mask, mask_name, rows)
        masks, errors = [judged_masks[number].value for number in given.number], errors + refused
    named, labels = {error.row for error in errors}, []
    cells = zip(rows.tolist(), found.number, masks, sequences.to_pylist())
    for place, (row, number, mask, sequence) in enumerate(cells):
        values, length, rule = np.array(judged[number].value), len(sequence), ""
        if row not in named and length:
            if len(values) != length:
                rule = f"{len(values)} labels for a sequence of {length} residues"
            elif mask is not None and len(mask) != length:
                rule = f"a mask of {len(mask)} for {length} labels"
            else:
                values = values if mask is None else np.where(mask, values, unknown)
                rule = "" if (np.isfinite(values) & (values != UNKNOWN)).any() else "no residue's label is known"
        if rule:
            column = mask_name if rule.startswith("a mask") else name
            shown = shorten(table[column][place].as_py())
            errors.append(
                RowError(row, column, shown, rule, "Give each residue one (a stop * has none), or leave the row out.")
            )
        labels.append(values)
    if kind.is_numeric:
        flat, of_row = np.concatenate([*labels, []]), np.repeat(rows, [*map(len, labels)])
        nines = {error.row: error for error in find_placeholders(flat, np.zeros(len(flat)), name, of_row)}
        errors += [RowError(row, name, error.value, error.rule, LIST_REMEDY) for row, error in nines.items()]
    return pa.array(labels, reader.arrow_type), errors


def _judge_mask(cell: Any) -> Judged:
    """A mask as bools, one for each residue; None where nothing is said: all labels are known."""
    if is_missing(cell):
        return Judged(None)
    items = split_letters(cell)
    known = {item: as_bit(item) for item in {*items}}
    if wrong := [item for item, bit in known.items() if bit is None]:
        rule = f"a mask that is neither 0 nor 1 at position {items.index(wrong[0]) + 1} of {len(items)}"
        return Judged(None, rule, "Write 1 where the label is known, 0 where it is not.")
    return Judged(np.array([known[item] for item in items]) == 1)


def label_facts(rows: Dataset, kind: LabelKind) -> dict[str, Any]:
    """What the labels of a split hold, JSON-able; see the kind's `facts`."""
    column = rows.with_format("arrow")[:]["label"].combine_chunks()
    is_list = pa.types.is_list(column.type)
    values = (column.flatten() if is_list else column).to_numpy(zero_copy_only=False)
    return reader_of(kind).facts(values.reshape(len(column), -1) if is_list and not kind.per_residue else values)


def _read_numbers(
    table: pa.Table, column: str, mark_column: str | None, rows: np.ndarray
) -> tuple[dict[str, Any], list[RowError]]:
    """Turns cells into finite numbers and bounds; refuses what would poison a loss, naming the row.

    Args:
        column: of n cells; numbers, or text such as `7.3`, `<=7`, `>10.5`.
        mark_column: of n marks, or None: `<`, `<=`, `>`, `>=`, `=`, empty, or 0/1, where 1 says that the true value is
            at or below the label.
        rows: (n,) the row of each cell in its file.

    Returns:
        `label`, float64 (n,), NaN where refused; `bound`, int8 (n,): -1 true value <= label, 0 exact, +1 >= label; and
        an error for each row that is refused: missing, other text (digits of other scripts and 1_000 too), beyond
        +-1e30, a missing value written as nines (`find_placeholders`), an unknown mark, and a mark that contradicts
        the label's own sign.

    Cost: each distinct cell is parsed once; 0.3 s for 100,000 distinct ones.
    """
    found, judged, errors = judge_cells(table[column], lambda cell: judge_label(unwrap(cell)), column, rows)
    labels, bounds = np.array([one.value for one in judged], np.float64).reshape(-1, 2)[found.number].T
    if mark_column:
        said, judged, refused = judge_cells(table[mark_column], _judge_mark, mark_column, rows)
        given = np.array([one.value for one in judged], np.float64)[said.number]
        rule, remedy = "the censoring mark contradicts the sign written in the label", "Correct one of them."
        wrong = np.flatnonzero((given != UNSAID) & (bounds != 0) & (given != bounds))
        shown = [shorten(said.cells[said.number[i]].as_py()) for i in wrong]
        errors += refused
        errors += [RowError(int(rows[i]), mark_column, mark, rule, remedy) for i, mark in zip(wrong, shown)]
        bounds = np.where(given == UNSAID, bounds, given)
    errors += find_placeholders(labels, bounds, column, rows)
    return {"label": pa.array(labels), "bound": pa.array(bounds.astype(np.int8))}, errors


def _judge_mark(cell: object) -> Judged:
    mark = "" if is_missing(cell) else str(cell).strip().lower()
    if mark in MARKS:
        return Judged(MARKS[mark])
    remedy = "Use <, <=, >, >=, = or empty, or 0/1 where 1 means true value <= label."
    return Judged(UNSAID, "not a censoring mark", remedy)


def find_placeholders(labels: np.ndarray, bounds: np.ndarray, column: str, rows: np.ndarray) -> list[RowError]:
    """Refuses nines (-999, 9999, ...) that stand far outside of all other labels; a bound (`<=999`) is none.

    Certain cases only: a negative one among labels of which none is negative, or one that is ten times the range of the
    other labels away from them; a positive one not where labels spread over two decades, as concentrations do.
    """
    is_nines = np.isin(np.abs(labels), NINES) & (bounds == 0)
    others = np.unique(labels[np.isfinite(labels) & ~is_nines]) if is_nines.any() else labels[:0]
    if len(others) < MIN_OTHERS:
        return []
    low, high = float(others[0]), float(others[-1])
    may_be_measured = (labels > 0) & (low > 0) & (high > MAX_RATIO * low)
    is_far = (np.maximum(labels - high, low - labels) > FAR * (high - low)) & ~may_be_measured
    rule = f"the label reads as a missing value, all others lie between {low:g} and {high:g}"
    remedy = "Leave the row out (empty is not 0), or write the limit that was measured, such as <=5."
    found = np.flatnonzero(is_nines & (is_far | ((labels < 0) & (low >= 0))))
    return [RowError(int(rows[i]), column, f"{labels[i]:g}", rule, remedy) for i in found]
