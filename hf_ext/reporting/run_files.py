"""What a finished run left in its folder, read and checked; and how its names are shown to strangers."""

from __future__ import annotations

import csv
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

import numpy as np

from ..errors import DataError
from ..files import Json, StrPath, parse_json, read_cell
from . import page
from .record import FORMAT, PlanRecord, Read, RunRecord, StateRecord, from_json

_ABSOLUTE_PATH = re.compile(r"(?<![\w./:~])(?:~|/|[A-Za-z]:[\\/])[^\s'\",;:\]]*[\\/]([^\\/\s'\",;:\]]+)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DATA_FILE = re.compile(r"\.(csv|tsv|jsonl?|parquet|fa|faa|fasta|gz|txt|yaml)$")
# Arguments that hold a local path, whatever it looks like.
_PATHS = re.compile(r"(.*_(dir|from|json|file|path|checkpoint)|config)")


@dataclass
class Predictions:
    """Rows of `predictions.csv`: labels and predictions, float64 [n] with NaN where empty; other columns as text. Of
    other labels than one number per row these two are text as well, and None where there are several of them."""

    labels: Any
    predictions: Any
    columns: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class RunFiles:
    """A run's record, and what else there is: `plan` and `state` are empty, `predictions` None, where absent."""

    folder: Path
    record: RunRecord
    plan: PlanRecord
    state: StateRecord
    predictions: Predictions | None

    def image(self, name: str) -> str:
        """Returns `name` where the folder has this picture, else nothing."""
        return name if (self.folder / name).is_file() else ""


def read_run(folder: StrPath) -> RunFiles:
    """Reads `all_results.json`, and `plan.json`, `trainer_state.json` and `predictions.csv` where they are.

    Raises:
        DataError: no such folder, no `all_results.json` in it, a file that is damaged, a format of a newer hf_ext.

    Cost: 0.2 s for 24,000 predictions with three sequence columns.
    """
    path = Path(folder)
    file = path / "all_results.json"
    if not file.is_file():
        raise DataError(
            f"{path}: holds no all_results.json, so it is not the folder of a finished run. Name the --output_dir of a "
            "run (`hf-ext train`, `mlm`, `generate`) that came to its end."
        )
    found = read_object(file)
    if not {"format", "task", "verdict", "page"} & found.keys():
        raise DataError(f"{file}: holds no record of a run of hf_ext (of another program?). Nothing was written.")
    record = from_json(RunRecord, found, file)
    for what, held, known in (("", found, FORMAT), ("page of ", record.page, page.FORMAT)):
        if held.get("format", known) != known:
            raise DataError(
                f"{file}: {what}format {held['format']!r}, this hf_ext reads format {known}. Install the hf_ext that "
                "trained the run, or restore the file if it was changed by hand."
            )
    table = path / "predictions.csv"
    are_numbers = record.kind.chart == "scatter"
    return RunFiles(
        folder=path,
        record=record,
        plan=read_record(PlanRecord, path / "plan.json"),
        state=read_record(StateRecord, path / "trainer_state.json"),
        predictions=read_test_predictions(table, are_numbers) if table.is_file() else None,
    )


def read_record(kind: type[Read], path: Path) -> Read:
    """Reads the record in a file; an empty one where there is no file. Errors: as `read_object`."""
    return from_json(kind, read_object(path), path)


def read_object(path: Path) -> Json:
    """Reads the object in a file; empty where there is no file.

    Raises:
        DataError: it holds something else.
    """
    if not path.is_file():
        return {}
    try:
        value = parse_json(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}). Restore it, or remove it and run this again.") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: holds a {type(value).__name__}; an object as a run writes it is needed.")
    return value


def read_test_predictions(path: Path, are_numbers: bool) -> Predictions | None:
    """Reads a run's `predictions.csv`; None where the table has no label or prediction column, or no rows.

    Args:
        are_numbers: one per row; else labels and predictions are text.

    Raises:
        DataError: a row has too few or too many cells, or something else than a number for one.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        rows = list(reader)
    for line, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise DataError(f"{path}, line {line}: {len(row)} cells for {len(header)} columns. Predict again.")
    if not rows or (are_numbers and not {"label", "prediction"} <= set(header)):
        return None
    columns = {read_cell(name): list(map(read_cell, cells)) for name, cells in zip(header, zip(*rows))}
    labels, predictions = (columns.pop(name, None) for name in ("label", "prediction"))
    if not are_numbers or labels is None or predictions is None:
        return Predictions(labels, predictions, columns)
    return Predictions(_as_floats(path, "label", labels), _as_floats(path, "prediction", predictions), columns)


def _as_floats(path: Path, name: str, cells: list[str]) -> np.ndarray:
    values = []
    for line, cell in enumerate(cells, 2):
        try:
            values.append(float(cell or "nan"))
        except ValueError as error:
            raise DataError(f"{path}, line {line}, column {name}: {cell[:40]!r} is not a number.") from error
    return np.array(values)


# --- names that strangers may read ------------------------------------------------------------------------------------


def hide_folders(text: str) -> str:
    """Keeps the last part of absolute paths: a page may be shared, and folders name people and machines.

    Relative paths, URLs and Hub ids stay as they are.
    """
    return _ABSOLUTE_PATH.sub(r".../\1", text)


def is_hub_id(name: object, revision: object = None) -> bool:
    """Returns whether `name` is OWNER/NAME on the Hub and not a file or folder here.

    A commit beside it proves the Hub.
    """
    if not isinstance(name, str) or not name:
        return False
    if isinstance(revision, str) and _COMMIT.fullmatch(revision):
        return True
    # A relative path counts from where the run was started, which is where its card is written.
    return bool(_HUB_ID.fullmatch(name)) and not _DATA_FILE.search(name) and not Path(name).exists()


def last_part(path: str) -> str:
    """Returns the last part of a path, of this system or of Windows."""
    return PureWindowsPath(path).name if "\\" in path else PurePath(path).name or path


def show_source(name: object, revision: str | None) -> str:
    """Shows a Hub id with its revision, of anything local the last part of its path."""
    if not is_hub_id(name, revision):
        return f"{last_part(str(name))} (local)"
    return f"{name}, revision {revision[:12]}" if revision else f"{name}, not pinned"


def show_argument(name: str, value: object) -> str:
    """Shows an argument's value on one line; of local paths the last part."""
    if isinstance(value, list | tuple):
        return " ".join(show_argument(name, item) for item in value) or "(none)"
    if not isinstance(value, str):
        return hide_folders(repr(value))
    looks_local = value.startswith(("/", "~", "./", "../", ".\\")) or "\\" in value or value[1:3] == ":/"
    is_local = bool(_PATHS.fullmatch(name)) and not is_hub_id(value)
    is_file = "/" in value and bool(_DATA_FILE.search(value))
    return last_part(value) if looks_local or is_local or is_file else hide_folders(" ".join(value.split()))


def show_command(command: str) -> str:
    """Shows a command line with the last parts of local paths."""
    shown: list[str] = []
    flag = ""
    for word in shlex.split(command):
        if word.startswith("--"):
            flag, joined, value = word.partition("=")
            word = f"{flag}={show_argument(flag[2:], value)}" if joined else word
        elif flag:
            word = show_argument(flag[2:], word)
        shown.append(word)
    return shlex.join(shown)
