"""However training ends, it ends well; and what users assign, return or call later counts as in Trainer."""

import copy
import gc
import json
import multiprocessing
import os
import re
import signal
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from continued_runs import EVALUATING, MODEL, SETTINGS, same, train
from datasets import Dataset
from miniature_esm import make_narrow_esm
from resuming_runs import Killed
from token_rows import make_number_rows
from token_rows import make_number_rows as make_rows
from torch.utils.data import Dataset as TorchDataset
from train_until_stopped import Case, Collator
from transformers import TrainerCallback

from hf_ext.errors import ArgumentError, DataError, DataWorkerDied, NotFiniteError, StoppedForGood, TrainingStopped
from hf_ext.trainer import FastTrainer
from hf_ext.training import name_dead_workers
from hf_ext.training_args import FastTrainingArguments

ALONE = {"dataloader_num_workers": 0}
OTHERS: set[int] = set()
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class At(TrainerCallback):
    """Does something at an event of a step."""

    def __init__(self, event, step, act):
        self.step, self.act = step, act
        setattr(self, event, self.see)

    def see(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act()


def raise_(error):
    raise error


def send(number):
    os.kill(os.getpid(), number)


def kill_a_worker():
    os.kill(workers()[0], signal.SIGKILL)


@pytest.fixture(autouse=True)
def _only_own_children(monkeypatch):
    """Other tests of this process may have left helpers of torch's compiler, which live as long as the process."""
    monkeypatch.setattr(f"{__name__}.OTHERS", {child.pid for child in psutil.Process().children()})


def workers():
    living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child.pid for child in living if child.pid not in OTHERS]


def make(folder, act=None, event="on_step_end", step=3, rows=None, cls=FastTrainer, **given):
    args = FastTrainingArguments(output_dir=str(folder), **{**SETTINGS, **given})
    callbacks = [At(event, step, act)] if act else []
    sets = rows or make_number_rows(8, 1), make_number_rows(4, 2) if "eval_strategy" in given else None
    return cls(make_narrow_esm(), args, Collator(Case()), *sets, callbacks=callbacks)


def test_a_script_whose_output_cannot_be_written_trains_to_its_end(tmp_path, monkeypatch):
    with open("/dev/full", "w", buffering=1) as full:  # without a progress bar Trainer prints its logs
        monkeypatch.setattr(sys, "stdout", full)
        trainer = make(tmp_path, **ALONE)
        trainer.train()
        monkeypatch.undo()
    assert trainer.state.global_step == 8
    trainer.end()


def nan_rows():
    rows = make_number_rows(8, 1)
    return Dataset.from_dict({"input_ids": rows["input_ids"], "labels": [np.nan] * 8})


ENDS = {
    "finished": (None, {}, None),
    "SIGTERM": (lambda: send(signal.SIGTERM), {}, StoppedForGood),
    "SIGINT": (lambda: send(signal.SIGINT), {}, StoppedForGood),
    "SIGHUP": (lambda: send(signal.SIGHUP), {}, StoppedForGood),
    "an exception": (lambda: raise_(Killed()), {}, Killed),
    "KeyboardInterrupt": (lambda: raise_(KeyboardInterrupt()), {}, KeyboardInterrupt),
    "a third signal": (lambda: [send(signal.SIGINT) for _ in range(3)], {}, KeyboardInterrupt),
    "NaN": (None, {"rows": nan_rows(), "logging_nan_inf_filter": False}, NotFiniteError),
    "an evaluation given up": (
        lambda: send(signal.SIGTERM),
        {**EVALUATING, "event": "on_prediction_step", "step": 4, "resume": "auto"},
        TrainingStopped,
    ),
    # More rows than workers hand over ahead.
    "a dead worker": (kill_a_worker, {"rows": make_number_rows(40, 1)}, DataWorkerDied),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("end", ENDS)
def test_after_any_end_handlers_are_back_and_no_worker_is_left(tmp_path, end):
    act, given, error = ENDS[end]
    handlers = [signal.getsignal(number) for number in NUMBERS]
    trainer, caught = make(tmp_path, act, **given), type(None)
    try:
        trainer.train()
    except BaseException as raised:
        caught = type(raised)
    assert caught is (error or type(None))
    assert [signal.getsignal(number) for number in NUMBERS] == handlers
    trainer.end()
    gc.collect()
    assert multiprocessing.active_children() == []
    assert workers() == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("given", "asked", "said"),
    [
        ({"resume": "auto"}, None, None),
        ({"resume": "no"}, True, None),
        ({}, None, "The same command begins anew; with --resume auto"),
        ({"resume": "auto", "save_only_model": True}, None, "holds weights alone"),
        ({"resume": "auto"}, "checkpoint-2", "begins from .*checkpoint-2; with --resume auto"),
    ],
)
def test_a_stop_says_whether_the_same_call_goes_on_from_it(tmp_path, given, asked, said):
    if asked is not None:
        train(tmp_path, kill_at=3)
    trainer = make(tmp_path, lambda: send(signal.SIGTERM), step=4, **given)
    with pytest.raises(TrainingStopped, match=said or "The same command continues from it") as end:
        trainer.train(resume_from_checkpoint=str(tmp_path / asked) if isinstance(asked, str) else asked)
    assert end.value.exit_code == (75 if said is None else 1)
    assert isinstance(end.value, StoppedForGood) == (said is not None)
    assert (tmp_path / f"checkpoint-{trainer.state.global_step}").is_dir()


