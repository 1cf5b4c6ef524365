"""Where predictions go: checked before a model is loaded, and never over what is not a table of predictions."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from ..checkpoints.run_lock import make_folder
from ..data.reading import SOURCE_ROW, local_files, peek_columns
from ..data.row_errors import REJECTED_FILE, REJECTED_HEADER
from ..data.text_files import irregular_kind
from ..errors import ArgumentError, DataError
from ..files import try_replacing

PREDICTION, LOW, HIGH, SPREAD = "prediction", "prediction_low", "prediction_high", "prediction_std"
ADDED = (SOURCE_ROW, PREDICTION, LOW, HIGH, SPREAD)  # what is written beside the input's own columns, in this order
_REMEDY = "Name another CSV to write."
_FIRST_CHARS = 1 << 20  # a header is shorter


def find_output(
    name: str,
    dataset_name: str | None,
    is_own: Callable[[list[str]], bool] | None = None,
    writer: str = "predict.py",
) -> Path:
    """The CSV to write predictions to, found fit for that; its folder is made.

    Args:
        name: as given; `~` is the home folder, and a link means the file that it leads to.
        dataset_name: where rows are read from.
        is_own: whether a file with such a header may be replaced; None: one with predictions.
        writer: of such files, for messages.

    Raises:
        ArgumentError: no file can have that name or be written there; or what is there is what rows are read from, is
            no file, or is not `writer`'s own.
        DataError: the folder that rows are read from holds none.
        FolderError: its folder cannot be made.
    """
    try:
        path = _look_up(name)
        if any(path.exists() and path.samefile(source) for source in local_files(dataset_name)):
            raise ArgumentError(f"--output {name!r} is what --dataset_name reads, and would be replaced. {_REMEDY}")
        if path.exists() and not _begins(path, is_own or _is_of_predictions):
            raise ArgumentError(f"--output {name!r} is there and was not written by {writer}. {_REMEDY}")
        make_folder(path.parent, "--output")
        try_replacing(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: an unknown ~user
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ArgumentError(f"--output {name!r} cannot be written: {reason}. {_REMEDY}") from error
    return path


def find_rejected(output: Path, bad_rows: str) -> Path:
    """Where `--bad_rows drop` lists the rows that it leaves out: beside `output`, under a name made from its own.

    Raises:
        ArgumentError: they are to be dropped, and what is there is no list of rejected rows.
    """
    path = output.with_name(f"{output.stem}.{REJECTED_FILE}")
    is_free = bad_rows != "drop" or not os.path.lexists(path)
    if not is_free and (path.is_symlink() or irregular_kind(path) or not _begins(path, _is_of_rejected)):
        raise ArgumentError(
            f"{path} is where --bad_rows drop lists rows, and what is there is no such list. Move it away, or give "
            "another --output."
        )
    return path


def check_columns(dataset_name: str | None) -> None:
    """Refuses rows whose own columns have the names of those that are added to them.

    Raises:
        DataError: a file has such a column, with its name; or it cannot be read.
    """
    for path, names in peek_columns(dataset_name).items():
        refuse_added(str(path), names)


def refuse_added(source: str, names: Iterable[str], added: Iterable[str] = ADDED, what: str = "predictions") -> None:
    """Raises DataError where `names`, the columns of `source`, hold one of those that are `added` to them."""
    taken_names = set(added)
    if taken := [name for name in names if name in taken_names]:
        raise DataError(
            f"{source} has columns of the names {', '.join(taken)}, under which {what} are written beside the "
            "file's own. Rename yours, or leave out all that the model does not read: --keep_columns false."
        )


def _look_up(name: str) -> Path:
    if name in ("", "-") or "\0" in name or name.endswith(os.sep):
        raise ArgumentError(f"--output {name!r} names no file. {_REMEDY}")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ArgumentError(f"--output {name!r} is not UTF-8. {_REMEDY}") from error
    path = Path(name).expanduser()
    if path.exists() and (kind := irregular_kind(path)):
        raise ArgumentError(f"--output {name!r} is {kind}, not a file. {_REMEDY}")
    return path.resolve()


def _begins(path: Path, is_header: Callable[[list[str]], bool]) -> bool:
    """Whether a file is empty or its first row is as expected."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        start = file.read(_FIRST_CHARS)
    try:
        return not start or is_header(next(csv.reader(io.StringIO(start))))
    except csv.Error:
        return False


def _is_of_predictions(header: list[str]) -> bool:
    """Those that a run leaves in its folder have the label between the row's number and the prediction."""
    tails = [[PREDICTION, *interval, *spread] for interval in ([], [LOW, HIGH]) for spread in ([], [SPREAD])]
    if any(header[-1 - len(tail) :] == [SOURCE_ROW, *tail] for tail in tails):
        return True
    return header[-1:] in ([PREDICTION], [HIGH], [SPREAD]) and "label" not in header  # of a stream, or of old


def _is_of_rejected(header: list[str]) -> bool:
    return header == REJECTED_HEADER
