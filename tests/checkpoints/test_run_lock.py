"""The folder of a run belongs to one run at a time: another is refused, and the first ends as if it had been alone."""

import os
import shutil
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest
from faulty_runs import Maker, bits, contents, names
from inside import LOCK, lock_folder
from miniature_esm import make_narrow_esm
from other_runs import kill, other_run, plant_lock
from tiny_classifier import make_model
from tiny_masked_lm import make_trainer
from transformers import TrainerCallback

from hf_ext.checkpoints import CheckpointStore, find_other_run, run_folder, run_lock
from hf_ext.errors import CheckpointError, FolderError, HfExtError
from hf_ext.tasks import find_task
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

NOBODY = 2**22 + 1


def refuse(folder, words="in use by another run") -> str:
    with pytest.raises(FolderError, match=words) as refused, lock_folder(folder):
        pass
    return str(refused.value)


def is_free(folder) -> bool:
    with lock_folder(folder):
        return (folder / LOCK).read_text().splitlines()[1] == f"pid={os.getpid()}"


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


def test_who_cannot_be_asked_holds_the_folder_while_the_lock_is_renewed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(run_lock, "LEASE_S", 1.0)
    monkeypatch.setattr("other_runs.LEASE_S", 1.0)
    path = plant_lock(tmp_path, host="elsewhere")
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


def test_what_another_process_is_writing_is_left_until_that_process_is_dead(tmp_path):
    store = CheckpointStore(tmp_path, "mine")
    with other_run(tmp_path) as pid:
        store.staging_path(20).mkdir(parents=True)
        (store.staging_path(20) / "model.safetensors").write_bytes(b"half")
        store.sweep()
        assert sorted(os.listdir(tmp_path)) == [LOCK, ".staging"]
        with pytest.raises(FolderError, match=f"process {pid} on .* another folder"):
            store.stage(20)
        kill(pid)
        store.sweep()
        assert os.listdir(tmp_path) == []


def arguments(folder, **given) -> FastTrainingArguments:
    return FastTrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", **given)


def enter(folder) -> None:
    with run_folder(arguments(folder)):
        assert Path(folder, LOCK).is_file()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("x" * 256, "File name too long"), ("file/below", "Not a directory"), ("/proc/x", "No such file")],
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


def test_what_the_checkpoint_contradicts_is_refused_before_rows_are_read(tmp_path):
    make_trainer(tmp_path, save_strategy="steps", save_steps=2, learning_rate=1e-3).train()
    words = ["--output_dir", str(tmp_path), "--dataset_name", "no_such_file.csv", "--model_size", "esm2_8M"]
    with pytest.raises(CheckpointError, match=r"learning_rate: 0\.001 .*0\.5[^\n]*\nUse --resume no"):
        find_task("masked_lm").main([*words, "--learning_rate", "0.5"])
    for twin in ("", "--learning_rate 1e-3", "--learning_rate 0.5 --resume no"):
        with pytest.raises(HfExtError, match=r"no_such_file\.csv"):
            find_task("masked_lm").main([*words, *twin.split()])


LIMIT_S = 60
REFUSED = 3
PAIRS = [(0.0, 1), (0.02, 2), (0.05, 3), (0.1, 4), (0.2, 5), (0.4, 6), (0.8, "end"), (1.2, 1), (2.0, 4), (3.0, "end")]


class WaitForTheOther(TrainerCallback):
    """Waits at a step, or at the end of training, until the other run of the pair has ended."""

    def __init__(self, flag, at):
        self.flag, self.at = flag, at

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            self.wait()

    def on_train_end(self, args, state, control, **kwargs):
        if self.at == "end":
            self.wait()

    def wait(self) -> None:
        ends = time.monotonic() + LIMIT_S
        while not self.flag.exists() and time.monotonic() < ends:
            time.sleep(0.01)


def train(folder, seed, flag, at) -> dict[str, bytes]:
    """What a recipe does: the folder is the run's from before the trainer is made until the model is saved."""
    trainer = Maker(make_narrow_esm())(folder, seed=seed, resume="auto", callbacks=[WaitForTheOther(flag, at)])
    with run_folder(trainer.args):
        trainer.train()
        trainer.save_model()
    return bits(trainer.model)


