"""What hf_ext raises. Every message names the offending value, what is allowed, and how to mend it."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import NoReturn

from .interruption import interruptible
from .orphans import stop_with_parent
from .output import outliving_readers, show_text

STATUS_FOLDER = "HF_EXT_STATUS_FOLDER"  # set by hf_ext.launching, for ranks
Note = Callable[[int | None], None]  # takes a status, None where there is none yet
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class HfExtError(ValueError):
    """Base of all errors that are about the user's input; also a `ValueError`."""


class ArgumentError(HfExtError):
    """A command-line, YAML or preset value that is unknown, malformed or contradicts another one."""


class DataError(HfExtError):
    """The user's data cannot be used as it is; names file, row, column, value, rule and remedy."""


class PlanRefused(HfExtError):
    """A requested speed-up would be wrong on this machine, model or data: the run does not start, or ends before a step
    in which this shows.
    """


class CacheError(HfExtError):
    """An embedding cache belongs to another encoder, tokenizer, pooling or dtype."""


class CheckpointError(HfExtError):
    """A checkpoint is damaged, belongs to another run, or does not fit the model, data or arguments."""


class FolderError(HfExtError):
    """The output folder is in use by another run, holds what is not a run's, or cannot be written to."""


class RunEnded(Exception):
    """Base of all ends of a run that are not the user's mistake; a recipe exits with `exit_code`."""

    exit_code = 1


class TrainingStopped(RunEnded):
    """Training saved and stopped on a signal or before a time limit; the same command continues it."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class StoppedForGood(TrainingStopped):
    """Training saved and stopped, and the same command would not continue it: it would begin anew, or be refused."""

    exit_code = 1  # not to be run again unchanged


class DiskFailure(RunEnded):
    """Several checkpoints in a row, or the trained model, could not be written; what was saved before is valid."""

    exit_code = 74  # EX_IOERR


class NotFiniteError(RunEnded):
    """The loss or the weights became NaN or infinite; the last checkpoint was written before that."""

    exit_code = 65  # EX_DATAERR


class DataWorkerDied(RunEnded):
    """A process that prepares batches was killed or ended; the last checkpoint was written before that."""

    exit_code = 71  # EX_OSERR


class MemoryExhausted(RunEnded):
    """Memory does not suffice, after all that leaves learning as it is; the last checkpoint was written before that."""

    exit_code = 69  # EX_UNAVAILABLE


class RequirementsFailed(RunEnded):
    """Final scores are not what `--require` asks for; everything was written before."""

    exit_code = 3  # as of a comparison whose criteria fail


class MissingDependencyError(ImportError):
    """An optional package is needed for what was asked; the message names the extra that brings it."""


def error_number(error: BaseException) -> int | None:
    """The `errno` behind an OSError or a SafetensorError (by name: not imported for it), None for anything else."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error)) if type(error).__name__ == "SafetensorError" else None
    return int(found[1]) if found else None


@contextmanager
def exit_on_errors() -> Iterator[None]:
    """Ends the process as a recipe should: the message without a traceback, and a status that scripts can tell apart.

    1 for the user's mistakes (`HfExtError`) and for packages that are missing, `exit_code` for other ends of a run
    (`RunEnded`), that of `DiskFailure` also where a disk that is full, over quota, read-only or broken stops anything
    else; that of `TrainingStopped` where SIGTERM, SIGINT or SIGHUP comes before or after training, which has its own
    answer to them. `hf_ext.launching` learns the status too, whatever the launcher between makes of it. Output that
    cannot be written is dropped, and ends nothing.
    """
    with _noting_status() as note, outliving_readers(), _ending(note):
        yield


@contextmanager
def _ending(note: Note) -> Iterator[None]:
    def give_up() -> None:
        note(TrainingStopped.exit_code)
        os._exit(TrainingStopped.exit_code)  # the main thread waits for other processes, and for nothing else any more

    try:
        with interruptible(give_up):
            yield
    except KeyboardInterrupt as interrupt:
        name = interrupt.args[0] if interrupt.args else "SIGINT"
        text = (
            f"Interrupted by {name}. Files that were saved are whole; the same command goes on from the newest "
            "checkpoint, or repeats what was interrupted."
        )
        _end(text, TrainingStopped.exit_code)
    except HfExtError as error:
        _end(f"{type(error).__name__}: {error}", 1)
    except RunEnded as end:
        _end(f"{type(end).__name__}: {end}", end.exit_code)
    except (ImportError, RuntimeError) as error:  # of an optimizer, a tracker, a kernel: libraries have no common class
        if not _is_missing_package(error):
            raise
        _end(f"{MissingDependencyError.__name__}: {error}", 1)
    except Exception as error:  # SafetensorError, which is no OSError, is not imported for it
        if error_number(error) not in _DISK_ERRORS:
            raise
        text = f"DiskFailure: {error}. Free space there, or have it written elsewhere."
        _end(text, DiskFailure.exit_code)


@contextmanager
def _noting_status() -> Iterator[Note]:
    """Leaves the status that this process ends with in the folder of `hf_ext.launching`, where that runs.

    Processes that this one starts are not told of the folder: their ends are not its own.
    """
    folder = os.environ.pop(STATUS_FOLDER, None)
    note: Note = partial(_note_status, None if folder is None else Path(folder))
    status = 1  # of whatever goes up as a traceback
    if folder is not None:
        stop_with_parent()
        note(None)  # who is killed from here on has said so much
    try:
        yield note
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        note(status)
        if folder is not None:
            os.environ[STATUS_FOLDER] = folder


def _note_status(folder: Path | None, status: int | None) -> None:
    if folder is None:
        return
    own = os.environ.get  # as torch elastic sets them, and accelerate where MPI launched
    attempt, rank = own("TORCHELASTIC_RESTART_COUNT", "0"), own("RANK", "0")
    ranks = int(own("LOCAL_WORLD_SIZE") or own("WORLD_SIZE") or "1")
    note = {"status": status, "attempt": int(attempt), "ranks": ranks, "time": time.time()}
    with suppress(OSError):  # on another machine than the folder
        (folder / f"{attempt}-{rank}").write_text(json.dumps(note))


def _is_missing_package(error: ImportError | RuntimeError) -> bool:
    """Whether the message alone says what to do: a package is to be installed."""
    text = str(error)
    named = "pip install" in text or "to be installed" in text or "need to install" in text
    return named or isinstance(error, PackageNotFoundError | MissingDependencyError)


def _end(text: str, status: int) -> NoReturn:
    text = show_text(text)
    with suppress(OSError):  # a terminal that is closed
        sys.stdout.flush()  # else what was printed before could come after
        print(text, file=sys.stderr, flush=True)
    tell_launcher(text)
    sys.exit(status)


def tell_launcher(text: str) -> None:
    """Hands an error to the launcher of several processes, whose own report, the last on the screen, then ends in it.

    As torch.distributed.elastic reads it (`ProcessFailure._get_error_data`, torch 2.13); does nothing without it.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": text, "timestamp": int(time.time())}))
