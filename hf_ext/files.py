"""Files: what the disk says of a failure, writes that appear whole, cells of CSV files, and what comes with hf_ext."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from .errors import error_number

StrPath: TypeAlias = str | os.PathLike[str]
Facts: TypeAlias = Mapping[str, Any]  # by name, as they were written
Json: TypeAlias = dict[str, Any]  # an object of JSON
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_TOO_LARGE = {errno.EFBIG}
_BROKEN = {errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT}
_ADVICE = (
    (_FULL, "Free space there, keep fewer checkpoints (--save_total_limit) or choose another --output_dir."),
    (_FORBIDDEN, "Make the folder writable for this user or choose another --output_dir."),
    (_TOO_LARGE, "Raise the file size limit (ulimit -f) or choose another --output_dir."),
    (_BROKEN, "Check that the disk or network folder is still mounted, or choose another --output_dir."),
)
# torch.save tells no errno: of a full disk, where it is, and where it should be.
_TORCH = re.compile(r"PytorchStreamWriter failed writing|inline_container.*unexpected pos")
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}  # FUSE and network folders that cannot fsync


def is_disk_failure(error: BaseException) -> bool:
    """Returns whether writing failed because of the disk: full, quota, read-only, no permission, file limit, I/O, gone.

    safetensors reports such failures as a SafetensorError whose text ends in "(os error N)", `torch.save` as a
    RuntimeError; those count too.
    """
    return error_number(error) in _FULL | _FORBIDDEN | _TOO_LARGE | _BROKEN or _is_torchs(error)


def _is_torchs(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and _TORCH.search(str(error)) is not None


def describe_failure(error: BaseException, path: StrPath, needed_bytes: int | None = None) -> str:
    """Describes what could not be written and why, bytes needed and free, and what to do: one paragraph for a log.

    Args:
        error: one for which `is_disk_failure` holds.
        path: what was to be written.
        needed_bytes: bytes that it takes; None where that is not known.
    """
    number = error_number(error)
    is_torchs = _is_torchs(error)
    unnumbered = "torch could not write a file whole (a full disk, or ulimit -f)" if is_torchs else str(error)
    reason = os.strerror(number) if number else unnumbered
    try:
        free = f"{free_bytes(path):,} bytes are free"
    except OSError as problem:
        free = f"free bytes cannot be told ({problem.strerror})"
    room = f"{needed_bytes:,} bytes are needed, {free}" if needed_bytes is not None else free
    advice = next((text for numbers, text in _ADVICE if number in numbers or is_torchs), "")
    return f"{path} could not be written: {reason}. {room[0].upper()}{room[1:]}. {advice}".rstrip()


def free_bytes(path: StrPath) -> int:
    """Counts bytes that this user may still write where `path` is or will be; quotas are not seen.

    Raises:
        OSError: the file system does not answer.
    """
    return shutil.disk_usage(nearest_existing(path)).free


def can_make(folder: StrPath) -> bool:
    """Returns whether this user may make `folder`, or write to it, as far as its nearest parent tells."""
    place = nearest_existing(folder)
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)


def nearest_existing(path: StrPath) -> Path:
    """Returns `path`, or the nearest folder above it that is there for this user to see."""
    place = Path(path).absolute()
    while not os.path.exists(place) and place != place.parent:
        place = place.parent
    return place


def used_bytes(folder: StrPath) -> int:
    """Counts bytes allocated for `folder` and everything in it, folders too; 0 if it does not exist.

    Links are not followed; what vanishes meanwhile, or stands in a folder that this user may not read, is not counted.
    Cost: one stat per file.
    """
    try:
        status = os.lstat(folder)
    except FileNotFoundError:
        return 0
    children = []
    if stat.S_ISDIR(status.st_mode):
        with suppress(FileNotFoundError, PermissionError):
            children = os.listdir(folder)
    own = status.st_blocks * 512  # POSIX: blocks of 512 bytes, whatever the file system's own
    return own + sum(used_bytes(os.path.join(folder, child)) for child in children)


def sync(path: StrPath) -> None:
    """Waits until a file or folder is on the disk, where the file system can tell.

    Raises:
        OSError: writing it back failed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def follow_umask(path: StrPath) -> None:
    """Gives a file the mode of any new file of this process: safetensors (0.6 and later) lets its owner alone read it.

    A file system without modes is left as it is.
    """
    try:  # os.umask tells only what it replaces, for all threads
        umask = int(re.findall(r"^Umask:\s*([0-7]+)", Path("/proc/self/status").read_text(), re.M)[0], 8)
    except (OSError, IndexError):
        umask = os.umask(0)
        os.umask(umask)
    with suppress(OSError):
        os.chmod(path, 0o666 & ~umask)


