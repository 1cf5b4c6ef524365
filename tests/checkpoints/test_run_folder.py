"""What a recipe refuses about its output folder, before it reads a row and without touching anything."""

import os
import runpy
import shutil
import tempfile
from pathlib import Path

import pytest
from tiny_classifier import ROWS, make_args, make_model
from transformers import Trainer, TrainingArguments

from hf_ext.checkpoints.format.manifest import Manifest
from hf_ext.checkpoints.run_folder.finished_model import MODEL_MANIFEST, write_model_manifest
from hf_ext.checkpoints.run_folder.folder_lock import LOCK
from hf_ext.checkpoints.run_folder.holding import run_folder
from hf_ext.checkpoints.run_folder.run_content import check_content
from hf_ext.errors import FolderError
from hf_ext.hardware import detect_hardware
from hf_ext.plan import Plan
from hf_ext.reporting.run_record import write_json
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


SUBFOLDERS = ["merged", "demo_encoders", "seed-42"]


def arguments(folder: Path, **given) -> FastTrainingArguments:
    return FastTrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **given)


def enter(folder: Path | str, **given) -> None:
    with run_folder(arguments(folder, **given)):
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


@pytest.mark.parametrize("name", ["/", "/..", "//", "{home}", "~", ".", "{home}/", "{home}/x/..", "link"])
def test_the_top_of_the_disk_and_the_home_folder_are_no_output_folders(tmp_path, name, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "link").symlink_to(home)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path if name == "link" else home)
    with pytest.raises(FolderError, match=r"cannot be the output folder: it is the (top of the disk|home folder)"):
        enter(name.format(home=home))
    assert os.listdir(home) == []
    assert LOCK not in os.listdir("/")
    enter(home / "run")


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


