"""Failures of the disk, bytes, files that appear whole, cells that no spreadsheet runs, and what comes along."""

import errno
import os
import random
import resource
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from inside import CompareArguments, GeneratorArguments, Manifest, load_generator, make_command, make_sides
from locations import ROOT
from safetensors import SafetensorError
from safetensors.numpy import save_file

from hf_ext import detect_hardware
from hf_ext.arguments import read_config
from hf_ext.comparing.running import find_finished
from hf_ext.comparing.sides import read_launch
from hf_ext.data import SequenceCollator
from hf_ext.errors import ArgumentError, HfExtError
from hf_ext.files import (
    CONFIGS,
    LAUNCHERS,
    describe_failure,
    find_shipped,
    free_bytes,
    is_disk_failure,
    read_cell,
    remove_folder,
    replacing,
    sync,
    used_bytes,
    write_cell,
    write_text,
)
from hf_ext.heads.resolving import read_config_of
from hf_ext.plan import Plan
from hf_ext.property import write_predictions
from hf_ext.reporting import plot_loss, read_run, write_report
from hf_ext.text import write_json

pytestmark = pytest.mark.internals


def test_failures_of_the_disk_are_told_from_those_of_the_program(tmp_path):
    for name in ("ENOSPC", "EDQUOT", "EROFS", "EIO", "EFBIG", "EACCES", "EPERM", "ESTALE", "ENOTCONN"):
        assert is_disk_failure(OSError(getattr(errno, name), "no"))
    for error in (OSError(errno.ENOENT, "no"), OSError("no number"), ValueError("(os error 28)"), SafetensorError("x")):
        assert not is_disk_failure(error)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # for a moment: it holds for pytest's output too
    try:
        with pytest.raises((SafetensorError, OSError)) as caught:
            save_file({"a": np.zeros(10_000)}, tmp_path / "a.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert is_disk_failure(caught.value)


def test_a_failure_names_path_needed_and_free_bytes_and_what_to_do(tmp_path):
    text = describe_failure(OSError(errno.ENOSPC, "x"), tmp_path / "not" / "there", 1234567)
    assert text.startswith(f"{tmp_path}/not/there could not be written: No space left on device. 1,234,567 bytes are")
    assert "bytes are free" in text
    assert "--save_total_limit" in text
    assert "writable" in describe_failure(OSError(errno.EROFS, "x"), tmp_path)
    assert "mounted" in describe_failure(OSError(errno.EIO, "x"), tmp_path)
    full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert "No space left on device" in describe_failure(full, tmp_path)


def test_free_and_used_bytes_are_those_of_the_file_system(tmp_path):
    expected = os.statvfs(tmp_path)
    assert free_bytes(tmp_path / "a" / "b") == pytest.approx(expected.f_bavail * expected.f_frsize, rel=0.05)
    folder = tmp_path / "a"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "two").write_bytes(os.urandom(10_000))
    paths = [folder, folder / "b", folder / "b" / "two"]
    for path in paths:
        sync(path)  # blocks are allocated late
    assert used_bytes(folder) == sum(path.lstat().st_blocks for path in paths) * 512 > 10_000
    before = used_bytes(folder)
    (tmp_path / "big").write_bytes(os.urandom(1_000_000))
    (folder / "link").symlink_to(tmp_path / "big")
    (folder / "loop").symlink_to(tmp_path)
    assert used_bytes(folder) - before < 100_000
    assert used_bytes(tmp_path / "missing") == 0


def test_a_folder_is_removed_with_one_file_last_and_without_what_its_links_point_to(tmp_path, monkeypatch):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("kept")
    folder, deleted, unlink = tmp_path / "folder", [], os.unlink
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "link").symlink_to(tmp_path / "kept")
    for name in ("a", "last", "z", "sub/last"):
        (folder / name).write_text("x")
    monkeypatch.setattr(os, "unlink", lambda path: (deleted.append(os.path.relpath(path, folder)), unlink(path)))
    remove_folder(folder, last="last")
    assert (sorted(deleted[:-1]), deleted[-1]) == (["a", "sub/last", "sub/link", "z"], "last")
    assert not folder.exists()
    assert (tmp_path / "kept" / "file").read_text() == "kept"
    remove_folder(folder, last="last")  # nothing there: nothing to do


DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
# File of a folder that somebody else may have written -> what reads it.
READERS = {
    "inputs.json": SequenceCollator.from_pretrained,
    "config.json": load_generator,
    "all_results.json": read_run,
    "run.run.json": lambda folder: find_finished(folder / "run", ["hf-ext", "train"]),
    "manifest.json": Manifest.read,
    "trained/config.json": lambda folder: read_config_of(folder / "trained"),
}


