"""Locks of other processes' runs: as those would write them, and as living processes do."""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import SoftFileLease
from inside import LOCK, lock_folder

from hf_ext.checkpoints.run_lock import LEASE_S


def plant_lock(folder: Path, pid: int = 0, host: str = "", start: int = 0) -> Path:
    """Writes the lock of process `pid` (0: the parent of this one), begun at `start`, of this machine or `host`."""
    with tempfile.TemporaryDirectory() as place, SoftFileLease(Path(place, LOCK), lease_duration=LEASE_S) as lease:
        fields = dict(line.split("=", 1) for line in Path(lease.lock_file).read_text().splitlines()[1:])
    del fields["start"]
    fields |= {"pid": str(pid or os.getppid()), "host": host or fields["host"]}
    fields |= {"start": str(start)} if start else {}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    path.unlink(missing_ok=True)
    path.write_text("filelock/2\n" + "".join(f"{name}={value}\n" for name, value in fields.items()))
    return path


@contextmanager
def other_run(folder: Path) -> Iterator[int]:
    """A forked process that holds `folder` until the block ends or it is killed; gives its number."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with lock_folder(folder):
                os.write(writing, b"1")
                while True:
                    signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 1) == b"1"
    os.close(reading)
    try:
        yield pid
    finally:
        kill(pid)


def kill(pid: int) -> None:
    """Kills a child, and waits until the system has forgotten it."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