def sign(folder: Path, kind: str) -> None:
    """Leaves in `folder` what a run of ours leaves in its course."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "run.log":
        (folder / kind).write_text("2026-01-02 03:04:05,678 INFO hf_ext: Data: 12 rows read\n")
    elif kind == "plan.json":
        Plan(detect_hardware("cpu"), []).save(folder)
    elif kind == "all_results.json":
        record = {"format": 1, "task": "affinity", "trainer": "hf_ext.trainer.FastTrainer", "settings": {}}
        write_json(folder / kind, {**record, "environment": {}, "costs": {}})
    elif kind == MODEL_MANIFEST:
        write_model_manifest(folder)
    else:
        (folder / kind).mkdir()
        Manifest("a run", 4, 1.0).write(folder / kind)


@pytest.mark.parametrize(
    "kind",
    [
        "run.log",
        "plan.json",
        "all_results.json",
        MODEL_MANIFEST,
        "checkpoint-4",
        "previous-checkpoint-4",
        "damaged-checkpoint-4-2",
    ],
)
def test_a_folder_that_a_run_wrote_is_gone_on_in(tmp_path, kind):
    for name in ("config.json", "report.md", "trainer_state.json"):
        (tmp_path / name).write_text("")
    sign(tmp_path, kind)
    enter(tmp_path)
    enter(tmp_path)


def train_stock(folder: Path) -> None:
    """A finished run of stock Trainer: checkpoints, model, states and results."""
    args = make_args(folder, TrainingArguments)
    trainer = Trainer(make_model(), args, train_dataset=ROWS)
    trained = trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", trained.metrics)


@pytest.mark.parametrize("recipe", ["max_speed.py", "mlm.py"])
def test_what_stock_trainer_finished_is_not_overwritten(recipe, tmp_path):
    train_stock(tmp_path / "st")
    before = tree(tmp_path)
    assert {"st/checkpoint-2/trainer_state.json", "st/model.safetensors", "st/training_args.bin"} < before.keys()
    main = runpy.run_path(str(RECIPES / recipe))["main"]
    with pytest.raises(FolderError, match=r"holds all_results\.json, config\.json, model\.safetensors, train"):
        main(["--output_dir", str(tmp_path / "st")])
    assert tree(tmp_path) == before


def test_checkpoints_of_stock_trainer_alone_are_gone_on_in(tmp_path):
    train_stock(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink() if path.is_file() else None
    enter(tmp_path)


def test_a_folder_that_fast_trainer_wrote_from_python_is_gone_on_in(tmp_path):
    trainer = FastTrainer(make_model(), arguments(tmp_path, save_strategy="no"))
    trainer.save_model()
    trainer.save_state()
    assert not {"plan.json", "run.log"} & set(os.listdir(tmp_path))
    enter(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.log", "epoch 1: loss 2.0\n"),
        ("run.log", "2026-01-02 03:04:05,678 INFO mine: about hf_ext: nothing\n"),
        ("plan.json", '{"monday": "rest"}'),
        ("plan.json", "["),
        ("all_results.json", '{"task": "affinity", "f1": 0.5}'),
        ("model_manifest.json", '{"format": 1}'),
        ("trainer_state.json", "{}"),
        ("training_args.bin", "x"),
        ("checkpoint-4/manifest.json", "{}"),
        ("checkpoint-4/trainer_state.json", "{}"),
    ],
)
def test_a_name_alone_says_nothing_about_who_wrote_a_model(tmp_path, name, content):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    (tmp_path / "model.safetensors").write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(FolderError, match=r"model\.safetensors.*, which a run would overwrite"):
        enter(tmp_path)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["all_results.json", "plan.json", "throughput.json", "tokenizers/0/vocab.txt"])
def test_records_that_no_run_wrote_are_not_overwritten(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(FolderError, match=f"holds {name}, which a run would overwrite"):
        enter(tmp_path)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("tokenizers/0/vocab.txt", "tokenizers/0/vocab.txt"),
        ("tokenizers/0/.inputs.json.tmp", "tokenizers/0/.inputs.json.tmp"),
        ("tokenizers/0", "tokenizers/0"),
        ("tokenizers", "tokenizers"),
        ("merged", "merged"),
        ("merged/tokenizers", "merged/tokenizers"),
        ("demo_encoders/esm/config.json", "demo_encoders/esm/config.json"),
        ("demo_encoders/bert", "demo_encoders/bert"),
        ("seed-42", "seed-42"),
    ],
)
@pytest.mark.parametrize("is_ours", [True, False])
def test_links_below_the_folder_are_refused_by_name(tmp_path, link, shown, is_ours):
    folder, target = tmp_path / "run", tmp_path / "target"
    target.mkdir()
    (target / "model.safetensors").write_text("mine")
    sign(folder, "plan.json") if is_ours else folder.mkdir()
    (folder / link).parent.mkdir(parents=True, exist_ok=True)
    (folder / link).symlink_to(target)
    before = tree(tmp_path)
    with pytest.raises(FolderError, match=f"{shown} is a link to {target}"), run_folder(arguments(folder), SUBFOLDERS):
        pass
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("given", "below"),
    [([], "demo_encoders"), (["--merge_lora", "true"], "merged"), (["--num_seeds", "3", "--seed", "7"], "seed-9")],
)
def test_the_recipe_looks_into_the_folders_that_its_command_writes(given, below, tmp_path):
    sign(tmp_path / "run", "plan.json")
    (tmp_path / "run" / below).symlink_to(tmp_path)
    main = runpy.run_path(str(RECIPES / "max_speed.py"))["main"]
    with pytest.raises(FolderError, match=f"{below} is a link to {tmp_path}"):
        main(["--output_dir", str(tmp_path / "run"), *given])


def test_folders_that_this_command_does_not_write_are_nobodys_business(tmp_path):
    for name in ("merged", "demo_encoders", "seed-42"):
        (tmp_path / name).symlink_to(tmp_path)
    enter(tmp_path)


@pytest.mark.parametrize("name", ["merged", "seed-42"])
def test_a_model_of_the_users_own_in_a_folder_below_is_not_overwritten(tmp_path, name):
    sign(tmp_path, "plan.json")
    (tmp_path / name).mkdir()
    (tmp_path / name / "model.safetensors").write_text("mine")
    before = tree(tmp_path)
    with (
        pytest.raises(FolderError, match=f"{name} holds model.safetensors"),
        run_folder(arguments(tmp_path), SUBFOLDERS),
    ):
        pass
    assert tree(tmp_path) == before
    sign(tmp_path / name, MODEL_MANIFEST)
    with run_folder(arguments(tmp_path), SUBFOLDERS):
        pass


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


@pytest.mark.parametrize(
    "enter_folder", [enter, lambda folder: FastTrainer(make_model(), arguments(folder)).save_model()]
)
def test_a_backup_made_of_hard_links_stays_what_it_was(tmp_path, enter_folder):
    folder, backup = tmp_path / "run", tmp_path / "backup"
    names = [
        "run.log",
        "trainer_state.json",
        "tokenizers/0/vocab.txt",
        "demo_encoders/esm/vocab.txt",
        "merged/inputs.json",
    ]
    sign(folder, "plan.json")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("before")
    shutil.copytree(folder, backup, copy_function=os.link)
    before = tree(backup)
    enter_folder(folder)
    for name in names:
        with (folder / name).open("a") as file:  # as a library writes
            file.write(", and after")
    assert {(folder / name).read_text() for name in names} == {"before, and after"}
    assert tree(backup) == before
    assert not list(tmp_path.rglob("*.tmp"))
