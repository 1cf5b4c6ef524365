"""The slow second copy: whole and verified or absent, whatever the target does, and training never waits for it."""

import errno
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hf_ext.checkpoints.disk import used_bytes
from hf_ext.checkpoints.manifest import MANIFEST, check_files
from hf_ext.checkpoints.mirror import Mirror, copy_file
from hf_ext.checkpoints.store import CheckpointStore
from hf_ext.errors import CheckpointError


def save(store: CheckpointStore, step: int, num_bytes: int = 5000) -> None:
    """Commits checkpoint `step`: three files, one of them in a subfolder, whose bytes tell the step."""
    staging = store.stage(step)
    (staging.path / "adapter").mkdir()
    for name in ("model.safetensors", "optimizer.safetensors", "adapter/config.json"):
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
    assert time.monotonic() - began < 0.5
    assert gate.begun.wait(20)
    assert mirror.waiting == (10,)
    assert not local.delete(10)
    assert not local.strip(10, ["optimizer.safetensors"])
    assert names(drive) == [".staging-checkpoint-10"]  # not under its name before it is whole
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
    local.strip(20, ["optimizer.safetensors"])
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


# Failures


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
    """Each of the three files is synced when it is copied and again in the commit; there they are changed."""
    save(local, 10)
    sync, lock, synced = os.fsync, threading.Lock(), []

    def change_in_the_commit(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        with lock:
            if path.is_file() and drive in path.parents:
                synced.append(path)
                if len(synced) == 4:
                    for victim in synced[:3]:
                        victim.write_bytes(bytes(victim.stat().st_size))
            sync(descriptor)

    monkeypatch.setattr(os, "fsync", change_in_the_commit)
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
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        mirror.copy(10)
        assert not mirror.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
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
        if source.name == "model.safetensors" and not mirror.num_failures:
            drive.rename(tmp_path / "unmounted")

    mirror = Mirror(local, drive, unmount_once)
    mirror.copy(10)
    wait_for_failure(mirror)
    assert not drive.exists()
    (tmp_path / "unmounted").rename(drive)
    assert names(drive) == [".staging-checkpoint-10"]  # half
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
    assert 0.3 <= time.monotonic() - began < 2
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


def run_kills(folder: Path, every: int, kind: str) -> subprocess.CompletedProcess:
    script = Path(__file__).with_name("mirror_run.py")
    command = [sys.executable, str(script), str(folder), str(every), kind]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.parametrize("every", [pytest.param(6, id="some"), pytest.param(1, id="all", marks=pytest.mark.nightly)])
def test_a_run_killed_at_any_operation_on_the_target_is_continued_from_what_is_there(tmp_path, every, capsys):
    done = run_kills(tmp_path, every, "staged")
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout)
    assert all(count >= 120 // every for count in counts.values()), counts
    with capsys.disabled():
        print(f"\nmirror: {sum(counts.values())} kills -9 at operations on the target, all continued, none damaged")


def test_the_kills_find_a_mirror_that_writes_in_place(tmp_path):
    done = run_kills(tmp_path, 1, "in_place")
    assert done.returncode == 1
    assert "is no checkpoint" in done.stderr or "does not verify" in done.stderr


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
