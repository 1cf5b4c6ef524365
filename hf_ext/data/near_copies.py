"""Near copies: identity is 1 - edit distance / length of the longer sequence, and no pair that reaches it is missed.

Edit distances are rapidfuzz's. Which pairs are aligned at all is told by k-mers: an edit changes at most k of them, so
two sequences of which the longer has M residues and that are D edits apart share at least M - k + 1 - k D k-mers (the
q-gram lemma: Jokinen and Ukkonen, MFCS 1991). Letters are compared as they are: X equals only X.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cpdist, extractOne
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components
from tqdm.auto import tqdm

Sequences = Sequence[str] | np.ndarray[Any, Any]  # arrays of Python strings
MIN_IDENTITY = 0.7  # below, unrelated proteins share as many k-mers as relatives must, so nearly all pairs are aligned
MAX_K = 5
KMER_COLUMNS = 2**20  # 5-mers share columns: pairs may seem to share more of them, never fewer
LETTERS = 27  # A to Z, and one for all others
ADDITIONS_PER_BLOCK = 5_000_000  # of shared k-mers: bounds the memory of a block of queries, some 150 MB
FIRST_REFERENCES, MOST_REFERENCES, GROWTH = 64, 32_768, 8
FEW = 8  # of variants of one protein nearly any will do
ROUNDS = (0, 1, 16, 256, np.iinfo(np.int64).max)


def pair_identities(left: Sequences, right: Sequences, at_least: float = 0.0) -> np.ndarray:
    """Returns float64 [n], the identity of `left[i]` and `right[i]`; 0 where it is below `at_least`.

    An empty sequence equals another empty one only.

    Cost: 2 us for two antibody chains, a third of it with `at_least=0.9`.
    """
    if not len(left):
        return np.zeros(0)
    cutoff = max(0.0, at_least - 1e-6)  # rapidfuzz takes a pair that is exactly as identical for one that is less so
    identity = cpdist(left, right, scorer=Levenshtein.normalized_similarity, score_cutoff=cutoff, dtype=np.float64)
    return np.where(identity >= at_least - 1e-9, identity, 0.0)


def nearest_identities(
    queries: Sequence[str], references: Sequence[str], at_least: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Finds for each query the reference that is most identical to it, of equals the first.

    Args:
        at_least: identities below it are not looked for, which saves much of the work.

    Returns:
        float64 [q], the identity, and int64 [q], the place of the reference; NaN and -1 where no reference is
        `at_least` as identical.

    Cost: 10 ms a distinct antibody chain among 10,000 others, nothing for one that stands among them.
    """
    place: dict[str, int] = {}
    for index, one in enumerate(references):
        place.setdefault(one, index)
    known = list(place)
    found: dict[str, tuple[float, int]] = {}
    for query in dict.fromkeys(queries):
        cutoff = max(0.0, at_least - 1e-6)
        best = extractOne(query, known, scorer=Levenshtein.normalized_similarity, score_cutoff=cutoff)
        if best is not None and best[1] >= at_least - 1e-9:
            found[query] = (best[1], place[best[0]])
    nearest = [found.get(one, (np.nan, -1)) for one in queries]
    return np.array([value for value, _ in nearest]), np.array([index for _, index in nearest], dtype=np.int64)


def has_near(queries: Sequence[str], references: Sequence[str], identity: float) -> np.ndarray:
    """Returns bool [q]: whether a reference is at least `identity` identical, `MIN_IDENTITY` to 1.

    References are taken in random order in growing chunks; queries that found one leave. So variants of one protein,
    where nearly any reference will do, cost little, and what finds nothing has been held against all.
    """
    known, mine = set(references), np.array(queries, dtype=object)
    found = np.array([one in known for one in queries], dtype=bool)
    others = np.random.default_rng(0).permutation(np.array(references, dtype=object))
    start, size = 0, FIRST_REFERENCES
    while start < len(others) and not found.all():
        part, asking = others[start : start + size], np.flatnonzero(~found)
        for row, column, shared in _likely_pairs(mine[asking], part, identity):
            left = asking[row]
            for chosen in _best_first(row, shared):
                chosen = chosen[~found[left[chosen]]]
                is_near = pair_identities(mine[left[chosen]], part[column[chosen]], identity) > 0
                found[left[chosen[is_near]]] = True
        start, size = start + size, min(size * GROWTH, MOST_REFERENCES)
    return found


def find_families(sequences: Sequence[str], identity: float) -> np.ndarray:
    """Groups sequences so that any two of at least `identity`, and any chain of such pairs, share a family.

    Args:
        sequences: distinct ones.
        identity: `MIN_IDENTITY` to 1.

    Returns:
        int64 [n], family numbers.
    """
    every = np.array(sequences, dtype=object)
    few = np.random.default_rng(0).permutation(len(every))[:FEW]
    left, right = np.repeat(np.arange(len(every)), len(few)), np.tile(few, len(every))
    near = pair_identities(every[left], every[right], identity) > 0
    family = _join(np.arange(len(every)), left[near], right[near])
    is_asking = family != np.bincount(family).argmax()  # two of the largest family link nothing new
    asking = np.flatnonzero(is_asking)
    for row, right, shared in _likely_pairs(every[asking], every, identity):
        left = asking[row]
        once = (left < right) | ~is_asking[right]
        left, right, shared = left[once], right[once], shared[once]
        for chosen in _best_first(left, shared):
            chosen = chosen[family[left[chosen]] != family[right[chosen]]]
            chosen = chosen[pair_identities(every[left[chosen]], every[right[chosen]], identity) > 0]
            family = _join(family, left[chosen], right[chosen])
    return family


