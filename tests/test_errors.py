"""How a recipe ends: its message last, in a launcher's report too."""

import errno
import importlib
import json
import logging
import re
import subprocess
import time
from functools import partial
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from launches import RECIPES, TWO_CPUS, Launch, clean_environment
from other_runs import plant_lock
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hf_ext.errors import ArgumentError, MissingDependencyError, TrainingStopped, exit_on_errors
from hf_ext.reporting.run_log import start_run_log


@pytest.mark.parametrize(("error", "status"), [(ArgumentError("no\nsuch"), 1), (TrainingStopped("stopped"), 75)])
def test_an_error_ends_the_process_with_its_message_and_status(error, status, capsys, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    print("before")
    with pytest.raises(SystemExit) as end, exit_on_errors():
        raise error
    assert end.value.code == status
    assert capsys.readouterr() == ("before\n", f"{type(error).__name__}: {error}\n")


HOSTILE = "\x1b]0;title\x07 \x1b[2J\x9b31m \x7f\r two\n\tlines"  # as a foreign config.json may hold it
HARMLESS = "\\x1b]0;title\\x07 \\x1b[2J\\x9b31m \\x7f\\x0d two\n\tlines"


def test_no_message_and_no_line_of_a_log_drives_the_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for kind in (ArgumentError, TrainingStopped, KeyboardInterrupt, partial(OSError, errno.ENOSPC, "full")):
        with pytest.raises(SystemExit), exit_on_errors():
            raise kind(HOSTILE)
        assert not re.search(r"[^\n\t -~]", capsys.readouterr().err)
        assert not re.search(r"[^\n\t -~]", json.loads((tmp_path / "error.json").read_text())["message"])
    start_run_log(tmp_path).warning(HOSTILE)
    logging.getLogger("transformers").handlers[-1].emit(logging.makeLogRecord({"msg": HOSTILE}))
    start_run_log(None)
    for handler in logging.getLogger("transformers").handlers:
        assert HARMLESS in handler.format(logging.makeLogRecord({"msg": HOSTILE}))
    assert capsys.readouterr().out == f"{HARMLESS}\n"
    assert (tmp_path / "run.log").read_text().count(HARMLESS) == 2


def test_no_message_and_no_line_of_a_log_has_a_token(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    token = "hf_" + "aB3" * 12
    with pytest.raises(SystemExit), exit_on_errors():
        raise ArgumentError(f"unknown argument '{token}', hf_ext_with_a_long_name_of_its_own stays")
    start_run_log(tmp_path).warning("token=%s", token)
    start_run_log(None)
    said = "ArgumentError: unknown argument 'hf_...', hf_ext_with_a_long_name_of_its_own stays\n"
    assert capsys.readouterr().err == said
    assert token not in (tmp_path / "run.log").read_text()


def test_a_package_that_is_missing_is_the_message_alone(capsys, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    for error in (
        ImportError("You need to install `lomo_optim` in order to use LOMO optimizers."),
        PackageNotFoundError("deepspeed"),
        MissingDependencyError("peft is needed for --use_peft and is not installed."),
        RuntimeError("WandbCallback requires wandb to be installed. Run `pip install wandb`."),
    ):
        with pytest.raises(SystemExit) as end, exit_on_errors():
            raise error
        assert end.value.code == 1
        assert capsys.readouterr().err == f"MissingDependencyError: {error}\n"


@pytest.mark.parametrize("error", [ImportError("cannot import name 'x' from 'y'"), RuntimeError("shapes differ")])
def test_errors_that_nobody_expected_keep_their_traceback(error):
    with pytest.raises(type(error)) as kept, exit_on_errors():
        raise error
    assert kept.value is error


def test_an_unknown_metric_is_refused_before_training(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(RECIPES)
    for recipe, known in (("max_speed", "loss, spearman, pearson"), ("mlm", "loss, token_loss, perplexity")):
        words = ["--output_dir", str(tmp_path / recipe), "--metric_for_best_model", "bogus", "--use_cpu", "true"]
        with pytest.raises(ArgumentError, match=f"metric_for_best_model='bogus': allowed are {known}"):
            importlib.import_module(recipe).main(words)
        assert not (tmp_path / recipe).exists()


def test_the_report_of_torchs_launcher_shows_the_message(tmp_path, monkeypatch, capsys):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit), exit_on_errors():
        raise ArgumentError("seed=-1: must not be negative.")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    assert time.time() - failure.timestamp < 60
    report = str(ChildFailedError("max_speed.py", {0: failure}))
    assert "traceback : ArgumentError: seed=-1: must not be negative." in report
    file.unlink()  # and what it says without
    assert "To enable traceback see" in str(
        ChildFailedError("max_speed.py", {0: ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))})
    )


@pytest.mark.nightly
@pytest.mark.skipif(torch.accelerator.is_available(), reason="two processes on the CPU")
@pytest.mark.parametrize(("num", "flags"), [(1, ("--quiet",)), (2, TWO_CPUS.flags)])
def test_a_refusal_is_the_last_word_through_the_launcher(num, flags, tmp_path):
    """All processes of a run that is refused end, and the launcher's last block holds the reason."""
    plant_lock(tmp_path / "run", pid=1)
    before = (tmp_path / "run" / ".run.lock").read_bytes()
    script = [str(RECIPES / "max_speed.py"), "--output_dir", str(tmp_path / "run"), "--disable_tqdm", "true"]
    (command,) = Launch("cpu", "MULTI_CPU", num, flags).commands(script)
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=300)
    lines = done.stderr.rstrip().splitlines()
    reason = f"FolderError: {tmp_path / 'run'} is in use by another run: process 1 on "
    assert done.returncode == 1
    assert sum(line.startswith(reason) for line in lines) == num, done.stderr
    if num == 1:
        assert lines[-1].startswith(reason)
    else:  # the report's last block: the first process to fail, then a line of signs
        last = done.stderr[done.stderr.rindex("Root Cause") :]
        assert f"traceback : {reason}" in last
        assert set(lines[-1]) == {"="}
    assert (tmp_path / "run" / ".run.lock").read_bytes() == before
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".run.lock"]
