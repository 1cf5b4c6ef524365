"""Rows for training, with what in them and in the options beside them is probably a mistake."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import numpy as np
from datasets import Dataset

from ..data.arguments import DataArguments
from ..data.columns import column_names, column_values
from ..data.loading import LoadedData, load_data
from ..data.split_report import find_missing
from ..evaluation.alarms import format_report, split_alarms
from ..running import summarize_data
from .arguments import AffinityArguments
from .building import check_splits
from .results import audit_labels

ENERGIES = (-80.0, -4.0)  # between them is the median of log10 Kd in M, and of energies in kcal/mol or kJ/mol
EXACT_LOSSES = ("mse", "huber")  # which take a bound for a value


def load_rows(
    args: AffinityArguments,
    data_args: DataArguments,
    explicit: Container[str],
    *,
    output_dir: Any,
    seed: int,
    table: Dataset | None = None,
) -> LoadedData:
    """`load_data`, and in its report's `notes` and `warnings` where labels, splits and options do not fit each other.

    Sets `args.binder_threshold` to None where nobody typed it and no label can tell hits from others by it, and leaves
    in `data_args.missing_chains` the columns that some training rows lack; `report["missing_chains"]` counts these.

    Args:
        args, data_args: as parsed.
        explicit: names of the arguments that the user set.
        output_dir, seed, table: as in `load_data`.

    Raises:
        ArgumentError, DataError: as `load_data`; or a split is missing; or of a chain that rows may lack, training
            shows all or none (`find_missing`).
    """
    data = load_data(data_args, output_dir=output_dir, seed=seed, needs_validation=True, table=table)
    check_splits(data.splits)
    if not data_args.streaming:
        labels = {name: np.array(column_values(split, "label")) for name, split in data.splits.items()}
        data.report["warnings"] += split_alarms(labels)
        data.report["warnings"] += _ignored_bounds(args, data_args, data.splits)
        missing = find_missing(data.splits, data_args.missing_chains)
        if unused := [column for column in data_args.missing_chains if column not in missing]:
            data.report["warnings"].append(
                f"--missing_chains {' '.join(unused)}: no row lacks it, so the model does not learn to do without it, "
                "and will refuse rows that lack it."
            )
        data_args.missing_chains, data.report["missing_chains"] = [*missing], missing
        settle_threshold(args, explicit, np.concatenate([*labels.values()]), data.report)
    return data


def describe_rows(data: LoadedData) -> str:
    """What the log says of the rows before training: `summarize_data`, and the audit of the training labels."""
    train = data.splits["train"]
    lines = [summarize_data(data.report)]
    if not data.report["streaming"]:
        lines += format_report(audit_labels(train), "Training labels")
    return "\n".join(lines)


def _ignored_bounds(args: AffinityArguments, data_args: DataArguments, splits: Mapping[str, Any]) -> list[str]:
    """Bounds that the loss does not use, and a loss or column for bounds where there are none."""
    train = splits["train"]
    bounds = np.array(column_values(train, "bound")) if "bound" in column_names(train) else np.zeros(len(train))
    num_bounds = int(np.count_nonzero(bounds))
    if num_bounds and args.loss in EXACT_LOSSES:
        return [
            f"{num_bounds:,} of {len(train):,} training labels are bounds, which --loss {args.loss} takes for exact "
            "values: --loss tobit learns from them as bounds, --loss ranking from the order alone."
        ]
    if num_bounds:
        return []
    if data_args.censor_column:
        return [
            f"--censor_column {data_args.censor_column}: it marks none of the {len(train):,} training rows. Marks "
            "are <, <=, >, >=; or 1, where the true value is at or below the label."
        ]
    if args.loss == "tobit":
        return [
            f"--loss tobit: none of the {len(train):,} training labels is a bound, so it is --loss mse by another "
            "name. Write bounds as <=7, or name their column with --censor_column."
        ]
    return []


def settle_threshold(args: Any, explicit: Container[str], labels: np.ndarray, report: dict[str, Any]) -> None:
    """Says where `--binder_threshold` divides no labels into hits and others, the default is left out then; or where it
    takes the weakest for hits, as of energies."""
    threshold = args.binder_threshold
    if threshold is None:
        return
    if labels.min() < threshold <= labels.max():
        if labels.max() < 0 and ENERGIES[0] <= float(np.median(labels)) <= ENERGIES[1]:
            report["notes"].append(
                f"all labels are negative ({labels.min():.3g} to {labels.max():.3g}), as log10 of a Kd or binding "
                f"energies, of which the lowest bind best: --binder_threshold {threshold:g} takes what is at or above "
                "it for hits, the weakest. Give labels that rise with binding: -log10 (pKd), energies times -1."
            )
        return
    side = "below" if labels.max() < threshold else "at or above"
    fact = f"all {len(labels):,} labels ({labels.min():.3g} to {labels.max():.3g}) are {side}"
    if "binder_threshold" in explicit:
        text = f"--binder_threshold {threshold:g}: {fact} it, so recall, precision and F1 say nothing."
        report["warnings"].append(f"{text} Give one between them, or null in YAML to leave these scores out.")
        return
    args.binder_threshold = None
    text = f"recall, precision and F1 are left out: {fact} the default --binder_threshold {threshold:g}."
    report["notes"].append(f"{text} Give one of yours to have them.")
