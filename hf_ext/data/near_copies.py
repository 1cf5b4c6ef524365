"""Near copies: identity is 1 - edit distance / length of the longer sequence, and no pair that reaches it is missed.

Edit distances are rapidfuzz's. Which pairs are aligned at all is told by k-mers: an edit changes at most k of them, so
two sequences of which the longer has M residues and that are D edits apart share at least M - k + 1 - k D k-mers (the
q-gram lemma: Jokinen and Ukkonen, MFCS 1991). Letters are compared as they are: X equals only X.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist, extractOne
from scipy.sparse import csr_matrix
from tqdm.auto import tqdm

from ..errors import DataError
from ..labels import Array
from .arguments import CLUSTER_IDENTITY, DataArguments
from .columns import factorize
from .formats import read_lines

Sequences = Sequence[str] | np.ndarray[Any, Any]  # arrays of Python strings
MAX_K = 5
KMER_COLUMNS = 2**20  # 5-mers share columns: pairs may seem to share more of them, never fewer
LETTERS = 27  # A to Z, and one for all others
FIRST_REFERENCES = 64
MOST_REFERENCES = 32_768
GROWTH = 8
FEW = 8  # of variants of one protein nearly any will do
ROUNDS = (1, 16, 256)  # ends of the first ones, in which those that share most are aligned


def nearest_identities(queries: Sequence[str], references: Sequence[str], at_least: float = 0.0) -> Array:
    """Returns float64 [q], each query's identity to the most identical reference; NaN where none is `at_least` so.

    Args:
        at_least: identities below it are not looked for, which saves much of the work.

    Cost: 10 ms a distinct antibody chain among 10,000 others, nothing for one that stands among them.
    """
    known = list(dict.fromkeys(references))
    cutoff = max(0.0, at_least - 1e-6)
    found = {}
    for query in dict.fromkeys(queries):
        best = extractOne(query, known, scorer=Levenshtein.normalized_similarity, score_cutoff=cutoff)
        if best is not None and best[1] >= at_least - 1e-9:
            found[query] = best[1]
    return np.array([found.get(one, np.nan) for one in queries])


def has_near(queries: Sequence[str], references: Sequence[str], identity: float) -> Array:
    """Returns bool [q]: whether a reference is at least `identity` identical, `MIN_IDENTITY` to 1.

    References are taken in random order in growing chunks; queries that found one leave. So variants of one protein,
    where nearly any reference will do, cost little, and what finds nothing has been held against all.
    """
    known = set(references)
    found = np.array([one in known for one in queries], dtype=bool)
    others = np.random.default_rng(0).permutation(np.array(references, dtype=object))
    found |= _are_near(queries, others[:FEW], identity).any(1)
    start = FEW
    size = FIRST_REFERENCES
    while start < len(others) and not found.all():
        chunk = others[start : start + size]
        asking = np.flatnonzero(~found).tolist()
        for index, likely in zip(asking, _likely_references([queries[i] for i in asking], chunk, identity)):
            rounds = np.split(likely, ROUNDS) if len(likely) else []
            found[index] = any(_are_near([queries[index]], chunk[chosen], identity).any() for chosen in rounds)
        start += size
        size = min(size * GROWTH, MOST_REFERENCES)
    return found


def find_families(sequences: Sequence[str], identity: float) -> Array:
    """Groups sequences so that any two of at least `identity`, and any chain of such pairs, share a family.

    Args:
        sequences: distinct ones.
        identity: `MIN_IDENTITY` to 1.

    Returns:
        int64 [n], family numbers.
    """
    every = np.array(sequences, dtype=object)
    family = np.arange(len(every))

    def join(one: int, others: Array) -> None:
        others = others[family[others] != family[one]]
        near = others[_are_near([every[one]], every[others], identity)[0]]
        for joined in np.unique(family[near]):
            family[family == joined] = family[one]

    for one in np.random.default_rng(0).permutation(len(every))[:FEW].tolist():
        join(one, np.arange(len(every)))
    is_asking = family != np.bincount(family).argmax()  # two of the largest family link nothing new
    asking = np.flatnonzero(is_asking).tolist()
    for one, likely in zip(asking, _likely_references(every[asking], every, identity)):
        likely = likely[(likely > one) | ~is_asking[likely]]
        for chosen in np.split(likely, ROUNDS):
            join(one, chosen)
    return family


def kmer_cosines(queries: Sequence[str], references: Sequence[str]) -> Array:
    """Returns float64 [q, r], shared 3-mers by the geometric mean of both numbers of them: 1 for equal sequences.

    A 3-mer that occurs twice in both is shared twice. 0 where a sequence is shorter.

    Cost: 1 ms for an antibody chain and 10,000 others.
    """
    mine = count_kmers(queries, 3)
    theirs = count_kmers(references, 3)
    numbers = np.sqrt(np.outer(mine.sum(1), theirs.sum(1)).astype(np.float64))
    for counts in (mine, theirs):
        counts.sum_duplicates()
    shared = np.zeros_like(numbers)
    for times in np.arange(1, 1 + min(mine.max(), theirs.max())):
        both = (mine >= times).astype(np.int64) @ (theirs >= times).T
        shared += both.toarray()
    return np.divide(shared, numbers, out=shared, where=numbers > 0)


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


def num_shared(longest: Array, edits: Array, k: int) -> Array:
    """Returns how many k-mers two sequences share at least, by the length of the longer one and their edits."""
    return longest - k + 1 - k * edits


def _likely_references(queries: Sequences, references: Array, identity: float) -> Iterator[Array]:
    """Yields for each query the places of the references that can reach `identity`, those that share most k-mers first.

    Equal sequences need not be among them.
    """
    sizes = np.fromiter(map(len, references), dtype=np.int64, count=len(references))
    longest = np.arange(2 + max(map(len, (*references, *queries)), default=0))  # the longer one's residues
    edits = np.floor((1.0 - identity) * longest + 1e-9).astype(np.int64)
    needed = {k: num_shared(longest, edits, k) for k in range(1, MAX_K + 1)}
    kmers = {}
    for number, query in enumerate(tqdm(queries, desc="comparing sequences", delay=3, leave=False, disable=None)):
        size = len(query)
        alike = slice(size, int(size / identity + 1e-9) + 1)  # lengths of the longer one
        if not edits[alike].any():
            yield np.arange(0)
            continue
        k = max(k for k in needed if needed[k][alike].min() >= 1)  # the longest that proves anything
        if k not in kmers:
            of_references = count_kmers(references, k).tocsc()
            kmers[k] = count_kmers(queries, k), of_references.indptr, of_references.indices
        asked, starts, holders = kmers[k]
        own = np.unique(asked.indices[asked.indptr[number] : asked.indptr[number + 1]])
        held = [holders[first:last] for first, last in zip(starts[own], starts[own + 1])]
        shared = np.bincount(np.concatenate(held), minlength=len(references))
        likely = np.flatnonzero(shared >= needed[k][alike].min())  # few are: all else is done for them alone
        longer = np.maximum(sizes[likely], size)
        has_enough = shared[likely] >= needed[k][longer]
        has_length = np.abs(sizes[likely] - size) <= edits[longer]
        likely = likely[has_enough & has_length]
        yield likely[np.argsort(-shared[likely], kind="stable")]


def _are_near(queries: Sequences, references: Sequences, identity: float) -> Array:
    """Returns bool [q, r]: which of the references are at least that identical to a query."""
    if not len(queries) or not len(references):
        return np.zeros((len(queries), len(references)), bool)
    cutoff = max(0.0, identity - 1e-6)
    scorer = Levenshtein.normalized_similarity
    return cdist(queries, references, scorer=scorer, score_cutoff=cutoff, dtype=np.float64) >= identity - 1e-9


def find_clusters(data: Dataset, args: DataArguments, max_share: float) -> Array:
    """Returns int64 [n] cluster numbers: rows share one where their sequences share a family in every column.

    Families are those of `near_copies.find_families`: two rows that are at least as identical as asked in every column
    always share a cluster, and so do rows that a chain of such sequences connects, column by column. With
    `cluster_file` they are what another program found.

    Args:
        data: the rows.
        args: `DataArguments`: `cluster_identity`, and `cluster_column` or all `sequence_columns`; or `cluster_file`.
        max_share: of the rows; a cluster that is larger is an error.

    Raises:
        DataError: a cluster larger than `max_share`; or see `read_cluster_file`.

    Cost: less than a CPU second for variants of one protein and for 4,000 unrelated ones, 2 s for 4,000 antibody chains
    at 0.8; it grows with the square of the rows. Dearest are sets with many pairs that are nearly, but not quite, as
    identical as asked, such as antibodies below 0.9, and long proteins below 0.8: a bar shows how far it is.
    """
    if args.cluster_file:
        groups = read_cluster_file(args.cluster_file, data[args.id_column][:], str(args.id_column))
    else:
        groups = np.zeros(len(data), dtype=np.int64)
        for name in [args.cluster_column] if args.cluster_column else args.sequence_columns:
            numbers, distinct_ones = factorize(data[name][:])
            families = _find_families(tuple(distinct_ones), args.cluster_identity or CLUSTER_IDENTITY)[numbers]
            groups, _ = factorize(zip(groups.tolist(), families.tolist()))
    largest = int(np.bincount(groups).max())
    if largest > max_share * len(groups):
        raise DataError(
            f"split=cluster: one cluster of near copies holds {largest} of {len(groups)} rows, more than the "
            f"train share {max_share:g}: the rows are variants of one protein, or connected by intermediates. Cluster "
            "with a higher identity, compare one column with --cluster_column, or use --split position or group:COLUMN."
        )
    return groups


@lru_cache(maxsize=4)  # each of several runs splits the same rows
def _find_families(sequences: tuple[str, ...], identity: float) -> Array:
    return find_families(sequences, identity)


def read_cluster_file(path: str, ids: Sequence[str], column: str) -> Array:
    """Returns int64 [n] cluster numbers of rows named `ids`, from two columns: representative, tab, member.

    That is what `mmseqs easy-cluster` writes as `..._cluster.tsv`; it may be packed with gzip, as `.gz`.

    Raises:
        DataError: no such file, not a file of UTF-8 text, a line without two fields, or rows that are in no
            cluster.
    """
    cluster_of = {}
    for row, line in read_lines(Path(path).expanduser()):
        representative, tab, member = line.partition("\t")
        if not tab or not member or "\t" in member:
            raise DataError(f"{path}, row {row}: {line[:60]!r} is not representative, tab, member.")
        cluster_of[member] = representative
    missing = [one for one in ids if one not in cluster_of]
    if missing:
        raise DataError(
            f"{path}: {len(missing)} of {len(ids)} rows are in no cluster, for example {missing[0]!r}. Members must be "
            f"named as in column {column!r}."
        )
    return factorize(cluster_of[one] for one in ids)[0]
