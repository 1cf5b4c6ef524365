"""The folder of a run: fit to be written to, nobody else's, and this run's alone until it ends (`.run.lock`)."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import LeaseCompromise, SoftFileLease, Timeout

from ..errors import FolderError
from ..files import StrPath, is_disk_failure
from ..processes import do_on_main
from .compare import refuse_asked
from .finished_model import MODEL_MANIFEST, WEIGHTS

LOCK = ".run.lock"
LEASE_S = 60.0  # an owner on another machine that gave no sign for so long is gone
_OURS = (MODEL_MANIFEST, "plan.json", "run.log", "checkpoint-*/manifest.json")  # what a run leaves in its course
_REPLACED = re.compile(
    rf"{WEIGHTS}|pytorch_model.*\.bin|(adapter_)?config\.json|trainer_state\.json|all_results\.json|predictions\.csv|"
    r"report\.(html|md)"
)

logger = logging.getLogger(__name__)


@contextmanager
def run_folder(args: Any) -> Iterator[None]:
    """Makes `output_dir`, and keeps it for this run until the block ends; for all processes of a recipe.

    Raises:
        CheckpointError: the run is to go on from a checkpoint that contradicts what the user asks for.
        FolderError: on all processes: no folder can be there, another run is in it, or what is in it is not a run's.
            Nothing was touched.
        DiskFailure: the disk is full or broken.
    """
    do_on_main(args, lambda: check_folder(args.output_dir))
    with lock_folders(args):
        do_on_main(args, lambda: refuse_asked(args))
        yield


@contextmanager
def lock_folders(args: Any, together: bool = True) -> Iterator[None]:
    """Keeps other processes' runs out of `output_dir` and of its folder in `local_checkpoint_dir`.

    A disk that refuses costs the lock and a warning, no more: saves have rules of their own for that.

    Args:
        args: `FastTrainingArguments`.
        together: all processes of the run enter, and are refused together; else the main one acts, and raises, alone.

    Raises:
        FolderError: another run has one of them; this one then has none.
    """
    folders = [Path(args.output_dir)]
    if args.local_checkpoint_dir is not None:
        folders.append(local_folder(args.local_checkpoint_dir, args.output_dir))
    with ExitStack() as locks:

        def enter() -> None:
            for folder in folders:
                try:
                    locks.enter_context(lock_folder(folder))
                except OSError as error:
                    logger.warning("%s is not locked against other runs: %s.", folder, error.strerror)

        if together:
            do_on_main(args, enter)
        elif args.process_index == 0:
            enter()
        yield


@contextmanager
def lock_folder(folder: StrPath) -> Iterator[None]:
    """Keeps other processes' runs out of `folder` while entered. Runs of one process share it, one in another.

    What a killed process of this machine left is taken over at once. Of another machine, or another container, it
    cannot be told whether it lives: its lock is taken over where it is not renewed in LEASE_S.

    Raises:
        FolderError: another run holds it; one line, with its process and machine.
        OSError: the folder cannot be made, or the disk refuses.

    Cost: one file, and a thread that renews its time every 20 seconds.
    """
    lease = _lease(folder)
    if lease.is_locked:  # by a block around this one
        yield
        return
    if lease.is_lock_held_by_us:  # left where the disk refused its removal
        lease.force_break()
    for wait_s in (0.0, 1.5 * LEASE_S):
        try:
            lease.acquire(timeout=wait_s, poll_interval=LEASE_S / 100)
            break
        except Timeout:
            if wait_s or _is_of_this_machine(lease):
                raise FolderError(_refusal(folder, lease)) from None
            logger.warning("%s Waiting %.0f s for a sign of it.", _refusal(folder, lease), LEASE_S)
    try:
        yield
    finally:
        with suppress(OSError):  # a folder that is gone, a disk that refuses: nobody lives behind the lock
            lease.release()


def find_other_run(folder: StrPath) -> str | None:
    """Describes another process's run that has `folder`, for a refusal; None without one.

    Removes what a dead one left.
    """
    lease = _lease(folder)
    if lease.owner is None or lease.is_lock_held_by_us:
        return None
    if not lease.is_locked:  # else another one took it from this process
        try:
            lease.acquire(timeout=0)
            lease.release()
            return None
        except Timeout:
            pass
        except OSError:
            return None
    return _refusal(folder, lease)


def _lease(folder: StrPath) -> SoftFileLease:
    """Returns the one lease of this process for the folder."""
    return SoftFileLease(
        Path(os.path.realpath(folder), LOCK),
        lease_duration=LEASE_S,
        on_compromise=_say_lost,
        is_singleton=True,
        thread_local=False,
    )


def _say_lost(lost: LeaseCompromise) -> None:
    logger.error("%s is lost (%s): another run may take the folder. This one goes on.", lost.lock_file, lost.reason)


def _is_of_this_machine(lease: SoftFileLease) -> bool:
    """Returns whether the owner is a process of this machine, which runs: what a dead one left is taken over before."""
    return lease.owner is not None and lease.owner.hostname.partition("?")[0] == socket.gethostname()


def _refusal(folder: StrPath, lease: SoftFileLease) -> str:
    owner = lease.owner
    if owner is None:
        return f"{lease.lock_file} names no run. Delete it if no run is in the folder, or choose another --output_dir."
    host = owner.hostname.partition("?")[0]  # without the numbering of processes
    return (
        f"{folder} is in use by another run: process {owner.pid} on {host}. Wait for it, end it, or give this run "
        "another folder (--output_dir, --local_checkpoint_dir)."
    )


def check_folder(path: StrPath) -> None:
    """Makes the output folder of a run where there is none, and refuses one that was made for something else.

    Raises:
        FolderError: as of `make_folder`; it holds a model or results, and nothing that a run of ours leaves beside.
        OSError: the disk is full or broken.
    """
    place = Path(path)
    make_folder(path)
    replaced = sorted(entry.name for entry in place.iterdir() if _REPLACED.fullmatch(entry.name))
    if replaced and not any(next(place.glob(sign), None) for sign in _OURS):
        raise FolderError(
            f"{path} holds {', '.join(replaced)}, which a run would overwrite, and nothing that a run of ours leaves "
            f"({', '.join(_OURS)}). Choose another --output_dir, or move them away. Nothing was touched."
        )


def make_folder(path: StrPath, option: str = "--output_dir") -> None:
    """Makes a folder where there is none; `option` is what a user changes to have another.

    Raises:
        FolderError: there is a file, this user may not write there, or its name is no name for a folder.
        OSError: the disk is full or broken.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        if is_disk_failure(error) and not isinstance(error, PermissionError):
            raise
        text = f"{os.fspath(path)!r} cannot be the output folder: {error.strerror}. Choose another {option}."
        raise FolderError(text) from error


def local_folder(local_checkpoint_dir: str, output_dir: str) -> Path:
    """Returns where checkpoints of `output_dir` are kept locally: a folder of its own, so that runs share the disk."""
    place = Path(output_dir).absolute()
    return Path(local_checkpoint_dir).expanduser() / f"{place.name}-{hashlib.sha256(bytes(place)).hexdigest()[:8]}"
