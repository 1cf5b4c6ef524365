"""Embed once: what a frozen encoder makes of each distinct sequence is computed once, stored, and looked up afterwards.

Beside it what needs embeddings before the first step: the scale of labels and of embeddings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import datasets
import numpy as np
import psutil
import torch
import transformers
from accelerate.utils import gather_object

from ..data.columns import column_names, read_columns
from ..embeddings.dataset import EmbeddedDataset, factorize, join_parts, make_table
from ..embeddings.encode import EncodingReport, encode_finite, fill_store
from ..embeddings.store import EmbeddingStore
from ..errors import CacheError, DataError
from ..hardware import detect_hardware
from ..models.affinity import in_float32
from ..models.encoders import identify_encoder
from ..models.process_settings import read_matmul_precision

LIVE_BATCH = 8  # sequences per batch where there is no cache to size batches for
MEMORY_SHARE = 0.3  # of free memory that one table may take
SAMPLE = 2048  # distinct sequences per input: enough for a mean and a spread per feature
LIVE_SAMPLE = 256  # where encoders train: each costs a forward pass, and their embeddings move anyway
_LABELS = {"labels": ("label", np.float32), "bounds": ("bound", np.int64)}  # as `SequenceCollator` makes them


@torch.no_grad()
def encode_sequences(
    model: Any,
    collator: Any,
    name: str,
    sequences: Sequence[str],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> torch.Tensor:
    """Embeddings of input `name`, computed here and now: (n, width), float32. Parts of a pair are joined by `|`.

    Args:
        model: an `AffinityModel`; `collator`: makes its inputs.
        autocast: what encoders that train compute under, as they do in training.
    """
    parts = list(zip(*(sequence.split("|") for sequence in sequences)))
    batch = collator.encode(name, *parts)
    model.eval()
    with nullcontext() if name in model.frozen_inputs else autocast():
        return model.encode(name, {key: value.to(device) for key, value in batch.items()})


class EmbeddingCache:
    """Replaces the frozen inputs of datasets by cached embeddings, where the plan applied `embedding_cache`.

    Attributes:
        is_on: whether it did.
    """

    def __init__(self, trainer: Any):
        planned = trainer._ext_planned
        self._trainer, self.is_on = trainer, planned.applied("embedding_cache")
        self._settings: Mapping[str, Any] = planned.plan["embedding_cache"].settings if self.is_on else {}
        self._embedded: dict[int, tuple[Any, EmbeddedDataset]] = {}  # by id of the dataset, which it keeps taken
        self._stores: dict[Any, EmbeddingStore] = {}  # by what decides values, not by name: inputs may share an encoder
        self._folders: dict[str, str] = {}  # of the stores, by input
        self._encoded = {"num_encoded": 0, "encoding_seconds": 0.0, "encoded_in_float32": 0}

    # --- datasets ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before training: embeds all sets while the encoders are in memory, and measures scales."""
        trainer = self._trainer
        if self.is_on:
            for dataset in (trainer.train_dataset, *trainer._ext_eval_sets.values()):
                if hasattr(dataset, "__len__"):
                    trainer.embed_dataset(dataset)
            trainer.model.release_encoders()
        if hasattr(trainer.model, "fit_scaling") and not trainer.model.config.is_scaled:
            trainer.fit_scaling()

    def embed(self, dataset: Any) -> EmbeddedDataset:
        """`dataset` with rows of embedding tables for its frozen inputs; encodes what the cache lacks.

        The same dataset is embedded once. Cost: encoding of sequences never seen with this encoder, once per machine;
        then one pass over the columns.
        """
        if id(dataset) not in self._embedded:
            self._embedded[id(dataset)] = (dataset, self._embed(dataset))
        return self._embedded[id(dataset)][1]

    def _embed(self, dataset: Any) -> EmbeddedDataset:
        trainer, optional = self._trainer, self._optional_inputs
        inputs: Mapping[str, Sequence[str]] = trainer.data_collator.columns
        positions, tables = {}, {}
        for name in self._settings["inputs"]:
            positions[name], distinct = factorize(read_columns(dataset, inputs[name]), name in optional)
            sequences = [join_parts(parts) for parts in distinct]
            width = trainer.model.embedding_sizes[name]
            tables[name] = make_table(self.fill(name, sequences), sequences, width, _free_bytes())
        cached = {column for name in positions for column in inputs[name]}
        live = sorted({column for parts in inputs.values() for column in parts} - cached)
        return EmbeddedDataset(
            positions, tables, _label_columns(dataset), _only(dataset, live) if live else None, optional
        )

    @property
    def _optional_inputs(self) -> Sequence[str]:
        """Names of inputs that rows may lack; a collator of the user's knows of none."""
        return getattr(self._trainer.data_collator, "optional_inputs", ())

    # --- sequences --------------------------------------------------------------------------------------------------

    def encode(self, name: str, sequences: Sequence[str]) -> torch.Tensor:
        """Embeddings of input `name`, through the cache where it is on: (n, width), float32, on the CPU."""
        trainer = self._trainer
        if not sequences:  # of an input that all rows lack
            return torch.empty(0, trainer.model.embedding_sizes[name])
        if name in self._settings.get("inputs", ()):
            return self.fill(name, sequences).gather(sequences)
        encode = partial(trainer.encode_sequences, name)
        exactly = in_float32(trainer.model, name, encode)
        batches = [sequences[i : i + LIVE_BATCH] for i in range(0, len(sequences), LIVE_BATCH)]
        with trainer._ext_backend.encoding(trainer.model):
            return torch.cat([encode_finite(encode, exactly, batch)[0] for batch in batches])

    def key(self, name: str) -> dict[str, Any]:
        """Everything that decides the value of all embeddings of input `name`; how long ones are cut is known apart."""
        model, collator = self._trainer.model, self._trainer.data_collator
        tower = model.tower_of(name)
        products = "half"
        if model.encoder_dtype == torch.float32 and model.encoder_autocast is None:
            # Kept where `cpu_matmul` measured it exact; whether it pays differs from run to run.
            is_exact = self._trainer._ext_planned.applied("cpu_matmul")
            device = torch.device(self._trainer.args.device)
            products = "float32" if is_exact else read_matmul_precision().name(device.type)
        return {
            "format": 3,
            "encoder": identify_encoder(model.config.encoder_specs[tower.encoder]),
            "transformers": ".".join(transformers.__version__.split(".")[:2]),  # whose models may have been mended
            "tokenizer": collator.tokenizers[name].fingerprint(),
            "pooling": tower.pooling,
            "dtype": str(model.encoder_dtype),
            "autocast": str(model.encoder_autocast),
            "products": products,
            **({"bits": bits} if (bits := model.config.encoder_bits) else {}),
        }

    def fill(self, name: str, sequences: Sequence[str]) -> EmbeddingStore:
        """The store of input `name` with all `sequences` (pairs joined by `|`) in it; all processes share the work.

        Raises:
            CacheError: what other processes stored does not arrive here.
        """
        trainer, args, team = self._trainer, self._trainer.args, self._trainer._ext_team
        store, encode = self._open(name), partial(trainer.encode_sequences, name)
        report = fill_store(
            store,
            sequences,
            encode,
            encode_exactly=in_float32(trainer.model, name, encode),
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

    def _open(self, name: str) -> EmbeddingStore:
        key, collator = self._trainer.embedding_key(name), self._trainer.data_collator
        longest = collator.tokenizers[name].max_residues
        identity = json.dumps([key, longest], sort_keys=True)
        if identity not in self._stores:
            cache_dir = os.path.expanduser(self._settings["cache_dir"])
            with self._trainer.args.main_process_first(local=False):  # which removes what does not verify
                self._stores[identity] = EmbeddingStore(cache_dir, key, longest)
            # Shards are dealt by position in the list of what is missing: nobody writes while another reads its index.
            self._trainer._ext_team.wait_for_everyone()
        return self._stores[identity]

    def _report(self, name: str, store: EmbeddingStore, reports: list[EncodingReport]) -> None:
        """Adds what all processes encoded to the evidence; they worked side by side."""
        counts = self._encoded
        counts["num_encoded"] += sum(report.num_encoded for report in reports)
        counts["encoding_seconds"] += round(max(report.seconds for report in reports), 2)
        counts["encoded_in_float32"] += sum(len(report.overflowed) for report in reports)
        self._folders[name] = str(store.folder)
        self._trainer._ext_planned.record("embedding_cache", **counts, stores=dict(self._folders))

    # --- before the first step --------------------------------------------------------------------------------------

    def fit_scaling(self) -> None:
        """Gives the model the mean and spread of labels over all rows, of embeddings over a sample of sequences.

        Of a stream, the first 2048 rows are read. The same numbers on every process. Cost: with the cache, nothing
        that training would not need anyway; without, 256 sequences per input.

        Raises:
            DataError: no row has an input.
        """
        trainer, rows = self._trainer, self._trainer.train_dataset
        if not hasattr(rows, "__len__"):
            rows = datasets.Dataset.from_list(list(islice(rows, SAMPLE)))
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
        labels = np.array(read_columns(rows, ["label"]), np.float64)
        trainer.model.fit_scaling(float(labels.mean()), float(labels.std()), embeddings)

    def _sample(self, rows: Any, name: str) -> list[str]:
        """Some of the distinct sequences of input `name`, shortest first; of optional ones, those that are there."""
        columns = read_columns(rows, self._trainer.data_collator.columns[name])
        distinct = sorted(join_parts(parts) for parts in factorize(columns, name in self._optional_inputs)[1])
        order = np.random.default_rng(self._trainer.args.seed).permutation(len(distinct))
        return sorted((distinct[i] for i in order[: SAMPLE if self.is_on else LIVE_SAMPLE]), key=len)


def _label_columns(dataset: Any) -> dict[str, np.ndarray]:
    names = column_names(dataset)
    return {
        new: np.array([value for (value,) in read_columns(dataset, [old])], dtype)
        for new, (old, dtype) in _LABELS.items()
        if old in names
    }


def _only(dataset: Any, columns: list[str]) -> Any:
    """Rows of `dataset` with nothing but `columns`."""
    if isinstance(dataset, datasets.Dataset):
        return dataset.select_columns(columns)
    return [dict(zip(columns, row)) for row in read_columns(dataset, columns)]


def _free_bytes() -> int:
    """Bytes that one table may take in memory."""
    limit = (detect_hardware("cpu").memory_gib or 1) * 2**30  # a container's, where there is one
    return int(min(limit, psutil.virtual_memory().available) * MEMORY_SHARE)