def test_a_killed_worker_is_named_with_the_checkpoint_from_which_the_same_command_goes_on(tmp_path):
    more = make_number_rows(40, 1)  # than workers hand over ahead
    whole = train(tmp_path / "whole", rows=lambda table: more)
    trainer = make(tmp_path / "killed", kill_a_worker, rows=more)
    with pytest.raises(DataWorkerDied) as died:
        trainer.train()
    trainer.end()
    text = str(died.value)
    # What it had handed over may be trained on before its death is noticed.
    assert re.match(r"DataLoader worker \(pid.* checkpoint-[24] is the last one saved, and valid\. .*--resume", text)
    assert "fewer than dataloader_num_workers=1" in text
    assert same(train(tmp_path / "killed", resume=True, rows=lambda table: more), whole)


def test_deaths_that_torch_hears_of_between_any_two_lines_are_one_error():
    left = []

    def hear(*_):  # as torch does in a signal handler, once for each loader
        if left:
            raise RuntimeError(left.pop())

    def run(after_us):
        left[:] = ["DataLoader worker (pid 7) is killed by signal: Killed. "] * 2
        signal.setitimer(signal.ITIMER_REAL, after_us / 1e6, 1e-4)
        raise ConnectionResetError("its pipe broke")

    before = signal.signal(signal.SIGALRM, hear)
    try:
        for after_us in range(2, 200, 2):
            with pytest.raises(DataWorkerDied, match=r"worker \(pid 7\) is killed by signal: Killed\. No checkpoint"):
                name_dead_workers(partial(run, after_us), SimpleNamespace(checkpoints=list), 1)
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_broken_pipe_of_a_users_own_is_no_data_worker(tmp_path):
    def read():
        reader, writer = multiprocessing.Pipe(duplex=False)
        writer.close()
        reader.recv()

    trainer = make(tmp_path, read, **ALONE)
    with pytest.raises(EOFError):
        trainer.train()
    trainer.end()


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"num_train_epochs": 0}, ArgumentError, "num_train_epochs=0: must be a number above 0"),
        ({"num_train_epochs": -1}, ArgumentError, "num_train_epochs=-1"),
        ({"max_steps": 0}, ArgumentError, "max_steps=0 trains nothing"),
        ({"dataloader_drop_last": True, "per_device_train_batch_size": 9}, ArgumentError, "8 training rows are fewer"),
        (
            {"dataloader_drop_last": True, "per_device_train_batch_size": 9, "max_steps": 4},
            ArgumentError,
            "8 training rows are fewer than the 9 of one batch",
        ),
    ],
)
def test_a_run_that_would_train_nothing_is_refused_and_can_still_evaluate(tmp_path, given, error, text):
    trainer = make(tmp_path, **{**EVALUATING, **ALONE, "per_device_eval_batch_size": 2, **given})
    with pytest.raises(error, match=re.escape(text)):
        trainer.train()
    assert trainer.state.global_step == 0
    assert trainer.evaluate()["eval_loss"] > 0


