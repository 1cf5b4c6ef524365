"""Train, validation and test: from a column, at random, by group, or with near copies kept on one side."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

from ..errors import ArgumentError, DataError
from .clusters import CLUSTER_IDENTITY, cluster_numbers, read_cluster_file, refuse_giant
from .columns import column_values, factorize

SPLITS = ("train", "validation", "test")
SPLIT_CLUSTER = "split_cluster"  # column that the split `cluster` adds: which rows stayed together
VALIDATION_SHARE = 0.1  # of train, where nothing else says which rows choose the best model
ALIASES = {name: name for name in SPLITS} | {"valid": "validation", "val": "validation", "dev": "validation"}


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


def with_validation(sizes: Sequence[float]) -> tuple[float, float, float]:
    """Returns the shares with a tenth of train's for validation, where that has none; else as they are.

    Raises:
        ArgumentError: as `check_sizes`.
    """
    train, validation, test = check_sizes(sizes)
    taken = 0.0 if validation > 0 else VALIDATION_SHARE * train
    return train - taken, validation + taken, test


def check_rule(rule: str) -> tuple[str, str]:
    """Returns the kind ("random", "group", "cluster") and the group column ("" but for group) of a `--split` value."""
    kind, _, column = rule.partition(":")
    if (kind in ("random", "cluster") and not column and ":" not in rule) or (kind == "group" and column):
        return kind, column
    raise ArgumentError(f"split={rule!r}: use random, group:COLUMN or cluster.")


def canonical_split(value: object) -> str | None:
    """Returns "train", "validation" or "test" for a name in any case (valid, val and dev too), otherwise None."""
    return ALIASES.get(str(value).strip().lower()) if value is not None else None


def split_rows(
    data: Dataset,
    *,
    rule: str = "random",
    sizes: Sequence[float] = (0.8, 0.1, 0.1),
    seed: int = 42,
    sequence_columns: Sequence[str] = ("sequence",),
    cluster_column: str | None = None,
    cluster_identity: float = CLUSTER_IDENTITY,
    cluster_file: str | None = None,
    id_column: str | None = None,
) -> tuple[DatasetDict, dict[str, Any]]:
    """Divides rows into train, validation and test; the same seed gives the same split on every machine.

    Args:
        data: the rows.
        rule: "random"; "group:COLUMN" (all rows of a group on one side, sizes met as closely as whole groups allow); or
            "cluster" (similar rows on one side, see `clusters.cluster_numbers`).
        sizes: shares of train, validation and test, summing to 1; a share of 0 leaves that split out.
        seed: any integer.
        sequence_columns: the columns whose sequences "cluster" compares together.
        cluster_column: one column to compare instead.
        cluster_identity: no two rows at least this identical in all compared columns stand in different splits.
        cluster_file: clusters that another program made, instead; see `clusters.read_cluster_file`.
        id_column: names the rows as that file does.

    Returns:
        The splits (each in file order) and what was done: rule, seed, sizes, notes. After "cluster" validation and test
        have a column `split_cluster`, the number of each row's cluster.

    Raises:
        ArgumentError: a malformed rule or sizes.
        DataError: fewer rows, groups or clusters than splits, one cluster larger than the train share, or see
            `clusters`.

    Cost: random and group take milliseconds; see `clusters.cluster_numbers` for cluster.
    """
    kind, column = check_rule(rule)
    shares = check_sizes(sizes)
    report: dict[str, Any] = {"rule": rule, "seed": seed, "notes": []}
    if kind == "random":
        side = _random_sides(len(data), shares, seed)
    else:
        if kind == "cluster" and cluster_file:
            groups = read_cluster_file(cluster_file, column_values(data, str(id_column)), str(id_column))
            report |= {"file": cluster_file, "id_column": id_column}
            refuse_giant(groups, shares[0])
        elif kind == "cluster":
            names = [cluster_column] if cluster_column else list(sequence_columns)
            groups = cluster_numbers(data, names, cluster_identity, shares[0])
            report |= {"identity": cluster_identity, "columns": names}
        else:
            groups, _ = factorize(column_values(data, column))
        report[f"num_{kind}s"] = int(groups.max()) + 1
        side = _group_sides(groups, shares, seed, kind, column)
    splits, report = _divide(data, side, shares, report)
    if kind == "cluster":
        for number, name in enumerate(SPLITS):
            if name in splits:
                splits[name] = splits[name].add_column(SPLIT_CLUSTER, groups[side == number].tolist())
    return splits, report


def split_by_column(
    data: Dataset, column: str, *, sizes: Sequence[float] = (0.8, 0.1, 0.1), seed: int = 42
) -> tuple[DatasetDict, dict[str, Any]]:
    """Divides rows by a column that says train, valid (validation, val, dev) or test, in any case.

    Where no row says validation, a seeded share sizes[1] / (sizes[0] + sizes[1]) of train becomes it and a note in the
    report says so. Where no row says test, there is no test split, and a note says so.

    Args:
        data: the rows.
        column: the column; it is dropped from the result.
        sizes: see `split_rows`; only used to carve out validation.
        seed: any integer.

    Raises:
        DataError: other values (listed with their counts), no train rows, or too few train rows to carve from.
    """
    shares = check_sizes(sizes)
    values = [str(value) if value is not None else "" for value in column_values(data, column)]
    counts = Counter(values)
    if any(canonical_split(value) is None for value in counts):
        raise DataError(unknown_splits(column, counts))
    numbers = {value: SPLITS.index(ALIASES[value.strip().lower()]) for value in counts}
    side = np.array([numbers[value] for value in values], dtype=np.int64)
    report: dict[str, Any] = {"rule": f"column:{column}", "seed": seed, "notes": []}
    train = np.flatnonzero(side == 0)
    if not len(train):
        raise DataError(f"split column {column!r}: no row says train; found {', '.join(sorted(counts))}.")
    if not (side == 1).any() and shares[1] > 0:
        share = shares[1] / (shares[0] + shares[1])
        part = _random_sides(len(train), (1 - share, share, 0.0), seed)
        side[train[part == 1]] = 1
        report["notes"].append(
            f"no row says validation: {int((part == 1).sum())} of {len(train)} train rows (seed {seed}) became it"
        )
    if not (side == 2).any():
        report["notes"].append("no row says test: there is no test split")
    return _divide(data.remove_columns(column), side, None, report)


def unknown_splits(column: str, counts: Counter[str]) -> str:
    """Returns the sentence that a split column holds other values, with how many rows have each."""
    listed = ", ".join(f"{value!r} ({num} rows)" for value, num in counts.most_common(20))
    return (
        f"split column {column!r} holds {listed}; allowed are train, valid (or validation, val, dev) and test. "
        f"Rename the values, or leave such rows out with --filter."
    )


def split_stream(
    data: IterableDataset,
    *,
    rule: str = "random",
    split_column: str | None = None,
    sizes: Sequence[float] = (0.8, 0.1, 0.1),
    seed: int = 42,
    sequence_columns: Sequence[str] = ("sequence",),
) -> tuple[IterableDatasetDict, dict[str, Any]]:
    """Divides a stream without reading it: each row goes by its split column, or by a seeded hash.

    "random" hashes the row's sequences, so identical rows stay together; "group:COLUMN" hashes the group. Sizes are
    met on average only. Each split reads the whole stream and keeps its rows. No validation is carved out of a split
    column.

    Raises:
        ArgumentError: `cluster`, which needs all rows at once.
        DataError: while iterating, a split column's value that is not train, valid or test (row named).
    """
    shares = check_sizes(sizes)
    report: dict[str, Any] = {"rule": f"column:{split_column}" if split_column else rule, "seed": seed, "notes": []}
    keys: tuple[str, ...] = (split_column,) if split_column else tuple(sequence_columns)
    if not split_column:
        kind, column = check_rule(rule)
        if kind == "cluster":
            raise ArgumentError("split=cluster needs all rows at once; drop --streaming, or use random or group.")
        keys = (column,) if column else keys
        report["notes"].append("a stream: rows are assigned by a seeded hash, sizes hold on average")
    splits = IterableDatasetDict()
    for number, name in enumerate(SPLITS):
        if split_column or shares[number] > 0:
            keep = _StreamSide(number, keys, shares, seed, bool(split_column))
            kept = data.filter(keep, batched=True)
            splits[name] = kept.remove_columns(split_column) if split_column else kept
    return splits, report


class _StreamSide:
    """Batch predicate of one split; a class so that data-loader workers can receive it."""

    def __init__(self, number: int, keys: Sequence[str], shares: Sequence[float], seed: int, by_name: bool) -> None:
        self.number, self.keys, self.seed, self.by_name = number, tuple(keys), seed, by_name
        self.edges = (shares[0], shares[0] + shares[1] if shares[2] > 0 else 1.0)

    def __call__(self, batch: Mapping[str, Sequence[object]]) -> list[bool]:
        cells = zip(*(batch[key] for key in self.keys))
        if self.by_name:
            return [self.named(row[0], batch, index) == self.number for index, row in enumerate(cells)]
        return [self.side("\t".join(map(str, row))) == self.number for row in cells]

    def side(self, text: str) -> int:
        digest = hashlib.blake2b(f"{self.seed}\t{text}".encode(), digest_size=8).digest()
        position = int.from_bytes(digest, "big") / 2**64
        return 0 if position < self.edges[0] else 1 if position < self.edges[1] else 2

    def named(self, value: object, batch: Mapping[str, Sequence[object]], index: int) -> int:
        name = canonical_split(value)
        if name is None:
            row = batch["source_row"][index] if "source_row" in batch else "?"
            raise DataError(
                f"row {row}, column {self.keys[0]!r}, value {value!r}: allowed are train, valid (or validation, val, "
                f"dev) and test. Rename the value, or leave such rows out with --filter."
            )
        return SPLITS.index(name)


def _random_sides(num: int, shares: Sequence[float], seed: int) -> np.ndarray:
    """Returns int64 [n] of 0, 1, 2; counts are rounded shares, at least one row for every share above 0."""
    wanted = [number for number, share in enumerate(shares) if share > 0]
    if num < len(wanted):
        raise DataError(f"{num} row{'s' * (num != 1)} cannot fill {len(wanted)} splits; add rows or set a share to 0.")
    counts = [0, 0, 0]
    for number in wanted[1:]:
        counts[number] = max(1, round(shares[number] * num))
    while num - sum(counts) < 1:  # rounding up may leave train empty in tiny tables
        counts[int(np.argmax(counts))] -= 1
    counts[0] = num - sum(counts)
    side = np.repeat(np.arange(3), counts)
    return side[np.random.default_rng(seed).permutation(num)]


def _group_sides(groups: np.ndarray, shares: Sequence[float], seed: int, kind: str, column: str) -> np.ndarray:
    """Largest group first, each to the split that still lacks most; no wanted split stays empty."""
    sizes = np.bincount(groups)
    wanted = [number for number, share in enumerate(shares) if share > 0]
    if len(sizes) < len(wanted):
        where = f" in column {column!r}" if column else ""
        raise DataError(
            f"split={kind}: {len(sizes)} {kind}{'s' * (len(sizes) != 1)}{where} cannot fill {len(wanted)} splits."
        )
    order = np.random.default_rng(seed).permutation(len(sizes))
    order = order[np.argsort(-sizes[order], kind="stable")]
    lacking = {number: shares[number] * len(groups) for number in wanted}
    empty = set(wanted)
    side_of = np.zeros(len(sizes), dtype=np.int64)
    for left, group in zip(range(len(order), 0, -1), order):
        open_splits = empty if len(empty) == left else wanted
        number = max(sorted(open_splits), key=lambda candidate: lacking[candidate])
        side_of[group] = number
        lacking[number] -= float(sizes[group])
        empty.discard(number)
    return side_of[groups]


def _divide(
    data: Dataset, side: np.ndarray, shares: Sequence[float] | None, report: dict[str, Any]
) -> tuple[DatasetDict, dict[str, Any]]:
    splits = DatasetDict()
    for number, name in enumerate(SPLITS):
        rows = np.flatnonzero(side == number)
        if len(rows) or (shares is not None and shares[number] > 0):
            splits[name] = data.select(rows)
    report["sizes"] = {name: len(split) for name, split in splits.items()}
    return splits, report
