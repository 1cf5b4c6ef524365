"""Which rows have a near copy among others, at a percent identity; none is missed.

Pairs that share too few k-mers to be as identical as asked are never looked at (`shared_kmers`), all others are aligned
(`identity`). Memory goes with the residues, never with the square of the rows. Work is counted before it is done, and a
search that would exceed its limit says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .identity import SequenceSet, reach_identity
from .shared_kmers import KmerOrder, SharedKmers, best_first, choose_kmers, kmer_matrix, pair_batches

MIN_IDENTITY = 0.7  # below, unrelated proteins share as many k-mers as relatives must, so nearly all pairs are aligned
SAMPLE = 5_000  # sequences by which k-mers are called rare
FIRST_CHUNK, CHUNK_GROWTH = 64, 8
_EMPTY = "\0"  # stands for an empty sequence: one residue that only another empty one has


class TooMuchWorkError(Exception):
    """The search would pass its limit."""


@dataclass
class WorkLimit:
    """Counts additions of shared k-mers and, as two each, residues aligned to up to 64 others: about 10 ns apiece."""

    limit: int
    done: int = 0

    def add(self, amount: int) -> None:
        """Counts before the work is done; TooMuchWorkError where it would pass the limit."""
        if self.done + amount > self.limit:
            raise TooMuchWorkError(f"{self.done + amount:,} of at most {self.limit:,} operations")
        self.done += amount

    def align(self, cells: int) -> None:
        """As `add`, for residues times words."""
        self.add(2 * cells)


def read_sequences(sequences: Sequence[str]) -> SequenceSet:
    """Returns them as a set; empty ones are given a residue that nothing else has."""
    return SequenceSet([one or _EMPTY for one in sequences])


def order_kmers(sequences: SequenceSet, identity: float) -> list[tuple[SharedKmers, KmerOrder]]:
    """The rules that cover all pairs of these sequences, each with an order of its k-mers."""
    sample = np.random.default_rng(0).permutation(len(sequences))[:SAMPLE]
    rules = choose_kmers(identity, int(sequences.lengths.max(initial=0)))
    return [(rule, KmerOrder(sequences, rule.k, sample)) for rule in rules]


def find_near(
    queries: Sequence[Sequence[str]],
    references: Sequence[Sequence[str]],
    identity: float,
    work: WorkLimit,
    seed: int = 0,
) -> tuple[np.ndarray, bool]:
    """Says for each query row whether a reference row is at least `identity` identical to it in every column.

    References are taken in random order in growing chunks; queries that found one leave. So variants of one protein,
    where nearly any reference will do, cost little, and what finds nothing has been held against all.

    Args:
        queries, references: one list of sequences per column.
        identity: `MIN_IDENTITY` to 1.
        work: what may be spent.
        seed: of the order; it changes the work, not the result of a completed search.

    Returns:
        bool [q], and whether the search was completed; if not, True is verified and False is not known.
    """
    rows = _Rows(queries, references, identity, work)
    num = rows.num_queries
    found = np.zeros(num, dtype=bool)
    order = np.random.default_rng(seed).permutation(len(references[0])) + num
    start, size = 0, FIRST_CHUNK
    try:
        while start < len(order) and not found.all():
            rows.search(order[start : start + size], found)
            start, size = start + size, size * CHUNK_GROWTH
    except TooMuchWorkError:
        return found, False
    return found, True


class _Rows:
    """Query rows (first) and reference rows (after them), each a sequence number per column."""

    def __init__(
        self, queries: Sequence[Sequence[str]], references: Sequence[Sequence[str]], identity: float, work: WorkLimit
    ) -> None:
        self.identity, self.work, self.num_queries = identity, work, len(queries[0])
        self.columns: list[tuple[SequenceSet, np.ndarray]] = []
        for mine, others in zip(queries, references):
            numbers: dict[str, int] = {}
            number = np.array([numbers.setdefault(one, len(numbers)) for one in (*mine, *others)], dtype=np.int64)
            self.columns.append((read_sequences(list(numbers)), number))
        self.columns.sort(key=lambda column: len(column[0]))  # few distinct sequences are compared soonest
        self.kmers = order_kmers(self.columns[-1][0], identity)  # and most distinct ones exclude most

    def search(self, references: np.ndarray, found: np.ndarray) -> None:
        """Marks in `found` the queries that have a near copy among these reference rows."""
        sequences, number = self.columns[-1]
        for rule, order in self.kmers:
            asking = np.flatnonzero(~found)
            owner, kmer = order.rarest(number[asking], rule.kept)
            known, column = np.unique(kmer, return_inverse=True)
            queries = kmer_matrix(owner, column, (len(asking), len(known)))
            owner, kmer = order.rarest(number[references], rule.kept)
            column = np.searchsorted(known, kmer)
            shared = np.flatnonzero(column < len(known))
            shared = shared[known[column[shared]] == kmer[shared]]
            holders = kmer_matrix(owner[shared], column[shared], (len(references), len(known))).T.tocsr()
            for batch in pair_batches(queries, holders, self.work.add):
                left, right = asking[batch.row], references[batch.col]
                lengths = sequences.lengths[number[left]], sequences.lengths[number[right]]
                needed = rule.shared[np.maximum(*lengths)]
                likely = (needed > 0) & (batch.data >= needed)
                self._verify(left[likely], right[likely], batch.data[likely], found)

    def _verify(self, left: np.ndarray, right: np.ndarray, shared: np.ndarray, found: np.ndarray) -> None:
        for chosen in best_first(left, shared):
            chosen = chosen[~found[left[chosen]]]
            found[left[chosen[self._are_near(left[chosen], right[chosen])]]] = True

    def _are_near(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        near = np.arange(len(left))
        for sequences, number in self.columns:
            pairs = number[left[near]] * len(sequences) + number[right[near]]
            distinct, pair_of = np.unique(pairs, return_inverse=True)
            numbers = np.divmod(distinct, len(sequences))
            near = near[reach_identity(sequences, *numbers, self.identity, self.work.align)[pair_of]]
        return near
