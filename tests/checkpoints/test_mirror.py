"""The slow second copy: whole and verified or absent, whatever the target does, and training never waits for it."""

import errno
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest

from hf_ext.checkpoints import mirror
from hf_ext.checkpoints.manifest import check_files
from hf_ext.checkpoints.mirror import MirroredStore
from hf_ext.checkpoints.store import CheckpointStore
from hf_ext.errors import CheckpointError

copy_file = mirror.copy_file


@pytest.fixture
def store(tmp_path) -> MirroredStore:
    return MirroredStore(tmp_path / "local", tmp_path / "drive")


@pytest.fixture
def drive(tmp_path) -> Path:
    return tmp_path / "drive"


def save(store, *steps):
    """Commits checkpoints of three files, one of them in a subfolder, whose bytes tell the step."""
    for step in steps:
        folder = store.stage(step)
        (folder / "tower").mkdir()
        for name in ("model.safetensors", "optimizer.pt", "tower/config.json"):
            (folder / name).write_bytes(f"{step} {name} ".encode() * 100)
        store.commit(step, step / 10, {"seed": 7})


def copied(store, best=None) -> list[int]:
    """Steps at the target once all is copied, each of which must verify."""
    assert store.finish_copies(best) is None
    assert [check_files(s.path, s.manifest) for s in store.target.checkpoints()].count([]) == len(
        store.target.checkpoints()
    )
    return [stored.step for stored in store.target.checkpoints()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Gate:
    """A target whose every file waits for `open`; `begun` is set when the first one arrives."""

    def __init__(self, monkeypatch):
        self.begun, self.open = threading.Event(), threading.Event()
        monkeypatch.setattr(mirror, "copy_file", self)

    def __call__(self, source, target):
        self.begun.set()
        assert self.open.wait(20)
        copy_file(source, target)


def test_a_copy_is_the_local_checkpoint_byte_for_byte(store, drive):
    save(store, 10)
    assert copied(store) == [10]
    assert os.listdir(drive) == ["checkpoint-10"]
    assert contents(drive / "checkpoint-10") == contents(store.path(10))
    assert len(contents(drive / "checkpoint-10")) == 4


def test_a_copy_is_made_beside_training_and_pins_the_local_checkpoint(store, drive, monkeypatch):
    gate = Gate(monkeypatch)
    save(store, 1)
    store.begin_copies(None)
    assert gate.begun.wait(20)
    assert not store.delete(1)
    assert os.listdir(drive) == [".staging"]  # not under its name before it is whole
    for step in (2, 3, 4):
        save(store, step)
        store.begin_copies(2)
    gate.open.set()
    assert copied(store, best=2) == [1, 2, 4]  # of those that waited, the newest and the best
    assert store.delete(1)


def test_nothing_is_deleted_at_the_target_before_it_holds_something_newer_to_continue_from(store, monkeypatch):
    save(store, 10, 20)
    store.begin_copies(None)
    assert copied(store) == [20]
    save(store, 30)
    store.delete(10)
    store.delete(20)
    failing = pytest.MonkeyPatch()
    failing.setattr(mirror, "copy_file", raising(errno.EIO))
    assert store.finish_copies(None) is not None
    assert [stored.step for stored in store.target.checkpoints()] == [20]
    failing.undo()
    assert copied(store) == [30]
    save(store, 40)
    assert copied(store, best=30) == [30, 40]
    emptied = []
    monkeypatch.setattr(os, "truncate", lambda path, size: emptied.append(path.name))
    store.delete(30)
    assert copied(store) == [40]
    assert "model.safetensors" in emptied  # the trash of a Drive counts what it holds


def raising(number):
    def fail(source, target):
        target.write_bytes(source.read_bytes()[:10])
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ENOTCONN, errno.ESTALE])
def test_a_failed_copy_leaves_nothing_half_is_said_and_made_up_for(store, drive, monkeypatch, number, caplog):
    save(store, 10)
    monkeypatch.setattr(mirror, "copy_file", raising(number))
    lacking = store.finish_copies(None)
    assert lacking.startswith(f"{drive} lacks the newest checkpoint, which is in {store.folder}: {drive} could not")
    assert os.strerror(number) in lacking
    assert lacking in [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert os.listdir(drive) == []
    monkeypatch.undo()
    assert copied(store) == [10]


def flip_a_bit(source, target):
    content = bytearray(source.read_bytes())
    content[len(content) // 2] ^= 4
    target.write_bytes(content)


def drop_a_file(source, target):
    if source.name != "config.json":
        copy_file(source, target)


@pytest.mark.parametrize(("bad_copy", "found"), [(flip_a_bit, "expected"), (drop_a_file, "found nothing")])
def test_a_target_that_writes_something_else_never_gets_a_checkpoint(store, drive, monkeypatch, bad_copy, found):
    save(store, 10)
    monkeypatch.setattr(mirror, "copy_file", bad_copy)
    assert found in store.finish_copies(None)
    assert os.listdir(drive) == []


def test_a_drive_that_is_gone_is_said_and_not_made_anew(store, drive):
    save(store, 10)
    drive.rmdir()
    assert "is its disk still mounted?" in store.finish_copies(None)
    assert not drive.exists()
    with pytest.raises(FileNotFoundError):  # it might hold what a new start would go past
        store.find_newest()


def test_what_another_run_left_at_the_target_is_moved_and_never_deleted(store, drive):
    save(CheckpointStore(drive, "other"), 10)
    save(store, 10)
    assert copied(store) == [10]
    assert sorted(os.listdir(drive)) == ["checkpoint-10", "previous-checkpoint-10"]


# --- both folders together ------------------------------------------------------------------------------------------


def test_a_run_on_another_machine_finds_the_newest_at_the_target(store, drive):
    save(store, 10, 20)
    assert copied(store) == [20]
    assert store.find_newest().path == store.path(20)
    shutil.rmtree(store.folder)
    again = MirroredStore(store.folder, drive)
    assert again.find_newest().path == again.locate(20) == drive / "checkpoint-20"
    assert again.has(drive / "checkpoint-20")
    again.adopt(store.run_id)
    save(again, 30)
    assert copied(again) == [30]


def test_a_target_is_read_only_where_it_has_something_newer_and_damage_there_is_set_aside(store, drive):
    save(store, 10)
    copied(store)
    (drive / "checkpoint-10" / "model.safetensors").write_bytes(b"half")
    assert store.find_newest().path == store.path(10)
    assert os.listdir(drive) == ["checkpoint-10"]
    store.delete(10)
    assert store.find_newest() is None
    assert os.listdir(drive) == ["damaged-checkpoint-10"]


def test_what_is_newer_is_set_aside_in_both_folders(store, drive):
    save(store, 10, 20)
    copied(store)
    store.set_aside_after(10)
    assert store.locate(20) is None
    assert os.listdir(drive) == ["previous-checkpoint-20"]


@pytest.mark.parametrize(("place", "text"), [("local", "outside of"), ("local/in", "outside of"), (".", "outside of")])
def test_a_target_in_or_around_the_local_folder_is_refused(tmp_path, place, text):
    with pytest.raises(CheckpointError, match=text):
        MirroredStore(tmp_path / "local", tmp_path / place)


def test_a_target_under_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="Mount the disk"):
        MirroredStore(tmp_path / "local", tmp_path / "content" / "drive")
    assert not (tmp_path / "content").exists()
