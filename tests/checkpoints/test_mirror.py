"""The slow second copy: whole and verified or absent, whatever the target does, and training never waits for it."""

import errno
import logging
import shutil
import threading
import time
from pathlib import Path

import pytest
from mirror_targets import Failing, Gate, contents, names, save, steps, wait_for_failure

from hf_ext.checkpoints.manifest import MANIFEST
from hf_ext.checkpoints.mirror import Mirror, copy_file
from hf_ext.checkpoints.store import CheckpointStore
from hf_ext.errors import CheckpointError


@pytest.fixture
def local(tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "local", run_id="run-a")


@pytest.fixture
def drive(tmp_path) -> Path:
    return tmp_path / "drive"


def test_a_copy_is_the_local_checkpoint_byte_for_byte(local, drive):
    save(local, 10)
    mirror = Mirror(local, drive)
    mirror.copy(10)
    assert mirror.wait()
    assert names(drive) == ["checkpoint-10"]
    assert contents(drive / "checkpoint-10") == contents(local.folder / "checkpoint-10")
    assert len(contents(drive / "checkpoint-10")) == 4
    assert steps(mirror.target) == [10]
    assert (mirror.num_failures, mirror.last_failure, mirror.waiting) == (0, None, ())


def test_copy_returns_at_once_and_pins_the_local_checkpoint_until_it_is_done(local, drive):
    save(local, 10)
    gate = Gate()
    mirror = Mirror(local, drive, gate)
    began = time.monotonic()
    mirror.copy(10)
    assert time.monotonic() - began < 10  # the gate stays shut for longer
    assert gate.begun.wait(20)
    assert mirror.waiting == (10,)
    assert not local.delete(10)
    assert not local.strip(10, ["optimizer.pt"])
    assert names(drive) == [".staging"]  # not under its name before it is whole
    gate.open()
    assert mirror.wait()
    assert local.delete(10)
    assert steps(mirror.target) == [10]


def test_of_those_that_wait_only_the_newest_is_copied(local, drive):
    gate = Gate()
    mirror = Mirror(local, drive, gate)
    for step in (1, 2, 3, 4):
        save(local, step)
        mirror.copy(step)
        assert gate.begun.wait(20)
    gate.open()
    assert mirror.wait()
    assert steps(mirror.target) == [1, 4]


@pytest.mark.parametrize(
    ("best", "copied"),
    [({2}, [1, 2, 4]), ({2, 3}, [1, 3, 4]), ({2, 3, 4}, [1, 4]), ({1}, [1, 4])],
)
def test_the_last_best_is_copied_although_newer_ones_wait(local, drive, best, copied):
    gate = Gate()
    mirror = Mirror(local, drive, gate)
    for step in (1, 2, 3, 4):
        save(local, step)
        mirror.copy(step, is_best=step in best)
        assert gate.begun.wait(20)
    gate.open()
    assert mirror.wait()
    assert steps(mirror.target) == copied


def test_a_copy_that_is_there_already_is_not_made_again(local, drive):
    save(local, 10)
    first = Mirror(local, drive)
    first.copy(10)
    assert first.wait()
    again = Mirror(local, drive, Failing(OSError(errno.EIO, "was read again"), times=99))
    again.copy(10)
    assert again.wait()
    assert again.num_failures == 0


def test_a_checkpoint_saved_anew_replaces_its_copy(local, drive):
    save(local, 10, num_bytes=3000)
    mirror = Mirror(local, drive)
    mirror.copy(10)
    assert mirror.wait()
    save(local, 10, num_bytes=6000)
    mirror.copy(10)
    assert mirror.wait()
    assert contents(drive / "checkpoint-10") == contents(local.folder / "checkpoint-10")
    assert names(drive) == ["checkpoint-10"]


def test_what_another_run_left_at_the_target_is_moved_and_never_deleted(local, drive):
    other = CheckpointStore(drive, run_id="run-b")
    save(other, 10, num_bytes=300)
    save(local, 10)
    save(local, 20)
    mirror = Mirror(local, drive)
    mirror.copy(10)
    mirror.delete(5)
    assert mirror.wait()
    mirror.copy(20)
    assert mirror.wait()
    assert names(drive) == ["checkpoint-10", "checkpoint-20", "previous-checkpoint-10"]
    assert b"10 model" in (drive / "previous-checkpoint-10" / "model.safetensors").read_bytes()


def test_copies_follow_a_run_id_that_is_adopted_later(local, drive):
    mirror = Mirror(local, drive)
    local.adopt("run-before-the-crash")
    save(local, 10)
    save(local, 20)
    mirror.copy(10)
    assert mirror.wait()
    mirror.copy(20)
    mirror.delete(10)
    assert mirror.wait()
    assert [(one.step, one.run_id) for one in mirror.target.checkpoints()] == [(20, "run-before-the-crash")]


# Deletion


def test_deletion_waits_until_a_newer_checkpoint_is_at_the_target(local, drive):
    save(local, 10)
    save(local, 20)
    target = Failing(OSError(errno.EIO, "once"), times=0)
    mirror = Mirror(local, drive, target)
    mirror.copy(10)
    assert mirror.wait()
    mirror.delete(10)
    assert mirror.wait()
    assert steps(mirror.target) == [10]
    target.left = 1  # the copy that would replace it fails
    mirror.copy(20)
    wait_for_failure(mirror)
    assert steps(mirror.target) == [10]
    assert mirror.wait()
    assert steps(mirror.target) == [20]


