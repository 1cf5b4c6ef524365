"""kill -9 before every single file operation of a run that saves, strips and deletes."""

import itertools
import os
import signal
import sys
from pathlib import Path

import pytest
from other_runs import kill, other_run

from hf_ext.checkpoints.manifest import Manifest, check_files, hash_file, verify
from hf_ext.checkpoints.mirror import MirroredStore
from hf_ext.checkpoints.run_lock import LOCK
from hf_ext.checkpoints.store import CheckpointStore
from hf_ext.errors import FolderError

LAST_STEP = 40
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def save(store: CheckpointStore, step: int) -> None:
    write_files(store.stage(step), step)
    store.commit(step, step / 10, {})


def save_in_place(store: CheckpointStore, step: int) -> None:
    """The broken twin: as stock Trainer, with a manifest at the end."""
    folder = store.path(step)
    folder.mkdir(parents=True, exist_ok=True)
    write_files(folder, step)
    files = {path.name: hash_file(path) for path in folder.iterdir() if path.name != "manifest.json"}
    Manifest(store.run_id, step, step / 10, {}, files).write(folder)


def write_files(folder: Path, step: int) -> None:
    (folder / "model.safetensors").write_bytes(bytes([step]) * 1000)
    (folder / "progress.json").write_text(str(step))


def train(folder: Path, report, save=save) -> None:
    """Saves every 10 steps from the newest checkpoint on; keeps two."""
    store = CheckpointStore(folder, "run")
    store.sweep()
    newest = store.find_newest()
    rotate(store)
    for step in range(newest.step + 10 if newest else 10, LAST_STEP + 1, 10):
        save(store, step)
        report(step)
        rotate(store)


def rotate(store: CheckpointStore) -> None:
    steps = [stored.step for stored in store.checkpoints()]
    for step in steps[:-2]:
        store.delete(step)


def train_mirrored(folder: Path, report, save=save) -> None:
    """The same, with a copy of the newest in `folder / "drive"` after each save."""
    store = MirroredStore(folder / "local", folder / "drive")
    store.sweep()
    newest = store.find_newest()
    store.adopt("run")
    for step in range(newest.step + 10 if newest else 10, LAST_STEP + 1, 10):
        save(store, step)
        rotate(store)
        store.finish_copies(None)
        report(step)
    store.finish_copies(None)


def run_until(kill_at: int, folder: Path, save=save, train=train, within: str = "") -> tuple[int, bool]:
    """Trains in a process killed before its file operation `kill_at`; (last step it reported, whether it ended)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            operations = itertools.count(1)

            def kill(event, args):
                if event in OPERATIONS and str(folder / within) in str(args[0]) and next(operations) == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(kill)
            train(folder, lambda step: os.write(writing, bytes([step])), save)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        reported = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"the run failed with {status} when it was killed at {kill_at}"
    return max(reported, default=0), status == 0


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def find_faults(folder: Path, reported: int) -> list[str]:
    """What a killed run left that a later one could not live with."""
    store = CheckpointStore(folder, "run")
    store.sweep()
    newest = store.find_newest()
    found = newest.step if newest else 0
    faults = [] if found >= reported else [f"checkpoint-{reported} was committed, found {found}"]
    faults += [name for name in os.listdir(folder) if not name.startswith(("checkpoint-", "previous-"))]
    for stored in store.checkpoints():
        faults += check_files(stored.path, stored.manifest)
        faults += [name for name in os.listdir(stored.path) if name not in {*stored.manifest.files, "manifest.json"}]
    return faults


def count_faults(tmp_path: Path, save=save, every=1) -> tuple[int, int, int]:
    """(kills, kills that left a fault, kills after which a restart ended with other files than a run left alone)."""
    train(tmp_path / "alone", print, save)
    alone = contents(tmp_path / "alone")
    assert "checkpoint-40/model.safetensors" in alone
    faulty = different = 0
    for kills, kill_at in enumerate(itertools.count(1, every)):
        folder = tmp_path / str(kill_at)
        make_foreign(folder)
        reported, ended = run_until(kill_at, folder, save)
        if ended:
            return kills, faulty, different
        faulty += bool(find_faults(folder, reported))
        train(folder, print, save)
        after = contents(folder)
        foreign = after.pop("previous-checkpoint-30/thesis.txt", None) or after.pop("checkpoint-30/thesis.txt", None)
        different += after != alone or foreign != b"not ours"


def make_foreign(folder: Path) -> None:
    (folder / "checkpoint-30").mkdir(parents=True)
    (folder / "checkpoint-30" / "thesis.txt").write_text("not ours")


@pytest.fixture
def no_fsync(monkeypatch):
    """A kill loses no writes, and the disk would take a minute."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_kill_before_any_file_operation_loses_nothing_and_leaves_nothing(tmp_path, capsys, no_fsync, every):
    kills, faulty, different = count_faults(tmp_path, every=every)
    with capsys.disabled():
        print(f"\ncheckpoint store: {kills} kills, {kills - faulty} recovered, {kills - different} ended equal")
    assert kills > 100 // every
    assert (faulty, different) == (0, 0)


@pytest.mark.parametrize("every", [27, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_kill_while_copying_leaves_a_copy_whole_or_absent_and_the_next_run_makes_up_for_it(every, tmp_path, no_fsync):
    for kill_at in itertools.count(1, every):
        drive = tmp_path / str(kill_at) / "drive"
        drive.parent.mkdir()
        reported, ended = run_until(kill_at, drive.parent, train=train_mirrored, within="drive")
        copies = [verify(path)[1] for path in drive.glob("checkpoint-*")]
        assert [problems for problems in copies if problems] == []
        assert CheckpointStore(drive).find_newest().step >= reported if reported else True
        train_mirrored(drive.parent, print)
        assert CheckpointStore(drive).find_newest().step == LAST_STEP
        assert [name for name in os.listdir(drive) if not name.startswith("checkpoint-")] == []
        if ended:
            break
    assert kill_at > 100


def test_the_same_kills_find_that_saving_in_place_loses_checkpoints(tmp_path, no_fsync):
    kills, faulty, different = count_faults(tmp_path, save_in_place, every=6)
    assert kills > 7
    assert faulty > 2
    assert different > 2


def test_what_another_process_is_writing_is_left_until_that_process_is_dead(tmp_path):
    store = CheckpointStore(tmp_path, "mine")
    with other_run(tmp_path) as pid:
        store.staging_path(20).mkdir(parents=True)
        (store.staging_path(20) / "model.safetensors").write_bytes(b"half")
        store.sweep()
        assert sorted(os.listdir(tmp_path)) == [LOCK, ".staging"]
        with pytest.raises(FolderError, match=f"process {pid} on .* another folder"):
            store.stage(20)
        kill(pid)
        store.sweep()
        assert os.listdir(tmp_path) == []
