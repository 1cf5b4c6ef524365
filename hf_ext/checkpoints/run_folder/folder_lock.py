"""One run per folder: a file that says which process writes there, and that no crash leaves behind as a lock.

A process of this machine is asked whether it lives, and a number that was given out anew is told by its start time.
One of another machine, on a disk that both see, cannot be asked: a thread renews its lock every 15 seconds, and one
that was not renewed for two minutes is taken over.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shlex
import stat
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...commands import program_words
from ...errors import FolderError
from ...owners import describe_process, is_alive
from ...reporting.run_record import without_tokens
from .copied_lock import is_copied

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".run.lock"
BEAT_S = 15.0
STALE_S = 120.0
_TURN_S = 10.0  # to wait for a process that takes or leaves the lock, which is the work of a moment
_COMMAND_CHARS = 300
_MAX_BYTES = 1 << 16  # a file above it is no lock
_UNKNOWN = {"host": "an unknown machine", "place": "", "pid": "unknown", "started": 0.0, "since": "", "command": ""}
_OPTIONS = "(--output_dir, --local_checkpoint_dir)"
_FOREIGN = {**_UNKNOWN, "host": "none: the file is no lock"}

logger = logging.getLogger(__name__)


class Hold:
    """A share in the lock of a folder; the last one of a process that is released unlocks it. See `hold_folder`."""

    def __init__(self, lock: _Lock):
        self._lock: _Lock | None = lock

    def release(self) -> None:
        """Does nothing the second time, nor in a process that was forked from the one that holds the folder."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.leave()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *error: Any) -> None:
        self.release()


def hold_folder(folder: str | os.PathLike[str]) -> Hold:
    """Keeps other processes' runs out of `folder`, which is there, until the hold is released or this process ends.

    Runs of one process share the folder: they come one after the other.

    Raises:
        FolderError: another run holds it; one line, with its process, machine, start and command.
        OSError: the disk refuses.

    Cost: one file, and one thread that renews its time every 15 seconds.
    """
    place = os.path.realpath(folder)
    with _guard:
        lock = _held.get((os.getpid(), place))
        if lock is None:
            lock = _held[os.getpid(), place] = _Lock(Path(place), Path(folder))
        lock.num_holds += 1
    return Hold(lock)


def find_other_run(folder: str | os.PathLike[str]) -> str | None:
    """What a refusal says of another process's run that holds `folder`; None without one."""
    path = Path(folder) / LOCK
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return None
        with path.open("rb") as file:
            return _refusal(_parse(file.read(_MAX_BYTES + 1)), path, Path(folder))
    except FileNotFoundError:
        return None


class _Lock:
    """This process's lock of one folder, from taking it until the last hold is released."""

    def __init__(self, folder: Path, named: Path):
        self._path, self._named = folder / LOCK, named
        self._pid = os.getpid()
        self._owner = {**_describe_run(), "held": str(folder)}
        self._ended = threading.Event()
        self.num_holds = 0
        self._take()
        threading.Thread(target=self._beat, name="folder-lock", daemon=True).start()

    def _take(self) -> None:
        with _turn(self._path) as descriptor:
            refusal = _refusal(_parse(os.pread(descriptor, _MAX_BYTES + 1, 0)), self._path, self._named)
            if refusal:
                raise FolderError(refusal)
            text = json.dumps(self._owner).encode()
            try:
                os.pwrite(descriptor, text, 0)
                os.ftruncate(descriptor, len(text))
            except OSError:  # a full disk
                os.unlink(self._path)
                raise

    def leave(self) -> None:
        if os.getpid() != self._pid:
            return
        with _guard:
            self.num_holds -= 1
            if self.num_holds:
                return
            _held.pop((self._pid, str(self._path.parent)), None)
        self._ended.set()
        with suppress(OSError, FolderError):  # a folder that is gone; a disk that refuses: nobody lives behind it
            if self._path.is_file():
                with _turn(self._path) as descriptor:
                    if _parse(os.pread(descriptor, _MAX_BYTES + 1, 0)) == self._owner:
                        os.unlink(self._path)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                with self._path.open("rb") as file:
                    owner = _parse(file.read(_MAX_BYTES + 1))
                if owner not in (None, self._owner):
                    logger.error("%s", find_other_run(self._named) or f"{self._path} was taken over by another run.")
                    return
                os.utime(self._path)
            except OSError:  # a disk that does not answer now may do so later
                continue


