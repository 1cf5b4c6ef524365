"""Checkpoints whose bytes tell their step, what a folder holds, and targets that wait or fail."""

import os
import threading
import time
from pathlib import Path

from hf_ext.checkpoints.manifest import check_files
from hf_ext.checkpoints.mirror import Mirror, copy_file
from hf_ext.checkpoints.store import CheckpointStore


def save(store: CheckpointStore, step: int, num_bytes: int = 5000) -> None:
    """Commits checkpoint `step`: three files, one of them in a subfolder, whose bytes tell the step."""
    staging = store.stage(step)
    (staging.path / "tower").mkdir()
    for name in ("model.safetensors", "optimizer.pt", "tower/config.json"):
        (staging.path / name).write_bytes(f"{step} {name} ".encode() * (num_bytes // len(f"{step} {name} ")))
    staging.commit(epoch=step / 10, facts={"seed": 7})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def steps(store: CheckpointStore) -> list[int]:
    """Steps at the store, each of which must verify."""
    stored = store.checkpoints()
    assert [check_files(one.path, one.manifest) for one in stored] == [[]] * len(stored)
    return [one.step for one in stored]


def wait_for_failure(mirror: Mirror) -> None:
    deadline = time.monotonic() + 20
    while not mirror.num_failures:
        assert time.monotonic() < deadline, "no attempt failed"
        time.sleep(0.01)


class Gate:
    """A target whose every file waits for `open()`; `begun` is set when the first one arrives."""

    def __init__(self):
        self.begun, self._may_go = threading.Event(), threading.Event()

    def __call__(self, source, target, report):
        self.begun.set()
        assert self._may_go.wait(20)
        copy_file(source, target, report)

    def open(self):
        self._may_go.set()


class Failing:
    """A target that raises `error` for the first `times` files of it, after `num_bytes` bytes of each."""

    def __init__(self, error: OSError, times: int, num_bytes: int = 10):
        self.error, self.left, self.num_bytes = error, times, num_bytes

    def __call__(self, source, target, report):
        if self.left > 0:
            self.left -= 1
            target.write_bytes(source.read_bytes()[: self.num_bytes])
            raise self.error
        copy_file(source, target, report)
