"""Embed once: what a frozen encoder makes of each distinct sequence is computed once, stored, and looked up afterwards.

Beside it what needs embeddings before the first step: the scale of labels and of embeddings.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol

import datasets
import numpy as np
import psutil
import torch
import transformers
from accelerate.utils import gather_object

from ..data import NUMBERS, RESIDUES, TEACHER, column_names, limit_of, read_column, read_columns
from ..embeddings import (
    SHARD_STATES,
    EmbeddedDataset,
    EmbeddedResidues,
    EmbeddingStore,
    EncodingReport,
    encode_finite,
    fill_store,
    find_inputs,
    join_parts,
    make_table,
)
from ..errors import CacheError, DataError
from ..files import Facts, Json, free_bytes
from ..hardware import detect_hardware
from ..models import AffinityModel, identify_encoder, in_float32, read_matmul_precision
from ..processes import Team
from .backends import Backend
from .host import Host, Rows, name_evaluation_sets
from .run_plan import PlannedRun

logger = logging.getLogger(__name__)

LIVE_BATCH = 8  # sequences per batch where there is no cache to size batches for
MEMORY_FRACTION = 0.3  # of free memory that one table may take
SAMPLE = 2048  # distinct sequences per input: enough for a mean and a standard deviation per feature
LIVE_SAMPLE = 256  # where encoders train, and a forward pass is the cost of each; and of residues, which are many


@torch.no_grad()
def encode_sequences(
    model: AffinityModel,
    collator: Any,
    name: str,
    sequences: Sequence[str],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Any:
    """Computes embeddings of input `name` here and now: (n, width), float32. Parts of a pair are joined by `|`.

    Where residues have labels, a list of the states of each sequence's, (residues, width).

    Args:
        model: an `AffinityModel`; `collator`: makes its inputs.
        autocast: what encoders that train compute under, as they do in training.
    """
    if model.vectors is not None:
        return model.vectors.read(sequences)
    parts = list(zip(*(sequence.split("|") for sequence in sequences)))
    batch = collator.encode(name, *parts)
    model.eval()
    with nullcontext() if name in model.frozen_inputs else autocast():
        embeddings = model.encode(name, {key: value.to(device) for key, value in batch.items()})
    if not model.config.kind.per_residue:
        return embeddings
    return [*embeddings.split(batch["residue_mask"].sum(1).tolist())]


Embedded = EmbeddedDataset | EmbeddedResidues


class EmbeddingHost(Host, Protocol):
    """What of `FastTrainer` users may override."""

    model: AffinityModel

    def embed_dataset(self, dataset: Rows) -> Embedded:
        """Does what `FastTrainer`'s does."""

    def embedding_key(self, name: str) -> Json:
        """Does what `FastTrainer`'s does."""

    def encode_distinct(self, name: str, sequences: Sequence[str]) -> torch.Tensor:
        """Does what `FastTrainer`'s does."""

    def encode_sequences(self, name: str, sequences: Sequence[str]) -> Any:
        """Does what `FastTrainer`'s does."""

    def fit_scaling(self) -> None:
        """Does what `FastTrainer`'s does."""


