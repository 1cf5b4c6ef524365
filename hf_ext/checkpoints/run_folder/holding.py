"""The folders of a run: fit to be written to, nobody else's, and this run's alone until it ends."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import FolderError
from ...main_process import do_on_main
from ...whole_files import part_from_links
from .folder_lock import Hold, hold_folder
from .run_content import check_content, list_files

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # the disk's, not the name's

logger = logging.getLogger(__name__)


@contextmanager
def run_folder(args: Any, subfolders: Collection[str] = ()) -> Iterator[None]:
    """Makes `output_dir` and keeps it, and the folder of local checkpoints, for this run until the block ends.

    To be entered by all processes of a recipe before anything is written. Where it refuses, nothing was touched.

    Args:
        args: `FastTrainingArguments`.
        subfolders: of those that `check_content` knows, the ones that this command writes to.

    Raises:
        FolderError: on all processes: the path cannot be a folder or cannot be written to; another run is in it; what
            a run writes is a link or no file; it holds a model or results that no run left there.
        DiskFailure: the disk is full or broken.
    """
    holds: list[Hold] = []

    def enter() -> None:
        _refuse_place(args.output_dir)
        make_folder(args.output_dir)
        try:
            check_content(Path(args.output_dir), subfolders)
            holds.extend(hold_run_folders(args))
        except OSError as error:
            _refuse_name(error.filename or args.output_dir, error)
            raise

    try:
        do_on_main(args, enter)
        yield
    finally:
        for hold in holds:
            hold.release()


def hold_run_folders(args: Any) -> list[Hold]:
    """Holds `output_dir` and, with `local_checkpoint_dir`, the folder there that is `output_dir`'s; makes them.

    A disk that is full or broken costs the lock and a warning, no more: saves have rules of their own for that.

    Raises:
        FolderError: another run holds one of them; this one then holds none.
        OSError: a folder cannot be made or written to by this user.
    """
    folders = [Path(args.output_dir)]
    if args.local_checkpoint_dir is not None:
        folders.append(local_folder(args.local_checkpoint_dir, args.output_dir))
    holds: list[Hold] = []
    try:
        for folder in folders:
            hold = _try_hold(folder)
            holds += [] if hold is None else [hold]
        _part_from_links(folders[0])
    except BaseException:
        for hold in holds:
            hold.release()
        raise
    return holds


def _part_from_links(folder: Path) -> None:
    """Libraries write in place all but weights; a backup made with `cp -al` is to stay what it was."""
    for path in list_files(folder):
        if path.suffix != ".safetensors":
            part_from_links(path)


def _try_hold(folder: Path) -> Hold | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return hold_folder(folder)
    except OSError as error:
        if error.errno not in _DISK:
            raise
        logger.warning("%s is not locked against other runs: %s.", folder, error.strerror)
        return None


def local_folder(local_checkpoint_dir: str, output_dir: str) -> Path:
    """Where the checkpoints of `output_dir` are kept locally: a folder of its own, so that runs can share the disk."""
    place = Path(output_dir).absolute()
    return Path(local_checkpoint_dir).expanduser() / f"{place.name}-{hashlib.sha256(bytes(place)).hexdigest()[:8]}"


def make_folder(path: str | os.PathLike[str], option: str = "--output_dir") -> None:
    """Makes a folder where there is none; `option` is what a user changes to have another.

    Raises:
        FolderError: there is a file, it is not this user's to make, or its name is no name for a folder.
        OSError: the disk is full, read-only or broken.
    """
    try:
        os.fspath(path).encode("utf-8")
        Path(path).mkdir(parents=True, exist_ok=True)
    except UnicodeEncodeError as error:
        raise FolderError(
            f"{os.fspath(path)!r} cannot be the output folder: its name is not UTF-8, so no report could name it. "
            f"Choose another {option}."
        ) from error
    except ValueError as error:  # a zero byte
        raise FolderError(f"{os.fspath(path)!r} cannot be the output folder: {error}.") from error
    except OSError as error:
        _refuse_name(path, error, option)
        raise


def _refuse_place(path: str | os.PathLike[str]) -> None:
    """A run fills its folder, and counts all that is in it; so it must be one that was made for such things."""
    try:
        place, home = Path(path).resolve(), Path.home().resolve()
    except (OSError, ValueError, RuntimeError):  # `make_folder` says what is wrong with it
        return
    if place in (Path(place.anchor), home):
        name = "home folder" if place == home else "top of the disk"
        raise FolderError(
            f"{os.fspath(path)!r} cannot be the output folder: it is the {name}. Give a folder below it, such as "
            f"--output_dir {place / 'outputs'}."
        )


def _refuse_name(path: str | os.PathLike[str], error: OSError, option: str = "--output_dir") -> None:
    if error.errno in _DISK:
        return
    reason = "there is a file of that name" if isinstance(error, FileExistsError) else error.strerror
    raise FolderError(f"{os.fspath(path)!r} cannot be the output folder: {reason}. Choose another {option}.") from error
