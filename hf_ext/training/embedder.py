"""Embed once: datasets of text become datasets of cached embeddings when they are first used."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import datasets
import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import TrainingArguments

from ..data.columns import column_names, read_columns
from ..embeddings.dataset import EmbeddedDataset, EmbeddingTable, join_parts, number_inputs
from ..embeddings.encode import EncodingReport, fill_store
from ..embeddings.finite import encode_finite
from ..embeddings.shortening import Shortening
from ..embeddings.store import EmbeddingStore
from ..errors import CacheError
from ..hardware import detect_hardware
from .encoding import Encoding
from .team import Team

Fill = Callable[[str, Sequence[str]], EmbeddingStore]

LIVE_BATCH = 8  # sequences per batch where there is no cache to size batches for
DEVICE_SHARE = 0.3  # of free device memory that embedding tables may take
_LABELS = {"labels": ("label", np.float32), "bounds": ("bound", np.int64)}  # as `SequenceCollator` makes them


class Embedder:
    """Replaces the frozen inputs of datasets by cached embeddings, where it is on.

    Args:
        args: of the run.
        team: its processes, which share the work and a folder.
        settings: of decision `embedding_cache`: `inputs` (names), `cache_dir`, `tokens_per_batch`; None: it is off.
        record: takes the evidence of the decision, whenever there is more of it.

    Attributes:
        is_on: whether it was given settings.
        tables: those of each dataset embedded so far, by input; a batch names its own by number.
    """

    def __init__(
        self,
        args: TrainingArguments,
        team: Team,
        settings: Mapping[str, Any] | None = None,
        record: Callable[..., None] | None = None,
    ):
        self._args, self._team, self._settings, self._record = args, team, settings or {}, record
        self.is_on = settings is not None
        self.tables: list[dict[str, EmbeddingTable]] = []
        self._embedded: dict[int, tuple[Any, EmbeddedDataset]] = {}  # by id of the dataset, which it keeps taken
        self._stores: dict[Any, EmbeddingStore] = {}  # by what decides values, not by name: inputs may share an encoder
        self._folders: dict[str, str] = {}  # of the stores, by input
        self._encoded = {"sequences": 0, "residues": 0, "seconds": 0.0, "in_float32": 0}

    # --- datasets ---------------------------------------------------------------------------------------------------

    def embed(self, dataset: Any, encoding: Encoding, fill: Fill | None = None) -> EmbeddedDataset:
        """`dataset` with its frozen inputs as positions in embedding tables; encodes what the cache lacks.

        The same dataset is embedded once. `fill` takes the place of this embedder's own, where somebody overrides it.
        Cost: encoding of sequences never seen with this encoder, once per machine; then one pass over the columns.
        """
        if id(dataset) not in self._embedded:
            fill = fill or partial(self.fill, encoding=encoding)
            self._embedded[id(dataset)] = (dataset, self._embed(dataset, encoding, fill))
        return self._embedded[id(dataset)][1]

    def _embed(self, dataset: Any, encoding: Encoding, fill: Fill) -> EmbeddedDataset:
        inputs: Mapping[str, Sequence[str]] = encoding.collator.columns
        optional = encoding.optional_inputs
        positions, tables = {}, {}
        for name in self._settings["inputs"]:
            positions[name], distinct = number_inputs(read_columns(dataset, inputs[name]), name in optional)
            sequences = [join_parts(parts) for parts in distinct]
            tables[name] = self._table(fill(name, sequences), sequences, encoding.model.embedding_sizes[name])
        self.tables.append(tables)
        cached = {column for name in positions for column in inputs[name]}
        live = {column for parts in inputs.values() for column in parts} - cached
        rest = _only(dataset, sorted(live)) if live else None
        return EmbeddedDataset(positions, _label_columns(dataset), len(self.tables) - 1, rest, optional)

    def _table(self, store: EmbeddingStore, sequences: list[str], width: int) -> EmbeddingTable:
        device = torch.device(self._args.device)
        return EmbeddingTable(store, sequences, width, device, _budget(device), store.folder)

    def rows(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """A batch whose positions became rows of their tables, gathered on the device where the tables are there."""
        if self.is_on and "positions" in inputs:  # else they are the user's, of any type
            positions, chosen = inputs.pop("positions"), self.tables[inputs.pop("tables")]
            device = self._args.device
            inputs["embeddings"] = {name: chosen[name].rows(index, device) for name, index in positions.items()}
        return inputs

    # --- sequences --------------------------------------------------------------------------------------------------

    def encode(self, name: str, sequences: Sequence[str], encoding: Encoding, fill: Fill | None = None) -> torch.Tensor:
        """Embeddings of input `name`, through the cache where it is on: (n, width), float32, on the CPU."""
        if not sequences:  # of an input that all rows lack
            return torch.empty(0, encoding.model.embedding_sizes[name])
        if name in self._settings.get("inputs", ()):
            return (fill or partial(self.fill, encoding=encoding))(name, sequences).gather(sequences)
        batches = [sequences[i : i + LIVE_BATCH] for i in range(0, len(sequences), LIVE_BATCH)]
        encode, exactly = encoding.encoder(name)
        with encoding.gathered():
            found = [encode_finite(encode, exactly, batch) for batch in batches]
        return torch.cat([embeddings for embeddings, _ in found])

    def fill(self, name: str, sequences: Sequence[str], encoding: Encoding) -> EmbeddingStore:
        """The store of input `name` with all `sequences` (pairs joined by `|`) in it; all processes share the work.

        Raises:
            CacheError: what other processes stored does not arrive here.
        """
        store = self._open(encoding.key(name), encoding.shortening(name))
        encode, exactly = encoding.encoder(name)
        report = fill_store(
            store,
            sequences,
            encode,
            encode_exactly=exactly,
            tokens_per_batch=self._settings["tokens_per_batch"],
            process_index=self._team.rank,
            num_processes=self._team.size,
            description=f"Embedding {name}",
            show_progress=not self._args.disable_tqdm and self._args.should_log,
        )
        reports = [report]
        if self._team.size > 1:
            reports = gather_object(reports)  # also waits for everyone
            store.refresh()
            self._team.wait_for_everyone()
            _check_shared(store, sequences)
        self._report(name, store, reports)
        return store

    def _open(self, key: dict[str, Any], shortening: Shortening) -> EmbeddingStore:
        identity = json.dumps(key, sort_keys=True), shortening
        if identity not in self._stores:
            if not self._team.is_main:
                self._team.wait_for_everyone()  # until the main process has removed what does not verify
            cache_dir = os.path.expanduser(self._settings["cache_dir"])
            self._stores[identity] = EmbeddingStore(cache_dir, key, shortening)
            if self._team.is_main:
                self._team.wait_for_everyone()
            # Shards are dealt by position in the list of what is missing: nobody writes while another reads its index.
            self._team.wait_for_everyone()
        return self._stores[identity]

    def _report(self, name: str, store: EmbeddingStore, reports: list[EncodingReport]) -> None:
        """Adds what all processes encoded to the evidence; they worked side by side."""
        counts = self._encoded
        counts["sequences"] += sum(report.num_encoded for report in reports)
        counts["residues"] += sum(report.num_residues for report in reports)
        counts["seconds"] += max(report.seconds for report in reports)
        counts["in_float32"] += sum(len(report.overflowed) for report in reports)
        self._folders[name] = str(store.folder)
        if self._record is None:
            return
        self._record(
            num_encoded=counts["sequences"],
            encoding_seconds=round(counts["seconds"], 2),
            residues_per_second=round(counts["residues"] / counts["seconds"]) if counts["sequences"] else None,
            **({"encoded_in_float32": counts["in_float32"]} if counts["in_float32"] else {}),
            **({"not_finite_on_disk": store.num_not_finite} if store.num_not_finite else {}),
            stores=dict(self._folders),
        )


def _check_shared(store: EmbeddingStore, sequences: Sequence[str]) -> None:
    """Raises CacheError where other processes' embeddings do not arrive: on machines that share no drive."""
    missing = store.missing(sequences)
    if missing:
        raise CacheError(
            f"{store.folder}: {len(missing)} of {len(set(sequences))} embeddings that other processes stored are not "
            "there. Give --embedding_cache_dir a folder on a drive that all machines share."
        )


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


def _budget(device: torch.device) -> int:
    """Bytes that one table may take on `device`."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * DEVICE_SHARE)
    memory_gib = detect_hardware("cpu").memory_gib or 1  # a container's limit, where there is one
    free = memory_gib * 2**30
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = min(free, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return int(free * DEVICE_SHARE)
