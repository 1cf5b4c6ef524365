"""Failures of the disk are told from those of the program, and bytes are counted as the disk counts them."""

import errno
import os

import numpy as np
import pytest
from file_limit import file_limit
from safetensors import SafetensorError
from safetensors.numpy import save_file

from hf_ext.disk import describe_failure, free_bytes, is_disk_failure, remove_folder, sync, used_bytes


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EROFS", "EIO", "EFBIG", "EACCES", "EPERM", "ESTALE", "ENOTCONN"])
def test_errors_of_the_disk_are_disk_failures(name):
    assert is_disk_failure(OSError(getattr(errno, name), "no"))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOENT, "no"),
        OSError("no number"),
        ValueError("(os error 28)"),
        SafetensorError("Error while deserializing header: header too small"),
        KeyError("x"),
    ],
)
def test_errors_of_the_program_are_no_disk_failures(error):
    assert not is_disk_failure(error)


def test_what_safetensors_raises_on_a_file_limit_is_a_disk_failure(tmp_path):
    with file_limit(1000), pytest.raises((SafetensorError, OSError)) as caught:
        save_file({"a": np.zeros(10_000)}, tmp_path / "a.safetensors")
    assert is_disk_failure(caught.value)


def test_the_number_that_safetensors_hides_in_its_text_is_found(tmp_path):
    full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert is_disk_failure(full)
    assert "No space left on device" in describe_failure(full, tmp_path, 5)


def test_a_failure_names_path_needed_and_free_bytes_and_what_to_do(tmp_path):
    text = describe_failure(OSError(errno.ENOSPC, "x"), tmp_path / "not" / "there", 1234567)
    assert text.startswith(f"{tmp_path}/not/there could not be written: No space left on device. 1,234,567 bytes are")
    assert "bytes are free" in text
    assert "--save_total_limit" in text
    assert "writable" in describe_failure(OSError(errno.EROFS, "x"), tmp_path)
    assert "mounted" in describe_failure(OSError(errno.EIO, "x"), tmp_path)
    assert "needed" not in describe_failure(OSError(errno.EIO, "x"), tmp_path)


def test_free_bytes_are_those_of_the_file_system_a_folder_will_be_on(tmp_path):
    expected = os.statvfs(tmp_path)
    assert free_bytes(tmp_path / "a" / "b") == pytest.approx(expected.f_bavail * expected.f_frsize, rel=0.05)


def test_used_bytes_are_whole_blocks_of_files_and_folders(tmp_path):
    folder = tmp_path / "a"
    (folder / "b").mkdir(parents=True)
    (folder / "one").write_bytes(b"x")
    (folder / "b" / "two").write_bytes(os.urandom(10_000))
    paths = [folder, folder / "b", folder / "one", folder / "b" / "two"]
    for path in paths:
        sync(path)  # blocks are allocated late
    blocks = [path.lstat().st_blocks for path in paths]
    assert used_bytes(folder) == sum(blocks) * 512
    assert used_bytes(folder) >= 10_001
    assert used_bytes(folder / "one") == blocks[2] * 512


def test_used_bytes_of_a_missing_folder_are_zero_and_links_are_not_followed(tmp_path):
    assert used_bytes(tmp_path / "missing") == 0
    (tmp_path / "big").write_bytes(os.urandom(1_000_000))
    (tmp_path / "linked").mkdir()
    empty = used_bytes(tmp_path / "linked")
    (tmp_path / "linked" / "link").symlink_to(tmp_path / "big")
    (tmp_path / "linked" / "loop").symlink_to(tmp_path)
    assert used_bytes(tmp_path / "linked") - empty < 100_000


def test_removing_a_folder_leaves_what_its_links_point_to(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("kept")
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "link").symlink_to(tmp_path / "kept")
    (folder / "last").write_text("x")
    remove_folder(folder, last="last")
    assert not folder.exists()
    assert (tmp_path / "kept" / "file").read_text() == "kept"
    remove_folder(folder, last="last")


def test_the_file_that_identifies_a_folder_is_deleted_last(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for name in ("a", "last", "z", "sub/a", "sub/last"):
        (folder / name).write_text("x")
    deleted = []
    unlink = os.unlink
    monkeypatch.setattr(os, "unlink", lambda path: (deleted.append(os.path.relpath(path, folder)), unlink(path)))
    remove_folder(folder, last="last")
    assert sorted(deleted[:-1]) == ["a", "sub/a", "sub/last", "z"]
    assert deleted[-1] == "last"
