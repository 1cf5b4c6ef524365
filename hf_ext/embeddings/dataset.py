"""Cached embeddings behind numbers: rows of tables and states of residues for a head, of antigens for a generator."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..data import read_columns
from ..errors import DataError
from ..labels import Array, LabelKind
from .store import EmbeddingStore

Batch = dict[str, Any]  # as a model takes it


def join_parts(parts: Sequence[str]) -> str:
    """Joins the parts of an encoder input to one cache entry: `HEAVY|LIGHT`."""
    return "|".join(parts)


def factorize(rows: Sequence[tuple[str, ...]], is_optional: bool) -> tuple[Array, list[tuple[str, ...]]]:
    """Finds distinct inputs in the order in which they first occur, and which of them each row has: (n,) int64.

    Where the input is optional, rows without any residue of it have -1.
    """
    index: dict[tuple[str, ...], int] = {}
    numbers = (index.setdefault(row, len(index)) if not is_optional or any(row) else -1 for row in rows)
    return np.fromiter(numbers, np.int64, len(rows)), list(index)


def find_inputs(rows: Any, collator: Any, name: str) -> tuple[Array, list[str]]:
    """Finds which input `name` each row has, as `factorize` does, and the distinct ones, their parts joined."""
    columns = read_columns(rows, collator.columns[name])
    positions, distinct = factorize(columns, name in getattr(collator, "optional_inputs", ()))
    return positions, [*map(join_parts, distinct)]


def take_rows(values: Tensor, positions: Tensor) -> Tensor:
    """Takes rows of `values`, (inputs, width), at `positions` (n,): (n, width); at -1 numbers that must not be read."""
    if not len(values):  # all rows lack the input
        return values.new_zeros(len(positions), values.shape[1])
    return values.index_select(0, positions.clamp(min=0))


def make_table(store: EmbeddingStore, sequences: Sequence[str], width: int, budget_bytes: int) -> Tensor:
    """Makes a table of the stored embeddings of distinct sequences, in order: (n, width), float32, on the host.

    Above `budget_bytes` in a memory-mapped scratch file beside the store, which is unlinked at once, so that it
    vanishes with the process. Data workers that are spawned, not forked, get a copy.
    """
    if len(sequences) * width * 4 <= budget_bytes:
        table = torch.empty(len(sequences), width)
    else:
        with tempfile.NamedTemporaryFile(dir=store.folder, prefix="table-") as file:
            table = torch.from_numpy(np.memmap(file, np.float32, "w+", shape=(len(sequences), width)))
    return store.gather(sequences, out=table)


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
        positions: Mapping[str, Array],
        tables: Mapping[str, Tensor],
        columns: Mapping[str, Array],
        live: Any = None,
        optional: Collection[str] = (),
    ):
        self.tables = tables
        self.optional = [name for name in positions if name in optional]
        self.positions = {name: torch.from_numpy(array) for name, array in positions.items()}
        self.columns = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in columns.items()}
        self.live = live

    def __len__(self) -> int:
        return len(next(iter(self.positions.values())))

    def __getitems__(self, indices: list[int]) -> Batch:
        """One batch: `embeddings` (input name -> (n, width)), the columns, and `live` rows where there are any.

        `missing`, input name -> (n,) bool, for the inputs that rows may lack.
        """
        index = torch.tensor(indices)
        positions = {name: array[index] for name, array in self.positions.items()}
        batch: Batch = {"embeddings": {name: take_rows(self.tables[name], place) for name, place in positions.items()}}
        batch.update({name: array[index] for name, array in self.columns.items()})
        if self.optional:
            batch["missing"] = {name: positions[name] < 0 for name in self.optional}
        if self.live is not None:
            batch["live"] = [self.live[i] for i in indices]
        return batch

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])


@dataclass(eq=False)
class EmbeddedResidues(Dataset):
    """Rows of stored residue states plus labels; each batch is read from the store, which stays on the disk.

    Args:
        name: of the model's input.
        store: holds the states of all `sequences`, (residues, width) each.
        sequences: of each row.
        kind: of the labels; `labels`: of each row, None without.
    """

    name: str
    store: EmbeddingStore
    sequences: Sequence[str]
    kind: LabelKind
    labels: Sequence[Any] | None

    live = None  # no row has columns that are encoded as it comes

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitems__(self, indices: list[int]) -> Batch:
        """One batch: `embeddings` (input name -> (residues of all rows, width)), `missing` and `labels`, (n, longest).

        `missing`, input name -> bool, is true behind a row's end. Labels are cut as the sequences were.
        """
        states = self.store.gather_states([self.sequences[i] for i in indices])
        lengths = torch.tensor([*map(len, states)])
        longest = int(lengths.max())
        batch: Batch = {"embeddings": {self.name: torch.cat(states)}}
        batch["missing"] = {self.name: torch.arange(longest) >= lengths[:, None]}
        if self.labels is not None:
            batch["labels"] = self.kind.stack([self.labels[i] for i in indices], longest)
        return batch

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])


class StateTable:
    """`states_of` of an `AntibodyCollator`: token ids of antigens to their stored states, which each batch reads.

    Args:
        store: holds the states of all `sequences`.
        sequences: distinct antigens.
        ids: the token ids of each, as rows carry them.

    Raises:
        KeyError: the first sequence is not stored; of others, a batch says so.
        DataError: its stored states have another number of tokens than its ids.
    """

    def __init__(self, store: EmbeddingStore, sequences: Sequence[str], ids: Sequence[Array]):
        self.store = store
        self._sequences = {_key(row): sequence for row, sequence in zip(ids, sequences, strict=True)}
        for row, states in zip(ids[:1], store.gather_states(sequences[:1])):
            if len(states) != len(row):
                raise DataError(f"{store.folder}: {len(states)} states of an antigen that has {len(row)} tokens.")

    def __call__(self, antigens: Sequence[Array]) -> list[Tensor]:
        """States of each antigen, (tokens, width), float32.

        Raises:
            DataError: the table does not have it.
        """
        if lacking := [ids for ids in antigens if _key(ids) not in self._sequences]:
            raise DataError(f"No states of {len(lacking)} antigens of a batch, the first of {len(lacking[0])} tokens.")
        return self.store.gather_states([self._sequences[_key(ids)] for ids in antigens])


def _key(ids: Array) -> bytes:
    return np.asarray(ids, np.int64).tobytes()
