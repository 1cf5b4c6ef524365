"""What a training set holds, as a few hashes that another process computes again: is it still the same data?"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from .columns import has_numbered_rows
from .random_states import kept_random_states

BLOCK_ROWS = 1000  # hashed together; part of the definition of the hash
GATHER_BYTES = 64 * 2**20  # memory for the rows that an indices mapping brings together
SAMPLE_ROWS = 64  # rows read of a dataset that can only be read row by row
_WORDS = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}


class _Untold(Exception):
    """A value whose content cannot be told from its memory address or its class."""


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
        `source`, what it says of where it comes from, with size and time of local files and the Hub's commit of others.

    Cost: a table about 1 s per GB; a list about 2 microseconds per value. Random states are left as they were.
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
        columns = _hash_rows((i, dataset[i]) for i in places)
        again = _hash_rows((i, dataset[i]) for i in places)
    return {"kind": "sample", "num_rows": len(dataset), "columns": columns if columns == again else None}


def compare_fingerprints(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What two fingerprints say of each other: (what differs, what cannot be told), a line each."""
    if old.get("kind") != new.get("kind"):
        return [f"kind: {old.get('kind')} in the checkpoint, {new.get('kind')} now"], []
    differences = []
    if old.get("num_rows") != new.get("num_rows"):
        differences.append(f"rows: {old.get('num_rows')} in the checkpoint, {new.get('num_rows')} now")
    sources = old.get("source") or {}, new.get("source") or {}
    for name in dict.fromkeys(key for source in sources for key in source):
        then, here = (source.get(name, "nothing") for source in sources)
        differences += [] if then == here else [f"{name}: {then} in the checkpoint, {here} now"]
    before, now = old.get("columns"), new.get("columns")
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        if before is not None and now is not None:
            differences += [] if before == now else [f"columns: {before} in the checkpoint, {now} now"]
            knows_files = any(name.startswith("file ") for name in sources[0])
            return differences, [] if knows_files else ["a stream is not read to be compared"]
        return differences, ["whether the values are the same cannot be told"]
    differences += [f"column '{name}' is not there now" for name in before if name not in now]
    differences += [f"column '{name}' is new" for name in now if name not in before]
    both = [name for name in before if name in now]
    differences += [f"column '{name}' holds other values" for name in both if before[name] != now[name]]
    return differences, []


def _describe_stream(stream: Any) -> dict[str, Any]:
    info = getattr(stream, "info", None)
    names = ("builder_name", "dataset_name", "config_name", "version")
    source = {name: str(getattr(info, name)) for name in names if getattr(info, name, None) is not None}
    split = getattr(stream, "split", None)
    if split is not None:
        source["split"] = str(split)
    source |= dict(filter(None, map(_describe_file, _names_in(getattr(stream, "_ex_iterable", None)))))
    columns = getattr(stream, "column_names", None)
    return {"kind": "stream", "num_rows": None, "columns": list(columns) if columns else None, "source": source}


def _names_in(source: Any) -> Iterator[str]:
    """All text among the arguments of what a stream of `datasets` is made of; names of its files are among it."""
    if isinstance(source, str):
        yield source
    elif isinstance(source, Mapping | list | tuple):
        for part in source.values() if isinstance(source, Mapping) else source:
            yield from _names_in(part)
    else:  # private: nothing public says so (datasets 5.2)
        for name in ("ex_iterable", "ex_iterables", "kwargs"):
            yield from _names_in(getattr(source, name, ()))


def _describe_file(name: str) -> tuple[str, str] | None:
    """What stands for the content of a file: size and time, or on the Hub the commit. None where there is none."""
    if name.startswith("hf://") and "@" in name:
        repository, _, rest = name.partition("@")
        revision, _, path = rest.partition("/")
        return f"file {path}", f"{revision} of {repository}"
    path = name.rpartition("::")[2]  # of a compressed one
    if not os.path.isfile(path):
        return None
    found = os.stat(path)
    changed = datetime.fromtimestamp(found.st_mtime_ns / 1e9, UTC)
    return f"file {os.path.basename(path)}", f"{found.st_size:,} bytes of {changed:%Y-%m-%d %H:%M:%S.%f}"


def _new_hash() -> Any:
    return hashlib.blake2b(digest_size=16)


