"""Locks of other processes' runs: as those would write them, and as living processes do."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_ext.checkpoints.run_folder.folder_lock import LOCK, hold_folder
from hf_ext.owners import describe_process


def plant_lock(folder: Path, pid: int = 0, age_s: float = 0.0, **change) -> Path:
    """Writes the lock of process `pid` (0: the parent of this one), last renewed `age_s` seconds ago."""
    pid = pid or os.getppid()
    text = Path(f"/proc/{pid}/stat").read_text() if Path(f"/proc/{pid}").exists() else None
    started = int(text.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK") if text else 0.0
    owner = {**describe_process(), "pid": pid, "started": started, "since": "2026-01-02 03:04:05 UTC", "id": "x"}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    path.write_text(json.dumps({**owner, "command": "recipes/max_speed.py --seed 1", **change}))
    time = path.stat().st_mtime - age_s
    os.utime(path, (time, time))
    return path


@contextmanager
def other_run(folder: Path, hold=hold_folder) -> Iterator[int]:
    """A forked process that holds `folder` until the block ends or it is killed; gives its number."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kept = hold(folder)
            os.write(writing, b"1")
            while kept:
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
