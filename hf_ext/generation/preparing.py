"""Rows of antigens and antibodies for a stage: loaded, split by antigen, filtered and limited, and what was done."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset, DatasetDict

from ..data import (
    SPLIT_CLUSTER,
    DataArguments,
    check_labels,
    column_names,
    draw_rows,
    find_missing,
    leak_report,
    load_data,
    local_files,
)
from ..errors import ArgumentError
from ..evaluation import ResamplingGroups
from ..property import check_splits
from .arguments import GeneratorArguments
from .rows import AntibodyRows

LABEL = "label"  # as loading names the column
# Arguments of the data -> what a generator has instead.
TAKEN_OVER = {
    "sequence_columns": "give --antigen_column, --heavy_column and --light_column",
    "cluster_column": "--split cluster compares antigens",
    "missing_chains": "give --may_lack_light true where rows may lack the light chain",
    "task": "its --label_column is an affinity, a number",
    "mask_column": "its --label_column is an affinity, a number",
    "mask_file": "its --label_column is an affinity, a number",
    **dict.fromkeys(("numeric_columns", "category_columns"), "it reads sequences and an affinity"),
}


@dataclass
class PairData:
    """Rows of a stage.

    Attributes:
        splits: train, validation, test, with the columns of the source.
        antigen, heavy, light: names of columns; no light one where there is none.
        has_affinities: whether rows have `label`, pKd.
        report: as of `LoadedData`.
        group_column: of `--group_column`, None where there is none.
    """

    splits: DatasetDict
    antigen: str
    heavy: str
    light: str | None
    has_affinities: bool
    report: dict[str, Any]
    group_column: str | None = None

    @property
    def needs_light(self) -> bool:
        """Whether a heavy chain alone is no valid antibody here: every row has a light chain."""
        return self.light is not None and not self.report.get("missing_chains")

    def antibodies(self, split: str) -> AntibodyRows:
        """Returns the rows of a split as judges take them."""
        rows = self.splits[split]
        lights = rows[self.light][:] if self.light else [None] * len(rows)
        return AntibodyRows.of_columns(rows[self.heavy][:], lights, rows[self.antigen][:])

    def affinities(self, split: str) -> list[float] | None:
        """Returns (n,) pKd of a split; None where there are none."""
        return self.splits[split][LABEL][:] if self.has_affinities else None

    def take(self, split: str, seed: int, most: int) -> tuple[AntibodyRows, list[float] | None]:
        """Draws at most `most` rows of a split by `seed`, and their pKd."""
        chosen = draw_rows(len(self.splits[split]), seed, most).tolist()
        values = self.affinities(split)
        return self.antibodies(split).select(chosen), None if values is None else [values[row] for row in chosen]

    def find_groups(self, antigens: Sequence[str]) -> ResamplingGroups:
        """Returns what the intervals of rows with these test antigens resample.

        The group or the clusters of the split, else `group_column`, where each antigen belongs to one alone; else each
        antigen by itself.
        """
        test = self.splits["test"]
        rule = str(self.report.get("split", {}).get("rule", ""))
        asked = rule.partition(":")[2] if rule.startswith("group:") else SPLIT_CLUSTER
        for column in (asked, self.group_column):
            if column is None or column == self.antigen or column not in column_names(test):
                continue
            pairs = set(zip(test[self.antigen][:], test[column][:]))
            group_of = dict(pairs)
            if len(pairs) == len(group_of):
                name = "cluster" if column == SPLIT_CLUSTER else column
                return ResamplingGroups.of(name, [group_of[antigen] for antigen in antigens])
        return ResamplingGroups.of("antigen", antigens)


def resolve_columns(args: GeneratorArguments, data_args: DataArguments, explicit: Collection[str]) -> None:
    """Makes `data_args` name the generator's columns, and split by antigen where no split is given.

    Raises:
        ArgumentError: arguments of the data that a generator has others for, or cannot do.
    """
    if given := sorted({*TAKEN_OVER} & {*explicit}):
        raise ArgumentError(f"--{given[0]} is not for a generator: {TAKEN_OVER[given[0]]}.")
    if len(data_args.label_column) > 1:
        raise ArgumentError(f"--label_column {' '.join(data_args.label_column)}: a generator learns one affinity.")
    if data_args.streaming:
        raise ArgumentError("--streaming: a generator's rows are read at once, since baselines and scores need all.")
    if "too_long" in explicit and data_args.too_long != "error":
        raise ArgumentError(
            f"--too_long {data_args.too_long}: what is cut off cannot be written; only error is allowed. Leave rows "
            "above --max_residues out with --bad_rows drop."
        )
    data_args.too_long = "error"
    data_args.sequence_columns = args.sequence_columns
    data_args.missing_chains = [str(args.light_column)] if args.may_lack_light else []
    data_args.__post_init__()  # its own checks, of these columns
    if data_args.split == "cluster" and not data_args.cluster_file:
        data_args.cluster_column = args.antigen_column


def load_pairs(
    args: GeneratorArguments,
    data_args: DataArguments,
    explicit: Collection[str],
    *,
    output_dir: Any,
    seed: int,
    table: Dataset | None = None,
) -> PairData:
    """Loads and splits, takes the training rows with high affinity, then as many rows as the stage has.

    Antigens are split, and not rows, where no split is given: an antigen of the test split has then never been trained
    on. Antibodies and antigens that stand in train and in test are counted.

    Args:
        args, data_args: after `resolve_stage` and `resolve_columns`; `split` and `missing_chains` are resolved.
        explicit: names that the user set: `label_column` says that there is one.
        output_dir, seed, table: as in `load_data`.

    Raises:
        ArgumentError, DataError: as `load_data`; a split is missing; or the filter leaves no training row.
    """
    notes: list[str] = []
    # What several files, a column or the Hub say is left alone.
    is_one_table = table is not None or len(local_files(data_args.dataset_name)) == 1
    if is_one_table and not (data_args.split or data_args.split_column):
        data_args.split = f"group:{args.antigen_column}"
        notes.append(f"split by antigen (--split group:{args.antigen_column}), so that test antigens are new")
    has_affinities = "label_column" in explicit
    asked = [data_args.filter_train]
    if has_affinities and args.min_affinity is not None:
        asked.append(f"`{data_args.label_column[0]}` > {args.min_affinity}")
    filters = " and ".join(f"({one})" for one in asked if one) or None
    loaded = load_data(
        replace(data_args, max_train_samples=None, task="regression", filter_train=filters),
        output_dir=output_dir,
        seed=seed,
        needs_labels=has_affinities,
        looks_for_leaks=False,
        table=table,
    )
    splits = loaded.splits
    report = loaded.report
    check_splits(splits)
    assert isinstance(splits, DatasetDict)
    notes += report["notes"]
    for name, limit in (("train", data_args.max_train_samples), ("validation", args.max_validation_samples)):
        num_rows = len(splits[name])
        if limit is not None and limit < num_rows:
            splits[name] = splits[name].select(draw_rows(num_rows, seed, limit))
            notes.append(f"{name}: a random {limit:,} of {num_rows:,} rows (--max_{name}_samples, seed {seed})")
    if has_affinities:
        check_labels(splits["train"], loaded.kind, "--max_train_samples")
    missing = find_missing(splits, data_args.missing_chains)
    data_args.missing_chains = [*missing]
    columns = (args.antigen_column, args.heavy_column, args.light_column or None)
    data = PairData(splits, *columns, has_affinities, report, data_args.group_column)
    antigens = {name: split[data.antigen][:] for name, split in splits.items()}
    report |= {
        "notes": notes,
        "sizes": splits.num_rows,
        "leaks": leak_report(splits, data_args.sequence_columns),
        "missing_chains": missing,
        "num_antigens": {name: len(set(values)) for name, values in antigens.items()},
    }
    known = set(antigens["train"])
    if num := sum(antigen in known for antigen in antigens["test"]):
        report["warnings"].append(
            f"{num:,} of {len(antigens['test']):,} test rows have an antigen that is trained on: scores then say "
            f"little about new antigens. Split by antigen: --split group:{data.antigen}, or --split cluster."
        )
    return data
