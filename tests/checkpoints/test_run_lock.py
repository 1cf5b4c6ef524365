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

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
NOBODY = 2**22 + 1


def refuse(folder: Path, words: str = "in use by another run") -> str:
    with pytest.raises(FolderError, match=words) as refused, hold_folder(folder):
        pass
    return str(refused.value)


def is_free(folder: Path) -> bool:
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


def test_runs_of_one_process_share_the_folder_and_the_last_one_frees_it(tmp_path):
    with hold_folder(tmp_path):
        with hold_folder(tmp_path):
            assert os.listdir(tmp_path) == [LOCK]
        assert os.listdir(tmp_path) == [LOCK]
        assert find_other_run(tmp_path) is None
    assert os.listdir(tmp_path) == []


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


def test_an_empty_lock_is_named_as_what_to_delete(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "LEASE_S", 0.5)
    (tmp_path / LOCK).touch()
    refuse(tmp_path, r"\.run\.lock names no run\. Delete it if no run is in the folder")


@pytest.mark.parametrize("harm", ["deleted", "damaged", "taken over"])
def test_harm_to_a_lock_ends_no_run_and_the_lock_of_another_one_stays(harm, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(run_lock, "LEASE_S", 0.3)
    monkeypatch.setattr("other_runs.LEASE_S", 0.3)
    path = tmp_path / LOCK
    with hold_folder(tmp_path):
        {"deleted": path.unlink, "damaged": lambda: path.write_text("x"), "taken over": lambda: plant_lock(tmp_path)}[
            harm
        ]()
        time.sleep(0.6)
        with hold_folder(tmp_path):  # as training in a recipe does
            pass
        assert bool(find_other_run(tmp_path)) == (harm == "taken over")
    assert path.exists() == (harm == "taken over")
    assert ("another run may take the folder. This one goes on." in caplog.text) == (harm != "damaged")


def test_a_forked_process_neither_releases_nor_shares_the_lock(tmp_path):
    with hold_folder(tmp_path):
        pid = os.fork()
        if pid == 0:
            try:
                with hold_folder(tmp_path):
                    os._exit(1)
            except FolderError:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert (tmp_path / LOCK).is_file()
    assert os.listdir(tmp_path) == []


def test_a_disk_that_refuses_costs_the_lock_and_a_warning(tmp_path, monkeypatch, caplog):
    def fail(*given, **more):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(run_lock.SoftFileLease, "acquire", fail)
    with run_folder(arguments(tmp_path)):
        assert os.listdir(tmp_path) == []
    assert f"{tmp_path} is not locked against other runs: No space left on device." in caplog.text


# --- nobody else's folder --------------------------------------------------------------------------------------------


def arguments(folder: Path, **given) -> FastTrainingArguments:
    return FastTrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **given)


def enter(folder: Path | str) -> None:
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