def test_weights_alone_are_no_reason_to_delete_what_training_can_go_on_from(local, drive):
    save(local, 10)
    save(local, 20)
    save(local, 30)
    local.strip(20, ["optimizer.pt"])
    mirror = Mirror(local, drive)
    for step in (10, 20):
        mirror.copy(step)
        assert mirror.wait()
    mirror.delete(10)
    assert mirror.wait()
    assert steps(mirror.target) == [10, 20]
    mirror.copy(30)
    assert mirror.wait()
    assert steps(mirror.target) == [20, 30]


def test_a_deleted_checkpoint_is_no_longer_copied(local, drive):
    gate = Gate()
    mirror = Mirror(local, drive, gate)
    for step in (1, 2):
        save(local, step)
        mirror.copy(step, is_best=step == 2)
        assert gate.begun.wait(20)
    mirror.delete(2)
    assert mirror.waiting == ()
    gate.open()
    assert mirror.wait()
    assert steps(mirror.target) == [1]


def test_a_checkpoint_gone_locally_is_said_and_not_waited_for(local, drive, caplog):
    mirror = Mirror(local, drive)
    mirror.copy(10)
    assert mirror.wait()
    assert "checkpoint-10 was deleted before it was copied" in caplog.text


# Waiting


def test_wait_gives_up_after_its_time_and_tells_how_far_it_is(local, drive, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("hf_ext.checkpoints.mirror.LOG_EVERY_S", 0.05)
    save(local, 10, num_bytes=5_000_000)
    gate = threading.Event()

    def stall_after_the_first(source, target, report):
        copy_file(source, target, report)
        assert gate.wait(20)

    mirror = Mirror(local, drive, stall_after_the_first)
    mirror.copy(10)
    began = time.monotonic()
    assert not mirror.wait(timeout_s=0.3)
    assert 0.3 <= time.monotonic() - began < 15  # the gate stays shut for longer
    assert "Still copying" in caplog.text
    assert "checkpoint-10, 0.00 of 0.01 GB" in caplog.text
    assert "not finished after 0.3 s" in caplog.text
    gate.set()
    assert mirror.wait()


def test_wait_without_anything_to_copy_is_true_at_once(local, drive):
    assert Mirror(local, drive).wait()


# Which checkpoint a new process continues from


def test_the_newest_of_both_places_is_found(local, drive):
    save(local, 10)
    save(local, 20)
    mirror = Mirror(local, drive)
    mirror.copy(20)
    assert mirror.wait()
    assert mirror.find_newest().path == local.folder / "checkpoint-20"
    local.delete(20)
    assert mirror.find_newest().path == drive / "checkpoint-20"
    shutil.rmtree(local.folder)  # another machine
    assert Mirror(CheckpointStore(local.folder), drive).find_newest().path == drive / "checkpoint-20"


def test_no_checkpoint_in_either_place_is_none(local, drive):
    assert Mirror(local, drive).find_newest() is None


def test_a_damaged_copy_is_set_aside_for_an_older_one(local, drive):
    mirror = Mirror(local, drive)
    for step in (10, 20):
        save(local, step)
        mirror.copy(step)
        assert mirror.wait()
    shutil.rmtree(local.folder)
    (drive / "checkpoint-20" / "model.safetensors").write_bytes(b"half")
    assert mirror.find_newest().path == drive / "checkpoint-10"
    assert names(drive) == ["checkpoint-10", "damaged-checkpoint-20"]


def test_a_target_that_holds_nothing_newer_is_not_read(local, drive):
    save(local, 10)
    mirror = Mirror(local, drive)
    mirror.copy(10)
    assert mirror.wait()
    (drive / "checkpoint-10" / "model.safetensors").write_bytes(b"half")
    assert mirror.find_newest().path == local.folder / "checkpoint-10"
    assert names(drive) == ["checkpoint-10"]  # reading it would have set it aside


def test_a_target_that_cannot_be_read_is_an_error_and_not_a_new_start(local, drive):
    mirror = Mirror(local, drive)
    drive.rmdir()
    with pytest.raises(FileNotFoundError):
        mirror.find_newest()


@pytest.mark.parametrize("place", ["local", "local/copies", "."])
def test_a_target_in_or_around_the_local_folder_is_refused(local, tmp_path, place):
    with pytest.raises(CheckpointError, match="outside of"):
        Mirror(local, tmp_path / place)


def test_a_target_under_a_folder_that_does_not_exist_is_refused(local, tmp_path):
    with pytest.raises(CheckpointError, match="Mount the disk"):
        Mirror(local, tmp_path / "content" / "drive")
    assert not (tmp_path / "content").exists()


def test_training_with_rotation_never_leaves_the_target_without_a_checkpoint(local, drive):
    """60 saves faster than the target: what is visible there always verifies, and one is always there."""
    mirror = Mirror(local, drive, lambda *given: (time.sleep(0.003), copy_file(*given)))
    seen = []
    for step in range(1, 61):
        save(local, step, num_bytes=300)
        mirror.copy(step, is_best=step % 7 == 0)
        for stored in local.checkpoints()[:-2]:
            if stored.step != step // 7 * 7 and local.delete(stored.step):
                mirror.delete(stored.step)
        visible = [name for name in names(drive) if name.startswith("checkpoint")]
        assert visible or not seen
        seen += visible
        assert all((drive / name / MANIFEST).exists() or not (drive / name).exists() for name in visible)
    assert mirror.wait()
    assert steps(mirror.target)[-1] == 60
    assert 56 in steps(mirror.target)
    assert len(steps(mirror.target)) <= 4
    assert len(set(seen)) > 3
    assert mirror.num_failures == 0
