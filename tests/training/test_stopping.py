"""A run that is asked to stop saves, exits with its own code, and continues as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
from locations import ROOT
from train_until_stopped import Case, start

STOPPED = 75
CYCLES = {"gradient_accumulation_steps": 3, "num_train_epochs": 2}  # 11 batches: 4 steps an epoch, the last of 2
EACH_EPOCH = {"eval_strategy": "epoch", "logging_strategy": "epoch", "save_strategy": "epoch"}
EVALS = {"eval_strategy": "steps", "eval_steps": 2}
TWO_SETS = {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, "metric_for_best_model": "set0_loss"}
SUBSET = {**CYCLES, **EVALS, "eval_subset": 3, "metric_for_best_model": "loss"}  # 2 batches, and 4 of all rows
LIVING_ON = {**CYCLES, **EVALS, "dataloader_num_workers": 1, "dataloader_persistent_workers": True}

# What is interrupted, and the step of the checkpoint that it leaves; `True`: the evaluation of that step is not made.
INTERRUPTED = {
    "in a cycle": (Case(CYCLES, ("on_substep_end", 2)), 2, False),
    "in a short last cycle": (Case(CYCLES, ("on_substep_end", 5), ("SIGINT",)), 4, False),
    "after a step": (Case({}, ("on_step_end", 7)), 7, False),
    "while saving": (Case({}, ("save", 2)), 7, False),
    "when its terminal is closed": (
        Case({"disable_tqdm": False}, ("on_step_end", 4), ("close",), terminal=True),
        4,
        False,
    ),
    "without checkpoints": (Case({"save_strategy": "no"}, ("on_step_end", 5)), 5, False),
    "where an evaluation is due": (Case({**CYCLES, **EVALS}, ("on_step_end", 2)), 2, True),
    "in an evaluation": (Case({**CYCLES, **EVALS}, ("on_prediction_step", 2)), 2, True),
    "in an evaluation, with workers that live on": (Case(LIVING_ON, ("on_prediction_step", 2)), 2, True),
    "in the second evaluation, with workers of the plan": (
        Case({**LIVING_ON, "speedups": ["data_loading"]}, ("on_prediction_step", 6)),
        4,
        True,
    ),
    "in what follows the subset": (Case(SUBSET, ("on_prediction_step", 3)), 2, True),
    "at the end of an epoch": (Case({**CYCLES, **EACH_EPOCH}, ("on_step_end", 4)), 4, True),
    "in the evaluation of an epoch": (Case({**CYCLES, **EACH_EPOCH}, ("on_prediction_step", 3)), 4, True),
    "at the last step": (Case({**CYCLES, **EVALS, "max_steps": 7}, ("on_step_end", 7)), 7, True),
    "with the best saved": (
        Case(
            {**CYCLES, **EACH_EPOCH, "save_strategy": "best", "metric_for_best_model": "loss"},
            ("on_prediction_step", 1),
        ),
        4,
        True,
    ),
    "in the first of two sets": (Case(TWO_SETS, ("on_prediction_step", 2), eval_sets=2), 3, True),
    "in the second of two sets": (Case(TWO_SETS, ("on_prediction_step", 14), eval_sets=2, early_stopping=9), 6, True),
    "in the evaluation before training": (Case({**EVALS, "eval_on_start": True}, ("on_prediction_step", 2)), 0, True),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a case would have come to had it not been interrupted; trained once for all cases with these arguments."""
    known: dict[str, dict] = {}

    def train(case, ranks=1) -> dict:
        key = f"{case.args} {case.eval_sets} {case.early_stopping} {ranks}"
        if key not in known:
            folder = tmp_path_factory.mktemp("whole")
            known[key] = finish(folder, replace(case, at=None, step_s=0.0), "whole", ranks=ranks)
        return known[key]

    return train


def finish(folder, case, name, code=0, ranks=1) -> dict:
    """Runs a case to its end; returns the report of its last process."""
    processes = start(folder, case, name, ranks)
    for rank, process in enumerate(processes):
        process.join(60)
        written = folder / f"{name}-{rank}.txt"  # not of one that has a terminal
        output = written.read_text() if written.exists() else ""
        if process.exitcode is None:
            process.kill()
        assert process.exitcode == code, output[-3000:]
    path = folder / f"{name}-{ranks - 1}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def same_run(one, other) -> bool:
    return all(one[key] == other[key] for key in ("weights", "history", "best", "step"))