def kmer_cosines(queries: Sequence[str], references: Sequence[str], k: int = 3) -> np.ndarray:
    """Returns float64 [q, r], shared k-mers by the geometric mean of both numbers of them: 1 for equal sequences.

    A k-mer that occurs twice in both is shared twice. 0 where a sequence is shorter than k; k is 4 at most.

    Cost: 1 ms for an antibody chain and 10,000 others.
    """
    mine, theirs = count_kmers(queries, k), count_kmers(references, k)
    numbers = np.sqrt(np.outer(mine.sum(1), theirs.sum(1)).astype(np.float64))
    for counts in (mine, theirs):
        counts.sum_duplicates()
    times = np.arange(1, 1 + min(mine.max(), theirs.max()))
    each = (((mine >= num).astype(np.int64) @ (theirs >= num).T).toarray() for num in times)
    return np.divide(sum(each, np.zeros_like(numbers)), numbers, out=np.zeros_like(numbers), where=numbers > 0)


def count_kmers(sequences: Sequences, k: int) -> csr_matrix:
    """Returns float32 [n, columns], how often each sequence holds each k-mer: of each time it does, a 1 (not summed).

    Up to k of 4 each k-mer of the letters A to Z has a column of its own.
    """
    lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
    total = int(lengths.sum())
    text = "".join([*sequences, "A" * k]).encode("ascii", "replace")
    letters = np.minimum(np.frombuffer(text, dtype=np.uint8) - ord("A"), LETTERS - 1).astype(np.int32)
    codes = np.zeros(total, dtype=np.int32)
    for offset in range(k):
        codes = codes * LETTERS + letters[offset : offset + total]
    is_whole = np.arange(total) + k <= np.repeat(np.cumsum(lengths), lengths)
    columns = codes[is_whole] % KMER_COLUMNS
    starts = np.concatenate([[0], np.cumsum(np.maximum(lengths - k + 1, 0))])
    ones = np.ones(len(columns), dtype=np.float32)  # products of counts pass the largest int32 in long repeats
    return csr_matrix((ones, columns, starts), shape=(len(sequences), min(LETTERS**k, KMER_COLUMNS)))


def _likely_pairs(queries: np.ndarray, references: np.ndarray, identity: float) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields arrays of query, reference and how many k-mers they share, of all pairs that can reach `identity`.

    Equal sequences need not be among them.
    """
    lengths = [np.fromiter(map(len, side), dtype=np.int64, count=len(side)) for side in (queries, references)]
    longest = np.arange(1 + max(int(side.max(initial=0)) for side in lengths))
    edits = np.floor((1.0 - identity) * longest + 1e-9).astype(np.int64)
    needed = np.stack([longest - k + 1 - k * edits for k in range(1, MAX_K + 1)])
    best_k = np.where(edits > 0, MAX_K - np.argmax(needed[::-1] >= 1, axis=0), 0)  # the longest that proves anything
    for k in np.unique(best_k[best_k > 0]).tolist():
        of_this_k = np.flatnonzero(best_k == k)  # lengths of the longer one
        least, shortest, most = needed[k - 1][of_this_k].min(), (of_this_k - edits[of_this_k]).min(), of_this_k.max()
        rows, columns = (np.flatnonzero((size >= shortest) & (size <= most)) for size in lengths)
        mine, holders = count_kmers(queries[rows], k), count_kmers(references[columns], k).T.tocsr()
        additions = np.cumsum(mine @ np.diff(holders.indptr).astype(np.float64))
        blocks = np.split(np.arange(len(rows)), np.flatnonzero(np.diff(additions // ADDITIONS_PER_BLOCK)) + 1)
        for block in tqdm(blocks, desc="comparing sequences", delay=3, leave=False, disable=None):
            pairs = mine[block] @ holders
            likely = np.flatnonzero(pairs.data >= least)  # few are: all else is done for them alone
            row = rows[block[np.searchsorted(pairs.indptr, likely, "right") - 1]]
            column, shared = columns[pairs.indices[likely]], pairs.data[likely]
            longer = np.maximum(lengths[0][row], lengths[1][column])
            keep = (best_k[longer] == k) & (shared >= needed[k - 1][longer])
            yield row[keep], column[keep], shared[keep]


def _best_first(row: np.ndarray, shared: np.ndarray) -> Iterator[np.ndarray]:
    """Yields places of pairs in growing rounds: of each row the pair that shares most, the next 15, and so on."""
    order = np.lexsort((-shared, row))
    rank = np.arange(len(order)) - np.searchsorted(row[order], row[order])
    for least, most in pairwise(ROUNDS):
        yield order[(rank >= least) & (rank < most)]


def _join(family: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    if not len(left):
        return family
    links = csr_matrix((np.ones(len(left), dtype=np.int8), (family[left], family[right])), shape=[len(family)] * 2)
    return connected_components(links, directed=False)[1].astype(np.int64)[family]