class Rows(TorchDataset):
    """A map-style dataset that is no `datasets.Dataset`."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


EMPTY = {
    "list": [],
    "torch": Rows([]),
    "datasets": Dataset.from_dict({}),
    "with columns": make_number_rows(8, 1).select([]),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("speedups", [[], ["all"]])
def test_training_rows_that_are_none_are_refused_when_training_begins_and_evaluation_works(tmp_path, name, speedups):
    args = FastTrainingArguments(output_dir=str(tmp_path), speedups=speedups, **{**SETTINGS, **ALONE})
    trainer = FastTrainer(make_narrow_esm(), args, Collator(Case()), EMPTY[name], make_number_rows(4, 2))
    with pytest.raises(DataError, match="The training set has no rows"):
        trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


def make_here(folder, cls=FastTrainer, callbacks=(), **given):
    args = FastTrainingArguments(output_dir=str(folder), **{**SETTINGS, **ALONE, **given})
    rows = make_rows(8, 1), make_rows(4, 2) if "eval_strategy" in given else None
    return cls(copy.deepcopy(MODEL), args, Collator(Case()), *rows, callbacks=list(callbacks))


def make_other(folder, **given):
    # Made before the trainer: every TrainingArguments makes accelerate's shared state anew (transformers 5.23).
    return FastTrainingArguments(**{**SETTINGS, **ALONE, "output_dir": str(folder), **given})


def test_other_arguments_that_are_assigned_count_everywhere(tmp_path):
    other = make_other(tmp_path, save_only_model=True)
    trainer = make_here(tmp_path, save_steps=4)
    before, trainer.args = trainer.args, other
    assert trainer.args is other
    assert not before.save_only_model
    trainer.train()
    trainer.end()
    assert not (tmp_path / "checkpoint-2" / "optimizer.pt").exists()
    assert json.loads((tmp_path / "checkpoint-2" / "training_args.json").read_text())["save_only_model"]


def test_another_output_folder_counts_from_the_next_run_on(tmp_path):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    other = make_other(third, save_steps=8, save_minutes=1e6, local_checkpoint_dir=str(tmp_path / "local"))
    trainer = make_here(
        tmp_path / "never", save_steps=4, save_minutes=1e6
    )  # which keeps records: something is asked for
    written = []
    for folder in (first, second, third):
        if folder == third:
            trainer.args = other
        else:
            trainer.args.output_dir = str(folder)
        trainer.train()
        trainer.save_state()
        assert all(path.stat().st_mtime_ns == then for path, then in written)  # earlier stages stay as they are
        written += [(path, path.stat().st_mtime_ns) for path in folder.rglob("*")]
        assert {"plan.json", "throughput.json", "trainer_state.json"} < {path.name for path in folder.iterdir()}
    trainer.end()
    found = {folder.name: {path.name for path in folder.glob("*checkpoint-*")} for folder in tmp_path.iterdir()}
    saved = {"checkpoint-4", "checkpoint-8"}
    assert found == {"never": set(), "first": saved, "second": saved, "third": {"checkpoint-8"}, "local": set()}
    assert len([*tmp_path.glob("local/third-*/checkpoint-8")]) == 1


class StopsInEvaluation(TrainerCallback):
    """Is signalled in an evaluation, and returns a control object of its own, as Trainer allows."""

    def __init__(self):
        self.left = 1

    def on_prediction_step(self, args, state, control, **kwargs):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return copy.copy(control)


def test_a_stop_in_an_evaluation_is_not_lost_with_a_control_object(tmp_path):
    given = {"eval_strategy": "steps", "eval_steps": 2}
    whole = make_here(tmp_path / "whole", **given)
    whole.train()
    trainer = make_here(tmp_path / "stopped", callbacks=[StopsInEvaluation()], **given)
    with pytest.raises(TrainingStopped, match="checkpoint-2"):
        trainer.train()
    assert trainer.state.global_step == 2
    resumed = make_here(tmp_path / "stopped", resume="auto", **given)
    resumed.train()
    weights = zip(resumed.model.state_dict().values(), whole.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    for one in (whole, trainer, resumed):
        one.end()
