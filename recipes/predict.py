"""Predict with a trained model: a folder or Hub id, and a table or FASTA of sequences; writes a CSV.

    hf-ext predict --model outputs/affinity --dataset_name new.csv --output predictions.csv

    hf-ext predict --model USER/NAME --dataset_name new.csv

The model reads the columns that it was trained on. The CSV has all columns of the table, in their order and as they
were read, then `source_row` (the row's line in it) and `prediction`; --keep_columns false leaves out those that the
model does not read. Embeddings of frozen encoders are read from the cache where it has them. For an ensemble
(`max_speed.py --num_seeds`) the column `prediction_std` holds the spread of its heads. A text that a spreadsheet would
run as a formula (`=...`, `@...`, `-x`) gets a `'` in front; to join with your table use `source_row`, or take that `'`
off (`hf_ext.files.read_cell`).

`--interval 0.9` writes `prediction_low` and `prediction_high` as well: between them 90 % of measured values are
expected, by how far predictions were off on the validation rows of the training run. `--calibrated false` writes what
the network says, without what was fitted on those rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_ext.cli import quick_imports

with quick_imports():
    import numpy as np

    from hf_ext.affinity.ensemble import predict_members
    from hf_ext.affinity.prediction_file import find_output, find_rejected, refuse_added
    from hf_ext.affinity.predictor import (
        SPEEDUPS,
        check_interval,
        check_predictions,
        columns_of,
        find_model,
        load_model,
        predicting,
    )
    from hf_ext.affinity.results import write_predictions
    from hf_ext.arguments.parser import parse_command
    from hf_ext.data.arguments import DataArguments
    from hf_ext.data.collators import SequenceCollator
    from hf_ext.data.loading import load_sequences
    from hf_ext.data.reading import peek_columns
    from hf_ext.errors import ArgumentError, exit_on_errors
    from hf_ext.models.affinity import AffinityModel
    from hf_ext.models.postprocess import describe_basis
    from hf_ext.reporting.run_log import LOGGER, start_run_log
    from hf_ext.running import check_inputs
    from hf_ext.trainer import FastTrainer
    from hf_ext.training_args import FastTrainingArguments

DEFAULTS = {
    "speedups": SPEEDUPS,
    "per_device_eval_batch_size": 256,
    "report_to": "none",
}


@dataclass
class PredictArguments:
    """Which model, and where predictions go."""

    _argument_group_name = "prediction"  # in --help
    _first_flags = (
        *("model", "revision", "output", "keep_columns", "interval", "calibrated", "dataset_name", "streaming"),
        *("filter", "bad_rows", "stop_codon", "gaps", "max_residues", "too_long", "speedups", "without", "use_cpu"),
        *("embedding_cache_dir", "per_device_eval_batch_size"),
    )

    model: str = field(metadata={"help": "Folder that max_speed.py wrote, or Hub id."})
    output: str = field(
        default="predictions.csv",
        metadata={
            "help": "CSV to write. Rows that --bad_rows drop leaves out are listed beside, in NAME.rejected_rows.csv."
        },
    )
    revision: str | None = field(default=None, metadata={"help": "Commit, tag or branch of a Hub model."})
    keep_columns: bool = field(
        default=True,
        metadata={"help": "Write all columns of the input too, in its order and as read (not those of a stream)."},
    )
    interval: float | None = field(
        default=None,
        metadata={
            "help": "Also write prediction_low and prediction_high, between which this share of measured values is "
            "expected: 0.9, say. From the validation rows of the training run; no labels are read."
        },
    )
    calibrated: bool = field(
        default=True, metadata={"help": "false: write what the network says, without the calibration on validation."}
    )


def main(argv: list[str] | None = None) -> Path:
    """Runs the recipe; returns the path of the CSV."""
    parser, (predict_args, data_args, args) = parse_command(
        (PredictArguments, DataArguments, FastTrainingArguments), DEFAULTS, __doc__, argv
    )
    log = start_run_log(None, args.process_index == 0)
    if data_args.streaming and (data_args.filter or data_args.bad_rows == "drop"):
        raise ArgumentError(
            "--streaming with --filter or --bad_rows drop: a stream's predictions have no row numbers, so nobody could "
            "tell which rows were left out. Read the table at once, or leave these out."
        )
    output = find_output(predict_args.output, data_args.dataset_name)
    rejected = find_rejected(output, data_args.bad_rows)
    if predict_args.keep_columns and not data_args.streaming:
        for path, names in peek_columns(data_args.dataset_name).items():
            refuse_added(path, names)
    folder = find_model(predict_args.model, predict_args.revision)
    model = load_model(folder)
    half_width = _settle_scale(model, predict_args)
    collator = SequenceCollator.from_pretrained(folder)
    if "too_long" in parser.explicit:
        collator.too_long = data_args.too_long
    columns = columns_of(collator)
    if "sequence_columns" in parser.explicit and data_args.sequence_columns != columns:
        raise ArgumentError(f"--sequence_columns: this model reads {columns}; leave it out.")
    if "missing_chains" in parser.explicit and data_args.missing_chains != collator.missing_chains:
        known = collator.missing_chains or "no column"
        raise ArgumentError(f"--missing_chains: this model learned to do without {known}; leave it out.")
    data_args.sequence_columns, data_args.missing_chains = columns, collator.missing_chains

    loaded = load_sequences(
        data_args,
        output_dir=rejected.parent,
        rejected_name=rejected.name,
        keeps_columns=predict_args.keep_columns,
    )
    rows = loaded.table
    if loaded.as_read is not None:
        refuse_added(str(data_args.dataset_name), loaded.as_read.column_names)  # those of the Hub are known by now
    check_inputs(collator, {"rows": rows}, data_args.dataset_name)
    with predicting(model, collator, args) as trainer:
        predictions, spread = _predict(trainer, rows)
        check_predictions(predictions)
        if trainer.is_world_process_zero():
            write_predictions(output, rows, predictions, spread=spread, as_read=loaded.as_read, half_width=half_width)
        log.info("%d predictions in %s", len(predictions), output)
        trainer.end()
    return output


def _settle_scale(model: AffinityModel, predict_args: PredictArguments) -> float | None:
    """Takes the calibration off where that is asked for; returns half the width of intervals, None without them."""
    half_width, stored = None, model.config.prediction_intervals
    if predict_args.interval is not None:
        half_width = check_interval(model, predict_args.interval, predict_args.calibrated)
        LOGGER.info("Intervals are the prediction +- %.4g, from %s.", half_width, describe_basis(stored))
    if not predict_args.calibrated:
        model.set_calibration(None)
    return half_width


def _predict(trainer: FastTrainer, rows: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Predictions and, of an ensemble, the standard deviation over its heads: (n,) each, label units."""
    if trainer.model.config.ensemble_size < 2:
        return np.asarray(trainer.predict(rows).predictions).reshape(-1), None
    members = np.asarray(predict_members(trainer, rows))
    return members.mean(1), members.std(1, ddof=1)


if __name__ == "__main__":
    with exit_on_errors():
        main()
