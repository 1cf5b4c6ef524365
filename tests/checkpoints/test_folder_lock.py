"""A folder belongs to one run at a time, whatever killed the one before."""

import json
import os
import shutil
import signal
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from other_runs import kill, other_run, plant_lock

from hf_ext.checkpoints.run_folder import folder_lock
from hf_ext.checkpoints.run_folder.folder_lock import LOCK, find_other_run, hold_folder
from hf_ext.errors import FolderError


def test_a_folder_that_a_living_process_holds_is_refused_in_one_line(tmp_path):
    with other_run(tmp_path) as pid, pytest.raises(FolderError) as refused:
        hold_folder(tmp_path)
    text = str(refused.value)
    assert "\n" not in text
    for part in (f"process {pid} on {socket.gethostname()}", "since 20", "pytest", "--output_dir", str(tmp_path)):
        assert part in text


def test_the_lock_is_gone_when_the_last_hold_of_the_process_is_released(tmp_path):
    first, second = hold_folder(tmp_path), hold_folder(tmp_path)
    first.release()
    first.release()  # the second time does nothing
    assert os.listdir(tmp_path) == [LOCK]
    second.release()
    assert os.listdir(tmp_path) == []
    with hold_folder(tmp_path), other_run(tmp_path / "..", hold=lambda folder: [folder]):
        assert (tmp_path / LOCK).is_file()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("how", [shutil.copytree, partial(shutil.copytree, copy_function=shutil.copy)])
def test_a_copy_of_a_folder_that_a_living_process_holds_is_free_and_the_folder_stays_held(tmp_path, how):
    folder, copied = tmp_path / "run", tmp_path / "copy"
    folder.mkdir()
    with other_run(folder):
        before = (folder / LOCK).read_bytes()
        how(folder, copied)
        assert find_other_run(copied) is None
        with hold_folder(copied):
            assert json.loads((copied / LOCK).read_text())["pid"] == os.getpid()
            assert find_other_run(folder) is not None
        assert (folder / LOCK).read_bytes() == before
        assert os.listdir(folder) == [LOCK]  # nothing is left of looking


def test_a_folder_that_is_no_copy_for_certain_stays_held(tmp_path):
    folder, link, moved = tmp_path / "run", tmp_path / "link", tmp_path / "moved"
    folder.mkdir()
    link.symlink_to(folder)
    with other_run(folder):
        for other_name in (folder, link):
            assert find_other_run(other_name) is not None
        folder.rename(moved)  # with the run in it
        assert find_other_run(moved) is not None
        plant_lock(folder)  # of another run, where the first one began
        assert find_other_run(moved) is not None


def test_a_copy_of_another_machines_lock_is_no_reason_to_take_the_folder(tmp_path):
    plant_lock(tmp_path / "run", place="another machine", held=str(tmp_path / "run"))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert find_other_run(tmp_path / "copy") is not None


