"""The second copy: whole and verified or absent, whatever the target does; a run continues from it on a new machine."""

import errno
import itertools
import logging
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from run_outcomes import losses
from safetensors.torch import load_file
from tiny_classifier import ROWS, make_args, make_model

from hf_ext.checkpoints import CheckpointStore, MirroredStore, mirror, verify
from hf_ext.checkpoints.manifest import check_files
from hf_ext.errors import CheckpointError
from hf_ext.trainer import FastTrainer

pytestmark = pytest.mark.internals

copy_file = mirror.copy_file


@pytest.fixture
def store(tmp_path) -> MirroredStore:
    return MirroredStore(tmp_path / "local", tmp_path / "drive")


@pytest.fixture
def drive(tmp_path) -> Path:
    return tmp_path / "drive"


def save(store, *steps):
    """Commits checkpoints of three files, one of them in a subfolder, whose bytes tell the step."""
    for step in steps:
        folder = store.stage(step)
        (folder / "tower").mkdir()
        for name in ("model.safetensors", "optimizer.pt", "tower/config.json"):
            (folder / name).write_bytes(f"{step} {name} ".encode() * 100)
        store.commit(step, step / 10, {"seed": 7})


def copied_steps(store, best=None) -> list[int]:
    """Steps at the target once all is copied_steps, each of which must verify."""
    assert store.finish_copies(best) is None
    assert [check_files(s.path, s.manifest) for s in store.target.checkpoints()].count([]) == len(
        store.target.checkpoints()
    )
    return [stored.step for stored in store.target.checkpoints()]


class Gate:
    """A target whose every file waits for `open`; `begun` is set when the first one arrives."""

    def __init__(self, monkeypatch):
        self.begun, self.open = threading.Event(), threading.Event()
        monkeypatch.setattr(mirror, "copy_file", self)

    def __call__(self, source, target):
        self.begun.set()
        assert self.open.wait(20)
        copy_file(source, target)


def test_a_copy_is_made_beside_training_and_pins_the_local_checkpoint(store, drive, monkeypatch):
    gate = Gate(monkeypatch)
    save(store, 1)
    store.begin_copies(None)
    assert gate.begun.wait(20)
    assert not store.delete(1)
    assert os.listdir(drive) == [".staging"]  # not under its name before it is whole
    for step in (2, 3, 4):
        save(store, step)
        store.begin_copies(2)
    gate.open.set()
    assert copied_steps(store, best=2) == [1, 2, 4]  # of those that waited, the newest and the best
    assert store.delete(1)


def test_nothing_is_deleted_at_the_target_before_it_holds_something_newer_to_continue_from(store, monkeypatch):
    save(store, 10, 20)
    store.begin_copies(None)
    assert copied_steps(store) == [20]
    save(store, 30)
    store.delete(10)
    store.delete(20)
    failing = pytest.MonkeyPatch()
    failing.setattr(mirror, "copy_file", raising(errno.EIO))
    assert store.finish_copies(None) is not None
    assert [stored.step for stored in store.target.checkpoints()] == [20]
    failing.undo()
    assert copied_steps(store) == [30]
    save(store, 40)
    assert copied_steps(store, best=30) == [30, 40]
    emptied = []
    monkeypatch.setattr(os, "truncate", lambda path, size: emptied.append(path.name))
    store.delete(30)
    assert copied_steps(store) == [40]
    assert "model.safetensors" in emptied  # the trash of a Drive counts what it holds


