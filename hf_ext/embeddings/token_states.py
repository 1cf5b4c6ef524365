"""States of all tokens of a frozen encoder, kept as pooled embeddings are, and handed to a collator."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from ..errors import DataError
from .shortening import WHOLE, Shortening
from .store import EmbeddingStore, Shard

SHARD_SEQUENCES = 64  # of 500 residues and 1,280 wide in float32: 160 MB


class TokenStateStore(EmbeddingStore):
    """An `EmbeddingStore` whose entries are as long as their sequences: (tokens, width) each.

    Keys, shards, hashes and healing are those of `EmbeddingStore`; a sequence whose states are not finite is dropped
    whole. States keep the dtype in which they were added; those of one shard have one, the highest among them.

    Args:
        cache_dir, key, shortening: as of `EmbeddingStore`. The key never meets that of pooled embeddings: "states" is
            added to it.

    Raises:
        CacheError: as `EmbeddingStore`.
    """

    shard_sequences = SHARD_SEQUENCES
    _tensors = ("hashes", "embeddings", "lengths")

    def __init__(self, cache_dir: str | os.PathLike[str], key: dict[str, Any], shortening: Shortening = WHOLE):
        self._starts: dict[Path, list[int]] = {}  # per shard: first token of each sequence, and the number of tokens
        super().__init__(cache_dir, {**key, "states": "of every token"}, shortening)

    def add(self, sequences: Sequence[str], embeddings: Sequence[torch.Tensor]) -> Path:
        """Writes one shard; returns its path. `embeddings`: of each sequence (tokens, width), at least one token.

        Raises:
            NotFiniteError: some are NaN or infinite, with their sequences; nothing is written.
            DataError: another number of them than of sequences, or other shapes.
        """
        shapes = {tuple(states.shape[1:]) for states in embeddings}
        if len(sequences) != len(embeddings) or len(shapes) != 1 or not all(map(len, embeddings)):
            raise DataError(
                f"States of {len(embeddings)} sequences for {len(sequences)}, widths {sorted(shapes)}: give (tokens, "
                "width) for each, of one width, with at least one token."
            )
        return super().add(sequences, list(embeddings))

    def gather(self, sequences: Sequence[str], out: torch.Tensor | None = None) -> list[torch.Tensor]:
        """States of stored sequences, in order: (tokens, width) each, float32, which holds every stored value.

        Cost: reads those tokens and no others from disk; each sequence once, however often it is named.

        Raises:
            KeyError: a sequence is not stored.
        """
        assert out is None, "states of several lengths have no one tensor to go to"
        by_shard: dict[Path, dict[int, str]] = {}
        for sequence in dict.fromkeys(sequences):
            path, row = self._index[self._digest(sequence)]
            by_shard.setdefault(path, {})[row] = sequence
        found: dict[str, torch.Tensor] = {}
        for path, rows in by_shard.items():
            starts = self._shard_starts(path)
            with safe_open(path, framework="pt") as shard:
                states = shard.get_slice("embeddings")
                found.update({name: states[starts[row] : starts[row + 1]].float() for row, name in rows.items()})
        return [found[sequence] for sequence in sequences]

    def _shard_starts(self, path: Path) -> list[int]:
        if path not in self._starts:
            with safe_open(path, framework="pt") as shard:
                self._starts[path] = [0, *shard.get_tensor("lengths").cumsum(0).tolist()]
        return self._starts[path]

    def refresh(self) -> None:
        """As of `EmbeddingStore`."""
        self._starts.clear()
        super().refresh()

    def _as_tensors(self, embeddings: Any) -> Shard:
        lengths = torch.tensor([len(states) for states in embeddings])
        return {"embeddings": torch.cat([states.cpu() for states in embeddings]).contiguous(), "lengths": lengths}

    def _find_finite(self, shard: Shard) -> torch.Tensor:
        lengths = shard["lengths"]
        is_wrong = (~torch.isfinite(shard["embeddings"]).all(1)).long()
        owner = torch.arange(len(lengths)).repeat_interleave(lengths)
        return torch.zeros(len(lengths), dtype=torch.long).index_add(0, owner, is_wrong) == 0

    def _keep(self, shard: Shard, kept: torch.Tensor) -> Shard:
        lengths = shard["lengths"]
        return {
            "hashes": shard["hashes"][kept],
            "embeddings": shard["embeddings"][kept.repeat_interleave(lengths)],
            "lengths": lengths[kept],
        }


class StateTable:
    """`states_of` of an `AntibodyCollator`: token ids of antigens to their stored states.

    Args:
        store: holds the states of all `sequences`.
        sequences: distinct antigens.
        ids: the token ids of each, as rows carry them.
        in_memory: keep all states in memory; else each batch reads its own from disk (or the system's file cache).

    Raises:
        KeyError: a sequence is not stored.
        DataError: other numbers of sequences and ids; or stored states of another number of tokens than ids.
    """

    def __init__(
        self, store: TokenStateStore, sequences: Sequence[str], ids: Sequence[np.ndarray], in_memory: bool = False
    ):
        if len(sequences) != len(ids):
            raise DataError(f"{len(sequences)} antigens with ids of {len(ids)}: give one for each.")
        self.store = store
        self._sequences = {_key(row): sequence for row, sequence in zip(ids, sequences)}
        for row, states in zip(ids[:1], store.gather(sequences[:1])):
            if len(states) != len(row):
                raise DataError(
                    f"{store.folder}: {len(states)} states of an antigen that has {len(row)} tokens. They come from "
                    "another tokenizer: give its fingerprint in the key."
                )
        self._states = dict(zip(self._sequences, store.gather(list(self._sequences.values())))) if in_memory else None

    def __call__(self, antigens: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """States of each antigen, (tokens, width), float32.

        Raises:
            DataError: the table does not have it.
        """
        keys = [_key(ids) for ids in antigens]
        if lacking := [ids for ids, key in zip(antigens, keys) if key not in self._sequences]:
            raise DataError(
                f"No states of {len(lacking)} antigens of a batch, the first of {len(lacking[0])} tokens: encode them "
                "first (fill_store)."
            )
        if self._states is not None:
            return [self._states[key] for key in keys]
        return self.store.gather([self._sequences[key] for key in keys])


def _key(ids: Any) -> bytes:
    return np.asarray(ids, np.int64).tobytes()
