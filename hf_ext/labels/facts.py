"""What the cells of label columns have in common, and with their sequences, from which `--task auto` decides."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from .cells import (
    IS_DIGITS,
    NUMBER,
    SEPARATOR,
    as_bit,
    beside_minus_1,
    check_label,
    drop_dash,
    drop_zeros,
    find_joints,
    is_missing,
    is_number,
    is_unknown,
    read_list,
    split_items,
    split_letters,
    unwrap,
    write_name,
)

NUM_SEEN = 1000  # labels whose form is looked at
SOME = 0.1  # a share of them
MOST = 0.5
NEARLY_ALL = 0.95
MAX_LETTERS = 10  # of residue classes; residues are 20
LONG_NUMBER = 15  # digits; of more no float64 is made, so they stand for residues
MIN_CLASSES = 3  # of whole numbers that are taken for classes
MIN_ROWS = 3  # of each of these on average

# With a unit, a bound, a decimal comma.
_MEANT_AS_NUMBER = re.compile(rf"[<>=\u2264\u2265\s]*{NUMBER}(,[0-9]+)?(\s.*|%|[fpnum\u00b5]?M)?", re.DOTALL).fullmatch
_HAS_LEADING_ZERO = re.compile("0[0-9]+").fullmatch
_HAS_DECIMALS = re.compile(r"[+-]?[0-9]*\.[0-9]+([eE][+-]?[0-9]+)?").fullmatch
_IS_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+").fullmatch


@dataclass(frozen=True)
class Facts:
    """What the cells of a label column have in common, and with their sequences.

    Attributes:
        column: n cells.
        cells: the first 1,000 that hold something, lists of one item as that item.
        lengths: of each one's sequence, in letters alone and in all characters; none where residues cannot have labels.
    """

    column: pa.ChunkedArray
    cells: list[Any]
    lengths: list[tuple[int, int]]

    @classmethod
    def of(cls, column: pa.ChunkedArray, sequences: pa.ChunkedArray | None) -> Facts:
        """Collects them; `sequences` (n) are as their file has them: blanks and stops are no residues."""
        numbered = enumerate(chain.from_iterable(chunk.to_pylist() for chunk in column.chunks))
        seen = dict(islice(((i, cell) for i, cell in numbered if not is_missing(cell)), NUM_SEEN))
        texts = [] if sequences is None else [str(sequences[i].as_py() or "").strip() for i in seen]
        lengths = [(sum(map(str.isalpha, text)), len(text)) for text in texts]
        is_wrapped = all(len(read_list(cell) or ()) == 1 for cell in seen.values())
        return cls(column, [unwrap(cell) if is_wrapped else cell for cell in seen.values()], lengths)

    def fraction(self, is_so: Callable[[Any], Any]) -> float:
        """Returns the fraction of cells of which `is_so` holds."""
        return sum(map(bool, map(is_so, self.cells))) / max(1, len(self.cells))

    @cached_property
    def distinct(self) -> set[str]:
        """Names of all cells of the column that hold something."""
        kind = self.column.type
        is_compared = not (pa.types.is_nested(kind) or pa.types.is_dictionary(kind))
        cells = pc.unique(self.column) if is_compared else self.column
        return {write_name(unwrap(cell)) for cell in cells.to_pylist() if not is_missing(cell)}

    # Labels of residues.

    def fit(self, split: Callable[[Any], Iterable[Any]]) -> list[Any]:
        """Returns the cells that have as many labels as residues, one by one; none unless nearly all cells have.

        Or most of them, if they are of several lengths and mostly unlike each other, which classes are not.
        """
        labels = [[*split(cell)] for cell in self.cells] if self.lengths else []
        found = [one for one, lengths in zip(labels, self.lengths) if 1 < len(one) in lengths]
        share = len(found) / max(1, len(labels))
        repeats = len({*map(str, found)}) < MOST * len(found)
        has_one_length = len({*map(len, found)}) < 2
        words = [one for one in found if len({*map(str, one)}) > len(one) / 2]
        if has_one_length and repeats and len(words) > MOST * len(found):
            return []  # words that happen to be as long as all sequences: their letters differ, those of states repeat
        if share < NEARLY_ALL and (share < MOST or repeats or has_one_length):
            return []
        return found

    @cached_property
    def residues(self) -> list[list[Any]]:
        """Labels of residues by cell; none of cells that may as well be numbers."""
        found = self.fit(split_letters)
        digits = [cell for cell in self.cells if isinstance(cell, str) and IS_DIGITS(cell)]
        is_coded = any(map(_HAS_LEADING_ZERO, digits)) or len({*map(len, found)}) > 1
        if is_coded and len(digits) == len(self.cells):
            return found
        may_be_numbers = self.fraction(lambda cell: len(str(cell)) <= LONG_NUMBER and not check_label(cell).rule)
        return [] if may_be_numbers >= MOST else found

    @cached_property
    def residue_labels(self) -> set[str]:
        """The known ones."""
        found = {write_name(item) for item in {*chain.from_iterable(self.residues)} if not is_unknown(item)}
        return drop_dash(found)

    def are_residue_classes(self) -> bool:
        """Says whether residues have a few letters or digits."""
        labels = self.residue_labels
        whole = {*map(drop_zeros, labels)}
        are_digits = all(map(IS_DIGITS, whole)) and (whole <= {"0", "1"} or any(map(IS_DIGITS, labels)))
        return 0 < len(labels) <= MAX_LETTERS and (are_digits or not any(map(_is_meant_as_number, labels)))

    def are_residue_numbers(self) -> bool:
        """Says whether residues have numbers, in lists."""
        labels = [*self.residue_labels]
        is_list = any(split_items(cell) != [cell] for cell in self.cells)
        return bool(labels) and is_list and sum(map(_is_meant_as_number, labels)) >= MOST * len(labels)

    def have_minus_1(self) -> bool:
        """Says whether residues, or rows, have -1 beside classes that are digits."""
        rest = beside_minus_1(self.residue_labels or {*map(drop_zeros, self.distinct)})
        are_classes = all(map(IS_DIGITS, rest)) and len(rest) <= MAX_LETTERS if self.residues else rest == {"0", "1"}
        return bool(rest) and are_classes

    def have_blanks(self) -> bool:
        """Says whether labels are as long as the sequence if blanks count."""
        texts = [cell for cell in self.cells if isinstance(cell, str)]
        has_blanks = any(" " in cell for cell in texts) and len(texts) == len(self.cells)
        return has_blanks and max(map(len, " ".join(texts).split())) > 1 and bool(self.fit(str))

    def have_decimal_commas(self) -> bool:
        """Says whether residues have numbers such as `0,7`."""
        found = self.fit(lambda cell: str(cell).split())
        return any(map(_IS_DECIMAL_COMMA, chain.from_iterable(found)))

    # Labels of rows.

    @cached_property
    def vector_length(self) -> int:
        """How many numbers, or yes and no, nearly all cells list; 0 where they list names, or not as many."""
        lists = [_read_vector(cell) for cell in self.cells]
        length, num = Counter(map(len, lists)).most_common(1)[0] if lists else (0, 0)
        is_vector = all(is_number(item) or as_bit(item) is not None for item in chain.from_iterable(lists))
        return length if is_vector and num >= NEARLY_ALL * len(lists) else 0

    def are_bit_vectors(self) -> bool:
        """Says whether each cell lists as many 0 and 1."""
        bits = {*map(as_bit, chain.from_iterable(map(_read_vector, self.cells)))}
        return bits <= {0, 1} and self.fraction(lambda cell: len(_read_vector(cell)) > 1) >= MOST

    def are_lists_of_numbers(self) -> bool:
        """Says whether each cell is a list of as many numbers."""
        return self.vector_length > 1 and self.fraction(lambda cell: read_list(cell) is not None) == 1

    def are_decimals(self) -> bool:
        """Says whether cells list numbers with decimals, which name no labels."""
        items = [item for cell in self.cells if len(_read_vector(cell)) > 1 for item in _read_vector(cell)]
        return 2 * sum(bool(_HAS_DECIMALS(str(item))) for item in items) > len(items)

    def are_shortened(self) -> bool:
        """Says whether numpy wrote `...` for most of a long list."""
        return any("..." in (read_list(cell) or ()) for cell in self.cells)

    def are_bits_but_few(self) -> bool:
        """Says whether nearly all cells, and not all, are 0 or 1."""
        return self.are_numbers() and NEARLY_ALL <= self.fraction(lambda cell: as_bit(cell) is not None) < 1

    def are_numbers(self) -> bool:
        """Says whether most cells are meant as a number."""
        return self.fraction(_is_meant_as_number) >= MOST

    def are_counted_classes(self) -> bool:
        """Says whether numbers are 0 and 1, or whole ones from 0 on of which none is left out and each has its rows."""
        if not self.are_numbers():
            return False
        num = len(self.distinct)
        is_whole = not pa.types.is_floating(self.column.type)
        counted = {*map(str, range(num))}
        is_counted = is_whole and num >= MIN_CLASSES and len(self.column) >= MIN_ROWS * num and self.distinct == counted
        return is_counted or {*map(as_bit, self.distinct)} == {0.0, 1.0}

    def are_sets(self) -> bool:
        """Says whether cells are lists, or names that a separator joins."""
        listed = self.fraction(lambda cell: SEPARATOR in str(cell) or read_list(cell) is not None)
        joints = find_joints({write_name(cell) for cell in self.cells})
        return listed > SOME or self.fraction(lambda cell: any(sign in str(cell) for sign in joints)) > SOME


def _read_vector(cell: Any) -> list[Any]:
    """Returns the items of a list, or of text between spaces and semicolons."""
    items = read_list(cell)
    if items is None:
        items = cell.replace(SEPARATOR, " ").split() if isinstance(cell, str) else [cell]
    return items


def _is_meant_as_number(cell: Any) -> bool:
    return isinstance(cell, int | float) or (isinstance(cell, str) and bool(_MEANT_AS_NUMBER(cell.strip())))
