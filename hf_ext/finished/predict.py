"""Predict with a trained model: a folder or Hub id, and a table or FASTA of sequences; writes a CSV.

    hf-ext predict --model outputs/affinity --dataset_name new.csv --output predictions.csv

The model reads the columns that it was trained on. The CSV has all columns of the table, in their order and as they
were read, then `source_row` (the row's line in it), `prediction`, and of classes their probabilities (docs/labels.md);
--keep_columns false leaves out those that the model does not read. Embeddings of frozen encoders are read from the
cache where it has them. A text that a spreadsheet would run as a formula (`=...`, `@...`, `-x`) gets a `'` in front; to
join with your table use `source_row`, or take that `'` off (`hf_ext.files.read_cell`).

Of a model of numbers, `--interval 0.9` writes `prediction_low` and `prediction_high` as well: between them 90 % of
measured values are expected, by how far predictions were off on the validation rows of the training run. A model of
mixed heads also writes `prediction_std`, how far a measured value is expected from its prediction.

`--rank 96` writes 96 rows alone, in the order in which to measure them, with `rank` and `acquisition`:

    hf-ext predict --model outputs/affinity --dataset_name candidates.csv --rank 96 --by ucb --output next.csv
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..arguments import PredictingArguments, parse_command
from ..data import ReadingArguments
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

        from ..checkpoints import find_members
        from ..data import SOURCE_ROW, SequenceCollator, check_inputs, load_sequences, peek_columns
        from ..evaluation import unpack_std
        from ..heads import describe_basis, half_width, mix_spreads
        from ..labels import average
        from ..models import AffinityConfig
        from ..property import (
            ACQUISITION,
            HIGH,
            LOW,
            RANK,
            STD,
            bind_vectors,
            check_predictions,
            find_output,
            find_rejected,
            interval_columns,
            load_model,
            predicting,
            refuse_added,
            std_column,
            training_arguments,
            write_predictions,
        )
        from ..reporting import describe_inputs
        from ..text import start_run_log
        from .ranking import acquire, check_ranking, choose_batch

    args = training_arguments(computing, parser.explicit)
    log = start_run_log(None, args.process_index == 0)
    if reading.streaming and reading.bad_rows == "drop":
        raise ArgumentError(
            "--streaming with --bad_rows drop: a stream's predictions have no row numbers, so it could not "
            "be told which rows were left out. Read the table at once, or leave --bad_rows out."
        )
    output_file = find_output(own.output, reading.dataset_name)
    rejected = find_rejected(output_file, reading.bad_rows)
    folder, *others = find_members(own.model, own.revision)
    model = load_model(folder)
    kind = model.config.kind
    check_ranking(own, parser.explicit, model.config, reading.streaming)
    added = [SOURCE_ROW, *kind.prediction_names, STD, LOW, HIGH, *([RANK, ACQUISITION] if own.rank else [])]
    if own.keep_columns and not reading.streaming:
        for path, names in peek_columns(reading.dataset_name).items():
            refuse_added(path, names, added)
    if own.interval is not None:
        stored = model.config.prediction_intervals
        every = [stored, *(AffinityConfig.from_pretrained(one).prediction_intervals for one in others)]
        reach = float(np.mean([half_width(one, own.interval) for one in every]))
        times = " times prediction_std" if stored.get("times_std") else ""
        log.info("Intervals are the prediction +- %.4g%s, from %s.", reach, times, describe_basis(stored))
    collator = SequenceCollator.from_pretrained(folder)
    if "too_long" not in parser.explicit:
        reading.too_long = collator.too_long  # rows are refused as the model's own run refused them
    collator.resolve_long(reading.too_long, reading.max_residues)
    data_args = collator.make_arguments(**vars(reading))
    loaded = load_sequences(data_args, rejected=rejected, keeps_columns=own.keep_columns)
    rows = loaded.table
    bind_vectors(model, own.embeddings, {"rows": rows}, data_args)
    if loaded.as_read is not None:
        refuse_added(str(reading.dataset_name), loaded.as_read.column_names, added)  # those of the Hub are known now
    for line in (
        *loaded.report["notes"],
        *describe_inputs(check_inputs(collator, {"rows": rows}, reading.dataset_name)),
    ):
        log.info(line)
    if own.rank is not None and own.rank > len(rows):
        raise ArgumentError(f"--rank {own.rank}: there are {len(rows):,} rows. Ask for so many at most.")
    found = []
    spreads = []
    reaches = []
    for one in chain([model], map(load_model, others)):
        if one is not model:
            bind_vectors(one, own.embeddings, {"rows": rows}, data_args)
        with predicting(one, collator, args) as trainer:
            output = trainer.predict(rows, ignore_keys=[])
            stds = unpack_std(output)
            outputs = output.predictions if stds is None else output.predictions[0]
            found.append(kind.read_outputs(check_predictions(np.asarray(outputs))))
            spreads.append(stds)
            if own.interval is not None:
                reaches.append(half_width(one.config.prediction_intervals, own.interval, stds))
            if len(found) <= len(others):
                continue
            predicted = average(found)
            stds = mix_spreads(found, spreads)
            columns = {**kind.prediction_columns(predicted), **std_column(stds)}
            if own.interval is not None:
                columns |= interval_columns(predicted, sum(reaches) / len(reaches))
            as_read = loaded.as_read
            if own.rank is not None:
                columns[ACQUISITION] = acquire(own, predicted, stds)
                sequences = [rows[name][:] for name in data_args.sequence_columns] if own.diverse else None
                chosen = choose_batch(columns[ACQUISITION], own.rank, sequences)
                columns = {name: np.asarray(values)[chosen] for name, values in columns.items()}
                columns[RANK] = 1 + np.arange(own.rank)
                rows = rows.select(chosen)
                as_read = as_read and as_read.select(chosen)
            if trainer.is_world_process_zero():
                write_predictions(output_file, rows, columns, as_read=as_read)
            log.info("%d predictions in %s", own.rank or len(predicted), output_file)
            trainer.end()
    return output_file
