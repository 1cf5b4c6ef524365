"""What a linear model can read off sequences: which residue stands where, or how often each k-mer occurs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from ..errors import ArgumentError, DataError

K = 3
MAX_FEATURES = 2048  # ridge decomposes a matrix of this size at most: seconds, not minutes
CHUNK_RESIDUES = 2_000_000
_LETTERS = 26  # A-Z

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class _Column:
    """How one column is read: `length` of its aligned sequences, or None for k-mers; the codes that are features;
    whether rows lack it."""

    length: int | None
    codes: IntArray
    has_missing: bool = False


class SequenceFeatures:
    """Counts of (position, residue) where all sequences of a column are equally long, of 3-mers where they are not.

    A column with one value in training is left out, as is every count that does not vary there. Each of the other
    columns keeps at most its equal share of 2,048 features, those that vary most in training. A missing sequence, "",
    has counts of 0, and is none of those whose lengths are compared.

    Args:
        train: one list of n sequences (upper-case letters) per column.
        others: the same columns of rows to be predicted later; only their lengths are looked at.

    Raises:
        ArgumentError: no columns, or none that varies in `train`.
        DataError: columns of different length, or a character other than A-Z.

    Attributes: `name`, "one-hot", "3-mer" or "one-hot and 3-mer"; `num_features`; `num_counts`, how many vary in all.

    Cost: goes with the distinct sequences: 2 s for 50,000 of 250 residues; `transform` returns 4 kB a row at most.
    """

    def __init__(self, train: Sequence[Sequence[str]], others: Sequence[Sequence[Sequence[str]]] = ()) -> None:
        _check_columns(train)
        varying = [i for i, column in enumerate(train) if len(set(column)) > 1]
        if not varying:
            raise ArgumentError("No column of sequences varies in training: there is nothing a baseline could read.")
        share = MAX_FEATURES // len(varying)
        self._columns: dict[int, _Column] = {}
        self.num_counts = 0
        for i in varying:
            found = {len(one) for rows in (train, *others) for one in rows[i]}
            lengths = found - {0}
            length = lengths.pop() if len(lengths) == 1 else None
            variance = _variance(train[i], length)
            self.num_counts += int(np.count_nonzero(variance))
            most = np.argsort(-variance, kind="stable")[: min(share, np.count_nonzero(variance))]
            self._columns[i] = _Column(length, np.sort(most), 0 in found)
        self.num_features = sum(len(column.codes) for column in self._columns.values())
        kinds = {"one-hot" if column.length else f"{K}-mer" for column in self._columns.values()}
        self.name = " and ".join(sorted(kinds, reverse=True))

    def transform(self, columns: Sequence[Sequence[str]]) -> NDArray[np.float16]:
        """Returns the features of rows, (n, num_features); arguments and `DataError` as above."""
        _check_columns(columns)
        blocks = [_select(columns[i], column) for i, column in self._columns.items()]
        return np.concatenate(blocks, axis=1)

    def directions(self, columns: Sequence[Sequence[str]]) -> NDArray[np.float32]:
        """Returns features of length 1, each column with the same share; (n, num_features), arguments as above.

        The inner product of two rows is the mean over columns of the cosine of their counts: of aligned sequences the
        share of equal residues among the positions that vary. A column without any counted feature is 0; two missing
        sequences are equal, and unlike all others.
        """
        _check_columns(columns)
        blocks = []
        for i, column in self._columns.items():
            block = _select(columns[i], column).astype(np.float32)
            if column.has_missing:
                block = np.column_stack([block, np.array([not one for one in columns[i]], np.float32)])
            length = np.sqrt(np.einsum("nd,nd->n", block, block) * len(self._columns))
            blocks.append(np.divide(block, length[:, None], out=block, where=length[:, None] > 0))
        return np.concatenate(blocks, axis=1)


def _select(sequences: Sequence[str], column: _Column) -> NDArray[np.float16]:
    distinct, index, _ = _distinct(sequences)
    values = np.empty((len(distinct), len(column.codes)), np.float16)  # whole numbers: exact up to 2,048
    for start, counts in _count(distinct, column.length):
        values[start : start + counts.shape[0]] = counts[:, column.codes].toarray()
    return values[index]


def _variance(sequences: Sequence[str], length: int | None) -> NDArray[np.float64]:
    """Variance of every count over the rows, (codes,); exactly 0 where it is the same in all rows."""
    distinct, _, weights = _distinct(sequences)
    total, squares = 0.0, 0.0
    for start, counts in _count(distinct, length):
        rows = weights[start : start + counts.shape[0]]
        total = total + counts.T @ rows
        squares = squares + counts.multiply(counts).T @ rows
    num_rows = len(sequences)
    # Sums of whole numbers are exact, so that a count that never varies gives 0 and not a rounding error.
    return np.asarray(num_rows * squares - total**2) / num_rows**2


def _distinct(sequences: Sequence[str]) -> tuple[list[str], IntArray, NDArray[np.float64]]:
    """Distinct sequences in order of appearance, which of them each row holds, and how many rows hold each."""
    position: dict[str, int] = {}
    index = np.fromiter((position.setdefault(one, len(position)) for one in sequences), np.int64, len(sequences))
    return list(position), index, np.bincount(index, minlength=len(position)).astype(np.float64)


def _count(sequences: list[str], length: int | None) -> Iterator[tuple[int, csr_matrix]]:
    """Yields (first sequence, counts): (sequences, codes) float64, in pieces of about `CHUNK_RESIDUES`."""
    size = max(1, CHUNK_RESIDUES // max(1, max(map(len, sequences), default=1)))
    for start in range(0, len(sequences), size):
        yield start, _count_chunk(sequences[start : start + size], length)


def _count_chunk(sequences: list[str], length: int | None) -> csr_matrix:
    letters = np.frombuffer("".join(sequences).encode("latin-1", "replace"), np.uint8).astype(np.int64) - ord("A")
    if len(letters) and not 0 <= letters.min() <= letters.max() < _LETTERS:
        wrong = next(one for one in sequences if not (one.isascii() and one.isalpha() and one.isupper()))
        raise DataError(f"Sequence {wrong!r}: only the letters A-Z are residues; upper-case it or drop the row.")
    lengths = np.array([len(one) for one in sequences])
    owner = np.repeat(np.arange(len(sequences)), lengths)
    position = np.arange(len(letters)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if length is not None:
        num_codes, codes = length * _LETTERS, position * _LETTERS + letters
        chosen = position < length
    else:
        num_codes, chosen = _LETTERS**K, position <= lengths[owner] - K
        codes = sum(np.roll(letters, -i) * _LETTERS ** (K - 1 - i) for i in range(K))
    ones = np.ones(np.count_nonzero(chosen))
    return csr_matrix((ones, (owner[chosen], codes[chosen])), shape=(len(sequences), num_codes))


def _check_columns(columns: Sequence[Sequence[str]]) -> None:
    if not columns:
        raise ArgumentError("No columns given: one list of sequences or more is needed.")
    if len({len(column) for column in columns}) != 1:
        raise DataError(f"Columns of {', '.join(str(len(c)) for c in columns)} rows: as many in each are needed.")
