"""The steps of `hf-ext embed`: an encoder, rows and their names, parts of all distinct sequences, one file of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset

from ..baselines import columns_of, pooled_features
from ..checkpoints import find_model
from ..data import (
    SOURCE_ROW,
    DataArguments,
    NumberColumns,
    ReadingArguments,
    SequenceCollator,
    check_inputs,
    load_sequences,
    peek_columns,
)
from ..embeddings import WRITERS, EmbeddingStore, file_name, find_inputs, hash_sequence
from ..errors import ArgumentError, CacheError, DataError
from ..files import free_bytes, remove_folder, replacing, used_bytes
from ..labels import ResidueNumbers
from ..models import AffinityModel, fingerprint_weights, has_adapters
from ..property import (
    AffinityArguments,
    EmbedArguments,
    build_collator,
    find_rejected,
    load_model,
    predicting,
    read_towers,
)
from ..reporting import describe_inputs
from ..speedups import set_encoder_dtype
from ..text import start_run_log, storage
from ..trainer import FastTrainer
from ..training_args import FastTrainingArguments

ROWS = {"protein": 4096, "residue": 64}  # read from the parts at a time


def embed(
    own: EmbedArguments, reading: ReadingArguments, args: FastTrainingArguments, output: Path, keeps_parts: bool
) -> None:
    """Embeds all rows, or says what that would take; `args` say how, and where the parts stand.

    Raises:
        ArgumentError, DataError, CacheError: as `hf-ext embed`.
    """
    log = start_run_log(None, args.process_index == 0)
    model, collator = _open(own, reading, args)
    files = [*peek_columns(reading.dataset_name).values()]
    if files and all("id" in names for names in files):
        reading.id_column = reading.id_column or "id"
    reading.too_long = collator.too_long
    data_args = collator.make_arguments(**vars(reading))
    own.sequence_columns = data_args.sequence_columns
    loaded = load_sequences(data_args, rejected=find_rejected(output, reading.bad_rows))
    row_of, identities = _name_rows(own, loaded.table, reading.id_column)
    table = loaded.table.select([*row_of.values()])
    checked = check_inputs(collator, {"rows": table}, reading.dataset_name)
    inputs = {name: find_inputs(table, collator, name)[1] for name in collator.columns}
    parts = Path(args.embedding_cache_dir).expanduser()
    lengths = [*map(len, chain(*inputs.values()))]
    width = sum(model.embedding_sizes.values())
    number = sum(lengths) if own.per == "residue" else max(len(lengths), len(table))
    num_bytes = number * width * getattr(torch, own.dtype).itemsize * (1 + bool(output.suffix))
    free = free_bytes(output.parent) + used_bytes(parts)
    if num_bytes > free:
        told = f"{storage(num_bytes)} are needed for it and its parts, and {storage(free)} are free"
        raise CacheError(f"{output}: {told}. Free some, or give --dtype float16.")
    sizes = (
        f"{len(table):,} rows, {len(lengths):,} distinct sequences, {sum(lengths):,} residues; {width:,} numbers each: "
        f"{storage(num_bytes)} in {output} and its parts."
    )
    for line in (*loaded.report["notes"], *describe_inputs(checked), sizes):
        log.info(line)
    if own.dry_run:
        return
    with predicting(model, collator, args) as trainer:
        if not trainer.plan.applied("embedding_cache"):
            raise ArgumentError("hf-ext embed needs embedding_cache: name it in --speedups, too, not in --without.")
        states = getattr(torch, own.dtype)
        stores = {name: trainer.fill_store(name, sequences, states) for name, sequences in inputs.items()}
        if trainer.is_world_process_zero() and output.suffix:
            vectors = _read_rows(trainer, table, stores, own)
            with replacing(output) as draft:
                WRITERS[output.suffix.lower()](draft, zip(row_of, identities, vectors))
            if not keeps_parts:
                remove_folder(parts)
        log.info("%d vectors in %s", len(row_of), output)
        trainer.end()


def _open(
    own: EmbedArguments, reading: ReadingArguments, args: FastTrainingArguments
) -> tuple[AffinityModel, SequenceCollator]:
    """Builds a model without a trained head around a pretrained encoder, or opens a finished run's."""
    if own.model:
        folder = find_model(own.model, own.revision)
        model = load_model(folder)
        if model.config.reads_vectors:
            raise ArgumentError(f"--model {own.model}: it reads vectors of a file, and has no encoder.")
        if model.config.wild_type:
            raise ArgumentError(f"--model {own.model}: it ranks by likelihood, and pools nothing. Give --encoder.")
        if has_adapters(model):
            model.merge_adapters()
        for index, spec in enumerate(model.config.encoder_specs):
            if spec.training != "frozen":  # known by the weights in the folder from here on
                known = fingerprint_weights(str(folder), None)
                model.config.encoders[index] |= {"training": "frozen", "fingerprint": known}
                model.config.save_full = True  # they are in memory, and nowhere else
        collator = SequenceCollator.from_pretrained(folder)
        collator.numbers = NumberColumns()  # of sequences alone
        collator.resolve_long(reading.too_long, reading.max_residues)
    else:
        layers = sorted({*own.layer})
        asked = AffinityArguments(
            encoders=[str(own.encoder)],
            encoder_revisions=[own.revision] if own.revision else [],
            pooling=[own.pooling],
            layer=str(layers[-1]) if layers else "last",
        )
        specs, towers = read_towers(asked, own.sequence_columns)
        specs[0].also = layers[:-1]
        model = AffinityModel.from_encoders(specs, towers, head_sizes=[])
        collator = build_collator(model, DataArguments(**vars(reading), sequence_columns=own.sequence_columns))
    if own.per == "residue" and len(columns_of(collator)) > 1:
        raise ArgumentError("--per residue: of one sequence column. Embed each by itself.")
    model.config.label_kind = ResidueNumbers().state() if own.per == "residue" else None
    if args.bf16 or args.fp16:
        in_weights = args.device.type != "cpu" and not model.config.save_full
        half = "bf16" if args.bf16 else "fp16"
        set_encoder_dtype(model, half, "weights" if in_weights else "autocast")
    return model, collator


