"""The command-line arguments of the data layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, Optional

from ..arguments.checks import COUNT, SEED, check_choices, check_ranges, ranges_in_types
from ..errors import ArgumentError
from .split_rules import (
    CLUSTER_IDENTITY,
    MIN_IDENTITY,
    SMALLEST_IDENTITY,
    SPLIT_CLUSTER,
    check_cluster_identity,
    check_rule,
    check_sizes,
)

RESERVED = ("label", "bound", "source_row", SPLIT_CLUSTER)  # columns that loading writes


@dataclass
class ReadingArguments:
    """Says where rows are and what in them is refused, whatever becomes of them."""

    _argument_group_name = "data"  # in --help

    dataset_name: Optional[str] = field(  # noqa: UP045 (HfArgumentParser reads these types)
        default=None,
        metadata={
            "help": "Hub dataset id, local CSV, TSV, JSONL, JSON list, FASTA (each also .gz) or Parquet file, pattern "
            "of such files, or folder: with train, validation and test files, or of save_to_disk. Left out, training "
            "generates demo data."
        },
    )
    dataset_config_name: Optional[str] = field(default=None, metadata={"help": "Configuration of a Hub dataset."})  # noqa: UP045
    dataset_revision: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "Commit, tag or branch of a Hub dataset; a commit makes the run repeatable."}
    )
    streaming: bool = field(
        default=False, metadata={"help": "Read rows while training instead of before; for data larger than memory."}
    )
    id_column: Optional[str] = field(default=None, metadata={"help": "Column kept to name rows in predictions."})  # noqa: UP045
    filter: Optional[str] = field(  # noqa: UP045
        default=None,
        metadata={"help": "Rows to keep: COLUMN OP VALUE, joined by 'and', as in pKd > 7 and antibody == 'S309'."},
    )
    bad_rows: Literal["error", "drop"] = field(
        default="error",
        metadata={"help": "error: stop and list unusable rows. drop: leave them out, listed in rejected_rows.csv."},
    )
    stop_codon: Literal["refuse", "trim"] = field(
        default="refuse", metadata={"help": "trim: remove one * at the end of a sequence. refuse: the row is unusable."}
    )
    gaps: Literal["refuse", "remove"] = field(
        default="refuse",
        metadata={"help": "remove: take the gaps - and . out of sequences. refuse: the row is unusable."},
    )
    max_residues: Annotated[int, COUNT] | None = field(
        default=None,
        metadata={"help": "Longest encoder input in residues (a pair: both parts); left out: as the encoder allows."},
    )
    too_long: Literal["error", "truncate", "window"] = field(
        default="error",
        metadata={"help": "Sequences that are too long: error (unusable), truncate, or window (overlapping pieces)."},
    )


@dataclass
class LabelledArguments(ReadingArguments):
    """Says which columns mean what."""

    _argument_group_name = "data"

    sequence_columns: list[str] = field(
        default_factory=lambda: ["sequence"],
        metadata={"help": "Columns with amino-acid sequences, one chain per column, for example: heavy light antigen."},
    )
    missing_chains: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Sequence columns that rows may leave empty, for example light where some rows are nanobodies. A "
            "row never lacks all of its sequences."
        },
    )
    label_column: str = field(
        default="label", metadata={"help": "Column to predict: numbers, or bounds such as <=7 and >10.5."}
    )
    censor_column: Optional[str] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": "Column that marks labels known only as a bound: <, <=, >, >=, = or empty; or 0/1, where 1 means "
            "that the true value is at or below the label."
        },
    )
    group_column: Optional[str] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": "Column of groups, such as antigen: final scores have the mean Spearman within those of 10 rows or "
            "more, and a baseline predicts the mean of each."
        },
    )


@dataclass
class DataArguments(LabelledArguments):
    """Says where the rows are, which columns mean what, what is refused, and how rows are split.

    Raises:
        ArgumentError: a malformed value, or two that contradict each other.
    """

    _argument_group_name = "data"

    split_column: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "Column that says train, valid (validation, val, dev) or test for each row."}
    )
    split: Optional[str] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": "How to split where neither a column nor files say it: random (the default), group:COLUMN (whole "
            "groups on one side) or cluster (similar sequences on one side, see --cluster_identity)."
        },
    )
    split_sizes: list[float] = field(
        default_factory=lambda: [0.8, 0.1, 0.1],
        metadata={"help": "Shares of train, validation and test; they sum to 1."},
    )
    split_seed: Annotated[int, SEED] = field(
        default=42, metadata={"help": "Seed of the split; apart from --seed, so that repeated runs share one test set."}
    )
    cluster_column: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "Sequence column that --split cluster compares, instead of all together."}
    )
    cluster_identity: Optional[float] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": f"With --split cluster: sequences at least this identical, {MIN_IDENTITY:g} to 1, or by MMseqs2 "
            f"(the extra `clustering`) from {SMALLEST_IDENTITY:g}, stand on one side; left out: {CLUSTER_IDENTITY:g}."
        },
    )
    cluster_file: Optional[str] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": "With --split cluster: clusters made by another program, two columns, representative and member, "
            "separated by a tab, as MMseqs2 writes; members are named as in --id_column."
        },
    )
    max_train_samples: Annotated[int, COUNT] | None = field(
        default=None, metadata={"help": "Train on a random subset of this many rows (the first ones of a stream)."}
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(self, ranges_in_types(DataArguments))
        check_sizes(self.split_sizes)
        if self.cluster_identity is not None:
            check_cluster_identity(self.cluster_identity)
        kind, split_group = check_rule(self.split or "random")
        read = [*self.sequence_columns, self.group_column, self.id_column, self.split_column]
        taken = next((column for column in (*read, split_group) if column in RESERVED), None)
        if taken is not None:
            raise ArgumentError(f"column {taken!r} is one that loading writes; rename yours.")
        if not self.sequence_columns or len(set(self.sequence_columns)) < len(self.sequence_columns):
            raise ArgumentError(f"sequence_columns={self.sequence_columns}: name at least one column, each once.")
        chains, allowed = self.missing_chains, ", ".join(self.sequence_columns)
        if chains and (
            len(self.sequence_columns) < 2 or sorted(chains) != sorted({*chains} & {*self.sequence_columns})
        ):
            raise ArgumentError(
                f"missing_chains={chains}: name some of several sequence columns ({allowed}), each once; a row without "
                "any sequence cannot be used."
            )
        if self.split and self.split_column:
            raise ArgumentError(f"split={self.split!r} and split_column={self.split_column!r}: give one of them.")
        if kind == "cluster" and self.streaming:
            raise ArgumentError("split=cluster needs all rows at once; drop --streaming, or use random or group.")
        for name in ("cluster_column", "cluster_identity", "cluster_file"):
            if getattr(self, name) is not None and kind != "cluster":
                raise ArgumentError(f"{name} only acts with --split cluster.")
        if self.cluster_file and not self.id_column:
            raise ArgumentError(f"cluster_file={self.cluster_file!r} names rows; say with --id_column where they are.")
        if self.cluster_file and (self.cluster_column or self.cluster_identity is not None):
            raise ArgumentError("cluster_file holds finished clusters; drop --cluster_column and --cluster_identity.")
        if self.cluster_column and self.cluster_column not in self.sequence_columns:
            raise ArgumentError(f"cluster_column={self.cluster_column!r}: use a sequence column, one of {allowed}.")

    @property
    def split_group_column(self) -> str | None:
        """COLUMN of `--split group:COLUMN`, otherwise None."""
        return check_rule(self.split or "random")[1] or None