def remove_folder(folder: StrPath, last: str | None = None) -> None:
    """Deletes a folder, its file `last` after all others, so that an interrupted deletion can be recognised.

    Raises:
        OSError: something in it could not be deleted; what is gone already is no error.
    """
    keep = os.path.join(folder, last) if last else None
    for place, folders, files in os.walk(folder, topdown=False):
        for name in (*files, *folders):
            if os.path.join(place, name) != keep:
                remove(os.path.join(place, name))
    if keep:
        remove(keep)
    remove(folder)


def remove(path: StrPath) -> None:
    """Deletes a file, a link or an empty folder; nothing where it does not exist.

    Raises:
        OSError: it could not be deleted.
    """
    with suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            os.rmdir(path)
        else:
            os.unlink(path)


@contextmanager
def replacing(path: StrPath) -> Iterator[Path]:
    """Gives the path of a draft, `.NAME.tmp` beside `path`, that takes the place of `path` if the block ends well.

    Raises:
        OSError: the draft cannot be moved there; it is then removed, as after any error of the block.
    """
    draft = _draft_of(Path(path))
    draft.unlink(missing_ok=True)  # a killed process left it, perhaps as a link
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def try_replacing(path: StrPath) -> None:
    """Finds out, before there is anything to write, whether `replacing` could begin; changes nothing.

    Raises:
        OSError: the draft cannot be made, or the file that is there may not be written to.
    """
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
    draft = _draft_of(Path(path))
    draft.unlink(missing_ok=True)
    draft.touch()
    draft.unlink(missing_ok=True)


def _draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def parse_json(text: str | bytes) -> Any:
    """Parses JSON of files and arguments that anybody may have written.

    Raises:
        ValueError: it is no JSON, or is nested so deeply that Python gives up.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def write_text(path: StrPath, text: str) -> None:
    """Writes UTF-8, whole or not at all.

    Raises:
        OSError: as `replacing`, or the disk refuses; what stood there still does.
    """
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


# As OWASP lists them for CSV injection: what begins a formula, also in full width, and white space that is skipped. A
# lone "-" stands for nothing.
_FORMULA = re.compile("(?!-\\Z)'*[=+\\-@\\t\\r\\n\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?").fullmatch


def write_cell(value: object) -> Any:
    """Returns `value` as it belongs into a CSV: text that a spreadsheet would take for a formula gets a `'` in front.

    Numbers, also in text (`-1.5`), and all other text stay as they are. `read_cell` undoes it exactly.
    """
    if isinstance(value, str) and _FORMULA.match(value) and not _NUMBER(value):
        return f"'{value}"
    return value


def read_cell(text: str) -> str:
    """Returns the text that `write_cell` wrote as `text`."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


@contextmanager
def writing_csv(path: StrPath) -> Iterator[TextIO]:
    """Gives the file of a CSV, gzip where the name ends in .gz, as `replacing` does; the disk may refuse (OSError)."""
    opens: Callable[..., Any] = gzip.open if os.fspath(path).endswith(".gz") else open
    with replacing(path) as draft, opens(draft, "wt", newline="", encoding="utf-8") as file:
        yield file


def write_csv(path: StrPath, columns: Mapping[str, Any]) -> None:
    """Writes columns of equal length by `writing_csv`; "" for None and NaN, cells as of `write_cell`."""
    import pandas as pd  # here, since most of what reads this module needs no tables

    table = pd.DataFrame(columns).astype(object).map(write_cell)
    with writing_csv(path) as file:
        table.to_csv(file, index=False)


_PACKAGE = Path(__file__).resolve().parent
_PARENT = _PACKAGE if (_PACKAGE / "accelerate_configs").is_dir() else _PACKAGE.parent

CONFIGS = "recipes/configs"
LAUNCHERS = "accelerate_configs"
TEMPLATES = "launch"
_SUFFIXES = {CONFIGS: {".yaml"}, LAUNCHERS: {".yaml"}, TEMPLATES: {".py", ".sbatch", ".sh", ".yaml"}}


def shipped_folder(folder: str) -> Path:
    """Returns one of `CONFIGS`, `LAUNCHERS` and `TEMPLATES` as a path: of a clone, or inside an installed hf_ext."""
    return _PARENT / folder


def list_shipped(folder: str) -> list[str]:
    """Names of the files in one of these folders, sorted."""
    return sorted(path.name for path in shipped_folder(folder).iterdir() if path.suffix in _SUFFIXES[folder])


def find_shipped(text: str, folder: str) -> Path:
    """Finds the file that a user means: what exists under that path, else what comes with hf_ext under that name.

    Args:
        text: a path, or the name of a shipped file, alone (`gb1.yaml`) or as in a clone (`recipes/configs/gb1.yaml`).
        folder: where such files are shipped.

    Returns:
        Its path; `text` as it is, where there is neither.
    """
    path = Path(text)
    if path.exists() or path.parent.as_posix() not in (".", folder):
        return path
    shipped = shipped_folder(folder) / path.name
    return shipped if path.name in list_shipped(folder) else path
