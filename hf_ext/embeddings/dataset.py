"""A dataset of cached embeddings: rows of tables, one table per encoder input."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from .store import EmbeddingStore


def join_parts(parts: Sequence[str]) -> str:
    """The parts of an encoder input as one cache entry: `HEAVY|LIGHT`."""
    return "|".join(parts)


def number_inputs(rows: Sequence[tuple[str, ...]], is_optional: bool) -> tuple[np.ndarray, list[tuple[str, ...]]]:
    """Distinct inputs in the order in which they first occur, and which of them each row has: (n,) int64.

    Where the input is optional, rows without any residue of it have -1.
    """
    index: dict[tuple[str, ...], int] = {}
    numbers = (index.setdefault(row, len(index)) if not is_optional or any(row) else -1 for row in rows)
    return np.fromiter(numbers, np.int64, len(rows)), list(index)


def take_rows(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows of `values`, (inputs, width), at `positions` (n,): (n, width); at -1 numbers that nobody may read."""
    if not len(values):  # all rows lack the input
        return values.new_zeros(len(positions), values.shape[1])
    return values.index_select(0, positions.clamp(min=0))


def make_table(store: EmbeddingStore, sequences: Sequence[str], width: int, budget_bytes: int) -> torch.Tensor:
    """The stored embeddings of distinct sequences, in order: (n, width), float32, in the host's memory.

    Above `budget_bytes` in a memory-mapped scratch file beside the store, which is unlinked at once, so that it
    vanishes with the process. Data workers that are spawned, not forked, get a copy.
    """
    fits = len(sequences) * width * 4 <= budget_bytes
    table = torch.empty(len(sequences), width) if fits else _mapped(len(sequences), width, store.folder)
    store.gather(sequences, out=table)
    return table


def _mapped(num_rows: int, width: int, scratch_dir: Path) -> torch.Tensor:
    scratch_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=scratch_dir, prefix="table-") as file:
        return torch.from_numpy(np.memmap(file, np.float32, "w+", shape=(num_rows, width)))


class EmbeddedDataset(Dataset):
    """Rows of embedding tables plus labels; batches are fetched whole, without a Python loop over rows.

    Args:
        positions: input name -> (n,) int64, positions in that input's table; -1 where the row lacks the input.
        tables: input name -> (distinct sequences, width), see `make_table`.
        columns: other per-row arrays for the batch, such as labels and bounds, each (n,).
        live: rows of columns that are not cached, or None.
        optional: names of inputs that rows may lack; batches then say in `missing` which rows do.
    """

    def __init__(
        self,
        positions: Mapping[str, np.ndarray],
        tables: Mapping[str, torch.Tensor],
        columns: Mapping[str, np.ndarray],
        live: Any = None,
        optional: Collection[str] = (),
    ):
        self.tables, self.optional = tables, [name for name in positions if name in optional]
        self.positions = {name: torch.from_numpy(array) for name, array in positions.items()}
        self.columns = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in columns.items()}
        self.live = live

    def __len__(self) -> int:
        return len(next(iter(self.positions.values())))

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        """One batch: `embeddings` (input name -> (n, width)), the columns, and `live` rows where there are any.

        `missing`, input name -> (n,) bool, for the inputs that rows may lack.
        """
        index = torch.tensor(indices)
        positions = {name: array[index] for name, array in self.positions.items()}
        batch: dict[str, Any] = {
            "embeddings": {name: take_rows(self.tables[name], place) for name, place in positions.items()}
        }
        batch.update({name: array[index] for name, array in self.columns.items()})
        if self.optional:
            batch["missing"] = {name: positions[name] < 0 for name in self.optional}
        if self.live is not None:
            batch["live"] = [self.live[i] for i in indices]
        return batch

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])