def without_evaluation(report, step) -> dict:
    """As if there had been none at `step`; what was the best, and looked at in full, may then be another."""
    if step is None:
        return report
    logs = [log for log in report["history"] if log["step"] != step or not any(key.startswith("eval_") for key in log)]
    logs = [{key: value for key, value in log.items() if "_full_" not in key} for log in logs]
    return {**report, "history": logs, "best": None}


def continued(folder, case, reference, ranks=1, lost=None) -> None:
    """Resumes a stopped case; fails unless it ends as the uninterrupted one did, but for the evaluation at `lost`."""
    resumed = without_evaluation(finish(folder, replace(case, at=None, resume=True), "resumed", ranks=ranks), lost)
    reference = without_evaluation(reference, lost)
    assert resumed["history"] == reference["history"]
    assert same_run(resumed, reference)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", INTERRUPTED)
def test_a_run_signalled_anywhere_saves_and_continues_identically(tmp_path, whole, name):
    case, step, is_lost = INTERRUPTED[name]
    stopped = finish(tmp_path, case, "stopped", code=STOPPED)
    assert stopped["step"] == step
    assert stopped["reason"] == f"received {case.signals[0].replace('close', 'SIGHUP')}"
    assert stopped["handlers_back"]
    assert (tmp_path / "run" / f"checkpoint-{step}").is_dir()
    reference, lost = whole(case), step if is_lost else None
    logged = without_evaluation(reference, lost)["history"]
    assert stopped["history"] == logged[: len(stopped["history"])]  # nothing that a whole run logs not
    assert not same_run(stopped, reference)
    continued(tmp_path, case, reference, lost=lost)


def test_a_checkpoint_at_the_end_of_an_epoch_comes_after_the_evaluation_that_is_due_there(tmp_path, whole):
    args = {**CYCLES, **EACH_EPOCH, "save_strategy": "steps", "save_steps": 4}
    case = Case(args, ("on_step_begin", 5), crash=True)  # after the step in which the save ends
    finish(tmp_path, case, "crashed", code=9)
    continued(tmp_path, case, whole(case))


def test_a_second_signal_says_that_the_stop_is_under_way_and_changes_nothing(tmp_path, whole):
    case = Case(CYCLES, ("on_substep_end", 2), ("SIGINT", "SIGTERM"))
    stopped = finish(tmp_path, case, "stopped", code=STOPPED)
    assert stopped["reason"] == "received SIGINT"
    output = (tmp_path / "stopped-0.txt").read_text()
    assert output.index("training stops after this step") < output.index("the stop is under way")
    continued(tmp_path, case, whole(case))


def test_a_third_signal_ends_the_process_at_once_and_the_last_checkpoint_continues(tmp_path, whole):
    case = Case({}, ("on_step_end", 5), ("SIGINT", "SIGINT", "SIGINT"))
    finish(tmp_path, case, "ended", code=1)
    assert "KeyboardInterrupt" in (tmp_path / "ended-0.txt").read_text()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
    continued(tmp_path, case, whole(case))


def test_training_in_a_thread_works_and_leaves_signals_alone(tmp_path, whole):
    case = Case(CYCLES, in_thread=True)
    assert same_run(finish(tmp_path, case, "thread"), whole(case))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_process_group_stops_a_run_with_data_workers_within_seconds(tmp_path, whole, number):
    case = Case({"dataloader_num_workers": 2}, step_s=0.2, new_group=True)
    (process,) = start(tmp_path, case, "stopped")
    wait_for((tmp_path / "run" / "checkpoint-3").is_dir, 30)
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    assert all(os.getpgid(worker.pid) == worker.pid for worker in workers)  # else the signal may kill them
    os.killpg(process.pid, number)
    asked = time.monotonic()
    process.join(30)
    assert process.exitcode == STOPPED, (tmp_path / "stopped-0.txt").read_text()[-3000:]
    assert time.monotonic() - asked < 10
    continued(tmp_path, replace(case, step_s=0.0), whole(case))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("grace_s", [2, 1, 5, 15, 30])
def test_a_stop_at_any_moment_is_over_before_the_machine_is_taken_away(tmp_path, whole, grace_s):
    case = Case(CYCLES, step_s=0.1)
    (process,) = start(tmp_path, case, "stopped")
    wait_for((tmp_path / "run" / "checkpoint-3").is_dir, 30)
    time.sleep(0.03 * grace_s % 0.1)  # other moments of a step
    os.kill(process.pid, signal.SIGTERM)
    process.join(grace_s)
    process.kill()  # which does nothing to a process that has ended
    process.join()
    assert process.exitcode == STOPPED, (tmp_path / "stopped-0.txt").read_text()[-3000:]
    continued(tmp_path, replace(case, step_s=0.0), whole(case))


