"""Whatever the target does, it never holds half a checkpoint, and every failure is said and mended later."""

import errno
import logging
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from file_limit import file_limit
from mirror_targets import Failing, names, save, steps, wait_for_failure

from hf_ext.checkpoints.manifest import check_files
from hf_ext.checkpoints.mirror import Mirror, copy_file
from hf_ext.checkpoints.store import CheckpointStore
from hf_ext.disk import used_bytes


@pytest.fixture
def local(tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "local", run_id="run-a")


@pytest.fixture
def drive(tmp_path) -> Path:
    return tmp_path / "drive"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ENOTCONN, errno.ESTALE])
def test_a_failed_copy_is_reported_and_made_with_the_next_one(local, drive, caplog, number):
    save(local, 10)
    save(local, 20)
    mirror = Mirror(local, drive, Failing(OSError(number, os.strerror(number)), times=1))
    mirror.copy(10, is_best=True)
    wait_for_failure(mirror)
    assert mirror.waiting == (10,)
    assert names(drive) == []  # nothing half
    assert os.strerror(number) in caplog.text
    assert str(drive) in caplog.text
    assert "bytes are needed" in mirror.last_failure
    mirror.copy(20)
    assert mirror.wait()
    assert steps(mirror.target) == [10, 20]
    assert mirror.num_failures == 1


def test_wait_tries_once_more_and_says_what_is_still_missing(local, drive, caplog):
    save(local, 10)
    mirror = Mirror(local, drive, Failing(OSError(errno.ENOSPC, "No space left"), times=2))
    mirror.copy(10)
    wait_for_failure(mirror)
    assert not mirror.wait()
    assert mirror.num_failures == 2
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "[10]" in errors[0]
    assert str(local.folder) in errors[0]
    assert "No space left" in errors[0]
    assert mirror.wait()  # the third attempt
    assert steps(mirror.target) == [10]


def shorten(source, target, report):
    target.write_bytes(source.read_bytes()[:-1])


