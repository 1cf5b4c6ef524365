"""Families of sequences: single linkage at a percent identity, so that no two that reach it stand in different ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.sparse import coo_matrix, csr_matrix
from scipy.sparse.csgraph import connected_components

from .identity import SequenceSet, reach_identity
from .shared_kmers import SharedKmers, best_first, kmer_matrix, pair_batches
from .similarity import WorkLimit, order_kmers, read_sequences

LINKING_ROUNDS = 12


def find_families(
    sequences: Sequence[str],
    identity: float,
    work: WorkLimit,
    check: Callable[[np.ndarray], None] | None = None,
) -> np.ndarray:
    """Groups sequences so that any two of at least `identity`, and any chain of such pairs, share a family.

    Neighbours by random k-mers are linked first, which joins most of a family; then every pair of different families
    that shares enough k-mers is aligned, best first, until none is left.

    Args:
        sequences: distinct ones.
        identity: `similarity.MIN_IDENTITY` to 1.
        work: what may be spent.
        check: is shown the families whenever some were joined (they only grow), and may raise to end the search.

    Returns:
        int64 [n], family numbers.

    Raises:
        TooMuchWorkError: where `work` ran out.
    """
    return _Families(read_sequences(sequences), identity, work, check).link()


class _Families:
    def __init__(
        self, sequences: SequenceSet, identity: float, work: WorkLimit, check: Callable[[np.ndarray], None] | None
    ) -> None:
        self.sequences, self.identity, self.work, self.check = sequences, identity, work, check
        self.family = np.arange(len(sequences))

    def link(self) -> np.ndarray:
        for rule, order in order_kmers(self.sequences, self.identity):
            rows = np.flatnonzero(rule.kept[self.sequences.lengths])
            owner, kmer = order.rarest(rows, rule.kept)
            known, column = np.unique(kmer, return_inverse=True)
            kmers = kmer_matrix(owner, column, (len(rows), len(known)))
            self._link_neighbours(rule, rows, kmers)
            self._link_rest(rule, rows, kmers)
        return self.family

    def _link_neighbours(self, rule: SharedKmers, rows: np.ndarray, kmers: csr_matrix) -> None:
        """Rows whose smallest k-mer under a random order is the same, each with the next and with the first of them."""
        generator = np.random.default_rng(0)
        for _ in range(LINKING_ROUNDS if kmers.nnz else 0):
            smallest = np.minimum.reduceat(generator.permutation(kmers.shape[1])[kmers.indices], kmers.indptr[:-1])
            order = generator.permutation(len(rows))
            order = order[np.argsort(smallest[order], kind="stable")]
            is_first = np.concatenate([[True], smallest[order[1:]] != smallest[order[:-1]]])
            first = order[np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))]
            left = np.concatenate([order[:-1][~is_first[1:]], first])
            right = np.concatenate([order[1:][~is_first[1:]], order])
            apart = self.family[rows[left]] != self.family[rows[right]]
            left, right = left[apart], right[apart]
            if len(left):
                self.work.add(int(np.diff(kmers.indptr)[left].sum()))
                shared = np.asarray(kmers[left].multiply(kmers[right]).sum(1)).ravel()
                self._verify(rule, rows[left], rows[right], shared)

    def _link_rest(self, rule: SharedKmers, rows: np.ndarray, kmers: csr_matrix) -> None:
        family = self.family[rows]
        largest = np.argmax(np.bincount(family)) if len(rows) else 0
        holders = kmers.T.tocsr()
        # A k-mer of one family alone can link nothing new; nor can two members of the largest.
        held_by = family[holders.indices]
        firsts = holders.indptr[:-1]
        spans = np.minimum.reduceat(held_by, firsts) != np.maximum.reduceat(held_by, firsts) if len(firsts) else firsts
        spanning = np.flatnonzero(spans)
        asking = np.flatnonzero(family != largest)
        if not len(spanning) or not len(asking):
            return
        is_asking = family != largest
        for batch in pair_batches(kmers[asking][:, spanning], holders[spanning], self.work.add):
            left, right = asking[batch.row], batch.col
            once = (left < right) | ~is_asking[right]
            left, right, shared = rows[left[once]], rows[right[once]], batch.data[once]
            self._verify(rule, left, right, shared)

    def _verify(self, rule: SharedKmers, left: np.ndarray, right: np.ndarray, shared: np.ndarray) -> None:
        needed = rule.shared[np.maximum(self.sequences.lengths[left], self.sequences.lengths[right])]
        likely = (needed > 0) & (shared >= needed) & (self.family[left] != self.family[right])
        left, right, shared = left[likely], right[likely], shared[likely]
        families = np.sort([self.family[left], self.family[right]], axis=0)
        for chosen in best_first(families[0] * len(self.family) + families[1], shared):
            chosen = chosen[self.family[left[chosen]] != self.family[right[chosen]]]
            near = reach_identity(self.sequences, left[chosen], right[chosen], self.identity, self.work.align)
            self._join(left[chosen[near]], right[chosen[near]])

    def _join(self, left: np.ndarray, right: np.ndarray) -> None:
        if not len(left):
            return
        num = len(self.family)
        links = (np.ones(len(left), dtype=np.int8), (self.family[left], self.family[right]))
        self.family = connected_components(coo_matrix(links, shape=(num, num)), directed=False)[1][self.family]
        if self.check:
            self.check(self.family)
