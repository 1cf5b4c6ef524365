"""Where rows come from: a file, several of one pattern, a folder of splits, a saved `datasets` folder, or the Hub."""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetNotFoundError, DatasetsError

from ..errors import DataError
from ..labels import as_text
from .columns import as_dataset, check_columns
from .formats import DELIMITERS, FASTA_SUFFIXES, SUFFIXES, file_format, iter_tables
from .splits import SPLITS, canonical_split

SOURCE_ROW = "source_row"
FASTA_HINT = " A column of a FASTA file is a KEY=value in its headers, as in '>P1 label=7.3'."

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?").fullmatch
_SAVED = ("dataset_dict.json", "state.json")  # what `save_to_disk` leaves

Files = dict[str | None, list[Path]]  # split, None where nothing says which -> its files


@dataclass(frozen=True)
class Part:
    """One table of a source: its name for messages, its rows (with `source_row`), and its split where it has one."""

    path: str
    data: Dataset | IterableDataset
    split: str | None = None


def read_parts(
    name: str,
    columns: Collection[str] | None = None,
    *,
    config_name: str | None = None,
    revision: str | None = None,
    streaming: bool = False,
) -> list[Part]:
    """Reads a source as its tables, each of which has a column `source_row` with each row's 1-based place in its file.

    CSV, TSV and FASTA columns are text exactly as written: nothing is read as missing. JSON and Parquet keep
    numbers as numbers; a column that mixes types becomes text. `source_row` is the line as an editor shows it (header
    = 1, a record over several lines counts by its first); for Parquet, a JSON list, a saved folder and the Hub it
    counts records from 1. Through several files of one table it counts on, as if they stood in one.

    Args:
        name: a Hub id (`owner/name`); a local .csv, .tsv, .jsonl, .json (a list), .fasta/.fa/.faa (each also .gz) or
            .parquet; a pattern (`rows/*.parquet`) of such files; a folder with files named train, validation (valid,
            val, dev) and test, each whole or in shards (`train-00000-of-00002.parquet`), there or in its folder `data`;
            or a folder written by `save_to_disk`. FASTA headers `>id pKd=7.3 group=a` give the columns id, sequence,
            pKd, group.
        columns: those that must be there, and no others; None for all that are.
        config_name, revision: of a Hub dataset.
        streaming: read while iterating instead of now.

    Returns:
        One `Part` per table, or split of it: a `Dataset` in memory (about the file's size), or an `IterableDataset`.

    Raises:
        DataError: not found (nearest names given), not a regular file, unknown format or another than the name says,
            empty, header only, missing or duplicated column, ragged row, wrong separator, a cell above 131,072
            characters, damaged gzip or Parquet, not UTF-8, invalid JSON, a split in two files that are no shards. A
            stream raises what lies behind its first rows while iterating.

    Cost: 1 s for 131,072 rows of 430 residues.
    """
    if files := _find_files(name):
        return [_read_files(paths, columns, streaming, split) for split, paths in files.items()]
    path = Path(name).expanduser()
    if not path.is_dir() and not is_on_hub(name):
        raise DataError(_not_found(path))
    loaded = _load(name, config_name, revision, streaming)
    known = {key: canonical_split(key) for key in loaded}
    is_clear = None not in known.values() and len(set(known.values())) == len(known)
    if len(loaded) > 1 and not is_clear:
        raise DataError(f"{name} has the splits {', '.join(loaded)}; only train, validation and test are known.")
    return [
        Part(f"{name} ({key})", _number_rows(data, columns, name), known[key] if len(loaded) > 1 else None)
        for key, data in loaded.items()
    ]


def is_on_hub(name: str) -> bool:
    """Returns whether `name` reads as a Hub dataset: no path that is there, no pattern, no file of a known format."""
    path = Path(name).expanduser()
    return not path.exists() and not file_format(path) and _HUB_ID(name) is not None


def local_files(name: str | None) -> list[Path]:
    """Returns the files on this machine that `read_parts` would read; none of a Hub dataset, or of what is not there.

    Raises:
        DataError: as `read_parts` of a path that cannot be looked up, or of a folder.
    """
    if name is None:
        return []
    paths = [path for paths in _find_files(name).values() for path in paths]
    return paths or sorted(Path(name).expanduser().rglob("*.arrow"))


def peek_columns(name: str | None) -> dict[Path, list[str]]:
    """Reads the columns of each file that `read_parts` would read here; of JSON Lines and FASTA the first records'.

    Raises:
        DataError: as `read_parts`, of the first rows.
    """
    found = {}
    for path in local_files(name):
        if file_format(path) == ".parquet":
            next(iter_tables(path, ()), None)  # raises where it is damaged; columns of embeddings take long to read
            found[path] = pq.read_schema(path).names
        elif file_format(path):
            found[path] = next((table.column_names for _, table in iter_tables(path)), [])
    return found


def _find_files(name: str) -> Files:
    """Finds the files that `name` means; nothing where it is none, or a folder of `save_to_disk`."""
    path = Path(name).expanduser()
    if path.is_dir():
        if any((path / saved).exists() for saved in _SAVED):
            return {}
        for folder in (path, path / "data"):
            if "train" in (files := _by_split(folder.glob("*"))):
                return {split: files[split] for split in SPLITS if split in files}
        found = ", ".join(sorted(entry.name for entry in path.iterdir())[:20]) or "nothing"
        raise DataError(f"{path}: no train file (train.csv, train.parquet, ...) in this folder. It holds: {found}.")
    if path.exists():
        return {None: [path]}
    matches = sorted(map(Path, glob.glob(str(path))))
    files = _by_split(matches)
    if "train" in files and None not in files:
        return {split: files[split] for split in SPLITS if split in files}
    return {None: matches} if matches else {}


