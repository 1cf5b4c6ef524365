"""The command-line arguments of the data layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from ..arguments import COUNT, SEED, check_choices, check_ranges, option
from ..errors import ArgumentError
from ..labels import TaskChoice

if TYPE_CHECKING:
    from ..labels import RowFilter

SPLIT_CLUSTER = "split_cluster"  # column that the splits `cluster` and `position` add: which rows stayed together
NO_WILD_TYPE = ("auto", "none")
OF_VARIANTS = ("position", "position:modulo", "position:contiguous", "mutations")
CLUSTER_IDENTITY = 0.8
SPLIT_SIZES = (0.8, 0.1, 0.1)
MIN_IDENTITY = 0.7  # below, unrelated proteins share as many k-mers as relatives must, so nearly all pairs are aligned
TooLong = Literal["error", "truncate", "window"]
NUMBERS = "numbers"  # what columns beside sequences become: an input of a head, and a part of batches
RESIDUES = "residues"  # what heads read off sequences beside embeddings: a part of batches
KEPT = "_kept"  # column of rows with --filter_train: whether they may train; never a result's
RESERVED = ("label", "bound", "source_row", SPLIT_CLUSTER)  # columns that loading writes


@dataclass(frozen=True)
class Fold:
    """Says which rows one of several runs is tested on.

    Attributes:
        by: column whose values are the folds; or how many are made, a whole number.
        tested: the fold that is tested; None: none is, and all rows are for training and validation.
    """

    by: str
    tested: str | None = None

    @property
    def column(self) -> str | None:
        """The column; None where folds are made."""
        return None if self.by.isdecimal() else self.by


@dataclass
class ReadingArguments:
    """Says where rows are and what in them is refused, whatever becomes of them."""

    _argument_group_name = "data"  # in --help

    dataset_name: str | None = option(
        None,
        "Hub dataset id, local CSV, TSV, JSONL, JSON list, FASTA (each also .gz) or Parquet file, pattern "
        "of such files, or folder: with train, validation and test files, or of save_to_disk. Left out, training "
        "generates demo data.",
    )
    dataset_config_name: str | None = option(None, "Configuration of a Hub dataset.")
    dataset_revision: str | None = option(
        None, "Commit, tag or branch of a Hub dataset; a commit makes the run repeatable."
    )
    streaming: bool = option(False, "Read rows while training instead of before; for data larger than memory.")
    id_column: str | None = option(
        None, "Column kept to name rows in predictions, and by which evaluate finds those of a CSV."
    )
    filter: str | None = option(
        None,
        "Rows to use, in quotes: \"pKd > 7 and species == 'human'\". Comparisons of a column with a number or quoted "
        "text, in [...], is None, joined by and, or, not and brackets; a name of several words stands in backticks. "
        "Rows of which it is not known, since a cell is empty, are left out.",
    )
    wild_type: str = option(
        "auto",
        "The protein that rows are variants of: a sequence, a FASTA file of one, none, or auto, which looks for one.",
    )
    mutation_column: str | None = option(
        None, "Column of mutations of --wild_type (A23G:D40N, from 1, or WT), which make the first sequence column."
    )
    bad_rows: Literal["error", "drop"] = option(
        "error", "error: stop and list unusable rows. drop: leave them out, listed in rejected_rows.csv."
    )
    max_residues: Annotated[int, COUNT] | None = option(
        None, "Longest encoder input in residues (a pair: both parts); left out: as the encoder allows."
    )
    too_long: TooLong = option(
        "truncate",
        "Sequences that are too long: window (of hf-ext train: read in windows that overlap by a quarter, whose states "
        "are averaged), truncate (the end is cut off), or error (unusable). Left out, predict and evaluate do as the "
        "model was trained.",
    )

    def __post_init__(self) -> None:
        if self.read_filters() and self.streaming:
            raise ArgumentError("--filter and --filter_train look at all rows: filter the stream, or drop --streaming.")
        if self.mutation_column and self.wild_type in NO_WILD_TYPE:
            raise ArgumentError(
                f"--mutation_column {self.mutation_column}: of what? Give --wild_type SEQUENCE or FILE."
            )

    def read_filters(self) -> dict[str, RowFilter]:
        """Reads what `--filter` and `--filter_train` ask of rows, by name; ArgumentError where that is no condition."""
        given = {name: getattr(self, name, None) for name in ("filter", "filter_train")}
        from ..labels import RowFilter  # here, since --help needs no tables

        return {name: RowFilter(text, f"--{name} {text!r}") for name, text in given.items() if text is not None}


@dataclass
class LabelledArguments(ReadingArguments):
    """Says which columns mean what."""

    _argument_group_name = "data"

    sequence_columns: list[str] = option(
        ["sequence"], "Columns with amino-acid sequences, one chain per column, for example: heavy light antigen."
    )
    missing_chains: list[str] = option(
        [],
        "Sequence columns that rows may leave empty, for example light where some rows are nanobodies. A "
        "row never lacks all of its sequences.",
    )
    label_column: list[str] = option(
        ["label"],
        "Column to predict: numbers, bounds such as <=7 and >10.5, classes, labels separated by ;, or a label for each "
        "residue. Several columns: numbers, or 0 and 1.",
    )
    marker_classes: list[str] = option(
        [],
        "Classes whose names read as no value otherwise, such as NA or none, as the column spells them; with --task "
        "classification all are, beside names.",
    )
    mask_column: str | None = option(
        None, "Column that says by 0 or 1 for each residue whether its label is known, for example 0011110."
    )
    mask_file: str | None = option(
        None, "FASTA of such masks instead of a column, which names rows as --id_column does: >P1, and 0011110 below."
    )
    censor_column: str | None = option(
        None,
        "Column that marks labels known only as a bound: <, <=, >, >=, = or empty; or 0/1, where 1 means "
        "that the true value is at or below the label.",
    )
    group_column: str | None = option(
        None,
        "Column of groups, such as antigen: final scores have the mean Spearman within those of 10 rows or more, and a "
        "baseline predicts the mean of each.",
    )


@dataclass
class DataArguments(LabelledArguments):
    """Says where the rows are, which columns mean what, what is refused, and how rows are split.

    Raises:
        ArgumentError: a malformed value, or two that contradict each other.
    """

    _argument_group_name = "data"

    task: TaskChoice = option(
        "auto", "What labels are; auto reads their column, and the log says what it took them for."
    )
    numeric_columns: list[str] = option(
        [], "Columns of numbers that the model reads beside sequences, such as ph; empty cells are allowed."
    )
    category_columns: list[str] = option(
        [], "Columns of names that the model reads beside sequences, such as isotype; at most 100 names each."
    )
    label_hierarchy: str | None = option(
        None,
        "OBO file, such as go-basic.obo, of labels of which a row has several: it then has all above its own, too, by "
        "is_a and part_of, and each is predicted at least as probable as those below it.",
    )
    split_column: str | None = option(
        None, "Column that says for each row train, valid (validation, val, dev) or test; unused leaves it out."
    )
    split: str | None = option(
        None,
        "How to split where neither a column nor files say it: random (the default), group:COLUMN (whole "
        "groups on one side), cluster (similar sequences on one side, see --cluster_identity); of variants also "
        "position (whole positions; position:modulo, position:contiguous) or mutations (rows with many test).",
    )
    split_sizes: list[float] = option([*SPLIT_SIZES], "Shares of train, validation and test; they sum to 1.")
    split_seed: Annotated[int, SEED] = option(
        42, "Seed of the split; apart from --seed, so that repeated runs share one test set."
    )
    cluster_column: str | None = option(None, "Sequence column that --split cluster compares, instead of all together.")
    cluster_identity: float | None = option(
        None,
        f"With --split cluster: sequences at least this identical, {MIN_IDENTITY:g} to 1, stand on one "
        f"side; left out: {CLUSTER_IDENTITY:g}. Below, see --cluster_file.",
    )
    cluster_file: str | None = option(
        None,
        "With --split cluster: clusters made by another program, two columns, representative and member, "
        "separated by a tab, as `mmseqs easy-cluster` writes; members are named as in --id_column.",
    )
    filter_train: str | None = option(
        None, "As --filter, of training rows alone: validation and test keep all of theirs."
    )
    max_train_samples: Annotated[int, COUNT] | None = option(
        None, "Train on a random subset of this many rows (the first ones of a stream)."
    )
    fold: Fold | None = field(default=None, init=False)  # set by a command that makes several runs

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self)
        check_ranges(self)
        check_sizes(self.split_sizes)
        if self.cluster_identity is not None and not MIN_IDENTITY <= self.cluster_identity <= 1:
            raise ArgumentError(
                f"cluster_identity={self.cluster_identity:g}: use {MIN_IDENTITY:g} to 1, the share of identical "
                "residues. For less, cluster with MMseqs2 (`mmseqs easy-cluster`), and give its table: --cluster_file "
                "x_cluster.tsv --id_column COLUMN."
            )
        kind, split_group = check_rule(self.split or "random")
        if isinstance(self.label_column, str):  # from Python
            self.label_column = [self.label_column]
        columns = [*self.label_column, *{*self.sequence_columns}, *self.number_columns]
        asked = (self.mask_column, self.censor_column, self.split_column, self.mutation_column)
        columns += [name for name in asked if name]
        if not self.label_column or len({*columns}) < len(columns):
            raise ArgumentError(
                f"label_column={' '.join(self.label_column)}: name at least one column, each once, none of "
                "--sequence_columns, --numeric_columns, --category_columns, --mask_column, --censor_column, "
                "--split_column and --mutation_column, each of which is another one."
            )
        if self.number_columns and self.streaming:
            raise ArgumentError(f"{' '.join(self.number_columns)}: scaled by all training rows; drop --streaming.")
        if self.streaming:
            from ..labels import STREAMED  # here, since --help needs no tables

            if self.task not in STREAMED:
                raise ArgumentError(
                    f"task={self.task}: names of classes are collected over all rows, which a stream does not show; "
                    "drop --streaming."
                )
        read = [*self.sequence_columns, *self.number_columns, self.group_column, self.id_column, self.split_column]
        reserved = (*RESERVED, NUMBERS) if self.number_columns else RESERVED
        if taken := next((column for column in (*read, split_group) if column in reserved), None):
            raise ArgumentError(f"column {taken!r} is one that loading writes; rename yours.")
        if not self.sequence_columns or len(set(self.sequence_columns)) < len(self.sequence_columns):
            raise ArgumentError(f"sequence_columns={self.sequence_columns}: name at least one column, each once.")
        chains = self.missing_chains
        allowed = ", ".join(self.sequence_columns)
        if chains and (
            len(self.sequence_columns) < 2 or sorted(chains) != sorted({*chains} & {*self.sequence_columns})
        ):
            raise ArgumentError(
                f"missing_chains={chains}: name some of several sequence columns ({allowed}), each once; a row without "
                "any sequence cannot be used."
            )
        if self.split_column and (self.split or [*self.split_sizes] != [*SPLIT_SIZES]):
            raise ArgumentError(f"split_column={self.split_column!r} names the splits: drop --split and --split_sizes.")
        if kind not in ("random", "group") and self.streaming:
            raise ArgumentError(f"split={self.split} needs all rows at once; drop --streaming, or use random or group.")
        for name in ("cluster_column", "cluster_identity", "cluster_file"):
            if getattr(self, name) is not None and kind != "cluster":
                raise ArgumentError(f"{name} only acts with --split cluster.")
        for name in ("cluster_file", "mask_file"):
            if getattr(self, name) and not self.id_column:
                raise ArgumentError(f"{name}={getattr(self, name)!r} names rows; say with --id_column where they are.")
        if self.mask_file and self.mask_column:
            raise ArgumentError(f"mask_file={self.mask_file!r} and --mask_column {self.mask_column}: give one of both.")
        if self.cluster_file and (self.cluster_column or self.cluster_identity is not None):
            raise ArgumentError("cluster_file holds finished clusters; drop --cluster_column and --cluster_identity.")
        if self.cluster_column and self.cluster_column not in self.sequence_columns:
            raise ArgumentError(f"cluster_column={self.cluster_column!r}: use a sequence column, one of {allowed}.")

    @property
    def number_columns(self) -> list[str]:
        """Columns that are read beside sequences."""
        return [*self.numeric_columns, *self.category_columns]

    @property
    def split_group_column(self) -> str | None:
        """COLUMN of `--split group:COLUMN`, otherwise None."""
        kind, column = check_rule(self.split or "random")
        return column if kind == "group" else None


def check_sizes(sizes: Sequence[float]) -> tuple[float, float, float]:
    """Returns the fractions of train, validation and test; ArgumentError unless >= 0, train > 0 and their sum is 1."""
    fractions = tuple(map(float, sizes))
    in_range = len(fractions) == 3 and all(0 <= share <= 1 for share in fractions) and fractions[0] > 0
    if not in_range or abs(sum(fractions) - 1) > 1e-6:
        raise ArgumentError(
            f"split_sizes={' '.join(map(str, sizes))}: give three shares for train, validation and test, none "
            f"negative, train above 0, that sum to 1, for example 0.8 0.1 0.1."
        )
    return fractions[0], fractions[1], fractions[2]


def check_rule(rule: str) -> tuple[str, str]:
    """Returns the kind of a `--split` value, and what follows its colon: a column of groups, a way, or ""."""
    kind, _, rest = rule.partition(":")
    if rule in ("random", "cluster", *OF_VARIANTS) or (kind == "group" and rest):
        return kind, rest
    raise ArgumentError(f"split={rule!r}: use random, group:COLUMN or cluster; of variants {', '.join(OF_VARIANTS)}.")
