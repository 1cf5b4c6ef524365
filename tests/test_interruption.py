"""A recipe outside of training: signals end it as a stop does."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from locations import ROOT

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


def start(folder, body, **given):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_EXT_STATUS_FILE": str(folder / "statuses")}
    command = [sys.executable, "-c", HEAD + body]
    given = {"stderr": subprocess.PIPE, "text": True, **given}
    return subprocess.Popen(command, cwd=folder, env=environment, **given)


def signalled(folder, body, *names):
    """Status, stderr, and lines of its file of statuses, of a process that is signalled once it is ready."""
    with start(folder, body) as process:
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


def test_a_closed_terminal_is_a_stop_and_no_error_of_its_output(tmp_path):
    """As of a progress bar that is closed on the way out."""
    body = """
    try:
        ready(); time.sleep(30)
    finally:
        print("bar", file=sys.stderr, flush=True)
"""
    master, terminal = pty.openpty()
    with start(tmp_path, body, stdout=terminal, stderr=terminal) as process:
        while not (tmp_path / "ready").exists():
            time.sleep(0.02)
        os.close(terminal)
        os.close(master)
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == 75
