"""What hf_ext raises. Every message names the offending value, what is allowed, and how to mend it."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class HfExtError(ValueError):
    """Base of all errors that are about the user's input; also a `ValueError`."""


class ArgumentError(HfExtError):
    """A command-line, YAML or preset value that is unknown, malformed or contradicts another one."""


class DataError(HfExtError):
    """The user's data cannot be used as it is; names file, row, column, value, rule and remedy."""


class PlanRefused(HfExtError):
    """A requested speed-up would be wrong on this machine, model or data; the run does not start."""


class CacheError(HfExtError):
    """An embedding cache belongs to another encoder, tokenizer, pooling, dtype or length limit."""


class CheckpointError(HfExtError):
    """A checkpoint is damaged, belongs to another run, or does not fit the model, data or arguments."""


class RunEnded(Exception):
    """Base of all ends of a run that are not the user's mistake; a recipe exits with `exit_code`."""

    exit_code = 1


class TrainingStopped(RunEnded):
    """Training saved and stopped on a signal or before a time limit; the same command continues it."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class DiskFailure(RunEnded):
    """Several checkpoints in a row, or the trained model, could not be written; what was saved before is valid."""

    exit_code = 74  # EX_IOERR


class NotFiniteError(RunEnded):
    """The loss or the weights became NaN or infinite; the last checkpoint was written before that."""

    exit_code = 65  # EX_DATAERR


class MissingDependencyError(ImportError):
    """An optional package is needed for what was asked; the message names the extra that brings it."""


@contextmanager
def exit_on_errors() -> Iterator[None]:
    """Ends the process as a recipe should: the message without a traceback, and a status that scripts can tell apart.

    1 for the user's mistakes (`HfExtError`), `exit_code` for other ends of a run (`RunEnded`), that of `DiskFailure`
    also where a disk that is full, over quota, read-only or broken stops anything else.
    """
    try:
        yield
    except HfExtError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except RunEnded as end:
        print(f"{type(end).__name__}: {end}", file=sys.stderr)
        sys.exit(end.exit_code)
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        print(f"DiskFailure: {error}. Free space there, or choose another --output_dir.", file=sys.stderr)
        sys.exit(DiskFailure.exit_code)
