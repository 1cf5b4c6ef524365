"""The folders of a run: fit to be written to, nobody else's, and this run's alone until it ends."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import FolderError
from .folder_lock import Hold, hold_folder
from .main_process import do_on_main

# What a run or its model consists of in the output folder: files that are opened there, or replaced.
_MODEL = (
    r"(generation_|adapter_|tokenizer_)?config\.json|(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors|inputs\.json|"
    r"model\.safetensors\.index\.json|tokenizer\.(json|model)|special_tokens_map\.json|added_tokens\.json|"
    r"vocab\.(txt|json)|merges\.txt|spiece\.model|model_manifest\.json"
)
_RESULTS = r"predictions\.csv|rejected_rows\.csv|report\.(html|md)|(loss|scatter)\.png|finished\.json"
_RECORDS = r"run\.log|plan\.json|all_results\.json|trainer_state\.json|training_args\.(json|bin)|throughput\.json"
_ABOUT = r"README(\.hf_ext)?\.md|teacher_predictions\.safetensors"
_OVERWRITTEN = re.compile(rf"{_MODEL}|{_RESULTS}")
_WRITTEN = re.compile(rf"{_MODEL}|{_RESULTS}|{_RECORDS}|{_ABOUT}")
_SIGNS = re.compile(rf"{_RECORDS}|((damaged|previous)-|\.staging-|\.trash-)?checkpoint-\d+.*")
_DRAFT = re.compile(r"\.(?P<name>.+?)(\.\d+)?\.tmp")
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # the disk's, not the name's

logger = logging.getLogger(__name__)


@contextmanager
def run_folder(args: Any) -> Iterator[None]:
    """Makes `output_dir` and keeps it, and the folder of local checkpoints, for this run until the block ends.

    To be entered by all processes of a recipe before anything is written. Where it refuses, nothing was touched.

    Args:
        args: `FastTrainingArguments`.

    Raises:
        FolderError: on all processes: the path cannot be a folder or cannot be written to; another run is in it; what
            a run writes is a link or no file; it holds a model or results that no run left there.
        DiskFailure: the disk is full or broken.
    """
    holds: list[Hold] = []

    def enter() -> None:
        make_folder(args.output_dir)
        check_content(Path(args.output_dir))
        try:
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
    except BaseException:
        for hold in holds:
            hold.release()
        raise
    return holds


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


def make_folder(path: str | os.PathLike[str]) -> None:
    """Makes a folder where there is none.

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
            "Choose another --output_dir."
        ) from error
    except ValueError as error:  # a zero byte
        raise FolderError(f"{os.fspath(path)!r} cannot be the output folder: {error}.") from error
    except OSError as error:
        _refuse_name(path, error)
        raise


def _refuse_name(path: str | os.PathLike[str], error: OSError) -> None:
    if error.errno in _DISK:
        return
    reason = "there is a file of that name" if isinstance(error, FileExistsError) else error.strerror
    raise FolderError(
        f"{os.fspath(path)!r} cannot be the output folder: {reason}. Choose another --output_dir."
    ) from error


def check_content(folder: Path) -> None:
    """Refuses a folder in which a run would write through links, fail at its end, or overwrite what is not a run's.

    A README.md counts only if it is a link: one that somebody wrote stays.

    Raises:
        FolderError: with the names; or the folder cannot be read.
    """
    try:
        entries = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(folder)}
    except OSError as error:
        _refuse_name(folder, error)
        raise
    named = {name: status for name, status in entries.items() if _WRITTEN.fullmatch(_final_name(name))}
    unfit = [text for name, status in sorted(named.items()) if (text := _unfitness(folder / name, status))]
    if unfit:
        raise FolderError(
            f"{folder}: a run writes files of these names: {'; '.join(unfit)}. Move them away, or choose another "
            "--output_dir. Nothing was touched."
        )
    overwritten = sorted(name for name in named if _OVERWRITTEN.fullmatch(name))
    if overwritten and not any(_SIGNS.fullmatch(name) for name in entries):
        raise FolderError(
            f"{folder} holds {', '.join(overwritten)}, which a run would overwrite, and nothing that says a run wrote "
            "them (run.log, plan.json, trainer_state.json, checkpoints). Choose another --output_dir, or move them "
            "away. Nothing was touched."
        )


def _final_name(name: str) -> str:
    draft = _DRAFT.fullmatch(name)
    return draft["name"] if draft else name


def _unfitness(path: Path, status: os.stat_result) -> str | None:
    if stat.S_ISLNK(status.st_mode):
        return f"{path.name} is a link to {os.readlink(path)}"
    if not stat.S_ISREG(status.st_mode):
        return f"{path.name} is {'a folder' if stat.S_ISDIR(status.st_mode) else 'no regular file'}"
    may_write = os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
    return None if may_write else f"{path.name} cannot be written to"
