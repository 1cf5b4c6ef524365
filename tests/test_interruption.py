"""A recipe outside of training: signals end it as a stop does, in time, and output that nobody reads ends nothing."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from locations import ROOT

from hf_ext.errors import TrainingStopped, exit_on_errors

HEAD = """
import ctypes, os, signal, sys, time
from pathlib import Path
from hf_ext import interruption
from hf_ext.errors import exit_on_errors
interruption.PATIENCE_S = 1.0
def ready(): Path("ready").write_text("")
with exit_on_errors():
"""
WAITS = "    ready(); time.sleep(30)"
# What the kernel goes on with after a signal: a wait for others in native code.
STUCK = """
    signal.siginterrupt(signal.SIGTERM, False)
    ready()
    ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
"""
TIDIES = """
    try:
        ready(); time.sleep(30)
    finally:
        time.sleep(0.5)
        Path("tidied").write_text("")
"""
SWALLOWS = """
    try:
        ready(); time.sleep(30)
    except KeyboardInterrupt:
        time.sleep(30)
"""
FORKS = """
    child = os.fork()
    if child == 0:
        time.sleep(30)
    time.sleep(0.3)
    os.kill(child, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    time.sleep(1.5)
    print("went on")
"""


def start(folder, body, **given):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HEAD + body]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, **given)


def signalled(folder, body, *names):
    """Status, stderr and seconds of a process that is signalled once it is ready."""
    with start(folder, body) as process:
        ends = time.monotonic() + 30
        while not (folder / "ready").exists():
            assert time.monotonic() < ends
            time.sleep(0.02)
        time.sleep(0.1)  # from the file to the wait
        began = time.monotonic()
        for name in names:
            process.send_signal(getattr(signal, name))
            time.sleep(0.1)
        _, error = process.communicate(timeout=30)
        return process.returncode, error, time.monotonic() - began


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_each_signal_outside_of_training_ends_a_recipe_as_a_stop_does(tmp_path, name):
    status, error, _ = signalled(tmp_path, WAITS, name)
    assert (status, error.count("Traceback")) == (75, 0)
    assert f"Interrupted by {name}. Files that were saved are whole; the same command goes on" in error


@pytest.mark.parametrize("body", [STUCK, SWALLOWS])
def test_what_does_not_come_to_an_end_is_ended_in_time_with_the_same_status(tmp_path, body):
    status, _, seconds = signalled(tmp_path, body, "SIGTERM")
    assert status == 75
    assert 0.9 < seconds < 10


def test_machines_that_repeat_themselves_do_not_break_into_tidying_up(tmp_path):
    assert signalled(tmp_path, TIDIES, "SIGTERM", "SIGTERM", "SIGHUP")[0] == 75
    assert (tmp_path / "tidied").exists()


def test_a_signal_to_a_forked_process_is_its_own(tmp_path):
    with start(tmp_path, FORKS, stdout=subprocess.PIPE) as process:
        output, error = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "went on\n"), error


def test_nothing_is_left_of_it_and_handlers_of_others_stay(capsys):
    def own(number, frame):
        raise AssertionError

    threads, before = threading.active_count(), signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, own)
        with pytest.raises(SystemExit) as end, exit_on_errors():
            signal.raise_signal(signal.SIGHUP)
        assert end.value.code == TrainingStopped.exit_code
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "Interrupted by SIGHUP" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_that_nobody_reads_any_more_ends_nothing(tmp_path, stream):
    body = f"""
    for line in range(20_000):
        print("line", line, file=sys.{stream}, flush=line % 100 == 0)
    Path("done").write_text("")
"""
    command = [sys.executable, "-c", HEAD + body]
    turned = "2>&1 >/dev/null" if stream == "stderr" else ""
    shell = f'set -o pipefail; "$@" {turned} | head -n 2'
    given = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run(["bash", "-c", shell, "-", *command], cwd=tmp_path, check=False, **given)
    assert (done.returncode, done.stdout, done.stderr) == (0, "line 0\nline 1\n", "")
    assert (tmp_path / "done").exists()


def test_without_it_the_same_output_ends_the_process(tmp_path):
    command = [sys.executable, "-c", "for line in range(20_000): print('line', line)"]
    done = subprocess.run(["bash", "-c", 'set -o pipefail; "$@" | head -n 2', "-", *command], check=False, cwd=tmp_path)
    assert done.returncode != 0
