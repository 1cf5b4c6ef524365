"""A JSON list of objects: read whole, each object as it is written or refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError
from .jsonl import RepeatedNameError, make_decoder, refuse_half_characters
from .lines import Lines
from .names import show_name

MAX_LIST_BYTES = 4 * 2**30  # often one line; beyond, one object a line is the format to have


def iter_json_list(path: Path, columns: Collection[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (row, record) of every object in the list, counted from 1; of `columns` those that the record has.

    Raises:
        DataError: see `sources.read_parts`; also what is no list of objects.

    Cost: memory of about five times the file: JSON Lines are read line by line.
    """
    for row, record in enumerate(_read_list(path), 1):
        where = f"{path}, record {row}"
        if not isinstance(record, dict):
            raise DataError(f'{where}: a JSON object such as {{"sequence": "MKT"}} is needed in each place.')
        kept = record if columns is None else {name: record[name] for name in columns if name in record}
        refuse_half_characters(kept, where)
        yield row, kept


def _read_list(path: Path) -> list[Any]:
    text = "".join(Lines(path, MAX_LIST_BYTES))
    try:
        found = make_decoder().decode(text)
    except RepeatedNameError as error:
        raise DataError(f"{path}: column '{show_name(str(error))}' occurs more than once in a record.") from error
    except json.JSONDecodeError as error:
        hint = " One object a line is JSON Lines: name the file .jsonl." if error.msg == "Extra data" else ""
        raise DataError(
            f"{path}, line {error.lineno}: not valid JSON ({error.msg} at character {error.colno}).{hint}"
        ) from error
    except (ValueError, RecursionError) as error:  # an endless number, or endless nesting
        raise DataError(f"{path}: the JSON cannot be read ({error}).") from error
    if not isinstance(found, list):
        raise DataError(
            f"{path}: holds a {type(found).__name__}; a list of objects is needed, or one a line in a .jsonl file."
        )
    return found
