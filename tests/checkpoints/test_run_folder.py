"""What a recipe refuses about its output folder, before it reads a row and without touching anything."""

import os
import runpy
import shutil
import tempfile
from pathlib import Path

import pytest

from hf_ext.checkpoints.folder_lock import LOCK
from hf_ext.checkpoints.run_folder import check_content, run_folder
from hf_ext.errors import FolderError
from hf_ext.training_args import FastTrainingArguments

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def enter(folder: Path, **given) -> None:
    args = FastTrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **given)
    with run_folder(args):
        assert (folder / LOCK).is_file()


def tree(folder: Path) -> dict[str, tuple]:
    """Names, kinds, modes and contents."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[path.relative_to(folder).as_posix()] = (status.st_mode, status.st_mtime_ns, content)
    return found


@pytest.mark.parametrize("recipe", ["max_speed.py", "mlm.py"])
def test_both_recipes_refuse_before_they_build_anything(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    main = runpy.run_path(str(RECIPES / recipe))["main"]
    with pytest.raises(FolderError, match="'file' cannot be the output folder: there is a file of that name"):
        main(["--output_dir", "file"])
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("x" * 256, "File name too long"),
        ("file/below", "Not a directory"),
        ("/dev/null/x", "Not a directory"),
        ("/proc/x", "No such file"),
        (os.fsdecode(b"b\xff"), "its name is not UTF-8"),
        ("zero\0byte", "null byte"),
    ],
)
def test_a_path_that_cannot_be_a_folder_is_refused_by_name(tmp_path, name, reason):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FolderError, match=reason) as refused:
        enter(tmp_path / name)
    assert "--output_dir" in str(refused.value) or "null byte" in reason
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["with space", "q'\"", "\u00e9\u4e2d", "%s {0} $HOME", "a\nb", "x" * 255, "a/b/c"])
def test_other_odd_names_are_folders(tmp_path, name):
    enter(tmp_path / name)
    assert (tmp_path / name).is_dir()


@pytest.mark.parametrize(
    "name",
    ["run.log", "plan.json", "report.md", "model.safetensors", "README.md", ".all_results.json.tmp", "throughput.json"],
)
def test_a_link_that_a_run_would_write_through_is_refused_by_name(tmp_path, name):
    folder, target = tmp_path / "run", tmp_path / "target"
    folder.mkdir()
    target.write_text("mine")
    (folder / name).symlink_to(target)
    before = tree(tmp_path)
    with pytest.raises(FolderError, match=f"{name} is a link to {target}"):
        enter(folder)
    assert tree(tmp_path) == before


def test_links_of_other_names_are_nobodys_business(tmp_path):
    for name in ("data", "checkpoint-7", "latest", "embeddings"):
        (tmp_path / name).symlink_to(tmp_path)
    check_content(tmp_path)


@pytest.mark.parametrize(("make", "kind"), [(os.mkdir, "a folder"), (os.mkfifo, "no regular file")])
@pytest.mark.parametrize("name", ["plan.json", "run.log"])
def test_what_is_no_file_is_refused_by_name(tmp_path, make, kind, name):
    make(tmp_path / name)
    with pytest.raises(FolderError, match=f"{name} is {kind}"):
        enter(tmp_path)


@pytest.mark.parametrize("names", [["config.json"], ["model.safetensors", "predictions.csv"], ["report.md"]])
def test_files_that_no_run_wrote_are_not_overwritten(tmp_path, names):
    for name in [*names, "README.md", "notes.txt"]:
        (tmp_path / name).write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(FolderError, match=f"holds {', '.join(names)}, which a run would overwrite"):
        enter(tmp_path)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "sign", ["run.log", "plan.json", "trainer_state.json", "training_args.bin", "checkpoint-4", "previous-checkpoint-4"]
)
def test_a_folder_that_a_run_wrote_is_gone_on_in(tmp_path, sign):
    for name in ("config.json", "report.md", sign):
        (tmp_path / name).write_text("")
    enter(tmp_path)
    enter(tmp_path)


def test_a_folder_with_a_readme_and_data_is_taken(tmp_path):
    for name in ("README.md", "train.csv", "notes.txt"):
        (tmp_path / name).write_text("mine")
    enter(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["README.md", "notes.txt", "train.csv"]


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="becomes another user")
@pytest.mark.parametrize(
    ("modes", "reason"),
    [
        ({".": 0o555}, "cannot be the output folder: Permission denied"),
        ({".": 0o000}, "cannot be the output folder: Permission denied"),
        ({".": 0o777, "plan.json": 0o444, "run.log": 0o000}, "plan.json cannot be written to; run.log cannot be"),
    ],
)
def test_what_this_user_may_not_write_is_refused_by_name(modes, reason):
    top = Path(tempfile.mkdtemp(prefix="other-user-"))
    try:
        top.chmod(0o755)
        (top / "run").mkdir()
        for name, mode in reversed(modes.items()):
            path = top / "run" / name
            path.write_text("") if name != "." else None
            path.chmod(mode)
        os.seteuid(65534)
        try:
            with pytest.raises(FolderError, match=reason):
                enter(top / "run")
        finally:
            os.seteuid(0)
        assert LOCK not in os.listdir(top / "run")
    finally:
        shutil.rmtree(top)
