"""The folder of a run belongs to one run at a time, whatever killed the one before, and to nobody else."""

import importlib
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

import pytest
from other_runs import kill, other_run, plant_lock
from tiny_classifier import make_model
from tiny_masked_lm import make_trainer

from hf_ext.checkpoints import run_lock
from hf_ext.checkpoints.run_lock import LOCK, find_other_run, hold_folder, run_folder
from hf_ext.errors import CheckpointError, FolderError, HfExtError
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

NOBODY = 2**22 + 1


def refuse(folder, words="in use by another run") -> str:
    with pytest.raises(FolderError, match=words) as refused, hold_folder(folder):
        pass
    return str(refused.value)


def is_free(folder) -> bool:
    with hold_folder(folder):
        return (folder / LOCK).read_text().splitlines()[1] == f"pid={os.getpid()}"


# --- one run at a time -----------------------------------------------------------------------------------------------


def test_a_folder_that_a_living_process_holds_is_refused_in_one_line(tmp_path):
    with other_run(tmp_path) as pid:
        text = refuse(tmp_path)
        assert find_other_run(tmp_path) == text
        assert (tmp_path / LOCK).is_file()
    assert "\n" not in text
    for part in (f"process {pid} on {socket.gethostname()}", "--output_dir", str(tmp_path)):
        assert part in text


def test_a_killed_process_leaves_nothing_that_holds_the_next_run_back(tmp_path):
    with other_run(tmp_path) as pid:
        kill(pid)
        assert (tmp_path / LOCK).is_file()
        began = time.monotonic()
        assert is_free(tmp_path)
        assert time.monotonic() - began < 5
    plant_lock(tmp_path, pid=os.getppid(), start=1)  # its number was given out anew
    assert find_other_run(tmp_path) is None
    plant_lock(tmp_path, pid=NOBODY)
    assert is_free(tmp_path)


@pytest.mark.parametrize("host", ["elsewhere", "zombie"])
def test_who_cannot_be_asked_holds_the_folder_while_the_lock_is_renewed(host, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(run_lock, "LEASE_S", 1.0)
    monkeypatch.setattr("other_runs.LEASE_S", 1.0)
    if host == "elsewhere":
        path = plant_lock(tmp_path, host=host)
    else:  # it has ended, and its parent has not asked after it
        zombie = os.fork()
        if zombie == 0:
            os._exit(0)
        os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
        path = plant_lock(tmp_path, pid=zombie)
    renewing = os.fork()
    if renewing == 0:
        ends = time.monotonic() + 15
        while time.monotonic() < ends and path.exists():
            os.utime(path)
            time.sleep(0.2)
        os._exit(0)
    refuse(tmp_path, "process [0-9]+ on ")
    assert "Waiting 1 s for a sign of it" in caplog.text
    kill(renewing)
    assert is_free(tmp_path)
    if host == "zombie":
        os.waitpid(zombie, 0)


# --- nobody else's folder --------------------------------------------------------------------------------------------


def arguments(folder, **given) -> FastTrainingArguments:
    return FastTrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **given)


def enter(folder) -> None:
    with run_folder(arguments(folder)):
        assert Path(folder, LOCK).is_file()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("x" * 256, "File name too long"),
        ("file/below", "Not a directory"),
        ("/proc/x", "No such file"),
    ],
)
def test_a_path_that_cannot_be_a_folder_is_refused_by_name(tmp_path, name, reason):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FolderError, match=reason):
        enter(tmp_path / name)
    assert os.listdir(tmp_path) == ["file"]


def test_a_model_or_results_that_no_run_wrote_are_not_overwritten_and_other_files_are_nobodys_business(tmp_path):
    for name in ("README.md", "train.csv", "notes.txt"):
        (tmp_path / name).write_text("mine")
    enter(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("mine")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(FolderError, match=r"holds config\.json, model\.safetensors, which a run would overwrite"):
        enter(tmp_path)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_folder_that_a_run_of_ours_wrote_is_gone_on_in(tmp_path):
    trainer = FastTrainer(make_model(), arguments(tmp_path / "python", save_strategy="no"))
    trainer.save_model()
    enter(tmp_path / "python")
    for sign in ("run.log", "plan.json", "checkpoint-4/manifest.json"):
        folder = tmp_path / sign.replace("/", "-")
        (folder / sign).parent.mkdir(parents=True)
        (folder / sign).touch()
        (folder / "config.json").touch()
        enter(folder)


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="becomes another user")
def test_a_folder_that_this_user_may_not_write_is_refused_by_name():
    top = Path(tempfile.mkdtemp(prefix="other-user-"))
    try:
        (top / "run").mkdir()
        top.chmod(0o755)
        (top / "run").chmod(0o555)
        os.seteuid(65534)
        try:
            with pytest.raises(FolderError, match="cannot be the output folder: Permission denied"):
                enter(top / "run")
        finally:
            os.seteuid(0)
    finally:
        shutil.rmtree(top)


# --- and goes on as it began -----------------------------------------------------------------------------------------


def test_what_the_checkpoint_contradicts_is_refused_before_rows_are_read(tmp_path):
    make_trainer(tmp_path, save_strategy="steps", save_steps=2, learning_rate=1e-3).train()
    mlm = importlib.import_module("hf_ext.recipes.mlm").main
    words = ["--output_dir", str(tmp_path), "--dataset_name", "no_such_file.csv", "--model_size", "esm2_8M"]
    with pytest.raises(CheckpointError, match=r"learning_rate: 0\.001 .*0\.5[^\n]*\nUse --resume no"):
        mlm([*words, "--learning_rate", "0.5"])
    for twin in ("", "--learning_rate 1e-3", "--learning_rate 0.5 --resume no"):
        with pytest.raises(HfExtError, match=r"no_such_file\.csv"):
            mlm([*words, *twin.split()])
