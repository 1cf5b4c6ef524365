"""JSON Lines: one object a line, read as it is written or refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError
from .lines import Lines
from .names import show_name
from .numbers import parse_number

_HALF_CHARACTER = re.compile("[\ud800-\udfff]").search


def iter_jsonl(path: Path, columns: Collection[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (row, record) of every line that is not blank; of `columns` those that the record has.

    A number nearer to 0 than float64 can hold stays text, as it is written.

    Raises:
        DataError: see `sources.read_parts`.
    """
    decoder = make_decoder()
    lines = Lines(path)
    for line in lines:
        lines.begin_record()
        if not line.strip():
            continue
        where = f"{path}, row {lines.number}"
        try:
            record = decoder.decode(line.strip())
        except RepeatedNameError as error:
            raise DataError(f"{where}: column '{error}' occurs more than once. Remove one of them.") from error
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not valid JSON ({error.msg} at character {error.colno}).") from error
        except (ValueError, RecursionError) as error:  # an endless number, or endless nesting
            raise DataError(f"{where}: the JSON cannot be read ({error}).") from error
        if not isinstance(record, dict):
            raise DataError(f'{where}: a JSON object such as {{"sequence": "MKT"}} is needed on each line.')
        kept = record if columns is None else {name: record[name] for name in columns if name in record}
        refuse_half_characters(kept, where)
        yield lines.number, kept


class RepeatedNameError(Exception):
    """A name that an object has twice; Python keeps the last value without a word."""


def make_decoder() -> json.JSONDecoder:
    """Refuses a name that an object has twice (`RepeatedNameError`); keeps numbers that float64 cannot hold as text."""
    return json.JSONDecoder(object_pairs_hook=_unique, parse_float=_parse_float)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise RepeatedNameError(show_name(next(name for name, num in Counter(n for n, _ in pairs).items() if num > 1)))
    return record


def _parse_float(text: str) -> float | str:
    value = parse_number(text)
    return text if value is None else value


def refuse_half_characters(record: dict[str, Any], where: str) -> None:
    """Raises DataError: escapes can spell half of a character (a lone surrogate), which no table or file can hold."""
    for name, value in record.items():
        for text in (name, value):
            if isinstance(text, str) and not text.isascii() and _HALF_CHARACTER(text):
                raise DataError(
                    f"{where}, column '{show_name(name)}', value '{show_name(text)}': holds half of a character (a "
                    f"lone surrogate). Write the whole character, or leave it out."
                )