def raising(number):
    def fail(source, target):
        target.write_bytes(source.read_bytes()[:10])
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ENOTCONN, errno.ESTALE])
def test_a_failed_copy_leaves_nothing_half_is_said_and_made_up_for(store, drive, monkeypatch, number, caplog):
    save(store, 10)
    monkeypatch.setattr(mirror, "copy_file", raising(number))
    lacking = store.finish_copies(None)
    assert lacking.startswith(f"{drive} lacks the newest checkpoint, which is in {store.folder}: {drive} could not")
    assert os.strerror(number) in lacking
    assert lacking in [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert os.listdir(drive) == []
    monkeypatch.undo()
    assert copied_steps(store) == [10]


def flip_a_bit(source, target):
    content = bytearray(source.read_bytes())
    content[len(content) // 2] ^= 4
    target.write_bytes(content)


def drop_a_file(source, target):
    if source.name != "config.json":
        copy_file(source, target)


@pytest.mark.parametrize(("bad_copy", "found"), [(flip_a_bit, "expected"), (drop_a_file, "found nothing")])
def test_a_target_that_writes_something_else_never_gets_a_checkpoint(store, drive, monkeypatch, bad_copy, found):
    save(store, 10)
    monkeypatch.setattr(mirror, "copy_file", bad_copy)
    assert found in store.finish_copies(None)
    assert os.listdir(drive) == []


def test_a_drive_that_is_gone_is_said_and_not_made_anew(store, drive):
    save(store, 10)
    drive.rmdir()
    assert "is its disk still mounted?" in store.finish_copies(None)
    assert not drive.exists()
    with pytest.raises(FileNotFoundError):  # it might hold what a new start would go past
        store.find_newest()


def test_what_another_run_left_at_the_target_is_moved_and_never_deleted(store, drive):
    save(CheckpointStore(drive, "other"), 10)
    save(store, 10)
    assert copied_steps(store) == [10]
    assert sorted(os.listdir(drive)) == ["checkpoint-10", "previous-checkpoint-10"]


def copy_until(kill_at, folder):
    """Four saves and copies in a process killed before an operation at the target; (last copy, whether it ended)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            operations = itertools.count(1)

            def see(event, args):
                changes = event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
                if changes and "drive" in str(args[0]) and next(operations) == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(see)
            save_and_copy(folder, lambda step: os.write(writing, bytes([step])))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        reported = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return max(reported, default=0), status == 0


def save_and_copy(folder, report):
    """From the newest checkpoint on, of which two stay."""
    store = MirroredStore(folder / "local", folder / "drive")
    store.sweep()
    newest = store.find_newest()
    store.adopt("run")
    for step in range(newest.step + 10 if newest else 10, 41, 10):
        save(store, step)
        for old in [stored.step for stored in store.checkpoints()][:-2]:
            store.delete(old)
        store.finish_copies(None)
        report(step)
    store.finish_copies(None)


@pytest.mark.parametrize("every", [27, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_kill_while_copying_leaves_a_copy_whole_or_absent_and_the_next_run_makes_up_for_it(
    every, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # which a kill does not lose
    for kill_at in itertools.count(1, every):
        folder = tmp_path / str(kill_at)
        drive = folder / "drive"
        folder.mkdir()
        reported, ended = copy_until(kill_at, folder)
        assert [verify(path)[1] for path in drive.glob("checkpoint-*") if verify(path)[1]] == []
        assert not reported or CheckpointStore(drive).find_newest().step >= reported
        save_and_copy(folder, print)
        assert CheckpointStore(drive).find_newest().step == 40
        assert [name for name in os.listdir(drive) if not name.startswith("checkpoint-")] == []
        if ended:
            break
    assert kill_at > 100


def test_a_target_under_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="Mount the disk"):
        MirroredStore(tmp_path / "local", tmp_path / "content" / "drive")
    assert not (tmp_path / "content").exists()


@pytest.fixture
def make_trainer(tmp_path):
    """A tiny classifier; 8 steps, saved every second one, the best by the loss on the same rows."""
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}

    def make(output="drive", local="local", **given):
        given = {
            "max_steps": 8,
            "resume": "auto",
            "local_checkpoint_dir": local and str(tmp_path / local),
            **best,
            **given,
        }
        args = make_args(tmp_path / output, **given)
        return FastTrainer(make_model(), args, train_dataset=ROWS, eval_dataset=ROWS)

    return make


def test_a_run_on_a_new_machine_is_the_uninterrupted_one(make_trainer, tmp_path):
    whole = make_trainer("whole", local=None, load_best_model_at_end=False, eval_strategy="no")
    whole.train()
    given = {"load_best_model_at_end": False, "eval_strategy": "no", "save_total_limit": None}
    first = make_trainer(**given)
    first.train()
    shutil.rmtree(tmp_path / "local")
    shutil.rmtree(tmp_path / "drive" / "checkpoint-8")
    newest = max((tmp_path / "drive").glob("checkpoint-*"))  # a slow copy leaves out one that a newer follows
    resumed = make_trainer(**given)
    resumed.train()
    assert resumed._ext_parts.resumer.resumed.stored.path == newest
    assert losses(resumed) == losses(whole)
    ours, theirs = (load_file(tmp_path / run / "checkpoint-8" / "model.safetensors") for run in ("drive", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_best_checkpoint_is_found_where_only_the_output_folder_has_it(make_trainer, tmp_path):
    first = make_trainer(learning_rate=1e-9, max_steps=8)  # the best is the one of step 2 or any later, by chance
    first.train()
    best = first.state.best_global_step
    shutil.rmtree(tmp_path / "local")
    resumed = make_trainer(learning_rate=1e-9, max_steps=8)
    resumed.train()
    assert resumed.state.best_model_checkpoint == str(tmp_path / "drive" / f"checkpoint-{best}")


def test_a_local_folder_inside_the_output_folder_is_refused(make_trainer):
    with pytest.raises(CheckpointError, match="outside"):
        make_trainer(local="drive/local")