def start(folder, seed, flag, at) -> int:
    """A process that trains; it ends with 0, or with REFUSED."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            train(folder, seed, flag, at)
            status = 0
        except FolderError:
            status = REFUSED
        except BaseException:
            traceback.print_exc()  # this process never comes back to pytest
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def run_pair(folder, delay_s, at) -> tuple[dict[int, int], dict[str, bytes | str]]:
    """Seeds 1 and 2, the second later; seed -> status, and what is in the folder."""
    flag = folder / "one has ended"
    seeds = {start(folder / "run", 1, flag, at): 1}
    time.sleep(delay_s)
    seeds[start(folder / "run", 2, flag, at)] = 2
    ended = {}
    for _ in range(2):
        pid, status = os.waitpid(-1, 0)
        ended[seeds[pid]] = os.waitstatus_to_exitcode(status)
        flag.touch()
    return ended, contents(folder / "run")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[int, dict[str, bytes | str]]:
    """What each seed leaves that nobody disturbs."""
    left = {}
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp(f"seed-{seed}")
        (folder / "flag").touch()
        train(folder / "run", seed, folder / "flag", 1)
        left[seed] = contents(folder / "run")
    assert left[1]["model.safetensors"] != left[2]["model.safetensors"]
    return left


@pytest.mark.parametrize(
    ("delay_s", "at"), [PAIRS[4], *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in PAIRS)]
)
def test_one_of_two_runs_is_refused_and_the_other_unharmed(alone, tmp_path, delay_s, at):
    ended, left = run_pair(tmp_path, delay_s, at)
    assert sorted(ended.values()) == [0, REFUSED]
    whole = alone[min(ended, key=ended.get)]
    assert left.keys() == whole.keys()
    weights = [name for name in left if name.endswith(".safetensors") and not name.startswith("rank")]
    assert len(weights) >= 4
    assert {name: left[name] for name in weights} == {name: whole[name] for name in weights}


class LookAt(TrainerCallback):
    """Notes what the folder holds during training, and whether another process could have it."""

    def __init__(self, folder):
        self.folder, self.seen, self.refused = folder, [], 0

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append((self.folder / LOCK).is_file())
        if state.global_step == 3:
            pid = start(self.folder, args.seed, self.folder / "none", 99)
            self.refused += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == REFUSED


@pytest.mark.sampled(2)
@pytest.mark.parametrize("given", [{}, {"dataloader_num_workers": 1}])
def test_trainers_one_after_the_other_share_a_folder_and_none_leaves_a_lock(tmp_path, given):
    make, look = Maker(make_narrow_esm()), LookAt(tmp_path / "run")
    first = make(tmp_path / "run", callbacks=[look], **given)
    first.train()
    first.train()
    second = make(tmp_path / "run", seed=4, callbacks=[look], **given)  # while the first is not ended
    second.train()
    first.save_model()
    second.save_model()
    assert look.seen == [True] * 18
    assert look.refused == 3
    assert LOCK not in names(tmp_path / "run")


def test_a_trainer_that_only_evaluates_needs_no_folder_and_writes_none_of_anothers(tmp_path):
    make = Maker(make_narrow_esm())
    make(tmp_path / "run").train()
    with other_run(tmp_path / "run"):
        before = contents(tmp_path / "run")
        trainer = make(tmp_path / "run", eval_dataset=make(tmp_path / "x").train_dataset)
        assert trainer.evaluate()["eval_loss"] > 0
        for refused in (trainer.train, trainer.save_model):
            with pytest.raises(FolderError, match="in use by another run"):
                refused()
        assert contents(tmp_path / "run") == before
        trainer.save_model(str(tmp_path / "elsewhere"))


def test_a_run_that_was_taken_over_saves_no_more(tmp_path):
    class TakeOver(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                plant_lock(tmp_path / "run")

    with pytest.raises(FolderError, match="in use by another run"):
        Maker(make_narrow_esm())(tmp_path / "run", callbacks=[TakeOver()]).train()
    assert "checkpoint-4" not in names(tmp_path / "run")
    assert (tmp_path / "run" / LOCK).is_file()