def _hash_table(dataset: datasets.Dataset) -> dict[str, str]:
    table: pa.Table = dataset.data.table
    hashes = {field.name: _new_hash() for field in table.schema}
    for field in table.schema:
        hashes[field.name].update(str(field.type).encode())
    for block in _blocks(table, dataset._indices):
        for name, column in zip(block.column_names, block.columns):
            _feed_array(hashes[name], column.combine_chunks())
    return {name: sink.hexdigest() for name, sink in hashes.items()}


def _blocks(table: pa.Table, indices: Any) -> Iterator[pa.Table]:
    """The rows in their order, `BLOCK_ROWS` at a time, however the table is cut into chunks."""
    if indices is None:
        yield from (table.slice(start, BLOCK_ROWS) for start in range(0, len(table), BLOCK_ROWS))
        return
    order = indices.column(0)
    row_bytes = max(1, table.nbytes // max(1, len(table)))
    step = max(1, GATHER_BYTES // row_bytes // BLOCK_ROWS) * BLOCK_ROWS
    for start in range(0, len(order), step):
        rows = table.take(order.slice(start, step))
        yield from (rows.slice(first, BLOCK_ROWS) for first in range(0, len(rows), BLOCK_ROWS))


def _feed_array(sink: Any, array: Any) -> None:
    """Feeds the values alone: neither how the array lies in memory nor what stands under a null."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    sink.update(f"{len(array)},{array.null_count};".encode())
    if array.null_count:
        sink.update(np.packbits(array.is_null().to_numpy(zero_copy_only=False)))
    if pa.types.is_struct(kind):
        for part in array.flatten():
            _feed_array(sink, part)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        _feed_array(sink, pc.fill_null(pc.list_value_length(array), 0))
        _feed_array(sink, array.flatten())
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        _feed_text(sink, array)
    elif pa.types.is_boolean(kind):
        sink.update(np.packbits(pc.fill_null(array, False).to_numpy(zero_copy_only=False)))
    elif pa.types.is_primitive(kind) and kind.bit_width in _WORDS:
        sink.update(np.ascontiguousarray(pc.fill_null(array.view(_WORDS[kind.bit_width]), 0).to_numpy()))
    else:  # bytes, decimals, dictionaries, maps: rare, so exact rather than fast
        sink.update(repr(array.to_pylist()).encode())


def _feed_text(sink: Any, array: Any) -> None:
    filled = pc.fill_null(array, "")
    _, places, text = filled.buffers()
    wide = pa.types.is_large_string(filled.type)
    offsets = np.frombuffer(places, np.int64 if wide else np.int32)[filled.offset : filled.offset + len(filled) + 1]
    sink.update(np.diff(offsets).astype(np.int64))
    if text is not None and len(filled):
        sink.update(memoryview(text)[offsets[0] : offsets[-1]])


def _hash_rows(rows: Iterable[tuple[int, Any]]) -> dict[str, str] | None:
    """Column -> hash over (row number, value); None where a value has no content that could be hashed."""
    hashes: dict[str, Any] = {}
    try:
        for i, row in rows:
            for name, value in (row if isinstance(row, Mapping) else {"row": row}).items():
                sink = hashes.setdefault(str(name), _new_hash())
                sink.update(f"{i}:".encode())
                _feed_value(sink, value)
    except _Untold:
        return None
    return {name: sink.hexdigest() for name, sink in hashes.items()}


def _feed_value(sink: Any, value: Any) -> None:
    if value is None or isinstance(value, bool | int | float | str | bytes):
        sink.update(f"{type(value).__name__} {value!r};".encode("utf-8", "surrogatepass"))
    elif isinstance(value, torch.Tensor) and value.layout == torch.strided:
        sink.update(f"{value.dtype} {tuple(value.shape)};".encode())
        sink.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind != "O":
        sink.update(f"{value.dtype.str} {value.shape};".encode())
        sink.update(value.tobytes())
    elif isinstance(value, Mapping):
        sink.update(f"{{{len(value)}".encode())
        for key, part in value.items():
            _feed_value(sink, key)
            _feed_value(sink, part)
    elif isinstance(value, Sequence | np.ndarray):
        sink.update(f"[{len(value)}".encode())
        for part in value:
            _feed_value(sink, part)
    else:
        raise _Untold
