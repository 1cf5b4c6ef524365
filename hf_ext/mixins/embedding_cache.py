"""Embed once, inside a Trainer: datasets of text become datasets of cached embeddings when they are first used."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from accelerate.utils import gather_object

from ..data.columns import column_names, read_columns
from ..embeddings.dataset import EmbeddedDataset, EmbeddingTable, join_parts
from ..embeddings.encode import EncodingReport, fill_store
from ..embeddings.finite import encode_finite
from ..embeddings.store import EmbeddingStore
from ..errors import CacheError
from ..hardware import detect_hardware
from ..matmul import read_matmul_precision
from ..models.encoders import identify_encoder
from ..models.exact_encoding import exact_encoding

LIVE_BATCH = 8  # sequences per batch where there is no cache to size batches for
DEVICE_SHARE = 0.3  # of free device memory that embedding tables may take


class EmbeddingCacheMixin:
    """Where the plan applied `embedding_cache`, replaces frozen inputs of every dataset by cached embeddings."""

    args: Any
    model: Any
    plan: Any
    accelerator: Any
    data_collator: Any
    train_dataset: Any
    eval_dataset: Any

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if self.plan.applied("embedding_cache") and hasattr(dataset, "__len__"):
            dataset = self.embed_dataset(dataset)
            self.model.release_encoders()
        return super()._get_dataloader(dataset, *args, **kwargs)  # type: ignore[misc]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer; all datasets at hand are embedded first, while the encoders are in memory."""
        if self.plan.applied("embedding_cache"):
            several = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
            for dataset in (self.train_dataset, *several.values()):
                if hasattr(dataset, "__len__"):
                    self.embed_dataset(dataset)
            self.model.release_encoders()
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """As in Trainer; positions become rows of their tables, gathered on the device where the tables are there."""
        if self.plan.applied("embedding_cache") and "positions" in inputs:  # else they are the user's, of any type
            positions = inputs.pop("positions")
            chosen = self._tables[inputs.pop("tables")]
            device = self.args.device
            inputs["embeddings"] = {name: chosen[name].rows(index, device) for name, index in positions.items()}
        return super()._prepare_inputs(inputs)  # type: ignore[misc]

    @property
    def _tables(self) -> list[dict[str, EmbeddingTable]]:
        return self.__dict__.setdefault("_embedding_tables", [])

    def embed_dataset(self, dataset: Any) -> EmbeddedDataset:
        """`dataset` with its frozen inputs as positions in embedding tables; encodes what the cache lacks.

        Cost: encoding of sequences never seen with this encoder, once per machine; then one pass over the columns.
        """
        known = self.__dict__.setdefault("_embedded_datasets", {})
        if id(dataset) not in known:
            known[id(dataset)] = (dataset, self._embed(dataset))  # holding the dataset keeps its id taken
        return known[id(dataset)][1]

    def _embed(self, dataset: Any) -> EmbeddedDataset:
        positions, tables = {}, {}
        for name in self.plan["embedding_cache"].settings["inputs"]:
            rows = read_columns(dataset, self.data_collator.columns[name])
            index: dict[tuple[str, ...], int] = {}
            positions[name] = np.fromiter((index.setdefault(row, len(index)) for row in rows), np.int64, len(rows))
            sequences = [join_parts(parts) for parts in index]
            tables[name] = self._table(name, sequences)
        self._tables.append(tables)
        names = column_names(dataset)
        columns = {
            new: np.array([value for (value,) in read_columns(dataset, [old])], dtype)
            for new, (old, dtype) in _LABELS.items()
            if old in names
        }
        cached = {column for name in positions for column in self.data_collator.columns[name]}
        live = {column for parts in self.data_collator.columns.values() for column in parts} - cached
        rest = _only(dataset, sorted(live)) if live else None
        return EmbeddedDataset(positions, columns, len(self._tables) - 1, rest)

    def _table(self, name: str, sequences: list[str]) -> EmbeddingTable:
        store = self.fill_embedding_store(name, sequences)
        device = torch.device(self.args.device)
        width = self.model.embedding_sizes[name]
        return EmbeddingTable(store, sequences, width, device, _budget(device), store.folder)

    def fill_embedding_store(self, name: str, sequences: Sequence[str]) -> EmbeddingStore:
        """The store of input `name` with all `sequences` (pairs joined by `|`) in it; all processes share the work."""
        settings = self.plan["embedding_cache"].settings
        store = self._open_store(name, settings["cache_dir"])
        encode = partial(self.encode_sequences, name)
        report = fill_store(
            store,
            sequences,
            encode,
            encode_exactly=exact_encoding(self.model, name, encode),
            tokens_per_batch=settings["tokens_per_batch"],
            process_index=self.args.process_index,
            num_processes=self.args.world_size,
            description=f"Embedding {name}",
            show_progress=not self.args.disable_tqdm and self.args.should_log,
        )
        reports = [report]
        if self.args.world_size > 1:
            reports = gather_object(reports)  # also waits for everyone
            store.refresh()
            self.accelerator.wait_for_everyone()
            _check_shared(store, sequences)
        self._report(name, store, reports)
        return store

    def _open_store(self, name: str, cache_dir: str) -> EmbeddingStore:
        # One per key, not per name: inputs that share an encoder share embeddings.
        stores = self.__dict__.setdefault("_embedding_stores", {})
        key = self.embedding_key(name)
        identity = json.dumps(key, sort_keys=True)
        if identity not in stores:
            with self.accelerator.main_process_first():  # one process removes what does not verify
                stores[identity] = EmbeddingStore(os.path.expanduser(cache_dir), key)
            # Shards are dealt by position in the list of what is missing: nobody writes while another reads its index.
            self.accelerator.wait_for_everyone()
        return stores[identity]

    def encode_distinct(self, name: str, sequences: Sequence[str]) -> torch.Tensor:
        """Embeddings of input `name`, through the cache where it is on: (n, width), float32, on the CPU."""
        decision = self.plan["embedding_cache"]
        if decision.status == "applied" and name in decision.settings["inputs"]:
            return self.fill_embedding_store(name, sequences).gather(sequences)
        batches = [sequences[i : i + LIVE_BATCH] for i in range(0, len(sequences), LIVE_BATCH)]
        encode = partial(self.encode_sequences, name)
        exactly = exact_encoding(self.model, name, encode)
        with self.gathered_for_encoding():  # type: ignore[attr-defined]
            found = [encode_finite(encode, exactly, batch) for batch in batches]
        return torch.cat([embeddings for embeddings, _ in found])

    @torch.no_grad()
    def encode_sequences(self, name: str, sequences: Sequence[str]) -> torch.Tensor:
        """Embeddings of input `name`, computed here and now: (n, width), float32. Parts of a pair are joined by `|`.

        Encoders that train compute as they do in training: under its autocast.
        """
        parts = list(zip(*(sequence.split("|") for sequence in sequences)))
        batch = self.data_collator.encode(name, *parts)
        self.model.eval()
        own = nullcontext() if name in self.model.frozen_inputs else self.accelerator.autocast()
        with own:
            return self.model.encode(name, {key: value.to(self.args.device) for key, value in batch.items()})

    def embedding_key(self, name: str) -> dict[str, Any]:
        """Everything that decides the value of an embedding of input `name`."""
        tower = self.model.tower_of(name)
        encoder = self.model.config.encoder_specs[tower.encoder]
        tokenizer = self.data_collator.tokenizers[name]
        computes_float32 = self.model.encoder_dtype == torch.float32 and self.model.encoder_autocast is None
        return {
            "format": 2,
            "encoder": identify_encoder(encoder),
            "transformers": ".".join(transformers.__version__.split(".")[:2]),  # whose models may have been mended
            "tokenizer": tokenizer.fingerprint(),
            "pooling": tower.pooling,
            "dtype": str(self.model.encoder_dtype),
            "autocast": str(self.model.encoder_autocast),
            "products": self._float32_products() if computes_float32 else "half",
            "max_residues": tokenizer.max_residues,
            "too_long": [self.data_collator.too_long, self.data_collator.window_overlap],
        }

    def _float32_products(self) -> str:
        """What products of float32 are computed in."""
        if self.plan.applied("cpu_matmul"):  # kept where it measured exact; whether it pays differs from run to run
            return "float32"
        return read_matmul_precision().name(torch.device(self.args.device).type)

    def _report(self, name: str, store: EmbeddingStore, reports: list[EncodingReport]) -> None:
        """Adds what all processes encoded to the evidence; they worked side by side."""
        counts = self.__dict__.setdefault("_encoded", {"sequences": 0, "residues": 0, "seconds": 0.0, "in_float32": 0})
        counts["sequences"] += sum(report.num_encoded for report in reports)
        counts["residues"] += sum(report.num_residues for report in reports)
        counts["seconds"] += max(report.seconds for report in reports)
        counts["in_float32"] += sum(len(report.overflowed) for report in reports)
        self.record_evidence(  # type: ignore[attr-defined]
            "embedding_cache",
            num_encoded=counts["sequences"],
            encoding_seconds=round(counts["seconds"], 2),
            residues_per_second=round(counts["residues"] / counts["seconds"]) if counts["sequences"] else None,
            **({"encoded_in_float32": counts["in_float32"]} if counts["in_float32"] else {}),
            **({"not_finite_on_disk": store.num_not_finite} if store.num_not_finite else {}),
            stores={**self.plan["embedding_cache"].evidence.get("stores", {}), name: str(store.folder)},
        )


_LABELS = {"labels": ("label", np.float32), "bounds": ("bound", np.int64)}  # as `SequenceCollator` makes them


def _check_shared(store: EmbeddingStore, sequences: Sequence[str]) -> None:
    """Raises CacheError where other processes' embeddings do not arrive: on machines that share no drive."""
    missing = store.missing(sequences)
    if missing:
        raise CacheError(
            f"{store.folder}: {len(missing)} of {len(set(sequences))} embeddings that other processes stored are not "
            "there. Give --embedding_cache_dir a folder on a drive that all machines share."
        )


def _only(dataset: Any, columns: list[str]) -> Any:
    """Rows of `dataset` with nothing but `columns`."""
    if isinstance(dataset, datasets.Dataset):
        return dataset.select_columns(columns)
    return [dict(zip(columns, row)) for row in read_columns(dataset, columns)]


def _budget(device: torch.device) -> int:
    """Bytes that one table may take on `device`."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * DEVICE_SHARE)
    memory_gib = detect_hardware("cpu").memory_gib or 1  # a container's limit, where there is one
    free = memory_gib * 2**30
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = min(free, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return int(free * DEVICE_SHARE)
