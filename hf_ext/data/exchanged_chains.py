"""Rows in which two chains stand in each other's column: each is nearer to the other column's sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .columns import distinct

K = 3
MAX_ROWS = 5_000  # looked at, evenly through the table
NEARER = 1.5  # times: shared k-mers with one column, over those with the other
ALIKE = 0.05  # shared k-mers with a sequence of a column, on average: less is chance
MOST = 0.5  # of the rows, in which each chain is where its like is
MAX_LISTED = 10

OWN, OTHER = 1, 2
Kmers = tuple[np.ndarray, np.ndarray, int]


def find_exchanged(table: pa.Table, columns: Sequence[str], path: str) -> list[str]:
    """A sentence for each two columns of which some rows have the sequences exchanged, by the k-mers that they share.

    Args:
        table: n rows with the cleaned columns, "" where there is no sequence, and `source_row`.
        columns: the sequence columns.
        path: the file.

    Cost: 0.1 s for 5,000 rows of two chains; of more rows, so many are looked at.
    """
    chosen = np.zeros(len(table), bool)
    chosen[np.linspace(0, len(table) - 1, min(len(table), MAX_ROWS)).astype(np.int64)] = True
    looked_at = table.filter(pa.array(chosen))
    rows = looked_at["source_row"].to_numpy()
    taken = {name: distinct(looked_at[name]) for name in columns}
    kmers = {name: _count_kmers(found.cells) for name, found in taken.items()}
    said = []
    for first, second in combinations(taken, 2):
        nearer = [
            _nearer_column(kmers[one], kmers[other])[taken[one].number]
            for one, other in ((first, second), (second, first))
        ]
        if min((side == OWN).mean() for side in nearer) < MOST:
            continue  # nothing tells these columns apart, as of any two proteins that bind
        swapped = (nearer[0] == OTHER) & (nearer[1] == OTHER)
        found = rows[swapped]
        if len(found):
            listed = ", ".join(map(str, found[:MAX_LISTED])) + ", ..." * (len(found) > MAX_LISTED)
            of = f" of {len(rows):,} that were looked at" if len(rows) < len(table) else ""
            said.append(
                f"{path}: rows {listed} ({len(found):,} in all{of}): `{first}` is nearer to other rows' `{second}`, "
                f"and `{second}` to their `{first}`. Are the chains exchanged there? Put each into its own column."
            )
    return said


def _count_kmers(cells: pa.Array) -> tuple[np.ndarray, np.ndarray, int]:
    """The k-mers of all sequences as one array of numbers, the sequence that each is of, and how many there are."""
    letters = np.frombuffer("".join(cells.to_pylist()).encode(), np.uint8).astype(np.int64) - ord("A")
    owner = np.repeat(np.arange(len(cells)), pc.binary_length(cells).to_numpy())
    num = max(0, len(letters) - K + 1)
    code = sum((letters[at : at + num] * 26**at for at in range(K)), np.zeros(num, np.int64))
    is_whole = owner[:num] == owner[len(owner) - num :]
    return code[is_whole], owner[:num][is_whole], len(cells)


def _nearer_column(own: Kmers, other: Kmers) -> np.ndarray:
    """(n,) for each distinct sequence: `OWN` where it shares more k-mers with the rest of its column, `OTHER` with
    those of the other; 0 where it is like neither, or like both."""
    (kmers, owner, num), (others, _, num_others) = own, other

    def share(counts: np.ndarray, num_sequences: int) -> np.ndarray:
        return np.bincount(owner, counts[kmers], num) / np.maximum(np.bincount(owner, minlength=num) * num_sequences, 1)

    here = share(np.bincount(kmers, minlength=26**K), num) - share(np.ones(26**K), num)
    there = share(np.bincount(others, minlength=26**K), num_others)
    is_own, is_other = here >= NEARER * there, there >= NEARER * here
    return np.where(is_own & (here >= ALIKE), OWN, np.where(is_other & (there >= ALIKE), OTHER, 0))
