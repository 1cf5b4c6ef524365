"""Predict with a trained model: a folder or Hub id, and a table or FASTA of sequences; writes a CSV.

    hf-ext predict --model outputs/affinity --dataset_name new.csv --output predictions.csv

The model reads the columns that it was trained on. The CSV has all columns of the table, in their order and as they
were read, then `source_row` (the row's line in it), `prediction`, and of classes their probabilities (docs/labels.md);
--keep_columns false leaves out those that the model does not read. Embeddings of frozen encoders are read from the
cache where it has them. A text that a spreadsheet would run as a formula (`=...`, `@...`, `-x`) gets a `'` in front; to
join with your table use `source_row`, or take that `'` off (`hf_ext.files.read_cell`).

Of a model of numbers, `--interval 0.9` writes `prediction_low` and `prediction_high` as well: between them 90 % of
measured values are expected, by how far predictions were off on the validation rows of the training run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..arguments import PredictingArguments, parse_command
from ..data import DataArguments, ReadingArguments
from ..errors import ArgumentError
from ..property import PredictArguments
from ..startup import quick_imports


def main(argv: Sequence[str] | None = None) -> Path:
    """Predicts each row of a table; returns the path of the CSV.

    Raises:
        ArgumentError: a model or arguments that do not fit; a file that cannot be written.
        DataError: rows that the model cannot read; predictions that are not finite.
    """
    types = (PredictArguments, ReadingArguments, PredictingArguments)
    parser, (own, reading, computing) = parse_command(types, {}, __doc__, argv)
    with quick_imports():  # here, so that --help waits for no model code
        from itertools import chain

        import numpy as np

        from ..baselines import columns_of
        from ..checkpoints import find_members
        from ..data import SOURCE_ROW, SequenceCollator, check_inputs, load_sequences, peek_columns
        from ..heads import describe_basis, half_width
        from ..labels import average
        from ..models import AffinityConfig
        from ..property import (
            HIGH,
            LOW,
            check_predictions,
            find_output,
            find_rejected,
            load_model,
            predicting,
            refuse_added,
            training_arguments,
            write_predictions,
        )
        from ..reporting import describe_unread
        from ..text import start_run_log

    args = training_arguments(computing, parser.explicit)
    log = start_run_log(None, args.process_index == 0)
    if reading.streaming and reading.bad_rows == "drop":
        raise ArgumentError(
            "--streaming with --bad_rows drop: a stream's predictions have no row numbers, so it could not "
            "be told which rows were left out. Read the table at once, or leave --bad_rows out."
        )
    output = find_output(own.output, reading.dataset_name)
    rejected = find_rejected(output, reading.bad_rows)
    folder, *others = find_members(own.model, own.revision)
    model = load_model(folder)
    kind = model.config.kind
    added = [SOURCE_ROW, *kind.prediction_names, LOW, HIGH]
    if own.keep_columns and not reading.streaming:
        for path, names in peek_columns(reading.dataset_name).items():
            refuse_added(path, names, added)
    reach = None
    if own.interval is not None:
        stored = model.config.prediction_intervals
        every = [stored, *(AffinityConfig.from_pretrained(one).prediction_intervals for one in others)]
        reach = float(np.mean([half_width(one, own.interval) for one in every]))
        log.info("Intervals are the prediction +- %.4g, from %s.", reach, describe_basis(stored))
    collator = SequenceCollator.from_pretrained(folder)
    if "too_long" not in parser.explicit:
        reading.too_long = collator.too_long  # rows are refused as the model's own run refused them
    collator.resolve_long(reading.too_long, reading.max_residues)
    data_args = DataArguments(
        **vars(reading), sequence_columns=columns_of(collator), missing_chains=collator.missing_chains
    )
    loaded = load_sequences(data_args, rejected=rejected, keeps_columns=own.keep_columns)
    rows = loaded.table
    if loaded.as_read is not None:
        refuse_added(str(reading.dataset_name), loaded.as_read.column_names, added)  # those of the Hub are known now
    for line in (
        *loaded.report["notes"],
        *describe_unread(check_inputs(collator, {"rows": rows}, reading.dataset_name)),
    ):
        log.info(line)
    found = []
    for one in chain([model], map(load_model, others)):
        with predicting(one, collator, args) as trainer:
            found.append(kind.read_outputs(check_predictions(np.asarray(trainer.predict(rows).predictions))))
            if len(found) <= len(others):
                continue
            if trainer.is_world_process_zero():
                columns = kind.prediction_columns(average(found))
                write_predictions(output, rows, columns, as_read=loaded.as_read, half_width=reach)
            log.info("%d predictions in %s", len(found[0]), output)
            trainer.end()
    return output
