"""What hf_ext raises, and how a program ends. Every message names the value, what is allowed, and how to fix it."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError
from io import UnsupportedOperation
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

STATUS_FILE = "HF_EXT_STATUS_FILE"  # names a file for the statuses of processes, which launchers do not pass on
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)
# RuntimeErrors of allocators (CUDA, HIP, XPU, MPS, the CPU's on each system) and of libraries that allocate.
# Triton's "out of resource: shared memory" is none: no memory would help.
_OUT_OF_MEMORY = re.compile(
    r"(CUDA|HIP|XPU|MPS)\b.*out of memory|ErrorOutOfMemory|MemoryAllocation|_ALLOC_FAILED|_INSUFFICIENT_RESOURCES"
    r"|can't allocate memory|not enough memory: you tried to allocate|std::bad_alloc"
)
SMALLER_STEP = (
    "Give half of --per_device_train_batch_size and twice --gradient_accumulation_steps: with --resume auto the run "
    "goes on from its last checkpoint, and every step has the same rows. --gradient_checkpointing, "
    "--use_peft, --optim adamw_8bit, --max_residues and a smaller model need less, in this order. In an evaluation, "
    "lower --per_device_eval_batch_size."
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but newlines and tabs
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{20,}")  # the form of the Hub's


class HfExtError(ValueError):
    """Base of all errors that are about the user's input; also a `ValueError`."""


class ArgumentError(HfExtError):
    """A command-line, YAML or preset value that is unknown, malformed or contradicts another one."""


class DataError(HfExtError):
    """The user's data cannot be used as it is; names file, row, column, value, rule and remedy."""


class PlanRefused(HfExtError):
    """A requested speed-up would be wrong here: the run does not start, or ends before a step in which this shows."""


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
    """Memory does not suffice; the last checkpoint was written before that."""

    exit_code = 69  # EX_UNAVAILABLE


class RequirementsFailed(RunEnded):
    """Final scores are not what `--require` asks for; everything was written before."""

    exit_code = 3  # as of a comparison whose criteria fail


class MissingDependencyError(ImportError):
    """An optional package is needed for what was asked; the message names the extra that brings it."""


def error_number(error: BaseException) -> int | None:
    """Returns the `errno` behind an OSError or a SafetensorError (by name: not imported for it), or None."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error)) if type(error).__name__ == "SafetensorError" else None
    return int(found[1]) if found else None


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error, or its cause, says that memory did not suffice. torch is not imported for it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":
            return True
        if isinstance(cause, RuntimeError) and _OUT_OF_MEMORY.search(str(cause)):
            return True
        cause = cause.__cause__
    return False


def show_text(text: str) -> str:
    """Makes text fit for people: control characters become escapes, tokens of the Hub are left out."""
    return _TOKEN.sub("hf_...", _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text))


def leave_terminal() -> None:
    """Sends output to nowhere where its terminal is gone: a progress bar would end the run with an OSError."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"\n")
        except OSError:
            drop_output(descriptor)


@contextmanager
def exit_on_errors() -> Iterator[None]:
    """Ends the process as a recipe should: the message without a traceback, and a status that scripts can tell apart.

    1 for the user's mistakes (`HfExtError`) and for packages that are missing, `exit_code` for other ends of a run
    (`RunEnded`), that of `DiskFailure` also where a disk that is full, over quota, read-only or broken stops anything
    else; that of `TrainingStopped` where SIGTERM, SIGINT or SIGHUP comes before or after training, which has its own
    answer to them. A status other than 0 is also added, as a line, to the file that HF_EXT_STATUS_FILE names. Output
    that cannot be written is dropped, and ends nothing.
    """
    file = os.environ.pop(STATUS_FILE, None)  # processes that this one starts have ends of their own
    status = 1  # of whatever goes up as a traceback
    try:
        with outliving_readers(), _interruptible(), _ending():
            yield
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        if file is not None and status:
            with suppress(OSError), open(file, "a") as statuses:
                statuses.write(f"{status}\n")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raises KeyboardInterrupt on the first SIGTERM or SIGHUP inside, with its name, as SIGINT does without one.

    Not where they are handled or ignored, as training does. What comes after the first does not break into tidying up.
    """
    pid = os.getpid()
    handled = []
    if threading.current_thread() is threading.main_thread():  # only there signals can be handled
        handled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != pid:  # a process forked from this one: as if this handler were not there
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        for other in handled:
            signal.signal(other, signal.SIG_IGN)
        if number == signal.SIGHUP:
            leave_terminal()
        raise KeyboardInterrupt(signal.Signals(number).name)

    for number in handled:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _ending() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as interrupt:
        name = interrupt.args[0] if interrupt.args else "SIGINT"
        going_on = "the same command goes on from the newest checkpoint, or repeats what was interrupted"
        _end(f"Interrupted by {name}. Files that were saved are whole; {going_on}.", TrainingStopped.exit_code)
    except HfExtError as error:
        _end(f"{type(error).__name__}: {error}", 1)
    except RunEnded as end:
        _end(f"{type(end).__name__}: {end}", end.exit_code)
    except Exception as error:  # of an optimizer, a tracker, a kernel: libraries have no common class
        if is_out_of_memory(error):
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            _end(f"MemoryExhausted: {said} {SMALLER_STEP}", MemoryExhausted.exit_code)
        if error_number(error) in _DISK_ERRORS:
            _end(f"DiskFailure: {error}. Free space there, or have it written elsewhere.", DiskFailure.exit_code)
        if _is_missing_package(error):
            _end(f"MissingDependencyError: {error}", 1)
        raise


def _is_missing_package(error: Exception) -> bool:
    """Returns whether the message alone says what to do: a package is to be installed."""
    if not isinstance(error, ImportError | RuntimeError):
        return False
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


def drop_output(descriptor: int) -> None:
    """Sends what is written to `descriptor` from now on to nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != descriptor:  # which was closed
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


@contextmanager
def outliving_readers() -> Iterator[None]:
    """Drops what stdout or stderr cannot write, and all later output of that stream: a run outlives `| tee`.

    The streams stay the objects that they are, which handlers of logging and progress bars hold on to.
    """
    changed = []
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, TypeError, UnsupportedOperation, ValueError):  # none, not of a file, closed
            if "write" in vars(stream):  # around this one
                continue
            descriptor = stream.fileno()
            for name in ("write", "flush"):
                setattr(stream, name, partial(_attempt, getattr(stream, name), descriptor))
            changed.append(stream)
    try:
        yield
    finally:
        for stream in changed:
            with suppress(AttributeError, ValueError):  # it was taken back, or closed
                stream.flush()  # else Python ends with 120 where it cannot write what is left
                del stream.write, stream.flush


def _attempt(method: Callable[..., Any], descriptor: int, *given: Any) -> Any:
    try:
        return method(*given)
    except OSError:
        drop_output(descriptor)
        return len(given[0]) if given else None
