"""Looking at data without moving what training draws from: what a set holds, as a few hashes that another process
computes again, and the random states of the process kept."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from datasets.fingerprint import Hasher

from .batches.streams import parts_of
from .columns import has_numbered_rows
from .reading import SOURCE_ROW

BLOCK_ROWS = 10_000  # hashed together; part of the definition of the hash
SAMPLE_ROWS = 64  # rows read of a dataset that can only be read row by row


def fingerprint(dataset: Any) -> dict[str, Any]:
    """Describes the content of `dataset`, equal in every process that reads the same data, and only there.

    Args:
        dataset: a `datasets.Dataset` (its table in the order of its rows; a transform set on it is not seen), any other
            dataset with rows by number (`SAMPLE_ROWS` from first to last are read, twice), a stream (nothing is
            read), a dictionary of these, or None.

    Returns:
        JSON-able: `num_rows`, and `content`: column -> hash over type, values and their order (of a dictionary, name ->
        hash of a dataset); None where rows differ from one reading to the next. Of a stream the names of its columns
        and files, which on the Hub hold the commit.

    Cost: a table some seconds per GB. Random states are left as they were.
    """
    if isinstance(dataset, Mapping):
        found = {str(name): Hasher.hash(fingerprint(one)) for name, one in dataset.items()}
        return {"num_rows": None, "content": found}
    if isinstance(dataset, datasets.Dataset):
        return {"num_rows": len(dataset), "content": _hash_table(dataset)}
    if dataset is None or not has_numbered_rows(dataset):
        stream = getattr(dataset, "stream", dataset)
        files = [*_names_in([getattr(part, "kwargs", None) for part in parts_of(stream)])]
        columns = getattr(stream, "column_names", None) or []
        return {"num_rows": None, "content": {"columns": columns, "files": files}}
    with kept_random_states():
        num = min(SAMPLE_ROWS, len(dataset))
        places = np.linspace(0, len(dataset) - 1, num).astype(int).tolist()
        found = _hash_rows([dataset[i] for i in places])
        again = _hash_rows([dataset[i] for i in places])
    content = {name: one if one == again.get(name) else None for name, one in found.items()}
    return {"num_rows": len(dataset), "content": content}


def compare_fingerprints(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Compares two fingerprints: (what differs, what cannot be told), a line each.

    Where rows stand in their file (`source_row`) is no content.
    """
    differences = []
    untold = []
    if old["num_rows"] != new["num_rows"]:
        differences.append(f"rows: {old['num_rows']} in the checkpoint, {new['num_rows']} now")
    were = old["content"]
    are = new["content"]
    for name in {**were, **are}:
        if name == SOURCE_ROW:
            continue
        if name not in are or name not in were:
            differences.append(f"column '{name}' is {'new' if name in are else 'not there now'}")
        elif None in (were[name], are[name]):
            untold.append(f"whether the values of column '{name}' are the same cannot be told")
        elif isinstance(were[name], list) and were[name] != are[name]:
            differences.append(f"{name}: {were[name]} in the checkpoint, {are[name]} now")
        elif were[name] != are[name]:
            differences.append(f"column '{name}' holds other values")
    return differences, untold


def _names_in(arguments: Any) -> Iterator[str]:
    """Yields all text among the arguments of a stream's sources, of which names of local files lose their folders."""
    if isinstance(arguments, str):
        yield arguments if "://" in arguments else os.path.basename(arguments)
    elif isinstance(arguments, Mapping | list | tuple):
        for part in arguments.values() if isinstance(arguments, Mapping) else arguments:
            yield from _names_in(part)


def _hash_rows(rows: list[Any]) -> dict[str, str]:
    tables = [row if isinstance(row, Mapping) else {"row": row} for row in rows]
    names = dict.fromkeys(name for row in tables for name in row)
    return {str(name): Hasher.hash([row.get(name) for row in tables]) for name in names}


def _hash_table(dataset: datasets.Dataset) -> dict[str, str]:
    """Hashes type and values of each column, however the table is cut into chunks."""
    # Private: the public way to rows in another order than the table's takes 20 us for each (datasets 5.2).
    table = dataset.data.table
    order = dataset._indices
    hashes = {field.name: hashlib.blake2b(str(field.type).encode(), digest_size=16) for field in table.schema}
    for start in range(0, len(dataset), BLOCK_ROWS):
        rows = None if order is None else order.column(0).slice(start, BLOCK_ROWS)
        block = table.slice(start, BLOCK_ROWS) if rows is None else table.take(rows)
        for name, column in zip(block.column_names, block.columns):
            array = column.combine_chunks()
            if pa.types.is_dictionary(array.type):
                array = array.dictionary_decode()
            hashes[name].update(pa.record_batch([array], names=[""]).serialize())
    return {name: sink.hexdigest() for name, sink in hashes.items()}


def capture_random_states() -> Callable[[], None]:
    """Returns what restores the random states of now: Python's, NumPy's, torch's, and those of GPUs in use."""
    python = random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002  the generator that libraries draw from
    host = torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(host)
        torch.cuda.set_rng_state_all(gpus)

    return restore


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restores the random states of the process at the end."""
    restore = capture_random_states()
    try:
        yield
    finally:
        restore()
