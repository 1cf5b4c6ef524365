"""The steps of `hf-ext predict`: models, rows, the mean of what is predicted, and which rows to measure next."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoints import find_members
from ..data import (
    SOURCE_ROW,
    LoadedSequences,
    ReadingArguments,
    SequenceCollator,
    check_inputs,
    iter_blocks,
    load_sequences,
    peek_columns,
)
from ..errors import ArgumentError
from ..evaluation import unpack_std
from ..heads import describe_basis, half_width, mix_spreads
from ..labels import PREDICTION, Columns, average
from ..models import AffinityConfig, AffinityModel
from ..property import (
    ACQUISITION,
    HIGH,
    LOW,
    RANK,
    STD,
    PredictArguments,
    bind_vectors,
    check_predictions,
    find_output,
    find_rejected,
    interval_columns,
    load_model,
    predicting,
    refuse_added,
    std_column,
    write_predictions,
)
from ..reporting import describe_inputs
from ..text import start_run_log
from ..training_args import FastTrainingArguments
from .ranking import acquire, check_ranking, choose_batch


def predict_table(
    own: PredictArguments, reading: ReadingArguments, args: FastTrainingArguments, explicit: Collection[str]
) -> Path:
    """Predicts each row of a table, and writes the CSV; returns its path.

    Args:
        own, reading: as parsed; `explicit` are the names of the arguments that the user set.
        args: how to predict.

    Raises:
        ArgumentError, DataError: as `hf-ext predict`.
    """
    log = start_run_log(None, args.process_index == 0)
    output = find_output(own.output, reading.dataset_name)
    rejected = find_rejected(output, reading.bad_rows)
    folder, *others = find_members(own.model, own.revision)
    model = load_model(folder)
    kind = model.config.kind
    configs = [model.config, *map(AffinityConfig.from_pretrained, others)]
    for config in configs:
        check_ranking(own, explicit, config, reading.streaming)
    added = [SOURCE_ROW, *kind.prediction_names, STD, LOW, HIGH, *([RANK, ACQUISITION] if own.rank else [])]
    if own.interval is not None:
        stored = [config.prediction_intervals for config in configs]
        reach = sum(half_width(one, own.interval) for one in stored) / len(stored)
        times = " times prediction_std" if stored[0].get("times_std") else ""
        log.info("Intervals are the prediction +- %.4g%s, from %s.", reach, times, describe_basis(stored[0]))
    if own.keep_columns and not reading.streaming:
        for path, names in peek_columns(reading.dataset_name).items():
            refuse_added(path, names, added)
    collator = SequenceCollator.from_pretrained(folder)
    reading.too_long = reading.too_long or collator.too_long
    collator.resolve_long(reading.too_long, reading.max_residues)
    data_args = collator.make_arguments(**vars(reading))
    loaded = load_sequences(data_args, rejected=rejected, keeps_columns=own.keep_columns)
    rows = loaded.table
    as_read = loaded.as_read
    if as_read is not None:
        refuse_added(reading.dataset_name, as_read.column_names, added)  # those of the Hub are known now
    bind_vectors(model, own.embeddings, {"rows": rows}, data_args)
    checked = check_inputs(collator, {"rows": rows}, reading.dataset_name)
    for line in (*loaded.report["notes"], *describe_inputs(checked)):
        log.info(line)
    if own.rank is not None and own.rank > len(rows):
        raise ArgumentError(f"--rank {own.rank}: there are {len(rows):,} rows. Ask for so many at most.")
    found: Iterable[tuple[Any, Columns, Any]] = _predict_blocks(own, [folder, *others], model, collator, args, loaded)
    if own.rank is not None:
        every = [columns for _, columns, _ in found]
        columns = {name: np.concatenate([one[name] for one in every]) for name in every[0]}
        columns[ACQUISITION] = acquire(own, columns[PREDICTION], columns.get(STD))
        sequences = [rows[name] for name in data_args.sequence_columns] if own.diverse else None
        chosen = choose_batch(columns[ACQUISITION], own.rank, sequences)
        columns = {name: values[chosen] for name, values in columns.items()}
        columns[RANK] = 1 + np.arange(own.rank)
        found = [(rows.select(chosen), columns, as_read and as_read.select(chosen))]
    if args.process_index == 0:
        log.info("%d predictions in %s", write_predictions(output, found), output)
    else:
        for _ in found:
            pass
    return output


def _predict_blocks(
    own: PredictArguments,
    folders: list[Path],
    model: AffinityModel,
    collator: SequenceCollator,
    args: FastTrainingArguments,
    loaded: LoadedSequences,
) -> Iterator[tuple[Any, Columns, Any]]:
    """Yields blocks of rows, as `write_predictions` takes them: the mean of what models predict, spread and interval.

    Args:
        folders: of the models; `model` is the first, beside which another is in memory at a time.

    Raises:
        DataError: predictions that are not finite.

    Cost: other models than the first are loaded for each block, and frozen encoders where the cache lacks some of it.
    """
    kind = model.config.kind
    before = 0
    for block in iter_blocks(loaded.table):
        predictions = []
        spreads = []
        reaches = []
        for one in folders:
            member = model if one == folders[0] else load_model(one)
            if model.vectors is not None:
                member.set_vectors(model.vectors)
            with predicting(member, collator.for_member(one), args) as trainer:
                found = trainer.predict(block, ignore_keys=[])
            stds = unpack_std(found)
            outputs: Any = found.predictions if stds is None else found.predictions[0]
            predictions.append(kind.read_outputs(check_predictions(np.asarray(outputs), before)))
            spreads.append(stds)
            if own.interval is not None:
                reaches.append(half_width(member.config.prediction_intervals, own.interval, stds))
        predicted = average(predictions)
        columns = {**kind.prediction_columns(predicted), **std_column(mix_spreads(predictions, spreads))}
        if reaches:
            columns |= interval_columns(predicted, sum(reaches) / len(reaches))
        end = before + len(predicted)
        yield block, columns, loaded.as_read and loaded.as_read.select(range(before, end))
        before = end
    trainer.end()