def flip_a_bit(source, target, report):
    content = bytearray(source.read_bytes())
    content[len(content) // 2] ^= 4
    target.write_bytes(content)


def drop_a_file(source, target, report):
    if source.name != "config.json":
        copy_file(source, target, report)


def write_zeros(source, target, report):
    target.write_bytes(bytes(source.stat().st_size))


@pytest.mark.parametrize(
    ("bad_copy", "found"),
    [(shorten, "bytes, found"), (flip_a_bit, "sha256"), (drop_a_file, "found nothing"), (write_zeros, "sha256")],
)
def test_a_target_that_writes_something_else_never_gets_a_checkpoint(local, drive, bad_copy, found):
    save(local, 10)
    mirror = Mirror(local, drive, bad_copy)
    mirror.copy(10)
    assert not mirror.wait()
    assert found in mirror.last_failure
    assert names(drive) == []


def test_files_that_change_after_they_were_read_back_are_not_vouched_for(local, drive, monkeypatch):
    save(local, 10)
    changed = []

    def read_back(folder, manifest):
        problems = check_files(folder, manifest)
        if not changed:
            changed.append((folder / "model.safetensors").write_bytes(b"other"))
        return problems

    monkeypatch.setattr("hf_ext.checkpoints.mirror.check_files", read_back)
    mirror = Mirror(local, drive)
    mirror.copy(10)
    wait_for_failure(mirror)
    assert names(drive) == []
    assert "changed at the target" in mirror.last_failure
    assert mirror.wait()
    assert steps(mirror.target) == [10]


def test_a_local_checkpoint_that_decayed_is_not_copied(local, drive):
    save(local, 10)
    (local.folder / "checkpoint-10" / "model.safetensors").write_bytes(b"decayed")
    mirror = Mirror(local, drive)
    mirror.copy(10)
    assert not mirror.wait()
    assert "model.safetensors: expected" in mirror.last_failure
    assert names(drive) == []


def test_a_target_with_room_for_one_keeps_the_one_it_has(local, drive):
    save(local, 1)
    room = 2.5 * local.checkpoints()[0].num_bytes

    def copy_if_there_is_room(source, target, report):
        if used_bytes(drive) + source.stat().st_size > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        copy_file(source, target, report)

    mirror = Mirror(local, drive, copy_if_there_is_room)
    mirror.copy(1)
    assert mirror.wait()
    save(local, 2)
    mirror.copy(2)
    assert mirror.wait()
    mirror.delete(1)
    mirror.delete(2)
    assert mirror.wait()
    assert steps(mirror.target) == [2]  # 1 could go at once
    save(local, 4, num_bytes=40_000)  # no room beside 2, the only one there
    mirror.copy(4)
    assert not mirror.wait()
    assert steps(mirror.target) == [2]


def test_a_deletion_asked_for_during_a_copy_lets_it_succeed_at_once(local, drive):
    """The third copy fails on the full target, the deletion of the first one is due then, and the copy is made."""

    def copy_if_there_is_room(source, target, report):
        if step_began.is_set():
            assert deletion_asked.wait(20)
        if len([name for name in names(drive) if name.startswith("checkpoint")]) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        copy_file(source, target, report)

    step_began, deletion_asked = threading.Event(), threading.Event()
    mirror = Mirror(local, drive, copy_if_there_is_room)
    for step in (1, 2, 3):
        save(local, step)
        if step == 3:
            step_began.set()
        mirror.copy(step)
        if step < 3:
            assert mirror.wait()
    mirror.delete(1)
    deletion_asked.set()
    deadline = time.monotonic() + 20
    while mirror.waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    assert steps(mirror.target) == [2, 3]
    assert mirror.num_failures == 1


def test_a_file_size_limit_is_a_failure_with_its_name_and_not_a_crash(local, drive):
    save(local, 10, num_bytes=300_000)
    mirror = Mirror(local, drive)
    with file_limit(100_000):
        mirror.copy(10)
        assert not mirror.wait()
    assert os.strerror(errno.EFBIG) in mirror.last_failure
    assert names(drive) == []
    assert mirror.wait()
    assert steps(mirror.target) == [10]


def test_a_target_that_disappears_is_not_made_anew_and_is_used_when_it_is_back(local, drive, tmp_path):
    save(local, 10)
    save(local, 20)
    mirror = Mirror(local, drive)
    mirror.copy(10)
    assert mirror.wait()
    drive.rename(tmp_path / "unmounted")
    mirror.copy(20)
    mirror.delete(10)
    assert not mirror.wait()
    assert "still mounted" in mirror.last_failure
    assert not drive.exists()
    (tmp_path / "unmounted").rename(drive)
    assert mirror.wait()
    assert steps(mirror.target) == [20]


def test_a_target_that_disappears_during_a_copy_loses_only_that_attempt(local, drive, tmp_path):
    save(local, 10)

    def unmount_once(source, target, report):
        copy_file(source, target, report)
        if source.name == "optimizer.pt" and not mirror.num_failures:
            drive.rename(tmp_path / "unmounted")

    mirror = Mirror(local, drive, unmount_once)
    mirror.copy(10)
    wait_for_failure(mirror)
    assert not drive.exists()
    (tmp_path / "unmounted").rename(drive)
    assert names(drive) == [".staging"]  # half
    assert mirror.wait()
    assert names(drive) == ["checkpoint-10"]
    assert steps(mirror.target) == [10]


@pytest.mark.parametrize(("number", "is_failure"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_only_a_target_that_cannot_sync_is_forgiven(local, drive, monkeypatch, number, is_failure):
    save(local, 10)
    sync = os.fsync

    def refuse(descriptor):
        if str(drive) in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    mirror = Mirror(local, drive)
    mirror.copy(10)
    assert mirror.wait() is not is_failure
    assert steps(mirror.target) == ([] if is_failure else [10])


def test_a_file_longer_than_a_chunk_is_copied_whole(tmp_path):
    content = os.urandom(9_000_000)
    (tmp_path / "source").write_bytes(content)
    reported = []
    copy_file(tmp_path / "source", tmp_path / "target", reported.append)
    assert (tmp_path / "target").read_bytes() == content
    assert sum(reported) == len(content)


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a tmpfs of so many KiB."""
    folder = tmp_path / "small"
    folder.mkdir()

    def mount(kib: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
        if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a tmpfs is not allowed here")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "-l", str(folder)], check=True)


# A checkpoint takes 3 files of 8 KiB and a manifest, and while it is written another 4 KiB: 32 KiB.
@pytest.mark.parametrize(("kib", "left"), [(16, []), (48, [1]), (72, [4]), (400, [4])])
def test_a_full_target_keeps_what_it_has_and_training_goes_on(local, small_disk, caplog, kib, left):
    mirror = Mirror(local, small_disk(kib) / "run")
    for step in (1, 2, 3, 4):
        save(local, step)
        mirror.copy(step)
        mirror.delete(step - 1)
        fits = mirror.wait()
        assert fits or mirror.num_failures
        assert not fits or step in steps(mirror.target)
        local.delete(step - 1)
    assert steps(mirror.target) == left
    assert steps(local) == [4]
    assert not [name for name in names(mirror.target.folder) if name.startswith(".")]
    assert ("No space left on device" in caplog.text) == (left != [4])
