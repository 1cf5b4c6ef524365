"""Rows in which two chains stand in each other's column: each is nearer to the other column's sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pyarrow as pa
from scipy.sparse import csr_matrix

from .columns import distinct
from .near_copies import count_kmers

K = 3
MAX_ROWS = 5_000  # looked at, evenly through the table
NEARER = 1.5  # times: shared k-mers with one column, over those with the other
ALIKE = 0.05  # shared k-mers with a sequence of a column, on average: less is chance
MOST = 0.5  # of the rows, in which each chain is where its like is
MAX_LISTED = 10

OWN, OTHER = 1, 2


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
    kmers = {name: count_kmers(found.cells.to_pylist(), K) for name, found in taken.items()}
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


def _nearer_column(own: csr_matrix, other: csr_matrix) -> np.ndarray:
    """(n,) for each distinct sequence: `OWN` where it shares more k-mers with the rest of its column, `OTHER` with
    those of the other; 0 where it is like neither, or like both. Arguments: of both columns, from `count_kmers`."""
    each = np.asarray(own.sum(1), np.float64).ravel()
    mine, theirs = (np.asarray(kmers.sum(0), np.float64).ravel() for kmers in (own, other))
    here = (own @ mine - each) / np.maximum(each * own.shape[0], 1)
    there = own @ theirs / np.maximum(each * other.shape[0], 1)
    is_own, is_other = here >= NEARER * there, there >= NEARER * here
    return np.where(is_own & (here >= ALIKE), OWN, np.where(is_other & (there >= ALIKE), OTHER, 0))
