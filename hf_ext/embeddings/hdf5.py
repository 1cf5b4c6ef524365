"""Embeddings from and to HDF5 as biotrainer keeps them: one dataset per sequence, named by its hash or by its id."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import torch

from ..errors import DataError
from ..files import replacing
from ..optional import require
from .encode import SHARD_SEQUENCES
from .store import EmbeddingStore


def import_hdf5(path: str | os.PathLike[str], store: EmbeddingStore, sequences: Mapping[str, str], width: int) -> int:
    """Stores pooled embeddings of an HDF5 file as those of sequences; returns how many were not stored before.

    Args:
        path: a file of biotrainer's ("reduced"), or of `export_hdf5`.
        store: of the encoder that made them: `EmbeddingStore(args.embedding_cache_dir, trainer.embedding_key(name))`.
            That weights, tokenizer, pooling and precision are those of its key, nothing can check.
        sequences: id -> sequence, parts of a pair joined by `|`: those to import. The file knows them by biotrainer's
            hash of the sequence, or by id; what else it holds is left.
        width: of the encoder, `trainer.model.embedding_sizes[name]`.

    Raises:
        MissingDependencyError: h5py is not installed.
        DataError: the file lacks a sequence, or holds another shape.
        NotFiniteError: an embedding is NaN or infinite.
    """
    with require("h5py", "hdf5", "an HDF5 file").File(path) as file:
        names = {data.attrs.get("original_id", name): name for name, data in file.items()}
        found = {text: _hash(text) if _hash(text) in file else names.get(name) for name, text in sequences.items()}
        if lacking := [name for name, text in sequences.items() if found[text] is None]:
            raise DataError(
                f"{path} lacks {len(lacking)} of {len(sequences)} sequences, by biotrainer's hash and by id, such as "
                f"{lacking[0]!r}; of its {len(file)} ids one is {next(iter(names), '')!r}."
            )
        missing = store.missing(found)
        for chosen in (missing[i : i + SHARD_SEQUENCES] for i in range(0, len(missing), SHARD_SEQUENCES)):
            values = [torch.from_numpy(file[found[text]][()]) for text in chosen]
            if wrong := {tuple(one.shape) for one in values} - {(width,)}:
                raise DataError(f"{path}: shape {wrong.pop()}, not ({width},): of another encoder, or not pooled.")
            store.add(chosen, torch.stack(values))
    store.merge()
    return len(missing)


def export_hdf5(store: EmbeddingStore, path: str | os.PathLike[str], sequences: Mapping[str, str]) -> None:
    """Writes stored pooled embeddings, float32, as biotrainer would; a file that stands there is replaced.

    Args:
        sequences: id -> sequence, all stored; of several ids of one sequence the last is written.

    Raises:
        MissingDependencyError: h5py is not installed.
        KeyError: a sequence is not stored.
    """
    ids = {text: name for name, text in sequences.items()}
    with replacing(path) as draft, require("h5py", "hdf5", "an HDF5 file").File(draft, "w") as file:
        for text, values in zip(ids, store.gather([*ids]).numpy()):
            made = file.create_dataset(_hash(text), data=values, compression="gzip", chunks=True)
            made.attrs["original_id"] = ids[text]


def _hash(sequence: str) -> str:
    """What biotrainer (1.4) calls a sequence."""
    return hashlib.sha256(f"{sequence}_{len(sequence)}".encode()).hexdigest()