@pytest.mark.parametrize("name", READERS)
def test_json_that_is_nested_too_deeply_is_refused_in_one_line_that_names_the_file_or_folder(name, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(DEEP)
    with pytest.raises(HfExtError) as refusal:
        READERS[name](tmp_path)
    assert str(path.parent) in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


def test_gates_that_are_nested_too_deeply_are_refused():
    with pytest.raises(ArgumentError, match="give names with numbers"):
        GeneratorArguments(gates=DEEP)


def report(path: Path) -> None:
    write_json(path.parent / "all_results.json", {"format": 1, "task": "affinity"})
    write_report(path.parent)


WRITERS = {
    "plan.json": lambda path: Plan(detect_hardware("cpu"), []).save(path.parent),
    "predictions.csv": lambda path: write_predictions(path, [(Dataset.from_dict({"a": ["M"]}), {"x": [1.0]}, None)]),
    "loss.png": lambda path: plot_loss([{"loss": 1.0, "step": 1}], path),
    "report.html": report,
}


@pytest.mark.parametrize("name", WRITERS)
def test_writers_leave_a_backup_of_hard_links_as_it_was(name, tmp_path):
    path, backup = tmp_path / "run" / name, tmp_path / name
    path.parent.mkdir()
    path.write_text("before")
    os.link(path, backup)
    WRITERS[name](path)
    assert backup.read_text() == "before"
    assert path.read_bytes() != b"before"
    assert not list(path.parent.glob(".*"))


def test_a_draft_that_fails_leaves_what_was_there_and_a_planted_one_is_not_written_through(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "before")
    with pytest.raises(ZeroDivisionError), replacing(path) as draft:  # noqa: PT012
        draft.write_text("half")
        1 / 0  # noqa: B018
    assert os.listdir(tmp_path) == ["a.txt"]
    assert path.read_text() == "before"
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".a.txt.tmp").symlink_to(tmp_path / "victim")
    write_text(path, "new")
    assert ((tmp_path / "victim").read_text(), path.read_text(), path.is_symlink()) == ("mine", "new", False)


FORMULAS = (
    *("=cmd|'/C calc'!A0", "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "--1", "+"),
    *("\uff1d1", "\uff0b1", "\uff0d1", "\uff201", "'=1", "''=1", "-inf", "-1.5e", "- 1", "-1_0", "-\u0663"),
)


def test_text_that_a_spreadsheet_would_run_is_written_as_text_and_read_back_as_it_was():
    for text in FORMULAS:
        assert write_cell(text) == "'" + text
    for value in ("-", "-1.5", "+2", "-.5", "-1e-3", "r1", "", "'", "'a", "3'-end", " =1", -1.5, 7, None):
        assert write_cell(value) == value
    rng = random.Random(0)
    texts = {"".join(rng.choices("'=-+1a.", k=rng.randint(0, 5))) for _ in range(5000)}
    assert len({write_cell(text) for text in texts}) == len(texts)
    assert all(read_cell(write_cell(text)) == text for text in (*texts, *FORMULAS))


def test_a_name_is_found_alone_and_as_in_a_clone_and_anything_else_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text, folder in (("recipes/configs/gb1.yaml", CONFIGS), ("cpu.yaml", LAUNCHERS)):
        assert find_shipped(text, folder) == ROOT / folder / Path(text).name
        assert find_shipped(text, folder).is_file()
    for text in ("gb2.yaml", "other/gb1.yaml", "/recipes/configs/gb1.yaml", "../gb1.yaml", "mlm.py"):
        assert find_shipped(text, CONFIGS) == Path(text)
    assert "encoders" in read_config("gb1.yaml")
    Path("gb1.yaml").write_text("learning_rate: 7\n")  # one's own goes first
    assert read_config("gb1.yaml")["learning_rate"].where == "gb1.yaml line 1"
    with pytest.raises(ArgumentError, match=r"--config .gb2.yaml.: cannot be .* With hf_ext come: gb1.yaml, "):
        read_config("gb2.yaml")


def test_a_comparison_finds_recipe_sides_and_launchers_outside_of_a_clone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = CompareArguments(baseline=["mlm_stock_best.yaml"], recipe="mlm")
    side, _ = make_sides(args)
    command = make_command(args, [], side, tmp_path / "run", 0)
    assert command[1:4] == ["-m", "hf_ext", "mlm"]
    assert command[command.index("--config") + 1] == str(ROOT / CONFIGS / "mlm_stock_best.yaml")
    assert read_launch("cpu.yaml", "baseline_launch")[0] == str(ROOT / LAUNCHERS / "cpu.yaml")
    with pytest.raises(ArgumentError, match=r"stock_worst.yaml: no such file in"):
        make_sides(CompareArguments(baseline=["stock_worst.yaml"]))
