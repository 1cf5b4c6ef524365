"""Files of vectors, of proteins or of their residues, as other programs of the field write and read them.

HDF5: a data set for each protein, (width,), or (residues, width), in the root, with the attribute `original_id`: as
ProtTrans by its id, or as biotrainer 1.4 by `hash_sequence`. `.npz`: an array for each, by the same names. Parquet: a
column of names, and one of lists.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import Dataset

from ..data import SOURCE_ROW, format_errors
from ..errors import ArgumentError, DataError
from ..labels import Array, RowError, shorten
from ..optional import require

Row = tuple[str, str, Array]  # name, id as it was read, vector
NAMES = ("id", "sequence_hash", "sequence")  # columns of a Parquet file that name its rows, the first that is there
EMBEDDING = "embedding"  # its column of lists
ORIGINAL = "original_id"
BLOCK_ROWS = 256  # of a Parquet file, written at once
CLOSE = 1e-3  # two vectors of one sequence, of which one was rounded to float16
REMEDY = "Name the file's ids by --id_column, embed this sequence, too, or leave the row out."


def hash_sequence(sequence: str) -> str:
    """Hashes a sequence as biotrainer 1.4 does, whose files are by it."""
    return hashlib.sha256(f"{sequence}_{len(sequence)}".encode()).hexdigest()


def file_name(identity: str) -> str:
    """Makes an id a name in a file: HDF5 would take a slash for a folder, and dots alone for one that is there."""
    name = identity.replace("/", "_")
    return name if name.strip(".") else name.replace(".", "_")


# --- reading --------------------------------------------------------------------------------------------------------


def _open_hdf5(path: Path, mode: str = "r") -> Any:
    return require("h5py", "h5", path.name).File(path, mode)


def _read_parquet(path: Path) -> dict[str, Array]:
    frame = pd.read_parquet(path)  # a cell of lists is an array of arrays
    names = next((name for name in NAMES if name in frame), frame.columns[0])
    if (twice := frame[names].duplicated()).any():
        raise ValueError(f"{frame[names][twice].iloc[0]!r} stands there more than once")
    cells = (np.stack(cell) if cell.dtype == object else cell for cell in frame[EMBEDDING])
    return dict(zip(map(str, frame[names]), cells))


READERS: dict[str, Callable[[Path], Mapping[str, Any]]] = {
    ".h5": _open_hdf5,
    ".hdf5": _open_hdf5,
    ".npz": np.load,
    ".parquet": _read_parquet,
}


class VectorFile:
    """Vectors that stand in an encoder's place, looked up by sequence once `bind` has found them for rows.

    Attributes:
        path: of the file. width: of its vectors.

    Raises:
        ArgumentError: not a format that is read.
        DataError: it is not there, damaged, or holds no vectors.
        MissingDependencyError: HDF5 without h5py.

    Cost: opening lists names; a Parquet file is read into memory.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path).expanduser()
        reader = READERS.get(self.path.suffix.lower())
        if reader is None:
            raise ArgumentError(f"--embeddings {path}: files that are read end in {', '.join(READERS)}.")
        try:
            self._arrays = reader(self.path)
            self.width = int(self._arrays[next(iter(self._arrays))].shape[-1])
        except (OSError, ValueError, LookupError, AttributeError, StopIteration, zipfile.BadZipFile) as error:
            columns = f"Of Parquet, columns id and {EMBEDDING} are read."
            raise DataError(f"--embeddings {path}: no vectors can be read from it ({error!r}). {columns}") from error
        self._known = {*self._arrays}
        self._names: dict[str, str] = {}  # sequence -> name
        self._sequences: dict[str, str] = {}  # the other way round

    def __deepcopy__(self, memo: object) -> VectorFile:
        """Returns itself: an open file has no copy."""
        return self

    @cached_property
    def fingerprint(self) -> str:
        """What tells the bound vectors from any others. Cost: reads the file, about 1 s per GB."""
        with self.path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256")
        for pair in sorted(self._names.items()):
            found.update("\0".join(pair).encode())
        return f"sha256:{found.hexdigest()}"

    @cached_property
    def _originals(self) -> dict[str, str]:
        """Names by the id that each had where an HDF5 file was made. Cost: 50 us each."""
        found = ((getattr(self._arrays[name], "attrs", {}).get(ORIGINAL), name) for name in self._known)
        return {str(identity): name for identity, name in found if identity is not None}

    def bind(
        self,
        splits: Mapping[str, Dataset],
        columns: Sequence[str],
        id_column: str | None,
        rank: int,
        source: str = "rows",
    ) -> None:
        """Finds the vector of each row: by its sequence, or, of one sequence column, by its id.

        Args:
            splits: map-style; cells of `columns` may be "", which needs no vector.
            rank: 1 for a vector of each sequence, 2 for one of each residue.
            source: where rows are from, for messages.

        Raises:
            DataError: rows without a vector, or with one of another shape, of other numbers of residues, that is NaN
                or infinite, or not that of the same sequence in another row; all are listed.

        Cost: reads the vectors once.
        """
        errors = []
        for rows in splits.values():
            identities = rows[id_column][:] if id_column and len(columns) == 1 else repeat("")
            for column in columns:
                for number, identity, sequence in zip(rows[SOURCE_ROW][:], identities, rows[column][:]):
                    if rule := sequence and self._bind(sequence, identity or "", rank):
                        errors.append(RowError(number, column, shorten(identity or sequence), rule, REMEDY))
        if errors:
            raise DataError(f"--embeddings {self.path}: {format_errors([(source, error) for error in errors])}")

    def _bind(self, sequence: str, identity: str, rank: int) -> str:
        """Finds the vector of a row; returns why it has none, else ""."""
        named = [self._originals.get(identity)] if self._originals else [identity, file_name(identity)]
        # The hash first: it names the sequence, and an id that is in the file, too, may be that of another one there.
        names = (hash_sequence(sequence), *(named if identity else ()), sequence)
        name = next((name for name in names if name in self._known), None)
        if name is None:
            return "the file has no vector for it, by id or sequence"
        if self._sequences.setdefault(name, sequence) != sequence:
            return "its vector is that of another sequence in these rows: the id stands for both"
        vector = self._read(name)
        shape = (len(sequence), self.width)[2 - rank :]
        if vector.shape != shape:
            return f"its shape is {vector.shape}, and {shape} is needed"
        if not np.isfinite(vector).all():
            return "the vector is NaN or infinite"
        before = self._names.setdefault(sequence, name)
        if before != name and not np.allclose(vector, self._read(before), CLOSE, CLOSE):
            return "the vector differs from that of another row with this sequence"
        return ""

    def read(self, sequences: Sequence[str]) -> Any:
        """Reads vectors of sequences that were bound, float32: (n, width), or a list of n, (residues, width)."""
        vectors = [torch.from_numpy(self._read(self._names[sequence])) for sequence in sequences]
        return torch.stack(vectors) if vectors[0].dim() == 1 else vectors

    def _read(self, name: str) -> Array:
        try:
            return np.array(self._arrays[name], np.float32)
        except (ValueError, TypeError):  # no array of numbers, which has no shape that is needed
            return np.empty(0, np.float32)


# --- writing --------------------------------------------------------------------------------------------------------


def write_hdf5(path: Path, rows: Iterable[Row]) -> None:
    """Writes a data set for each row."""
    with _open_hdf5(path, "w") as file:
        for name, identity, vector in rows:
            file.create_dataset(name, data=vector).attrs[ORIGINAL] = identity


def write_npz(path: Path, rows: Iterable[Row]) -> None:
    """Writes an array for each row, one after the other, which `numpy.savez` would hold in memory together."""
    with zipfile.ZipFile(path, "w") as file:
        for name, _, vector in rows:
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, vector)


def write_parquet(path: Path, rows: Iterable[Row]) -> None:
    """Writes columns of names, ids and lists."""
    left = iter(rows)
    writer = None
    while block := [*islice(left, BLOCK_ROWS)]:
        names, identities, vectors = map(list, zip(*block))
        cells = [[*vector] if vector.ndim > 1 else vector for vector in vectors]
        table = pa.table({NAMES[0]: names, ORIGINAL: identities, EMBEDDING: cells})
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


WRITERS = {".h5": write_hdf5, ".hdf5": write_hdf5, ".npz": write_npz, ".parquet": write_parquet}