_held: dict[tuple[int, str], _Lock] = {}
_guard = threading.RLock()


def _describe_run() -> dict[str, Any]:
    command = " ".join(shlex.join([*program_words(), *without_tokens(sys.argv[1:])]).split())
    shown = command if len(command) <= _COMMAND_CHARS else f"{command[:_COMMAND_CHARS]}..."
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return {**describe_process(), "since": since, "command": shown, "id": uuid.uuid4().hex}


def _parse(content: bytes) -> dict[str, Any] | None:
    """The owner that a lock names; None where it names none, as one whose process was killed in taking it.

    `_UNKNOWN` of a damaged lock, as a power cut leaves it: in part, or zero bytes. `_FOREIGN` of any other file.
    """
    if not content:
        return None
    written = content.strip(b"\0")
    if len(content) > _MAX_BYTES or (written and not written.startswith(b"{")):
        return dict(_FOREIGN)
    try:
        owner, _ = json.JSONDecoder().raw_decode(content.decode())  # the end of a longer one may stand behind it
        is_alive(owner)
        return {**_UNKNOWN, **owner}
    except (ValueError, KeyError, TypeError):
        return dict(_UNKNOWN)


def _refusal(owner: Mapping[str, Any] | None, path: Path, folder: Path) -> str | None:
    """Why the folder cannot be had; None where nobody holds it but, perhaps, this process."""
    if owner is None or (owner["pid"] == os.getpid() and is_alive(owner)):
        return None
    if owner == _FOREIGN:
        return f"{path} is no lock of a run. Move it away, or give this run another folder {_OPTIONS}."
    alive = is_alive(owner)
    silent_s = _silence_s(path) if alive is None else 0.0
    if alive is False or silent_s >= STALE_S or (alive and is_copied(path, owner)):
        return None
    free_s = STALE_S - silent_s
    if owner == _UNKNOWN:
        return (
            f"{path} is damaged and names no run. It was changed {silent_s:.0f} s ago and the folder is free in "
            f"{free_s:.0f} s; delete it if no run is there, or give this run another folder {_OPTIONS}."
        )
    remote = f" It was last heard of {silent_s:.0f} s ago; if it is gone, the folder is free in {free_s:.0f} s."
    return (
        f"{folder} is in use by another run: process {owner['pid']} on {owner['host']}, since {owner['since']} "
        f"({owner['command']}).{remote if alive is None else ''} Wait for it, end it, or give this run another folder "
        f"{_OPTIONS}."
    )


def _silence_s(path: Path) -> float:
    """Seconds since a lock was renewed, by the clock of the disk that it is on, which need not be this machine's."""
    with tempfile.TemporaryFile(dir=path.parent) as probe:
        os.write(probe.fileno(), b"now")
        now = os.fstat(probe.fileno()).st_mtime
    return abs(now - path.stat().st_mtime)


@contextmanager
def _turn(path: Path) -> Iterator[int]:
    """The lock's file, opened, while no other process takes or leaves the lock.

    Where the file system has no `flock`, two that start in the same instant may both have the folder; the one that was
    overwritten says so at its next beat.
    """
    ends = time.monotonic() + _TURN_S
    while True:
        descriptor = _open(path)
        try:
            is_mine = _try_turn(descriptor) and _is_there(path, descriptor)  # else it was left meanwhile
            if is_mine:
                yield descriptor
                return
        finally:
            if fcntl is not None:
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process may hold the descriptor too
            os.close(descriptor)
        if time.monotonic() > ends:
            raise FolderError(f"{path}: another process has been taking it for {_TURN_S:.0f} s. End that process.")
        time.sleep(0.02)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if isinstance(error, PermissionError) and (refusal := find_other_run(path.parent)):  # of another user
            raise FolderError(refusal) from error
        if error.errno not in (errno.ELOOP, errno.EISDIR):
            raise
        raise FolderError(f"{path}: expected a file that a run locks its folder with; remove what is there.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FolderError(f"{path}: expected a file that a run locks its folder with; remove what is there.")
    return descriptor


def _try_turn(descriptor: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # network folders without it
        return True
    return True


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