def _name_rows(own: EmbedArguments, table: Dataset, id_column: str | None) -> tuple[dict[str, int], list[str]]:
    """Names rows for the file, each name once: names with the numbers of these rows, and their ids or source rows."""
    identities = [str(cell or "") for cell in table[id_column or SOURCE_ROW][:]]
    is_by_id = own.names == "id" or (own.names == "auto" and id_column is not None)
    if not is_by_id and len(own.sequence_columns) > 1:
        raise ArgumentError("Rows of several sequences have no hash: name them with --id_column.")
    names = [*map(file_name, identities)] if is_by_id else [*map(hash_sequence, table[own.sequence_columns[0]][:])]
    first: dict[str, int] = {}
    for row, name in enumerate(names):
        first.setdefault(name, row)
    if is_by_id and (id_column is None or len(first) < len(names) or "" in first):
        told = f"--id_column {id_column}: ids have to name rows, and none is empty or there twice (/ counts as _)"
        raise DataError(f"{told}. Give another column, or --names hash.")
    return first, [identities[row] for row in first.values()]


def _read_rows(
    trainer: FastTrainer, table: Dataset, stores: Mapping[str, EmbeddingStore], own: EmbedArguments
) -> Iterator[np.ndarray]:
    """Reads the vector of each row, in order, some rows at a time."""
    size = ROWS[own.per]
    for start in range(0, len(table), size):
        rows = table.select(range(start, min(start + size, len(table))))
        if own.per == "residue":
            ((name, store),) = stores.items()
            found = [states.numpy() for states in store.gather_states(rows[name][:])]
        else:
            found = [*pooled_features(trainer, rows, lambda name, sequences: stores[name].gather(sequences))]
        yield from (vector.astype(own.dtype) for vector in found)
