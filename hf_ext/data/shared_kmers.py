"""A filter with a guarantee: which pairs can be as identical as asked, by the k-mers that they must share.

An edit changes at most k of a sequence's k-mers. So two sequences of which the longer has M residues and that are D
edits apart share at least M - k + 1 - k D k-mers, repeats counted (the q-gram lemma: Jokinen and Ukkonen, MFCS 1991). k
follows from M and the identity so that this number is at least 1 at every length. Counting starts with each sequence's
rarest k-mers: of `need` shared ones, the rarest (number - need + s) of each side hold at least s (the prefix filter:
Bayardo et al., Scaling up all pairs similarity search, WWW 2007).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.sparse import coo_matrix, csr_matrix

from .identity import SequenceSet, allowed_edits

MAX_K = 5
RESIDUES_PER_CHUNK = 4_000_000
SEQUENCES_PER_CHUNK = 20_000
ADDITIONS_PER_BATCH = 5_000_000
_COMMONNESS_STEPS = 256
_ROUNDS = (0, 1, 8, 64, 512, 4096, np.iinfo(np.int64).max)


@dataclass(frozen=True)
class SharedKmers:
    """What pairs must share at one k; arrays are by length in residues.

    Attributes:
        k: residues a k-mer.
        shared: by the length of the pair's longer sequence: kept k-mers that both hold at least; 0: another k's pair.
        kept: by a sequence's own length: how many of its rarest k-mers are kept; 0: no pair of this k can hold it.
    """

    k: int
    shared: np.ndarray
    kept: np.ndarray


def choose_kmers(identity: float, max_length: int) -> list[SharedKmers]:
    """Returns the rules that together cover every pair up to `max_length` residues; each pair falls under one.

    Args:
        identity: above 0, at most 1.
        max_length: of the longest sequence.
    """
    lengths = np.arange(max_length + 1)
    edits = allowed_edits(lengths, identity)
    needs = np.stack([lengths - k + 1 - k * edits for k in range(1, MAX_K + 1)])
    chosen = np.where(lengths > 0, MAX_K - np.argmax(needs[::-1] >= 1, axis=0), 0)  # the longest k that proves anything
    rules = []
    for k in range(1, MAX_K + 1):
        of_this_k = np.flatnonzero(chosen == k)
        if not len(of_this_k):
            continue
        need = needs[k - 1]
        chance = 2.0 * lengths**2 / 20.0**k  # k-mers that unrelated proteins share, twice what even letters give
        asked = np.minimum(need, np.maximum(np.ceil(chance + 4 * np.sqrt(chance)) + 2, need // 3)).astype(np.int64)
        shared = np.where(chosen == k, asked, 0)
        spare = np.full(max_length + 1, -(max_length + 1))
        for longer in of_this_k:
            partners = slice(longer - edits[longer], longer + 1)
            spare[partners] = np.maximum(spare[partners], asked[longer] - need[longer])
        kept = np.clip(lengths - k + 1 + spare, 0, np.maximum(lengths - k + 1, 0))
        rules.append(SharedKmers(k, shared, kept))
    return rules


class KmerOrder:
    """Numbers k-mers and their repeats so that small numbers are rare ones, by how often a sample holds them."""

    def __init__(self, sequences: SequenceSet, k: int, sample: np.ndarray) -> None:
        self.sequences, self.k = sequences, k
        self.num_kmers = sequences.num_letters**k
        counts = np.zeros(self.num_kmers, dtype=np.int64)
        for part in _chunks(sequences, sample):
            counts += np.bincount(self._kmers(part)[1], minlength=self.num_kmers)
        self.commonness = np.minimum(12 * np.log2(counts + 1), _COMMONNESS_STEPS - 1).astype(np.int16)

    def rarest(self, indices: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the places in `indices` and the numbers of each sequence's `kept[length]` rarest k-mers."""
        owners, numbers, done = [], [], 0
        for part in _chunks(self.sequences, indices):
            owner, number = self._numbered(part)
            lengths = self.sequences.lengths[part]
            counts = np.maximum(lengths - self.k + 1, 0)
            rank = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
            keep = rank < kept[lengths][owner]
            owners.append(owner[keep] + done)
            numbers.append(number[keep])
            done += len(part)
        nothing = np.zeros(0, dtype=np.int64)
        return np.concatenate(owners or [nothing]), np.concatenate(numbers or [nothing])

    def _kmers(self, part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = np.maximum(self.sequences.lengths[part] - self.k + 1, 0)
        owner = np.repeat(np.arange(len(part)), counts)
        first = self.sequences.starts[part] - (np.cumsum(counts) - counts)
        place = np.arange(len(owner)) + np.repeat(first, counts)
        kmers = np.zeros(len(owner), dtype=np.int64)
        for offset in range(self.k):
            kmers = kmers * self.sequences.num_letters + self.sequences.codes[place + offset]
        return owner, kmers

    def _numbered(self, part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Owners and k-mer numbers, rarest first in each sequence; a repeat has a number of its own."""
        owner, kmers = self._kmers(part)
        ordered = np.sort((owner * _COMMONNESS_STEPS + self.commonness[kmers]) * self.num_kmers + kmers)
        owner, number = np.divmod(ordered, _COMMONNESS_STEPS * self.num_kmers)
        is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]]) if len(ordered) else np.zeros(0, dtype=bool)
        firsts = np.flatnonzero(is_first)
        repeat = np.arange(len(ordered)) - np.repeat(firsts, np.diff(np.append(firsts, len(ordered))))
        if not repeat.any():
            return owner, number
        number += repeat * _COMMONNESS_STEPS * self.num_kmers
        order = np.lexsort((number, owner))
        return owner[order], number[order]


def kmer_matrix(owner: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> csr_matrix:
    """Returns a CSR matrix of ones (int32) from sorted owners and their columns."""
    indptr = np.searchsorted(owner, np.arange(shape[0] + 1))
    return csr_matrix((np.ones(len(columns), dtype=np.int32), columns, indptr), shape=shape)


def pair_batches(queries: csr_matrix, holders: csr_matrix, spend: Callable[[int], object]) -> Iterator[coo_matrix]:
    """Yields, for some queries at a time (the matrix's `row` counts from the first of all), how many k-mers they share.

    Args:
        queries: [q, k-mers] of ones.
        holders: [k-mers, r] of ones.
        spend: is told the additions before each batch, at most `ADDITIONS_PER_BATCH` unless one query needs more.
    """
    per_query = queries.astype(np.int64) @ np.diff(holders.indptr).astype(np.int64)
    work = np.concatenate([[0], np.cumsum(per_query)])
    start = 0
    while start < queries.shape[0]:
        stop = max(start + 1, int(np.searchsorted(work, work[start] + ADDITIONS_PER_BATCH, "right")) - 1)
        spend(int(work[stop] - work[start]))
        shared = (queries[start:stop] @ holders).tocoo()
        yield coo_matrix(
            (shared.data, (shared.row.astype(np.int64) + start, shared.col)), shape=(stop, shared.shape[1])
        )
        start = stop


def best_first(group: np.ndarray, shared: np.ndarray) -> Iterator[np.ndarray]:
    """Yields indices of pairs in growing rounds: of each group the pair that shares most, the next seven, and so on."""
    order = np.lexsort((-shared, group))
    firsts = np.flatnonzero(np.concatenate([[True], group[order][1:] != group[order][:-1]])) if len(order) else order
    rank = np.arange(len(order)) - np.repeat(firsts, np.diff(np.append(firsts, len(order))))
    for least, most in pairwise(_ROUNDS):
        chosen = order[(rank >= least) & (rank < most)]
        if not len(chosen):
            return
        yield chosen


def _chunks(sequences: SequenceSet, indices: np.ndarray) -> Iterator[np.ndarray]:
    """Parts of `indices` with a bounded number of residues."""
    total = np.cumsum(sequences.lengths[indices])
    start = 0
    while start < len(indices):
        done = int(total[start - 1]) if start else 0
        stop = int(np.searchsorted(total, done + RESIDUES_PER_CHUNK, "right"))
        stop = max(start + 1, min(stop, start + SEQUENCES_PER_CHUNK))
        yield indices[start:stop]
        start = stop