def test_a_killed_process_leaves_nothing_that_holds_the_next_run_back(tmp_path):
    with other_run(tmp_path) as pid:
        kill(pid)
        assert (tmp_path / LOCK).is_file()
        with hold_folder(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_killed_process_that_its_parent_has_not_asked_after_holds_nothing(tmp_path):
    with other_run(tmp_path) as pid:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # a zombie
        hold_folder(tmp_path).release()


@pytest.mark.parametrize(
    ("change", "age_s"),
    [
        ({"pid": 2**22 + 1}, 0),  # no such process
        ({"started": 1.0}, 0),  # its number was given out anew
        ({"place": "another machine"}, 121),  # not renewed for two minutes
        ({"place": "another machine"}, -121),  # nor before a clock was set
        ({"place": None, "started": "x"}, 121),
    ],
)
def test_a_stale_lock_is_taken_over(tmp_path, change, age_s):
    plant_lock(tmp_path, age_s=age_s, **change)
    assert find_other_run(tmp_path) is None
    with hold_folder(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"pid": null}', b'{"pid": 12, "pla', b"\0" * 300])
def test_a_lock_that_names_nobody_is_free_after_two_minutes_at_the_latest(tmp_path, content):
    path = plant_lock(tmp_path)
    path.write_bytes(content)
    if content:
        with pytest.raises(FolderError, match=r"\.run\.lock is damaged and names no run\. It was .* free in 120 s"):
            hold_folder(tmp_path)
        os.utime(path, (time.time() - 121, time.time() - 121))
    hold_folder(tmp_path).release()


@pytest.mark.parametrize("content", [b"not json", b"[1]", b"\x80\x81", b'"text"', b"1"])
def test_a_file_that_is_no_lock_is_named_and_stays(tmp_path, content):
    path = plant_lock(tmp_path)
    path.write_bytes(content)
    os.utime(path, (time.time() - 500, time.time() - 500))
    with pytest.raises(FolderError, match=r"\.run\.lock is no lock of a run\. Move it away") as refused:
        hold_folder(tmp_path)
    assert "unknown" not in str(refused.value)
    assert find_other_run(tmp_path) == str(refused.value)
    assert path.read_bytes() == content


def test_a_file_of_any_size_is_read_in_part(tmp_path):
    path = plant_lock(tmp_path)
    os.truncate(path, 1 << 33)
    tracemalloc.start()
    try:
        with pytest.raises(FolderError, match="is no lock of a run"):
            hold_folder(tmp_path)
        assert find_other_run(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_process_that_was_killed_in_writing_over_a_longer_lock_holds_nothing(tmp_path):
    path = plant_lock(tmp_path, pid=2**22 + 1)
    path.write_bytes(path.read_bytes() + b'the end of a longer one"}')
    hold_folder(tmp_path).release()


@pytest.mark.parametrize("change", [{}, {"place": "another machine"}])
def test_a_fresh_lock_is_refused(tmp_path, change):
    plant_lock(tmp_path, age_s=30, **change)
    before = (tmp_path / LOCK).read_bytes()
    with pytest.raises(FolderError, match=r"in use by another run: process \d+ .*--seed 1") as refused:
        hold_folder(tmp_path)
    assert ("last heard of 30 s ago; if it is gone, the folder is free in 90 s" in str(refused.value)) == bool(change)
    assert (tmp_path / LOCK).read_bytes() == before
    assert os.listdir(tmp_path) == [LOCK]


def test_a_lock_is_renewed_while_it_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.02)
    with hold_folder(tmp_path):
        os.utime(tmp_path / LOCK, (1.0, 1.0))
        ends = time.monotonic() + 5
        while (tmp_path / LOCK).stat().st_mtime < 2 and time.monotonic() < ends:
            time.sleep(0.02)
        assert (tmp_path / LOCK).stat().st_mtime > 1e9


def test_a_lock_that_another_run_took_over_is_neither_renewed_nor_removed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.02)
    with hold_folder(tmp_path):
        plant_lock(tmp_path)
        ends = time.monotonic() + 5
        while not caplog.records and time.monotonic() < ends:
            time.sleep(0.02)
        os.utime(tmp_path / LOCK, (1.0, 1.0))
        time.sleep(0.1)
        assert (tmp_path / LOCK).stat().st_mtime == 1.0
    assert f"process {os.getppid()}" in caplog.text
    assert (tmp_path / LOCK).is_file()


def test_a_forked_process_neither_releases_nor_shares_the_lock(tmp_path):
    hold = hold_folder(tmp_path)
    pid = os.fork()
    if pid == 0:
        hold.release()
        try:
            hold_folder(tmp_path)
            os._exit(1)
        except FolderError:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert (tmp_path / LOCK).is_file()
    hold.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.nightly
def test_of_many_that_take_a_stale_lock_at_once_one_gets_it(tmp_path):
    for round_number in range(5):
        folder = tmp_path / str(round_number)
        plant_lock(folder, pid=2**22 + 1)
        reading, writing = os.pipe()
        children = []
        for _ in range(6):
            child = os.fork()
            if child == 0:
                try:
                    hold_folder(folder)
                    os.write(writing, b"1")
                    signal.pause()
                except FolderError:
                    os.write(writing, b"0")
                finally:
                    os._exit(0)
            children.append(child)
        said = b""
        while len(said) < 6:
            said += os.read(reading, 6)
        for child in children:
            kill(child)
        assert sorted(said) == sorted(b"100000")


def test_threads_of_one_process_share_the_folder(tmp_path):
    threads = threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        holds = list(pool.map(lambda _: hold_folder(tmp_path), range(40)))
        list(pool.map(lambda hold: hold.release(), holds))
    assert os.listdir(tmp_path) == []
    assert threading.active_count() <= threads + 1  # the last beat has yet to hear of it


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_what_is_no_file_is_refused_by_name(tmp_path, kind):
    place, target = tmp_path / "run" / LOCK, tmp_path / "target"
    place.parent.mkdir()
    target.write_text("mine")
    {"link": lambda: place.symlink_to(target), "folder": place.mkdir, "fifo": lambda: os.mkfifo(place)}[kind]()
    with pytest.raises(FolderError, match=f"{LOCK}: expected a file"):
        hold_folder(place.parent)
    assert target.read_text() == "mine"
    assert find_other_run(place.parent) is None


def test_the_clock_may_be_set_while_a_run_goes_on(tmp_path, monkeypatch):
    with other_run(tmp_path):
        monkeypatch.setattr(time, "time", lambda: 7200.0)
        with pytest.raises(FolderError, match="in use"):
            hold_folder(tmp_path)


def test_a_token_on_the_command_line_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["max_speed.py", "--hub_token", "hf_SECRET", "--seed", "2\n3"])
    with hold_folder(tmp_path):
        text = (tmp_path / LOCK).read_text()
    assert "SECRET" not in text
    assert json.loads(text)["command"] == "max_speed.py --seed '2 3'"


def test_a_full_disk_leaves_no_empty_lock(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="No space"):
        hold_folder(tmp_path)
    assert os.listdir(tmp_path) == []