def _by_split(paths: Iterable[Path]) -> Files:
    """Groups files by the split that their names say, of which shards (`train-00000-of-00002`) may be several."""
    files: Files = {}
    for path in sorted(path for path in paths if path.is_file() and file_format(path)):
        first, *_ = re.split("[.-]", path.name)
        files.setdefault(canonical_split(first), []).append(path)
    for split, found in files.items():
        if split and len(found) > 1 and not all("-of-" in path.name for path in found):
            names = " and ".join(path.name for path in found)
            raise DataError(f"{found[0].parent}: {names} are the same split; keep one.")
    return files


def _not_found(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"{path}: file not found, and there is no folder {folder}."
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() or file_format(entry))
    near = get_close_matches(path.name, names, n=3, cutoff=0.4) or names[:10]
    return f"{path}: file not found. There are: {', '.join(near) or 'no tables'}."


def _read_files(paths: list[Path], columns: Collection[str] | None, streaming: bool, split: str | None) -> Part:
    if unknown := [path for path in paths if not file_format(path)]:
        raise DataError(f"{unknown[0]}: unknown format. Use {', '.join(SUFFIXES)}; all but .parquet also with .gz.")
    label = str(paths[0])
    if len(paths) > 1:
        label += f" to {paths[-1].name} ({len(paths)} files, rows counted on)"
    numbered = _iter_numbered(paths, columns)
    table = next(numbered, None)
    if table is None:
        what = "only a header, no rows" if file_format(paths[0]) in DELIMITERS else "no records"
        raise DataError(f"{label}: the file has {what}. Add at least one row.")
    if not streaming:
        table = _join([table, *numbered])
    if not set(columns or ()) <= set(table.column_names):  # only JSON and FASTA records can differ
        hint = FASTA_HINT if file_format(paths[0]) in FASTA_SUFFIXES else ""
        check_columns(peek_columns(str(paths[0]))[paths[0]], columns or (), label, hint)
    if not streaming:
        return Part(label, as_dataset(table), split)
    # Tuples: a list in gen_kwargs would be taken for shards.
    kept = tuple(name for name in table.column_names if name != SOURCE_ROW)
    given = {"paths": tuple(map(str, paths)), "columns": kept}
    return Part(label, IterableDataset.from_generator(_generate, gen_kwargs=given), split)


def _iter_numbered(paths: Sequence[Path], columns: Collection[str] | None) -> Iterator[pa.Table]:
    """Yields tables of one file after the other, with `source_row` in place of their own; rows are counted on."""
    before = last = 0
    for path in paths:
        for rows, table in iter_tables(path, columns):
            last = before + int(rows[-1])
            columns = {name: table.column(name) for name in table.column_names if name != SOURCE_ROW}
            yield pa.table({**columns, SOURCE_ROW: before + rows})
        before = last


def _join(tables: Sequence[pa.Table]) -> pa.Table:
    """Joins tables; where a column is numbers here and text there, all columns become text."""
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        texts = []
        for table in tables:
            columns = {name: as_text(table[name]) for name in table.column_names if name != SOURCE_ROW}
            texts.append(pa.table({**columns, SOURCE_ROW: table[SOURCE_ROW]}))
        return pa.concat_tables(texts, promote_options="default")


def _generate(paths: Sequence[str], columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    for table in _iter_numbered([*map(Path, paths)], columns):
        for record in table.to_pylist():
            yield {name: record.get(name) for name in (*columns, SOURCE_ROW)}


def _load(name: str, config_name: str | None, revision: str | None, streaming: bool) -> Any:
    """Loads the splits of a Hub dataset, or of a folder of `save_to_disk`."""
    try:
        if is_on_hub(name):
            return load_dataset(name, config_name, revision=revision, streaming=streaming)
        loaded = load_from_disk(str(Path(name).expanduser()))
        splits = loaded if isinstance(loaded, DatasetDict) else DatasetDict({"train": loaded})
        return {key: data.to_iterable_dataset() if streaming else data for key, data in splits.items()}
    except DatasetNotFoundError as error:
        raise DataError(f"{name!r} is neither a Hub dataset nor a file here. {_not_found(Path(name))}") from error
    except (OSError, ValueError, KeyError, pa.ArrowException, DatasetsError) as error:
        kind = "Hub dataset" if is_on_hub(name) else "folder of save_to_disk"
        raise DataError(f"{kind} {name!r} could not be loaded: {error}") from error


def _number_rows(data: Any, columns: Collection[str] | None, label: str) -> Dataset | IterableDataset:
    names = [key for key in (data.column_names or []) if key != SOURCE_ROW]
    if names:
        check_columns(names, columns or (), label)
        data = data.select_columns([key for key in names if columns is None or key in columns])
    if isinstance(data, IterableDataset):
        if numbered := [key for key, feature in (data.features or {}).items() if isinstance(feature, ClassLabel)]:
            raise DataError(
                f"{label}: column {numbered[0]!r} numbers classes, which a stream cannot name. Drop --streaming."
            )
        return data.map(_add_row_number, with_indices=True)
    if not len(data):
        raise DataError(f"{label} has no rows.")
    return data.add_column(SOURCE_ROW, pa.array(range(1, len(data) + 1), type=pa.int64()))


def _add_row_number(row: dict[str, Any], index: int) -> dict[str, Any]:
    return {SOURCE_ROW: index + 1}
