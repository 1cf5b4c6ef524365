"""Train, validation and test: from a column, at random, by group, or with near copies kept on one side."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from numpy.typing import NDArray

from ..errors import DataError
from ..labels import Array, IntArray, distinct
from .arguments import CLUSTER_IDENTITY, OF_VARIANTS, SPLIT_CLUSTER, DataArguments, check_rule, check_sizes
from .columns import Report, as_dataset, factorize
from .near_copies import find_clusters
from .variants.substitutions import Substitutions
from .variants.wild_type import find_changes

SPLITS = ("train", "validation", "test")
SPLIT_FILE = "_split_file"  # column of rows from several files: the split that each one's file is; never a result's
UNUSED = "unused"
MAX_FOLDS = 50
PLACES = (*SPLITS, UNUSED)  # what a split column says of a row; unused: it is left out
ALIASES = {name: name for name in PLACES} | {"valid": "validation", "val": "validation", "dev": "validation"}


def draw_rows(num_rows: int, seed: int, most: int | None) -> IntArray:
    """Draws at most `most` numbers below `num_rows` by `seed`, in rising order; None: all."""
    return np.sort(np.random.default_rng(seed).permutation(num_rows)[:most])


def keep_rows(data: Dataset, mask: Array) -> Dataset:
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
            groups allow); "cluster" (similar rows on one side, see `find_clusters`, or by `cluster_file`); "position",
            "mutations": `_variant_sides`. `split_sizes` are fractions of train, validation and test; one of 0 leaves
            that split out. `split_seed`: any integer. `fold`: its rows are the test split, and validation is drawn from
            the others, by `split`, with its share of both.

    Returns:
        The splits (each in file order) and what was done: rule, seed, sizes, notes. After "cluster" and
        "position" they have a column `split_cluster`, the number of each row's cluster or first position. Where no file
        or row says validation, a seeded part of train becomes it; where none says test, there is no test; notes say so.

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
    named_by = args.split_column or (None if args.split or args.fold else next(iter(own_column), None))
    report: Report = {"rule": rule, "seed": seed, "notes": []}
    kind, column = check_rule(rule)
    changes = find_changes(data, args) if rule in OF_VARIANTS else None
    if named_by:
        report["rule"] = "files" if named_by == SPLIT_FILE else f"column:{named_by}"
        side = _named_sides(data, named_by, fractions, seed, report["notes"])
    elif kind == "random" and not args.fold:
        side = _random_sides(len(data), fractions, seed)
    elif changes and not args.fold:
        side = _variant_sides(changes, args, report["notes"])
    else:
        groups = find_whole(data, args)
        if args.fold:
            report["rule"] = f"folds:{args.fold.by}"
            side = _fold_sides(data, args, groups)
        else:
            side = _group_sides(groups, fractions, seed, kind, column)
        if kind != "random":
            report[f"num_{kind}s"] = int(groups.max()) + 1
        if kind == "cluster":
            if not args.cluster_file:
                report["identity"] = args.cluster_identity or CLUSTER_IDENTITY
            data = data.add_column(SPLIT_CLUSTER, groups.tolist())
    if changes and kind == "position":
        data = data.add_column(SPLIT_CLUSTER, changes.first_positions().tolist())
    data = data.remove_columns(own_column)
    splits = DatasetDict()
    for number, name in enumerate(SPLITS):
        if (side == number).any():
            splits[name] = keep_rows(data, side == number)
    return splits, report


def find_whole(data: Dataset, args: DataArguments) -> IntArray:
    """Returns int64 [n]: rows of one number stay together, by `--split`; each by itself where that is random."""
    kind, column = check_rule(args.split or "random")
    if kind == "random":
        return np.arange(len(data))
    if kind in ("position", "mutations"):
        num = int(args.fold.by) if args.fold and not args.fold.column else None
        return find_changes(data, args).group_rows(kind, column, num)
    return factorize(data[column][:])[0] if column else find_clusters(data, args, check_sizes(args.split_sizes)[0])


def find_folds(data: Dataset, args: DataArguments, groups: IntArray) -> NDArray[np.str_]:
    """Returns the fold of each row, (n,) text: a value of its column, or a number from 1.

    Args:
        args: its `fold` says which; made folds are drawn by `split_seed`.
        groups: from `find_whole`; made folds never cut one.

    Raises:
        DataError: fewer than 2 folds or more than `MAX_FOLDS`, or fewer groups than folds are to be made.
    """
    assert args.fold is not None
    if args.fold.column:
        found = np.array(data[args.fold.column][:], np.str_)
    else:
        wanted = int(args.fold.by)
        if groups.max() + 1 < wanted:
            raise DataError(f"--folds {wanted}: there are {groups.max() + 1:,} rows, groups or clusters. Make fewer.")
        made = _group_sides(groups, [1 / wanted] * wanted, args.split_seed, "group", "")
        found = (made + 1).astype(np.str_)
    if not 2 <= (num := len(np.unique(found))) <= MAX_FOLDS:
        raise DataError(
            f"--folds {args.fold.by}: {num:,} folds, of which each is tested by a run of its own; 2 to {MAX_FOLDS} can "
            "be. Name a column with as many values, or how many to make (--folds 5)."
        )
    return found


def _fold_sides(data: Dataset, args: DataArguments, groups: IntArray) -> Array:
    """Assigns rows of the tested fold to test, and draws validation from the others, whole groups of them."""
    assert args.fold is not None
    if SPLIT_FILE in data.column_names:
        raise DataError("--folds divides the rows of one file, and these files are splits already. Join them in one.")
    side = np.full(len(data), SPLITS.index("test"))
    rest = np.flatnonzero(find_folds(data, args, groups) != (args.fold.tested or ""))
    shares = _leave_out_test(check_sizes(args.split_sizes))
    kind, column = check_rule(args.split or "random")
    side[rest] = _group_sides(factorize(groups[rest].tolist())[0], shares, args.split_seed, kind, column)
    return side


def _variant_sides(changes: Substitutions, args: DataArguments, notes: list[str]) -> Array:
    """Assigns rows: those with most substitutions test ("mutations"), or each position is of one split ("position").

    Left out are rows with positions of several splits, and of another length than the wild type, which itself trains.
    """
    fractions = check_sizes(args.split_sizes)
    kind, way = check_rule(str(args.split))
    if kind == "mutations":
        most = changes.find_most(1 - fractions[2])
        side = _random_sides(len(changes.counts), _leave_out_test(fractions), args.split_seed)
        side[changes.counts > most] = 2
        notes.append(f"substitutions of rows that train and validate: {most} at most; those with more test")
    else:
        held = np.zeros((len(changes.counts), len(SPLITS)), bool)
        held[changes.row, _group_sides(changes.blocks(way), fractions, args.split_seed, kind, "")] = True
        side = np.where(held.sum(1) > 1, len(SPLITS), held.argmax(1))
    side[changes.counts < 0] = len(SPLITS)
    if num := np.count_nonzero(side == len(SPLITS)):
        notes.append(f"{num:,} rows are left out: positions of several splits, or another length than the wild type")
    if any(share > 0 and number not in side for number, share in enumerate(fractions)):
        lack = _describe_lack("rows with positions of one split alone", fractions)
        raise DataError(f"--split {args.split}: {lack} For rows with many positions there is --split mutations.")
    return side


def _named_sides(data: Dataset, column: str, fractions: Sequence[float], seed: int, notes: list[str]) -> Array:
    """Assigns rows to the splits that a column names; validation is drawn from train where no row says it."""
    found = distinct(data.with_format("arrow")[:][column])
    names = found.cells.to_pylist()
    side_of = [PLACES.index(str(canonical_split(name))) for name in names]
    side = np.array(side_of, np.int64)[found.number]
    train = np.flatnonzero(side == 0)
    if not len(train):
        raise DataError(f"split column {column!r}: no row says train; found {', '.join(sorted(names))}.")
    if not (side == 1).any() and fractions[1] > 0:
        drawn = train[_random_sides(len(train), _leave_out_test(fractions), seed) == 1]
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
            shares = None if column else fractions
            given = {"number": number, "keys": keys, "fractions": shares, "seed": args.split_seed}
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


def _leave_out_test(fractions: Sequence[float]) -> tuple[float, float, float]:
    train, validation, _ = fractions
    return train / (train + validation), validation / (train + validation), 0.0


def _random_sides(num: int, fractions: Sequence[float], seed: int) -> Array:
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


def _group_sides(groups: Array, fractions: Sequence[float], seed: int, kind: str, column: str) -> Array:
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
