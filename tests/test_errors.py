"""How a recipe ends: its message last, in a launcher's report too; output that nobody can take ends nothing."""

import errno
import json
import logging
import os
import pty
import re
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import PackageNotFoundError

import pytest
from locations import ROOT
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from tqdm.auto import tqdm

from hf_ext.errors import ArgumentError, MissingDependencyError, TrainingStopped, exit_on_errors
from hf_ext.text import start_run_log


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


LINES = "for line in range(20_000): print('line', line, file=sys.{0}, flush=line % 100 == 0)"
PLAIN = f"import sys\n{LINES}"
OURS = f"import sys\nfrom hf_ext.errors import exit_on_errors\nwith exit_on_errors():\n    {LINES}\nopen('done', 'w')"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_that_nobody_reads_any_more_ends_a_plain_program_and_not_ours(tmp_path, stream):
    turned = "2>&1 >/dev/null" if stream == "stderr" else ""
    for code, ends in ((PLAIN, True), (OURS, False)):
        command = ["bash", "-c", f'set -o pipefail; "$@" {turned} | head -n 2', "-", sys.executable, "-c"]
        given = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run([*command, code.format(stream)], cwd=tmp_path, check=False, **given)
        assert done.stdout == "line 0\nline 1\n"
        assert (done.returncode != 0) == ends
    assert (tmp_path / "done").exists()


def broken_streams():
    """Descriptors that cannot be written to: a closed terminal, a full disk, a pipe that nobody reads."""
    master, terminal = pty.openpty()
    reader, pipe = os.pipe()
    os.close(master)
    os.close(reader)
    return terminal, os.open("/dev/full", os.O_WRONLY), pipe


def test_output_that_cannot_be_written_for_any_reason_is_dropped_and_the_other_stream_works(tmp_path, monkeypatch):
    for dead, alive in (("stdout", "stderr"), ("stderr", "stdout")):
        for descriptor in broken_streams():
            with monkeypatch.context() as patch, open(tmp_path / "alive", "w") as still:
                patch.setattr(sys, dead, os.fdopen(descriptor, "w", 1 if dead == "stderr" else -1))
                patch.setattr(sys, alive, still)
                with exit_on_errors():
                    for step in tqdm(range(3), file=getattr(sys, dead), mininterval=0):
                        print("line", file=getattr(sys, dead), flush=step == 1)
                        print("kept", file=still)
                    print("buffered to the end", file=getattr(sys, dead))
                getattr(sys, dead).close()
            assert (tmp_path / "alive").read_text().count("kept") == 3


def test_a_full_disk_is_still_told_where_the_output_is_dropped(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, open(tmp_path / "err", "w") as err:
        patch.setattr(sys, "stdout", os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"))
        patch.setattr(sys, "stderr", err)
        with pytest.raises(SystemExit) as end, exit_on_errors():  # noqa: PT012
            print("x", flush=True)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")
    assert end.value.code == 74
    assert "model.safetensors" in (tmp_path / "err").read_text()
