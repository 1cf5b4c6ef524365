"""Train, validation and test: from a column, at random, by group, or with near copies kept on one side."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from numpy.typing import NDArray

from ..errors import DataError
from ..labels import distinct
from .arguments import CLUSTER_IDENTITY, SPLIT_CLUSTER, DataArguments, check_rule, check_sizes
from .columns import Report, as_dataset, factorize
from .formats import read_lines
from .near_copies import find_families

SPLITS = ("train", "validation", "test")
SPLIT_FILE = "_split_file"  # column of rows from several files: the split that each one's file is; never a result's
UNUSED = "unused"
PLACES = (*SPLITS, UNUSED)  # what a split column says of a row; unused: it is left out
ALIASES = {name: name for name in PLACES} | {"valid": "validation", "val": "validation", "dev": "validation"}


def draw_rows(num_rows: int, seed: int, most: int | None) -> NDArray[np.int64]:
    """Draws at most `most` numbers below `num_rows` by `seed`, in rising order; None: all."""
    return np.sort(np.random.default_rng(seed).permutation(num_rows)[:most])


def keep_rows(data: Dataset, mask: np.ndarray) -> Dataset:
    """Copies the rows of `data` where `mask` (n,) is True: a selection of single rows is 20 times slower to read."""
    return as_dataset(data.with_format("arrow")[:].filter(pa.array(mask)))


def canonical_split(value: object) -> str | None:
    """Returns one of `PLACES` for a name in any case (valid, val and dev too), otherwise None."""
    return ALIASES.get(str(value).strip().lower()) if value is not None else None


def split_rows(data: Dataset, args: DataArguments) -> tuple[DatasetDict, Report]:
    """Divides rows into train, validation and test; the same seed gives the same split on every machine.

    Args:
        data: the rows; with a column `SPLIT_FILE`, the files are the splits unless the arguments say otherwise.
        args: `DataArguments`. `split_column`: a column that says train, valid (validation, val, dev) or test, in any
            case. `split`: "random"; "group:COLUMN" (all rows of a group on one side, sizes met as closely as whole
            groups allow); or "cluster" (similar rows on one side, see `find_clusters`, or by
            `cluster_file`). `split_sizes` are fractions of train, validation and test; one of 0 leaves that split out.
            `split_seed`: any integer.

    Returns:
        The splits (each in file order) and what was done: rule, seed, sizes, notes. After "cluster" they have
        a column `split_cluster`, the number of each row's cluster. Where no file or row says validation, a seeded
        fraction of train becomes it; where none says test, there is no test split; notes say so.

    Raises:
        ArgumentError: a malformed rule or sizes.
        DataError: fewer rows, groups or clusters than splits, one cluster larger than the train fraction, or see
            `find_clusters`; no row of a split column says train.

    Cost: random and group take milliseconds; see `find_clusters` for cluster.
    """
    fractions = check_sizes(args.split_sizes)
    seed = args.split_seed
    rule = args.split or "random"
    own_column = [name for name in (SPLIT_FILE, args.split_column) if name in data.column_names]
    named_by = args.split_column or (None if args.split else next(iter(own_column), None))
    report: Report = {"rule": rule, "seed": seed, "notes": []}
    kind, column = check_rule(rule)
    if named_by:
        report["rule"] = "files" if named_by == SPLIT_FILE else f"column:{named_by}"
        side = _named_sides(data, named_by, fractions, seed, report["notes"])
    elif kind == "random":
        side = _random_sides(len(data), fractions, seed)
    else:
        groups = factorize(data[column][:])[0] if column else find_clusters(data, args, fractions[0])
        report[f"num_{kind}s"] = int(groups.max()) + 1
        side = _group_sides(groups, fractions, seed, kind, column)
        if kind == "cluster":
            if not args.cluster_file:
                report["identity"] = args.cluster_identity or CLUSTER_IDENTITY
            data = data.add_column(SPLIT_CLUSTER, groups.tolist())
    data = data.remove_columns(own_column)
    splits = DatasetDict()
    for number, name in enumerate(SPLITS):
        if (side == number).any():
            splits[name] = keep_rows(data, side == number)
    report["sizes"] = {name: len(split) for name, split in splits.items()}
    return splits, report


def find_clusters(data: Dataset, args: DataArguments, max_share: float) -> np.ndarray:
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
            families = find_families(distinct_ones, args.cluster_identity or CLUSTER_IDENTITY)[numbers]
            groups, _ = factorize(zip(groups.tolist(), families.tolist()))
    largest = int(np.bincount(groups).max())
    if largest > max_share * len(groups):
        raise DataError(
            f"split=cluster: one cluster of near copies holds {largest} of {len(groups)} rows, more than the "
            f"train share {max_share:g}: the rows are variants of one protein, or connected by intermediates. Cluster "
            "with a higher identity, compare one column with --cluster_column, or use --split group:COLUMN."
        )
    return groups


def read_cluster_file(path: str, ids: Sequence[str], column: str) -> np.ndarray:
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


def _named_sides(data: Dataset, column: str, fractions: Sequence[float], seed: int, notes: list[str]) -> np.ndarray:
    """Assigns rows to the splits that a column names; validation is drawn from train where no row says it."""
    found = distinct(data.with_format("arrow")[:][column])
    names = found.cells.to_pylist()
    side_of = [PLACES.index(str(canonical_split(name))) for name in names]
    side = np.array(side_of, np.int64)[found.number]
    train = np.flatnonzero(side == 0)
    if not len(train):
        raise DataError(f"split column {column!r}: no row says train; found {', '.join(sorted(names))}.")
    if not (side == 1).any() and fractions[1] > 0:
        fraction = fractions[1] / (fractions[0] + fractions[1])
        drawn = train[_random_sides(len(train), (1 - fraction, fraction, 0.0), seed) == 1]
        side[drawn] = 1
        notes.append(f"no row says validation: {len(drawn)} of {len(train)} train rows (seed {seed}) became it")
    if num := np.count_nonzero(side == len(SPLITS)):
        notes.append(f"{num:,} rows are left out: column {column!r} says {UNUSED}")
    if not (side == 2).any():
        notes.append("no row says test: there is no test split")
    return side


def split_stream(data: IterableDataset, args: DataArguments) -> tuple[IterableDatasetDict, Report]:
    """Divides a stream without reading it: each row goes by its split column, or by a seeded hash.

    "random" hashes the row's sequences, so identical rows stay together; "group:COLUMN" hashes the group. Sizes are
    met on average only. Each split reads the whole stream and keeps its rows. No validation is carved out of a split
    column. Arguments as of `split_rows`; clusters need all rows at once, and `DataArguments` refuses them.
    """
    fractions = check_sizes(args.split_sizes)
    column = args.split_column
    rule = args.split or "random"
    report: Report = {"rule": f"column:{column}" if column else rule, "seed": args.split_seed, "notes": []}
    key = column or check_rule(rule)[1]
    keys = [key] if key else args.sequence_columns
    if not column:
        report["notes"].append("a stream: rows are assigned by a seeded hash, sizes hold on average")
    splits = IterableDatasetDict()
    for number, name in enumerate(SPLITS):
        if column or fractions[number] > 0:
            given = {
                "number": number,
                "keys": keys,
                "fractions": None if column else fractions,
                "seed": args.split_seed,
            }
            kept = data.filter(_are_in_split, batched=True, fn_kwargs=given)
            splits[name] = kept.remove_columns(column) if column else kept
    return splits, report


def _are_in_split(
    batch: Mapping[str, Sequence[object]],
    number: int,
    keys: Sequence[str],
    fractions: Sequence[float] | None,
    seed: int,
) -> list[bool]:
    """Says of rows whether they go to split `number`; where there are no `fractions`, the key names the split."""
    rows = zip(*(batch[key] for key in keys))
    if fractions is None:
        return [canonical_split(cells[0]) == SPLITS[number] for cells in rows]
    return [_draw_side("\t".join(map(str, cells)), fractions, seed) == number for cells in rows]


def _draw_side(text: str, fractions: Sequence[float], seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}\t{text}".encode(), digest_size=8).digest()
    position = int.from_bytes(digest, "big") / 2**64
    if position < fractions[0]:
        return 0
    return 1 if fractions[2] == 0 or position < fractions[0] + fractions[1] else 2


def _random_sides(num: int, fractions: Sequence[float], seed: int) -> np.ndarray:
    """Returns int64 [n] of 0, 1, 2; counts are rounded fractions, at least one row for every fraction above 0."""
    wanted = [number for number, fraction in enumerate(fractions) if fraction > 0]
    if num < len(wanted):
        raise DataError(_describe_lack(f"{num} row{'s' if num != 1 else ''}", fractions))
    counts = [0, 0, 0]
    for number in wanted[1:]:
        counts[number] = max(1, round(fractions[number] * num))
    while num - sum(counts) < 1:  # rounding up may leave train empty in tiny tables
        counts[int(np.argmax(counts))] -= 1
    counts[0] = num - sum(counts)
    side = np.repeat(np.arange(3), counts)
    return side[np.random.default_rng(seed).permutation(num)]


def _describe_lack(what: str, fractions: Sequence[float]) -> str:
    given = " ".join(f"{fraction:g}" for fraction in fractions)
    num = sum(fraction > 0 for fraction in fractions)
    return (
        f"{what} cannot fill {num} splits (--split_sizes {given}): add rows, or set the share of a split that may be "
        "empty to 0."
    )


def _group_sides(groups: np.ndarray, fractions: Sequence[float], seed: int, kind: str, column: str) -> np.ndarray:
    """Assigns groups to splits, largest first, each to the split that still lacks most; no wanted split stays empty."""
    sizes = np.bincount(groups)
    wanted = [number for number, fraction in enumerate(fractions) if fraction > 0]
    if len(sizes) < len(wanted):
        where = f" in column {column!r}" if column else ""
        found = _describe_lack(f"{len(sizes)} {kind}{'s' if len(sizes) != 1 else ''}{where}", fractions)
        raise DataError(f"--split {kind}: {found}")
    order = np.random.default_rng(seed).permutation(len(sizes))
    order = order[np.argsort(-sizes[order], kind="stable")]
    lacking = {number: fractions[number] * len(groups) for number in wanted}
    empty = set(wanted)
    side_of = np.zeros(len(sizes), dtype=np.int64)
    for left, group in zip(range(len(order), 0, -1), order):
        open_splits = empty if len(empty) == left else wanted
        number = max(sorted(open_splits), key=lambda candidate: lacking[candidate])
        side_of[group] = number
        lacking[number] -= float(sizes[group])
        empty.discard(number)
    return side_of[groups]