class EmbeddingCache:
    """Replaces the frozen inputs of datasets by cached embeddings, where the plan applied `embedding_cache`.

    Attributes:
        is_on: whether it did.
    """

    def __init__(self, trainer: EmbeddingHost, team: Team, backend: Backend, planned: PlannedRun):
        self._trainer = trainer
        self._team = team
        self._backend = backend
        self._planned = planned
        self.is_on = planned.applied("embedding_cache")
        self._settings: Facts = planned.plan["embedding_cache"].settings if self.is_on else {}
        self._embedded: dict[Any, tuple[Any, Embedded]] = {}  # by ids of the dataset, kept taken, and of what is read
        self._stores: dict[Any, EmbeddingStore] = {}  # by what decides values, not by name: inputs may share an encoder
        self._folders: dict[str, str] = {}  # of the stores, by input
        self._encoded = {"num_encoded": 0, "encoding_seconds": 0.0, "encoded_in_float32": 0}

    # --- datasets ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Embeds all sets before training, while the encoders are in memory, and measures scales."""
        trainer = self._trainer
        if self.is_on:
            for dataset in (trainer.train_dataset, *name_evaluation_sets(trainer.eval_dataset).values()):
                if hasattr(dataset, "__len__"):
                    trainer.embed_dataset(dataset)
            trainer.model.release_encoders()
        if hasattr(trainer.model, "fit_scaling") and not trainer.model.config.is_scaled:
            trainer.fit_scaling()

    def embed(self, dataset: Rows) -> Embedded:
        """Puts rows of embedding tables, or states of residues, into `dataset` for frozen inputs; encodes the missing.

        The same dataset is embedded once. Cost: encoding of sequences never seen with this encoder, once per machine;
        then one pass over the columns.

        Raises:
            CacheError: the states of residues do not fit on the disk.
        """
        key = id(dataset), tuple(map(id, self._residues.values()))
        if key not in self._embedded:
            self._embedded[key] = (dataset, self._embed(dataset))
        return self._embedded[key][1]

    def _embed(self, dataset: Rows) -> Embedded:
        if self._per_residue:
            return self._embed_residues(dataset)
        trainer = self._trainer
        optional = self._optional_inputs
        inputs: Mapping[str, Sequence[str]] = trainer.data_collator.columns
        positions = {}
        tables = {}
        for name in self._settings["inputs"]:
            positions[name], sequences = find_inputs(dataset, trainer.data_collator, name)
            width = trainer.model.embedding_sizes[name]
            tables[name] = make_table(self.fill(name, sequences), sequences, width, _free_bytes())
        cached = {column for name in positions for column in inputs[name]}
        live = sorted({column for parts in inputs.values() for column in parts} - cached)
        return EmbeddedDataset(
            positions, tables, self._label_columns(dataset), _only(dataset, live) if live else None, optional
        )

    def _embed_residues(self, dataset: Rows) -> EmbeddedResidues:
        (name,) = self._settings["inputs"]
        sequences = [*map(join_parts, read_columns(dataset, self._trainer.data_collator.columns[name]))]
        store = self.fill(name, sequences)
        labels = None
        if "label" in column_names(dataset):
            labels = read_column(dataset, "label")
        return EmbeddedResidues(name, store, sequences, self._trainer.model.config.kind, labels)

    def _label_columns(self, dataset: Rows) -> dict[str, np.ndarray]:
        """Returns labels, bounds, numbers and a teacher's predictions as `SequenceCollator` does, of sets with them."""
        names = column_names(dataset)
        found = {}
        if "label" in names:
            labels = read_column(dataset, "label")
            found["labels"] = self._trainer.model.config.kind.stack(labels).numpy()
        if "bound" in names:
            found["bounds"] = np.array([value or 0 for value in read_column(dataset, "bound")], np.int64)
        if TEACHER in names:
            found[TEACHER] = np.array(read_column(dataset, TEACHER), np.float32)
        if numbers := getattr(self._trainer.data_collator, NUMBERS, None):
            found[NUMBERS] = numbers.matrix(dataset)
        if self._residues:
            found[RESIDUES] = self._trainer.data_collator.read_residues(dataset)
        return found

    @property
    def _residues(self) -> Mapping[str, Any]:
        """What heads read off sequences; a collator of the user's knows of none."""
        return getattr(self._trainer.data_collator, RESIDUES, {})

    @property
    def _per_residue(self) -> bool:
        return self._trainer.model.config.kind.per_residue

    @property
    def _optional_inputs(self) -> Sequence[str]:
        """Names of inputs that rows may lack; a collator of the user's knows of none."""
        return getattr(self._trainer.data_collator, "optional_inputs", ())

    # --- sequences --------------------------------------------------------------------------------------------------

    def encode(self, name: str, sequences: Sequence[str]) -> torch.Tensor:
        """Returns embeddings of input `name`, through the cache where it is on: (n, width), float32, on the CPU.

        Where residues have labels, the states of all of them: (residues, width).
        """
        trainer = self._trainer
        if not sequences:  # of an input that all rows lack
            return torch.empty(0, trainer.model.embedding_sizes[name])
        if name in self._settings.get("inputs", ()):
            store = self.fill(name, sequences)
            return torch.cat(store.gather_states(sequences)) if self._per_residue else store.gather(sequences)
        encode = partial(trainer.encode_sequences, name)
        exactly = in_float32(trainer.model, name, encode)
        batches = [sequences[i : i + LIVE_BATCH] for i in range(0, len(sequences), LIVE_BATCH)]
        with self._backend.encoding(trainer.model):
            blocks = [encode_finite(encode, exactly, batch)[0] for batch in batches]
        return torch.cat([*chain.from_iterable(blocks)] if self._per_residue else blocks)

    def key(self, name: str) -> Json:
        """Returns all that decides the value of embeddings of input `name`; how long ones are read is known apart."""
        model = self._trainer.model
        collator = self._trainer.data_collator
        tower = model.tower_of(name)
        products = "half"
        if model.encoder_dtype == torch.float32 and model.encoder_autocast is None:
            # Kept where `cpu_matmul` measured it exact; whether it pays differs from run to run.
            is_exact = self._planned.applied("cpu_matmul")
            device = torch.device(self._trainer.args.device)
            products = "float32" if is_exact else read_matmul_precision().name(device.type)
        return {
            "format": 3,
            "encoder": identify_encoder(model.config.encoder_specs[tower.encoder]),
            "transformers": ".".join(transformers.__version__.split(".")[:2]),  # whose models may have been mended
            "tokenizer": collator.tokenizers[name].fingerprint(),
            "pooling": "residues in float16" if self._per_residue else tower.pooling,
            "dtype": str(model.encoder_dtype),
            "autocast": str(model.encoder_autocast),
            "products": products,
            **({"bits": model.config.encoder_bits} if model.config.encoder_bits else {}),
        }

    def fill(self, name: str, sequences: Sequence[str], states: torch.dtype = torch.float16) -> EmbeddingStore:
        """Returns the store of input `name` with all `sequences` (pairs joined by `|`) in it; processes share the work.

        States of residues are stored in `states`; those that float16 does not hold in float32.

        Raises:
            CacheError: what other processes stored does not arrive here; states do not fit on the disk.
        """
        trainer = self._trainer
        args = trainer.args
        team = self._team
        store = self._open(name, states)
        encode = partial(trainer.encode_sequences, name)
        exactly = in_float32(trainer.model, name, encode)
        shard = {}
        if self._per_residue:
            self._check_room(name, store, sequences, states.itemsize)
            exactly = exactly or encode
            shard = {"shard_sequences": SHARD_STATES}
        report = fill_store(
            store,
            sequences,
            (lambda batch: [one.to(states) for one in encode(batch)]) if self._per_residue else encode,
            encode_exactly=exactly,
            **shard,
            tokens_per_batch=self._settings["tokens_per_batch"],
            process_index=team.rank,
            num_processes=team.size,
            description=f"Embedding {name}",
            show_progress=not args.disable_tqdm and args.should_log,
        )
        reports = [report]
        if team.size > 1:
            reports = gather_object(reports)  # also waits for everyone
            with args.main_process_first(local=False):
                store.refresh()
                if any(report.num_encoded for report in reports):
                    store.merge()  # by the main process, after which others find nothing to merge
            team.wait_for_everyone()
            if missing := store.missing(sequences):  # on machines that share no drive
                raise CacheError(
                    f"{store.folder}: {len(missing)} of {len(set(sequences))} embeddings that other processes stored "
                    "are not there. Give --embedding_cache_dir a folder on a drive that all machines share."
                )
        self._report(name, store, reports)
        return store

    def _check_room(self, name: str, store: EmbeddingStore, sequences: Sequence[str], item_bytes: int) -> None:
        """Says what the states of residues that are not stored yet will take, and refuses where the disk lacks it."""
        missing = store.missing(sequences)
        longest = store.max_residues if store.overlap is None else None
        num_residues = sum(len(one[:longest]) for one in missing)
        num_bytes = item_bytes * self._trainer.model.embedding_sizes[name] * num_residues
        size = f"{len(missing):,} sequences of input '{name}' take {num_bytes / 1e9:.2g} GB in float{8 * item_bytes}"
        free = free_bytes(store.folder)
        if num_bytes > free:
            raise CacheError(
                f"{store.folder}: residue states of {size}, and {free / 1e9:.2g} GB are free there. Give "
                "--embedding_cache_dir a folder with more, or --without embedding_cache, which runs the encoder in "
                "each epoch."
            )
        if missing and self._team.is_main:
            logger.info("Residue states of %s, in %s.", size, store.folder)

    def _open(self, name: str, states: torch.dtype) -> EmbeddingStore:
        key = self._trainer.embedding_key(name)
        if self._per_residue and states != torch.float16:
            key = {**key, "states": str(states)}
        limit = limit_of(self._trainer.data_collator, name)
        identity = json.dumps([key, limit], sort_keys=True)
        if identity not in self._stores:
            cache_dir = os.path.expanduser(self._settings["cache_dir"])
            with self._trainer.args.main_process_first(local=False):  # which removes what does not verify
                self._stores[identity] = EmbeddingStore(cache_dir, key, *limit)
            # Shards are dealt by position in the list of what is missing: no process writes while one reads its index.
            self._team.wait_for_everyone()
        return self._stores[identity]

    def _report(self, name: str, store: EmbeddingStore, reports: list[EncodingReport]) -> None:
        """Adds what all processes encoded to the evidence; they worked side by side."""
        counts = self._encoded
        counts["num_encoded"] += sum(report.num_encoded for report in reports)
        counts["encoding_seconds"] += round(max(report.seconds for report in reports), 2)
        counts["encoded_in_float32"] += sum(len(report.overflowed) for report in reports)
        self._folders[name] = str(store.folder)
        self._planned.record("embedding_cache", **counts, stores=dict(self._folders))

    # --- before the first step --------------------------------------------------------------------------------------

    def fit_scaling(self) -> None:
        """Gives the model the scale of labels over all rows, and of embeddings over a sample of sequences.

        Of a stream, the first 2048 rows are read. The same numbers on every process. Cost: with the cache, nothing
        that training would not need anyway; without, 256 sequences per input.

        Raises:
            DataError: no row has an input.
        """
        trainer = self._trainer
        rows = trainer.train_dataset
        if not hasattr(rows, "__len__"):
            if not (first := list(islice(rows, SAMPLE))):
                raise DataError("The stream has no training rows: all went to validation or test, or there are none.")
            rows = datasets.Dataset.from_list(first)
        if self.is_on:
            trainer.embed_dataset(rows)  # all of them first, so that shards are cut from the whole set
        samples = {name: self._sample(rows, name) for name in trainer.model.embedding_sizes}
        for name, sample in samples.items():
            if not sample:
                raise DataError(
                    f"None of {len(rows):,} training rows has input '{name}', so its scale cannot be measured, and "
                    "nothing can be learned from it. Leave its columns out, or train on rows of which some have it."
                )
        embeddings = {name: trainer.encode_distinct(name, sample) for name, sample in samples.items()}
        if numbers := getattr(trainer.data_collator, NUMBERS, None):
            embeddings[NUMBERS] = torch.from_numpy(numbers.matrix(rows))
        labels = read_column(rows, "label")
        mean, std = trainer.model.config.kind.scale(labels)
        trainer.model.fit_scaling(mean, std, embeddings)

    def _sample(self, rows: Rows, name: str) -> list[str]:
        """Samples the distinct sequences of input `name`, shortest first; of optional ones, those that are there."""
        distinct = sorted(find_inputs(rows, self._trainer.data_collator, name)[1])
        order = np.random.default_rng(self._trainer.args.seed).permutation(len(distinct))
        number = SAMPLE if self.is_on and not self._per_residue else LIVE_SAMPLE
        return sorted((distinct[i] for i in order[:number]), key=len)


def _only(dataset: Rows, columns: list[str]) -> Rows:
    """Returns rows of `dataset` with nothing but `columns`."""
    if isinstance(dataset, datasets.Dataset):
        return dataset.select_columns(columns)
    return [dict(zip(columns, row)) for row in read_columns(dataset, columns)]


def _free_bytes() -> int:
    """Returns the bytes that one table may take in memory."""
    limit = (detect_hardware("cpu").memory_gib or 1) * 2**30  # a container's, where there is one
    return int(min(limit, psutil.virtual_memory().available) * MEMORY_FRACTION)
