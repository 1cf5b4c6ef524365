"""Where sampled antibodies go: a ranked CSV and the same as FASTA, checked before a model is loaded, written whole."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..affinity.prediction_file import find_output
from ..data.reading import SOURCE_ROW
from ..errors import ArgumentError
from ..files import replacing, try_replacing, write_cell
from .candidates import COLUMNS, OPTIONAL

ADDED = (SOURCE_ROW, *COLUMNS, *OPTIONAL)  # what is written beside the input's own columns
FASTA = ".fasta"
_WRITER = "sample.py"
_OWN_RECORD = re.compile(r">\S+_\d+_(heavy|light) log_probability=\S+ copies=\d+ valid=(yes|no)\b")


def find_outputs(name: str, dataset_name: str | None) -> tuple[Path, Path]:
    """The CSV and, under the same name, the FASTA to write, found fit for that; their folder is made.

    Raises:
        ArgumentError: as `find_output`; or the FASTA's name is the CSV's, or is taken by a file of somebody else.
        DataError, FolderError: as `find_output`.
    """
    table = find_output(name, dataset_name, _is_of_samples, _WRITER)
    fasta = table.with_suffix(FASTA)
    remedy = "Name another CSV to write with --output; the FASTA beside it has its name."
    if fasta == table:
        raise ArgumentError(f"--output {name!r} ends in {FASTA}, which is what the FASTA beside it is called. {remedy}")
    try:
        is_own = not fasta.exists() or _is_own_fasta(fasta)
        try_replacing(fasta)
    except OSError as error:
        raise ArgumentError(f"{fasta} cannot be written: {error.strerror}. {remedy}") from error
    if not is_own:
        raise ArgumentError(f"{fasta} is there and was not written by {_WRITER}. {remedy}")
    return table, fasta


def _is_of_samples(header: list[str]) -> bool:
    start = [SOURCE_ROW, *COLUMNS]
    return any(header[i : i + len(start)] == start for i in range(len(header)))


def _is_own_fasta(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline(1 << 16)
    return not first or bool(_OWN_RECORD.match(first))


def name_antigens(ids: Sequence[str | None] | None, source_rows: Sequence[int]) -> list[str]:
    """A name of one word for each antigen: its id, with its row where ids are missing or repeat."""
    if ids is None:
        return [f"row{row}" for row in source_rows]
    words = ["_".join(str(one or "").split()) for one in ids]
    return [
        word if word and words.count(word) == 1 else f"{word}_row{row}".lstrip("_")
        for word, row in zip(words, source_rows)
    ]


def write_table(
    path: Path, kept: Mapping[str, Sequence[Any]], requests: Sequence[int], table: Mapping[str, Any]
) -> None:
    """One line per candidate: the columns of its antigen, then those of `tabulate`; as `write_predictions` for text.

    Args:
        kept: columns of the input, one cell per antigen, `source_row` the last.
        requests: antigen of each line.
    """
    columns = [[write_cell(cells[one]) for one in requests] for cells in kept.values()]
    columns += [[write_cell(cell) for cell in cells] for cells in table.values()]
    with replacing(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([write_cell(name) for name in (*kept, *table)])
        writer.writerows(zip(*columns))


def write_fasta(path: Path, names: Sequence[str], requests: Sequence[int], table: Mapping[str, Any]) -> int:
    """Two records per candidate, `NAME_RANK_heavy` and `NAME_RANK_light`, with what is wrong in their titles.

    Chains without a residue have no record; candidates that have neither are in the CSV alone.

    Args:
        names: of the antigens.
        requests: antigen of each line of `table`.

    Returns:
        How many candidates have no record.
    """
    num_left_out = 0
    with replacing(path) as draft, draft.open("w", encoding="utf-8") as file:
        for i, request in enumerate(requests):
            cells = {name: column[i] for name, column in table.items()}
            title = f"log_probability={cells['log_probability']:.4f} copies={cells['copies']} valid={cells['valid']}"
            title += f' problem="{cells["problem"]}"' if cells["problem"] else ""
            chains = {chain: cells[f"generated_{chain}"] for chain in ("heavy", "light") if cells[f"generated_{chain}"]}
            for chain, sequence in chains.items():
                file.write(f">{names[request]}_{cells['rank']}_{chain} {title}\n{sequence}\n")
            num_left_out += not chains
    return num_left_out
