"""What heads, linear models and near rows read off sequences: counts of residues by position, or of 3-mers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from ...errors import DataError
from ..columns import FloatArray, factorize, read_columns

K = 3
MAX_FEATURES = 2048  # ridge decomposes a matrix of this size at most: seconds, not minutes
CHUNK_RESIDUES = 500_000
PREDICTED_ROWS = 10_240  # whose features are held at once; whole blocks of `NearestBaseline`
LETTERS = 26  # A-Z

Columns = Sequence[Sequence[str]]  # of sequences: by column, then by row


class _Column(NamedTuple):
    """How one column is read: `length` of its aligned sequences, or None for k-mers; the codes that are features."""

    length: int | None
    codes: NDArray[np.int64]


class SequenceFeatures:
    """Counts of (position, residue) where all sequences of a column are equally long, of 3-mers where they are not.

    A column with one value in training is left out, as is every count that does not vary there. Each of the other
    columns keeps at most its equal share of 2,048 features, those that vary most in training. A missing sequence, "",
    has counts of 0, and is none of those whose lengths are compared.

    Args:
        train: one list of n sequences (upper-case letters) per column, of which at least one varies.
        others: the same columns of rows to be predicted later; only their lengths are looked at.
        most: features, where 2,048 are too many.

    Raises:
        DataError: a character other than A-Z.

    Attributes: `name`, "one-hot", "3-mer" or "one-hot and 3-mer"; `num_counts`, how many vary in all; `names` of the
    columns, after `fit`.

    Cost: goes with the distinct sequences: 2 s for 50,000 of 250 residues; `transform` returns 4 kB a row at most.
    """

    def __init__(
        self,
        train: Columns,
        others: Sequence[Columns] = (),
        most: int = MAX_FEATURES,
    ):
        varying = [i for i, column in enumerate(train) if len(set(column)) > 1]
        self.names: list[str] = []
        self._columns: dict[int, _Column] = {}
        self.num_counts = 0
        share = most // max(1, len(varying))
        for i in varying:
            lengths = {len(one) for rows in (train, *others) for one in rows[i]}
            lengths.discard(0)
            length = lengths.pop() if len(lengths) == 1 else None
            variance = _variance(train[i], length)
            num_varying = int(np.count_nonzero(variance))
            self.num_counts += num_varying
            order = np.argsort(-variance, kind="stable")
            codes = order[: min(share, num_varying)]
            self._columns[i] = _Column(length, np.sort(codes))
        kinds = {"one-hot" if column.length else f"{K}-mer" for column in self._columns.values()}
        self.name = " and ".join(sorted(kinds, reverse=True))

    @classmethod
    def fit(cls, train: Dataset, names: Sequence[str], most: int) -> SequenceFeatures:
        """Chooses counts by the columns `names` of training rows, map-style, at most `most`; reads no others."""
        made = cls([*zip(*read_columns(train, names))], most=most)
        made.names = [*names]
        return made

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SequenceFeatures:
        """Reads back what `state` returned."""
        made = cls([])
        made.names = [*state["names"]]
        made._columns = {i: _Column(length, np.array(codes, np.int64)) for i, length, codes in state["columns"]}
        return made

    def state(self) -> dict[str, Any]:
        """Returns what a model stores, JSON-able; after `fit`."""
        columns = [[i, length, codes.tolist()] for i, (length, codes) in self._columns.items()]
        return {"names": self.names, "columns": columns}

    @property
    def num_features(self) -> int:
        """Counts of a row."""
        return sum(len(column.codes) for column in self._columns.values())

    def matrix(self, rows: Dataset | Sequence[Any]) -> NDArray[np.float16]:
        """Counts residues of rows, map-style or a list: (n, num_features); after `fit`."""
        read = read_columns(rows, self.names)
        return self.transform([[row[i] for row in read] for i in range(len(self.names))])

    def transform(self, columns: Columns) -> NDArray[np.float16]:
        """Returns the features of rows, (n, num_features); arguments and `DataError` as above."""
        blocks = [np.zeros((len(columns[0]), 0), np.float16)]
        blocks += [_select(columns[i], column) for i, column in self._columns.items()]
        return np.concatenate(blocks, axis=1)

    def predict(self, model: Any, columns: Columns) -> Any:
        """Predicts by `model` from features of rows, which are made for `PREDICTED_ROWS` at a time."""
        found = []
        for start in range(0, max(1, len(columns[0])), PREDICTED_ROWS):
            rows = slice(start, start + PREDICTED_ROWS)
            features = self.transform([column[rows] for column in columns])
            found.append(model.predict(features))
        return np.concatenate(found)


def _select(sequences: Sequence[str], column: _Column) -> NDArray[np.float16]:
    index, distinct = factorize(sequences)
    found = np.empty((len(distinct), len(column.codes)), np.float16)  # whole numbers, exact up to 2,048
    for place, counts in _count(distinct, column.length):
        found[place] = counts[:, column.codes].toarray()
    return found if len(found) == len(sequences) else found[index]


def _variance(sequences: Sequence[str], length: int | None) -> FloatArray:
    """Computes the variance of every count over the rows, (codes,); exactly 0 where it is the same in all rows."""
    index, distinct = factorize(sequences)
    weights = np.bincount(index).astype(np.float64)
    total = 0.0
    squares = 0.0
    for place, counts in _count(distinct, length):
        total = total + counts.T @ weights[place]
        squares = squares + counts.multiply(counts).T @ weights[place]
    num_rows = len(sequences)
    # Sums of whole numbers are exact, so that a count that never varies gives 0 and not a rounding error.
    return np.asarray(num_rows * squares - total**2) / num_rows**2


def _count(sequences: list[str], length: int | None) -> Iterator[tuple[slice, Any]]:
    """Yields which sequences, and counts of their codes, sparse float64, in pieces of about `CHUNK_RESIDUES`."""
    from scipy.sparse import csr_matrix  # here, since scipy takes 0.2 s that scores do not need

    longest = max(map(len, sequences), default=1)
    size = max(1, CHUNK_RESIDUES // max(1, longest))
    for start in range(0, len(sequences), size):
        chunk = sequences[start : start + size]
        text = "".join(chunk).encode("latin-1", "replace")
        letters = np.frombuffer(text, np.uint8).astype(np.int64) - ord("A")
        if len(letters) and not 0 <= letters.min() <= letters.max() < LETTERS:
            wrong = next(one for one in chunk if not (one.isascii() and one.isalpha() and one.isupper()))
            raise DataError(f"Sequence {wrong!r}: only the letters A-Z are residues; upper-case it or drop the row.")
        lengths = np.array([len(one) for one in chunk])
        owner = np.repeat(np.arange(len(chunk)), lengths)
        begins = np.cumsum(lengths) - lengths
        position = np.arange(len(letters)) - begins[owner]
        if length is not None:
            num_codes = length * LETTERS
            codes = position * LETTERS + letters
            chosen = position < length
        else:
            num_codes = LETTERS**K
            chosen = position <= lengths[owner] - K
            codes = sum(np.roll(letters, -i) * LETTERS ** (K - 1 - i) for i in range(K))
        ones = np.ones(np.count_nonzero(chosen))
        places = (owner[chosen], codes[chosen])
        counts = csr_matrix((ones, places), shape=(len(chunk), num_codes))
        yield slice(start, start + size), counts
