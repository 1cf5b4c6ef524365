"""What a training set holds, as a few hashes that another process computes again: is it still the same data?"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from .columns import has_numbered_rows
from .random_states import kept_random_states
from .streams import parts_of

BLOCK_ROWS = 10_000  # hashed together; part of the definition of the hash
SAMPLE_ROWS = 64  # rows read of a dataset that can only be read row by row


def fingerprint(dataset: Any) -> dict[str, Any]:
    """Describes the content of `dataset`, equal in every process that reads the same data, and only there.

    Args:
        dataset: a `datasets.Dataset` (its table in the order of its rows; a transform set on it is not seen), a list or
            tuple of rows, any other dataset with rows by number (`SAMPLE_ROWS` spread over it are read, twice), a
            stream (nothing is read), a dictionary of these, or None.

    Returns:
        JSON-able: `kind` ("table", "rows", "sample", "stream", "sets" or "none"), `num_rows`, and `columns`, name ->
        hash over type, values and their order (of sets, name -> what is said of each). None stands for what cannot be
        told: values without a content of their own, rows that differ from one reading to the next. For a stream:
        `source`, its split, size and time of its local files, and the Hub's commit of others.

    Cost: a table some seconds per GB; a list about 2 microseconds per value. Random states are left as they were.
    """
    if dataset is None:
        return {"kind": "none"}
    if isinstance(dataset, datasets.Dataset):
        return {"kind": "table", "num_rows": len(dataset), "columns": _hash_table(dataset)}
    if isinstance(dataset, Mapping):
        sets = {str(name): fingerprint(one) for name, one in dataset.items()}
        return {"kind": "sets", "num_rows": sum(one.get("num_rows") or 0 for one in sets.values()), "columns": sets}
    if not has_numbered_rows(dataset):
        return _describe_stream(getattr(dataset, "stream", dataset))
    if isinstance(dataset, list | tuple):
        return {"kind": "rows", "num_rows": len(dataset), "columns": _hash_rows(enumerate(dataset))}
    with kept_random_states(dataset):
        places = np.linspace(0, len(dataset) - 1, min(SAMPLE_ROWS, len(dataset))).astype(int).tolist()
        columns, again = (_hash_rows((i, dataset[i]) for i in places) for _ in range(2))
    return {"kind": "sample", "num_rows": len(dataset), "columns": columns if columns == again else None}


def compare_fingerprints(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What two fingerprints say of each other: (what differs, what cannot be told), a line each."""
    if old["kind"] != new["kind"]:
        return [f"kind: {old['kind']} in the checkpoint, {new['kind']} now"], []
    before, now = _stated(old), _stated(new)
    differences = [
        f"{name}: {before.get(name, 'nothing')} in the checkpoint, {now.get(name, 'nothing')} now"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if old["kind"] == "stream":
        knows_files = any(name.startswith("file ") for name in before)
        return differences, [] if knows_files else ["a stream is not read to be compared"]
    were, are = old.get("columns"), new.get("columns")
    if were is None or are is None:
        return differences, ["whether the values are the same cannot be told"]
    differences += [f"column '{name}' is not there now" for name in were if name not in are]
    differences += [f"column '{name}' is new" for name in are if name not in were]
    differences += [f"column '{name}' holds other values" for name in were if were[name] != are.get(name, were[name])]
    return differences, []


def _stated(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a fingerprint says in values that people can read."""
    columns = {"columns": found.get("columns")} if found.get("kind") == "stream" else {}
    return {"rows": found.get("num_rows"), **found.get("source", {}), **columns}


def _describe_stream(stream: Any) -> dict[str, Any]:
    split = getattr(stream, "split", None)
    source = {} if split is None else {"split": str(split)}
    for name in _names_in([getattr(part, "kwargs", None) for part in parts_of(stream)]):
        source |= _describe_file(name)
    return {"kind": "stream", "num_rows": None, "columns": getattr(stream, "column_names", None), "source": source}


def _names_in(arguments: Any) -> Iterator[str]:
    """All text among the arguments of a stream's sources; names of their files are among it."""
    if isinstance(arguments, str):
        yield arguments
    elif isinstance(arguments, Mapping | list | tuple):
        for part in arguments.values() if isinstance(arguments, Mapping) else arguments:
            yield from _names_in(part)


def _describe_file(name: str) -> dict[str, str]:
    """What stands for the content of a file: size and time, or on the Hub the commit. Nothing where there is none."""
    if name.startswith("hf://") and "@" in name:
        repository, _, rest = name.partition("@")
        revision, _, path = rest.partition("/")
        return {f"file {path}": f"{revision} of {repository}"}
    path = name.rpartition("::")[2]  # of a compressed one
    if not os.path.isfile(path):
        return {}
    found = os.stat(path)
    changed = datetime.fromtimestamp(found.st_mtime_ns / 1e9, UTC)
    return {f"file {os.path.basename(path)}": f"{found.st_size:,} bytes of {changed:%Y-%m-%d %H:%M:%S.%f}"}


def _hash_table(dataset: datasets.Dataset) -> dict[str, str]:
    """Column -> hash over type and values, however the table is cut into chunks."""
    # Private: the public way to rows in another order than the table's takes 20 us for each (datasets 5.2).
    table, order = dataset.data.table, dataset._indices
    hashes = {field.name: hashlib.blake2b(str(field.type).encode(), digest_size=16) for field in table.schema}
    for start in range(0, len(dataset), BLOCK_ROWS):
        rows = None if order is None else order.column(0).slice(start, BLOCK_ROWS)
        block = table.slice(start, BLOCK_ROWS) if rows is None else table.take(rows)
        for name, column in zip(block.column_names, block.columns):
            _feed_array(hashes[name], column.combine_chunks())
    return {name: sink.hexdigest() for name, sink in hashes.items()}


def _feed_array(sink: Any, array: Any) -> None:
    """Feeds the values alone: neither how the array lies in memory nor what stands under a null."""
    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    sink.update(f"{len(array)},{array.null_count};".encode())
    if array.null_count:
        sink.update(np.packbits(array.is_null().to_numpy(zero_copy_only=False)))
        array = array.drop_null()
    kind = array.type
    if pa.types.is_struct(kind):
        for part in array.flatten():
            _feed_array(sink, part)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        _feed_array(sink, pc.list_value_length(array))
        _feed_array(sink, array.flatten())
    elif pa.types.is_primitive(kind) and not pa.types.is_time(kind):
        sink.update(array.to_numpy(zero_copy_only=False).tobytes())
    else:  # text; and bytes, decimals, dictionaries, maps
        sink.update(repr(array.to_pylist()).encode("utf-8", "surrogatepass"))


def _hash_rows(rows: Iterable[tuple[int, Any]]) -> dict[str, str] | None:
    """Column -> hash over (row number, value); None where a value has no content that could be hashed."""
    hashes: dict[str, Any] = {}
    try:
        for i, row in rows:
            for name, value in (row if isinstance(row, Mapping) else {"row": row}).items():
                sink = hashes.setdefault(str(name), hashlib.blake2b(digest_size=16))
                sink.update(f"{i}:{json.dumps(value, default=_content_of)};".encode())
    except TypeError:
        return None
    return {name: sink.hexdigest() for name, sink in hashes.items()}


def _content_of(value: Any) -> Any:
    """A value that JSON does not know as one that it does; a TypeError where its content cannot be told."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return [str(value.dtype), [*value.shape], raw.tobytes().hex()]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind != "O":
        return [value.dtype.str, [*value.shape], value.tobytes().hex()]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no content that can be compared")