def wait_for(condition, seconds) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_run_stops_before_its_time_limit_by_the_margin(tmp_path):
    limit_s = 3
    args = {"num_train_epochs": 1000, "max_hours": limit_s / 3600}
    stopped = finish(tmp_path, Case(args, step_s=0.01), "stopped", code=STOPPED)
    assert stopped["reason"] == f"max_hours={limit_s / 3600} is near"
    assert (tmp_path / "run" / f"checkpoint-{stopped['step']}").is_dir()


def test_checkpoints_by_the_clock_are_as_exact_as_others(tmp_path, whole):
    args = {"save_strategy": "no", "save_minutes": 0.15 / 60}
    case = Case(args, ("on_step_end", 9), crash=True, step_s=0.05)
    finish(tmp_path, case, "crashed", code=9)
    steps = sorted(int(path.name.split("-")[1]) for path in (tmp_path / "run").glob("checkpoint-*"))
    assert steps  # one every third step of 50 ms, more where the machine is slow
    continued(tmp_path, replace(case, step_s=0.0), whole(case))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "step", "is_lost"),
    [
        (Case(CYCLES, ("on_substep_end", 2), rank=1), 2, False),  # they agree at the end of the step
        (Case({**CYCLES, **EVALS}, ("on_prediction_step", 2), rank=1), 2, True),
    ],
)
def test_two_processes_agree_to_stop_when_one_is_signalled(tmp_path, whole, case, step, is_lost):
    assert finish(tmp_path, case, "stopped", code=STOPPED, ranks=2)["step"] == step
    continued(tmp_path, case, whole(case, ranks=2), ranks=2, lost=step if is_lost else None)


ENDS = {  # what ends it by itself: (status, what the last lines say)
    "NaN": (65, "NotFiniteError: "),
    "worker": (71, "DataWorkerDied: DataLoader worker (pid"),
    "workers": (71, "DataWorkerDied: DataLoader worker (pid"),
    "file limit": (71, "DataWorkerDied: DataLoader worker (pid"),
    "disk": (74, "DiskFailure: "),
    "memory": (69, "MemoryExhausted: no room Give half of --per_device_train_batch_size"),
    "bug": (1, "KeyError: 'a bug'"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ENDS)
def test_a_process_with_a_data_worker_ends_with_its_status_and_message(tmp_path, name):
    status, words = ENDS[name]
    event = "on_prediction_step" if name == "workers" else "on_step_end"  # those of training are there, too
    case = Case({**EVALS, "num_train_epochs": 3, "dataloader_num_workers": 1}, (event, 4), end=name)
    finish(tmp_path, case, "ended", code=status)
    assert words in (tmp_path / "ended-0.txt").read_text()[-3000:]


HEAD = """
import os, signal, sys, time
from pathlib import Path
from hf_ext.errors import exit_on_errors
def ready(): Path("ready").write_text("")
with exit_on_errors():
"""
WAITS = "    ready(); time.sleep(30)"
TIDIES = """
    try:
        ready(); time.sleep(30)
    finally:
        time.sleep(0.5)
        Path("tidied").write_text("")
"""


def start_script(folder, body, **given):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_EXT_STATUS_FILE": str(folder / "statuses")}
    command = [sys.executable, "-c", HEAD + body]
    given = {"stderr": subprocess.PIPE, "text": True, **given}
    return subprocess.Popen(command, cwd=folder, env=environment, **given)


def signalled(folder, body, *names):
    """Status, stderr, and lines of its file of statuses, of a process that is signalled once it is ready."""
    with start_script(folder, body) as process:
        ends = time.monotonic() + 30
        while not (folder / "ready").exists():
            assert time.monotonic() < ends
            time.sleep(0.02)
        time.sleep(0.1)  # from the file to the wait
        for name in names:
            process.send_signal(getattr(signal, name))
            time.sleep(0.1)
        _, error = process.communicate(timeout=30)
        return process.returncode, error, (folder / "statuses").read_text()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_each_signal_outside_of_training_ends_a_recipe_as_a_stop_does(tmp_path, name):
    status, error, noted = signalled(tmp_path, WAITS, name)
    assert (status, error.count("Traceback"), noted) == (75, 0, "75\n")
    assert f"Interrupted by {name}. Files that were saved are whole; the same command goes on" in error


def test_machines_that_repeat_themselves_do_not_break_into_tidying_up(tmp_path):
    assert signalled(tmp_path, TIDIES, "SIGTERM", "SIGTERM", "SIGHUP")[0] == 75
    assert (tmp_path / "tidied").exists()
