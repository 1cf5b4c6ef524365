"""Which rows belong together because their sequences are alike: by percent identity, or by another program's file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from datasets import Dataset

from ..errors import ArgumentError, DataError
from .columns import column_values, factorize
from .families import find_families
from .similarity import MIN_IDENTITY, TooMuchWorkError, WorkLimit
from .text_files import read_lines

CLUSTER_IDENTITY = 0.8
MAX_WORK = 20_000_000_000  # minutes to tens of minutes
ALTERNATIVES = (
    "use --split group:COLUMN, or cluster with MMseqs2 and give its table as --cluster_file, with --id_column"
)
SMALLER_CLUSTERS = f"Raise --cluster_identity, compare one column with --cluster_column, or {ALTERNATIVES}."


def check_identity(name: str, identity: float) -> None:
    """ArgumentError outside of what is searched without a gap."""
    if not MIN_IDENTITY <= identity <= 1:
        raise ArgumentError(
            f"{name}={identity:g}: use {MIN_IDENTITY:g} to 1, the share of identical residues; below {MIN_IDENTITY:g} "
            f"a search that misses nothing is too slow here. For less, cluster with MMseqs2 (easy-cluster, "
            f"--min-seq-id 0.3) and give its table: --split cluster --cluster_file x_cluster.tsv --id_column COLUMN."
        )


def cluster_numbers(data: Dataset, columns: Sequence[str], identity: float, max_share: float) -> np.ndarray:
    """Returns int64 [n] cluster numbers: rows share one where their sequences share a family in every column.

    Families are those of `families.find_families`: two rows that are at least `identity` identical in every one of
    `columns` always share a cluster, and so do rows that a chain of such sequences connects, column by column.

    Args:
        data: the rows.
        columns: the sequence columns to compare.
        identity: `similarity.MIN_IDENTITY` to 1.
        max_share: of the rows; a cluster that is larger is an error, raised as soon as it is known.

    Raises:
        DataError: a cluster larger than `max_share`, or a search that would take too long.

    Cost: CPU seconds for variants of one protein; 5 s at 0.9 and 50 s at 0.8 for 69,000 mini-proteins; a minute and
    1.5 GiB for 100,000 unrelated proteins of 50 to 400 residues at 0.9. Dearest are sets with many pairs that are
    nearly, but not quite, as identical as asked, such as antibodies below 0.9.
    """
    groups = np.zeros(len(data), dtype=np.int64)
    for column in columns:
        number, _ = factorize(column_values(data, column))
        sequences = list(dict.fromkeys(column_values(data, column)))
        num_rows = np.bincount(number)

        def check_size(family: np.ndarray, num_rows: np.ndarray = num_rows) -> None:
            _refuse(int(np.bincount(family, num_rows).max()), len(data), max_share, f" at identity {identity:g}")

        check: Callable[[np.ndarray], None] | None = check_size if len(columns) == 1 else None
        try:
            family = find_families(sequences, identity, WorkLimit(MAX_WORK), check)
        except TooMuchWorkError as error:
            raise DataError(
                f"split=cluster, column {column!r}: {len(sequences)} sequences with too many pairs just below "
                f"identity {identity:g} to align them all here ({error}). Raise --cluster_identity, or {ALTERNATIVES}."
            ) from error
        groups, _ = factorize(zip(groups.tolist(), family[number].tolist()))
    refuse_giant(groups, max_share, f" at identity {identity:g}")
    return groups


def read_cluster_file(path: str, ids: Sequence[str], column: str) -> np.ndarray:
    """Returns int64 [n] cluster numbers of rows named `ids`, from two columns: representative, tab, member.

    That is what `mmseqs easy-cluster` writes as `..._cluster.tsv`; it may be packed with gzip, as `.gz`.

    Raises:
        DataError: no such file, not a file of UTF-8 text, a line without two fields, a member of two clusters, or rows
            that are in none.
    """
    cluster_of: dict[str, str] = {}
    for row, line in read_lines(Path(path).expanduser()):
        representative, tab, member = line.partition("\t")
        if not tab or not member or "\t" in member:
            raise DataError(f"{path}, row {row}: {line[:60]!r} is not representative, tab, member.")
        if cluster_of.setdefault(member, representative) != representative:
            raise DataError(f"{path}, row {row}: {member!r} is in the cluster of {cluster_of[member]!r} too.")
    missing = [one for one in ids if one not in cluster_of]
    if missing:
        raise DataError(
            f"{path}: {len(missing)} of {len(ids)} rows are in no cluster, for example {missing[0]!r}. Members must be "
            f"named as in column {column!r}."
        )
    return factorize(cluster_of[one] for one in ids)[0]


def refuse_giant(groups: np.ndarray, max_share: float, how: str = "") -> None:
    """DataError where one cluster holds more than `max_share` of the rows."""
    _refuse(int(np.bincount(groups).max()), len(groups), max_share, how)


def _refuse(largest: int, num_rows: int, max_share: float, how: str) -> None:
    if largest > max_share * num_rows:
        raise DataError(
            f"split=cluster: one cluster of near copies{how} holds at least {largest} of {num_rows} rows, more than "
            f"the train share {max_share:g}: the rows are variants of one protein, or connected by intermediates. "
            f"{SMALLER_CLUSTERS if how else 'Cluster with a higher identity, or use --split group:COLUMN.'}"
        )
